"""A worker's connection to the router: a DEALER socket that is recreated when a handshake fails.

libzmq stops retrying after some failures (a refused key, keys on one end only, bytes that are not ZMTP) and
retries seven times a second after others (a wrong server key). This module treats all failures alike: it
closes the socket, logs the reason, waits with backoff and reconnects with the router's next listed key, so
that a router stays reachable while its key is being replaced. An established connection that breaks is
reopened at once with the same key.
"""

import logging
from contextlib import suppress

import zmq

from ..errors import ConfigError
from ..process.log import fields
from ..process.log_throttle import LogThrottle
from ..security.keyring import Keyring
from .handshakes import HANDSHAKE_FAILURES, SocketMonitor, failure_text
from .sockets import Socket, connect, make_socket

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
BROKEN_PAUSE_S = 0.1


class ReconnectingSocket:
    """Owns `socket`, which `tick` may replace: do not keep a reference to it."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str, keyring: Keyring | None = None) -> None:
        """Raises ConfigError for an invalid endpoint, and when no router key is listed."""
        self.num_failures = 0
        self._context = context
        self._endpoint = endpoint
        self._keyring = keyring
        self._log_throttle = LogThrottle()
        self._pause_s = FIRST_PAUSE_S
        self._redial_at: float | None = None  # time of the next attempt, while nothing is connected
        self._open()

    def __repr__(self) -> str:
        state = "dialling" if self._redial_at is None else "waiting"
        return f"ReconnectingSocket({self._endpoint} {state}, failures={self.num_failures})"

    def tick(self, now: float) -> bool:
        """Processes failures and reconnects when due.

        Returns whether an established connection has broken.
        """
        has_broken = False
        for event, value in self._watch.read():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._pause_s = FIRST_PAUSE_S
            elif event == zmq.EVENT_DISCONNECTED:
                has_broken = True
                self._redial_at = now + BROKEN_PAUSE_S if self._redial_at is None else self._redial_at
            elif self._redial_at is None:
                self._failed(failure_text(event, value), now)
        if self._redial_at is not None and now >= self._redial_at:
            self._redial_at = None
            self.close()
            self._dial_again(now)
        return has_broken

    def close(self) -> None:
        """Idempotent."""
        if not self.socket.closed:
            self._watch.close()
            self.socket.close()

    def _open(self) -> None:
        curve = self._keyring.calling(self._router_key(self._keyring)) if self._keyring is not None else None
        self.socket = make_socket(self._context, zmq.DEALER, curve=curve)
        self._watch = SocketMonitor(
            self.socket, HANDSHAKE_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            connect(self.socket, self._endpoint)
        except Exception:
            self.close()
            raise

    def _router_key(self, keyring: Keyring) -> str:
        """The next router key to try: the newest first, then the others in turn.

        A router that has not restarted yet still uses an older key.
        """
        routers = keyring.peers.of_role("router")
        if not routers:
            path = keyring.peers.path
            raise ConfigError(
                f"{path}: lists no router; add its key with `baton keys add {path.parent} KEY --role router`"
            )
        return routers[self.num_failures % len(routers)].public

    def _dial_again(self, now: float) -> None:
        try:
            self._open()
        except ConfigError as error:  # the list was changed to an invalid one
            self._failed(str(error), now)

    def _failed(self, reason: str, now: float) -> None:
        # libzmq may have forgotten the endpoint itself, or it was never connected
        with suppress(zmq.ZMQError):
            self.socket.disconnect(self._endpoint)
        self.num_failures += 1
        self._redial_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if self._log_throttle.is_due(reason):
            logger.warning(
                "no connection to the router",
                extra=fields(to=self._endpoint, reason=reason, **self._advice()),
            )

    def _advice(self) -> dict[str, str]:
        if self._keyring is None:
            return {"remedy": "if the router runs with --keys, so must this worker"}
        own = self._keyring.own
        return {
            "remedy": "both ends run with --keys and list each other's key: see `baton keys list`",
            "user": f"{own.role}/{own.name}",
            "key": own.public,
        }
