"""The base of both ends of a transport: queues of outgoing messages, and the events for the owner."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ...cluster.errors import PeerLost
from ...cluster.net.drop_log import DropLog
from ...cluster.process.failpoints import Reach, unarmed
from ..memory.blocks import Payload
from ..protocol.session import Peer, SendBlock, SendMessage
from ..transport import TransportEvent

MAX_OUTBOX = 4096  # waiting messages per peer; further messages get lost, as on a network
RETRY_S = 0.001
MAX_RETRY_S = 0.05

Clock = Callable[[], float]
Queued = TypeVar("Queued", SendMessage, "SendMessage | SendBlock")


class Delivery(Protocol):
    """The progress of a sent payload."""

    @property
    def done(self) -> bool:
        """Whether the transport has finished reading the payload's memory."""


class Delivered:
    """The progress of a payload that `_transmit` copied before it returned."""

    done = True


class Endpoint(ABC, Generic[Queued]):
    """Queues of outgoing messages per lane, and the events for the owner."""

    frees_later = False
    max_batch = 1  # small messages in a frame, at most `codec.MAX_BATCH`

    def __init__(self, clock: Clock) -> None:
        self.reach: Reach = unarmed
        self._clock = clock
        self._events: list[TransportEvent] = []
        self._outbox: dict[str, deque[Queued]] = {}  # by lane
        self._blocked: set[str] = set()  # lanes that were full at the last attempt
        self._retry_s = RETRY_S
        self._retry_at = 0.0
        self._drop_log = DropLog("KV message dropped", clock)

    @abstractmethod
    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        """Sends a message now; None if the peer's queue is full. Raises PeerLost if there is no such peer."""

    @abstractmethod
    def _send_some(self, waiting: deque[Queued]) -> int:
        """Sends the first waiting message, or the first few in one frame.

        Returns how many messages leave the queue; 0 if the peer's queue is full.
        """

    @abstractmethod
    def _peer_lost(self, peer: Peer) -> None:
        """Forgets a lost connection and the messages that wait for it."""

    def _lane(self, item: Queued) -> str:
        """The queue of a message: the peer's own, unless a peer has several connections."""
        return item.peer

    def _post(self, item: Queued) -> bool:
        """Queues a message for its peer. False if the queue is full and the message is lost."""
        waiting = self._outbox.setdefault(self._lane(item), deque())
        if len(waiting) >= MAX_OUTBOX:
            return False
        waiting.append(item)
        return True

    def _flush(self, now: float) -> None:
        """Sends waiting messages, in order per lane; backs off while the peers' queues are full."""
        is_retry = now >= self._retry_at
        has_sent = False
        for lane in [name for name in self._outbox if is_retry or name not in self._blocked]:
            has_sent = self._flush_lane(lane) or has_sent
        if has_sent:
            self._retry_s = RETRY_S
        elif is_retry and self._blocked:
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        if has_sent or is_retry:
            self._retry_at = now + self._retry_s

    def _flush_lane(self, lane: str) -> bool:
        """Sends waiting messages of one lane; returns whether any was sent."""
        waiting = self._outbox.get(lane)
        if waiting is None:
            return False  # lost with the peer of another lane
        size = len(waiting)
        try:
            while waiting and (num_sent := self._send_some(waiting)):
                for _ in range(num_sent):
                    waiting.popleft()
        except PeerLost:
            peer = waiting[0].peer
            waiting.clear()
            self._peer_lost(peer)
        if waiting:
            self._blocked.add(lane)
        else:
            self._blocked.discard(lane)
            self._outbox.pop(lane, None)
        return len(waiting) < size

    def _forget_events(self, room: str, epoch: int) -> None:
        """Drops the undelivered events of a cancelled attempt, after which the owner must see none."""
        self._events = [e for e in self._events if e.room != room or e.epoch > epoch]

    def _take_events(self) -> list[TransportEvent]:
        events, self._events = self._events, []
        return events
