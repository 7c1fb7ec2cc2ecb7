"""Reads files as fast as plain system calls do, with several threads, and drops them from the page cache."""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

PIECE_BYTES = 16 << 20  # as the loader reads
ALIGNMENT = 4096  # of offsets and sizes of direct reads


@dataclass(frozen=True, kw_only=True)
class PlainRead:
    """`num_bytes` in `total_s` seconds."""

    num_bytes: int
    total_s: float


def drop_cached(files: Sequence[Path]) -> None:
    """Writes changed pages of `files` and drops all from the page cache. A tmpfs keeps them."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_plainly(
    files: Sequence[Path], num_threads: int, *, is_direct: bool, is_kept: bool = False
) -> PlainRead:
    """Reads `files` once, in pieces, each thread into a buffer of its own. `is_direct`: without page cache.
    `is_kept`: each piece into new memory, which is kept to the end.

    Raises OSError for a file that cannot be read so.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    opened = [os.open(file, flags) for file in files]
    waiting: SimpleQueue[tuple[int, int]] = SimpleQueue()
    for file, descriptor in zip(files, opened, strict=True):
        for first in range(0, file.stat().st_size, PIECE_BYTES):
            waiting.put((descriptor, first))
    readers = [_Reader(waiting, is_kept) for _ in range(num_threads)]
    try:
        started = time.monotonic()
        threads = [threading.Thread(target=reader.run, daemon=True) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total_s = time.monotonic() - started
    finally:
        for descriptor in opened:
            os.close(descriptor)
    for reader in readers:
        reader.close()
        if reader.fault is not None:
            raise reader.fault
    return PlainRead(num_bytes=sum(reader.done for reader in readers), total_s=total_s)


class _Reader:
    """The work of one thread. `done` counts bytes; `fault` ends it."""

    def __init__(self, waiting: "SimpleQueue[tuple[int, int]]", is_kept: bool) -> None:
        self._waiting, self._is_kept = waiting, is_kept
        self._buffers: list[mmap.mmap] = []
        self.done = 0
        self.fault: OSError | None = None

    def run(self) -> None:
        """Reads pieces until none is left."""
        try:
            while True:
                piece = self._waiting.get_nowait()
                if self._is_kept or not self._buffers:
                    self._buffers.append(mmap.mmap(-1, PIECE_BYTES))  # aligned to a page
                with memoryview(self._buffers[-1]) as buffer:
                    self._read_piece(*piece, buffer)
        except Empty:
            return
        except OSError as error:
            self.fault = error

    def close(self) -> None:
        """Frees the buffers."""
        for buffer in self._buffers:
            buffer.close()

    def _read_piece(self, descriptor: int, first: int, buffer: memoryview) -> None:
        at = 0
        while at < PIECE_BYTES and at % ALIGNMENT == 0:  # a read that ends elsewhere has met the end
            count = os.preadv(descriptor, [buffer[at:]], first + at)
            self.done += count
            if not count:
                return
            at += count


def file_system_of(path: Path) -> str:
    """The type of the file system that `path` is on ("ext4"); "" if the kernel does not say."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    resolved = path.resolve()
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        place = Path(fields.split()[4])
        if (place == resolved or place in resolved.parents) and len(place.parts) > longest:
            found, longest = rest.split()[0], len(place.parts)
    return found
