"""Who may connect: the answers to ZAP, the questions that libzmq asks for every CURVE handshake.

Every socket that is connected to sets a ZAP domain and enforces it, so an unanswered question is a refusal: when the
thread here dies, nobody new gets in, and who is connected stays connected. A peer that is admitted is known by its user,
`role/name`, which libzmq puts on each of its messages. A routing id is what a peer says about itself; the user is not.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence

import zmq

from .errors import ConfigError, StartupError
from .keyring import KEY_BYTES, AllowList, split_key
from .log import fields
from .sockets import TICKET_DOMAIN, TICKET_USER, ZAP_DOMAIN, Socket, make_socket, recv_parts
from .tickets import Tickets

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_PARTS = 7  # version, request, domain, address, routing id, mechanism, and a key or user
TICKET_PARTS = 8  # in place of the key, a user and a ticket
QUIET_S = 60.0  # a peer that is refused again and again is worth a line a minute
MAX_SUBJECTS = 256
UNFINISHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
HANDSHAKE_FAILURES = UNFINISHED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
MONITOR_PARTS, MONITOR_BYTES = 2, 1024
EVENTS_PER_TURN = 64
MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class Sparingly:
    """Says whether a subject is due for another log line. Remembers a bounded number of subjects."""

    def __init__(self, quiet_s: float = QUIET_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet_s = quiet_s
        self._clock = clock
        self._said: dict[str, float] = {}

    def is_due(self, subject: str) -> bool:
        """True at the first time, and again when the subject was left alone for `quiet_s`."""
        now = self._clock()
        if now - self._said.get(subject, float("-inf")) < self._quiet_s:
            return False
        if len(self._said) >= MAX_SUBJECTS:
            self._said = {name: at for name, at in self._said.items() if now - at < self._quiet_s}
        if len(self._said) >= MAX_SUBJECTS:  # strangers with new keys all the time are one subject
            return self.is_due("") if subject else False
        self._said[subject] = now
        return True


class DropLog:
    """Logs messages that were dropped: a line per peer and kind of fault, so that no peer can fill a disk."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._sparingly = Sparingly(clock=clock)

    def say(self, peer: str, reason: str) -> None:
        """`peer` may be an address with a key, of which only the address is told; "": unknown."""
        kind = "".join(char for char in reason if not char.isdigit())  # a peer can change the numbers at will
        if self._sparingly.is_due(f"{peer} {kind}"):
            logger.warning("%s", self._text, extra=fields(peer=split_key(peer)[0], reason=reason))


