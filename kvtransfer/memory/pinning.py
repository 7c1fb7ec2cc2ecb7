"""Registers shared memory with a GPU's driver, so that the GPU's copy engines read and write it directly.

Unregistered memory is copied through a buffer of the driver, which keeps a CPU core busy, or through pinned
staging memory, which costs one more copy by the CPU.

Reference: CUDA Runtime API, "cudaHostRegister".
"""

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ...cluster.process.log import fields

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Unpin = Callable[[], None]
Pin = Callable[[Bytes], Unpin | None]

PORTABLE, READ_ONLY = (
    0x01,
    0x08,
)  # driver_types.h: for every context of the process; for mappings without PROT_WRITE


def no_pin(memory: Bytes) -> Unpin | None:
    """A `Pin` for pages on the CPU: registers nothing."""
    return None


def pin(memory: Bytes, device: torch.device, *, is_read_only: bool) -> Unpin | None:
    """Registers `memory` (uint8) with the driver of `device`. The returned function unregisters it.

    Call that function before the memory is unmapped. Returns None if the driver refuses; copies of the memory
    then still work, but slower.
    """
    address = memory.__array_interface__["data"][0]
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        code = int(
            cudart.cudaHostRegister(address, memory.size, PORTABLE | (READ_ONLY if is_read_only else 0))
        )
    if code:
        logger.warning(
            "the GPU's driver pins no shared memory", extra=fields(bytes=memory.size, cuda_error=code)
        )
        return None
    return partial(_unpin, address, device)


def _unpin(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
