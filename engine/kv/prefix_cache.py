"""A trie over full pages: a prompt that shares a prefix with an earlier one skips the common pages.

    page of a node    whole, final, read-only: each request that matched it holds its own reference
    busy              the node's page has an owner besides the cache, or a node below it is busy
    idle              not busy: it and all nodes below it may be evicted

A node turns idle after all its children. In the order of turning idle, children therefore precede parents,
and the least recently used come first. Eviction takes the front of this order, which is always a leaf.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from .pool import PageAllocator, PoolExhausted

_Key = tuple[int | str, ...]


class _Node:
    __slots__ = ("children", "key", "num_busy", "page", "parent")

    def __init__(self, key: _Key, page: int, parent: "_Node | None") -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[_Key, _Node] = {}
        self.num_busy = 0  # busy children, plus 1 if the page has an owner besides the cache


class PrefixCache:
    """Shares pages between requests and allocates new ones, evicting the least recently used ones.

    An allocator has one cache, used by one thread. Owners take pages by `match` and `alloc` and return them
    by `allocator.release`. A page passed to `insert` stays after its last owner has left, until it is
    evicted. With `enabled=False`, nothing is cached and `alloc` is the allocator's.

    A prefix belongs to a `salt`, such as a tenant's name: equal tokens under another salt are another prefix.

    `lookahead` tokens behind a page are part of its key. Draft KV in a page's last row depends on the token
    that follows (engine.speculative), so only prompts that agree on that token share the page.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, enabled: bool = True, *, lookahead: int = 0
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size {page_size}: a page holds at least 1 token")
        self.allocator = allocator
        self.page_size = page_size
        self.enabled = enabled
        self.lookahead = lookahead
        self._root = _Node((), 0, None)
        self._nodes: dict[int, _Node] = {}  # by page
        self._idle: OrderedDict[int, _Node] = OrderedDict()  # by page, in the order in which they turned idle
        allocator.watch(self._on_refs)

    @property
    def num_cached(self) -> int:
        """Pages held by the cache."""
        return len(self._nodes)

    @property
    def num_available(self) -> int:
        """Pages that `alloc` can return: free and evictable ones."""
        return self.allocator.num_free + len(self._idle)

    def match(self, token_ids: Sequence[int], limit: int, salt: str = "") -> list[int]:
        """Retains and returns the cached pages of the longest common prefix within `limit` tokens.

        Tokens from `limit` on matter only where a page's lookahead reaches them.
        """
        pages = [node.page for node in self._walk(token_ids, min(limit, len(token_ids)), salt)]
        self.allocator.retain(pages)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int], salt: str = "") -> int:
        """Offer the whole pages of `token_ids`, which the caller holds in `pages`.

        Returns the number of newly cached pages.

        A page whose lookahead exceeds `token_ids` is not offered. For a prefix that is cached already, the
        cache keeps its own page. The caller keeps its references and must not write these pages any more.
        """
        if not self.enabled:
            return 0
        num_pages = max(0, len(token_ids) - self.lookahead) // self.page_size
        assert len(pages) >= num_pages, (len(pages), num_pages)
        known = list(self._walk(token_ids, num_pages * self.page_size, salt))
        self._touch(known)
        node = known[-1] if known else self._root
        for i in range(len(known), num_pages):
            node = self._add(node, self._key(token_ids, i, salt), pages[i])
        return num_pages - len(known)

    def alloc(self, n: int) -> list[int]:
        """`n` pages with one owner each, all or none, evicting idle pages if needed. Raises PoolExhausted."""
        if n > self.num_available:
            raise PoolExhausted(
                f"{n} pages asked for, {self.allocator.num_free} free and {len(self._idle)} evictable "
                f"of {self.allocator.num_total}"
            )
        while self.allocator.num_free < n:
            self._evict_oldest()
        return self.allocator.alloc(n)

    def clear(self) -> None:
        """Forget everything. Pages with other owners stay theirs."""
        pages = list(self._nodes)
        self._nodes.clear()
        self._idle.clear()
        self._root = _Node((), 0, None)
        self.allocator.release(pages)

    def check_integrity(self) -> None:
        """Assert that trie, index, busy counts and eviction order agree with each other and with the
        allocator.
        """
        self.allocator.check_integrity()
        reached = self._reached()
        assert {node.page: node for node in reached} == self._nodes
        assert len(reached) == len(self._nodes), "a page is in two places"
        rank = {page: i for i, page in enumerate(self._idle)}
        for node in reached:
            assert len(node.key) == self.page_size + self.lookahead + (node.parent is self._root), node.page
            assert self.allocator.refs(node.page) >= 1, f"page {node.page} is cached and free"
            shared = self.allocator.refs(node.page) > 1
            assert node.num_busy == shared + sum(child.num_busy > 0 for child in node.children.values()), (
                node.page
            )
            assert (node.num_busy == 0) == (node.page in rank), node.page
            for key, child in node.children.items():
                assert child.parent is node, child.page
                assert child.key == key, child.page
                assert node.page not in rank or rank[child.page] < rank[node.page], (
                    "a parent goes before its child"
                )

    def __repr__(self) -> str:
        state = "" if self.enabled else " off,"
        return (
            f"<PrefixCache{state} {self.num_cached} pages cached, {len(self._idle)} evictable, "
            f"{self.allocator.num_free} free of {self.allocator.num_total}>"
        )

    def _key(self, token_ids: Sequence[int], i: int, salt: str) -> _Key:
        """The key of page `i`; the key of the first page begins with the salt."""
        tokens = tuple(token_ids[i * self.page_size : (i + 1) * self.page_size + self.lookahead])
        return tokens if i else (salt, *tokens)

    def _walk(self, token_ids: Sequence[int], limit: int, salt: str) -> Iterator[_Node]:
        """The nodes of the longest cached prefix, root side first."""
        node = self._root
        for i in range(limit // self.page_size):
            child = node.children.get(self._key(token_ids, i, salt))
            if child is None:
                return
            yield child
            node = child

    def _reached(self) -> list[_Node]:
        found: list[_Node] = []
        pending = [self._root]
        while pending:
            children = list(pending.pop().children.values())
            found += children
            pending += children
        return found

    def _add(self, parent: _Node, key: _Key, page: int) -> _Node:
        assert page not in self._nodes, f"page {page} holds another prefix"
        # Retained before it is indexed, so that `_on_refs` does not see the cache's own reference.
        self.allocator.retain([page])
        node = _Node(key, page, parent)
        parent.children[key] = node
        self._nodes[page] = node
        self._shift(node, 1)  # the caller's reference
        return node

    def _evict_oldest(self) -> None:
        page, node = self._idle.popitem(last=False)
        assert node.parent is not None, "the root has no page"
        assert not node.children, f"page {page} is no leaf"
        del self._nodes[page]
        del node.parent.children[node.key]
        self.allocator.release([page])

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            if node.page in self._idle:
                self._idle.move_to_end(node.page)

    def _on_refs(self, page: int, refs: int, change: int) -> None:
        """Observes the allocator: `page` now has `refs` owners, the cache among them.

        Only the second owner makes it busy.
        """
        node = self._nodes.get(page)
        if node is not None and refs == (2 if change > 0 else 1):
            self._shift(node, change)

    def _shift(self, node: _Node, change: int) -> None:
        """Adds `change` busy reasons to `node`, and to its ancestors as far as nodes turn busy or idle."""
        while node.parent is not None:
            node.num_busy += change
            if change > 0 and node.num_busy == 1:
                self._idle.pop(node.page, None)  # a new node was never idle
            elif change < 0 and node.num_busy == 0:
                self._idle[node.page] = node
            else:
                return
            node = node.parent
