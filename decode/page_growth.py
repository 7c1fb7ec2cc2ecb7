"""Pages of running requests as their tokens come: how many are held, counted on, and taken back.

    hold       a request begins with the pages of its prompt and of the next steps. Each launch adds what it
               needs
    promise    a request counts on the output that the router expects of it. A new one is admitted only while
               the pool covers all promises
    retract    when the pool is full all the same, the newest request of the least urgent class gives its
               pages up. The router continues it later, from its tokens so far, as after the failure of a
               worker

A retracted request comes back with a grant: output whose pages it holds from the start. It gives none up
within the grant. The router doubles the grant with every retraction, so no request is retracted twice without
progress, and after a few times it holds its whole output.

In an engine with window pages, a request takes them with its steps, whatever it holds of its pages, and gives
up those behind its window first. So there are promises of window pages, too: of what a request holds at once.
"""

import math
from collections.abc import Callable, Collection, Sequence

from ..cluster.protocol.expected_output import expected_left
from ..engine.engine import Engine
from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.request import Request
from .queues import DecodeQueues, DecodeRoom, DecodeState, OutputClaim
from .step_decoder import StepDecoder

AHEAD_TOKENS = 32  # beyond the next step, so that a request takes pages in groups
# Requests that need pages within so many steps take them with one that needs them now: telling the device of
# pages costs the host as much for one request as for many.
JOINED_STEPS = 8


