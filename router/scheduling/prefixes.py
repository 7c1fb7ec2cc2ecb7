"""A prompt as the workers' prefix caches see it: the names of its pages. Pure.

Workers name pages in ways of their own (`PageScheme`), equal ones alike. Names are computed as far as they
are looked at: of a prompt that nobody has, only the first. The salt is part of them, so tenants share none.
"""

from collections.abc import Iterator, Sequence

from ...engine.kv.page_names import PageScheme, name_of
from ..workers.prefix_view import bounded
from ..workers.registry import Worker

MAX_EXPECTED = 1024  # pages of one prompt that a worker is expected to hold before it tells of them


class PageNames:
    """The names of the whole pages of a prompt, in order, computed once and on demand."""

    def __init__(self, keys: Iterator[bytes]) -> None:
        self._keys = keys
        self._known: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        known, at = self._known, 0
        while True:
            if at == len(known):
                key = next(self._keys, None)
                if key is None:
                    return
                known.append(name_of(key))
            yield known[at]
            at += 1


class SeenPrompt:
    """The tokens that an attempt computes first."""

    def __init__(self, token_ids: Sequence[int], salt: str = "") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._names: dict[PageScheme, PageNames] = {}

    def __repr__(self) -> str:
        return f"Prompt({self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def names(self, scheme: PageScheme) -> PageNames:
        """The names of its whole pages."""
        if scheme not in self._names:
            self._names[scheme] = PageNames(scheme.keys(self._token_ids, self._salt))
        return self._names[scheme]


def held_tokens(worker: Worker, prompt: SeenPrompt, *, takes_bare: bool = False) -> int:
    """Tokens of the prompt in the worker's prefix cache, as far as the router knows; never all of them.

    `takes_bare`: tokens without features count, too.
    """
    view, size = worker.prefixes, worker.hello.page_size
    num_held = view.num_held(prompt.names(view.scheme), takes_bare=takes_bare) * size
    return min(num_held, max(0, prompt.num_tokens - 1) // size * size)


def expect_prompt(worker: Worker, prompt: SeenPrompt, within_s: float) -> None:
    """The worker should hold the prompt soon, and tell of it within so many seconds of its last heartbeat."""
    names = bounded(prompt.names(worker.prefixes.scheme), MAX_EXPECTED)
    worker.prefixes.expect(names, worker.last_seen + within_s)
