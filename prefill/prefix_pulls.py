"""Prefixes that prefill gets from decode workers instead of computing them: mostly earlier answers.

    begin    a queued prompt has its pages early, and those behind its cached prefix are pulled into
    wait     other prompts are computed meanwhile, and the room for at most the patience of its order
    end      what landed whole and right is cached; the rest is computed, as if nothing had been ordered

Every block was checked by the transport before it counts as landed. Pages that blocks land in have a second
owner until the transport has let go of them, so a room may end at any time.

Pulled pages are bare: they have no features (`PrefixCache`). Where the room's own decode worker offers them,
it holds all of them and asks for no features of them. Its announcement says so. Without it the room uses no
bare page, also none of an earlier turn.

Engines with window pages pull nothing: decode has given up most of the KV behind windows.
"""

import logging
from collections.abc import Callable

from ..cluster.process.log import fields
from ..cluster.protocol.messages import PULL_DECLINED, PULL_LATE, PULL_LOST, PULL_OK, Prefill, PrefixPull
from ..engine.engine import Engine
from ..kvtransfer.transport import Complete, Landed, Lost, PullRequest
from ..worker.commands import Command, Drop
from .queues import PrefillRoom, RunningPull

logger = logging.getLogger(__name__)

EPOCH = 0  # of every transfer
PULL_COUNTERS = (
    "prefix_pulls", "pulled_tokens", "pulled_bytes",
    "pull_misses_declined", "pull_misses_late", "pull_misses_lost",
)  # fmt: skip


