"""The worker's end of the control plane: who the router is, whether it is there, and what waits to be sent.

`LinkMachine` decides and `LinkQueues` keeps what waits, and neither knows a socket; `ControlLink` is the DEALER around
them, owned by one thread that calls, in its loop, `receive()` and then `tick(now)`.

    greeting   Hello goes out with backoff until a Welcome comes; nothing else is sent, and no order is taken
    connected  messages flow; after `QUIET_S` without a word from the router a Hello asks whether it still knows us
    doubted    connected, but a message could not be sent: the next peer may be another router, so nothing but Hello is
               sent until a Welcome says who it is

A router that answers no Hello for `LOST_AFTER_S` is lost, so is one whose place another took (a Welcome of another router
id), so is one that takes so little that the outbox is full, and so is one whose connection broke: what it took along would
leave a hole in a stream, or a room that nobody begins. What arrives damaged from the router is an order, or is repeated
anyhow: a Hello that counts it as missed has every order said again that waits for its answer. `tick` reports a loss once,
before `receive` hands over anything from the new router: the worker then drops all rooms, since nobody reads their tokens,
and says so: a Hello of the next generation goes out before any other message, so that a router that was only slow does not
wait for these rooms. What it orders before it has read that Hello counts as dropped when it has, so nobody would ever cancel
it: orders are taken again behind a Welcome of the new generation. A router takes a repeated Hello of a known instance and
generation as a question, which it answers with Welcome without touching the worker's rooms.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from ..errors import DamagedMessage, RemoteProtocolError
from ..process.log import fields
from ..protocol.codec import (
    CONTROL_MAX_FRAME,
    MAX_BATCH,
    control_down_decoder,
    encode,
    pack,
    send_waiting,
    unknown_messages,
)
from ..protocol.messages import Cancel, ControlDown, ControlUp, Heartbeat, Hello, Rejected, Welcome
from ..security.keyring import Keyring
from .reconnect import ReconnectingSocket
from .sockets import Socket, recv_parts, try_send

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 1.0
REJECTED_BACKOFF_S = 5.0
QUIET_S = 0.4  # of silence before a connected worker asks
LOST_AFTER_S = 1.4  # of unanswered Hellos: nobody works for a router that has been dead for two seconds
OUTBOX_LIMIT = 4096  # messages
MAX_FRAMES_PER_RECEIVE = 256


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """What a control link dropped, in messages since it was opened."""

    stale: int  # meant for another instance of this worker
    early: int  # orders from before the router knew that all rooms were dropped: it places them again
    malformed: int  # not of the protocol, as this release knows it
    overflowed: int  # dropped with the router that did not take them
    hellos: int  # Hellos sent


class LinkMachine:
    """The state of a control link. Times are seconds on one monotonic clock."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.router = ""  # id of the router that welcomed us last
        self.connected = False
        self.heartbeat_s = 0.5
        self.takes_batches = False  # the router, of frames
        self.num_stale = 0
        self.num_early = 0
        self.num_hellos = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._next_hello = now
        self._asked_at = float("-inf")
        self._asking_since: float | None = None  # first Hello that is unanswered
        self._was_heard = False
        self._is_doubted = False
        self._is_introduced = True  # False: a new generation that no Hello has told yet
        self._has_missed = False  # what no Hello has told yet
        self._rejected = ""
        self._lost = ""
        self._welcomed = -1  # the generation of the last Welcome

    def __repr__(self) -> str:
        state = "greeting" if not self.connected else "doubted" if self._is_doubted else "connected"
        return f"LinkMachine({state}, router={self.router[:8] or 'none'})"

    @property
    def can_send(self) -> bool:
        """Whether messages other than Hello may leave."""
        return self.connected and self._is_introduced and not self._is_doubted and not self._lost

    @property
    def next_hello(self) -> float:
        """When `advance` will ask for the next Hello, unless something is heard before."""
        return self._next_hello

    @property
    def is_lost(self) -> bool:
        """Whether a loss waits to be reported by `advance`."""
        return bool(self._lost)

    def hear(self, message: ControlDown) -> bool:
        """Take a message from the router in; True if the worker should see it (a Welcome only of a new router)."""
        if message.instance != self.hello.instance:
            self.num_stale += 1
            return False
        self._was_heard = True
        if isinstance(message, Welcome):
            return self._welcome(message)
        if isinstance(message, Rejected):
            self._reject(message)
            return False
        is_welcome = not self._lost and self._welcomed == self.hello.generation
        if not is_welcome and not isinstance(message, Cancel):
            self.num_early += 1
            return False
        return True

    def advance(self, now: float) -> tuple[bool, str]:
        """(whether to send a Hello now, why the router is lost or "")."""
        if self._was_heard:
            self._was_heard = False
            self._asking_since = None
            self._backoff_s = FIRST_BACKOFF_S
            if self._is_introduced and not self._is_doubted and not self._has_missed:
                self._next_hello = now + (REJECTED_BACKOFF_S if self._rejected else QUIET_S)
        if self._asking_since is not None and self.connected and now - self._asking_since >= LOST_AFTER_S:
            self.connected = False
            self._lost = f"the router did not answer for {now - self._asking_since:.1f} s"
        lost, self._lost = self._lost, ""
        if lost:
            self.hello = msgspec.structs.replace(self.hello, generation=self.hello.generation + 1)
            self._is_introduced = False
            self._next_hello = now
        return now >= self._next_hello, lost

    def asked(self, now: float, *, was_sent: bool) -> None:
        """The due Hello was sent, or could not be because nobody is connected."""
        self._asking_since = now if self._asking_since is None else self._asking_since
        if was_sent:
            self.num_hellos += 1
            self._is_introduced, self._has_missed = True, False
            self._asked_at = now
            self._next_hello = now + self._backoff_s
            self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)
        else:
            self._next_hello = now + FIRST_BACKOFF_S

    def give_up(self, reason: str) -> None:
        """Count the router as lost; the next `advance` reports it. No-op when a loss waits to be reported already."""
        if not self._lost:
            self.connected = False
            self._lost = reason

    def broke(self) -> None:
        """The connection is gone, with all that was under way; nobody knows which rooms that was about."""
        if self.connected:
            self.give_up("the connection to the router broke")

    def miss(self) -> None:
        """A message of the router arrived damaged. It is told soon; who damages all it says is not told all the time."""
        self.hello = msgspec.structs.replace(self.hello, missed=self.hello.missed + 1)
        self._has_missed = True
        if self.connected:
            self._next_hello = min(self._next_hello, self._asked_at + FIRST_BACKOFF_S)

    def doubt(self) -> None:
        """A message could not be sent: ask who is there before the next one."""
        if not self._is_doubted:
            self._is_doubted = True
            self._next_hello = float("-inf")

    def _welcome(self, message: Welcome) -> bool:
        if message.generation is not None and message.generation < self.hello.generation:
            return False  # said before it heard that all rooms were dropped
        self._welcomed = self.hello.generation
        is_known = self.connected and message.router == self.router
        if self.connected and not is_known:
            self._lost = f"router {self.router[:8]} was replaced by {message.router[:8]}"
        self.connected = True
        self._is_doubted = False
        self.router = message.router
        self.heartbeat_s = message.heartbeat_ms / 1000
        self.takes_batches = message.takes_batches
        self._rejected = ""
        return not is_known

    def _reject(self, message: Rejected) -> None:
        if self.connected:
            self._lost = f"the router rejected this worker: {message.reason}"
        if message.reason != self._rejected:
            logger.warning("the router rejected this worker", extra=fields(reason=message.reason))
        self._rejected = message.reason
        self.connected = False


