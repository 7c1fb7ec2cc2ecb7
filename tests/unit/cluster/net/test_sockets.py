"""Every socket has the same bounds, and reading and writing keep them."""

import asyncio
import contextlib
import os
import select
import socket as stdlib_socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from baton.cluster.errors import ConfigError, PeerLost, StartupError
from baton.cluster.net.sockets import (
    DISCARD_PARTS,
    AsyncReceiver,
    Socket,
    bind,
    check_bind_address,
    connect,
    is_discarding,
    is_loopback,
    make_socket,
    recv_parts,
    try_send,
)
from baton.tests.cluster.keeping_context import KeepingContext
from baton.tests.patience import patient_with_peers

DEADLINE_S = 30.0


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = KeepingContext()
    yield context
    context.destroy(linger=0)


def wait_for(condition: Callable[[], object]) -> object:
    """Polls until `condition` gives something true."""
    end = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.002)
    return result


def linked(context: zmq.Context, **options: int) -> tuple[Socket, Socket]:
    """A ROUTER and a DEALER that are connected."""
    with patient_with_peers():
        router, dealer = (
            make_socket(context, zmq.ROUTER, **options),
            make_socket(context, zmq.DEALER, **options),
        )
    connect(dealer, bind(router, "tcp://127.0.0.1:0"))
    wait_for(lambda: try_send(dealer, [b"hello"]))
    wait_for(lambda: recv_parts(router, 2, 100))
    return router, dealer


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER])
def test_every_socket_is_bounded_in_memory_and_time(context: zmq.Context, kind: int) -> None:
    socket = make_socket(context, kind, max_frame=1234, high_water=8, linger_ms=100)
    expected = {
        zmq.MAXMSGSIZE: 1234,
        zmq.SNDHWM: 8,
        zmq.RCVHWM: 0,  # a full one is a danger, as below; a FloodGuard bounds that of a ROUTER
        zmq.LINGER: 100,
        zmq.HANDSHAKE_IVL: 2000,
        zmq.HEARTBEAT_IVL: 0 if kind == zmq.ROUTER else 500,
        zmq.HEARTBEAT_TIMEOUT: 600_000,
        zmq.HEARTBEAT_TTL: 600_000,
        zmq.TCP_MAXRT: 1500,
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 1000,
    }
    assert {option: socket.getsockopt(option) for option in expected} == expected
    assert 0 < socket.getsockopt(zmq.SNDTIMEO) <= 1000
    assert kind != zmq.DEALER or socket.getsockopt(zmq.IMMEDIATE) == 1


SIDES = ("dealer", "router", "pinged", "flooded")


