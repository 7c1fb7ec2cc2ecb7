"""The ZAP handler of a context: the thread that answers libzmq's question whether a peer may connect.

Every listening socket sets a ZAP domain and enforces it, so a question without an answer is a refusal. If the
thread dies, no new peer is admitted and existing connections stay. `security.allowed_keys` holds the rules.
"""

import logging
import threading
from collections.abc import Collection, Sequence

import zmq

from ..errors import StartupError
from ..security.allowed_keys import TICKET_PARTS, ZapRules
from ..security.keyring import AllowList
from ..security.tickets import Tickets
from .sockets import Socket, make_socket, recv_parts

logger = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class Authenticator:
    """A context's ZAP handler. Admits the keys that `peers` lists under one of `roles`, and holders of
    `tickets`.

    Must be made before the first listening socket of its context. It ends with the context. Raises
    StartupError when the context already has one.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        peers: AllowList,
        roles: Collection[str],
        tickets: Tickets | None = None,
    ) -> None:
        self.num_failures = 0  # 1 after the thread died, which admits no peer any more
        self._rules = ZapRules(peers, roles, tickets)
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
        roles = "|".join(self._rules.roles)
        return f"Authenticator({state}, roles={roles}, refused={self.num_refused})"

    @property
    def num_refused(self) -> int:
        """Connections refused so far."""
        return self._rules.num_refused

    @property
    def counters(self) -> dict[str, int]:
        """Counters by name."""
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
        return self._rules.answer(parts)


def user_of(frame: zmq.Frame) -> str:
    """The ZAP user of the sender of `frame`; "" on a link without keys."""
    try:
        user = frame.get("User-Id")
    except zmq.ZMQError:
        return ""
    assert isinstance(user, str)
    return user
