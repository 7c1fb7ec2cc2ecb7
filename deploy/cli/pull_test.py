"""Measures the rate at which this host pulls from another: blocks of 1 MiB over ZeroMQ, requested as decode
requests KV.

    baton doctor --serve-pull tcp://10.0.0.2:7999 --trusted-network     on the one host
    baton doctor --pull tcp://10.0.0.2:7999                             on the other

The blocks hold no data. The serving end answers each request with one block, for at most `SERVE_S`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from ...cluster.errors import BatonError, ConfigError
from ...cluster.net.sockets import bind, check_bind_address, connect, make_socket, recv_parts, try_send
from ...cluster.protocol.kv_messages import BLOCK_BYTES

WINDOW = 8
MEASURE_S = 2.0
SERVE_S = 600.0
SILENCE_S = 3.0  # longest silence of the other end, in seconds
ASK_BLOCK, ASK_NOTHING = b"block", b"nothing"
MAX_FRAME = BLOCK_BYTES + 4096
ROUND_TRIPS = 50


@dataclass(frozen=True, kw_only=True)
class Link:
    """One measured direction."""

    bytes_per_s: float
    round_trip_s: float  # median

    def __str__(self) -> str:
        fast = self.bytes_per_s >= 1e8
        rate = f"{self.bytes_per_s / 1e9:.2f} GB/s" if fast else f"{self.bytes_per_s / 1e6:.1f} MB/s"
        return f"{rate}, round trip {self.round_trip_s * 1e6:.0f} us"


def serve(
    endpoint: str,
    *,
    trusted_network: bool,
    on_ready: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> int:
    """Answers requests until `SERVE_S` have passed or `is_over` is true. Returns the number of blocks sent.

    Raises ConfigError for an invalid endpoint, StartupError for one in use.
    """
    check_bind_address(endpoint, trusted_network)
    block = bytes(BLOCK_BYTES)
    num_sent = 0
    with zmq.Context() as context:
        socket = make_socket(context, zmq.ROUTER, max_frame=4096, high_water=2 * WINDOW)
        try:
            on_ready(bind(socket, endpoint))
            until = time.monotonic() + SERVE_S
            while time.monotonic() < until and not is_over():
                if not socket.poll(100):
                    continue
                parts = recv_parts(socket, 2, 4096)
                if parts is None or len(parts) != 2:
                    continue
                peer, asked = parts[0].bytes, parts[1].bytes
                is_block = asked == ASK_BLOCK
                num_sent += is_block
                _answer(socket, [peer, block if is_block else b""])
        finally:
            socket.close()
    return num_sent


def measure(endpoint: str, seconds: float = MEASURE_S) -> Link:
    """Pulls for `seconds`. Raises ConfigError for an invalid endpoint, BatonError when it does not answer."""
    with zmq.Context() as context:
        socket = make_socket(context, zmq.DEALER, max_frame=MAX_FRAME, high_water=2 * WINDOW)
        try:
            connect(socket, endpoint)
            trips = sorted(_round_trip(socket, endpoint) for _ in range(ROUND_TRIPS))
            return Link(bytes_per_s=_pull(socket, endpoint, seconds), round_trip_s=trips[len(trips) // 2])
        finally:
            socket.close()


def _answer(socket: "zmq.Socket[bytes]", parts: list[bytes]) -> None:
    try:
        try_send(socket, parts)
    except BatonError:
        return  # the requester has left


def _round_trip(socket: "zmq.Socket[bytes]", endpoint: str) -> float:
    began = time.monotonic()
    _ask(socket, ASK_NOTHING, endpoint)
    _receive(socket, endpoint)
    return time.monotonic() - began


def _pull(socket: "zmq.Socket[bytes]", endpoint: str, seconds: float) -> float:
    """Pulls blocks for `seconds`. Returns bytes per second."""
    for _ in range(WINDOW):
        _ask(socket, ASK_BLOCK, endpoint)
    began, num_bytes, elapsed = time.monotonic(), 0, 0.0
    while elapsed < seconds:
        num_bytes += _receive(socket, endpoint)
        _ask(socket, ASK_BLOCK, endpoint)
        elapsed = time.monotonic() - began
    return num_bytes / elapsed


def _ask(socket: "zmq.Socket[bytes]", what: bytes, endpoint: str) -> None:
    until = time.monotonic() + SILENCE_S
    while not try_send(socket, [what]):
        if time.monotonic() > until:
            raise BatonError(
                f"{endpoint} cannot be reached: start `baton doctor --serve-pull` there, and open its port"
            )
        time.sleep(0.01)


def _receive(socket: "zmq.Socket[bytes]", endpoint: str) -> int:
    if not socket.poll(int(SILENCE_S * 1000)):
        raise BatonError(f"{endpoint} does not answer: is it `baton doctor --serve-pull` that listens there?")
    parts = recv_parts(socket, 1, MAX_FRAME)
    if not parts:
        raise ConfigError(f"{endpoint} answers something else than `baton doctor --serve-pull`")
    return len(parts[0].buffer)
