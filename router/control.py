"""The router's end of the control plane: a ROUTER socket on the event loop."""

import logging
from collections.abc import Callable

import zmq

from ..cluster.codec import control_up_decoder
from ..cluster.errors import RemoteProtocolError
from ..cluster.log import fields
from ..cluster.messages import ControlUp
from ..cluster.sockets import CONTROL_MAX_FRAME, AsyncReceiver, Socket, bind, check_bind_address, make_socket

logger = logging.getLogger(__name__)

MAX_IDENTITY = 256  # bytes; ZeroMQ's own limit is 255


class ControlSocket:
    """Bound when made; `open` starts reading on the running loop."""

    def __init__(self, endpoint: str, *, trusted_network: bool) -> None:
        check_bind_address(endpoint, trusted_network)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER)
        try:
            self.endpoint = bind(self._socket, endpoint)
        except Exception:
            self.close()
            raise
        self._decoder = control_up_decoder()
        self._receiver: AsyncReceiver | None = None
        self._on_message: Callable[[bytes, ControlUp], None] | None = None
        self.num_malformed = 0

    def __repr__(self) -> str:
        return f"ControlSocket({self.endpoint}, malformed={self.num_malformed})"

    @property
    def drops(self) -> dict[str, int]:
        """Messages that never became an event: no message of the protocol, or longer than one may be."""
        num_oversized = self._receiver.num_dropped if self._receiver is not None else 0
        return {"control_malformed": self.num_malformed, "control_oversized": num_oversized}

    def open(self, on_message: Callable[[bytes, ControlUp], None]) -> None:
        """Hands every message to `on_message(identity, message)`."""
        self._on_message = on_message
        max_bytes = CONTROL_MAX_FRAME + MAX_IDENTITY
        self._receiver = AsyncReceiver(self._socket, self._on_parts, max_parts=2, max_bytes=max_bytes)

    def transmit(self, identity: bytes, frame: bytes) -> bool:
        """Sends without waiting; False when the worker's queue is full. Raises PeerLost."""
        assert self._receiver is not None, "transmit before open"
        return self._receiver.send([identity, frame])

    def close(self) -> None:
        """Idempotent; what was sent has the socket's linger to leave."""
        if getattr(self, "_receiver", None) is not None:
            assert self._receiver is not None
            self._receiver.close()
        self._socket.close()
        self._context.term()

    def _on_parts(self, parts: list[zmq.Frame]) -> None:
        assert self._on_message is not None
        try:
            if len(parts) != 2:
                raise RemoteProtocolError(f"a control message is one frame, not {len(parts) - 1}")
            message: ControlUp = self._decoder.decode(parts[1])
        except RemoteProtocolError as error:
            self.num_malformed += 1
            logger.warning("message dropped", extra=fields(reason=str(error)))
            return
        self._on_message(parts[0].bytes, message)
