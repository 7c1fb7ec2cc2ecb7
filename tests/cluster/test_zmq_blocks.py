"""The hand-off over real sockets, tcp and ipc: prefill in a thread, decode in the test."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from baton.cluster.errors import ConfigError, LocalProtocolError, StartupError
from baton.cluster.net.sockets import connect, make_socket, recv_parts, try_send
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import encode
from baton.kvtransfer.protocol import peer_link
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.peer_link import ANSWER_S
from baton.kvtransfer.transport import (
    Complete,
    Dropped,
    Landed,
    Lost,
    Offer,
    Planes,
    PullRequest,
    Released,
    TransportEvent,
)
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender
from baton.tests.cluster.keeping_context import KeepingContext

DEADLINE_S = 60.0
LEASE_S = 30.0  # a thread that gets no core for a while does not end a room
NUM_PAGES = 24
LAYOUT = m.Layout(
    fingerprint="f",
    dtype="float32",
    page_size=16,
    num_layers=4,
    num_kv_heads=2,
    head_dim=64,
    feature_ids=[0, 2],
    feature_width=128,
    block_bytes=100_000,
)  # kv pages of 65536 bytes and feature pages of 8192
WITHOUT_FEATURES = msgspec.structs.replace(LAYOUT, feature_ids=[], feature_width=0)
BIG_PAGES = msgspec.structs.replace(WITHOUT_FEATURES, num_layers=32, block_bytes=200_000)  # zero-copy blocks


def planes_of(layout: m.Layout, seed: int, *, with_features: bool = True) -> Planes:
    sizes = KVLayout(layout)
    noise = torch.Generator().manual_seed(seed)

    def plane(width: int) -> torch.Tensor:
        return torch.randint(0, 256, (NUM_PAGES, width), dtype=torch.uint8, generator=noise)

    features = plane(sizes.feature_page_bytes) if with_features and sizes.has_features else None
    return Planes(kv=plane(sizes.kv_page_bytes), features=features)


class Prefill:
    """A prefill worker's link thread; commands run between two polls."""

    def __init__(self, context: zmq.Context, endpoint: str, layout: m.Layout = LAYOUT) -> None:
        self.instance = secrets.token_hex(16)
        self.planes = planes_of(layout, 1)
        self.sender = ZmqBlocksSender(
            endpoint, self.instance, layout, self.planes, context=context, lease_s=LEASE_S
        )
        self.events: list[TransportEvent] = []
        self._commands: list[Callable[[], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            while self._commands:
                self._commands.pop(0)()
            self.events += self.sender.poll(0.005)
        self.sender.close()

    def offer(self, room: str, num_tokens: int, pages: tuple[int, ...], ready: int | None = None) -> None:
        """Offers a room; all of it is ready unless `ready` says otherwise."""

        def command() -> None:
            self.sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=pages))
            if ready is None:
                self.sender.advance(room, 0, num_tokens, 42)
            elif ready:
                self.sender.advance(room, 0, ready)

        self._commands.append(command)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = KeepingContext()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=["tcp", "ipc"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/kv"


@pytest.fixture
def start(context: zmq.Context) -> Iterator[Callable[..., Prefill]]:
    running: list[Prefill] = []

    def start(endpoint: str, layout: m.Layout = LAYOUT) -> Prefill:
        running.append(Prefill(context, endpoint, layout))
        return running[-1]

    yield start
    for prefill in running:
        prefill.stop()


@pytest.fixture
def receiver(context: zmq.Context) -> Iterator[ZmqBlocksReceiver]:
    receiver = new_receiver(context, LAYOUT)
    yield receiver
    receiver.close()


def new_receiver(context: zmq.Context, layout: m.Layout, **options: float) -> ZmqBlocksReceiver:
    planes = planes_of(layout, 2, with_features=False)
    receiver = ZmqBlocksReceiver(
        secrets.token_hex(16), layout, planes, context=context, lease_s=LEASE_S, **options
    )
    receiver.planes = planes
    return receiver


def request_for(
    prefill: Prefill,
    room: str,
    num_tokens: int,
    pages: tuple[int, ...],
    have: int = 0,
    layout: m.Layout = LAYOUT,
) -> PullRequest:
    width = KVLayout(layout).feature_page_bytes
    return PullRequest(
        room=room,
        epoch=0,
        num_tokens=num_tokens,
        have=have,
        pages=pages,
        features=torch.zeros(len(pages), width, dtype=torch.uint8) if width else None,
        endpoint=prefill.sender.endpoint,
        peer_instance=prefill.instance,
    )


def request_to(endpoint: str) -> PullRequest:
    return PullRequest(
        room="a" * 32,
        epoch=0,
        num_tokens=16,
        have=0,
        pages=(1,),
        features=torch.zeros(1, 8192, dtype=torch.uint8),
        endpoint=endpoint,
        peer_instance="b" * 32,
    )


def poll_until(transport: ZmqBlocksReceiver, kind: type, count: int = 1) -> list[TransportEvent]:
    """Polls until `count` events of `kind` came; returns all events."""
    end = time.monotonic() + DEADLINE_S
    events: list[TransportEvent] = []
    while sum(isinstance(event, kind) for event in events) < count:
        assert time.monotonic() < end, events
        events += transport.poll(0.1)
    return events


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.002)


