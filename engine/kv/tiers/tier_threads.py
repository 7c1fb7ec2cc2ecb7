"""The threads that copy for `CacheTiers`: one saves, one restores, one writes the disk, several read it.

The scheduler thread submits jobs and takes their ends; it never waits. `notify` is called after each end. A
restore therefore never waits for a save or for the disk, and a disk that hangs holds up its own threads
alone. A request waits for what is read, so writes begin when nothing is left to read, or after YIELD_S.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .disk_files import DiskFault, DiskFiles
from .disk_readers import DiskReaders
from .jobs import Fetch, Job, JobDone, Load, PageMove, Spill
from .page_copies import PageCopies
from .slot_table import StoredPage

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
YIELD_S = 1.0  # that a Spill waits for reads; less than a disk may take before it is turned off
NUM_READERS = 8  # pages of a disk that are read at once


@dataclass(frozen=True, kw_only=True)
class DiskOpened:
    """The end of `open_disk`: the pages that were found, or why the disk cannot be used."""

    pages: list[StoredPage]
    fault: str = ""


class TierThreads:
    """The threads over `copies` and, from `open_disk` on, the files of a disk. `reach`: failpoints. `clock`
    tells monotonic seconds.
    """

    def __init__(
        self,
        copies: PageCopies,
        notify: Callable[[], None] = lambda: None,
        reach: Callable[[str], None] = lambda site: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copies, self._notify, self._reach, self._clock = copies, notify, reach, clock
        self._disk: DiskFiles | None = None
        self._done: queue.SimpleQueue[JobDone | DiskOpened] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._disk_jobs: queue.SimpleQueue[Spill | DiskFiles | None] = queue.SimpleQueue()
        self._readers = DiskReaders(NUM_READERS, self._read, self._end, clock)
        self._threads = [
            threading.Thread(target=work, name=f"tier-{name}", daemon=True)
            for name, work in (
                ("save", lambda: self._copy_all(self._saves)),
                ("load", lambda: self._copy_all(self._loads)),
                ("disk", self._serve_disk),
            )
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<TierThreads {self._copies!r}, disk {self._disk!r}>"

    def submit(self, job: Job) -> None:
        """Begin a copy."""
        match job:
            case Fetch():
                self._readers.submit(job)
            case Spill():
                self._disk_jobs.put(job)
            case Load():
                self._loads.put(job)
            case _:
                self._saves.put(job)

    def open_disk(self, files: DiskFiles) -> None:
        """Open the files in the thread that writes the disk; DiskOpened answers."""
        self._disk_jobs.put(files)

    def results(self) -> list[JobDone | DiskOpened]:
        """The ends since the last call."""
        ended = []
        try:
            while True:
                ended.append(self._done.get_nowait())
        except queue.Empty:
            return ended

    def close(self) -> None:
        """Ends the threads after the copies under way, and closes the files; waits for it CLOSE_S at most."""
        self._saves.put(None)
        self._loads.put(None)
        self._disk_jobs.put(None)
        until = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _end(self, done: JobDone | DiskOpened) -> None:
        self._done.put(done)
        self._notify()

    def _copy_all(self, jobs: "queue.SimpleQueue[Job | None]") -> None:
        while (job := jobs.get()) is not None:
            try:
                if isinstance(job, Load):
                    self._reach("tier:load")
                    digests = self._copies.load(job.moves)
                else:
                    self._reach("tier:save")
                    digests = self._copies.save(job.moves)
            except Exception as error:  # such as a fault of the GPU: the worker finds it in its own work, too
                fault = f"{type(error).__name__}: {error}"
                self._end(self._done_now(job, [None] * len(job.moves), fault))
            else:
                self._end(self._done_now(job, digests))

    def _done_now(self, job: Job, digests: Sequence[int | None], fault: str = "") -> JobDone:
        return JobDone(number=job.number, digests=tuple(digests), ended=self._clock(), fault=fault)

    def _serve_disk(self) -> None:
        while (item := self._disk_jobs.get()) is not None:
            if isinstance(item, DiskFiles):
                self._readers.start()
                self._end(self._open(item))
            else:
                self._readers.wait_idle(YIELD_S)
                self._end(self._moved(item, self._write))
        self._readers.close()  # before the files that they read
        if self._disk is not None:
            self._disk.close()

    def _open(self, files: DiskFiles) -> DiskOpened:
        try:
            pages = files.open()
        except DiskFault as error:
            return DiskOpened(pages=[], fault=str(error))
        self._disk = files
        return DiskOpened(pages=pages)

    def _moved(self, job: Job, move_page: Callable[[PageMove], int | None]) -> JobDone:
        """Moves the pages of `job` one after the other, up to a fault."""
        digests: list[int | None] = []
        fault = ""
        for move in job.moves:
            try:
                digests.append(None if fault else move_page(move))
            except Exception as error:  # of the system, or of a failpoint
                fault = str(error)
                digests.append(None)
        return self._done_now(job, digests, fault)

    def _write(self, move: PageMove) -> int:
        """Writes a page to the disk. Returns its digest. Raises DiskFault."""
        page = StoredPage(
            key=move.key,
            parent=move.parent,
            slot=move.disk_slot,
            depth=move.depth,
            priority=0.0,
            digest=move.digest,
        )
        self._files.write(page, self._copies.slab.whole(move.slot))
        return move.digest

    def _read(self, move: PageMove) -> int | None:
        """Reads a page from the disk. Returns its digest; None for a damaged one. Raises DiskFault."""
        self._reach("tier:fetch")
        is_whole = self._files.read(move.disk_slot, self._copies.slab.whole(move.slot))
        digest = self._copies.digest(move)
        return digest if is_whole and digest == move.digest else None

    @property
    def _files(self) -> DiskFiles:
        """The open files. Raises DiskFault."""
        if self._disk is None:
            raise DiskFault("it was never opened")
        return self._disk
