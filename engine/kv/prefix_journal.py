"""The pages that a worker holds, as changes for those who send it requests.

A page may lie in the pool, in host memory and on disk at once. It is held while it is somewhere, and told
under its name (`page_names`). `take` gives the changes since the last call, a bounded number at a time; the
rest waits for the next call. A page that came and went meanwhile costs nothing that lasts. `restart` begins
anew with everything that is held, for a reader that has missed something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from .page_names import PageScheme, name_of
from .prefix_cache import PrefixCache
from .tiers.page_keys import PageKeys


@dataclass(frozen=True, kw_only=True)
class JournalPart:
    """Changes in one message: names of pages. `is_first`: all that was told before is void. `is_last`: all
    that was held then has been told anew.
    """

    scheme: PageScheme
    is_first: bool
    is_last: bool
    added: Sequence[bytes]
    removed: Sequence[bytes]


class PrefixJournal:
    """The journal of `cache` and of the tiers below it, under the keys of `keys`.

    Keys are computed later, since most pages of a busy worker come with others at once: by `work`, while the
    device computes, and the rest when they are told. Pages that leave are counted then too: they leave when a
    prompt waits for their memory.
    """

    def __init__(self, cache: PrefixCache, keys: PageKeys) -> None:
        self.keys = keys
        self._cache = cache
        self._new: dict[int, None] = {}  # pages of the pool whose names are not known, parents first
        self._names: dict[int, bytes] = {}  # of all other cached pages of the pool
        self._gone: list[bytes] = []  # names of pages that left the pool and are still counted
        self._places: dict[bytes, int] = {}  # by name: in how many places the page is
        self._changed: dict[bytes, None] = {}  # names whose pages came or went since they were told
        self._is_first = True
        self._num_anew = 0  # of the first changes: those that are told anew
        cache.keep_journal(self)

    def __repr__(self) -> str:
        waiting = len(self._new) + len(self._gone) + len(self._changed)
        return f"<PrefixJournal of {len(self._places)} pages, {waiting} changes to tell>"

    # --- what happens ---------------------------------------------------------------------------------------

    def entered(self, page: int) -> None:
        """A page of the pool is cached."""
        self._new[page] = None

    def left(self, page: int) -> None:
        """A page of the pool is not cached any more after this call."""
        name = self._names.pop(page, None)
        if name is None:
            del self._new[page]
        else:
            self._gone.append(name)
        self.keys.forget(page)

    def stored(self, key: bytes) -> None:
        """A tier has a copy of the page with this key."""
        self._count(name_of(key), 1)

    def removed(self, key: bytes) -> None:
        """The copy is gone, or of no use any more."""
        self._count(name_of(key), -1)

    # --- what is told ---------------------------------------------------------------------------------------

    def work(self, limit: int) -> None:
        """Does up to `limit` pages' part of what is left for the next call of `take`."""
        self._count_gone(limit)
        self._name_new(limit)

    def restart(self) -> None:
        """Tell everything that is held anew."""
        self._count_gone()
        self._is_first = True
        self._changed = dict.fromkeys(self._places)
        self._num_anew = len(self._changed)

    def take(self, limit: int) -> JournalPart | None:
        """Up to `limit` changes; None: there is nothing to tell."""
        self._count_gone()
        self._name_new(limit)
        if not (self._changed or self._is_first):
            return None
        added: list[bytes] = []
        removed: list[bytes] = []
        for name in list(self._changed)[:limit] if len(self._changed) > limit else self._changed:
            (added if name in self._places else removed).append(name)
        if len(added) + len(removed) == len(self._changed):
            self._changed = {}
        else:
            for name in (*added, *removed):
                del self._changed[name]
        is_first, self._is_first = self._is_first, False
        self._num_anew = max(0, self._num_anew - len(added) - len(removed))
        return JournalPart(
            scheme=self.keys.scheme,
            is_first=is_first,
            is_last=not self._num_anew,
            added=added,
            removed=removed,
        )

    def _name_new(self, limit: int) -> None:
        """Names the next pages of the pool."""
        for page in list(islice(self._new, limit)):
            del self._new[page]
            name = self._names[page] = name_of(self.keys.of_page(page), is_bare=self._cache.is_bare(page))
            self._count(name, 1)

    def _count_gone(self, limit: int | None = None) -> None:
        gone, self._gone = self._gone[:limit], [] if limit is None else self._gone[limit:]
        for name in gone:
            self._count(name, -1)

    def _count(self, name: bytes, change: int) -> None:
        count = self._places.get(name, 0) + change
        assert count >= 0, f"page {name.hex()} left more often than it came"
        if count:
            self._places[name] = count
        else:
            del self._places[name]
        if count == max(0, change):  # the first one came, or the last one went
            self._changed[name] = None
