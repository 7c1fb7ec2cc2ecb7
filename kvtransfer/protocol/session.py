"""The states of a room on either side, as data, without sockets, clocks or the bytes of pages.

  Prefill:   OFFERED -> ATTACHED -> RELEASED | DROPPED          (OFFERED -> DROPPED)
  Decode:    GREETING -> ATTACHING -> PULLING -> COMPLETE | LOST  (every state -> LOST)

The caller passes `now`, a monotonic time in seconds. A lease ends a room that makes no progress, so no state
lasts forever. A closed room leaves a tombstone, limited in number and time, so that late messages get the
right answer.

Between tensor-parallel workers, a rank of prefill serves several ranks of decode, or a rank of decode pulls
from several ranks of prefill. Then the room of a rank has several parts, one for each pair (`shards`), and
the states above are those of a part. The room ends well when all parts did, and badly with the first that did
not.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from ...cluster.errors import LocalProtocolError
from ...cluster.protocol.messages import KVDown, KVUp
from ..transport import Complete, Offer, PullRequest, TransportEvent
from .layout import KVLayout, RoomStream, Segment
from .rank_pairs import Shard
from .seal import Opener, Sealer

LEASE_S = 5.0
REMIND_S = 0.3
SILENCE_S = 1.0
WINDOW = 8
MAX_REPULLS = 2
TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 4096

Peer = str  # prefill: the connection's routing id in hex; decode: prefill's endpoint


# --- effects: orders of a session to its shell --------------------------------------------------------------


@dataclass(frozen=True)
class SendMessage:
    """Effect: send a message without a payload. The message may get lost; the session repeats it."""

    peer: Peer
    message: KVUp | KVDown


@dataclass(frozen=True)
class SendBlock:
    """Effect: send the blocks [block, block + count), `size` bytes, if the room is still open when their turn
    comes.
    """

    peer: Peer
    room: str
    epoch: int
    block: int
    size: int
    stream: RoomStream
    pages: tuple[int, ...]  # those of the stream, shared by all its blocks
    sealer: Sealer | None = None  # None: the block goes with a digest
    columns: tuple[int, ...] | None = None  # positions of the feature layers that travel; None: whole rows
    count: int = 1

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of a single block."""
        assert self.count == 1, f"{self.count} blocks"
        return self.stream.segments(self.block)

    def cut(self, count: int) -> "tuple[SendBlock, SendBlock | None]":
        """The first `count` blocks, and the others if there are any."""
        if count >= self.count:
            return self, None
        rest, end = self.block + count, self.block + self.count
        return (
            replace(self, size=self.stream.block_size(self.block, count), count=count),
            replace(self, block=rest, size=self.stream.block_size(rest, end - rest), count=end - rest),
        )

    def split(self, most: int = 1) -> "list[SendBlock]":
        """The same blocks in runs of `most`; the last run may be shorter."""
        end = self.block + self.count
        runs = [(first, min(most, end - first)) for first in range(self.block, end, most)]
        return [
            replace(self, block=n, size=self.stream.block_size(n, count), count=count) for n, count in runs
        ]


@dataclass(frozen=True)
class FillEarly:
    """Effect: if slots for early runs are free now, fill them with `run` behind the forward that computes it.

    The blocks go unasked, when they are ready. Those that find no slot are left to decode's pulls. `is_late`:
    later forwards may have been launched meanwhile.
    """

    run: SendBlock
    is_late: bool


@dataclass(frozen=True)
class Notify:
    """Effect: deliver an event to the owner of the transport."""

    event: TransportEvent


@dataclass(frozen=True)
class CloseLink:
    """Effect: close the connection to a peer that needs no more messages."""

    peer: Peer


Effect = SendMessage | SendBlock | FillEarly | Notify | CloseLink


# --- rooms --------------------------------------------------------------------------------------------------


