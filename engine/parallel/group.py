"""The ranks of a tensor-parallel worker as one process group, and the collectives of a forward over it.

`SOLO` is the group of a worker with one rank, whose collectives do nothing. A group of several has gloo for
tensors and numbers of the host and NCCL for tensors of GPUs. Ranks meet through a file of the worker and
talk over the loopback address, since a worker is on one host.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ...kernels.collectives import gather_columns, group_of, share_rank_0, sum_ranks
from ..errors import RanksApart
from .rank_cards import name_host

logger = logging.getLogger(__name__)

# Read by the libraries when a group is made. NVLink multicast is not used.
LIBRARY_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
)


# For the others to come to the vote of a rank that has failed: they have at most the rest of a capture to do.
# A rank in a collective that waits for the failed one does not come.
FAILED_S = 60.0
SLOW_S = 30.0  # a vote that takes longer has a line of the log: the other ranks may never come to it


class SmallSum(Protocol):
    """A faster sum over all ranks for some tensors."""

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it sums tensors like `x`; equal on all ranks."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the contiguous `x` over all ranks."""


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Rank `rank` of `size`. `name`: the process group in torch.distributed; "" with one rank.

    All ranks must call the same methods with the same shapes in the same order. `small`: the sum of small
    tensors; None: all take the process group. `votes`: a process group of the hosts for `agree`, so that a
    vote is not taken for a part of a forward.
    """

    rank: int = 0
    size: int = 1
    name: str = ""
    small: SmallSum | None = None
    votes: str = ""

    @property
    def is_solo(self) -> bool:
        """Whether there is one rank only."""
        return self.size == 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks; `x` may be overwritten."""
        if self.is_solo:
            return x
        x = x.contiguous()
        if self.small is not None and self.small.takes(x):
            return self.small.sum(x)
        sum_ranks(x, self.name)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The columns `[T, C]` of all ranks side by side, `[T, size * C]`."""
        return x if self.is_solo else gather_columns(x, self.size, self.name)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`, of which all ranks know shape and dtype; a contiguous `x` is overwritten."""
        if self.is_solo:
            return x
        x = x.contiguous()
        share_rank_0(x, self.name)
        return x

    def rank_0(self, value: int) -> int:
        """Rank 0's value of a number of the host."""
        return value if self.is_solo else int(self.share(torch.tensor([value])).item())

    def least(self, value: int) -> int:
        """The smallest of all ranks' values of a number of the host."""
        return min(self._all(value))

    def most(self, value: int) -> int:
        """The largest of all ranks' values of a number of the host."""
        return max(self._all(value))

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks; waits for them, with a "no" up to FAILED_S. Logs a wait of SLOW_S.

        Raises RanksApart if they do not come.
        """
        if self.is_solo:
            return is_so
        found, options = torch.tensor([int(is_so)]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        if not is_so:
            options.timeout = timedelta(seconds=FAILED_S)
        try:
            vote = group_of(self.votes).allreduce([found], options)
            if not _ends_soon(vote):
                logger.warning(
                    "rank %d has waited %g s for a vote of the other ranks: one still works, or waits on its "
                    "GPU for a sum that this rank has not begun",
                    self.rank,
                    SLOW_S,
                )
            vote.wait()
        except RuntimeError as error:
            cause = str(error).splitlines()[0] if is_so else f"no vote of theirs for {FAILED_S:g} s"
            raise RanksApart(f"rank {self.rank} cannot agree with the others: {cause}") from error
        return bool(found.item())

    def _all(self, value: int) -> Sequence[int]:
        return self.gather(torch.tensor([[value]]))[0].tolist()

    def __repr__(self) -> str:
        return f"<TensorGroup rank {self.rank} of {self.size}>"


SOLO = TensorGroup()


def _ends_soon(work: dist.Work) -> bool:
    """Whether `work` ends within SLOW_S, with an error too, which a further wait raises."""
    try:
        work.wait(timedelta(seconds=SLOW_S))
    except RuntimeError:
        return work.is_completed()
    return True


def join_group(
    meeting: Path, rank: int, size: int, device: torch.device, *, timeout_s: float = 600.0
) -> TensorGroup:
    """Joins the process group of `size` ranks that meet in the file `meeting`; waits for all of them.

    Its name is that of torch.distributed's default group, so a process has one. A collective on a CPU that
    waits longer than `timeout_s` raises RuntimeError.
    """
    store = FileStore(str(meeting), size)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
        name_host(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    assert dist.group.WORLD is not None
    votes = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return TensorGroup(
        rank=rank, size=size, name=str(dist.group.WORLD.group_name), votes=str(votes.group_name)
    )


def leave_group(group: TensorGroup) -> None:
    """Ends the process group of this process; a no-op for one rank.

    On GPUs it waits for the other ranks to do so.
    """
    if not group.is_solo and dist.is_initialized():
        dist.destroy_process_group()
