"""The router's end of the control plane: a ROUTER socket on the event loop.

With keys, the sender of a message is the ZAP User-Id (`role/name`), never the routing id. A key may send
messages only for worker instances that it introduced, and only of its role's types.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import zmq

from ...cluster.errors import DamagedMessage, PeerLost, RemoteProtocolError
from ...cluster.net.authenticator import Authenticator, user_of
from ...cluster.net.drop_log import DropLog
from ...cluster.net.flood_guard import FloodGuard
from ...cluster.net.handshakes import MONITOR_BYTES, MONITOR_PARTS, HandshakeMonitor
from ...cluster.net.sockets import (
    TOO_LONG,
    AsyncReceiver,
    Socket,
    bind,
    check_bind_address,
    is_discarding,
    make_socket,
)
from ...cluster.process.log import fields
from ...cluster.process.log_throttle import LogThrottle
from ...cluster.protocol.codec import CONTROL_MAX_FRAME, control_up_decoder, encode, unknown_messages
from ...cluster.protocol.messages import ControlUp, Finished, FirstToken, Hello, Rejected, Reserved, Tokens
from ...cluster.security.keyring import Keyring

logger = logging.getLogger(__name__)

MAX_IDENTITY = 256  # bytes; ZeroMQ's own limit is 255
WORKER_ROLES = ("prefill", "decode")
ROLE_OF_VERB: dict[type, str] = {
    FirstToken: "prefill",
    Reserved: "decode",
    Tokens: "decode",
    Finished: "decode",
}
INSTANCES_PER_USER = 1024  # worker processes that share one key


class Speakers:
    """The user of each worker instance: the one whose Hello introduced it."""

    def __init__(self) -> None:
        self._user_of: dict[str, str] = {}
        self._instances: dict[
            str, OrderedDict[str, None]
        ] = {}  # instances of each user, the latest Hello at the end

    def __repr__(self) -> str:
        return f"Speakers({len(self._user_of)} instances of {len(self._instances)} users)"

    def fault(self, user: str, message: ControlUp) -> str:
        """The reason why `user` (`role/name`) may not send this message, or "".

        A Hello binds the instance to its user.
        """
        role = user.partition("/")[0]
        verb = type(message).__name__
        if role not in WORKER_ROLES:
            return "the connection has no worker's key"
        if ROLE_OF_VERB.get(type(message), role) != role:
            return f"a {role} key may not say {verb}"
        owner = self._user_of.get(message.instance)
        if isinstance(message, Hello):
            if message.role != role:
                return f"a {role} key may not register a {message.role} worker"
            if owner in (None, user):
                self._introduce(user, message.instance)
                return ""
        return "" if owner == user else f"{verb} for an instance that this key did not introduce"

    def _introduce(self, user: str, instance: str) -> None:
        mine = self._instances.setdefault(user, OrderedDict())
        mine[instance] = None
        mine.move_to_end(instance)
        self._user_of[instance] = user
        if len(mine) > INSTANCES_PER_USER:  # a key that invents instances displaces only its own
            oldest, _ = mine.popitem(last=False)
            del self._user_of[oldest]


class ControlSocket:
    """Bound when constructed; `open` starts reading on the running loop.

    With a `keyring` only listed workers connect.
    """

    def __init__(self, endpoint: str, *, trusted_network: bool, keyring: Keyring | None = None) -> None:
        check_bind_address(
            endpoint, trusted_network, has_keys=keyring is not None, named=f"--control-bind {endpoint}"
        )
        self.num_malformed = 0
        self.num_denied = 0  # messages that their sender's key may not send
        self.authenticator: Authenticator | None = None
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = make_socket(
            self._context, zmq.ROUTER, curve=keyring.called() if keyring is not None else None
        )
        self._flood_guard = FloodGuard()
        self._handshakes = HandshakeMonitor(self._socket)
        self._door_receiver: AsyncReceiver | None = None
        self._receiver: AsyncReceiver | None = None
        try:
            if keyring is not None:
                self.authenticator = Authenticator(self._context, keyring.peers, WORKER_ROLES)
            self.endpoint = bind(self._socket, endpoint)
        except Exception:
            self.close()
            raise
        self._decoder = control_up_decoder()
        self._on_message: Callable[[bytes, ControlUp], None] | None = None
        self._on_damaged: Callable[[bytes], None] = lambda _: None
        self._on_left: Callable[[], None] = lambda: None
        self._speakers = Speakers()
        self._log_throttle = LogThrottle()
        self._drop_log = DropLog("message dropped")

    def __repr__(self) -> str:
        return f"ControlSocket({self.endpoint}, malformed={self.num_malformed})"

    @property
    def num_left(self) -> int:
        """Connections that have ended since the socket was bound."""
        return self._handshakes.num_left

    @property
    def drops(self) -> dict[str, int]:
        """Counts of messages that never became an event: invalid, or too long."""
        num_oversized = self._receiver.num_dropped if self._receiver is not None else 0
        drops = {"control_malformed": self.num_malformed, "control_oversized": num_oversized}
        drops["control_handshakes_failed"] = self._handshakes.num_failed
        if self.authenticator is not None:
            drops |= {"control_denied": self.num_denied, **self.authenticator.counters}
        return drops

    @property
    def is_behind(self) -> bool:
        """Whether the rest of an oversized message still delays the messages of workers."""
        return is_discarding(self._socket)

    def open(
        self,
        on_message: Callable[[bytes, ControlUp], None],
        on_damaged: Callable[[bytes], None] = lambda _: None,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to read.

        Calls `on_message(identity, message)` per message, `on_damaged(identity)` for a lost message, and
        `on_left()` when a connection ends.
        """
        self._on_message, self._on_damaged, self._on_left = on_message, on_damaged, on_left
        max_bytes = CONTROL_MAX_FRAME + MAX_IDENTITY
        self._receiver = AsyncReceiver(
            self._socket,
            self._on_parts,
            max_parts=2,
            max_bytes=max_bytes,
            on_dropped=lambda: self._drop_log.say("", TOO_LONG),
            guard=self._flood_guard,
        )
        self._door_receiver = AsyncReceiver(
            self._handshakes.socket, self._on_event, max_parts=MONITOR_PARTS, max_bytes=MONITOR_BYTES
        )

    def transmit(self, identity: bytes, frame: bytes) -> bool:
        """Sends without waiting. False when the worker's queue is full, or after `close`. Raises PeerLost."""
        assert self._receiver is not None, "transmit before open"
        return not self._socket.closed and self._receiver.send([identity, frame])

    def close(self) -> None:
        """Closes the socket. Idempotent. Sent messages may leave within the socket's linger."""
        for receiver in (self._receiver, self._door_receiver):
            if receiver is not None:
                receiver.close()
        self._handshakes.close()
        self._socket.close()
        self._context.term()

    def _on_event(self, parts: list[zmq.Frame]) -> None:
        num_left = self.num_left
        self._handshakes.take(parts)
        if self.num_left != num_left:
            self._on_left()

    def _on_parts(self, parts: list[zmq.Frame]) -> None:
        assert self._on_message is not None
        try:
            if len(parts) != 2:
                raise RemoteProtocolError(f"a control message is one frame, not {len(parts) - 1}")
            messages, num_unknown = self._decoder.messages(parts[1])
        except RemoteProtocolError as error:
            self._drop(parts[0], 1, str(error))
            if isinstance(error, DamagedMessage):
                self._on_damaged(parts[0].bytes)
            return
        if num_unknown:
            self._drop(parts[0], num_unknown, unknown_messages(num_unknown))
        identity = parts[0].bytes
        user = user_of(parts[1]) if self.authenticator is not None else ""
        self._handle_all(identity, user, messages)

    def _drop(self, identity: zmq.Frame, num: int, reason: str) -> None:
        self.num_malformed += num
        self._drop_log.say(identity.bytes.hex(), reason)

    def _handle_all(self, identity: bytes, user: str, messages: tuple[ControlUp, ...]) -> None:
        """Handles each message by itself: an error in one does not affect the others."""
        for number, message in enumerate(messages, 1):
            try:
                self._handle(identity, user, message)
            except BaseException:
                self._handle_all(identity, user, messages[number:])
                raise

    def _handle(self, identity: bytes, user: str, message: ControlUp) -> None:
        assert self._on_message is not None
        fault = self._speakers.fault(user, message) if self.authenticator is not None else ""
        if fault:
            self._deny(identity, user, message, fault)
        else:
            self._on_message(identity, message)

    def _deny(self, identity: bytes, user: str, message: ControlUp, fault: str) -> None:
        self.num_denied += 1
        if self._log_throttle.is_due(user + fault):
            logger.warning("message denied", extra=fields(user=user, instance=message.instance, reason=fault))
        if isinstance(message, Hello):
            with suppress(PeerLost):
                self.transmit(identity, encode(Rejected(instance=message.instance, reason=fault)))