class PrefixPulls:
    """The pulls of one prefill engine. `send` takes commands for the transport, `reach` is a failpoint."""

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Command], None],
        counters: dict[str, float],
        clock: Callable[[], float],
        reach: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._send = send
        self._counters = counters
        self._clock = clock
        self._reach = reach
        counters.update(dict.fromkeys(PULL_COUNTERS, 0))
        self._running: dict[str, RunningPull] = {}  # by transfer

    def __repr__(self) -> str:
        return f"<PrefixPulls {len(self._running)} running>"

    @property
    def held_pages(self) -> list[int]:
        """The pages that blocks may land in, with repetitions."""
        return [page for pull in self._running.values() for page in pull.pages]

    @property
    def due_pages(self) -> list[list[int]]:
        """The pages of each pull that was given up: the transport lets go of them soon."""
        return [pull.pages for pull in self._running.values() if pull.is_dropped]

    def usable(self, order: Prefill) -> PrefixPull | None:
        """The pull of an order, if it fits this engine and the prompt; None: everything is computed.

        Pages without features are of no use to a decode worker that reads them and does not hold the tokens
        itself. Log probabilities of a prompt need every row, and its experts all rows that are asked for.
        """
        pull, engine = order.pull, self._engine
        if pull is None or engine.windows.is_on or not (engine.group.is_solo and engine.cache.enabled):
            return None
        is_readable = engine.features is None or pull.is_reader or not order.wants_features
        is_whole = pull.tokens % engine.page_size == 0 and pull.tokens < len(order.prompt_ids)
        is_new = pull.transfer not in self._running
        is_scored = order.sampling.prompt_logprobs >= 0
        is_routed = 0 <= order.sampling.routed_experts < pull.tokens
        needs_rows = is_scored or is_routed
        return pull if is_readable and is_whole and is_new and not needs_rows else None

    def wants(self, room: PrefillRoom, num_cached: int, *, has_bare: bool) -> bool:
        """Whether `room`, of whose prompt `num_cached` tokens are cached, should get its pages early to pull
        into them, or to hear that its bare pages may be used.
        """
        if room.pull is None:
            return False
        return num_cached < room.pull.tokens or (has_bare and not room.takes_bare)

    def begin(self, room: PrefillRoom) -> bool:
        """Starts the pull of `room`, which has its pages. False: there is nothing to pull."""
        request, order, size = room.request, room.pull, self._engine.page_size
        if order is None or not self.wants(room, request.num_computed, has_bare=room.num_whole is not None):
            return False
        self._reach("prefill:pull")
        first = request.num_computed
        pages, now = request.pages[first // size : order.tokens // size], self._clock()
        self._engine.cache.allocator.retain(pages)
        room.running_pull = self._running[order.transfer] = RunningPull(
            order=order,
            room=room,
            first=first,
            pages=pages,
            began=now,
            until=now + order.patience_ms / 1000,
            landed=first,
        )
        self._counters["prefix_pulls"] += 1
        self._send(
            PullRequest(
                room=order.transfer,
                epoch=EPOCH,
                num_tokens=order.tokens,
                have=first,
                pages=tuple(pages),
                features=None,
                endpoint=order.endpoint,
                peer_instance=order.instance,
            )
        )
        return True

    def turn(self) -> None:
        """Ends the patience of rooms that have waited for long enough."""
        now = self._clock()
        for pull in self._running.values():
            if now >= pull.until and not pull.is_dropped:
                self._miss(pull, PULL_LATE, f"it took longer than {pull.order.patience_ms} ms")
                self._drop(pull, "it takes too long")

    def give_up(self, room: PrefillRoom) -> None:
        """The room ends: nothing waits for its pull."""
        pull, room.running_pull = room.running_pull, None
        if pull is not None:
            pull.room = None
            if not pull.is_dropped:
                self._drop(pull, "the request has ended")

    # --- events of the transport ----------------------------------------------------------------------------

    def landed(self, event: Landed) -> None:
        """More tokens are in place."""
        if (pull := self._running.get(event.room)) is not None:
            pull.landed = max(pull.landed, event.tokens)

    def complete(self, event: Complete) -> None:
        """All tokens are in place."""
        if (pull := self._running.get(event.room)) is not None:
            pull.landed = pull.order.tokens
            self._end(pull, is_confirmed=True)

    def lost(self, event: Lost) -> None:
        """No more tokens come."""
        if (pull := self._running.get(event.room)) is not None:
            if not pull.is_dropped:
                is_declined = event.kind == "HandoffAborted"
                self._miss(pull, PULL_DECLINED if is_declined else PULL_LOST, event.reason)
            self._end(pull)

    def dropped(self, transfer: str) -> bool:
        """The transport has let go of a pull that was given up. False: it is none of these."""
        pull = self._running.get(transfer)
        if pull is not None:
            self._end(pull)
        return pull is not None

    # --- parts ----------------------------------------------------------------------------------------------

    def _miss(self, pull: RunningPull, why: str, reason: str) -> None:
        self._counters[f"pull_misses_{why}"] += 1
        if pull.room is not None:
            pull.room.pull_end = why
        named = {} if pull.room is None else pull.room.log_fields
        level = logging.DEBUG if why == PULL_DECLINED else logging.INFO
        logger.log(level, "prefix not pulled", extra=fields(**named, why=why, reason=reason))

    def _drop(self, pull: RunningPull, reason: str) -> None:
        pull.is_dropped = True
        self._send(Drop(room=pull.order.transfer, epoch=EPOCH, reason=reason))

    def _end(self, pull: RunningPull, *, is_confirmed: bool = False) -> None:
        """Nothing lands any more. The room goes on with what is in place."""
        del self._running[pull.order.transfer]
        self._engine.cache.allocator.release(pull.pages, is_used=False)
        room = pull.room
        if room is None:
            return
        room.running_pull, room.pull = None, None
        room.pull_s += self._clock() - pull.began
        room.pull_end = room.pull_end or PULL_OK
        size = self._engine.page_size
        landed = pull.landed // size * size
        if landed > pull.first:
            self._keep(room, pull.first, landed)
        elif not is_confirmed and room.num_whole is not None and not room.takes_bare:
            self._start_over(room)

    def _keep(self, room: PrefillRoom, first: int, landed: int) -> None:
        """Tokens [first, landed) are in place: they count as cached, for others too."""
        request, engine = room.request, self._engine
        if engine.features is not None and room.num_whole is None:
            room.num_whole = first // engine.page_size
        request.num_computed = room.cached_tokens = landed
        room.pulled_tokens += landed - first
        self._counters["pulled_tokens"] += landed - first
        self._counters["pulled_bytes"] += (landed - first) // engine.page_size * engine.pool.page_bytes
        engine.cache.insert(
            request.prompt_ids[:landed], request.pages, request.salt, num_whole=room.num_whole
        )

    def _start_over(self, room: PrefillRoom) -> None:
        """The bare pages that the room has found may not be used: it takes others."""
        request = room.request
        self._engine.cache.allocator.release(request.pages)
        request.pages, request.num_computed = [], 0
        room.cached_tokens, room.num_whole, room.is_looked_up = 0, None, False