class LinkQueues(ABC):
    """A control link but for its wire. `now` is on the monotonic clock, like `tick`'s."""

    def __init__(self, hello: Hello, now: float) -> None:
        self._machine = LinkMachine(hello, now)
        self._decoder = control_down_decoder()
        self._outbox: deque[bytes] = deque()  # packed
        self._heartbeat: Heartbeat | None = None  # only the newest is worth sending
        self._held: list[
            ControlDown
        ] = []  # from a new router; handed over after the old one's loss was reported
        self._num_malformed = 0
        self._num_overflowed = 0

    @abstractmethod
    def _transmit(self, frame: bytes) -> bool:
        """Sends a frame now; False when nobody takes it now."""

    @abstractmethod
    def _next_message(self) -> Sequence[bytes | zmq.Frame] | None:
        """The parts of the next message that is here, [] for one that was dropped; None when there is none."""

    @property
    def num_waiting(self) -> int:
        """Messages that wait to be sent."""
        return len(self._outbox)

    @property
    def next_deadline(self) -> float:
        """When `tick` must be called at the latest: a Hello is due, and what could not be sent waits for its answer."""
        return self._machine.next_hello

    @property
    def connected(self) -> bool:
        """Whether a router has welcomed this worker and still answers."""
        return self._machine.connected

    @property
    def is_lost(self) -> bool:
        """Whether `tick` has a loss to report."""
        return self._machine.is_lost

    @property
    def router(self) -> str:
        """The id of the router that welcomed this worker last; "" before the first."""
        return self._machine.router

    @property
    def heartbeat_s(self) -> float:
        """How often the router wants a Heartbeat."""
        return self._machine.heartbeat_s

    @property
    def counters(self) -> LinkCounters:
        """What was dropped so far."""
        return LinkCounters(
            stale=self._machine.num_stale,
            early=self._machine.num_early,
            malformed=self._num_malformed,
            overflowed=self._num_overflowed,
            hellos=self._machine.num_hellos,
        )

    def send(self, message: ControlUp) -> None:
        """Queue a message: it leaves with the next `tick`, or when a frame is full. A full outbox ends the connection."""
        if isinstance(message, Heartbeat):
            self._heartbeat = message
        elif len(self._outbox) < OUTBOX_LIMIT:
            self._outbox.append(pack(message))
        else:
            self._num_overflowed += 1
            self._machine.give_up(f"it takes no messages: {OUTBOX_LIMIT} wait")
        if len(self._outbox) >= MAX_BATCH:
            self._flush()

    def receive(self) -> list[ControlDown]:
        """What the router sent, without waiting. A Welcome among it means: joined to this router just now."""
        messages: list[ControlDown] = []
        if not self._machine.is_lost:
            messages, self._held = self._held, []
        for _ in range(MAX_FRAMES_PER_RECEIVE):
            if self._machine.is_lost:  # the rest waits in the socket until `tick` has reported it
                break
            parts = self._next_message()
            if parts is None:
                break
            for message in self._decode(parts):
                if self._machine.hear(message):
                    (self._held if self._machine.is_lost else messages).append(message)
        return messages

    def tick(self, now: float) -> str:
        """Send the Hello or the messages that are due; why the router is lost when it just was, else ""."""
        is_hello_due, lost = self._machine.advance(now)
        if lost:
            self._num_overflowed += len(self._outbox)
            self._outbox.clear()  # about rooms that end with that router
            self._heartbeat = None
            logger.warning("router lost", extra=fields(reason=lost))
        if is_hello_due:
            self._machine.asked(now, was_sent=self._transmit(encode(self._machine.hello)))
        self._flush()
        return lost

    def _flush(self) -> None:
        """The heartbeat first: a backlog on a slow connection does not make its worker look dead."""
        if self._machine.can_send and self._heartbeat is not None:
            if self._transmit(encode(self._heartbeat)):
                self._heartbeat = None
            else:
                self._machine.doubt()
        if self._machine.can_send and not send_waiting(
            self._outbox, self._transmit, takes_several=self._machine.takes_batches
        ):
            self._machine.doubt()

    def _decode(self, parts: Sequence[bytes | zmq.Frame]) -> Sequence[ControlDown]:
        try:
            if len(parts) != 1:
                raise RemoteProtocolError("a control message is one frame")
            messages, num_unknown = self._decoder.messages(parts[0])
        except RemoteProtocolError as error:
            self._drop(1, str(error))
            if isinstance(error, DamagedMessage):
                self._machine.miss()
            return ()
        if num_unknown:
            self._drop(num_unknown, unknown_messages(num_unknown))
        return messages

    def _drop(self, num: int, reason: str) -> None:
        self._num_malformed += num
        logger.warning("message from the router dropped", extra=fields(reason=reason))


class ControlLink(LinkQueues):
    """A DEALER to the router; used by the thread that made it."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        endpoint: str,
        hello: Hello,
        now: float,
        *,
        keyring: Keyring | None = None,
    ) -> None:
        self._connection = ReconnectingSocket(context, endpoint, keyring)
        self.endpoint = endpoint
        super().__init__(hello, now)

    def __repr__(self) -> str:
        return f"ControlLink({self.endpoint}, {self._machine}, {self.num_waiting} waiting)"

    @property
    def socket(self) -> Socket:
        """What to poll; another one when the connection was made anew."""
        return self._connection.socket

    def tick(self, now: float) -> str:
        if self._connection.tick(now):
            self._machine.broke()
        return super().tick(now)

    def close(self) -> None:
        """Close the socket, giving what was sent a moment to leave. Idempotent."""
        if not self.socket.closed:
            self._flush()
            self._connection.close()

    def _transmit(self, frame: bytes) -> bool:
        return try_send(self.socket, [frame])

    def _next_message(self) -> Sequence[bytes | zmq.Frame] | None:
        return recv_parts(self.socket, 1, CONTROL_MAX_FRAME)
