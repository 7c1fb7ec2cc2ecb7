"""The choice of prompt tokens for a prefill forward: first come, first served, chunked, within a budget.

The scheduler is pure except for the page accounting: no clock, no socket. A running prompt gets its next
chunk before a new prompt is admitted, so hand-offs complete in order of arrival. A prompt is admitted only
when all its pages are free, so two half-computed prompts never wait for each other's pages.
"""

from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..worker.prompt_chunks import Chunk, scored_limit
from ..worker.prompt_pages import take_pages
from .queues import PrefillQueues, PrefillRoom, PrefillState

WHOLE_BUDGET = 8192  # tokens a forward may gather from several whole prompts when chunking is off


class PrefillScheduler:
    """Chooses chunks and admits rooms. `chunk_size` in tokens; 0 computes each prompt in one piece."""

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

    def next_chunks(self) -> tuple[list[Chunk[PrefillRoom]], list[PrefillRoom]]:
        """The chunks of the next forward (empty: nothing to do), and the rooms admitted for it."""
        budget = self.chunk_size or WHOLE_BUDGET
        chunks: list[Chunk[PrefillRoom]] = []
        admitted: list[PrefillRoom] = []
        for room in self.queues.of(PrefillState.RUNNING):
            budget -= self._take(room, budget, chunks)
        for room in self.queues.of(PrefillState.QUEUED):
            if not room.request.is_ready:
                continue  # its grammar is being compiled
            if budget <= 0 or len(chunks) >= self.max_batch or not self._admit(room):
                break
            admitted.append(room)
            budget -= self._take(room, budget, chunks)
        return chunks, admitted

    def _take(self, room: PrefillRoom, budget: int, chunks: list[Chunk[PrefillRoom]]) -> int:
        """Add the room's next chunk if the budget allows; returns the tokens taken."""
        start, end = room.request.num_computed, room.request.num_prompt
        most = scored_limit(room.request, chunks, self.vocab_size)
        is_whole = self.chunk_size == 0 and most is None
        if start == end or len(chunks) >= self.max_batch or (budget <= 0 and chunks):
            return 0
        if is_whole and chunks and end - start > budget:
            return 0
        stop = end if is_whole else min(end, start + min(budget, most or budget))
        chunks.append(Chunk(room=room, start=start, end=stop))
        return stop - start

    def _admit(self, room: PrefillRoom) -> bool:
        """Give the room its pages. False: the pool has too few of them for now."""
        request = room.request
        num_pages = pages_for(request.num_prompt, self.page_size)
        try:
            request.num_computed = take_pages(self.cache, request, num_pages, is_computed=True)
        except PoolExhausted:
            return False
        room.cached_tokens = request.num_computed
        room.state = PrefillState.RUNNING
        return True
