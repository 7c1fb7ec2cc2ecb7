"""A small thread pool that copies and digests large buffers, because one core is slower than a GPU's link.

torch divides a copy among all cores and waits for the slowest. That takes milliseconds where two workers and
their router share a host. This pool has few threads, and any idle thread takes the next part.

Parallel crc32c: for bytes of a given length, the checksum is affine in the checksum that it continues:
crc(seed, B) = L(seed) ^ crc(0, B), where L is linear over GF(2) and depends only on the length of B. The
parts of a buffer are therefore digested separately, each from 0, and joined in order. L of one part length is
computed from zeros, one bit of the seed at a time, and stored as one table per byte.

Reference: Mark Adler's crc32_combine in zlib, which computes L from powers of x instead.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from crc32c import crc32c

from ..protocol.layout import Crc
from .pinning import Bytes

PART_BYTES = 1 << 20  # size of every part but the first, which takes the remainder
MAX_THREADS = 4
CORES_PER_THREAD = 4  # the other cores of the host compute

Part = TypeVar("Part")
Result = TypeVar("Result")
Task = Callable[[], None]


class CopyPool:
    """`num_threads` threads, the caller's among them, for work that releases the interpreter lock."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_work_off, args=(self._tasks,), name=f"copy-{number}", daemon=True)
            for number in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"CopyPool({self.num_threads})"

    def each(self, work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """The results of `work` for every part, in order. Raises the exception of the first failed part."""
        if len(parts) < 2 or self.num_threads < 2:
            return [work(part) for part in parts]
        done: queue.SimpleQueue[tuple[int, Result | None, Exception | None]] = queue.SimpleQueue()

        def do(number: int) -> None:
            try:
                done.put((number, work(parts[number]), None))
            except Exception as error:  # raised again in the caller's thread
                done.put((number, None, error))

        for number in range(1, len(parts)):
            self._tasks.put(partial(do, number))
        do(0)
        ended = sorted((done.get() for _ in parts), key=lambda one: one[0])
        for _, _, error in ended:
            if error is not None:
                raise error
        return [result for _, result, _ in ended]  # type: ignore[misc]

    def copy(self, target: Bytes, source: Bytes) -> None:
        """Copies `source` to the beginning of `target`; both uint8."""
        cuts = cut(source.size, self.num_threads, PART_BYTES)
        self.each(lambda part: np.copyto(target[part], source[part]), cuts)

    def digests(self, items: Sequence[tuple[memoryview, int]], crc: Crc) -> list[int]:
        """The checksum by `crc` of each (bytes, seed). Each thread takes whole items."""
        if len(items) == 1:
            return [crc(*items[0])]
        alone = crc32c if isinstance(crc, SplitCrc) else crc
        return self.each(lambda item: alone(*item), items)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads, self.num_threads = [], 1

    @property
    def crc(self) -> Crc:
        """crc32c computed by these threads."""
        return SplitCrc(self) if self.num_threads > 1 else crc32c


class SplitCrc:
    """crc32c(data, seed), computed from parts in parallel."""

    def __init__(self, pool: CopyPool, part_bytes: int = PART_BYTES) -> None:
        self._copy_pool, self._part_bytes = pool, part_bytes
        self._tables = _tables(part_bytes)

    def __repr__(self) -> str:
        return f"SplitCrc({self._copy_pool})"

    def __call__(self, data: memoryview, seed: int = 0) -> int:
        """The crc32c of `data`, continuing `seed`."""
        cuts = cut(data.nbytes, self._copy_pool.num_threads, self._part_bytes)
        first, *others = self._copy_pool.each(
            lambda part: crc32c(data[part], 0 if part.start else seed), cuts
        )
        for other in others:
            first = self._shifted(first) ^ other
        return first

    def _shifted(self, crc: int) -> int:
        a, b, c, d = self._tables
        return a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]


def copy_pool_of_host() -> CopyPool:
    """A pool sized for this host: one thread per CORES_PER_THREAD cores, within limits."""
    return CopyPool(max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // CORES_PER_THREAD)))


def cut(size: int, most: int, part_bytes: int) -> list[slice]:
    """Cuts [0, size) into at most `most` slices.

    Every slice but the first has `part_bytes` bytes. The first has at least as many, unless it is alone.
    """
    num_others = max(0, min(most, size // part_bytes) - 1)
    first = size - num_others * part_bytes
    starts = [first + number * part_bytes for number in range(num_others)]
    return [slice(0, first), *(slice(start, start + part_bytes) for start in starts)]


def _work_off(tasks: "queue.SimpleQueue[Task | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # drop references to a buffer that may be unmapped


def _tables(num_bytes: int) -> Sequence[Sequence[int]]:
    """L of `num_bytes` bytes: one table per byte of the seed, the lowest byte first."""
    zeros = bytes(num_bytes)
    base = crc32c(zeros)
    bits = [crc32c(zeros, 1 << bit) ^ base for bit in range(32)]
    return [[_joined(bits[8 * byte : 8 * byte + 8], value) for value in range(256)] for byte in range(4)]


def _joined(bits: Sequence[int], value: int) -> int:
    joined = 0
    for bit, image in enumerate(bits):
        joined ^= image if value >> bit & 1 else 0
    return joined
