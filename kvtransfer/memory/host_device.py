"""Shared memory of this host in the place of a device's memory, so that tests of `cuda_slab` need no GPU.

A handle names a memfd of another process of this user; the kernel opens it through /proc. As on a GPU, memory
stays allocated while a process maps it, moves run in order and later than they are started, and a process
that exports memory and dies leaves it to those that have it open.
"""

import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from ...engine.kv.page_order import PageOrder
from ...kernels.move_rows import ROW_FIELDS, move_rows_reference
from ...kernels.move_spans import move_spans_reference
from .device import HANDLE_BYTES, Spans, longest_of, run_digests
from .slab import SlabError

MAGIC = b"baton host device\0"
HANDLE = struct.Struct(f"={len(MAGIC)}sqqQ")  # mark, process, descriptor, inode


@dataclass
class HostMove:
    """A move of a `HostDevice`, done at the `polls`-th poll; see `Move`."""

    owner: "HostDevice"
    runs: Sequence[Spans]
    pages: list[int]
    is_write: bool
    polls: int
    digests: list[int] = field(default_factory=list)
    is_done: bool = False

    @property
    def is_held(self) -> bool:
        return self.polls > 1

    def poll(self) -> list[int] | None:
        self.polls -= 1
        if self.polls <= 0:
            self.owner.run_until(self)
        return self.digests if self.is_done else None

    def wait(self) -> list[int]:
        self.owner.run_until(self)
        return self.digests


@dataclass
class HostPrepared:
    """A prepared move of a `HostDevice`; see `Prepared`."""

    owner: "HostDevice"
    run: Spans

    def start(self, pages: Iterable[int]) -> HostMove:
        self.owner.num_prepared -= 1
        return self.owner.move([self.run], pages, is_write=True)

    def discard(self) -> None:
        self.owner.num_prepared -= 1


@dataclass
class _Memory:
    """A mapping of shared memory."""

    fd: int  # -1 if another process exported it
    map: mmap.mmap
    address: int
    num_opens: int = 1


class HostDevice:
    """A device of shared memory; see `Device`. A move is done at its `polls`-th poll, counted from 1."""

    def __init__(self, order: PageOrder, *, polls: int = 1, max_bytes: int = 1 << 40) -> None:
        self.polls = polls
        self.num_prepared, self.max_prepared = 0, 4  # moves that are neither started nor discarded
        self._order, self._max_bytes = order, max_bytes
        self._owned: dict[int, _Memory] = {}
        self._opened: dict[bytes, _Memory] = {}
        self._queue: deque[HostMove] = deque()
        self._early: deque[HostMove] = deque()

    def __repr__(self) -> str:
        moves = len(self._queue) + len(self._early)
        return f"HostDevice(owned={len(self._owned)}, opened={len(self._opened)}, moves={moves})"

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated or opened here now."""
        return sum(len(memory.map) for memory in (*self._owned.values(), *self._opened.values()))

    def allocate(self, size: int) -> int:
        """As `Device.allocate`."""
        if size > self._max_bytes:
            raise SlabError(f"no {size} bytes of device memory")
        fd = os.memfd_create("baton-slab-device", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            memory = _mapped(fd, size)
        except OSError as error:
            os.close(fd)
            raise SlabError(f"no {size} bytes of device memory: {error.strerror}") from None
        memory.fd = fd
        self._owned[memory.address] = memory
        return memory.address

    def export(self, address: int) -> bytes:
        """As `Device.export`."""
        fd = self._owned[address].fd
        return HANDLE.pack(MAGIC, os.getpid(), fd, os.fstat(fd).st_ino).ljust(HANDLE_BYTES, b"\0")

    def free(self, address: int) -> None:
        """As `Device.free`."""
        self.finish()
        memory = self._owned.pop(address)
        _unmapped(memory)
        os.close(memory.fd)

    def open(self, handle: bytes, size: int) -> int:
        """As `Device.open`."""
        known = self._opened.get(handle)
        if known is not None:
            known.num_opens += 1
            return known.address
        if len(handle) != HANDLE_BYTES or not handle.startswith(MAGIC):
            raise SlabError("invalid argument")
        _, process, descriptor, inode = HANDLE.unpack(handle[: HANDLE.size])
        try:
            fd = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SlabError(f"the memory cannot be opened: {error.strerror}") from None
        try:
            if os.fstat(fd).st_ino != inode:
                raise SlabError("the memory has gone")
            self._opened[handle] = memory = _mapped(fd, size)
        except OSError as error:
            raise SlabError(f"the memory cannot be mapped: {error.strerror}") from None
        finally:
            os.close(fd)
        return memory.address

    def close(self, handle: bytes) -> None:
        """As `Device.close`."""
        memory = self._opened[handle]
        memory.num_opens -= 1
        if memory.num_opens == 0:
            self.finish()
            del self._opened[handle]
            _unmapped(memory)

    def move(
        self,
        runs: Sequence[Spans],
        pages: Iterable[int],
        *,
        is_write: bool,
        is_early: bool = False,
        longest: int | None = None,
    ) -> HostMove:
        """As `Device.move`."""
        # the kernel of a GPU would leave out the words behind them
        assert longest is None or longest_of(runs) <= longest, f"spans of {longest_of(runs)} words"
        move = HostMove(self, runs, list(pages), is_write, self.polls)
        (self._early if is_early else self._queue).append(move)
        return move

    def prepare(self, run: Spans, *, longest: int) -> HostPrepared | None:
        """As `Device.prepare`."""
        if self.num_prepared >= self.max_prepared:
            return None
        assert longest_of([run]) <= longest, f"spans of {longest_of([run])} words"
        self.num_prepared += 1
        return HostPrepared(self, run)

    def die(self) -> None:
        """Ends as a killed process does: nothing is mapped any more, and no move runs."""
        self._queue.clear()
        self._early.clear()
        for memory in (*self._owned.values(), *self._opened.values()):
            _unmapped(memory)
            if memory.fd >= 0:
                os.close(memory.fd)
        self._owned.clear()
        self._opened.clear()

    def finish(self) -> None:
        """Runs every move that was started."""
        for queue in (self._queue, self._early):
            if queue:
                self.run_until(queue[-1])

    def run_until(self, last: HostMove) -> None:
        """Runs the moves of its stream up to `last`, in order."""
        queue = self._early if any(move is last for move in self._early) else self._queue
        while not last.is_done:
            self._run(queue.popleft())

    def _run(self, move: HostMove) -> None:
        self._order.wait(move.pages)
        for page in move.pages:
            self._order.touch(page, is_write=move.is_write)
        for run in move.runs:
            sums = torch.empty(1, 1, dtype=torch.int64)
            copy = move_rows_reference if run.shape[1] == ROW_FIELDS else move_spans_reference
            copy(torch.from_numpy(run), torch.tensor([[0, len(run), 1, 0]]), sums)
            move.digests += run_digests(sums.numpy())
        move.is_done = True


def _mapped(fd: int, size: int) -> _Memory:
    """Raises OSError, and never maps memory beyond the end of the file, which would fault."""
    if os.fstat(fd).st_size < size:
        raise OSError(0, "it is shorter than announced")
    mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
    view = np.frombuffer(mapping, dtype=np.uint8)
    return _Memory(-1, mapping, int(view.__array_interface__["data"][0]))


def _unmapped(memory: _Memory) -> None:
    with suppress(BufferError):  # a span's view still exists; the mapping ends with it
        memory.map.close()