@pytest.fixture(scope="module")
def stalled_readers() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each side. All run at once: most of the time they wait."""
    command = [sys.executable, "-P", "-m", "baton.tests.unit.cluster.net.stalled_reader"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = {side: subprocess.Popen([*command, side], **pipes) for side in SIDES}
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("side", SIDES)
def test_a_reader_stalled_behind_a_full_queue_survives_its_peers_exit(
    side: str, stalled_readers: dict[str, subprocess.Popen[str]]
) -> None:
    """libzmq aborts the process where the side with the full queue sends a heartbeat, or an answer to one."""
    process = stalled_readers[side]
    said, fault = process.communicate(timeout=60)
    assert process.returncode == 0, fault
    assert "alive" in said


def test_nothing_is_queued_for_an_absent_peer(context: zmq.Context) -> None:
    dealer, router = make_socket(context, zmq.DEALER), make_socket(context, zmq.ROUTER)
    connect(dealer, "tcp://127.0.0.1:1")
    assert not try_send(dealer, [b"x"])
    bind(router, "tcp://127.0.0.1:0")
    with pytest.raises(PeerLost):
        try_send(router, [b"nobody", b"x"])


def test_a_full_queue_is_reported_and_nothing_is_lost(context: zmq.Context) -> None:
    router, dealer = context.socket(zmq.ROUTER), make_socket(context, zmq.DEALER, high_water=2)
    router.setsockopt(zmq.RCVHWM, 2)
    connect(dealer, bind(router, "tcp://127.0.0.1:0"))
    wait_for(lambda: try_send(dealer, [b"hello"]))
    wait_for(lambda: recv_parts(router, 2, 100))
    sent = 0
    block = b"x" * (1 << 20)
    while try_send(dealer, [str(sent).encode(), block]):
        sent += 1
        assert sent < 500
    got: list[bytes] = []

    def receive() -> bool:
        while parts := recv_parts(router, 3, 2 << 20):
            got.append(parts[1].bytes)
        return len(got) == sent

    wait_for(receive)
    assert got == [str(i).encode() for i in range(sent)]


def test_a_message_with_too_many_parts_or_bytes_is_dropped_alone(
    context: zmq.Context,
) -> None:
    router, dealer = linked(context)
    assert recv_parts(router, 3, 100) is None
    for parts in ([b"a"] * 5000, [b"a" * 60] * 2, [b"good", b"one"]):
        assert try_send(dealer, parts)
    assert wait_for(lambda: recv_parts(router, 3, 100) == [])
    assert wait_for(lambda: recv_parts(router, 3, 100) == [])
    parts = wait_for(lambda: recv_parts(router, 3, 100))
    assert [part.bytes for part in parts[1:]] == [b"good", b"one"]


def test_a_message_of_very_many_parts_is_discarded_in_pieces_counted_once(
    context: zmq.Context,
) -> None:
    router, dealer = linked(context)
    assert try_send(dealer, [b""] * (5 * DISCARD_PARTS))
    assert try_send(dealer, [b"good"])
    assert wait_for(lambda: recv_parts(router, 3, 100) == [])
    num_calls = 0
    while is_discarding(router):
        parts = recv_parts(router, 3, 100)
        num_calls += 1
    assert num_calls == 4
    assert [part.bytes for part in parts[1:]] == [b"good"], "the last piece and the next message in one call"


def test_an_event_loop_reads_on_behind_a_message_of_very_many_parts(context: zmq.Context) -> None:
    router, dealer = linked(context)
    num_dropped: list[int] = []

    async def main() -> None:
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        receiver = AsyncReceiver(
            router, lambda parts: heard.set_result(parts[1].bytes), on_dropped=lambda: num_dropped.append(1)
        )
        assert try_send(dealer, [b""] * (5 * DISCARD_PARTS))
        assert try_send(dealer, [b"good"])
        assert await asyncio.wait_for(heard, DEADLINE_S) == b"good"
        assert receiver.num_dropped == len(num_dropped) == 1
        receiver.close()

    asyncio.run(main())


def test_a_frame_above_the_limit_closes_only_its_own_connection(
    context: zmq.Context,
) -> None:
    router, dealer = linked(context, max_frame=1000)
    other = make_socket(context, zmq.DEALER)
    connect(other, router.getsockopt_string(zmq.LAST_ENDPOINT))
    assert try_send(dealer, [b"x" * 1001])
    wait_for(lambda: try_send(other, [b"fine"]))
    parts = wait_for(lambda: recv_parts(router, 3, 5000))
    assert parts[1].bytes == b"fine"


def test_an_address_in_use_is_named_with_a_remedy(context: zmq.Context, tmp_path: Path) -> None:
    for endpoint in ("tcp://127.0.0.1:0", f"ipc://{tmp_path}/s"):
        first = bind(make_socket(context, zmq.ROUTER), endpoint)
        with pytest.raises(StartupError, match="in use") as error:
            bind(make_socket(context, zmq.ROUTER), first)
        assert first in str(error.value)


def test_the_socket_file_of_a_dead_process_is_no_obstacle(context: zmq.Context, tmp_path: Path) -> None:
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    bind(make_socket(context, zmq.ROUTER), f"ipc://{tmp_path}/s")


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://192.0.2.1:0", "nonsense", "tcp://127.0.0.1:99999", "ipc:///nowhere/s", "ipc:///tmp/" + "x" * 200],
)
def test_an_endpoint_that_cannot_be_bound_is_one_line_that_names_it(
    context: zmq.Context, endpoint: str
) -> None:
    with pytest.raises(StartupError) as error:
        bind(make_socket(context, zmq.ROUTER), endpoint)
    assert endpoint in str(error.value)
    assert "\n" not in str(error.value)


def test_an_endpoint_that_cannot_be_dialled_is_refused_as_a_setting(context: zmq.Context) -> None:
    for endpoint in ("nonsense", "tcp://127.0.0.1:99999", "tcp://127.0.0.1", "tcp://127.0.0.1:x"):
        with pytest.raises(ConfigError, match=endpoint):
            connect(make_socket(context, zmq.DEALER), endpoint)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("ipc:///run/x", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.9.9.9:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
    ],
)
def test_only_this_hosts_own_addresses_are_loopback(endpoint: str, expected: bool) -> None:
    assert is_loopback(endpoint) is expected
    if expected:
        check_bind_address(endpoint, trusted_network=False)
    else:
        with pytest.raises(ConfigError, match="--trusted-network"):
            check_bind_address(endpoint, trusted_network=False)
    check_bind_address(endpoint, trusted_network=True)


@pytest.mark.parametrize(
    "endpoint", ["", "127.0.0.1:5", "tcp://", "tcp://127.0.0.1", "udp://127.0.0.1:5", "ipc://"]
)
def test_an_invalid_endpoint_is_refused_even_in_a_trusted_network(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="not an endpoint"):
        check_bind_address(endpoint, trusted_network=True)


def test_a_port_above_65535_is_refused_though_libzmq_takes_it() -> None:
    with pytest.raises(ConfigError, match="65535"):
        check_bind_address("tcp://127.0.0.1:65536", trusted_network=True)
    check_bind_address("tcp://127.0.0.1:65535", trusted_network=False)


def _loops() -> list[Callable[[], asyncio.AbstractEventLoop]]:
    loops: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
    with contextlib.suppress(ImportError):
        import uvloop

        loops.append(uvloop.new_event_loop)
    return loops


@pytest.mark.parametrize("new_loop", _loops())
def test_an_event_loop_gets_every_message_also_while_it_sends(
    context: zmq.Context, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    router, dealer = linked(context, high_water=64)
    total, got = 3000, []

    async def main() -> None:
        done = asyncio.Event()

        def at_router(parts: list[zmq.Frame]) -> None:
            got.append(int(parts[1].bytes))
            if got[-1] % 7 == 0:
                server.send([parts[0], b"answer"])
            if len(got) == total:
                done.set()

        server = AsyncReceiver(router, at_router)
        client = AsyncReceiver(dealer, lambda parts: None)
        for i in range(total):
            while not client.send([str(i).encode()]):
                await asyncio.sleep(0)
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        server.close()
        server.close()
        client.close()

    loop = new_loop()
    loop.run_until_complete(main())
    loop.close()
    assert got == list(range(total))


def test_a_message_whose_signal_a_send_consumed_is_still_delivered(context: zmq.Context) -> None:
    router, dealer = linked(context)
    assert try_send(dealer, [b"who"])
    routing_id = wait_for(lambda: recv_parts(router, 2, 100))[0].bytes
    got: list[bytes] = []

    async def main() -> None:
        done = asyncio.Event()

        def on_message(parts: list[zmq.Frame]) -> None:
            got.append(parts[1].bytes)
            done.set()

        receiver = AsyncReceiver(router, on_message)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the drain of the start has run
        assert try_send(dealer, [b"late"])
        assert select.select([router.getsockopt(zmq.FD)], [], [], DEADLINE_S)[0], "the signal is there"
        assert receiver.send([routing_id, b"answer"])
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        receiver.close()

    asyncio.run(main())
    assert got == [b"late"]


def test_a_handler_that_raises_does_not_stall_the_messages_behind_it(context: zmq.Context) -> None:
    router, dealer = linked(context)
    for i in range(3):
        assert try_send(dealer, [str(i).encode()])
    assert try_send(dealer, [b"x"] * 9)
    assert try_send(dealer, [b"last"])
    got: list[bytes] = []
    errors: list[dict] = []

    async def main() -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda loop, details: errors.append(details))

        def on_message(parts: list[zmq.Frame]) -> None:
            got.append(parts[1].bytes)
            if got[-1] == b"1":
                raise RuntimeError("handler")
            if got[-1] == b"last":
                done.set()

        receiver = AsyncReceiver(router, on_message, max_parts=4)
        await asyncio.wait_for(done.wait(), DEADLINE_S)
        assert receiver.num_dropped == 1
        receiver.close()

    asyncio.run(main())
    assert got == [b"0", b"1", b"2", b"last"]
    assert len(errors) == 1


def test_closing_leaves_no_descriptor_behind() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        context = KeepingContext()
        linked(context)
        context.destroy(linger=0)
    assert count() <= before + 1
