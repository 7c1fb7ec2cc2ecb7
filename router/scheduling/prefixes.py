"""The router's view of the workers' prefix caches: a map from beginnings of prompts to workers. Pure.

A prompt is cut into pages. The name of a page is a digest over the name of the page before it and its own
tokens. So the names form a tree without links, and a name stands for everything up to its page. The first
name begins with the tenant's salt, so tenants share no node. The view is a hint, and a worker's report
replaces it.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

MAX_PAGES = 1 << 17  # pages of one index: some 30 MB
MAX_HOLDERS = 8  # holders kept per page: the last ones to get it
MAX_HASHED = 1024  # pages of one prompt; a longer common beginning counts as this many
DIGEST_BYTES = 16


class SeenPrompt:
    """The tokens that an attempt computes first, as prefix caches see them; hashed once, on demand."""

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._pages: dict[int, list[bytes]] = {}

    def __repr__(self) -> str:
        return f"Prompt({self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def pages(self, page_size: int) -> list[bytes]:
        """The names of its whole pages of `page_size` tokens, in order."""
        if page_size not in self._pages:
            self._pages[page_size] = page_names(self._token_ids, page_size, self._salt)
        return self._pages[page_size]


def page_names(token_ids: Sequence[int], page_size: int, salt: str) -> list[bytes]:
    """One digest per whole page, each over everything up to that page; at most `MAX_HASHED`."""
    num_pages = min(len(token_ids) // page_size, MAX_HASHED)
    data = memoryview(array("I", token_ids[: num_pages * page_size])).cast("B")
    size = 4 * page_size
    name, names = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest(), []
    for start in range(0, num_pages * size, size):
        name = hashlib.blake2b(data[start : start + size], digest_size=DIGEST_BYTES, key=name).digest()
        names.append(name)
    return names


class PrefixIndex:
    """Page names with the workers that hold them. Bounded; the least recently used name is dropped first."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages = max_pages
        # the last worker to get a page stands last
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __repr__(self) -> str:
        return f"PrefixIndex({len(self)} of {self._max_pages} pages)"

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, instance: str, names: Sequence[bytes]) -> None:
        """The worker holds these pages from now on."""
        for name in reversed(names):  # so that a beginning outlives its continuations
            holders = self._holders.get(name, ())
            if instance not in holders:
                self._holders[name] = (*holders, instance)[-MAX_HOLDERS:]
            self._holders.move_to_end(name)
        while len(self._holders) > self._max_pages:
            self._holders.popitem(last=False)

    def num_held(self, instance: str, names: Sequence[bytes]) -> int:
        """The number of leading pages that the worker holds without a gap."""
        for i, name in enumerate(names):
            if instance not in self._holders.get(name, ()):
                return i
        return len(names)

    def learn(self, instance: str, names: Sequence[bytes], num_held: int) -> None:
        """The worker reports that it holds the first `num_held` pages and not the next."""
        self.add(instance, names[:num_held])
        for name in names[num_held : num_held + 1]:  # pages behind a gap do not count
            holders = self._holders.get(name, ())
            if instance in holders:
                self._holders[name] = tuple(holder for holder in holders if holder != instance)
