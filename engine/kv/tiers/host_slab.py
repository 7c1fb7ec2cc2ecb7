"""Host memory of equal slots, one page each, which a GPU's copy engines read and write directly.

The memory is a private mapping, so that it begins at a page of the system: reads and writes of a disk without
its cache need that. torch's allocator of pinned memory would round its size up to a power of two.
"""

import logging
import mmap
import weakref
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from ..host_registration import register, unregister

logger = logging.getLogger(__name__)

ALIGNMENT = 4096  # of slots; a multiple of the logical blocks of all common disks
Bytes = npt.NDArray[np.uint8]


def slot_bytes_of(page_bytes: int) -> int:
    """Bytes of the slot of a page."""
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


class HostSlab:
    """`slots` uint8 `[num_slots, slot_bytes]`, registered with the driver of `device` if it is a GPU."""

    def __init__(self, num_slots: int, page_bytes: int, device: torch.device) -> None:
        """Raises OSError, if there is not so much memory."""
        self.page_bytes = page_bytes
        self.slot_bytes = slot_bytes_of(page_bytes)
        self._map = mmap.mmap(-1, num_slots * self.slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # only faster
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.slots: Bytes = np.frombuffer(self._map, dtype=np.uint8).reshape(num_slots, self.slot_bytes)
        self.is_pinned = device.type == "cuda" and self._pin(device)

    def __repr__(self) -> str:
        pinned = ", pinned" * self.is_pinned
        return f"<HostSlab {self.slots.shape[0]} slots x {self.slot_bytes} B{pinned}>"

    def page(self, slot: int) -> Bytes:
        """The bytes of the page in a slot."""
        return self.slots[slot, : self.page_bytes]

    def whole(self, slot: int) -> memoryview:
        """The whole slot."""
        return memoryview(self._map)[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def _pin(self, device: torch.device) -> bool:
        address = self.slots.__array_interface__["data"][0]
        code = register(address, self.slots.nbytes, device)
        if code:
            logger.warning(
                "the GPU's driver pins no memory for the host tier (CUDA error %d): copies are slower", code
            )
            return False
        weakref.finalize(self, unregister, address, device)
        return True
