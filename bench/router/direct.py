"""Times the workers of `baton bench router` without a router, over the same sockets."""

import secrets
import time

import zmq

from ...cluster.errors import StartupError
from ...cluster.net.sockets import Socket, bind, make_socket
from ...cluster.protocol.codec import control_up_decoder, encode
from ...cluster.protocol.messages import Hello, Prefill, Reserve, Sampling, Welcome

PATIENCE_MS = 30_000
# the last message of prefill and of decode; heartbeats arrive as well
FINAL_TYPES = (b"FirstToken", b"Finished")


class DirectClient:
    """Takes the router's place at `endpoint`.

    Frames are encoded in advance, so the client's own cost is small.
    """

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = make_socket(self._context, zmq.ROUTER, high_water=1024)
        self.endpoint = bind(self._socket, endpoint)
        self._orders: list[list[bytes]] = []  # [identity, frame]

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def greet(self, prompt_ids: list[int], max_new_tokens: int) -> None:
        """Welcomes both workers and encodes their orders.

        Raises StartupError when a worker does not register.
        """
        decoder, me, room = control_up_decoder(), secrets.token_hex(16), secrets.token_hex(16)
        sampling = Sampling(temperature=0.0, max_new_tokens=max_new_tokens)
        found: dict[str, list[bytes]] = {}
        while len(found) < 2:
            identity, frame = self._next()
            hello = decoder.decode(frame)
            if not isinstance(hello, Hello):
                continue
            make = Prefill if hello.role == "prefill" else Reserve
            order = make(
                room=room,
                epoch=0,
                instance=hello.instance,
                prompt_ids=prompt_ids,
                sampling=sampling,
                deadline_ms=0,
            )
            found[hello.role] = [identity, encode(order)]
            welcome = Welcome(instance=hello.instance, router=me, heartbeat_ms=500, takes_batches=True)
            self._socket.send_multipart([identity, encode(welcome)])
        self._orders = [found["decode"], found["prefill"]]

    def ask(self) -> float:
        """Sends one request to both workers at once. Returns the seconds until both have finished it."""
        began = time.perf_counter()
        for order in self._orders:
            self._socket.send_multipart(order)
        awaited = set(FINAL_TYPES)
        while awaited:
            _, frame = self._next()
            awaited -= {word for word in awaited if word in frame}
        return time.perf_counter() - began

    def _next(self) -> list[bytes]:
        if not self._socket.poll(PATIENCE_MS):
            raise StartupError(f"the workers of the bench say nothing for {PATIENCE_MS / 1000:g} s")
        return self._socket.recv_multipart()
