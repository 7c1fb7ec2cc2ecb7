"""The transport of a tensor-parallel worker, as its rank 0 sees it: its own end and those of all other ranks.

Rank 0's link thread uses it like the transport of a worker with one rank. Orders go to every rank; a room
ends when it has ended on all of them (`room_join`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ...cluster.errors import LocalProtocolError
from ...cluster.process.failpoints import Reach
from ...cluster.process.log import fields
from ..transport import Offer, PollableTransport, PullRequest, TransportEvent
from .channel import Channel, RankLost
from .messages import (
    AdvancePart,
    Command,
    OfferPart,
    PartGone,
    PullPart,
    RankCounters,
    RankReady,
    ReleasePart,
    Report,
    decode_report,
    encode,
)
from .room_join import JoinEffect, RoomJoin, TellRelease

logger = logging.getLogger(__name__)

RETRY_S = 0.001  # between two attempts to send to a rank that does not read


class RankedTransport:
    """Rank 0's `local` end, and the `channels` to the others by rank; see `PollableTransport`.

    `num_heads`: KV heads of the model. `is_decode`: the role.
    """

    frees_later = True

    def __init__(
        self,
        local: PollableTransport,
        channels: Mapping[int, Channel],
        *,
        num_heads: int,
        is_decode: bool,
        on_endpoints: Callable[[Sequence[str]], None] = lambda endpoints: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_endpoints` gets the addresses of the ranks 1, 2 ... once all of them serve."""
        self.join = RoomJoin(1 + len(channels), num_heads)
        self._local = local
        self._channels = dict(channels)
        self._is_decode = is_decode
        self._on_endpoints = on_endpoints
        self._clock = clock
        self._endpoints: dict[int, str] = {}
        self._totals: dict[int, dict[str, float]] = {}
        self._events: list[TransportEvent] = []

    def __repr__(self) -> str:
        return f"RankedTransport({self.join}, {self._local})"

    @property
    def reach(self) -> Reach:
        """Failpoints of rank 0's end."""
        return self._local.reach

    @reach.setter
    def reach(self, reach: Reach) -> None:
        self._local.reach = reach

    @property
    def is_ready(self) -> bool:
        """Whether every rank serves."""
        return self._endpoints.keys() == self._channels.keys()

    @property
    def counters(self) -> dict[str, float]:
        """Totals of all ranks by name, as of their last reports."""
        totals = dict(self._local.counters)
        for others in self._totals.values():
            for name, value in others.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def offer(self, offer: Offer) -> None:
        """As `KVTransport.offer`. Raises LocalProtocolError, also behind a lost rank."""
        self.join.open(offer.room, offer.epoch)
        try:
            self._local.offer(offer)
        except LocalProtocolError:
            self.join.refused(offer.room, offer.epoch)
            raise
        self._tell_all(OfferPart(offer))

    def launched(self, room: str, epoch: int, start: int, tokens: int) -> None:
        """As `KVTransport.launched`, for rank 0's end: other ranks launch the forward later."""
        self._local.launched(room, epoch, start, tokens)

    def advance(
        self,
        room: str,
        epoch: int,
        tokens_ready: int,
        first_token: int | None = None,
        ready_at: float | None = None,
    ) -> None:
        """As `KVTransport.advance`.

        Rank 0 has read the result of the forward. The other ranks wrote its KV before their last collective
        of that forward, so it is final there too.
        """
        self._tell_all(AdvancePart(room, epoch, tokens_ready, first_token, ready_at))
        self._local.advance(room, epoch, tokens_ready, first_token, ready_at)

    def pull(self, request: PullRequest) -> None:
        """As `KVTransport.pull`; features land on rank 0 only. Raises LocalProtocolError as `offer`."""
        self.join.open(request.room, request.epoch)
        try:
            self._local.pull(request)
        except LocalProtocolError:
            self.join.refused(request.room, request.epoch)
            raise
        self._tell_all(
            PullPart(
                request.room,
                request.epoch,
                request.num_tokens,
                request.have,
                request.pages,
                request.endpoint,
                request.peer_instance,
            )
        )

    def release(self, room: str, epoch: int, reason: str) -> None:
        """As `KVTransport.release`; `Freed` follows when no rank touches the pages any more."""
        self._perform(self.join.release(room, epoch, reason))

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """As `KVTransport.poll`."""
        for event in self._local.poll(timeout):
            self._perform(self.join.happened(0, event))
        for rank in list(self._channels):
            self._listen(rank)
        events, self._events = self._events, []
        return events

    def pollables(self) -> list[int]:
        """As `PollableTransport.pollables`."""
        return [*self._local.pollables(), *(fd for one in self._channels.values() for fd in one.fds)]

    def next_deadline(self, now: float) -> float | None:
        """As `PollableTransport.next_deadline`."""
        at = self._local.next_deadline(now)
        if self._events:
            return now
        if any(channel.is_full for channel in self._channels.values()):
            return now + RETRY_S if at is None else min(at, now + RETRY_S)
        return at

    def close(self) -> None:
        """As `KVTransport.close`. The other ranks close their ends when their channels end."""
        self._local.close()
        for channel in self._channels.values():
            channel.close()

    def _listen(self, rank: int) -> None:
        try:
            for data in self._channels[rank].receive():
                self._report(rank, decode_report(data))
        except RankLost as lost:
            self._lose(rank, str(lost))

    def _report(self, rank: int, report: Report) -> None:
        match report:
            case RankReady(endpoint=endpoint):
                self._endpoints[rank] = endpoint
                if self.is_ready:
                    self._on_endpoints([self._endpoints[one] for one in sorted(self._endpoints)])
            case RankCounters(totals=totals):
                self._totals[rank] = totals
            case PartGone(room=room, epoch=epoch):
                self._perform(self.join.gone(rank, room, epoch))
            case _:
                self._perform(self.join.happened(rank, report.event))

    def _perform(self, effects: Sequence[JoinEffect]) -> None:
        for effect in effects:
            if not isinstance(effect, TellRelease):
                self._events.append(effect.event)
            elif effect.rank == 0:
                self._local.release(effect.room, effect.epoch, effect.reason)
                self._perform(self.join.gone(0, effect.room, effect.epoch))
            else:
                self._tell(effect.rank, ReleasePart(effect.room, effect.epoch, effect.reason))

    def _tell_all(self, command: Command) -> None:
        for rank in list(self._channels):
            self._tell(rank, command)

    def _tell(self, rank: int, command: Command) -> None:
        if rank in self.join.lost_ranks:
            return
        try:
            self._channels[rank].send(encode(command))
        except RankLost as lost:
            self._lose(rank, str(lost))

    def _lose(self, rank: int, reason: str) -> None:
        if rank in self.join.lost_ranks:
            return
        logger.error("rank lost", extra=fields(rank=rank, reason=reason))
        text = f"rank {rank} of this worker was lost: {reason}"
        self._perform(self.join.rank_lost(rank, text, is_decode=self._is_decode))
