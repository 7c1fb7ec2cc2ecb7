"""Slabs in the memory of a device: prefill's end, which owns the memory, and decode's, which has it mapped.

CUDA leaves it undefined to free memory that another process has mapped. Prefill therefore frees a slab only
after decode closed it or has gone: decode closes the unix connection of the hand-over after it closed the
mapping, and the kernel closes it for a dead process. Until then the slab stays allocated, at most until
prefill's own process ends.
"""

import secrets
import socket
from contextlib import suppress

from .device import Device
from .slab import hand_over, is_alive


class DeviceSlab:
    """Prefill's end of a slab: `num_slots` slots of `slot_bytes` bytes of zeroed device memory."""

    has_wire = True

    def __init__(self, device: Device, num_slots: int, slot_bytes: int, connection: socket.socket) -> None:
        """Takes over `connection`. Raises SlabError, after closing it, without memory or a handle to it."""
        self.id = secrets.token_hex(16)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.connection = connection
        self._device, self._address, self._is_given_up = device, 0, False
        try:
            self._address = device.allocate(self.size)
            self.handle = device.export(self._address)
        except BaseException:
            connection.close()
            if self._address:
                device.free(self._address)
            raise

    def __repr__(self) -> str:
        return f"DeviceSlab({self.id[:8]}, {self.num_slots} x {self.slot_bytes})"

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.num_slots * self.slot_bytes

    @property
    def is_mapped(self) -> bool:
        """Whether decode may still have the slab mapped."""
        if self._is_given_up:  # nobody reads what decode said meanwhile
            with suppress(OSError):
                while self.connection.recv(1):
                    pass
        return is_alive(self.connection)

    def slot(self, index: int) -> int:
        """The address of a slot."""
        return self._address + index * self.slot_bytes

    def give_up(self) -> None:
        """Tells decode to close the slab. Idempotent."""
        self._is_given_up = True
        with suppress(OSError):  # decode has gone
            self.connection.shutdown(socket.SHUT_WR)

    def free(self) -> None:
        """Frees the memory, which is not mapped any more."""
        self._device.free(self._address)
        self.connection.close()


class MappedDeviceSlab:
    """Decode's end of a slab."""

    is_pinned = False

    def __init__(
        self,
        device: Device,
        slab_id: str,
        num_slots: int,
        slot_bytes: int,
        handle: bytes,
        connection: socket.socket,
    ) -> None:
        """Maps the memory. Raises SlabError, after closing `connection`, if the device refuses."""
        self.id = slab_id
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.connection = connection
        self._device, self._handle, self._is_open = device, handle, True
        try:
            self._address = device.open(handle, num_slots * slot_bytes)
        except BaseException:
            connection.close()
            raise

    def __repr__(self) -> str:
        return f"MappedDeviceSlab({self.id[:8]}, {self.num_slots} x {self.slot_bytes})"

    def slot(self, index: int, size: int) -> int | None:
        """The address of `size` bytes in a slot and its neighbours; None if the slab has no such slots."""
        if not (0 <= index < self.num_slots and 0 <= size <= (self.num_slots - index) * self.slot_bytes):
            return None
        return self._address + index * self.slot_bytes

    def close(self) -> None:
        """Unmaps the memory after its moves, and then closes the connection. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._device.close(self._handle)
        self.connection.close()


def reached(address: str, token: str) -> socket.socket:
    """The connection to decode at `address`, over which `token` went.

    It proves that both run on one host as one user. Raises SlabError if decode is out of reach.
    """
    return hand_over(address, token, [])
