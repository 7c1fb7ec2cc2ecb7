"""The worker's end of the control plane: registration with a router, detection of its loss, and the outbox.

`LinkMachine` holds the state and `LinkQueues` the queues; both are free of I/O. `ControlLink` adds a DEALER
socket. One thread owns the link and calls `receive()`, then `tick(now)` in its loop.

    greeting   Hello is sent with backoff until a Welcome arrives; no other message is sent and no order
               accepted
    connected  messages flow; after `QUIET_S` of silence a Hello asks whether the router still knows this
               worker
    doubted    connected, but a send failed: the peer may be a different router now, so only Hello is sent
               until a Welcome identifies it

A router is lost in five cases: it answers no Hello for `LOST_AFTER_S`; a Welcome carries another router id;
the outbox is full because the router does not read; the connection broke; it said goodbye, which is no fault.
Messages in flight on a broken connection are gone, which would leave a gap in a stream or a room that never
starts.

`tick` reports a loss once, before `receive` returns anything from the new router. The worker then drops all
rooms, since their tokens have no reader. It sends a Hello with the next generation before any other message,
so that a slow router does not wait for these rooms. Such a router counts orders that it sent earlier as
dropped and never cancels them. The worker therefore accepts orders again only after a Welcome for the new
generation.

A damaged message from the router may have been an order; messages of other kinds are repeated anyway. The
next Hello counts it as missed, and the router resends every order that awaits an answer. A repeated Hello
with a known instance and generation is a question; the router answers with Welcome and keeps the worker's
rooms.
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
from ..protocol.messages import (
    Cancel,
    ControlDown,
    ControlUp,
    Heartbeat,
    HeldPrefixes,
    Hello,
    Rejected,
    RouterGoodbye,
    Welcome,
)
from ..security.keyring import Keyring
from .reconnect import ReconnectingSocket
from .sockets import Socket, recv_parts, try_send

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 1.0
REJECTED_BACKOFF_S = 5.0
QUIET_S = 0.4  # seconds of silence before a connected worker sends a Hello
SILENT_S = 5.0  # seconds without an answer before a line of the log; each further one waits twice as long
LOST_AFTER_S = 1.4  # seconds of unanswered Hellos, so that work for a dead router ends within two seconds
LEFT = "it said goodbye"  # the reason of a loss that is no fault
OUTBOX_LIMIT = 4096  # messages
MAX_FRAMES_PER_RECEIVE = 256


def level_of_loss(reason: str) -> int:
    """The log level of what is lost for `reason`."""
    return logging.INFO if reason == LEFT else logging.WARNING


@dataclass(frozen=True, kw_only=True)
class LinkCounters:
    """The messages that a control link dropped since it was opened, by reason."""

    stale: int  # addressed to another instance of this worker
    early: int  # orders sent before the router knew that all rooms were dropped; it places them again
    malformed: int  # invalid in this release's protocol
    overflowed: int  # dropped with the outbox of a router that did not read
    hellos: int  # Hellos sent


class LinkMachine:
    """The state of a control link. Times are seconds on one monotonic clock."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.router = ""  # id of the router that sent the last Welcome
        self.connected = False
        self.heartbeat_s = 0.5
        self.takes_prefixes = False  # whether the router knows HeldPrefixes
        self.takes_batches = False  # whether the router accepts frames of several messages
        self.num_stale = 0
        self.num_early = 0
        self.num_hellos = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._next_hello = now
        self._asked_at = float("-inf")
        self._asking_since: float | None = None  # time of the first unanswered Hello
        self._tell_after_s = SILENT_S
        self._was_heard = False
        self._is_doubted = False
        self._is_introduced = True  # False: no Hello has announced the new generation yet
        self._has_missed = False  # a missed message that no Hello has reported yet
        self._rejected = ""
        self._is_new_rejection = False
        self._lost = ""
        self._welcomed = -1  # generation of the last Welcome

    def __repr__(self) -> str:
        state = "greeting" if not self.connected else "doubted" if self._is_doubted else "connected"
        return f"LinkMachine({state}, router={self.router[:8] or 'none'})"

    @property
    def can_send(self) -> bool:
        """Whether messages other than Hello may leave."""
        return self.connected and self._is_introduced and not self._is_doubted and not self._lost

    @property
    def tells_prefixes(self) -> bool:
        """Whether the router wants to know which prefixes are held."""
        return self.connected and self.takes_prefixes

    @property
    def next_hello(self) -> float:
        """The time at which `advance` asks for the next Hello, unless a message arrives earlier."""
        return self._next_hello

    @property
    def is_lost(self) -> bool:
        """Whether a loss waits to be reported by `advance`."""
        return bool(self._lost)

    def new_silence(self, now: float) -> float:
        """The seconds for which nobody has answered, when it is time to tell so; otherwise 0.0."""
        silence_s = 0.0 if self._asking_since is None else now - self._asking_since
        if silence_s < self._tell_after_s:
            return 0.0
        self._tell_after_s *= 2
        return silence_s

    def hear(self, message: ControlDown) -> bool:
        """Processes a message from the router.

        Returns whether the worker must see it. A Welcome is passed on only from a new router.
        """
        if message.instance != self.hello.instance:
            self.num_stale += 1
            return False
        self._was_heard = True
        if isinstance(message, Welcome):
            return self._welcome(message)
        if isinstance(message, Rejected):
            self._reject(message)
            return False
        if isinstance(message, RouterGoodbye):
            if self.connected:
                self.give_up(LEFT)
            return False
        is_welcome = not self._lost and self._welcomed == self.hello.generation
        if not is_welcome and not isinstance(message, Cancel):
            self.num_early += 1
            return False
        return True

    def advance(self, now: float) -> tuple[bool, str]:
        """Advances to `now`. Returns (whether to send a Hello now, why the router is lost or "")."""
        if self._was_heard:
            self._was_heard = False
            self._asking_since = None
            self._tell_after_s = SILENT_S
            self._backoff_s = FIRST_BACKOFF_S
            # repeated Cancels do not keep a rejected worker from greeting again
            is_quiet = self._is_introduced and not self._is_doubted and not self._has_missed
            if is_quiet and (self._is_new_rejection or not self._rejected):
                self._next_hello = now + (REJECTED_BACKOFF_S if self._rejected else QUIET_S)
            self._is_new_rejection = False
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
        """Records that the due Hello was sent, or that no peer was connected."""
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
        """Counts the router as lost, which the next `advance` reports.

        No-op while a loss waits to be reported.
        """
        if not self._lost:
            self.connected = False
            self._lost = reason

    def broke(self) -> None:
        """The connection broke and messages in flight are gone; it is unknown which rooms they concerned."""
        if self.connected:
            self.give_up("the connection to the router broke")

    def miss(self) -> None:
        """A message of the router arrived damaged.

        The next Hello reports it, at most one per FIRST_BACKOFF_S.
        """
        self.hello = msgspec.structs.replace(self.hello, missed=self.hello.missed + 1)
        self._has_missed = True
        if self.connected:
            self._next_hello = min(self._next_hello, self._asked_at + FIRST_BACKOFF_S)

    def doubt(self) -> None:
        """A send failed: identify the peer by a Hello before the next message."""
        if not self._is_doubted:
            self._is_doubted = True
            self._next_hello = float("-inf")

    def _welcome(self, message: Welcome) -> bool:
        if message.generation is not None and message.generation < self.hello.generation:
            return False  # sent before the router knew that all rooms were dropped
        self._welcomed = self.hello.generation
        is_known = self.connected and message.router == self.router
        if self.connected and not is_known:
            self._lost = f"router {self.router[:8]} was replaced by {message.router[:8]}"
        self.connected = True
        self._is_doubted = False
        self.router = message.router
        self.heartbeat_s = message.heartbeat_ms / 1000
        self.takes_batches = message.takes_batches
        self.takes_prefixes = message.takes_prefixes
        self._rejected = ""
        return not is_known

    def _reject(self, message: Rejected) -> None:
        if self.connected:
            self._lost = f"the router rejected this worker: {message.reason}"
        elif not self._lost:
            # The router may know this generation and lack a message of it: only a new one closes such a hole.
            # No room ends by it, since a worker that greets has none.
            self.hello = msgspec.structs.replace(self.hello, generation=self.hello.generation + 1)
        if message.reason != self._rejected:
            logger.warning("the router rejected this worker", extra=fields(reason=message.reason))
        self._rejected = message.reason
        self._is_new_rejection = True
        self.connected = False


