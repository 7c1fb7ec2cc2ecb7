"""The choice of prompt tokens for a prefill forward, within a budget of tokens.

The scheduler is pure except for the page accounting: no clock, no socket. Its laws:

1. A forward has at most the budget of tokens, taken from as many prompts as it needs. It has fewer only if no
   prompt with pages has more, or if `max_batch` prompts are in it.
2. Prompts go on by rank (`request_rank`): in order of arrival, urgent ones before the next part of others. Of
   one class, begun prompts come first. A prompt gets all its pages when its first tokens are chosen, so two
   half-computed prompts never wait for each other's pages.
3. A prompt that ends within the forward may overtake longer ones that are no more urgent. The first of these
   keeps at least half of the tokens, so it is delayed at most twofold.
4. A queued prompt never takes the pages that the first overtaken one needs.
5. A queued prompt of which a lower tier or a decode worker has a part takes its pages early, and the part
   comes while it waits. Meanwhile others are computed. It takes no pages that queued prompts before it need.
6. A prompt that finds no pages takes those of the newest prompts of the least urgent classes below its own.
   No prompt gives its pages up twice.
7. In an engine with window pages, a prompt is admitted only while all prompts under way find the window pages
   of their next chunks.

With an objective for first tokens, `first_token_plan` has the order and the parts in place of 2 and 3.
"""

from collections.abc import Callable, Iterable, Sequence

from ..cluster.protocol.request_rank import rank
from ..engine.kv.leaving_owners import LeavingOwners
from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.kv.prefix_cache import PrefixCache
from ..engine.kv.window_sizes import CHUNK_SHARE
from ..engine.prompt_budget import WHOLE_PROMPT_ROWS
from ..engine.request_windows import RequestWindows
from ..worker.first_token_plan import FirstTokenPlan, Prompt
from ..worker.prompt_chunks import Chunk, scored_limit
from ..worker.prompt_pages import give_back_pages, num_whole, peek_pages, take_pages, take_prefix
from .queues import PrefillQueues, PrefillRoom, PrefillState


