"""Frames over the unix connection of a slab, between real endpoints in one process."""

import socket

import msgspec
import pytest
import torch
import zmq
from baton.cluster.protocol.codec import encode
from baton.cluster.protocol.messages import Layout
from baton.cluster.protocol.slab_messages import SlabBlock, SlabPlan, SlabSoon
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice, HostPrepared
from baton.kvtransfer.transport import Complete, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.landing_moves import PLANNED_RUNS
from baton.kvtransfer.transports.wire import received, sent
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

P, D, ROOM = "1" * 32, "2" * 32, "c" * 32
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
        self.landing = self.device()  # decode's device
        self.receiver = ZmqBlocksReceiver(
            D, LAYOUT, self.planes(self.target), device=self.landing, slot_bytes=4 * 4096, **common
        )

    @staticmethod
    def planes(kv: torch.Tensor) -> Planes:
        return Planes(kv=kv, features=None, order=PageOrder(NUM_PAGES))

    @staticmethod
    def device() -> HostDevice:
        return HostDevice(PageOrder(NUM_PAGES))

    def launch(self, room: str) -> None:
        """Decode attaches, and the prompt's only forward is launched."""
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

    def hand_over(self, room: str) -> Complete:
        self.launch(room)
        return self.finish(room)

    def finish(self, room: str) -> Complete:
        """The forward of a launched room ends."""
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