class Authenticator:
    """A context's ZAP handler: admits the keys that `peers` lists under one of `roles`, and the holders of `tickets`.

    Made before the first socket of its context that is connected to. It ends when the context does.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        peers: AllowList,
        roles: Collection[str],
        tickets: Tickets | None = None,
    ) -> None:
        self.num_refused = 0
        self.num_failures = 0  # 1: the thread died, nobody is admitted any more
        self._peers = peers
        self._roles = tuple(roles)
        self._tickets = tickets
        self._sparingly = Sparingly()
        self._socket = make_socket(context, zmq.REP, linger_ms=0)
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            raise StartupError(f"cannot authenticate peers: {error.strerror}") from None
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "answers" if self._thread.is_alive() else "stopped"
        return f"Authenticator({state}, roles={'|'.join(self._roles)}, refused={self.num_refused})"

    @property
    def counters(self) -> dict[str, int]:
        """Name to total."""
        return {"peers_refused": self.num_refused, "authentication_failures": self.num_failures}

    def _run(self) -> None:
        try:
            while True:
                self._socket.poll()
                parts = recv_parts(self._socket, TICKET_PARTS, 4096)
                if parts is not None:
                    self._socket.send_multipart(self._answer([part.bytes for part in parts]))
        except zmq.ContextTerminated:
            logger.debug("authentication ended")
        except Exception:
            self.num_failures += 1
            logger.exception("authentication died: nobody new is admitted until this process is restarted")
        finally:
            self._socket.close(0)

    def _answer(self, parts: Sequence[bytes]) -> list[bytes]:
        """The reply to one ZAP request: version, request, status, reason, user, no metadata."""
        request = parts[1] if len(parts) > 1 else b""
        user, reason = self._judge(parts)
        status = b"200" if user else b"400"
        return [ZAP_VERSION, request, status, reason.encode(), user.encode(), b""]

    def _judge(self, parts: Sequence[bytes]) -> tuple[str, str]:
        """(user, "") of a peer that is admitted, else ("", reason)."""
        if not ZAP_PARTS <= len(parts) <= TICKET_PARTS or parts[0] != ZAP_VERSION:
            return self._refuse("", "", "the request is not of ZAP 1.0")
        if parts[2] == TICKET_DOMAIN:
            return self._judge_ticket(parts)
        _, _, domain, address, _, mechanism, key = parts[:ZAP_PARTS]
        where = address.decode(errors="replace")
        if len(parts) != ZAP_PARTS or domain != ZAP_DOMAIN or mechanism != b"CURVE" or len(key) != KEY_BYTES:
            return self._refuse("", where, "the peer shows no key")
        public = key.hex()
        try:
            peer = self._peers.find(public, self._roles)
        except ConfigError as error:
            return self._refuse("", where, str(error))
        if peer is None:
            roles = " or ".join(self._roles)
            return self._refuse(public, where, f"the key is not listed as {roles}, or its time is over")
        logger.debug("peer admitted", extra=fields(user=peer.user, address=where))
        return peer.user, ""

    def _judge_ticket(self, parts: Sequence[bytes]) -> tuple[str, str]:
        where = parts[3].decode(errors="replace")
        if self._tickets is None or parts[5:7] != [b"PLAIN", TICKET_USER] or len(parts) != TICKET_PARTS:
            return self._refuse("", where, "the peer shows no ticket")
        user = self._tickets.redeem(parts[7].decode(errors="replace"))
        return (user, "") if user else self._refuse("", where, "the ticket is unknown, used or too old")

    def _refuse(self, public: str, address: str, reason: str) -> tuple[str, str]:
        self.num_refused += 1
        if self._sparingly.is_due(public or address):
            logger.warning("peer refused", extra=fields(key=public, address=address, reason=reason))
        return "", reason


def user_of(frame: zmq.Frame) -> str:
    """The user that ZAP gave to the sender of `frame`; "" on a link without keys."""
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return ""
    assert isinstance(user, str)
    return user


# --- handshakes that fail ---------------------------------------------------------------------------------------------


class Watch:
    """Reads the connection events of one socket; closed before that socket is."""

    def __init__(self, watched: Socket, events: int) -> None:
        self._watched = watched
        self.socket: Socket = watched.get_monitor_socket(events)

    def read(self) -> list[tuple[int, int]]:
        """(event, value) of what happened, oldest first; a flood is left for the next turn."""
        events = []
        for _ in range(EVENTS_PER_TURN):
            parts = recv_parts(self.socket, MONITOR_PARTS, MONITOR_BYTES)
            if not parts:
                break
            events.append(parse_event(parts))
        return events

    def close(self) -> None:
        """Idempotent."""
        if not self.socket.closed:
            self._watched.disable_monitor()
            self.socket.close(0)


class Doorway:
    """Counts and logs the connections to a socket that ended before they began; ZAP logs the keys that it refused.

    `num_left` counts those that ended later: the system closes them for a process that dies.
    """

    def __init__(self, watched: Socket) -> None:
        self.num_failed = 0
        self.num_left = 0
        self._watch = Watch(watched, UNFINISHED | zmq.EVENT_DISCONNECTED)
        self._sparingly = Sparingly()

    @property
    def socket(self) -> Socket:
        """Readable when `read` has something to do."""
        return self._watch.socket

    def read(self) -> None:
        """Take in what happened."""
        for event, value in self._watch.read():
            self._count(event, value)

    def take(self, parts: Sequence[zmq.Frame]) -> None:
        """Take in one event that another reader of `socket` received."""
        self._count(*parse_event(parts))

    def _count(self, event: int, value: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self.num_left += 1
            return
        self.num_failed += 1
        reason = failure_text(event, value)
        if self._sparingly.is_due(reason):
            logger.warning("a connection failed before it began", extra=fields(reason=reason))

    def close(self) -> None:
        """Idempotent; before the socket that is watched is closed."""
        self._watch.close()


def parse_event(parts: Sequence[zmq.Frame]) -> tuple[int, int]:
    """(event, value) of a monitor's message."""
    event, value = struct.unpack("=HI", parts[0].bytes)
    return event, value


def failure_text(event: int, value: int) -> str:
    """Why a handshake failed, as the end that reads the event sees it."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the peer refused our key"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MISMATCH:
        return "one end uses keys and the other does not"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "the peer expects another key than ours"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"the peer does not follow ZMTP (0x{value:x})"
    return "the peer broke off"
