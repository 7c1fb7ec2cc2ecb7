"""Frames over the unix connection of a slab, between real endpoints in one process."""

import socket

import pytest
import torch
import zmq
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.transport import Complete, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.wire import received, sent
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

P, D = "1" * 32, "2" * 32
ALL = ("cuda_slab", "shm", "zmq_blocks")
LAYOUT = Layout(
    fingerprint="f",
    dtype="bfloat16",
    page_size=4,
    num_layers=2,
    num_kv_heads=1,
    head_dim=128,
    block_bytes=4096,
)  # pages of 4 KiB
NUM_PAGES, NUM_TOKENS = 12, 48


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.setblocking(False)
    right.setblocking(False)
    yield left, right
    left.close()
    right.close()


def test_frames_arrive_whole_and_in_order_and_then_the_end(pair):
    left, right = pair
    assert [sent(left, frame) for frame in (b"one", b"another")] == [True, True]
    assert [bytes(frame) for frame in received(right)] == [b"one", b"another"]
    left.close()
    assert [bytes(frame) for frame in received(right)] == [b""]
    assert not sent(right, b"too late")


def test_a_full_connection_takes_no_frame_and_does_not_wait(pair):
    left, right = pair
    taken = 0
    while sent(left, bytes(4096)):
        taken += 1
    assert taken > 0
    frames = list(received(right))
    assert {len(frame) for frame in frames} == {4096}
    assert sent(left, b"there is room again")


class Ends:
    """Both ends of a pair, over a ZeroMQ address in this process."""

    def __init__(self) -> None:
        context = zmq.Context.instance()
        noise = torch.Generator().manual_seed(3)
        self.source = torch.randint(0, 256, (NUM_PAGES, 4096), dtype=torch.uint8, generator=noise)
        self.target = torch.zeros(NUM_PAGES, 4096, dtype=torch.uint8)
        common = {"context": context, "transports": ALL}
        self.sender = ZmqBlocksSender(
            "ipc://*", P, LAYOUT, self.planes(self.source), device=self.device(), **common
        )
        self.receiver = ZmqBlocksReceiver(
            D, LAYOUT, self.planes(self.target), device=self.device(), slot_bytes=4 * 4096, **common
        )

    @staticmethod
    def planes(kv: torch.Tensor) -> Planes:
        return Planes(kv=kv, features=None, order=PageOrder(NUM_PAGES))

    @staticmethod
    def device() -> HostDevice:
        return HostDevice(PageOrder(NUM_PAGES))

    def hand_over(self, room: str) -> Complete:
        self.target.zero_()
        pages = tuple(range(NUM_PAGES))
        self.sender.offer(Offer(room=room, epoch=0, num_tokens=NUM_TOKENS, pages=pages))
        self.receiver.pull(
            PullRequest(
                room=room, epoch=0, num_tokens=NUM_TOKENS, have=0, pages=pages[::-1], features=None,
                endpoint=self.sender.endpoint, peer_instance=P,
            )
        )  # fmt: skip
        while not self.sender.session.is_attached(room, 0):
            self.sender.poll(0.01), self.receiver.poll(0.01)
        self.sender.launched(room, 0, 0, NUM_TOKENS)
        self.sender.advance(room, 0, NUM_TOKENS, 7)
        done, is_released = None, False
        for _ in range(1000):
            for event in (*self.receiver.poll(0.005), *self.sender.poll(0.005)):
                done = event if isinstance(event, Complete) else done
                is_released = is_released or isinstance(event, Released)
            if done is not None and is_released:
                break
        assert done is not None
        assert torch.equal(self.target.flip(0), self.source)
        return done

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


def test_a_pair_with_a_slab_sends_its_frames_past_zeromq(ends, monkeypatch):
    ends.hand_over("a" * 32)
    ends.hand_over("b" * 32)  # prefill has heard decode over the wire by now
    frames = {"sender": 0, "receiver": 0}

    def count(name, end):
        method = end._take_frame

        def take(peer, frame):
            frames[name] += 1
            method(peer, frame)

        monkeypatch.setattr(end, "_take_frame", take)

    count("sender", ends.sender)
    count("receiver", ends.receiver)
    done = ends.hand_over("c" * 32)
    assert done.num_device_blocks == done.num_blocks
    assert min(frames.values()) >= 2, "attach and release; announcements and descriptors"


def test_without_its_connection_a_pair_goes_on_over_zeromq(ends):
    assert ends.hand_over("a" * 32).num_device_blocks > 0
    ((_, wire),) = ends.receiver._wires()
    wire.shutdown(socket.SHUT_RDWR)
    done = ends.hand_over("b" * 32)
    assert done.num_blocks == NUM_PAGES
