"""The threads that read a disk. A disk gives all that it can only to several reads at a time.

The pages of a Fetch are read side by side, those of an earlier one first. Each thread reads a page and
computes its digest; the thread of the last page ends the Fetch.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from .jobs import Fetch, JobDone, PageMove


@dataclass(kw_only=True, eq=False)
class _Reading:
    """A Fetch under way. `num_left`: pages that have not ended; guarded, as all of it, by the lock."""

    job: Fetch
    digests: list[int | None]
    num_left: int
    fault: str = ""


class DiskReaders:
    """`num_threads` threads over `read`, which gives the digest of a page, None for a damaged one, and raises
    an error for a disk that is of no use any more. `end` takes the end of each Fetch, by `clock` (monotonic
    seconds).

    The threads are daemons: a read that never ends holds up neither the scheduler nor the end of the process.
    """

    def __init__(
        self,
        num_threads: int,
        read: Callable[[PageMove], int | None],
        end: Callable[[JobDone], None],
        clock: Callable[[], float],
    ) -> None:
        self._read, self._end, self._clock = read, end, clock
        self._pages: queue.SimpleQueue[tuple[_Reading, int] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()  # its lock guards all readings
        self._num_left = 0  # pages that are read or wait
        self._threads = [
            threading.Thread(target=self._serve, name=f"tier-read-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def __repr__(self) -> str:
        return f"<DiskReaders {len(self._threads)} threads, {self._num_left} pages left>"

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, job: Fetch) -> None:
        """Begin a Fetch."""
        count = len(job.moves)
        reading = _Reading(job=job, digests=[None] * count, num_left=count)
        with self._idle:
            self._num_left += count
        for place in range(count):
            self._pages.put((reading, place))

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no page is left to read, for `timeout_s` seconds at most."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_left, timeout_s)

    def close(self) -> None:
        """End the threads that were started behind the pages that wait, and wait for them."""
        started = [thread for thread in self._threads if thread.ident is not None]
        for _ in started:
            self._pages.put(None)
        for thread in started:
            thread.join()

    def _serve(self) -> None:
        while (item := self._pages.get()) is not None:
            reading, place = item
            digest, fault = None, reading.fault  # behind a fault nothing more is read
            if not fault:
                try:
                    digest = self._read(reading.job.moves[place])
                except Exception as error:  # of the system, or of a failpoint
                    fault = str(error)
            self._ended(reading, place, digest, fault)

    def _ended(self, reading: _Reading, place: int, digest: int | None, fault: str) -> None:
        with self._idle:
            reading.digests[place] = digest
            reading.fault = reading.fault or fault
            reading.num_left -= 1
            is_last = not reading.num_left
            self._num_left -= 1
            if not self._num_left:
                self._idle.notify_all()
        if is_last:
            self._end(
                JobDone(
                    number=reading.job.number,
                    digests=tuple(reading.digests),
                    ended=self._clock(),
                    fault=reading.fault,
                )
            )
