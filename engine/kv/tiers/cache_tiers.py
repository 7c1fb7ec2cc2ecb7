"""The life of prefix pages below the pool: saved to host memory and to disk, and restored. Pure.

    idle     a cached page that nobody uses. The first ones to be evicted are saved, before they are
    saved    a copy lies in a host slot. Behind a disk tier, a copy of that goes to a disk slot
    restore  a request with a longer prefix here than in the pool gets it back: disk -> host slot -> the
             request's own pages

`CacheTiers` decides and keeps the books; `take_jobs` has the copies that it wants, `done` takes their ends.
It reads no memory, so the same code runs in a simulation. The rules:

1. A page in flight is neither freed nor written. A page that is saved stays allocated until its copy has
   ended, also when it is evicted meanwhile. Pages that are restored have a second owner until then.
2. A page is used only after its copy has ended and its digest was right. A wrong digest is a miss: that page
   and those behind it are computed.
3. Nothing waits for a copy but the request that wants its pages. While pages are saved, fewer can be
   allocated; a copy of a few pages takes a millisecond.
4. A request waits for the disk at most FETCH_PATIENCE_S, then it takes what is in host memory.
5. Where a prompt is computed here, its pages are brought back only if that is sooner than computing their
   tokens (`restore_costs`).
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..prefix_cache import ROOT, PrefixCache
from .jobs import Fetch, Job, JobDone, Load, PageMove, Save, Spill
from .page_keys import PageKeys
from .restore_costs import ComputeTime, RestoreCosts
from .slot_table import SlotTable, StoredPage, TierJournal

logger = logging.getLogger(__name__)

JOB_PAGES = 8  # pages of one copy to or from the disk, and of one Save
MOST_SAVED = 32  # pages of the pool that are saved at once
SAVED_SHARE = 16  # and at most this part of the pool
MOST_EXAMINED = 64  # pages that one turn looks at
MOST_SPILLED = 32  # pages on their way to the disk
FETCH_PATIENCE_S = 2.0
DISK_PATIENCE_S = 20.0  # a disk that does not answer for so long is turned off
COUNTERS = (
    "host_hit_tokens", "disk_hit_tokens", "host_saved_bytes", "host_loaded_bytes", "disk_written_bytes",
    "disk_read_bytes", "host_bad_pages", "disk_bad_pages", "tier_lost_pages", "tier_late_restores",
    "tier_declined_restores",
)  # fmt: skip


class RestoreState(Enum):
    """The state of a restore."""

    WAITING = "waiting"  # for host slots that are being filled, or for the restore of the same prefix
    LOADING = "loading"  # the copy into the request's pages is under way
    DONE = "done"


@dataclass(kw_only=True, eq=False)
class Restore:
    """Pages of one request that come back. `pages`: those of the pool, in order; `stored`: their host pages.

    `num_pages`: restored ones, once it is done; fewer than `pages` after a fault. `leader`: the restore of
    the same prefix that this one waits for.
    """

    first_key: bytes
    pages: list[int]
    stored: list[StoredPage]
    patience: float
    state: RestoreState = RestoreState.WAITING
    from_disk: set[bytes] = field(default_factory=set)
    leader: "Restore | None" = None
    num_pages: int = 0

    @property
    def is_done(self) -> bool:
        """Whether the request may go on."""
        return self.state is RestoreState.DONE

    @property
    def is_follower(self) -> bool:
        """Whether it only waited for the restore of another request, whose pages are in the cache now."""
        return self.leader is not None

    def __repr__(self) -> str:
        return f"<Restore {self.state.value}, {len(self.stored)} of {len(self.pages)} pages>"


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """A job that was given out at `since` (monotonic seconds), with the pages of both ends."""

    job: Job
    since: float
    stored: tuple[StoredPage, ...]
    on_disk: tuple[StoredPage, ...] = ()
    restore: Restore | None = None


class CacheTiers:
    """The tiers below the pool of `cache`. `page_bytes`: of all planes of a page.

    `is_staging`: host memory is only the way to the disk, so a page stays there until the disk has it. The
    tier of the disk comes with `open_disk`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        keys: PageKeys,
        host: SlotTable,
        *,
        page_bytes: int,
        is_staging: bool = False,
    ) -> None:
        self.cache = cache
        self.keys = keys
        self.host: SlotTable = host
        self.disk: SlotTable | None = None
        self.page_bytes = page_bytes
        self.is_staging = is_staging
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.costs = RestoreCosts()
        self.is_off = False
        self._unsaved: OrderedDict[int, None] = OrderedDict()  # idle pages that were not looked at
        self._saving: dict[int, bool] = {}  # pages of the pool -> whether they left the cache
        self._held: set[int] = set()  # of these, idle ones
        self._dirty: OrderedDict[bytes, StoredPage] = OrderedDict()  # host pages that go to the disk next
        self._num_spilled = 0
        self._waiting: dict[bytes, list[Restore]] = {}  # by the key of a host page that is being filled
        self._restores: list[Restore] = []  # not done
        self._under_way: dict[int, UnderWay] = {}
        self._jobs: list[Job] = []
        self._num_jobs = 0
        self._journal: TierJournal | None = None
        cache.watch(self)

    def __repr__(self) -> str:
        disk = "" if self.disk is None else f", disk {self.disk!r}"
        off = ", off" * self.is_off
        return f"<CacheTiers host {self.host!r}{disk}{off}, {len(self._under_way)} copies under way>"

    # --- interface of the worker ----------------------------------------------------------------------------

    def keep_journal(self, journal: TierJournal) -> None:
        """Tell `journal` of the pages that each tier has. Only one, at the start."""
        assert not len(self.host), "it sees every page"
        assert self.disk is None, "it sees every page"
        self._journal = journal
        self.host.keep_journal(journal)

    def open_disk(self, disk: SlotTable) -> None:
        """Use a disk tier from now on."""
        assert self.disk is None, self
        self.disk = disk
        disk.keep_journal(self._journal)
        for page in self.host:
            if page.is_ready and not page.is_bad and page.key not in disk:
                self._dirty[page.key] = page

    def close_disk(self, reason: str) -> None:
        """Turn the disk tier off, with one line. What it has under way ends by itself."""
        if self.disk is None:
            return
        logger.error("the disk tier of the KV cache is off: %s", reason)
        self.disk.end_journal()
        self.disk = None
        self._dirty.clear()
        for page in self.host:
            if page.is_ready and not page.may_leave:
                self.host.release(page)
        if self.is_staging:
            self._turn_off()

    def rebase(self, fingerprint: str) -> None:
        """Pages depend on other weights from now on; the cache was cleared before."""
        self.keys.rebase(fingerprint)
        self._dirty.clear()
        self.host.clear()

    def knows(self, token_ids: Sequence[int], limit: int, salt: str, pages: Sequence[int], have: int) -> bool:
        """Whether `begin` would find a page."""
        end = min(limit, len(token_ids)) // self.cache.page_size
        if self.is_off or have >= end:
            return False
        before = pages[have - 1] if have else ROOT
        found = next(iter(self.keys.of_prompt(before, token_ids, have, have + 1, salt)), None)
        return found is not None and (self._is_stored(found[1]) or self._leader_of(found[1]) is not None)

    def begin(
        self,
        token_ids: Sequence[int],
        limit: int,
        salt: str,
        pages: Sequence[int],
        have: int,
        now: float,
        compute_time: ComputeTime | None = None,
    ) -> Restore | None:
        """Start to restore the prompt `token_ids` behind its first `have` pages, which are cached, within
        `limit` tokens. None: no tier has its next page, or its tokens are computed sooner.

        `pages` are the request's; those behind `have` are its own, and get the content. `now`: monotonic
        seconds. `compute_time`: of tokens of this prompt; None: not known, or it is not computed here.
        """
        if self.is_off:
            return None
        size = self.cache.page_size
        before = pages[have - 1] if have else ROOT
        wanted: list[tuple[bytes, bytes]] = []
        for parent, key in self.keys.of_prompt(
            before, token_ids, have, min(limit, len(token_ids)) // size, salt
        ):
            if not wanted and (leader := self._leader_of(key)) is not None:
                return self._follow(leader, key, now)
            if not self._is_stored(key):
                break
            wanted.append((parent, key))
        if compute_time is not None:
            num_sooner = self._num_sooner([key for _, key in wanted], compute_time, now)
            self.counters["tier_declined_restores"] += num_sooner < len(wanted)
            del wanted[num_sooner:]
        restore: Restore | None = None
        fetches: list[tuple[StoredPage, StoredPage]] = []
        for place, (parent, key) in enumerate(wanted, have):
            stored = self._find(key, parent, place * size, fetches)
            if stored is None:
                break
            if restore is None:
                restore = Restore(first_key=key, pages=[], stored=[], patience=now + FETCH_PATIENCE_S)
            restore.pages.append(pages[place])
            restore.stored.append(stored)
            if stored.is_ready:
                self.host.hold(stored)
            else:
                self._waiting.setdefault(key, []).append(restore)
        if restore is None:
            return None
        self.cache.allocator.retain(restore.pages)
        restore.from_disk = {disk_page.key for _, disk_page in fetches}
        self._restores.append(restore)
        self._touch(restore)
        for start in range(0, len(fetches), JOB_PAGES):
            self._fetch(fetches[start : start + JOB_PAGES], now)
        self._load_if_ready(restore, now)
        return restore

    def give_up(self, restore: Restore) -> None:
        """The request went away. Its pages keep their second owner while a copy may write them."""
        if restore.state is RestoreState.WAITING:
            self._cut(restore, 0)
            self._end(restore, 0)

    def turn(self, now: float) -> None:
        """Ask for the copies that are due, at `now`."""
        for restore in [one for one in self._restores if one.state is RestoreState.WAITING]:
            if now >= restore.patience:
                self.counters["tier_late_restores"] += 1
                self._proceed(restore, now)
        if self.disk is not None and any(
            now - one.since > DISK_PATIENCE_S
            for one in self._under_way.values()
            if isinstance(one.job, (Spill, Fetch))
        ):
            self.close_disk(f"it did not answer for {DISK_PATIENCE_S:g} s")
        if not self.is_off:
            self._save_some(now)
            self._spill_some(now)

    def take_jobs(self) -> list[Job]:
        """The copies that are wanted since the last call."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def done(self, done: JobDone, now: float) -> None:
        """A copy has ended."""
        under_way = self._under_way.pop(done.number)
        if isinstance(under_way.job, (Load, Fetch)) and not done.fault:
            time = self.costs.load if isinstance(under_way.job, Load) else self.costs.fetch
            time.ended(len(done.digests), under_way.since, done.ended)
        match under_way.job:
            case Save():
                self._saved(under_way, done, now)
            case Load():
                self._loaded(under_way, done)
            case Spill():
                self._spilled(under_way, done)
            case Fetch():
                self._fetched(under_way, done, now)
        if done.fault and isinstance(under_way.job, (Spill, Fetch)):
            self.close_disk(done.fault)
        elif done.fault and not self.is_off:
            logger.error("the host tier of the KV cache is off: %s", done.fault)
            self._turn_off()

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way or wanted."""
        return bool(self._under_way or self._jobs)

    @property
    def host_bytes(self) -> tuple[int, int]:
        """(bytes of stored pages, budget) of the host tier."""
        return len(self.host) * self.page_bytes, self.host.num_slots * self.page_bytes

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """(bytes of stored pages, budget) of the disk tier; (0, 0) without one."""
        disk = self.disk
        return (0, 0) if disk is None else (len(disk) * self.page_bytes, disk.num_slots * self.page_bytes)

    def check_integrity(self) -> None:
        """Assert the books of both tiers, and that every page in flight has an owner."""
        self.cache.check_integrity()
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()
        allocator = self.cache.allocator
        for page in self._saving:
            assert allocator.refs(page) > 0, f"page {page} was freed while it is saved"
        for restore in self._restores:
            assert not restore.is_done, restore
            for page in restore.pages:
                assert allocator.refs(page) > 0, f"page {page} was freed while it is restored"
        holds: dict[bytes, int] = {}
        for each in self._under_way.values():
            if isinstance(each.job, Spill):
                for stored in each.stored:
                    holds[stored.key] = holds.get(stored.key, 0) + 1
        for restore in self._restores:
            for stored in restore.stored:
                holds[stored.key] = holds.get(stored.key, 0) + stored.is_ready
        for stored in self.host:
            assert stored.num_holds == holds.get(stored.key, 0), f"{stored}: holds {holds.get(stored.key)}"

    # --- the cache's pages (PageWatcher) --------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Idle pages that are being saved."""
        return len(self._held)

    def turned_idle(self, page: int) -> None:
        """The page may be evicted: it is saved in its turn."""
        if page in self._saving:
            self._held.add(page)
        elif not self.is_off:
            self._unsaved[page] = None

    def turned_busy(self, page: int) -> None:
        """The page is used again."""
        self._unsaved.pop(page, None)
        self._held.discard(page)

    def leaves(self, page: int) -> bool:
        """The page leaves the cache; one that is being saved stays allocated until its copy has ended."""
        is_new = page in self._unsaved
        self._unsaved.pop(page, None)
        if is_new and not self._is_stored(self.keys.of_page(page)):
            self.counters["tier_lost_pages"] += 1
        self.keys.forget(page)
        if page not in self._saving:
            return False
        self._saving[page] = True
        self._held.discard(page)
        return True

    # --- saves ----------------------------------------------------------------------------------------------

    @property
    def _margin(self) -> int:
        """Pages of the pool that are to be free or saved: so many can be allocated without a loss.

        Tiers that are hardly larger than the pool would else hold little but copies of what is in the pool.
        """
        slots = self.host.num_slots + (0 if self.disk is None else self.disk.num_slots)
        return max(1, min(self.cache.allocator.num_total, slots // 2))

    def _save_some(self, now: float) -> None:
        """Saves the idle pages that are evicted next, while too few pages are free or saved."""
        most = min(MOST_SAVED, max(1, self.cache.allocator.num_total // SAVED_SHARE))
        known = self.cache.num_idle - len(self._unsaved) + self.cache.allocator.num_free
        moves: list[PageMove] = []
        stored: list[StoredPage] = []
        for _ in range(MOST_EXAMINED):
            if not self._unsaved or known >= self._margin or len(self._saving) >= most:
                break
            page, _none = self._unsaved.popitem(last=False)
            known += 1
            key = self.keys.of_page(page)
            if self._is_stored(key):
                continue
            parent = self.keys.of_page(self.cache.parent_of(page))
            place = self.host.reserve(key, parent, self.keys.place_of(page) * self.cache.page_size)
            if place is None:
                self._unsaved[page] = None
                self._unsaved.move_to_end(page, last=False)
                break
            self._saving[page] = False
            self._held.add(page)
            moves.append(PageMove(key=key, slot=place.slot, page=page))
            stored.append(place)
        for start in range(0, len(moves), JOB_PAGES):
            end = start + JOB_PAGES
            self._give_out(Save, moves[start:end], stored[start:end], now)

    def _saved(self, under_way: UnderWay, done: JobDone, now: float) -> None:
        for move, stored, digest in zip(under_way.job.moves, under_way.stored, done.digests, strict=True):
            has_left = self._saving.pop(move.page)
            self._held.discard(move.page)
            if has_left:
                self.cache.allocator.release([move.page], is_used=False)
            if digest is None:
                self._filling_failed(stored, now)
                continue
            self.counters["host_saved_bytes"] += self.page_bytes
            self.host.commit(stored, digest, may_leave=not (self.is_staging and self.disk is not None))
            if self.disk is not None:
                self._dirty[stored.key] = stored
            self._filled(stored, now)
        if len(self._dirty) > 2 * self.host.num_slots:  # of a slow disk: many were evicted before their turn
            self._dirty = OrderedDict(
                (key, page) for key, page in self._dirty.items() if self.host.get(key) is page
            )

    # --- disk -----------------------------------------------------------------------------------------------

    def _spill_some(self, now: float) -> None:
        """Writes host pages to the disk, the one stored first first."""
        disk = self.disk
        if disk is None:
            return
        pairs: list[tuple[StoredPage, StoredPage]] = []
        while self._dirty and self._num_spilled + len(pairs) < MOST_SPILLED:
            key, page = self._dirty.popitem(last=False)
            if self.host.get(key) is not page:
                continue  # it was evicted before its turn
            if key in disk:
                self.host.release(page)
                continue
            place = disk.reserve(key, page.parent, page.depth)
            if place is None:
                self._dirty[key] = page
                self._dirty.move_to_end(key, last=False)
                break
            self.host.hold(page)
            pairs.append((page, place))
        for start in range(0, len(pairs), JOB_PAGES):
            part = pairs[start : start + JOB_PAGES]
            self._num_spilled += len(part)
            moves = [_disk_move(page, place, page.digest) for page, place in part]
            self._give_out(
                Spill, moves, [page for page, _ in part], now, on_disk=[place for _, place in part]
            )

    def _spilled(self, under_way: UnderWay, done: JobDone) -> None:
        self._num_spilled -= len(under_way.stored)
        for page, place, digest in zip(under_way.stored, under_way.on_disk, done.digests, strict=True):
            page.may_leave = True
            self.host.let_go(page)
            if self.disk is None or place.key not in self.disk:
                continue
            if digest is None or page.is_bad:
                self.disk.remove(place)
            else:
                self.counters["disk_written_bytes"] += self.page_bytes
                self.disk.commit(place, digest)

    def _fetch(self, pairs: Sequence[tuple[StoredPage, StoredPage]], now: float) -> None:
        moves = [_disk_move(page, place, place.digest) for page, place in pairs]
        self._give_out(Fetch, moves, [page for page, _ in pairs], now, on_disk=[place for _, place in pairs])

    def _fetched(self, under_way: UnderWay, done: JobDone, now: float) -> None:
        for page, place, digest in zip(under_way.stored, under_way.on_disk, done.digests, strict=True):
            if self.disk is not None and self.disk.get(place.key) is place:
                self.disk.let_go(place)
            if digest is not None:
                self.counters["disk_read_bytes"] += self.page_bytes
                self.host.commit(page, digest)
                self._filled(page, now)
                continue
            if not done.fault:
                self._bad_on_disk()
                if self.disk is not None and self.disk.get(place.key) is place:
                    self.disk.discard(place)
            self._filling_failed(page, now)

    # --- restores -------------------------------------------------------------------------------------------

    def _num_sooner(self, keys: Sequence[bytes], compute_time: ComputeTime, now: float) -> int:
        """How many of the stored pages `keys`, which follow each other, come back and are not computed: all,
        those before the first one from the disk, or none.
        """
        fetching = {page.key for page in self._pages_of(Fetch)}
        is_slow = [key in fetching or key not in self.host for key in keys]
        num_fast = is_slow.index(True) if True in is_slow else len(keys)
        num_slow, size = len(keys) - num_fast, self.cache.page_size
        if num_fast and not self.costs.is_sooner(
            num_fetched=0,
            num_loaded=len(self._pages_of(Load)) + num_fast,
            compute_s=compute_time(num_fast * size),
            now=now,
        ):
            return 0
        if num_slow and not self.costs.is_sooner(
            num_fetched=len(fetching) + sum(key not in self.host for key in keys),
            num_loaded=num_slow,
            compute_s=compute_time(num_slow * size),
            now=now,
        ):
            return num_fast
        return len(keys)

    def _pages_of(self, kind: type[Job]) -> list[StoredPage]:
        """The host pages of all jobs of a kind under way."""
        return [page for one in self._under_way.values() if isinstance(one.job, kind) for page in one.stored]

    def _find(
        self, key: bytes, parent: bytes, depth: int, fetches: list[tuple[StoredPage, StoredPage]]
    ) -> StoredPage | None:
        """The host page of `key`, ready or being filled; None if no tier has it, or no slot is free for it.

        A page on disk is added to `fetches`.
        """
        found = self.host.get(key)
        if found is not None or key in self.host:
            return found or self.host.filling(key)
        on_disk = None if self.disk is None else self.disk.get(key)
        if on_disk is None or self.disk is None:
            return None
        place = self.host.reserve(key, parent, depth)
        if place is None:
            return None
        self.disk.hold(on_disk)
        fetches.append((place, on_disk))
        return place

    def _leader_of(self, key: bytes) -> Restore | None:
        """The restore under way that begins with the page `key`."""
        return next((one for one in self._restores if one.first_key == key and one.leader is None), None)

    def _follow(self, leader: Restore, key: bytes, now: float) -> Restore:
        restore = Restore(
            first_key=key, pages=[], stored=[], patience=now + 2 * FETCH_PATIENCE_S, leader=leader
        )
        self._restores.append(restore)
        return restore

    def _touch(self, restore: Restore) -> None:
        """Notes the use of the prefix in both tiers."""
        ready = [page for page in restore.stored if page.is_ready]
        if ready:
            self.host.hit(ready[-1])
        on_disk = None if self.disk is None else self.disk.get(restore.stored[-1].key)
        if on_disk is not None and self.disk is not None:
            self.disk.hit(on_disk)

    def _filled(self, page: StoredPage, now: float) -> None:
        """A host page is ready: the restores that wait for it go on."""
        for restore in self._waiting.pop(page.key, ()):
            self.host.hold(page)
            self._load_if_ready(restore, now)

    def _filling_failed(self, page: StoredPage, now: float) -> None:
        """A host page will not be ready: the restores that wait for it do without it and those behind."""
        for restore in list(self._waiting.get(page.key, ())):
            self._cut(restore, restore.stored.index(page))
            self._load_if_ready(restore, now)
        self.host.remove(page)

    def _proceed(self, restore: Restore, now: float) -> None:
        """Goes on with the pages that are ready."""
        ready = [page.is_ready for page in restore.stored]
        self._cut(restore, ready.index(False) if False in ready else len(ready))
        if restore.leader is not None:
            self._end(restore, 0)
        else:
            self._load_if_ready(restore, now)

    def _cut(self, restore: Restore, count: int) -> None:
        """Leaves the pages from `count` on out of a restore that waits."""
        for page in restore.stored[count:]:
            if page.is_ready:
                self.host.let_go(page)
            else:
                waiting = self._waiting[page.key]
                waiting.remove(restore)
                if not waiting:
                    del self._waiting[page.key]
        self.cache.allocator.release(restore.pages[count:], is_used=False)
        del restore.stored[count:], restore.pages[count:]

    def _load_if_ready(self, restore: Restore, now: float) -> None:
        if restore.leader is not None or not all(page.is_ready for page in restore.stored):
            return
        if not restore.stored:
            self._end(restore, 0)
            return
        restore.state = RestoreState.LOADING
        moves = [
            PageMove(key=stored.key, slot=stored.slot, page=page, digest=stored.digest)
            for stored, page in zip(restore.stored, restore.pages, strict=True)
        ]
        self._give_out(Load, moves, restore.stored, now, restore=restore)

    def _loaded(self, under_way: UnderWay, done: JobDone) -> None:
        restore = under_way.restore
        assert restore is not None
        pairs = list(zip(under_way.stored, done.digests, strict=True))
        bad = [place for place, (stored, digest) in enumerate(pairs) if digest != stored.digest]
        good = bad[0] if bad else len(pairs)
        num_read = sum(stored.key in restore.from_disk for stored, _ in pairs[:good])
        self.counters["disk_hit_tokens"] += num_read * self.cache.page_size
        self.counters["host_hit_tokens"] += (good - num_read) * self.cache.page_size
        for stored in [pairs[place][0] for place in bad if not done.fault]:
            if not stored.is_bad:
                self._found_bad(stored, restore)
        for stored in under_way.stored:
            self.host.let_go(stored)
        self.counters["host_loaded_bytes"] += len(under_way.stored) * self.page_bytes
        self.cache.allocator.release(restore.pages, is_used=False)
        restore.stored = []
        self._end(restore, good)

    def _end(self, restore: Restore, num_pages: int) -> None:
        restore.state, restore.num_pages = RestoreState.DONE, num_pages
        self._restores.remove(restore)
        for other in [one for one in self._restores if one.leader is restore]:
            self._end(other, 0)

    # --- parts ----------------------------------------------------------------------------------------------

    def _found_bad(self, stored: StoredPage, restore: Restore) -> None:
        """A host page was damaged when it came into the pool."""
        if stored.key in restore.from_disk:
            self._bad_on_disk()
        else:
            self._bad_in_host()
        self.host.discard(stored)
        if self.disk is not None and (on_disk := self.disk.get(stored.key)) is not None:
            self.disk.discard(on_disk)  # it may be the same, where only the pool's memory is digested

    def _bad_on_disk(self) -> None:
        self.counters["disk_bad_pages"] += 1
        logger.warning("a page of the disk tier is damaged, its tokens are computed again")

    def _bad_in_host(self) -> None:
        self.counters["host_bad_pages"] += 1
        logger.warning("a page of the host tier is damaged, its tokens are computed again")

    def _turn_off(self) -> None:
        self.is_off = True
        self._unsaved.clear()
        self.host.end_journal()

    def _is_stored(self, key: bytes) -> bool:
        return key in self.host or (self.disk is not None and key in self.disk)

    def _give_out(
        self,
        kind: type[Job],
        moves: Iterable[PageMove],
        stored: Sequence[StoredPage],
        now: float,
        *,
        on_disk: Sequence[StoredPage] = (),
        restore: Restore | None = None,
    ) -> None:
        self._num_jobs += 1
        job = kind(number=self._num_jobs, moves=tuple(moves))
        self._under_way[job.number] = UnderWay(
            job=job, since=now, stored=tuple(stored), on_disk=tuple(on_disk), restore=restore
        )
        self._jobs.append(job)


def _disk_move(page: StoredPage, place: StoredPage, digest: int) -> PageMove:
    """The move of a page between its host slot and its place on disk."""
    return PageMove(
        key=page.key,
        slot=page.slot,
        disk_slot=place.slot,
        digest=digest,
        parent=page.parent,
        depth=page.depth,
    )