class PageGrowth:
    """The pages of the rooms of a decode worker. With `is_on` False each room holds all its pages at once.

    `ahead_tokens`: output beyond the next step whose pages a room takes with it, where they are free.
    `prompt_rows`: rows of a prompt computed here that are written before window pages behind the first of
    them are given up.
    """

    def __init__(
        self,
        engine: Engine,
        queues: DecodeQueues,
        decoder: StepDecoder,
        *,
        is_on: bool,
        ahead_tokens: int = AHEAD_TOKENS,
        prompt_rows: int = 0,
    ) -> None:
        self.is_on = is_on
        self.ahead_tokens = ahead_tokens
        self._engine = engine
        self._queues = queues
        self._decoder = decoder
        self._spare = engine.shape.spare_slots  # behind the output, for the rows of unverified drafts
        self._step_tokens = engine.shape.num_path  # a step commits at most so many
        self._windows = engine.windows
        self._prompt_rows = prompt_rows

    def __repr__(self) -> str:
        state = "as tokens come" if self.is_on else "whole"
        return f"<PageGrowth {state}, {self.num_promised} pages promised>"

    # --- sizes ----------------------------------------------------------------------------------------------

    def whole_pages(self, request: Request) -> int:
        """Pages for prompt, whole output and the rows that a verify can write behind them."""
        return self._pages(request, request.sampling.max_new_tokens)

    def first_pages(self, request: Request, claim: OutputClaim) -> int:
        """Pages that a request holds from its admission on."""
        if not self._grows(claim):
            return self.whole_pages(request)
        # behind a grant the tokens of the step under way and the next one: it ends before they need more
        granted = claim.granted + 2 * self._step_tokens if claim.granted else 0
        num_output = max(granted, self._step_tokens + self.ahead_tokens)
        return self._pages(request, min(num_output, request.sampling.max_new_tokens))

    def next_pages(self, request: Request) -> int:
        """Pages of the prompt and of the first steps: those whose window pages are taken at admission."""
        return self._pages(
            request, min(self._step_tokens + self.ahead_tokens, request.sampling.max_new_tokens)
        )

    def most_windows(self, request: Request) -> int:
        """The most window pages that `request` ever holds at once."""
        windows = self._windows
        prompt = windows.peak(request.num_prompt, self.next_pages(request), self._prompt_rows)
        return max(prompt, min(self.whole_pages(request), self.steady_windows))

    @property
    def steady_windows(self) -> int:
        """Window pages for the window of a running request, its unread steps and the next ones; 0 without
        windows.
        """
        if not self._windows.is_on:
            return 0
        rows = self._windows.margin + 2 * self._step_tokens + self.ahead_tokens + self._spare
        return self._windows.most_held(rows + 1)

    def granted_pages(self, request: Request, claim: OutputClaim) -> int:
        """Pages up to which no other request takes them: all first ones, where it has a grant."""
        return self.first_pages(request, claim) if claim.granted or not self._grows(claim) else 0

    def covered_output(self, request: Request) -> float:
        """Output tokens for which `request` holds pages; infinite for all of them."""
        held = request.num_writable_pages
        if held >= self.whole_pages(request):
            return math.inf
        return held * self._engine.page_size - request.num_prompt - self._spare

    @property
    def num_promised(self) -> int:
        """Pages that the rooms count on beyond those that they hold."""
        if not self.is_on:
            return 0
        growing = [room for room in self._queues if room.covered_output < math.inf and not room.is_over]
        return sum([self.promised(room) for room in growing])

    def promised(self, room: DecodeRoom) -> int:
        """Pages that `room` counts on beyond those that it holds, or will hold from its admission on."""
        request, claim = room.request, room.claim
        if not self._grows(claim):
            return 0
        num_output = request.num_output
        left = expected_left(claim.expected, num_output, request.num_remaining)
        held = len(request.pages) or self.first_pages(request, claim)
        return max(0, self._pages(request, num_output + left) - held)

    @property
    def num_promised_windows(self) -> int:
        """Window pages that the rooms count on beyond those that they hold; 0 without windows."""
        if not self._windows.is_on:
            return 0
        admitted = [
            room for room in self._queues if not room.is_over and room.state is not DecodeState.ADMITTING
        ]
        promised = [self.promised_windows(room, is_local=room.computes_prompt) for room in admitted]
        return sum(promised) + self._windows.pages.num_extra

    def promised_windows(self, room: DecodeRoom, *, is_local: bool) -> int:
        """Window pages that `room` counts on beyond those that it holds; 0 without windows. `is_local`: its
        prompt is computed here.
        """
        if not self._windows.is_on:
            return 0
        request, claim, left = room.request, room.claim, room.request.num_remaining
        if self._grows(claim):
            expected = expected_left(claim.expected, request.num_output, left)
            left = min(left, max(expected, claim.granted - request.num_output))
        tail, pages = self._windows.tail_of(request.num_prompt), self._windows.pages
        first = max(tail, pages.first_page(request.num_tokens - 1))
        behind = sum(page >= tail for page in request.windows)
        need = min(self._pages(request, request.num_output + left) - first, self.steady_windows)
        before = self._windows.lacking(request, self._prompt_rows) if is_local else 0
        return max(0, need - behind) + before

    def missing_windows(self, room: DecodeRoom) -> int:
        """Window pages that lack before `room`, which holds nothing, is admitted; 0 or less: none."""
        if not self._windows.is_on:
            return 0
        request = room.request
        at_once = self.next_pages(request) - self._windows.tail_of(request.num_prompt)
        need = max(at_once, self.promised_windows(room, is_local=room.is_local))
        return need + self.num_promised_windows - self._windows.pages.num_available

    def covers(self, room: DecodeRoom) -> bool:
        """Whether the pool covers all promises and that of `room`, which holds its first pages."""
        if self._engine.cache.num_available < self.num_promised + self.promised(room):
            return False
        if not self._windows.is_on:
            return True
        promised = self.promised_windows(room, is_local=room.is_local)
        return self._windows.pages.num_available >= self.num_promised_windows + promised

    # --- running rooms --------------------------------------------------------------------------------------

    def cover(
        self, batch: Sequence[DecodeRoom], retract: Callable[[DecodeRoom], None], *, is_draining: bool = False
    ) -> list[DecodeRoom]:
        """Gives each room of `batch` the pages of its next step; returns the rooms that have them.

        Older rooms come first. Where the pool is full, `retract` ends a room. A room without its pages waits
        while rooms that have ended, or end with a step under way, still hold theirs. `is_draining`: it also
        waits while another room runs, since its router may have no other worker for it.
        """
        step = self._step_tokens
        short = [
            room
            for room in batch
            if len(room.request.output_ids) + (room.num_unread + 1) * step > room.covered_output
        ]
        if not short:
            return list(batch)
        left_out: set[tuple[str, int]] = set()  # they wait, or were retracted
        grown: list[tuple[Request, int]] = []
        for room in sorted(short, key=_seniority):
            held = len(room.request.pages)
            while room.key not in left_out:
                if self._take(room):
                    grown.append((room.request, held))
                    break
                others_run = len(batch) - len(short) + len(grown) > 0
                must_wait = self._are_pages_due or (is_draining and others_run)
                victim = None if must_wait else self._victim(room)
                if victim is not None:
                    retract(victim)
                left_out.add(room.key if victim is None else victim.key)
        if grown:
            grown += self._join(batch, {room.key for room in short} | left_out)
            self._decoder.grow(grown)
        return [room for room in batch if room.key not in left_out]

    def _join(
        self, batch: Sequence[DecodeRoom], others: Collection[tuple[str, int]]
    ) -> list[tuple[Request, int]]:
        """Gives pages to rooms of `batch` but `others` that need them soon, if more are free beyond promises
        than all of them could take.

        Returns (request, pages before) of each.
        """
        grown: list[tuple[Request, int]] = []
        num_spare = self._engine.cache.num_available - self.num_promised
        most = pages_for(self.ahead_tokens + JOINED_STEPS * self._step_tokens, self._engine.page_size) + 1
        if self._windows.is_on or num_spare < most * len(batch):
            return grown
        for room in batch:
            steps = room.num_unread + 1 + JOINED_STEPS
            is_due = len(room.request.output_ids) + steps * self._step_tokens > room.covered_output
            held = len(room.request.pages)
            if is_due and room.key not in others and self._take(room) and len(room.request.pages) > held:
                grown.append((room.request, held))
        return grown

    def _take(self, room: DecodeRoom) -> bool:
        request, cache = room.request, self._engine.cache
        self._windows.retire(request)
        for ahead in (self.ahead_tokens, 0):
            end, held = self._next_pages(room, ahead), len(request.pages)
            try:
                request.pages.extend(cache.alloc(max(0, end - held)))
                self._windows.extend(request, end)
            except PoolExhausted:
                cache.allocator.release(request.pages[held:], is_used=False)
                del request.pages[held:]
                continue
            room.covered_output = self.covered_output(request)
            return True
        return False

    @property
    def _are_pages_due(self) -> bool:
        """Whether pages come back soon: a room has ended, or a step under way is its last, or a page that may
        be evicted is being saved.
        """
        return self._engine.cache.num_held > 0 or any(
            room.is_over or (room.num_unread and room.request.num_remaining <= room.num_unread)
            for room in self._queues
        )

    def _victim(self, room: DecodeRoom) -> DecodeRoom:
        """The room that gives its pages up for `room`: the newest one that may, running or not."""
        able = [other for other in self._queues if other is room or is_beyond_grant(other)]
        return sorted(able, key=_seniority)[-1]  # of equal ones the last

    # --- parts ----------------------------------------------------------------------------------------------

    def _grows(self, claim: OutputClaim) -> bool:
        return self.is_on and claim.expected > 0

    def _pages(self, request: Request, num_output: int) -> int:
        tokens = request.num_prompt + num_output + self._spare
        return pages_for(min(tokens, self._engine.max_context), self._engine.page_size)

    def _next_pages(self, room: DecodeRoom, ahead: int) -> int:
        """Pages for the room's unread steps, its next one and `ahead` more tokens."""
        request = room.request
        output = request.num_output + (room.num_unread + 1) * self._step_tokens + ahead
        return self._pages(request, min(output, request.sampling.max_new_tokens))


def is_beyond_grant(room: DecodeRoom) -> bool:
    """Whether the room holds pages that it may have to give up."""
    return len(room.request.pages) > room.granted_pages


def _seniority(room: DecodeRoom) -> tuple[int, float]:
    """The order of claims: the urgent class first, then the older room."""
    return room.priority, room.arrived
