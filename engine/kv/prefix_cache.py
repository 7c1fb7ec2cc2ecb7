"""A trie over full pages: a prompt that shares a prefix with an earlier one skips the common pages.

    page of a node    whole, final, read-only: each request that matched it holds its own reference
    busy              the node's page has an owner besides the cache, or a node below it is busy
    idle              not busy: it and all nodes below it may be evicted

    bare              the node's page, or one before it, has no features: its KV came from a decode worker

A node turns idle after all its children. In the order of turning idle, children therefore precede parents,
and the least recently used come first. Eviction takes the front of this order, which is always a leaf.

Equal tokens may have a bare node beside one that is not. All nodes behind a bare one are bare, so a path is
whole up to one page and bare from there on.

In an engine with window pages, a page may be cached without its window page. A hit then ends where the window
of the next row finds all of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from .page_names import TOKEN_BYTES, page_parts
from .pool import PageAllocator, PoolExhausted
from .window_pages import WindowPages

ROOT = 0  # the page that is never handed out
BARE = 1 << 63  # in the key of a bare node, beside the parent


class CacheJournal(Protocol):
    """An observer of the content of a cache."""

    def entered(self, page: int) -> None:
        """The page is cached from now on."""

    def left(self, page: int) -> None:
        """The page leaves the cache; it is still cached during this call. Children leave before parents."""


class PageWatcher(Protocol):
    """An observer of a cache that copies its pages elsewhere before they are evicted.

    It sees no bare page.
    """

    @property
    def num_held(self) -> int:
        """Idle pages that a copy reads: their memory is not free when they are evicted."""

    def turned_idle(self, page: int) -> None:
        """The page may be evicted from now on."""

    def turned_busy(self, page: int) -> None:
        """The page may not be evicted any more."""

    def leaves(self, page: int) -> bool:
        """The page leaves the cache. True: the observer keeps the cache's reference, and releases it."""