@pytest.mark.parametrize(
    "layout", [LAYOUT, WITHOUT_FEATURES, BIG_PAGES], ids=["features", "plain", "zero-copy"]
)
@pytest.mark.parametrize("have", [0, 32])
def test_every_byte_lands_and_no_other_page_changes(
    context: zmq.Context, start: Callable[..., Prefill], endpoint: str, layout: m.Layout, have: int
) -> None:
    prefill = start(endpoint, layout)
    receiver = new_receiver(context, layout)
    room, source = secrets.token_hex(16), (3, 9, 4, 20, 7)
    target = (11, 2, 17, 5, 23)[have // 16 :]
    before = receiver.planes.kv.clone()
    request = request_for(prefill, room, 70, target, have, layout)
    prefill.offer(room, 70, source)
    receiver.pull(request)
    events = poll_until(receiver, Complete)
    done = events[-1]
    assert isinstance(done, Complete)
    skipped = have // 16
    sizes = KVLayout(layout).stream(70, have)
    assert (done.first_token, done.num_bytes, done.num_blocks) == (42, sizes.total_bytes, sizes.num_blocks)
    landed = [event.tokens for event in events if isinstance(event, Landed)]
    assert landed == sorted(set(landed))
    assert landed[-1] == 70
    assert torch.equal(receiver.planes.kv[list(target)], prefill.planes.kv[list(source[skipped:])])
    if request.features is not None:
        assert torch.equal(request.features, prefill.planes.features[list(source[skipped:])])
    others = [page for page in range(NUM_PAGES) if page not in target]
    assert torch.equal(receiver.planes.kv[others], before[others])
    wait_for(lambda: prefill.events)
    assert prefill.events == [Released(room=room, epoch=0)]
    receiver.close()


def test_many_rooms_at_once_from_two_prefill_workers(
    start: Callable[..., Prefill], receiver: ZmqBlocksReceiver, tmp_path: Path
) -> None:
    prefills = [start("tcp://127.0.0.1:0"), start(f"ipc://{tmp_path}/kv")]
    rooms = [(secrets.token_hex(16), prefills[i % 2], i + 1) for i in range(20)]
    requests = []
    for room, prefill, page in rooms:
        requests.append(request_for(prefill, room, 16, (page,)))
        receiver.pull(requests[-1])
        prefill.offer(room, 16, (page,))
    poll_until(receiver, Complete, 20)
    for (_, prefill, page), request in zip(rooms, requests, strict=True):
        assert torch.equal(receiver.planes.kv[page], prefill.planes.kv[page])
        assert torch.equal(request.features[0], prefill.planes.features[page])
    wait_for(lambda: all(len(prefill.events) == 10 for prefill in prefills))
    assert len(receiver.pollables()) == 4  # a link and its monitor for each


def test_blocks_are_pulled_while_prefill_still_computes(
    start: Callable[..., Prefill], receiver: ZmqBlocksReceiver, endpoint: str
) -> None:
    prefill, room = start(endpoint), secrets.token_hex(16)
    receiver.pull(request_for(prefill, room, 64, (1, 2, 3, 4)))
    prefill.offer(room, 64, (5, 6, 7, 8), ready=48)
    first = poll_until(receiver, Landed)
    assert not any(isinstance(event, Complete) for event in first)
    prefill._commands.append(lambda: prefill.sender.advance(room, 0, 64, 7))
    assert poll_until(receiver, Complete)[-1].first_token == 7


def restart(start: Callable[..., Prefill], endpoint: str) -> Prefill:
    """ZeroMQ closes a listener in the background: its address is in use a little longer."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            return start(endpoint)
        except StartupError:
            assert time.monotonic() < end, "not within the deadline"
            time.sleep(0.002)


def test_a_restarted_prefill_loses_its_rooms_quickly_and_serves_new_ones(
    start: Callable[..., Prefill], receiver: ZmqBlocksReceiver, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, room = start(endpoint), secrets.token_hex(16)
    receiver.pull(request_for(old, room, 64, (1, 2, 3, 4)))
    old.offer(room, 64, (5, 6, 7, 8), ready=48)
    poll_until(receiver, Landed)
    old.sender.session._rooms.clear()  # dies without a word
    old.stop()
    died = time.monotonic()
    new = restart(start, old.sender.endpoint)
    with monkeypatch.context() as quickly:
        quickly.setattr(peer_link, "ANSWER_S", ANSWER_S)
        (lost,) = [event for event in poll_until(receiver, Lost) if isinstance(event, Lost)]
    assert lost.kind == "PeerLost"
    assert time.monotonic() - died < LEASE_S
    room = secrets.token_hex(16)
    new.offer(room, 16, (1,))
    receiver.pull(request_for(new, room, 16, (9,)))
    poll_until(receiver, Complete)
    assert torch.equal(receiver.planes.kv[9], new.planes.kv[1])


def test_another_layout_is_refused_and_the_live_pair_goes_on(
    context: zmq.Context, start: Callable[..., Prefill], receiver: ZmqBlocksReceiver, endpoint: str
) -> None:
    prefill, room = start(endpoint), secrets.token_hex(16)
    receiver.pull(request_for(prefill, room, 64, (1, 2, 3, 4)))
    prefill.offer(room, 64, (5, 6, 7, 8), ready=48)
    poll_until(receiver, Landed)
    other_layout = msgspec.structs.replace(LAYOUT, num_layers=2)
    other = new_receiver(context, other_layout)
    other.pull(request_for(prefill, secrets.token_hex(16), 16, (1,), layout=other_layout))
    (lost,) = poll_until(other, Lost)
    assert lost.kind == "HandshakeRefused"
    assert "layers 4" in lost.reason
    assert "layers 2" in lost.reason
    other.close()
    prefill._commands.append(lambda: prefill.sender.advance(room, 0, 64, 7))
    poll_until(receiver, Complete)


def test_cancel_on_either_side_ends_the_room_on_the_other(
    start: Callable[..., Prefill], receiver: ZmqBlocksReceiver, endpoint: str
) -> None:
    prefill = start(endpoint)
    rooms = [secrets.token_hex(16) for _ in range(2)]
    for room in rooms:
        receiver.pull(request_for(prefill, room, 32, (1, 2)))
        prefill.offer(room, 32, (1, 2), ready=16)
    poll_until(receiver, Landed, 0)
    wait_for(lambda: receiver.poll(0.01) is not None and prefill.sender.session.num_rooms == 2)
    receiver.release(rooms[0], 0, "client left")
    receiver.release(rooms[0], 0, "client left")
    wait_for(lambda: prefill.events)
    assert prefill.events == [Dropped(room=rooms[0], epoch=0, reason="client left")]
    prefill._commands.append(lambda: prefill.sender.release(rooms[1], 0, "out of pages"))
    lost = poll_until(receiver, Lost)[-1]
    assert (lost.kind, lost.reason) == ("HandoffAborted", "out of pages")
    assert receiver.session.num_rooms == 0
    wait_for(lambda: prefill.sender.session.num_rooms == 0)


def test_garbage_on_the_kv_port_is_counted_and_other_rooms_go_on(
    context: zmq.Context, start: Callable[..., Prefill], receiver: ZmqBlocksReceiver, endpoint: str
) -> None:
    prefill, room = start(endpoint), secrets.token_hex(16)
    stranger = make_socket(context, zmq.DEALER)
    connect(stranger, prefill.sender.endpoint)
    wait_for(lambda: try_send(stranger, [b"\xc1"]))
    pull = encode(m.Pull(room=room, epoch=0, instance="e" * 32, block=0))
    for parts in ([b""], [b"x"] * 100, [pull, b"extra"], [pull], [b"\x80\x04."], [b"y" * 20_000]):
        try_send(stranger, parts)
    prefill.offer(room, 16, (1,))
    receiver.pull(request_for(prefill, room, 16, (9,)))
    poll_until(receiver, Complete)
    wait_for(lambda: prefill.sender.counters["malformed"] >= 5)
    assert prefill.sender.counters["stale_instance"] == 1
    assert recv_parts(stranger, 4, 10**6) is None, "a stranger gets no answer, least of all a block"
    stranger.close(0)


def test_poll_returns_when_a_registered_descriptor_is_readable(
    context: zmq.Context, receiver: ZmqBlocksReceiver
) -> None:
    wake, sleeper = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    sleeper.bind("inproc://wake")
    wake.connect("inproc://wake")
    receiver.register(sleeper)
    wake.send(b"")
    started = time.monotonic()
    assert receiver.poll(DEADLINE_S) == []
    assert time.monotonic() - started < DEADLINE_S / 2
    sleeper.close(0)
    wake.close(0)


def test_an_endpoint_that_cannot_be_dialled_ends_the_room_at_once(receiver: ZmqBlocksReceiver) -> None:
    receiver.pull(request_to("nonsense"))
    (lost,) = receiver.poll(0.0)
    assert (lost.kind, "nonsense" in lost.reason) == ("PeerLost", True)


def test_a_room_ends_when_no_peer_answers_at_its_endpoint(
    context: zmq.Context,
) -> None:
    now = [0.0]
    receiver = ZmqBlocksReceiver(
        "a" * 32, LAYOUT, planes_of(LAYOUT, 2, with_features=False), context=context, clock=lambda: now[0]
    )
    receiver.pull(request_to("tcp://127.0.0.1:1"))
    assert receiver.poll(0.0) == []
    now[0] = peer_link.GREETING_S
    (lost,) = receiver.poll(0.0)
    assert lost.kind == "PeerLost"
    receiver.close()


def test_each_side_refuses_calls_of_the_other_role_and_bad_addresses(
    context: zmq.Context, tmp_path: Path
) -> None:
    planes = planes_of(LAYOUT, 1)
    with pytest.raises(ConfigError, match="--trusted-network"):
        ZmqBlocksSender("tcp://0.0.0.0:0", "a" * 32, LAYOUT, planes, context=context)
    sender = ZmqBlocksSender(f"ipc://{tmp_path}/kv", "a" * 32, LAYOUT, planes, context=context)
    with pytest.raises(StartupError, match="in use"):
        ZmqBlocksSender(f"ipc://{tmp_path}/kv", "a" * 32, LAYOUT, planes, context=context)
    narrow = Planes(kv=planes.kv[:, 1:], features=None)
    with pytest.raises(LocalProtocolError, match="uint8"):
        ZmqBlocksSender("tcp://127.0.0.1:0", "a" * 32, WITHOUT_FEATURES, narrow, context=context)
    receiver = new_receiver(context, LAYOUT)
    with pytest.raises(LocalProtocolError):
        receiver.offer(Offer(room="a" * 32, epoch=0, num_tokens=1, pages=(1,)))
    with pytest.raises(LocalProtocolError):
        receiver.advance("a" * 32, 0, 1)
    with pytest.raises(LocalProtocolError):
        sender.pull(request_to(""))
    for transport in (sender, receiver):
        transport.close()
        transport.close()
        assert transport.pollables() == []