class SenderState(Enum):
    """The states of a room on prefill."""

    OFFERED = "offered"  # no decode worker has attached yet
    ATTACHED = "attached"
    RELEASED = "released"  # decode holds everything
    DROPPED = "dropped"


class ReceiverState(Enum):
    """The states of a room on decode."""

    GREETING = "greeting"  # the handshake with the peer is not done
    ATTACHING = "attaching"  # no announcement yet
    PULLING = "pulling"
    COMPLETE = "complete"
    LOST = "lost"


SENDER_TRANSITIONS: dict[SenderState, frozenset[SenderState]] = {
    SenderState.OFFERED: frozenset({SenderState.ATTACHED, SenderState.DROPPED}),
    SenderState.ATTACHED: frozenset({SenderState.ATTACHED, SenderState.RELEASED, SenderState.DROPPED}),
    SenderState.RELEASED: frozenset(),
    SenderState.DROPPED: frozenset(),
}
RECEIVER_TRANSITIONS: dict[ReceiverState, frozenset[ReceiverState]] = {
    ReceiverState.GREETING: frozenset({ReceiverState.ATTACHING, ReceiverState.LOST}),
    ReceiverState.ATTACHING: frozenset({ReceiverState.PULLING, ReceiverState.LOST}),
    ReceiverState.PULLING: frozenset({ReceiverState.COMPLETE, ReceiverState.LOST}),
    ReceiverState.COMPLETE: frozenset(),
    ReceiverState.LOST: frozenset(),
}


class Lease:
    """A time limit, in seconds of the monotonic clock, on the time without progress."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self.ends_at = now + seconds

    def __repr__(self) -> str:
        return f"Lease(ends_at={self.ends_at:.3f})"

    def renew(self, now: float) -> None:
        """Restarts the time limit at `now`."""
        self.ends_at = now + self._seconds

    def is_over(self, now: float) -> bool:
        """Whether the time limit has passed at `now`."""
        return now >= self.ends_at


@dataclass
class SenderRoom:
    """Prefill's side of a room, or of its part for the rank `shard` of decode.

    None: no rank of decode has attached so far, and nobody knows how many parts there are.
    """

    offer: Offer
    lease: Lease
    state: SenderState = SenderState.OFFERED
    shard: Shard | None = None
    peer: Peer = ""
    peer_instance: str = ""
    stream: RoomStream | None = None  # set by the Attach, which carries `have`
    pages: tuple[int, ...] = ()  # those of the stream
    columns: tuple[int, ...] | None = None  # as in SendBlock
    tokens_ready: int = 0
    first_token: int | None = None
    num_pulled: int = 0  # 1 + the highest block that was pulled
    is_near: bool = False  # decode runs on this host
    ready_at: float = 0.0  # monotonic time at which `tokens_ready` was reached
    underway: tuple[int, int] | None = None  # tokens of the prompt's last forward, launched and not announced
    quiet_since: float = 0.0  # time of the last message from or to decode about this room
    sealer: Sealer | None = None  # a new one whenever the Attach changes the stream

    def __repr__(self) -> str:
        ready = f"{self.tokens_ready}/{self.offer.num_tokens}"
        return f"SenderRoom({self.offer.room[:8]}.{self.offer.epoch} {self.state.value} ready={ready})"

    @property
    def is_open(self) -> bool:
        """Whether decode may pull."""
        return self.state in (SenderState.OFFERED, SenderState.ATTACHED)

    @property
    def is_final(self) -> bool:
        """Whether the first token is known, so that no more progress follows."""
        return self.first_token is not None

    @property
    def waits_for_decode(self) -> bool:
        """Whether the lease runs: decode has blocks to pull, or the room to release."""
        if self.is_final:
            return True
        if self.stream is None:
            return self.tokens_ready > 0
        return self.stream.ready_blocks(self.tokens_ready) > self.num_pulled

    @property
    def remind_at(self) -> float | None:
        """Monotonic time of the next reminder, because decode's Release may be lost; None: no reminder."""
        return self.quiet_since + REMIND_S if self.state is SenderState.ATTACHED and self.is_final else None

    def move(self, state: SenderState) -> None:
        """Enters `state`, which must be a legal successor."""
        assert state in SENDER_TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


