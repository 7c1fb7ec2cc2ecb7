"""The router's view of the prefixes that one worker holds. Pure.

    told       pages that the worker has told of (`HeldPrefixes`), and not that they are gone. A router that
               missed a message asks for all of them anew, and keeps what it knows until they come
    expected   pages that the worker should hold soon: of prompts that it computes, of answers that have just
               ended. They are forgotten after a while, unless the worker tells of them

A worker that tells nothing, as of an older release, is believed to hold what was expected of it until its
`Reserved` says otherwise. The view is a hint: a worker always looks into its own cache.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ...cluster.protocol.messages import HeldPrefixes
from ...engine.kv.page_names import NAME_BYTES, PageScheme

MAX_PAGES = 1 << 17  # of one worker: some 20 MB
ASK_AGAIN_S = 1.0
LATE_BEATS = 3  # heartbeats that count more messages than came, before one of them counts as lost
UNTOLD_ROOT = bytes(32)  # of workers that tell nothing


class PrefixView:
    """What one worker holds. `tells`: it sends HeldPrefixes. Times are monotonic seconds."""

    def __init__(self, page_size: int, *, tells: bool, max_pages: int = MAX_PAGES) -> None:
        self.scheme = PageScheme(root=UNTOLD_ROOT, page_size=page_size)
        self.tells = tells
        self.num_lost = 0  # times at which a message was missed
        self._max_pages = max_pages
        self._told: OrderedDict[bytes, None] = OrderedDict()
        self._void: set[bytes] = set()  # told names that count until all is told anew
        self._expected: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._next_seq: int | None = None  # None: it is to be told all anew
        self._was_told = False  # anything at all
        self._seen_since: float | None = None  # the first look at it
        self._asked_at = float("-inf")
        self._late_beats = 0

    def __repr__(self) -> str:
        state = "" if not self.tells else ", lost" if self._next_seq is None else f", next {self._next_seq}"
        return f"PrefixView({len(self._told)} pages, {len(self._expected)} expected{state})"

    @property
    def num_told(self) -> int:
        """Pages that the worker holds for all that is known."""
        return len(self._told)

    # --- what is heard --------------------------------------------------------------------------------------

    def hear(self, message: HeldPrefixes) -> None:
        """Takes in what the worker tells. Repeated and late messages change nothing."""
        next_seq = self._next_seq
        if next_seq is not None and message.seq < next_seq:
            return
        if not message.is_first and message.seq != next_seq:
            self._lose()
            return
        if message.is_first:  # perhaps for another router, so what is known counts until all is told
            self._void = set(self._told)
            self._was_told = True
        self._next_seq, self._late_beats = message.seq + 1, 0
        if (message.root, message.lookahead) != (self.scheme.root, self.scheme.lookahead):
            page_size = self.scheme.page_size
            self.scheme = PageScheme(root=message.root, page_size=page_size, lookahead=message.lookahead)
            self._expected.clear()
            self._told.clear()
        for name in reversed(list(_cut(message.added))):  # parents come first, and shall be forgotten last
            self._expected.pop(name, None)
            self._void.discard(name)
            self._told[name] = None
        for name in _cut(message.removed):
            self._expected.pop(name, None)
            self._told.pop(name, None)
        if message.is_last:
            for name in self._void:
                self._told.pop(name, None)
            self._void = set()
        self._keep_bound()

    def beat(self, num_sent: int, now: float) -> None:
        """A heartbeat at `now` counts the messages that were sent before it, of which one may still come."""
        while self._expected and next(iter(self._expected.values())) <= now:
            self._expected.popitem(last=False)
        is_late = self._next_seq is not None and num_sent > self._next_seq
        self._late_beats = self._late_beats + 1 if is_late else 0
        if self._late_beats >= LATE_BEATS:
            self._lose()

    def must_ask(self, now: float) -> bool:
        """Whether to ask the worker to tell all anew, now: once in ASK_AGAIN_S. A new one tells unasked."""
        if not self.tells or self._next_seq is not None:
            return False
        self._seen_since = now if self._seen_since is None else self._seen_since
        since = self._asked_at if self._was_told else max(self._asked_at, self._seen_since)
        if now < since + ASK_AGAIN_S:
            return False
        self._asked_at = now
        return True

    def _lose(self) -> None:
        if self._next_seq is not None:
            self.num_lost += 1
        self._next_seq, self._late_beats = None, 0

    # --- what is expected -----------------------------------------------------------------------------------

    def expect(self, names: Iterable[bytes], until: float) -> None:
        """The worker should hold these pages soon, from the first of a prompt on; it tells before `until`."""
        known = self._expected if self.tells else self._told
        for name in reversed(list(names)):  # so that a beginning outlives its continuations
            if not self.tells:
                self._told[name] = None
            elif name not in self._told:
                self._expected[name] = until
            else:
                continue
            known.move_to_end(name)
        self._keep_bound()

    def learn(self, names: Iterable[bytes], num_held: int) -> None:
        """A worker that tells nothing reports that it holds the first `num_held` pages and not the next."""
        if self.tells:
            return
        held = list(itertools.islice(names, num_held + 1))
        self.expect(held[:num_held], 0.0)
        for name in held[num_held:]:  # pages behind a gap do not count
            self._told.pop(name, None)

    # --- what is held ---------------------------------------------------------------------------------------

    def num_held(self, names: Iterable[bytes], *, takes_bare: bool = False) -> int:
        """The number of leading pages that the worker holds without a gap. `takes_bare`: those without
        features count, too."""
        told, expected, found = self._told, self._expected, list[bytes]()
        for name in names:
            if takes_bare and name not in told and name not in expected:
                name = _bare(name)
            if name not in told and name not in expected:
                break
            found.append(name)
        self._keep_young(found)
        return len(found)

    def _keep_young(self, found: Sequence[bytes]) -> None:
        """The beginning of a prompt outlives its continuations, and pages that nobody looks for."""
        if 2 * len(self._told) <= self._max_pages:
            return  # it is looked for again before anything is forgotten
        for name in reversed(found):
            if name in self._told:
                self._told.move_to_end(name)

    def _keep_bound(self) -> None:
        for known in (self._told, self._expected):
            while len(known) > self._max_pages:
                known.popitem(last=False)


def _bare(name: bytes) -> bytes:
    """The name of the same page without features."""
    return name[:-1] + bytes((name[-1] | 1,))


def _cut(names: bytes) -> Iterator[bytes]:
    return (names[at : at + NAME_BYTES] for at in range(0, len(names) - NAME_BYTES + 1, NAME_BYTES))


def bounded(names: Iterable[bytes], most: int) -> Sequence[bytes]:
    """The first `most` names."""
    return list(itertools.islice(names, most))
