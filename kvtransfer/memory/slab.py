"""Slabs: anonymous shared memory cut into equal slots. Prefill writes the slots, decode reads them.

A slab is a memfd. It has no name, so it disappears with both processes, even after a crash. Its size is
sealed, so reading it never faults. New writable mappings are sealed off, so only prefill writes.

Prefill passes the descriptor over a unix socket of sequenced packets. The socket has an abstract address of
128 random bits, which decode sent to prefill over their own link. An abstract address leaves no file behind
and exists in decode's network namespace only, so a connection proves that both processes can share memory.
Each side asks the kernel for the other's user and accepts only its own user. The connection stays open while
the slab is used: its end means that the peer has gone.

References: memfd_create(2), fcntl(2) "File Sealing", unix(7) "SCM_RIGHTS" and "SO_PEERCRED".
"""

import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from ...cluster.errors import BatonError
from .pinning import Bytes, Pin, Unpin

# linux/fcntl.h; some Pythons and platforms lack these names
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = (
    0x01,
    0x02,
    0x04,
    0x10,
)  # the last one exists since Linux 5.1
SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE
BACKLOG = 64
TOKEN_BYTES = 32  # hex
NO_FD = -1
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class SlabError(BatonError):
    """Memory cannot be shared; the message gives the reason."""