class PrefillScheduler:
    """Chooses chunks and admits rooms. `chunk_size` in tokens; 0 computes each prompt in one piece.

    `plan`: of the objective for first tokens, if there is one.
    """

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
        plan: FirstTokenPlan | None = None,
    ) -> None:
        self.queues = queues
        self.cache = cache
        self.windows = windows
        self.page_size = page_size
        self.chunk_size = windows.chunk_of(chunk_size, share=CHUNK_SHARE)
        self.max_batch = max_batch
        self.vocab_size = vocab_size
        self.plan = plan

    def next_chunks(self, now: float = 0.0) -> tuple[list[Chunk[PrefillRoom]], list[PrefillRoom]]:
        """The chunks of the next forward (empty: nothing to do), and the rooms admitted for it.

        `now`: monotonic seconds, for the objective.
        """
        return self._by_rank() if self.plan is None else self._planned(self.plan, now)

    def take_back(self, due: Iterable[Sequence[int]] = ()) -> list[PrefillRoom]:
        """The rooms that shall give their pages up, for the first queued prompt, which is more urgent.

        `due`: pages of which an owner leaves soon, beside those of closing rooms.
        """
        ready = self._ready()
        first = min(
            (room for room in ready if not room.request.pages), key=lambda each: _rank(each), default=None
        )
        if first is None:
            return []
        if self._pages_of(first) <= self.cache.num_available and not self.windows.is_on:
            return []
        less_urgent = [
            room
            for room in self.queues
            if room.priority > first.priority and _may_give_up(room) and not room.keeps_pages
        ]
        return self._victims(first, _by_claim(less_urgent)[::-1], due) if less_urgent else []

    def _victims(
        self, first: PrefillRoom, less_urgent: Sequence[PrefillRoom], due: Iterable[Sequence[int]]
    ) -> list[PrefillRoom]:
        """The first of `less_urgent` that have the pages which `first` does not find; none if all of them
        would not do.
        """
        request, num_pages, leaving = first.request, self._pages_of(first), LeavingOwners(self.cache)
        bare_limit = request.num_prompt if first.takes_bare else 0
        # It holds meanwhile what it finds in the cache: that is not available, and nobody gives it up.
        take_prefix(self.cache, self.windows, request, is_computed=True, bare_limit=bare_limit)
        missing = num_pages - len(request.pages) - self.cache.num_available
        windows = self._missing_windows(first)
        for pages in due:
            leaving.leave(pages)
        for room in self.queues.of(PrefillState.CLOSING):
            leaving.leave(room.request.pages)
            leaving.leave_windows(_windowed(room))
        taken: list[PrefillRoom] = []
        for room in less_urgent:
            if leaving.num_back >= missing and leaving.num_windows_back >= windows:
                break
            taken.append(room)
            leaving.leave(room.request.pages)
            leaving.leave_windows(_windowed(room))
            windows -= self._lacking(room)
            if room.running_pull is not None and not room.running_pull.is_dropped:
                leaving.leave(room.running_pull.pages)  # it is given up with the room
        give_back_pages(self.cache, self.windows, request, is_used=False)
        return taken if leaving.num_back >= missing and leaving.num_windows_back >= windows else []

    def turned_away(self, priority: int, since: float) -> PrefillRoom | None:
        """The room that leaves the queue for a prompt of class `priority` that waits since `since`: of those
        behind it by rank the newest one of the least urgent class below. None: there is none.
        """
        ours = rank(since, priority)
        queued = self.queues.of(PrefillState.QUEUED)
        behind = [room for room in queued if room.priority > priority and _rank(room) > ours]
        return _by_claim(behind)[-1] if behind else None

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
                cached = peek_pages(self.cache, self.windows, request, bare_limit=room.bare_limit)
                is_wanted = request.num_cacheable > 0 and is_elsewhere(room, cached)
                if is_wanted and self._take(room, bare_limit=room.bare_limit):
                    taken.append(room)
                    continue
            kept_pages += need
        return taken

    def tokens_before(self, room: PrefillRoom) -> int:
        """Tokens to compute of the prompts before the queued `room`, as far as is known."""
        begun = self.queues.of(PrefillState.RUNNING)
        queued = [other for other in self._ready() if other.state is PrefillState.QUEUED]
        return sum(map(_remaining, begun)) + sum(
            _remaining(other) for other in queued if other is not room and _rank(other) < _rank(room)
        )

    # --- by rank --------------------------------------------------------------------------------------------

    def _by_rank(self) -> tuple[list[Chunk[PrefillRoom]], list[PrefillRoom]]:
        left = self.chunk_size or WHOLE_PROMPT_ROWS
        chunks: list[Chunk[PrefillRoom]] = []
        admitted: list[PrefillRoom] = []
        rooms, is_full = self._in_order(), False
        for place, room in enumerate(rooms):
            if left <= 0 or len(chunks) >= self.max_batch:
                break
            places = self.max_batch - len(chunks)
            if is_full and not room.request.pages:
                continue
            if not self.chunk_size and chunks and self._wanted(room, chunks) > left:
                others = self._ending(
                    rooms[place:], left, places, admitted, room.priority
                )  # the room begins the next forward
            elif not self._has_pages(room, admitted):
                is_full = True  # those behind it begin later, and those begun go on
                continue
            elif not self.chunk_size or self._wanted(room, chunks) <= left:
                left -= _take(room, self._wanted(room, chunks), chunks)
                continue
            else:
                others = self._ending(rooms[place + 1 :], left // 2, places - 1, admitted, room.priority)
                _take(room, left - sum(map(_remaining, others)), chunks)
            for other in others:
                _take(other, _remaining(other), chunks)
            break
        return chunks, admitted

    def _ready(self) -> list[PrefillRoom]:
        """The prompts with tokens to compute: those begun, then those queued whose grammar is compiled."""
        begun = [room for room in self.queues.of(PrefillState.RUNNING) if _remaining(room)]
        queued = self.queues.of(PrefillState.QUEUED)
        return begun + [room for room in queued if room.request.is_ready and not room.is_waiting]

    def _in_order(self) -> list[PrefillRoom]:
        """The ready prompts by rank; those begun count as older than all others of their class."""
        rooms, newest = self._ready(), dict[int, float]()
        for room in rooms:
            if room.state is PrefillState.RUNNING:
                newest[room.priority] = max(_since(room), newest.get(room.priority, _since(room)))

        def place(room: PrefillRoom) -> float:
            if room.state is PrefillState.RUNNING:
                return _rank(room)
            return rank(max(_since(room), newest.get(room.priority, _since(room))), room.priority)

        return sorted(rooms, key=place)

    def _ending(
        self, rooms: Sequence[PrefillRoom], share: int, most: int, admitted: list[PrefillRoom], priority: int
    ) -> list[PrefillRoom]:
        """Up to `most` of `rooms` that end within `share` tokens together and are no less urgent than
        `priority`; those queued are admitted.
        """
        found: list[PrefillRoom] = []
        kept_pages = 0  # for the first queued prompt that is overtaken
        for room in rooms:
            if len(found) >= most:
                break
            is_queued = room.state is PrefillState.QUEUED
            num_pages = self._pages_of(room) if is_queued else 0
            if room.priority > priority:
                continue
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

    # --- by the objective -----------------------------------------------------------------------------------

    def _planned(
        self, plan: FirstTokenPlan, now: float
    ) -> tuple[list[Chunk[PrefillRoom]], list[PrefillRoom]]:
        is_cut = self.chunk_size > 0
        budget = plan.budget(self.chunk_size) if is_cut else WHOLE_PROMPT_ROWS
        prompts = [plan.prompt(room, self._tokens_of(room)) for room in self._ready()]
        ordered, owed = plan.order(prompts, budget, now)
        able = self._with_pages(ordered)
        if owed is not None and owed not in able:
            owed = None
        shares = plan.fill(able, owed, budget=budget, most=self.max_batch, now=now, is_cut=is_cut)
        chunks: list[Chunk[PrefillRoom]] = []
        admitted: list[PrefillRoom] = []
        for share in shares:
            room = share.item
            if not self._has_pages(room, admitted):
                continue
            wanted = self._wanted(room, chunks)
            _take(room, min(share.tokens, wanted) if is_cut else wanted, chunks)
        return chunks, admitted

    def _with_pages(self, ordered: Sequence[Prompt[PrefillRoom]]) -> list[Prompt[PrefillRoom]]:
        """The prompts of `ordered` that have pages or find them free; those of the first by rank are kept."""
        queued = [prompt.item for prompt in ordered if not prompt.item.request.pages]
        first = min(queued, key=lambda each: _rank(each), default=None)
        kept = 0 if first is None else self._pages_of(first)
        free, able, is_full = self.cache.num_available, list[Prompt[PrefillRoom]](), False
        for prompt in ordered:
            room = prompt.item
            need = self._pages_of(room)
            if need:
                is_full = is_full or free - need < (0 if room is first else kept)
                if is_full and room is not first:
                    continue
                if free < need:
                    continue
                free -= need
                kept = 0 if room is first else kept
            able.append(prompt)
        return able

    def _tokens_of(self, room: PrefillRoom) -> int:
        """Tokens that the room has to compute, as far as is known: a queued one will find a part cached."""
        request = room.request
        if request.pages or not request.num_cacheable:
            return _remaining(room)
        if room.num_known is None:
            bare_limit = request.num_prompt if room.takes_bare else 0
            cached = peek_pages(self.cache, self.windows, request, bare_limit=bare_limit)
            room.num_known = len(cached) * self.page_size
        return max(1, request.num_prompt - room.num_known)

    # --- parts ----------------------------------------------------------------------------------------------

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
            give_back_pages(self.cache, self.windows, request, is_used=False)
            return False
        request.num_computed = room.cached_tokens = num_cached
        room.num_whole = num_whole(self.cache, request.pages[: num_cached // self.page_size])
        return True

    def _covers_windows(self, room: PrefillRoom) -> bool:
        """Whether the window pages that `room` and all prompts under way still lack are free."""
        if not self.windows.is_on:
            return True
        lacking = sum(map(self._lacking, [*self.queues.of(PrefillState.RUNNING), room]))
        return self.windows.pages.num_available >= lacking

    def _lacking(self, room: PrefillRoom) -> int:
        """The most further window pages that the chunks of `room` before its tail need at once."""
        return self.windows.lacking(room.request, self.chunk_size or room.request.num_prompt)

    def _missing_windows(self, room: PrefillRoom) -> int:
        """Window pages that lack before `room`, which holds at most a prefix, begins; 0 or less: none."""
        if not self.windows.is_on:
            return 0
        request = room.request
        first = max(self.windows.tail_of(request.num_prompt), len(request.pages))
        tail = pages_for(request.num_prompt, self.page_size) - first
        lacking = sum(map(self._lacking, [*self.queues.of(PrefillState.RUNNING), room]))
        return tail + lacking - self.windows.pages.num_available


def _rank(room: PrefillRoom) -> float:
    return rank(_since(room), room.priority)


def _since(room: PrefillRoom) -> float:
    """When the request arrived at its router, which may have placed it before."""
    return room.arrived - room.waited


def _by_claim(rooms: Sequence[PrefillRoom]) -> list[PrefillRoom]:
    """The most urgent class first, then older ones."""
    return sorted(rooms, key=lambda each: (each.priority, _since(each)))


def _may_give_up(room: PrefillRoom) -> bool:
    """Whether the room has pages and not all of its tokens."""
    is_ours = room.state in (PrefillState.RUNNING, PrefillState.QUEUED)
    return is_ours and bool(room.request.pages) and _remaining(room) > 0


def _windowed(room: PrefillRoom) -> list[int]:
    """The pages whose window pages the room holds."""
    return [room.request.pages[number] for number in room.request.windows]


def _remaining(room: PrefillRoom) -> int:
    return room.request.num_prompt - room.request.num_computed


def _take(room: PrefillRoom, count: int, chunks: list[Chunk[PrefillRoom]]) -> int:
    """Add the room's next `count` tokens to `chunks`; returns `count`."""
    start = room.request.num_computed
    chunks.append(Chunk(room=room, start=start, end=start + count))
    return count