def frames_of(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What decode hears over the connection from now on."""
    heard: list[object] = []
    take = ends.receiver._take_frame

    def listen(peer, frame):
        heard.extend(ends.receiver._decoder.messages(frame)[0] if frame else ())
        take(peer, frame)

    monkeypatch.setattr(ends.receiver, "_take_frame", listen)
    return heard


@pytest.mark.parametrize("is_known", [True, False])
def test_decode_is_woken_before_the_first_run_if_it_knows_the_message(ends, monkeypatch, is_known):
    ends.hand_over("a" * 32)
    ends.hand_over("b" * 32)
    (lane,) = ends.sender._device_slabs._lanes.values()
    assert lane.request.hears_soon
    lane.request = msgspec.structs.replace(lane.request, hears_soon=is_known)
    heard = frames_of(ends, monkeypatch)
    assert ends.hand_over("c" * 32).num_device_blocks == NUM_PAGES
    kinds = [type(message) for message in heard if isinstance(message, SlabSoon | SlabBlock)]
    assert kinds == [SlabSoon] * is_known + [SlabBlock] * (len(kinds) - is_known)
    assert len(kinds) > is_known


def planned(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> SlabPlan:
    """The forward of ROOM runs, and decode has read the plan, which is returned."""
    ends.hand_over("a" * 32)
    ends.hand_over("b" * 32)
    heard = frames_of(ends, monkeypatch)
    ends.launch(ROOM)
    ends.receiver.poll(0.0)
    (plan,) = [message for message in heard if isinstance(message, SlabPlan)]
    return plan


def count_moves(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of runs of each move of decode from now on that was not prepared."""
    moves: list[int] = []
    move, start = ends.landing.move, HostPrepared.start
    monkeypatch.setattr(
        ends.landing, "move", lambda runs, *a, **k: moves.append(len(runs)) or move(runs, *a, **k)
    )

    def started(prepared: HostPrepared, pages: object, **more: object) -> object:
        moved = start(prepared, pages, **more)
        if prepared.owner is ends.landing:
            assert moves.pop() == 1
        return moved

    monkeypatch.setattr(HostPrepared, "start", started)
    return moves


def test_decode_prepares_the_moves_of_planned_runs_and_starts_them(ends, monkeypatch):
    plan = planned(ends, monkeypatch)
    assert sum(block.count for block in plan.blocks) == NUM_PAGES
    assert ends.landing.num_prepared == len(plan.blocks) > 0
    moves = count_moves(ends, monkeypatch)
    ends.finish(ROOM)
    assert moves == [], "each run was prepared"
    assert ends.landing.num_prepared == 0


def test_prefill_sends_no_plan_to_decode_that_does_not_know_it(ends, monkeypatch):
    ends.hand_over("a" * 32)
    ends.hand_over("b" * 32)
    (lane,) = ends.sender._device_slabs._lanes.values()
    lane.request = msgspec.structs.replace(lane.request, hears_plan=False)
    heard = frames_of(ends, monkeypatch)
    ends.hand_over("c" * 32)
    assert not any(isinstance(message, SlabPlan) for message in heard)


def lose_the_room(ends):
    ends.sender.release(ROOM, 0, "the prompt failed")
    for _ in range(3):
        ends.sender.poll(0.005), ends.receiver.poll(0.005)


def lose_the_link(ends):
    (peer,) = ends.receiver._slabs._asked
    ends.receiver._close_link(peer)


def lose_the_slab(ends):
    ((_, wire),) = ends.receiver._wires()
    wire.shutdown(socket.SHUT_RDWR)
    ends.receiver.poll(0.005)


ENDS_OF_PLANS = {
    "release": lambda ends: ends.receiver.release(ROOM, 0, "the client has left"),
    "the room is lost": lose_the_room,
    "the link is lost": lose_the_link,
    "the slab is lost": lose_the_slab,
    "decode ends": lambda ends: ends.receiver.close(),
}


@pytest.mark.parametrize("end", ENDS_OF_PLANS.values(), ids=ENDS_OF_PLANS)
def test_prepared_moves_are_discarded_when_what_they_are_for_ends(ends, monkeypatch, end):
    planned(ends, monkeypatch)
    assert ends.landing.num_prepared > 0
    end(ends)
    assert ends.landing.num_prepared == 0


def test_the_end_of_an_earlier_attempt_leaves_the_moves_of_a_later_one(ends, monkeypatch):
    planned(ends, monkeypatch)
    before = ends.landing.num_prepared
    ends.receiver.release(ROOM, -1, "late word of an attempt that was given up")
    assert ends.landing.num_prepared == before > 0
    ends.finish(ROOM)


def test_without_a_free_table_the_runs_of_a_plan_are_moved_like_others(ends, monkeypatch):
    ends.landing.max_prepared = 0
    planned(ends, monkeypatch)
    assert ends.landing.num_prepared == 0
    moves = count_moves(ends, monkeypatch)
    ends.finish(ROOM)
    assert sum(moves) > 0


def test_nothing_lands_for_a_released_room(ends, monkeypatch):
    planned(ends, monkeypatch)
    ends.receiver.release(ROOM, 0, "the client has left")
    ends.sender.advance(ROOM, 0, NUM_TOKENS, 7)
    for _ in range(20):
        ends.receiver.poll(0.005), ends.sender.poll(0.005)
    assert not ends.target.any()
    ends.hand_over("d" * 32)


def swapped(blocks: list[SlabBlock]) -> list[SlabBlock]:
    """The runs of a plan, each in the slot of another one."""
    first, *others = blocks
    slots = [block.slot for block in (*others, first)]
    return [msgspec.structs.replace(block, slot=slot) for block, slot in zip(blocks, slots, strict=True)]


def test_a_plan_that_is_not_kept_moves_nothing(ends, monkeypatch):
    """Prefill names other slots than those that it fills."""
    ends.hand_over("a" * 32)
    ends.hand_over("b" * 32)
    lanes = ends.sender._device_slabs
    monkeypatch.setattr("baton.kvtransfer.transports.cuda_slab._early_parts", lambda n: (1,) * n)
    tell = lanes._tell_plan

    def mislead(lane, peer, blocks):
        tell(lane, peer, swapped(blocks))

    monkeypatch.setattr(lanes, "_tell_plan", mislead)
    ends.launch(ROOM)
    ends.receiver.poll(0.0)
    assert ends.landing.num_prepared == PLANNED_RUNS == 2
    moves = count_moves(ends, monkeypatch)
    ends.finish(ROOM)
    assert sum(moves) == 3
    assert ends.landing.num_prepared == 0
    assert ends.receiver.session.counters.digest_mismatches == 0


UNFIT_PLANS = {
    "another room": {"room": "d" * 32},
    "another attempt": {"epoch": 1},
    "another process": {"instance": D},
    "blocks behind the prompt": {"block": NUM_PAGES - 1},
    "a huge block number": {"block": 2**48},
    "another size": {"size": 4096},
    "a slot behind the slab": {"slot": 2**31 - 1},
    "another slab": {"slab": "e" * 32},
}


def tell_plan(ends: Ends, plan: SlabPlan) -> None:
    (peer,) = ends.sender._device_slabs._lanes
    assert sent(ends.sender._device_slabs.wire(peer), encode(plan))
    ends.receiver.poll(0.0)


@pytest.mark.parametrize("wrong", UNFIT_PLANS.values(), ids=UNFIT_PLANS)
def test_decode_prepares_nothing_for_a_plan_that_does_not_fit(ends, monkeypatch, wrong):
    with monkeypatch.context() as patch:
        plans: list[SlabPlan] = []
        patch.setattr(ends.receiver, "_plan", lambda moves, peer, plan: plans.append(plan))
        plan = planned(ends, patch)
    assert plans[-1] == plan
    tell_plan(ends, SlabPlan(blocks=[msgspec.structs.replace(one, **wrong) for one in plan.blocks]))
    assert ends.landing.num_prepared == 0
    tell_plan(ends, plan)
    assert ends.landing.num_prepared == len(plan.blocks)
    tell_plan(ends, plan)
    assert ends.landing.num_prepared == len(plan.blocks), "they are prepared already"
    ends.finish(ROOM)
    assert ends.landing.num_prepared == 0


class Wait:
    """Takes the place of `select.poll`: notes each wait. With `comes` the first one sees the end of ROOM's
    forward.
    """

    def __init__(self, ends: Ends, *, comes: bool) -> None:
        self.waits: list[int] = []
        self._ends, self._comes, self._num_wires = ends, comes, 0

    def __call__(self) -> "Wait":
        self._num_wires = 0
        return self

    def register(self, wire: socket.socket, events: int) -> None:
        self._num_wires += 1

    def poll(self, milliseconds: int) -> list[int]:
        assert self._num_wires == 1
        self.waits.append(milliseconds)
        if self._comes and len(self.waits) == 1:
            self._ends.sender.advance(ROOM, 0, NUM_TOKENS, 7)
        return [1] if self._comes else []


def ready_room(ends: Ends, monkeypatch: pytest.MonkeyPatch, *, comes: bool) -> Wait:
    """The forward of ROOM runs, between ends that know each other."""
    ends.hand_over("a" * 32)
    ends.hand_over("b" * 32)
    ends.launch(ROOM)
    wait = Wait(ends, comes=comes)
    monkeypatch.setattr("baton.cluster.net.sockets.select.poll", wait)
    return wait


def tell(ends: Ends, **soon: object) -> None:
    (peer,) = ends.sender._device_slabs._lanes
    message = SlabSoon(**{"room": ROOM, "epoch": 0, "instance": P} | soon)
    assert sent(ends.sender._device_slabs.wire(peer), encode(message))


def test_decode_waits_for_the_run_that_was_announced_in_the_same_turn(ends, monkeypatch):
    wait = ready_room(ends, monkeypatch, comes=True)
    tell(ends)
    ends.receiver._turn()
    assert wait.waits == [1]
    assert ends.receiver.counters["device_blocks"] > 0 or ends.receiver._landings
    ends.receiver._turn()
    assert wait.waits == [1], "no other wait"


@pytest.mark.parametrize("wrong", [{"room": "d" * 32}, {"epoch": 1}, {"instance": D}])
def test_decode_waits_for_no_run_of_another_room_attempt_or_process(ends, monkeypatch, wrong):
    wait = ready_room(ends, monkeypatch, comes=False)
    tell(ends, **wrong)
    ends.receiver._turn()
    assert wait.waits == []
    tell(ends)
    ends.receiver._turn()
    assert wait.waits == [1], "nothing has come, and the turn goes on"
    tell(ends)
    ends.receiver._turn()
    assert wait.waits == [1], "an attempt is waited for once"
    ends.finish(ROOM)


def test_without_its_connection_a_pair_goes_on_over_zeromq(ends):
    assert ends.hand_over("a" * 32).num_device_blocks > 0
    ((_, wire),) = ends.receiver._wires()
    wire.shutdown(socket.SHUT_RDWR)
    done = ends.hand_over("b" * 32)
    assert done.num_blocks == NUM_PAGES
