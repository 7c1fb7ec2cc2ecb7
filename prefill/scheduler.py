"""The choice of prompt tokens for a prefill forward, within a budget of tokens.

The scheduler is pure except for the page accounting: no clock, no socket. Its laws:

1. A forward has at most the budget of tokens, taken from as many prompts as it needs. It has fewer only if no
   prompt with pages has more, or if `max_batch` prompts are in it.
2. Prompts go on in order of arrival. A prompt gets all its pages when its first tokens are chosen, so two
   half-computed prompts never wait for each other's pages.
3. A prompt that ends within the forward may overtake longer ones. The oldest of these keeps at least half of
   the tokens, so it is delayed at most twofold.
4. A queued prompt never takes the pages that the first overtaken one needs.
5. A queued prompt of which a lower tier or a decode worker has a part takes its pages early, and the part
   comes while it waits. Meanwhile others are computed. It takes no pages that queued prompts before it need.
6. In an engine with window pages, a prompt is admitted only while all prompts under way find the window pages
   of their next chunks.
"""

from collections.abc import Callable, Sequence

from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.kv.window_sizes import CHUNK_SHARE
from ..engine.prompt_budget import WHOLE_PROMPT_ROWS
from ..engine.request_windows import RequestWindows
from ..worker.prompt_chunks import Chunk, scored_limit
from ..worker.prompt_pages import give_back_pages, num_whole, take_pages
from .queues import PrefillQueues, PrefillRoom, PrefillState


