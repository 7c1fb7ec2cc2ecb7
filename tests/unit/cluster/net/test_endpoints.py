"""Prefill's endpoint with a slow wire: when pages are free, and what waits for a full peer."""

from collections.abc import Callable

import pytest
import torch
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.codec import encode, kv_down_decoder
from baton.kvtransfer.memory.blocks import Payload
from baton.kvtransfer.protocol.layout import block_digest
from baton.kvtransfer.transport import Offer, Planes, Released
from baton.kvtransfer.transports.sender_endpoint import SenderEndpoint

P, D, ROOM = "1" * 32, "2" * 32, "a" * 32
LAYOUT = m.Layout(
    fingerprint="f",
    dtype="float32",
    page_size=4,
    num_layers=1,
    num_kv_heads=1,
    head_dim=128,
    block_bytes=4096,
)  # a page is 4096 bytes, so a block is a page and goes without a copy
OFFER = Offer(room=ROOM, epoch=0, num_tokens=10, pages=(5, 6, 7))
NAME = {"room": ROOM, "epoch": 0, "instance": D}


def page_bytes() -> torch.Tensor:
    return torch.randint(0, 256, (8, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class SlowDelivery:
    """A payload that somebody still reads."""

    done = False


class SlowSender(SenderEndpoint):
    """An endpoint whose wire takes what `is_open` allows and reads payloads until told otherwise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        pages = page_bytes()
        super().__init__(P, LAYOUT, Planes(kv=pages, features=None), clock=clock)
        self.is_open = True
        self.headers: list[m.KVDown] = []
        self.deliveries: list[SlowDelivery] = []

    def _transmit(self, peer: str, header: bytes, payload: Payload | None) -> SlowDelivery | None:
        if not self.is_open:
            return None
        self.headers.append(kv_down_decoder().decode(header))
        self.deliveries.append(SlowDelivery())
        return self.deliveries[-1]

    def say(self, message: m.KVUp) -> None:
        self._receive_frames("d", [memoryview(encode(message))])

    def turn(self) -> list[object]:
        self._work()
        return self._take_events()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def slow(now: list[float]) -> SlowSender:
    """With a room whose one zero-copy block is on the wire and whose Release has come."""
    sender = SlowSender(lambda: now[0])
    sender.say(m.KVHello(instance=D, protocol=m.PROTOCOL_MAJOR, layout=LAYOUT))
    sender.offer(OFFER)
    sender.say(m.Attach(**NAME, have=0))
    sender.advance(ROOM, 0, 10, 42)
    sender.say(m.Pull(**NAME, block=1))
    return sender


def test_pages_are_not_reported_free_while_a_zero_copy_send_reads_them(slow: SlowSender) -> None:
    slow.say(m.Release(**NAME))
    assert slow.turn() == []
    assert slow.next_deadline(0.0) is not None
    slow.deliveries[-1].done = True
    assert slow.turn() == [Released(room=ROOM, epoch=0)]
    assert slow.turn() == []


def test_a_send_that_never_ends_does_not_hold_the_pages_for_ever(slow: SlowSender, now: list[float]) -> None:
    slow.say(m.Release(**NAME))
    now[0] = 4.9
    assert slow.turn() == []
    now[0] = 5.0
    assert slow.turn() == [Released(room=ROOM, epoch=0)]


def test_no_event_follows_a_cancel(slow: SlowSender) -> None:
    slow.say(m.Release(**NAME))
    slow.release(ROOM, 0, "cancel")
    slow.deliveries[-1].done = True
    assert slow.turn() == []


def test_blocks_for_a_full_peer_wait_in_order_until_their_room_closes(
    slow: SlowSender, now: list[float]
) -> None:
    slow.is_open = False
    slow.headers.clear()
    slow.say(m.Pull(**NAME, block=2))
    slow.say(m.Pull(**NAME, block=0))
    assert slow.headers == []
    slow.is_open = True
    now[0] = 1.0
    slow.turn()
    assert [header.block for header in slow.headers if isinstance(header, m.Block)] == [2, 0]
    slow.is_open = False
    slow.say(m.Pull(**NAME, block=1))
    slow.say(m.Abort(**NAME))
    slow.is_open = True
    slow.headers.clear()
    now[0] = 2.0
    slow.turn()
    assert slow.headers == []


def test_a_block_without_features_is_sent_from_its_page_with_its_digest(slow: SlowSender) -> None:
    header = slow.headers[-1]
    page = page_bytes()[6].numpy()
    assert header.digest == block_digest(ROOM, 0, 1, memoryview(page))


def test_a_block_requested_many_times_waits_once_and_can_be_sent_again(
    slow: SlowSender, now: list[float]
) -> None:
    slow.is_open = False
    for _ in range(3000):
        slow.say(m.Pull(**NAME, block=1))
    slow.headers.clear()
    slow.is_open = True
    now[0] += 1.0
    slow.turn()
    slow.say(m.Pull(**NAME, block=1))
    slow.turn()
    assert [header.block for header in slow.headers if isinstance(header, m.Block)] == [1, 1]
