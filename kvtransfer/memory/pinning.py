"""Registers shared memory with a GPU's driver, so that the GPU's copy engines read and write it directly.

Unregistered memory is copied through a buffer of the driver, which keeps a CPU core busy, or through pinned
staging memory, which costs one more copy by the CPU.
"""

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ...cluster.process.log import fields
from ...engine.kv.host_registration import register, unregister

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Unpin = Callable[[], None]
Pin = Callable[[Bytes], Unpin | None]


def no_pin(memory: Bytes) -> Unpin | None:
    """A `Pin` for pages on the CPU: registers nothing."""
    return None


def pin(memory: Bytes, device: torch.device, *, is_read_only: bool) -> Unpin | None:
    """Registers `memory` (uint8) with the driver of `device`. The returned function unregisters it.

    Call that function before the memory is unmapped. Returns None if the driver refuses; copies of the memory
    then still work, but slower.
    """
    address = memory.__array_interface__["data"][0]
    code = register(address, memory.size, device, is_read_only=is_read_only)
    if code:
        logger.warning(
            "the GPU's driver pins no shared memory", extra=fields(bytes=memory.size, cuda_error=code)
        )
        return None
    return partial(unregister, address, device)