class PrefixCache:
    """Shares pages between requests and allocates new ones, evicting the least recently used ones.

    An allocator has one cache, used by one thread. Owners take pages by `match` and `alloc` and return them
    by `allocator.release`. A page passed to `insert` stays after its last owner has left, until it is
    evicted. With `enabled=False`, nothing is cached and `alloc` is the allocator's.

    A prefix belongs to a `salt`, such as a tenant's name: equal tokens under another salt are another prefix.

    `lookahead` tokens behind a page are part of its key. Draft KV in a page's last row depends on the token
    that follows (engine.speculative), so only prompts that agree on that token share the page.

    Bare pages are for callers that read no features of them, which say how far they take bare ones.
    `windows`: the window pages, for a model with windows.

    A node is the number of its page, and its facts are entries of lists: a long prompt has thousands of
    nodes, and as many objects would keep the garbage collector busy.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        enabled: bool = True,
        *,
        lookahead: int = 0,
        windows: WindowPages | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size {page_size}: a page holds at least 1 token")
        self.allocator = allocator
        self.page_size = page_size
        self.enabled = enabled
        self.lookahead = lookahead
        self.windows = windows
        self._children: dict[bytes, int] = {}  # nodes by key; a key begins with the parent
        self._key_of = [b""] * allocator.num_pages  # by node; empty for a page that is not cached
        self._parent = [ROOT] * allocator.num_pages
        self._is_bare = bytearray(allocator.num_pages)  # by node
        self._num_bare = 0
        # busy children of a node, plus 1 if the page has an owner besides the cache
        self._num_busy = [0] * allocator.num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # nodes in the order in which they turned idle
        self._watcher: PageWatcher | None = None
        self._journal: CacheJournal | None = None
        allocator.watch(self._on_refs)
        if windows is not None:
            windows.bind(lambda page: bool(self._key_of[page]))

    @property
    def num_cached(self) -> int:
        """Pages held by the cache."""
        return len(self._children)

    @property
    def num_available(self) -> int:
        """Pages that `alloc` can return: free ones, and evictable ones that no copy reads."""
        return self.allocator.num_free + len(self._idle) - self.num_held

    @property
    def num_idle(self) -> int:
        """Pages that may be evicted."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        """Of these, the pages that a copy reads; they are available soon."""
        return 0 if self._watcher is None else self._watcher.num_held

    def watch(self, watcher: PageWatcher) -> None:
        """Tell `watcher` of pages that turn idle or busy and of those that leave. Only one, at the start."""
        assert self._watcher is None, "a cache has one watcher"
        assert not self._children, "it sees every page"
        self._watcher = watcher

    def keep_journal(self, journal: CacheJournal) -> None:
        """Tell `journal` of the pages that are cached, and of those that enter and leave. Only one."""
        assert self._journal is None, "a cache has one journal"
        self._journal = journal
        for page in self.cached_pages():
            journal.entered(page)

    def cached_pages(self) -> list[int]:
        """All cached pages, parents before their children."""
        return list(self._children.values())

    def is_bare(self, page: int) -> bool:
        """Whether a cached page, or one in front of it, has no features."""
        return bool(self._is_bare[page])

    def is_cached(self, page: int) -> bool:
        """Whether the cache is one of the owners of the page."""
        return bool(self._key_of[page])

    def num_busy(self, page: int) -> int:
        """Reasons for which a cached page may not be evicted: its busy children, and an owner besides the
        cache.
        """
        return self._num_busy[page]

    def parent_of(self, page: int) -> int:
        """The cached page in front of a cached page; ROOT for a first one."""
        assert self._key_of[page], f"page {page} is not cached"
        return self._parent[page]

    def part_of(self, page: int) -> bytes:
        """The part of a cached page, as `parts` gives it."""
        return self._key_of[page][TOKEN_BYTES:]

    def parts(self, token_ids: Sequence[int], first: int, end: int, salt: str) -> Iterator[bytes]:
        """For each page of [first, end) the bytes by which the cache tells it from others behind the same
        page: its tokens, and the salt behind those of page 0.
        """
        return self._tokens(token_ids, first, end, salt)

    def goes_on(self, token_ids: Sequence[int], pages: Sequence[int], limit: int, salt: str = "") -> bool:
        """Whether `match` without bare pages may find more than `pages`, the first ones of a prompt, within
        `limit` tokens.

        False is certain, and found by one look-up where the last of `pages` is cached itself.
        """
        count = len(pages)
        if (count + 1) * self.page_size > min(limit, len(token_ids)):
            return False
        node = pages[-1] if count else ROOT
        if node != ROOT and (not self._key_of[node] or self._is_bare[node]):
            return True  # the cache may have another page for the same tokens
        part = next(self._tokens(token_ids, count, count + 1, salt), None)
        return part is not None and _prefix(node) + part in self._children

    def match(
        self,
        token_ids: Sequence[int],
        limit: int,
        salt: str = "",
        held_from: Callable[[int], int] = lambda num_pages: 0,
        *,
        bare_limit: int = 0,
    ) -> list[int]:
        """Retains and returns the cached pages of the longest common prefix within `limit` tokens.

        Tokens from `limit` on matter only where a page's lookahead reaches them. Bare pages are taken within
        the first `bare_limit` tokens only. With windows, a hit of n pages needs the window pages of the pages
        [held_from(n), n), and holds them; `held_from` does not fall.
        """
        limit = min(limit, len(token_ids))
        pages = list(self._walk(token_ids, limit, salt))
        if self._num_bare and bare_limit:
            pages = self._with_bare(pages, token_ids, min(limit, bare_limit), salt)
        if self.windows is not None:
            del pages[_usable(pages, self.windows, held_from) :]
            self.windows.hold(pages[held_from(len(pages)) :])
        self.allocator.retain(pages)
        return pages

    def insert(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        salt: str = "",
        *,
        num_whole: int | None = None,
    ) -> int:
        """Offer the whole pages of `token_ids`, which the caller holds in `pages`.

        Returns the number of newly cached pages. Pages from `num_whole` on enter as bare ones; None: none do.

        A page whose lookahead exceeds `token_ids` is not offered. For a prefix that is cached already, the
        cache keeps its own page. The caller keeps its references and must not write these pages any more.
        """
        if not self.enabled:
            return 0
        num_pages = max(0, len(token_ids) - self.lookahead) // self.page_size
        assert len(pages) >= num_pages, (len(pages), num_pages)
        num_whole = num_pages if num_whole is None else num_whole
        known = list(self._walk(token_ids, num_pages * self.page_size, salt))
        if num_whole < num_pages and self._num_bare:
            known = self._with_bare(known, token_ids, num_pages * self.page_size, salt)
        self._touch(known)
        if self.windows is not None:
            for mine, cached in zip(pages, known, strict=False):
                if mine != cached:
                    self.windows.bequeath(mine, cached)
        tokens = self._tokens(token_ids, len(known), num_pages, salt)
        parent = known[-1] if known else ROOT
        self._extend(parent, tokens, pages[len(known) : num_pages], max(0, num_whole - len(known)))
        return num_pages - len(known)

    def alloc(self, n: int) -> list[int]:
        """`n` pages with one owner each, all or none, evicting idle pages if needed. Raises PoolExhausted."""
        if n > self.num_available:
            raise PoolExhausted(
                f"{n} pages asked for, {self.allocator.num_free} free and {len(self._idle)} evictable "
                f"of {self.allocator.num_total}" + (f", {self.num_held} being copied" * (self.num_held > 0))
            )
        self._evict(n - self.allocator.num_free)
        return self.allocator.alloc(n)

    def clear(self) -> None:
        """Forget everything. Pages with other owners stay theirs."""
        cached = self.cached_pages()[::-1]
        pages = [page for page in cached if not self._says_goodbye(page)]
        self._children.clear()
        self._idle.clear()
        for page in cached:
            self._key_of[page] = b""
            self._is_bare[page] = False
            if self.windows is not None:
                self.windows.left(page)
        self._num_bare = 0
        self.allocator.release(pages, is_used=False)

    def forget(self, pages: Sequence[int]) -> None:
        """Takes `pages` out of the cache, those that are in it, and all pages behind them."""
        gone = {page for page in pages if self._key_of[page]}
        if not gone:
            return
        for page in [page for page in self._children.values() if page not in gone]:
            path, at = [page], self._parent[page]
            while at not in (ROOT, *gone):
                path.append(at)
                at = self._parent[at]
            if at != ROOT:
                gone.update(path)
        for page in gone:
            parent = self._parent[page]
            if self._num_busy[page] and parent not in gone:
                self._shift(parent, -1)
        children_first = [page for page in reversed(self.cached_pages()) if page in gone]
        kept = {page for page in children_first if self._says_goodbye(page)}
        for page in gone:
            self._idle.pop(page, None)
            self._leave(page)
        self.allocator.release(gone - kept, is_used=False)

    def check_integrity(self) -> None:
        """Assert that trie, busy counts and eviction order agree with each other and with the allocator."""
        self.allocator.check_integrity()
        if self.windows is not None:
            self.windows.check_integrity(self.allocator.refs)
        cached = [page for page, key in enumerate(self._key_of) if key]
        assert {self._key_of[page]: page for page in cached} == self._children
        assert len(cached) == len(self._children), "two pages have the same key"
        busy_children: dict[int, int] = {}
        rank = {page: i for i, page in enumerate(self._idle)}
        for page in cached:
            parent, key = self._parent[page], self._key_of[page]
            assert parent == ROOT or self._key_of[parent], f"the parent of page {page} is not cached"
            is_bare = self.is_bare(page)
            assert key.startswith(_prefix(parent, is_bare=is_bare)), page
            assert is_bare >= (parent != ROOT and self.is_bare(parent)), f"page {page} is behind a bare one"
            width = (1 + self.page_size + self.lookahead) * TOKEN_BYTES
            assert len(key) == width or (parent == ROOT and len(key) > width), page
            assert self.allocator.refs(page) >= 1, f"page {page} is cached and free"
            busy_children[parent] = busy_children.get(parent, 0) + (self._num_busy[page] > 0)
            assert parent not in rank or rank[page] < rank[parent], "a parent goes before its child"
        for page in cached:
            shared = self.allocator.refs(page) > 1
            assert self._num_busy[page] == shared + busy_children.get(page, 0), page
            assert (self._num_busy[page] == 0) == (page in rank), page
        assert self._num_bare == sum(map(self.is_bare, cached)), self._num_bare
        assert sum(self._is_bare) == self._num_bare, "a page that is not cached counts as bare"

    def __repr__(self) -> str:
        state = "" if self.enabled else " off,"
        return (
            f"<PrefixCache{state} {self.num_cached} pages cached, {len(self._idle)} evictable, "
            f"{self.allocator.num_free} free of {self.allocator.num_total}>"
        )

    def _tokens(self, token_ids: Sequence[int], first: int, end: int, salt: str) -> Iterator[bytes]:
        """The parts of pages [first, end)."""
        size, lookahead = self.page_size, self.lookahead
        return page_parts(token_ids, first, end, page_size=size, lookahead=lookahead, salt=salt)

    def _walk(self, token_ids: Sequence[int], limit: int, salt: str) -> Iterator[int]:
        """The nodes of the longest cached prefix, root side first."""
        node, children = ROOT, self._children
        if not children:
            return
        for tokens in self._tokens(token_ids, 0, limit // self.page_size, salt):
            child = children.get(_prefix(node) + tokens)
            if child is None:
                return
            yield child
            node = child

    def _walk_bare(self, parent: int, parts: Iterable[bytes]) -> Iterator[int]:
        """The bare nodes that follow `parent`, as far as `parts` go."""
        node = parent
        for part in parts:
            child = self._children.get(_prefix(node, is_bare=True) + part)
            if child is None:
                return
            yield child
            node = child

    def _with_bare(self, whole: list[int], token_ids: Sequence[int], limit: int, salt: str) -> list[int]:
        """The longest path within `limit` tokens that leaves the path `whole` for bare nodes; else `whole`.

        Of two equally long ones, the one with more whole nodes.
        """
        parts = list(self._tokens(token_ids, 0, limit // self.page_size, salt))
        longest = whole
        for at in range(min(len(whole), len(parts)) + 1):
            bare = list(self._walk_bare(whole[at - 1] if at else ROOT, parts[at:]))
            if len(whole) < at + len(bare) >= len(longest):
                longest = [*whole[:at], *bare]
        return longest

    def _extend(self, parent: int, tokens: Iterator[bytes], pages: Sequence[int], num_whole: int) -> None:
        """Adds a path of new nodes below `parent`, bare ones from `num_whole` on. The caller owns `pages`, so
        all of them are busy.
        """
        if not pages:
            return
        keys, parents, num_busy, node = self._key_of, self._parent, self._num_busy, parent
        # Retained before they are indexed, so that `_on_refs` does not see the cache's own references.
        self.allocator.retain(pages)
        for place, (part, page) in enumerate(zip(tokens, pages, strict=True)):
            assert not keys[page], f"page {page} holds another prefix"
            is_bare = place >= num_whole
            keys[page] = key = _prefix(node, is_bare=is_bare) + part
            self._children[key] = page
            self._is_bare[page] = is_bare
            self._num_bare += is_bare
            parents[page] = node
            num_busy[page] = 2  # the caller's reference and the child below
            node = page
        num_busy[node] = 1
        self._shift(parent, 1)
        if self._journal is not None:
            for page in pages:
                self._journal.entered(page)

    def _evict(self, count: int) -> None:
        """Evicts the pages that were used least recently, so that `count` are free; none for a negative
        number.
        """
        pages: list[int] = []
        while len(pages) < count:
            page, _none = self._idle.popitem(last=False)
            is_kept = self._says_goodbye(page)
            self._leave(page)
            if not is_kept:
                pages.append(page)
        self.allocator.release(pages, is_used=False)  # its last user was the last to stamp it

    def _leave(self, page: int) -> None:
        """The page is found no more."""
        del self._children[self._key_of[page]]
        self._key_of[page] = b""
        self._num_bare -= self._is_bare[page]
        self._is_bare[page] = False
        if self.windows is not None:
            self.windows.left(page)

    def _says_goodbye(self, page: int) -> bool:
        """Tells the observers that the page leaves. True: the watcher keeps the cache's reference."""
        if self._journal is not None:
            self._journal.left(page)
        return self._watcher is not None and not self._is_bare[page] and self._watcher.leaves(page)

    def _touch(self, path: Sequence[int]) -> None:
        for page in reversed(path):
            if page in self._idle:
                self._idle.move_to_end(page)

    def _on_refs(self, page: int, refs: int, change: int) -> None:
        """Observes the allocator: `page` now has `refs` owners, the cache among them.

        Only the second owner makes it busy.
        """
        if refs == (2 if change > 0 else 1) and self._key_of[page]:
            self._shift(page, change)

    def _shift(self, node: int, change: int) -> None:
        """Adds `change` busy reasons to `node`, and to its ancestors as far as nodes turn busy or idle."""
        num_busy, idle, watcher = self._num_busy, self._idle, self._watcher
        while node != ROOT:
            num_busy[node] += change
            if change > 0 and num_busy[node] == 1:
                idle.pop(node, None)  # a new node was never idle
                if watcher is not None and not self._is_bare[node]:
                    watcher.turned_busy(node)
            elif change < 0 and num_busy[node] == 0:
                idle[node] = None
                if watcher is not None and not self._is_bare[node]:
                    watcher.turned_idle(node)
            else:
                return
            node = self._parent[node]


def _usable(pages: Sequence[int], windows: WindowPages, held_from: Callable[[int], int]) -> int:
    """The most of the first `pages` of which the last ones, from `held_from` on, have window pages."""
    found, missing = 0, -1
    for count, page in enumerate(pages, start=1):
        if not windows.of(page):
            missing = count - 1
        if missing < held_from(count):
            found = count
    return found


def _prefix(parent: int, *, is_bare: bool = False) -> bytes:
    """The first bytes of the key of a node below `parent`."""
    return (parent | BARE if is_bare else parent).to_bytes(TOKEN_BYTES, "little")