class LinkQueues(ABC):
    """A control link without its socket. Times are monotonic seconds."""

    def __init__(self, hello: Hello, now: float) -> None:
        self._machine = LinkMachine(hello, now)
        self._decoder = control_down_decoder()
        self._outbox: deque[bytes] = deque()  # packed messages
        self._heartbeat: Heartbeat | None = None  # the newest one; older ones are obsolete
        self._held: list[
            ControlDown
        ] = []  # messages of a new router, held back until the old one's loss was reported
        self._num_malformed = 0
        self._num_overflowed = 0

    @abstractmethod
    def _transmit(self, frame: bytes) -> bool:
        """Sends a frame without waiting; False when no peer accepts it now."""

    @abstractmethod
    def _next_message(self) -> Sequence[bytes | zmq.Frame] | None:
        """The parts of the next received message; [] for a dropped one, None when there is none."""

    @property
    def num_waiting(self) -> int:
        """Messages that wait to be sent."""
        return len(self._outbox)

    @property
    def next_deadline(self) -> float:
        """The latest time of the next `tick`, when a Hello is due.

        Messages that could not be sent wait for the answer to it.
        """
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
        """The router's heartbeat interval in seconds."""
        return self._machine.heartbeat_s

    @property
    def counters(self) -> LinkCounters:
        """Messages dropped so far, by reason."""
        return LinkCounters(
            stale=self._machine.num_stale,
            early=self._machine.num_early,
            malformed=self._num_malformed,
            overflowed=self._num_overflowed,
            hellos=self._machine.num_hellos,
        )

    def send(self, message: ControlUp) -> None:
        """Queues a message for the next `tick`, or sends it when a frame is full.

        A full outbox ends the connection. HeldPrefixes for a router that is not there, or does not know it,
        is dropped: the router asks for what it misses.
        """
        if isinstance(message, HeldPrefixes) and not self._machine.tells_prefixes:
            return
        if isinstance(message, Heartbeat):
            self._heartbeat = message
        elif len(self._outbox) < OUTBOX_LIMIT:
            self._outbox.append(pack(message))
        else:
            self._num_overflowed += 1
            self._machine.give_up(f"it takes no messages: {OUTBOX_LIMIT} wait")
        if len(self._outbox) >= MAX_BATCH:
            self.flush()

    def receive(self) -> list[ControlDown]:
        """The received messages, without waiting.

        A Welcome means that this worker has just joined the router.
        """
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
        """Sends due messages. Returns the reason when the router was just lost, else ""."""
        is_hello_due, lost = self._machine.advance(now)
        if lost:
            self._num_overflowed += len(self._outbox)
            self._outbox.clear()  # messages about rooms that end with that router
            self._heartbeat = None
            if lost == LEFT:
                logger.info("router left", extra=fields(router=self._machine.router))
            else:
                logger.warning("router lost", extra=fields(reason=lost))
        if is_hello_due:
            self._machine.asked(now, was_sent=self._transmit(encode(self._machine.hello)))
        self.flush()
        return lost

    def flush(self) -> None:
        """Sends what waits, as far as the connection takes it.

        The heartbeat goes first, so that a backlog on a slow connection does not make the worker look dead.
        """
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
    """A control link over a DEALER socket. Used by the thread that made it."""

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
        """The socket to poll; replaced after a reconnect."""
        return self._connection.socket

    def tick(self, now: float) -> str:
        if self._connection.tick(now):
            self._machine.broke()
        lost = super().tick(now)
        if silence_s := self._machine.new_silence(now):
            logger.warning(
                "no router answers yet; start it, or correct --router",
                extra=fields(endpoint=self.endpoint, for_s=round(silence_s)),
            )
        return lost

    def close(self) -> None:
        """Closes the socket after a short linger for sent messages. Idempotent."""
        if not self.socket.closed:
            self.flush()
            self._connection.close()

    def _transmit(self, frame: bytes) -> bool:
        return try_send(self.socket, [frame])

    def _next_message(self) -> Sequence[bytes | zmq.Frame] | None:
        return recv_parts(self.socket, 1, CONTROL_MAX_FRAME)
