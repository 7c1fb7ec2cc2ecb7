"""The tiers of a running engine: `CacheTiers` with the threads that copy for it, a turn at a time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .cache_tiers import CacheTiers, Restore
from .disk_files import DiskFiles
from .jobs import Job, JobDone
from .restore_costs import ComputeTime
from .slot_table import SlotTable
from .tier_threads import DiskOpened


class Copiers(Protocol):
    """Performs copies; `TierThreads` does it in threads, a simulation when it likes."""

    def submit(self, job: Job) -> None:
        """Begin a copy."""

    def open_disk(self, files: DiskFiles) -> None:
        """Open the files; DiskOpened answers."""

    def results(self) -> list[JobDone | DiskOpened]:
        """The ends since the last call."""

    def close(self) -> None:
        """End all threads."""


@dataclass(frozen=True, kw_only=True)
class TierUse:
    """Bytes of stored pages and the budget of one tier."""

    name: str
    used: int
    total: int


class RunningTiers:
    """The scheduler thread's handle on its tiers. `clock` tells monotonic seconds."""

    def __init__(
        self,
        tiers: CacheTiers,
        copiers: Copiers,
        *,
        linear_depth: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self._copiers = copiers
        self._clock = clock
        self._linear_depth = linear_depth
        self._files: DiskFiles | None = None
        self._is_opened = False
        self.find_disk: Callable[[], DiskFiles | None] = lambda: None
        """The files of the disk tier, as soon as all that their fingerprint has is known."""

    def __repr__(self) -> str:
        return f"<RunningTiers {self.tiers!r}>"

    def turn(self) -> bool:
        """Take in what has ended, and begin what is due. Never waits. Returns whether a copy had ended."""
        if self._files is None and (files := self.find_disk()) is not None:
            self._files = files
            self._copiers.open_disk(files)
        ended = self._copiers.results()
        for one in ended:
            if isinstance(one, JobDone):
                self.tiers.done(one, self._clock())
            else:
                self._opened(one)
        self.tiers.turn(self._clock())
        self._submit()
        return bool(ended)

    def begin(
        self,
        token_ids: Sequence[int],
        limit: int,
        salt: str,
        pages: Sequence[int],
        have: int,
        compute_time: ComputeTime | None = None,
    ) -> Restore | None:
        """As `CacheTiers.begin`; the copies begin at once."""
        restore = self.tiers.begin(token_ids, limit, salt, pages, have, self._clock(), compute_time)
        self._submit()
        return restore

    def knows(self, token_ids: Sequence[int], limit: int, salt: str, pages: Sequence[int], have: int) -> bool:
        """As `CacheTiers.knows`."""
        return self.tiers.knows(token_ids, limit, salt, pages, have)

    def give_up(self, restore: Restore) -> None:
        """As `CacheTiers.give_up`."""
        self.tiers.give_up(restore)

    def rebase(self, fingerprint: str) -> None:
        """As `CacheTiers.rebase`."""
        self.tiers.rebase(fingerprint)

    @property
    def is_opening(self) -> bool:
        """Whether the disk tier is being opened."""
        return self._files is not None and not self._is_opened

    @property
    def use(self) -> list[TierUse]:
        """The tiers that are on, from fast to slow."""
        tiers = self.tiers
        found = []
        if not tiers.is_off and not tiers.is_staging:
            found.append(TierUse(name="host", used=tiers.host_bytes[0], total=tiers.host_bytes[1]))
        if tiers.disk is not None:
            found.append(TierUse(name="disk", used=tiers.disk_bytes[0], total=tiers.disk_bytes[1]))
        return found

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the start."""
        return self.tiers.counters

    def close(self) -> None:
        """End the threads."""
        self._copiers.close()

    def _opened(self, opened: DiskOpened) -> None:
        assert self._files is not None
        self._is_opened = True
        table = SlotTable(self._files.num_slots, self._linear_depth)
        table.adopt(opened.pages)
        self.tiers.open_disk(table)
        if opened.fault:
            self.tiers.close_disk(opened.fault)

    def _submit(self) -> None:
        for job in self.tiers.take_jobs():
            self._copiers.submit(job)
