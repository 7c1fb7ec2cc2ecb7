"""The files of a disk tier: pages in slabs of fixed slots, and an index that tells which key each slot has.

    DIR/kv-FINGERPRINT-N/   0700; of one worker, which holds a lock on the index
        index               a record of RECORD_BYTES for each slot: key, parent, depth and digest of its page
        slab-0000, ...      the pages, in slots of whole system pages, allocated a file at a time

All files are 0600. They hold the keys and values of prompts, from which the prompts can be computed.

A page is written in three steps: its record is cleared, the page is written, the record is written. A process
that is killed in between leaves an empty slot. What a power failure reorders, or a disk damages, is found by
the digest when the page is read. `open` reads the index only. Errors of the system are raised as DiskFault:
the tier is of no use then, and the worker goes on without it. Several threads may read at once, beside one
that writes.
"""

import errno
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from crc32c import crc32c

from .host_slab import ALIGNMENT
from .slot_table import StoredPage

RECORD = struct.Struct("<8s32s32sQI")
RECORD_BYTES = 96
MAGIC = b"batonkv1"
SLAB_BYTES = 1 << 30
MOST_WORKERS = 64  # of one fingerprint, in one directory
FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
NAME_BYTES = 8  # of the fingerprint, in the name of a directory
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFault(OSError):
    """The disk tier cannot be used; the message says why, and what helps."""


