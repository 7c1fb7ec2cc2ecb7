"""Prepared moves: taken by the same run alone, and discarded with what they are for."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from baton.cluster.protocol.messages import Layout
from baton.cluster.protocol.slab_messages import SlabBlock
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice, HostPrepared
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.transport import Planes, PullRequest
from baton.kvtransfer.transports.landing_moves import PLANNED_RUNS, LandingMoves, Run

ROOM, OTHER, P, SLAB = "a" * 32, "b" * 32, "1" * 32, "5" * 32
NUM_PAGES, PAGE_BYTES = 12, 4096
WIRE = Layout(
    fingerprint="f", dtype="bfloat16", page_size=4, num_layers=2, num_kv_heads=1, head_dim=128,
    block_bytes=PAGE_BYTES,
)  # fmt: skip


@dataclass
class Decode:
    """A device, its pages, and a slab that holds random bytes."""

    kv: torch.Tensor
    device: HostDevice
    slab: torch.Tensor
    moves: LandingMoves

    def run(self, first: int, count: int, *, room: str = ROOM, peer: str = "p", stream=None) -> Run:
        """Blocks of a room, in the slot of their own numbers."""
        pages = tuple(range(NUM_PAGES))
        request = PullRequest(
            room=room, epoch=0, num_tokens=4 * NUM_PAGES, have=0, pages=pages, features=None, endpoint=peer,
            peer_instance=P,
        )  # fmt: skip
        stream = KVLayout(WIRE).stream(4 * NUM_PAGES, 0) if stream is None else stream
        block = SlabBlock(
            room=room, epoch=0, instance=P, block=first, size=count * PAGE_BYTES, digest=0, slab=SLAB,
            slot=first, lease_ms=1000, count=count,
        )  # fmt: skip
        found = SimpleNamespace(request=request, peer=peer, stream=stream)
        return Run(block, found, stream, self.slab.data_ptr() + first * PAGE_BYTES)


@pytest.fixture
def decode() -> Decode:
    kv = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
    order = PageOrder(NUM_PAGES)
    device = HostDevice(order)
    noise = torch.Generator().manual_seed(2)
    slab = torch.randint(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, generator=noise)
    moves = LandingMoves(device, Planes(kv=kv, features=None, order=order))
    return Decode(kv, device, slab, moves)


def test_a_planned_run_is_prepared_once_and_taken_once(decode):
    run = decode.run(0, 4)
    assert decode.moves.plan(run)
    assert decode.moves.plan(run)
    assert decode.device.num_prepared == 1
    decode.moves.start([run]).wait()
    assert decode.device.num_prepared == 0
    assert torch.equal(decode.kv[:4], decode.slab[:4])
    decode.kv.zero_()
    decode.moves.start([run]).wait()
    assert torch.equal(decode.kv[:4], decode.slab[:4]), "a run that comes again is moved again"


def test_a_part_has_few_prepared_moves_and_the_device_has_a_bound(decode):
    stream = decode.run(0, 1).stream
    planned = [decode.moves.plan(decode.run(number, 1, stream=stream)) for number in range(3)]
    assert planned == [True] * PLANNED_RUNS + [False]
    others = [decode.moves.plan(decode.run(number, 1, room=OTHER, peer=f"{number}")) for number in range(4)]
    assert sum(others) == decode.device.max_prepared - PLANNED_RUNS
    for room in (ROOM, OTHER):
        decode.moves.forget(room)
    assert decode.device.num_prepared == 0


@pytest.mark.parametrize(
    ("more", "num_left"),
    [({"room": OTHER}, 1), ({"peer": "q"}, 1), ({"stream": KVLayout(WIRE).stream(4 * NUM_PAGES, 0)}, 0)],
    ids=["room", "peer", "stream"],
)
def test_a_run_of_another_part_takes_no_prepared_move(decode, monkeypatch, more, num_left):
    run = decode.run(0, 4)
    assert decode.moves.plan(run)
    monkeypatch.setattr(HostPrepared, "start", lambda *_: pytest.fail("it is of another part"))
    decode.moves.start([decode.run(0, 4, **({"stream": run.stream} | more))]).wait()
    assert torch.equal(decode.kv[:4], decode.slab[:4])
    assert decode.device.num_prepared == num_left


@pytest.mark.parametrize(("first", "count"), [(0, 3), (1, 4), (4, 4)])
def test_other_blocks_take_no_prepared_move(decode, monkeypatch, first, count):
    run = decode.run(0, 4)
    assert decode.moves.plan(run)
    monkeypatch.setattr(HostPrepared, "start", lambda *_: pytest.fail("these are other blocks"))
    decode.moves.start([decode.run(first, count, stream=run.stream)]).wait()
    assert torch.equal(decode.kv[first : first + count], decode.slab[first : first + count])
    assert decode.device.num_prepared == 1


def test_several_runs_share_one_move_and_discard_what_was_prepared(decode):
    stream = decode.run(0, 1).stream
    runs = [decode.run(0, 4, stream=stream), decode.run(6, 2, stream=stream)]
    assert all(decode.moves.plan(run) for run in runs)
    digests = decode.moves.start(runs).wait()
    assert len(digests) == 2
    assert decode.device.num_prepared == 0
    for first, last in ((0, 4), (6, 8)):
        assert torch.equal(decode.kv[first:last], decode.slab[first:last])
    assert not decode.kv[4:6].any()
    assert not decode.kv[8:].any()


def test_a_part_on_a_new_stream_discards_the_moves_of_the_old_one(decode):
    assert decode.moves.plan(decode.run(0, 4))
    run = decode.run(4, 4)
    decode.moves.place(run.room, run.stream)
    assert decode.device.num_prepared == 0


def test_moves_end_with_their_room_or_with_the_slab_of_their_peer(decode):
    for room, peer in ((ROOM, "p"), (ROOM, "q"), (OTHER, "p")):
        assert decode.moves.plan(decode.run(0, 4, room=room, peer=peer))
    decode.moves.unplan("p")
    assert decode.device.num_prepared == 1
    assert decode.moves.plan(decode.run(0, 4, room=OTHER, peer="p"))
    decode.moves.forget(ROOM)
    assert decode.device.num_prepared == 1
    decode.moves.forget(OTHER)
    decode.moves.forget(OTHER)
    assert decode.device.num_prepared == 0


def test_features_and_pages_of_a_run_are_those_of_its_request(decode):
    """The pages of the move wait for their own work: the order sees exactly these."""
    seen: list[list[int]] = []
    start = decode.device.move
    decode.device.move = lambda runs, pages, **k: seen.append(list(pages)) or start(runs, seen[-1], **k)
    run = decode.run(3, 5)
    assert decode.moves.plan(run)
    decode.moves.start([run]).wait()
    assert seen == [[3, 4, 5, 6, 7]]
    assert np.array_equal(decode.kv[3:8].numpy(), decode.slab[3:8].numpy())
