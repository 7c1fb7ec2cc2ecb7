"""The parts of prompts that decode computes itself in its next forward.

    by rank        prompts share a forward in order of rank (`request_rank`). One that ends within half of it
                   may overtake a longer one that is no more urgent
    by objective   `first_token_plan` has the order and the parts

A prompt that has much in common with another one waits for that and takes its pages from the prefix cache.
"""

from collections.abc import Sequence

from ..cluster.protocol.request_rank import rank
from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.request_windows import RequestWindows
from ..worker.first_token_plan import FirstTokenPlan
from ..worker.prompt_chunks import Chunk, scored_limit
from ..worker.prompt_pages import take_longer_prefix
from .queues import DecodeRoom


class PromptParts:
    """Cuts the prompts of rooms in state PREFILLING. `plan`: of the objective for first tokens, if any."""

    def __init__(
        self, cache: PrefixCache, windows: RequestWindows, vocab_size: int, plan: FirstTokenPlan | None
    ) -> None:
        self.plan = plan
        self._cache = cache
        self._windows = windows
        self._vocab_size = vocab_size

    def __repr__(self) -> str:
        return f"<PromptParts {'by rank' if self.plan is None else self.plan}>"

    def next(
        self, rooms: Sequence[DecodeRoom], *, budget: int, most: int, now: float
    ) -> list[Chunk[DecodeRoom]]:
        """The parts of the next forward over `rooms`: `budget` tokens, or up to `most` where one prompt alone
        has so many. `now`: monotonic seconds.
        """
        waiting = [room for room in rooms if _remaining(room)]
        if not waiting:
            return []
        if self.plan is None:
            return self._by_rank(waiting, rooms, budget, most)
        return self._planned(self.plan, waiting, rooms, most if len(waiting) == 1 else budget, now)

    def _by_rank(
        self, waiting: Sequence[DecodeRoom], rooms: Sequence[DecodeRoom], budget: int, most: int
    ) -> list[Chunk[DecodeRoom]]:
        ordered = sorted(waiting, key=_rank)
        chunks: list[Chunk[DecodeRoom]] = []
        left = budget
        for place, room in enumerate(ordered):
            if left <= 0:
                break
            if self._waits(room, ordered[:place], rooms):
                continue
            allowed = left if chunks else max(left, most)
            if _remaining(room) <= allowed:
                left -= self._take(room, allowed, chunks)
                continue
            others = self._ending(ordered, place, allowed // 2, rooms)
            self._take(room, allowed - sum(map(_remaining, others)), chunks)
            for other in others:
                self._take(other, _remaining(other), chunks)
            break
        return chunks

    def _ending(
        self, ordered: Sequence[DecodeRoom], place: int, share: int, rooms: Sequence[DecodeRoom]
    ) -> list[DecodeRoom]:
        """The rooms behind `place` that end within `share` tokens, and are no less urgent than that one."""
        found: list[DecodeRoom] = []
        for at, room in enumerate(ordered[place + 1 :], place + 1):
            is_scored = room.request.sampling.prompt_logprobs >= 0
            if room.priority > ordered[place].priority or is_scored or _remaining(room) > share:
                continue
            if not self._waits(room, ordered[:at], rooms):
                found.append(room)
                share -= _remaining(room)
        return found

    def _planned(
        self,
        plan: FirstTokenPlan,
        waiting: Sequence[DecodeRoom],
        rooms: Sequence[DecodeRoom],
        most: int,
        now: float,
    ) -> list[Chunk[DecodeRoom]]:
        budget = plan.budget(most)
        ordered, owed = plan.order([plan.prompt(room, _remaining(room)) for room in waiting], budget, now)
        while True:
            shares = plan.fill(ordered, owed, budget=budget, most=len(ordered), now=now)
            before: list[DecodeRoom] = []
            blocked: set[tuple[str, int]] = set()
            for share in shares:
                if self._waits(share.item, before, rooms):
                    blocked.add(share.item.key)
                before.append(share.item)
            if not blocked:
                break
            ordered = [prompt for prompt in ordered if prompt.item.key not in blocked]
            owed = owed if owed in ordered else None
        chunks: list[Chunk[DecodeRoom]] = []
        for share in shares:
            self._take(share.item, share.tokens, chunks)
        return chunks

    def _take(self, room: DecodeRoom, allowed: int, chunks: list[Chunk[DecodeRoom]]) -> int:
        """Adds up to `allowed` tokens of the room; returns their number: 0 if their window pages are not free
        for now.
        """
        limit = scored_limit(room.request, chunks, self._vocab_size)
        start = room.request.num_computed
        tokens = min(_remaining(room), allowed if limit is None else min(allowed, limit))
        try:
            self._windows.cover(room.request, start, start + tokens)
        except PoolExhausted:  # running requests hold what was promised to this one, and give it back
            return 0
        chunks.append(Chunk(room=room, start=start, end=start + tokens))
        return tokens

    def _waits(self, room: DecodeRoom, before: Sequence[DecodeRoom], rooms: Sequence[DecodeRoom]) -> bool:
        """Whether a prompt that has not begun waits for the pages of one in `before`, or of a begun one.

        If it does not, it takes what is cached by now.
        """
        request = room.request
        if request.num_computed != room.have:
            return False
        begun = [other for other in rooms if other.request.num_computed != other.have and other is not room]
        others = [other for other in [*before, *begun] if other.priority <= room.priority]
        if _waits_for_prefix(room, others, self._cache):
            return True
        room.have = request.num_computed = take_longer_prefix(self._cache, self._windows, request, room.have)
        return False


def _waits_for_prefix(room: DecodeRoom, others: Sequence[DecodeRoom], cache: PrefixCache) -> bool:
    """Whether one of `others`, which are computed before, has in common at least half of what `room` lacks.

    Its pages enter the prefix cache when it ends: waiting for them costs less than computing them twice, as
    for the choices of one request.
    """
    request, size = room.request, cache.page_size
    if not cache.enabled:
        return False
    worth = max(size, (request.num_prompt - room.have) // 2)
    end = (room.have + worth + size - 1) // size * size
    if end > request.num_cacheable:
        return False
    head = request.prompt_ids[:end]
    return any(
        other.request.salt == request.salt and other.request.prompt_ids[:end] == head for other in others
    )


def _rank(room: DecodeRoom) -> float:
    return rank(room.arrived, room.priority)


def _remaining(room: DecodeRoom) -> int:
    return room.request.num_prompt - room.request.num_computed