class DiskFiles:
    """The files of one worker below `directory`, of `budget` bytes at most.

    `slot_bytes`: a multiple of ALIGNMENT. `fingerprint`: all that pages depend on besides tokens and salts.
    `reach`: the failpoints of tests.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fingerprint: str,
        slot_bytes: int,
        budget: int,
        reach: Callable[[str], None] = lambda site: None,
    ) -> None:
        assert slot_bytes % ALIGNMENT == 0, slot_bytes
        self.directory = directory
        self.slot_bytes = slot_bytes
        self.num_slots = budget // (slot_bytes + RECORD_BYTES)
        self.folder = directory
        self._name = hashlib.sha256(f"{fingerprint} {slot_bytes}".encode()).digest()[:NAME_BYTES].hex()
        self._slots_per_slab = max(1, SLAB_BYTES // slot_bytes)  # whatever the budget: it may change
        self._index = -1
        self._slabs: dict[int, int] = {}
        self._opens = threading.Lock()  # held by the thread that opens a slab
        self._reach = reach

    def __repr__(self) -> str:
        return f"<DiskFiles {self.folder}, {self.num_slots} slots x {self.slot_bytes} B>"

    def open(self) -> list[StoredPage]:
        """Opens the files, or makes them. Returns the pages that they hold. Raises DiskFault."""
        with _faults(f"{self.directory}"):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(MOST_WORKERS):
                folder = self.directory / f"kv-{self._name}-{number}"
                folder.mkdir(mode=0o700, exist_ok=True)
                index = os.open(folder / "index", FLAGS, 0o600)
                try:
                    fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(index)
                    continue
                self.folder, self._index = folder, index
                os.fchmod(index, 0o600)
                self._trim()
                return self._read_index()
            raise DiskFault(f"{self.directory}: {MOST_WORKERS} workers use it already")

    def check(self) -> None:
        """Raises DiskFault if the files were removed."""
        if self._index < 0 or os.fstat(self._index).st_nlink == 0:
            raise DiskFault(f"{self.folder} was removed")

    def write(self, page: StoredPage, data: memoryview) -> None:
        """Stores the page with its whole slot `data`. Raises DiskFault."""
        with _faults(f"{self.folder}"):
            self.check()
            slab = self._slab(page.slot)
            self._reach("tier:clear")
            _write_all(self._index, bytes(RECORD_BYTES), page.slot * RECORD_BYTES)
            self._reach("tier:write")
            _write_all(slab, data, self._offset(page.slot))
            self._reach("tier:index")
            _write_all(self._index, _record(page), page.slot * RECORD_BYTES)

    def read(self, slot: int, data: memoryview) -> bool:
        """Reads a slot into `data`. Returns whether it was whole. Raises DiskFault."""
        with _faults(f"{self.folder}"):
            self.check()
            return os.preadv(self._slab(slot), [data], self._offset(slot)) == len(data)

    def close(self) -> None:
        """Closes all files, and so lets another process have them. Idempotent."""
        for fd in (*self._slabs.values(), *([self._index] if self._index >= 0 else [])):
            os.close(fd)
        self._slabs, self._index = {}, -1

    def _trim(self) -> None:
        """Cuts files of a larger budget."""
        if os.fstat(self._index).st_size > self.num_slots * RECORD_BYTES:
            os.ftruncate(self._index, self.num_slots * RECORD_BYTES)
        for path in self.folder.glob("slab-*"):
            number = path.name.removeprefix("slab-")
            if not number.isdigit():
                continue
            left = (self.num_slots - int(number) * self._slots_per_slab) * self.slot_bytes
            if left <= 0:
                path.unlink()
            elif path.stat().st_size > left:
                os.truncate(path, left)

    def _read_index(self) -> list[StoredPage]:
        raw = b""
        size = self.num_slots * RECORD_BYTES
        while part := os.pread(self._index, size - len(raw), len(raw)):
            raw += part
        found = []
        for slot in range(len(raw) // RECORD_BYTES):
            page = _page_of(raw[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES], slot)
            if page is not None:
                found.append(page)
        return list({page.key: page for page in found}.values())

    def _offset(self, slot: int) -> int:
        return slot % self._slots_per_slab * self.slot_bytes

    def _slab(self, slot: int) -> int:
        """The descriptor of the slab of a slot, allocated at its first use."""
        number = slot // self._slots_per_slab
        slab = self._slabs.get(number)
        if slab is None:
            with self._opens:
                slab = self._slabs.get(number)
                if slab is None:
                    slab = self._slabs[number] = self._open_slab(number)
        return slab

    def _open_slab(self, number: int) -> int:
        path = self.folder / f"slab-{number:04d}"
        try:
            slab = os.open(path, FLAGS | os.O_DIRECT, 0o600)
        except OSError:  # some file systems know no access without the system's cache
            slab = os.open(path, FLAGS, 0o600)
        try:
            os.fchmod(slab, 0o600)
            slots = min(self._slots_per_slab, self.num_slots - number * self._slots_per_slab)
            _allocate(slab, slots * self.slot_bytes)
        except BaseException:
            os.close(slab)
            raise
        return slab


def _allocate(fd: int, size: int) -> None:
    """Allocates a file. If it fails, the file gives back what it got: a full disk is needed by others."""
    before = os.fstat(fd).st_size
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.ftruncate(fd, before)
        raise


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data`. An almost full file system takes a part, and fails at the next call."""
    left = memoryview(data)
    while left:
        written = os.pwrite(fd, left, offset)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        left, offset = left[written:], offset + written


@contextmanager
def _faults(place: str) -> Iterator[None]:
    try:
        yield
    except DiskFault:
        raise
    except OSError as error:
        remedy = "; make room there, or lower --disk-cache-gib, and restart the worker"
        text = f"{place}: {error.strerror or error}"
        raise DiskFault(text + remedy * (error.errno in NO_ROOM)) from None


def _record(page: StoredPage) -> bytes:
    body = RECORD.pack(MAGIC, page.key, page.parent, page.depth, page.digest)
    return (body + crc32c(body).to_bytes(4, "little")).ljust(RECORD_BYTES, b"\0")


def _page_of(record: bytes, slot: int) -> StoredPage | None:
    """The page of a record; None for an empty or damaged one."""
    body, check = record[: RECORD.size], record[RECORD.size : RECORD.size + 4]
    magic, key, parent, depth, digest = RECORD.unpack(body)
    if magic != MAGIC or crc32c(body).to_bytes(4, "little") != check:
        return None
    return StoredPage(key=key, parent=parent, slot=slot, depth=depth, priority=0.0, digest=digest)
