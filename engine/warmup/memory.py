"""Takes the device memory that serving will need from the driver before the engine is ready."""

import logging

import torch

logger = logging.getLogger(__name__)

MIB = 1 << 20
SLACK = 256 * MIB  # beyond the largest rehearsed forward: serving mixes sizes, which fragments torch's pool
SMALL_SLACK = 32 * MIB  # the same for blocks of up to 1 MiB, which torch keeps apart
FREE_SHARE = 0.5  # at most this share of the free memory, which other libraries need, too


def reserve_memory(device: torch.device, planned: int) -> int:
    """Moves `planned` bytes and some slack from the driver into torch's pool, for later allocations.

    Returns the bytes; fewer where the device has no room, 0 on a CPU. Without it, an allocation while serving
    may wait for the driver, which may wait for the whole device.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    wanted = min(planned + SLACK, int(free * FREE_SHARE))
    small = [torch.empty(MIB, dtype=torch.uint8, device=device) for _ in range(SMALL_SLACK // MIB)]
    try:
        large = torch.empty(wanted, dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        logger.warning("no %d MiB for later allocations; they may wait for the driver", wanted // MIB)
        return 0
    del small, large  # back to torch's pool, which keeps the memory
    return wanted
