"""The threads that copy for `CacheTiers`: one saves, one restores, one reads and writes the disk.

The scheduler thread submits jobs and takes their ends; it never waits. `notify` is called after each end. A
restore therefore never waits for a save or for the disk, and a disk that hangs holds up its own thread alone.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .disk_files import DiskFault, DiskFiles
from .jobs import Fetch, Job, JobDone, Load, PageMove, Save, Spill
from .page_copies import PageCopies
from .slot_table import StoredPage

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
FIRST, SECOND, LAST = range(3)  # a request waits for a Fetch; a Spill has time


@dataclass(frozen=True, kw_only=True)
class DiskOpened:
    """The end of `open_disk`: the pages that were found, or why the disk cannot be used."""

    pages: list[StoredPage]
    fault: str = ""


class TierThreads:
    """The threads over `copies` and, from `open_disk` on, the files of a disk. `reach`: failpoints."""

    def __init__(
        self,
        copies: PageCopies,
        notify: Callable[[], None] = lambda: None,
        reach: Callable[[str], None] = lambda site: None,
    ) -> None:
        self._copies, self._notify, self._reach = copies, notify, reach
        self._disk: DiskFiles | None = None
        self._done: queue.SimpleQueue[JobDone | DiskOpened] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._disk_jobs: queue.PriorityQueue[tuple[int, int, Job | DiskFiles | None]] = queue.PriorityQueue()
        self._num_disk_jobs = 0
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
        if isinstance(job, (Fetch, Spill)):
            self._put(FIRST if isinstance(job, Fetch) else SECOND, job)
        else:
            jobs = self._saves if isinstance(job, Save) else self._loads
            jobs.put(job)

    def stamp(self, pages: Sequence[int]) -> None:
        """As `PageCopies.stamp`."""
        self._copies.stamp(pages)

    def open_disk(self, files: DiskFiles) -> None:
        """Open the files in the disk's thread; DiskOpened answers."""
        self._put(FIRST, files)

    def results(self) -> list[JobDone | DiskOpened]:
        """The ends since the last call."""
        ended = []
        try:
            while True:
                ended.append(self._done.get_nowait())
        except queue.Empty:
            return ended

    def close(self) -> None:
        """Ends the threads after the copies under way, and closes the files."""
        self._saves.put(None)
        self._loads.put(None)
        self._put(LAST, None)
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _put(self, priority: int, item: Job | DiskFiles | None) -> None:
        self._num_disk_jobs += 1  # equal ones in order; items have none
        self._disk_jobs.put((priority, self._num_disk_jobs, item))

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
                self._end(JobDone(number=job.number, digests=(None,) * len(job.moves), fault=fault))
            else:
                self._end(JobDone(number=job.number, digests=tuple(digests)))

    def _serve_disk(self) -> None:
        while (item := self._disk_jobs.get()[2]) is not None:
            if isinstance(item, DiskFiles):
                self._end(self._open(item))
            else:
                self._end(self._moved(item))
        if self._disk is not None:
            self._disk.close()

    def _open(self, files: DiskFiles) -> DiskOpened:
        try:
            pages = files.open()
        except DiskFault as error:
            return DiskOpened(pages=[], fault=str(error))
        self._disk = files
        return DiskOpened(pages=pages)

    def _moved(self, job: Job) -> JobDone:
        digests: list[int | None] = []
        fault = ""
        for move in job.moves:
            try:
                digests.append(None if fault else self._move(job, move))
            except Exception as error:  # of the system, or of a failpoint
                fault = str(error)
                digests.append(None)
        return JobDone(number=job.number, digests=tuple(digests), fault=fault)

    def _move(self, job: Job, move: PageMove) -> int | None:
        """The digest of the page that was moved; None for a damaged one. Raises DiskFault."""
        disk = self._disk
        if disk is None:
            raise DiskFault("it was never opened")
        slot = self._copies.slab.whole(move.slot)
        if isinstance(job, Spill):
            page = StoredPage(
                key=move.key,
                parent=move.parent,
                slot=move.disk_slot,
                depth=move.depth,
                priority=0.0,
                digest=move.digest,
            )
            disk.write(page, slot)
            return move.digest
        self._reach("tier:fetch")
        is_whole = disk.read(move.disk_slot, slot)
        digest = self._copies.digest(move.key, move.slot)
        return digest if is_whole and digest == move.digest else None