@dataclass(eq=False)
class InFlight:
    """A pull without an answer so far. The blocks of one pull share it, and two pulls are never equal."""

    sent_at: float
    num_repulls: int = 0
    is_unasked: bool = False  # prefill sent the blocks before they were pulled; they count for no window


@dataclass
class ReceiverRoom:
    """Decode's side of a room, or of its part from rank `rank` of prefill, whose endpoint is `peer`.

    `rank` None: prefill has not said how many ranks it has; the endpoint is that of its rank 0.
    """

    request: PullRequest
    lease: Lease
    peer: Peer = ""
    rank: int | None = None
    turn: int = 0  # place among the rooms of its link
    state: ReceiverState = ReceiverState.GREETING
    stream: RoomStream | None = None  # set by the handshake, which settles the layout
    tokens_ready: int = 0
    first_token: int | None = None
    announced_at: float | None = None
    ready_at: float | None = None  # time at which the last announced tokens were ready
    is_awaited: bool = False  # prefill has said that an early run comes at once
    unasked_at: float | None = None  # arrival of the first early run of these tokens
    heard_at: float = 0.0  # time of the peer's last message about this room, or of our last question
    next_block: int = 0
    unasked: set[int] = field(default_factory=set)  # blocks behind `next_block` that came unasked
    num_shm_blocks: int = 0  # blocks in place that were read from shared memory
    num_device_blocks: int = 0  # blocks in place that were read from the memory of prefill's device
    num_nixl_blocks: int = 0  # blocks in place that were read through NIXL
    num_leading: int = 0  # blocks [0, num_leading) are in place
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    landed_ahead: set[int] = field(default_factory=set)  # in place, but behind a gap
    opener: Opener | None = None  # made from the key of the last announcement
    complete: Complete | None = None  # what the part says of itself when it is complete

    def __repr__(self) -> str:
        total = "?" if self.stream is None else str(self.stream.num_blocks)
        name = f"{self.request.room[:8]}.{self.request.epoch}"
        return f"ReceiverRoom({name} {self.state.value} {self.num_leading}/{total})"

    @property
    def landed_tokens(self) -> int:
        """The token t: prompt tokens [have, t) of this part are in place."""
        return self.request.have if self.stream is None else self.stream.landed_tokens(self.num_leading)

    @property
    def has_all(self) -> bool:
        """Whether every block is in place."""
        return self.stream is not None and self.num_leading == self.stream.num_blocks

    @property
    def num_to_pull(self) -> int:
        """Announced blocks from the next one on, without a gap, that were not pulled and did not come."""
        if self.stream is None:
            return 0
        end = min([self.stream.ready_blocks(self.tokens_ready), *self.unasked])
        return max(0, end - self.next_block)

    @property
    def num_pulls(self) -> int:
        """Pulls with blocks in flight."""
        return sum(not pull.is_unasked for pull in set(self.in_flight.values()))

    def are_in_flight(self, block: int, count: int) -> bool:
        """Whether all of the blocks [block, block + count) are in flight."""
        return all(map(self.in_flight.__contains__, range(block, block + count)))

    def is_landed(self, block: int) -> bool:
        """Whether block `block` is in place."""
        return block < self.num_leading or block in self.landed_ahead

    def pulled(self, count: int) -> None:
        """The next `count` blocks were pulled."""
        self.next_block += count
        while self.next_block in self.unasked:
            self.unasked.remove(self.next_block)
            self.next_block += 1

    def came_unasked(self, block: int, count: int, now: float) -> None:
        """Blocks from `next_block` on came before they were pulled; they are in flight from `now` on."""
        run = range(block, block + count)
        if not self.in_flight:
            self.lease.renew(now)
        self.in_flight.update(dict.fromkeys(run, InFlight(now, is_unasked=True)))
        self.unasked_at = now if self.unasked_at is None else self.unasked_at
        if block == self.next_block:
            self.pulled(count)
        else:
            self.unasked.update(run)

    def land(self, block: int, count: int = 1) -> None:
        """Marks the blocks [block, block + count), all in flight, as in place."""
        run = range(block, block + count)
        for number in run:
            del self.in_flight[number]
        if block == self.num_leading:
            self.num_leading += count
        else:
            self.landed_ahead.update(run)
        while self.num_leading in self.landed_ahead:
            self.landed_ahead.remove(self.num_leading)
            self.num_leading += 1

    def move(self, state: ReceiverState) -> None:
        """Enters `state`, which must be a legal successor."""
        assert state in RECEIVER_TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state