class Slab:
    """Prefill's end of a slab: `num_slots` writable slots of `slot_bytes` bytes."""

    handle = b""  # its descriptor crosses a unix socket
    has_wire = False

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """Allocates all memory, so that no later write faults. Raises SlabError if there is not enough."""
        self.id = secrets.token_hex(16)
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        size = num_slots * slot_bytes
        try:
            self._fd = os.memfd_create("baton-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SlabError(f"no shared memory: {error.strerror}") from None
        try:
            os.posix_fallocate(self._fd, 0, size)
            self._map = mmap.mmap(self._fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(self._fd, F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(self._fd)
            raise SlabError(f"no {size >> 20} MiB of shared memory: {error.strerror}") from None
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._unpin: Unpin | None = None

    def __repr__(self) -> str:
        return f"Slab({self.id[:8]}, {self.num_slots} x {self.slot_bytes})"

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.num_slots * self.slot_bytes

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU may write the slots."""
        return self._unpin is not None

    def pin(self, pin: Pin) -> None:
        """Registers the slots for writes by a GPU, if the driver accepts them, until the slab is closed."""
        self._unpin = pin(self._bytes)

    def slot(self, index: int) -> Bytes:
        """The bytes of a slot, uint8 `[slot_bytes]`."""
        return self._bytes[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def hand_over(self, address: str, token: str) -> socket.socket:
        """Passes the descriptor to decode at `address`, once.

        Returns the connection. Raises SlabError if decode is out of reach.
        """
        connection = hand_over(address, token, [self._fd])
        os.close(self._fd)  # the mapping stays
        self._fd = -1
        return connection

    def close(self) -> None:
        """Unmaps the memory. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._bytes = np.empty(0, dtype=np.uint8)
        _unmap(self._map)


class MappedSlab:
    """Decode's end of a slab: the same slots, read-only."""

    def __init__(
        self, slab_id: str, num_slots: int, slot_bytes: int, fd: int, connection: socket.socket
    ) -> None:
        """Maps `fd` and closes it.

        Raises SlabError, after closing `connection`, unless `fd` is a sealed slab of this user and of exactly
        this size.
        """
        self.id = slab_id
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.connection = connection
        try:
            _check_slab(fd, num_slots * slot_bytes)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(fd, num_slots * slot_bytes, flags, mmap.PROT_READ)
        except OSError as error:
            connection.close()
            raise SlabError(f"the slab cannot be mapped: {error.strerror}") from None
        except SlabError:
            connection.close()
            raise
        finally:
            os.close(fd)
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._unpin: Unpin | None = None

    def __repr__(self) -> str:
        return f"MappedSlab({self.id[:8]}, {self.num_slots} x {self.slot_bytes})"

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU may read the slots."""
        return self._unpin is not None

    def pin(self, pin: Pin) -> None:
        """Registers the slots for reads by a GPU, if the driver accepts them, until the slab is closed."""
        self._unpin = pin(self._bytes)

    def block(self, slot: int, size: int) -> Bytes | None:
        """The first `size` bytes of a slot, uint8; None if the slot does not exist or is shorter.

        Prefill may change the bytes at any time.
        """
        if not (0 <= slot < self.num_slots and 0 <= size <= self.slot_bytes):
            return None
        return self._bytes[slot * self.slot_bytes : slot * self.slot_bytes + size]

    def close(self) -> None:
        """Unmaps the memory and closes the connection, which tells prefill. Idempotent."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._bytes = np.empty(0, dtype=np.uint8)
        _unmap(self._map)
        self.connection.close()


class SlabDoor:
    """Decode's listener for the descriptors of slabs."""

    def __init__(self) -> None:
        """Raises SlabError if this process may not listen on a unix socket."""
        self.address = secrets.token_hex(16)
        self._arrived: dict[str, tuple[int, socket.socket]] = {}  # token -> descriptor, NO_FD without one
        self._silent: list[socket.socket] = []  # accepted before their token was sent
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.setblocking(False)
            self._listener.bind(_abstract(self.address))
            self._listener.listen(BACKLOG)
        except OSError as error:
            raise SlabError(f"no unix socket for shared memory: {error.strerror}") from None

    def __repr__(self) -> str:
        return f"SlabDoor({self.address[:8]}, arrived={len(self._arrived)})"

    def take(
        self,
        token: str,
        is_expected: Callable[[str], bool],
        comes_alone: Callable[[str], bool] = lambda token: False,
    ) -> tuple[int, socket.socket] | None:
        """The descriptor that arrived with `token`, and its connection; None if it has not arrived.

        For tokens that come alone, as for a slab in device memory, NO_FD stands for the descriptor. Closes
        descriptors of other users and of tokens that are not expected.
        """
        self._accept(is_expected, comes_alone)
        return self._arrived.pop(token, None)

    def sweep(self, is_expected: Callable[[str], bool], comes_alone: Callable[[str], bool]) -> None:
        """Closes what arrived and is not expected any more: prefill keeps the slab until then."""
        self._accept(is_expected, comes_alone)
        for token in [token for token in self._arrived if not is_expected(token)]:
            _let_go(*self._arrived.pop(token))

    def close(self) -> None:
        """Closes the listener and all descriptors that were not taken. Idempotent."""
        self._listener.close()
        for fd, connection in self._arrived.values():
            _let_go(fd, connection)
        self._arrived.clear()
        for connection in self._silent:
            connection.close()
        self._silent.clear()

    def _accept(self, is_expected: Callable[[str], bool], comes_alone: Callable[[str], bool]) -> None:
        silent, self._silent = self._silent, []
        with suppress(BlockingIOError):
            while True:
                silent.append(self._listener.accept()[0])
        for connection in silent:
            self._admit(connection, is_expected, comes_alone)
        for connection in self._silent[:-BACKLOG]:
            connection.close()
        del self._silent[:-BACKLOG]

    def _admit(
        self,
        connection: socket.socket,
        is_expected: Callable[[str], bool],
        comes_alone: Callable[[str], bool],
    ) -> None:
        fds: list[int] = []
        try:
            connection.setblocking(False)
            _check_peer(connection)
            text, fds, _, _ = socket.recv_fds(connection, TOKEN_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            token = text.decode("ascii", "replace")
            is_whole = len(fds) == (0 if comes_alone(token) else 1)
            if is_whole and is_expected(token) and token not in self._arrived:
                self._arrived[token] = (fds[0] if fds else NO_FD, connection)
                return
        except BlockingIOError:  # prefill has connected and sends the token next
            self._silent.append(connection)
            return
        except (
            OSError,
            SlabError,
        ):  # an unknown process, or a peer that died meanwhile; the peer's grant will find no descriptor
            pass
        for fd in fds:
            os.close(fd)
        connection.close()


def hand_over(address: str, token: str, fds: Sequence[int]) -> socket.socket:
    """Passes `token` and `fds` to decode at `address`.

    Returns the connection. Raises SlabError if decode is out of reach.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_abstract(address))
        _check_peer(connection)
        socket.send_fds(connection, [token.encode()], list(fds))
    except OSError as error:
        connection.close()
        is_elsewhere = error.errno == errno.ECONNREFUSED
        reason = "it is on another host, or its network is" if is_elsewhere else error.strerror or str(error)
        raise SlabError(f"decode cannot be reached for shared memory: {reason}") from None
    except SlabError:
        connection.close()
        raise
    return connection


def is_alive(connection: socket.socket) -> bool:
    """Whether the other end of a hand-over's connection still exists, or its last words are unread."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _let_go(fd: int, connection: socket.socket) -> None:
    if fd != NO_FD:
        os.close(fd)
    connection.close()


def _abstract(address: str) -> str:
    return f"\0baton-{address}"


def _check_peer(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, uid, _ = CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise SlabError(f"the peer runs as user {uid}, this process as {os.geteuid()}")


def _check_slab(fd: int, size: int) -> None:
    """Raises SlabError unless `fd` is a sealed slab of this user and of `size` bytes.

    The seals are checked first: behind them, the other properties cannot change.
    """
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        raise SlabError("the slab is no sealed memory") from None
    status = os.fstat(fd)
    if seals & SEALS != SEALS or not stat.S_ISREG(status.st_mode):
        raise SlabError("the slab is not sealed")
    if status.st_uid != os.geteuid():
        raise SlabError(f"the slab belongs to user {status.st_uid}, this process runs as {os.geteuid()}")
    if status.st_size != size:
        raise SlabError(f"the slab has {status.st_size} bytes, {size} were announced")


def _unmap(mapping: mmap.mmap) -> None:
    with suppress(BufferError):  # a view of a slot still exists; the mapping ends with the last one
        mapping.close()
