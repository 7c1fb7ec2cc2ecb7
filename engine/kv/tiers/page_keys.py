"""The keys of the cached pages of a worker, as `page_names` defines them."""

from collections.abc import Iterator, Sequence

from ..page_names import PageScheme, child_key, root_key
from ..prefix_cache import ROOT, PrefixCache


class PageKeys:
    """The keys of the cached pages of `cache`, computed once for each page, and those of prompts."""

    def __init__(self, cache: PrefixCache, fingerprint: str) -> None:
        self._cache = cache
        self._root = root_key(fingerprint)
        self._known: dict[int, tuple[bytes, int]] = {}  # key and number of pages in front

    def __repr__(self) -> str:
        return f"<PageKeys {self._root.hex()[:8]}, {len(self._known)} pages>"

    @property
    def scheme(self) -> PageScheme:
        """How pages are named from now on, until `rebase`."""
        return PageScheme(root=self._root, page_size=self._cache.page_size, lookahead=self._cache.lookahead)

    def rebase(self, fingerprint: str) -> None:
        """Use another root; the cache must hold no page."""
        assert not self._known, self
        self._root = root_key(fingerprint)

    def forget(self, page: int) -> None:
        """The page leaves the cache."""
        self._known.pop(page, None)

    def of_page(self, page: int) -> bytes:
        """The key of a cached page; the root for page ROOT."""
        return self._root if page == ROOT else self._found(page)[0]

    def place_of(self, page: int) -> int:
        """The number of pages in front of a cached page."""
        return self._found(page)[1]

    def _found(self, page: int) -> tuple[bytes, int]:
        path, at = [], page
        while at != ROOT and at not in self._known:
            path.append(at)
            at = self._cache.parent_of(at)
        key, place = (self._root, -1) if at == ROOT else self._known[at]
        for each in reversed(path):
            key, place = child_key(key, self._cache.part_of(each)), place + 1
            self._known[each] = key, place
        return key, place

    def of_prompt(
        self, before: int, token_ids: Sequence[int], first: int, end: int, salt: str
    ) -> Iterator[tuple[bytes, bytes]]:
        """(parent, key) of the pages [first, end) of a prompt; `before` is the cached page in front of them,
        ROOT if `first` is 0."""
        parent = self.of_page(before)
        for part in self._cache.parts(token_ids, first, end, salt):
            key = child_key(parent, part)
            yield parent, key
            parent = key
