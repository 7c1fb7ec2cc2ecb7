"""Sums of small tensors over the GPUs of a worker by one kernel that reads the peers' memory.

Each rank copies its part into memory that the others have mapped, waits for them on the device, and adds all
parts itself ("one-shot"). NCCL moves less data for large tensors of more than two ranks, but takes longer to
begin. The kernel and the memory are those of torch's symmetric memory, without NVLink multicast. All ranks
get the same bits, which a trial makes sure of: each routes its rows to experts by itself, and near a tie
ranks whose rows differ in a bit would choose different ones.
"""

import logging
import zlib

import torch
import torch.distributed._symmetric_memory as symmetric

from .group import TensorGroup

logger = logging.getLogger(__name__)

# Above, NCCL is faster. Two ranks move as much as NCCL does, whatever the size; each further rank reads more.
MAX_BYTES = 512 << 10
MAX_BYTES_OF_TWO = 4 << 20
ALIGNMENT = 16  # bytes, of what the kernel reads at once
SUPPORTED = (torch.bfloat16, torch.float32)
TRIAL = 4096  # elements of the sum that is compared with NCCL's before the kernel is used


class PeerSum:
    """Sums on `device` over the ranks of `group`, which all make one together. Raises what torch raises where
    GPUs cannot map each other's memory.
    """

    def __init__(self, group: TensorGroup, device: torch.device) -> None:
        self._name = group.name
        self.max_bytes = MAX_BYTES_OF_TWO if group.size == 2 else MAX_BYTES
        self._memory = symmetric.empty(self.max_bytes, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._memory, group.name)  # type: ignore[arg-type]

    def takes(self, x: torch.Tensor) -> bool:
        """Whether this kernel sums tensors like `x`; equal on all ranks."""
        num_bytes = x.numel() * x.element_size()
        return (
            x.is_cuda
            and x.dtype in SUPPORTED
            and 0 < num_bytes <= self.max_bytes
            and num_bytes % ALIGNMENT == 0
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the contiguous `x` over all ranks."""
        part = self._memory[: x.numel() * x.element_size()].view(x.dtype)
        # torch's kernel that copies, too, signals the peers before all warps of a block have copied
        part.copy_(x.view(-1))
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)
        return found.view(x.shape)


def peer_sum(group: TensorGroup, device: torch.device) -> PeerSum | None:
    """The sum of small tensors for the ranks of `group`; None, with one log line, where it does not work.

    All ranks call it together and get one, or none does.
    """
    made, fault, digest = None, "", 0
    try:
        made = PeerSum(group, device)
        found = made.sum(torch.full((TRIAL,), float(group.rank + 1), device=device))
        generator = torch.Generator(device).manual_seed(group.rank)
        rows = made.sum(torch.randn(TRIAL, generator=generator, device=device).bfloat16())
        if not bool((found == group.size * (group.size + 1) / 2).all()):
            fault = "a trial gave a wrong sum"
        digest = zlib.crc32(rows.view(torch.uint8).cpu().numpy().tobytes())
    except (RuntimeError, AttributeError, OSError, ValueError) as error:
        fault = str(error).splitlines()[0] if str(error) else type(error).__name__
    do_all = group.least(int(not fault))
    if do_all and group.least(digest) == group.most(digest):
        return made
    other = "ranks got different bits in a trial" if do_all else "another rank cannot map the peers"
    logger.warning("small sums over GPUs take NCCL, too: %s", fault or other)
    return None
