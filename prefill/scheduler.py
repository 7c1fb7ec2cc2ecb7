"""Which prompt tokens a prefill forward computes: first come, first served, in chunks, within a token budget.

Pure but for the page accounting: no clock, no socket. A running prompt always gets its next chunk before a new one
is admitted, so that hand-offs complete in order of arrival; a prompt is admitted only when all its pages are there,
so that two half-computed prompts can never wait for each other's pages.
"""

from dataclasses import dataclass

from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.prompt_logprobs import most_scored
from .queues import PrefillQueues, Room, RoomState

WHOLE_BUDGET = 8192  # tokens a forward may gather from several whole prompts when chunking is off


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Prompt tokens [start, end) of a room, to be computed now."""

    room: Room
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        return self.end == self.room.request.num_prompt


class PrefillScheduler:
    """Chooses chunks and admits rooms. `chunk_size` 0 computes each prompt in one piece."""

    def __init__(
        self,
        queues: PrefillQueues,
        cache: PrefixCache,
        *,
        page_size: int,
        chunk_size: int,
        max_batch: int,
        vocab_size: int,
    ) -> None:
        self.queues = queues
        self.cache = cache
        self.page_size = page_size
        self.chunk_size = chunk_size
        self.max_batch = max_batch
        self.vocab_size = vocab_size

    def next_chunks(self) -> tuple[list[Chunk], list[Room]]:
        """The chunks of the next forward (empty: nothing to do), and the rooms admitted for it."""
        budget = self.chunk_size or WHOLE_BUDGET
        chunks: list[Chunk] = []
        admitted: list[Room] = []
        for room in self.queues.of(RoomState.RUNNING):
            budget -= self._take(room, budget, chunks)
        for room in self.queues.of(RoomState.QUEUED):
            if not room.request.is_ready:
                continue  # its grammar is being compiled
            if budget <= 0 or len(chunks) >= self.max_batch or not self._admit(room):
                break
            admitted.append(room)
            budget -= self._take(room, budget, chunks)
        return chunks, admitted

    def _take(self, room: Room, budget: int, chunks: list[Chunk]) -> int:
        """Add the room's next chunk if the budget allows; returns the tokens taken."""
        start, end = room.request.num_computed, room.request.num_prompt
        before = [(chunk.room.request, chunk.start, chunk.end) for chunk in chunks]
        most = most_scored(room.request, self.vocab_size, before)
        is_whole = self.chunk_size == 0 and most is None
        if start == end or len(chunks) >= self.max_batch or (budget <= 0 and chunks):
            return 0
        if is_whole and chunks and end - start > budget:
            return 0
        stop = end if is_whole else min(end, start + min(budget, most or budget))
        chunks.append(Chunk(room=room, start=start, end=stop))
        return stop - start

    def _admit(self, room: Room) -> bool:
        """Give the room its pages, cached prefix first; False when the pool cannot yet."""
        request = room.request
        is_scored = request.sampling.prompt_logprobs >= 0  # then every row must be computed
        limit = 0 if is_scored else request.num_prompt - 1
        held = self.cache.match(request.prompt_ids, limit, request.salt)
        try:
            fresh = self.cache.alloc(pages_for(request.num_prompt, self.page_size) - len(held))
        except PoolExhausted:
            self.cache.allocator.release(held)
            return False
        request.pages = held + fresh
        request.num_computed = room.cached_tokens = len(held) * self.page_size
        room.state = RoomState.RUNNING
        return True
