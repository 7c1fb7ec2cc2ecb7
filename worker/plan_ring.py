"""Plans from rank 0 to the other ranks of a worker, through a ring in shared memory.

    words of 8 bytes   magic, bytes of the ring, bytes written; then of each reader: bytes read, plans done,
                       time of its last sign of life
    ring               records: number, length, crc32, payload, padding to 8 bytes

One process writes. Each reader sees every record, in order. A writer publishes a record by the count of bytes
written, which it stores last, and never overwrites what a reader has not read: it waits, up to a limit. A
reader checks the number and the checksum of a record, so a torn one cannot become a plan. The memory has no
name: a child inherits its descriptor, and it is freed with the last process.
"""

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np

CAPACITY = 16 << 20  # bytes; a plan of a prompt of a million tokens takes some 5 MiB
MAGIC = 0x6E6F746162  # "baton"
WORD = 8
HEAD_WORDS, READER_WORDS = 3, 3
RECORD = struct.Struct("<QII")  # number, length, crc32
POLL_S = 0.0005  # between two looks for room, where a reader is a whole ring behind


class RingFull(RuntimeError):
    """A reader did not make room in time. `reader`: its index."""

    def __init__(self, reader: int, waited_s: float) -> None:
        super().__init__(f"reader {reader} has left the ring of plans full for {waited_s:.1f} s")
        self.reader = reader


class BrokenRecord(RuntimeError):
    """A record is not what was written."""


class PlanRing:
    """The ring of `num_readers` in the memory of descriptor `fd`."""

    def __init__(self, fd: int, num_readers: int, capacity: int) -> None:
        self.fd = fd
        self.num_readers = num_readers
        self.capacity = capacity
        first = ring_offset(num_readers)
        self._memory = mmap.mmap(fd, first + capacity)
        count = HEAD_WORDS + READER_WORDS * num_readers
        words = np.frombuffer(self._memory, dtype=np.uint64, count=count)
        self._head = words[:HEAD_WORDS]
        self._readers = words[HEAD_WORDS:].reshape(num_readers, READER_WORDS)
        self._ring = memoryview(self._memory)[first:]

    @classmethod
    def create(cls, num_readers: int, capacity: int = CAPACITY) -> "PlanRing":
        """A new ring. `capacity`: bytes, a multiple of 8."""
        assert capacity % WORD == 0, capacity
        fd = os.memfd_create("baton-plans", os.MFD_CLOEXEC)
        os.ftruncate(fd, ring_offset(num_readers) + capacity)
        ring = cls(fd, num_readers, capacity)
        ring._head[0], ring._head[1] = MAGIC, capacity
        return ring

    @classmethod
    def attach(cls, fd: int, num_readers: int) -> "PlanRing":
        """The ring behind an inherited descriptor. Raises ValueError for other memory."""
        size = os.fstat(fd).st_size
        ring = cls(fd, num_readers, size - ring_offset(num_readers))
        if int(ring._head[0]) != MAGIC or int(ring._head[1]) != ring.capacity:
            raise ValueError(f"descriptor {fd} is no ring of plans for {num_readers} readers")
        return ring

    def num_done(self, reader: int) -> int:
        """Plans that `reader` has done."""
        return int(self._readers[reader, 1])

    def seen_alive(self, reader: int) -> int:
        """Nanoseconds of the monotonic clock at the last sign of life of `reader`; 0 before the first."""
        return int(self._readers[reader, 2])

    def put(self, at: int, data: bytes | memoryview) -> None:
        """Copies `data` to byte `at` of the endless stream."""
        start = at % self.capacity
        split = min(len(data), self.capacity - start)
        self._ring[start : start + split] = data[:split]
        self._ring[: len(data) - split] = data[split:]

    def get(self, at: int, size: int) -> bytes:
        """`size` bytes of the endless stream from byte `at` on."""
        start = at % self.capacity
        split = min(size, self.capacity - start)
        return bytes(self._ring[start : start + split]) + bytes(self._ring[: size - split])


class PlanWriter:
    """Rank 0's end. `wakes`: an eventfd per reader. `limit_s`: the longest wait for room.

    `clock` returns monotonic seconds; `sleep` waits.
    """

    def __init__(
        self,
        ring: PlanRing,
        wakes: list[int],
        *,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.ring = ring
        self.num_issued = 0
        self._wakes = wakes
        self._limit_s = limit_s
        self._clock, self._sleep = clock, sleep
        self._written = 0

    def send(self, payload: bytes) -> None:
        """Appends one record and wakes all readers.

        Raises RingFull if a reader makes no room in time, ValueError for a record that no ring of this size
        holds.
        """
        need = record_size(len(payload))
        if need > self.ring.capacity:
            raise ValueError(f"a plan of {len(payload)} bytes does not fit a ring of {self.ring.capacity}")
        self._wait_for(need)
        ring, at = self.ring, self._written
        ring.put(at, RECORD.pack(self.num_issued, len(payload), zlib.crc32(payload)))
        ring.put(at + RECORD.size, payload)
        self.num_issued += 1
        self._written += need
        ring._head[2] = self._written
        for wake in self._wakes:
            os.eventfd_write(wake, 1)

    def _wait_for(self, need: int) -> None:
        started, least = self._clock(), self._written + need - self.ring.capacity
        while int((read := self.ring._readers[:, 0]).min()) < least:
            if self._clock() - started > self._limit_s:
                raise RingFull(int(read.argmin()), self._limit_s)
            self._sleep(POLL_S)


class PlanReader:
    """The end of another rank: reader `index`. `clock_ns` returns monotonic nanoseconds."""

    def __init__(self, ring: PlanRing, index: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.ring = ring
        self.index = index
        self.num_taken = 0
        self._clock_ns = clock_ns
        self._read = 0

    def take(self) -> bytes | None:
        """The next record; None if there is none yet. Raises BrokenRecord."""
        ring, at = self.ring, self._read
        if int(ring._head[2]) == at:
            return None
        number, length, check = RECORD.unpack(ring.get(at, RECORD.size))
        if number != self.num_taken or length > ring.capacity:
            raise BrokenRecord(f"record {number} where {self.num_taken} should be")
        payload = ring.get(at + RECORD.size, length)
        if zlib.crc32(payload) != check:
            raise BrokenRecord(f"record {number} has another checksum than its payload")
        self.num_taken += 1
        self._read += record_size(length)
        ring._readers[self.index, 0] = self._read
        return payload

    def done(self) -> None:
        """Counts the plan taken last as done."""
        self.ring._readers[self.index, 1] = self.num_taken
        self.beat()

    def beat(self) -> None:
        """Gives a sign of life."""
        self.ring._readers[self.index, 2] = self._clock_ns()


def ring_offset(num_readers: int) -> int:
    """Bytes in front of the ring, a multiple of 64."""
    return -(-(HEAD_WORDS + READER_WORDS * num_readers) * WORD // 64) * 64


def record_size(length: int) -> int:
    """Bytes of a record with a payload of `length` bytes."""
    return -(-(RECORD.size + length) // WORD) * WORD