def check_request(layout: KVLayout, request: PullRequest) -> None:
    """Raises LocalProtocolError if the pages or the features of `request` do not fit its tokens."""
    stream = layout.stream(request.num_tokens, request.have)
    pages = stream.num_pages
    if len(request.pages) != pages + stream.num_window_pages:
        raise LocalProtocolError(
            f"tokens [{request.have}, {request.num_tokens}) lie in {pages} pages and "
            f"{stream.num_window_pages} window pages, {len(request.pages)} were given"
        )
    if layout.has_features:
        shape = (pages, layout.feature_page_bytes)
        given = None if request.features is None else tuple(request.features.shape)
        if given != shape:
            raise LocalProtocolError(
                f"the features of {pages} pages need a uint8 tensor {shape}, not {given}"
            )


# --- tombstones of closed rooms and counters ----------------------------------------------------------------


@dataclass(frozen=True)
class Tombstone:
    """The end of one room."""

    epoch: int
    is_success: bool
    reason: str
    expires_at: float


class Tombstones:
    """The last closed rooms: at most `limit`, each kept for `seconds`."""

    def __init__(self, limit: int = MAX_TOMBSTONES, seconds: float = TOMBSTONE_S) -> None:
        self._limit = limit
        self._seconds = seconds
        self._stones: OrderedDict[str, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def bury(self, room: str, epoch: int, *, is_success: bool, reason: str, now: float) -> None:
        """Remembers the end of a room; the latest epoch wins."""
        old = self._stones.pop(room, None)
        if old is not None and old.epoch > epoch:
            self._stones[room] = old
            return
        self._stones[room] = Tombstone(epoch, is_success, reason, now + self._seconds)
        while len(self._stones) > self._limit:
            self._stones.popitem(last=False)

    def find(self, room: str, epoch: int) -> Tombstone | None:
        """The tombstone of this attempt or of a later one of the room; None when there is none."""
        stone = self._stones.get(room)
        return stone if stone is not None and stone.epoch >= epoch else None

    def sweep(self, now: float) -> None:
        """Forgets the tombstones that have expired at `now`."""
        while self._stones and next(iter(self._stones.values())).expires_at <= now:
            self._stones.popitem(last=False)


@dataclass
class TransferCounters:
    """Monotonic totals of one endpoint."""

    stale_epoch: int = 0  # messages of another attempt than the open one
    stale_instance: int = 0  # messages of another process than the expected one
    unknown_room: int = 0
    unexpected: int = 0  # valid messages at the wrong moment: pulls of blocks not ready, blocks not pulled
    duplicate_blocks: int = 0
    repulls: int = 0
    digest_mismatches: int = 0
    malformed: int = 0  # frames that did not decode or had too many parts, and messages of unknown types
    refused_peers: int = 0
    blocks: int = 0  # sent by prefill, landed on decode
    bytes: int = 0

    def snapshot(self) -> dict[str, float]:
        """Totals by name, for heartbeats."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}