class PrefillScheduler:
    """Chooses chunks and admits rooms. `chunk_size` in tokens; 0 computes each prompt in one piece."""

    def __init__(
        self,
        queues: PrefillQueues,
        cache: PrefixCache,
        windows: RequestWindows,
        *,
        page_size: int,
        chunk_size: int,
        max_batch: int,
        vocab_size: int,
    ) -> None:
        self.queues = queues
        self.cache = cache
        self.windows = windows
        self.page_size = page_size
        self.chunk_size = windows.chunk_of(chunk_size, share=CHUNK_SHARE)
        self.max_batch = max_batch
        self.vocab_size = vocab_size

    def next_chunks(self) -> tuple[list[Chunk[PrefillRoom]], list[PrefillRoom]]:
        """The chunks of the next forward (empty: nothing to do), and the rooms admitted for it."""
        left = self.chunk_size or WHOLE_PROMPT_ROWS
        chunks: list[Chunk[PrefillRoom]] = []
        admitted: list[PrefillRoom] = []
        rooms = self._in_order()
        for place, room in enumerate(rooms):
            if left <= 0 or len(chunks) >= self.max_batch:
                break
            places = self.max_batch - len(chunks)
            if not self.chunk_size and chunks and self._wanted(room, chunks) > left:
                others = self._ending(
                    rooms[place:], left, places, admitted
                )  # the room begins the next forward
            elif not self._has_pages(room, admitted):
                break
            elif not self.chunk_size or self._wanted(room, chunks) <= left:
                left -= _take(room, self._wanted(room, chunks), chunks)
                continue
            else:
                others = self._ending(rooms[place + 1 :], left // 2, places - 1, admitted)
                _take(room, left - sum(map(_remaining, others)), chunks)
            for other in others:
                _take(other, _remaining(other), chunks)
            break
        return chunks, admitted

    def take_early(self, is_elsewhere: Callable[[PrefillRoom, Sequence[int]], bool]) -> list[PrefillRoom]:
        """Gives pages to queued prompts that have more elsewhere than in the cache, and returns these.

        `is_elsewhere` tells it of a room, by the cached pages that it would have. It is asked once for each.
        """
        taken: list[PrefillRoom] = []
        kept_pages = 0  # for older prompts, which take theirs when they are admitted
        for room in self.queues.of(PrefillState.QUEUED):
            request, need = room.request, self._pages_of(room)
            if request.pages:
                continue
            if not room.is_looked_up:
                if self.cache.num_available < kept_pages + need:
                    break
                room.is_looked_up = True
                limit = request.num_cacheable
                cached = self.cache.match(request.prompt_ids, limit, request.salt, bare_limit=room.bare_limit)
                is_wanted = limit > 0 and is_elsewhere(room, cached)
                self.cache.allocator.release(cached)
                if is_wanted and self._take(room, bare_limit=room.bare_limit):
                    taken.append(room)
                    continue
            kept_pages += need
        return taken

    def _in_order(self) -> list[PrefillRoom]:
        """The prompts with tokens to compute: those begun, then those queued whose grammar is compiled."""
        begun = [room for room in self.queues.of(PrefillState.RUNNING) if _remaining(room)]
        queued = self.queues.of(PrefillState.QUEUED)
        return begun + [room for room in queued if room.request.is_ready and not room.is_waiting]

    def _ending(
        self, rooms: Sequence[PrefillRoom], share: int, most: int, admitted: list[PrefillRoom]
    ) -> list[PrefillRoom]:
        """Up to `most` of `rooms` that end within `share` tokens together; those queued are admitted."""
        found: list[PrefillRoom] = []
        kept_pages = 0  # for the first queued prompt that is overtaken
        for room in rooms:
            if len(found) >= most:
                break
            is_queued = room.state is PrefillState.QUEUED
            num_pages = self._pages_of(room) if is_queued else 0
            if _remaining(room) > share or room.request.sampling.prompt_logprobs >= 0:
                kept_pages = kept_pages or num_pages
                continue
            if is_queued and kept_pages and self.cache.num_available < kept_pages + num_pages:
                break
            if not self._has_pages(room, admitted):
                break
            found.append(room)
            share -= _remaining(room)
        return found

    def _wanted(self, room: PrefillRoom, chunks: Sequence[Chunk[PrefillRoom]]) -> int:
        """The tokens that the room's next chunk has in a forward without budget, behind `chunks`."""
        most = scored_limit(room.request, chunks, self.vocab_size)
        return _remaining(room) if most is None else min(_remaining(room), most)

    def _pages_of(self, room: PrefillRoom) -> int:
        return 0 if room.request.pages else pages_for(room.request.num_prompt, self.page_size)

    def _has_pages(self, room: PrefillRoom, admitted: list[PrefillRoom]) -> bool:
        """Whether the room has its pages; a queued one is given them. False: too few are free for now."""
        if room.state is not PrefillState.QUEUED:
            return True
        bare_limit = room.request.num_prompt if room.takes_bare else 0
        if not room.request.pages and not self._take(room, bare_limit=bare_limit):
            return False
        room.state = PrefillState.RUNNING
        admitted.append(room)
        return True

    def _take(self, room: PrefillRoom, *, bare_limit: int) -> bool:
        """Gives the room all its pages, if they are free; within `bare_limit` tokens bare ones, too."""
        request, num_pages = room.request, self._pages_of(room)
        try:
            num_cached = take_pages(
                self.cache, self.windows, request, num_pages, is_computed=True, bare_limit=bare_limit
            )
        except PoolExhausted:
            return False
        if not self._covers_windows(room):
            give_back_pages(self.cache, self.windows, request)
            return False
        request.num_computed = room.cached_tokens = num_cached
        room.num_whole = num_whole(self.cache, request.pages[: num_cached // self.page_size])
        return True

    def _covers_windows(self, room: PrefillRoom) -> bool:
        """Whether the window pages that `room` and all prompts under way still lack are free."""
        if not self.windows.is_on:
            return True
        rooms = [*self.queues.of(PrefillState.RUNNING), room]
        lacking = sum(
            self.windows.lacking(each.request, self.chunk_size or each.request.num_prompt) for each in rooms
        )
        return self.windows.pages.num_available >= lacking


def _remaining(room: PrefillRoom) -> int:
    return room.request.num_prompt - room.request.num_computed


def _take(room: PrefillRoom, count: int, chunks: list[Chunk[PrefillRoom]]) -> int:
    """Add the room's next `count` tokens to `chunks`; returns `count`."""
    start = room.request.num_computed
    chunks.append(Chunk(room=room, start=start, end=start + count))
    return count
