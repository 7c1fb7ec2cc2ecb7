"""Runs that prefill sends unasked behind the last forward of a prompt: they save time, and hold nothing back.

Shared memory of the host stands for that of a device, where a move of `polls` 1000 waits for its forward. The
clock stands still unless a test moves it, so nothing in these tests can depend on a timer.
"""

import msgspec
import pytest
import torch
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.kv_messages import Pull, Release
from baton.cluster.protocol.slab_messages import SlabBlock, SlabRequest, SlotFree
from baton.kvtransfer.memory.host_device import HostMove
from baton.kvtransfer.memory.span_cutter import ReceiverPages, SenderPages
from baton.kvtransfer.transport import Complete, Landed, Offer, PullRequest
from baton.tests.unit.kvtransfer.transports.test_cuda_slab import (
    NUM_BLOCKS,
    NUM_RUNS,
    NUM_TOKENS,
    ROOM,
    SLOT_BYTES,
    P,
    Pair,
    start,
)
from baton.tests.unit.kvtransfer.transports.test_shm import outcome
from baton.tests.variants import slow

__all__ = ["start"]  # the fixture
FIRST, SECOND = "b" * 32, "c" * 32
HELD = 1000


def attach(pair: Pair, room: str, have: int = 0) -> torch.Tensor:
    """Decode asks for a prompt; returns where its features land."""
    features = torch.zeros(10, 1024, dtype=torch.uint8)
    first = have // 4
    pair.receiver.pull(
        PullRequest(
            room=room, epoch=0, num_tokens=NUM_TOKENS, have=have, pages=tuple(range(11 - first, 1, -1)),
            features=features[: 10 - first], endpoint="p", peer_instance=P,
        )
    )  # fmt: skip
    return features


def offer(pair: Pair, room: str, *, have: int = 0) -> torch.Tensor:
    """A prompt that decode waits for, before its forward."""
    pair.sender.offer(Offer(room=room, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
    features = attach(pair, room, have)
    pair.sender.poll(0)
    pair.receiver.poll(0)
    return features


def events_until_quiet(pair: Pair) -> list[object]:
    """The events of all turns until ten in a row bring none."""
    events: list[object] = []
    num_quiet = 0
    while num_quiet < 10:
        found = [*pair.receiver.poll(0), *pair.sender.poll(0)]
        events, num_quiet = events + found, 0 if found else num_quiet + 1
    return events


def warm(start, **options) -> Pair:
    """A pair with a slab."""
    pair = start(**options)
    pair.open()
    pair.run()
    pair.wire.said.clear()
    return pair


def early_slots(pair: Pair, link: str = "00000001") -> str:
    lane = pair.sender._device_slabs._lanes[link]
    lane.early.check_integrity()
    lane.slots.check_integrity()
    return repr(lane.early)


def test_behind_its_last_forward_a_prompt_needs_no_pull(start):
    pair = warm(start)
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    assert pair.run() == []
    assert pair.wire.count(SlabBlock) == 0, "nothing goes before the forward has ended"
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    events = pair.run()
    assert outcome(events) == ["Complete", "Released"]
    pair.check_landed(features)
    (done,) = [event for event in events if isinstance(event, Complete)]
    assert done.num_device_blocks == NUM_BLOCKS
    assert (pair.wire.count(Pull), pair.wire.count(SlabBlock)) == (0, 1)
    assert early_slots(pair) == "SlotRanges(0/8 held)"


@pytest.mark.parametrize(("num_early", "num_pulls"), [(8, 0), (3, 1), (1, 3)])
def test_a_long_run_goes_in_two_parts(start, monkeypatch, num_early, num_pulls):
    monkeypatch.setattr("baton.kvtransfer.transports.shm.EARLY_SLOTS", num_early)
    monkeypatch.setattr("baton.kvtransfer.transports.cuda_slab.WHOLE_SLOTS", 3)
    pair = warm(start)
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    assert len(pair.sender._device_slabs._early) == min(num_early, 2)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(Pull) == num_pulls
    assert early_slots(pair) == f"SlotRanges(0/{num_early} held)"


def test_the_owner_hears_of_a_complete_room_before_prefill_does(start, monkeypatch):
    """A part of the room does not take that place: what is said of it goes while the rest is moved."""
    monkeypatch.setattr("baton.kvtransfer.transports.cuda_slab.WHOLE_SLOTS", 3)
    pair = warm(start, polls=1)
    offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    pair.wire.deliver_all()
    both = pair.receiver._landings[:]
    pair.receiver._landings = both[:1]
    assert [type(event) for event in pair.receiver.turn()] == [Landed]
    pair.wire.deliver_all()
    assert pair.wire.count(SlotFree) == 1
    pair.receiver._landings = both[1:]
    assert [type(event) for event in pair.receiver.turn()] == [Landed, Complete]
    pair.wire.deliver_all()
    assert (pair.wire.count(SlotFree), pair.wire.count(Release)) == (1, 0)
    assert pair.receiver.next_deadline(pair.now) == pair.now
    assert pair.receiver.turn() == []
    pair.wire.deliver_all()
    assert (pair.wire.count(SlotFree), pair.wire.count(Release)) == (2, 1)


def test_a_run_that_comes_during_a_move_is_launched_before_its_end(start, monkeypatch):
    """Else the device would be idle between the two."""
    monkeypatch.setattr("baton.kvtransfer.transports.cuda_slab.WHOLE_SLOTS", 3)
    pair, steps = warm(start), []
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    pair.wire.deliver()
    (first,) = pair.receiver._landings
    monkeypatch.setattr(HostMove, "is_held", False)
    monkeypatch.setattr(HostMove, "poll", lambda self: self.digests if self.is_done else None)
    wait = HostMove.wait
    monkeypatch.setattr(HostMove, "wait", lambda self: (steps.append(self), wait(self))[1])

    def take_news() -> bool:
        assert not first.move.is_done
        assert not steps
        pair.wire.deliver_all()
        return False

    pair.receiver._take_news = take_news
    events = pair.receiver.turn()
    assert steps[0] is first.move, "all is launched, so there is no more news to look for"
    (second,) = pair.receiver._landings
    assert not second.move.is_done
    assert outcome([*events, *pair.run()]) == ["Complete", "Released"]
    pair.check_landed(features)


def test_a_pull_finds_its_memory_looked_up_behind_the_forward(start, monkeypatch):
    pair = warm(start)
    monkeypatch.setattr(pair.sender._device_slabs._lanes["00000001"].early, "take", lambda *_: None)
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    monkeypatch.setattr(SenderPages, "places", None)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(Pull) == NUM_RUNS


@pytest.mark.parametrize("end", ["complete", "release", "newer attempt"])
@pytest.mark.parametrize("is_early", [True, False])
def test_decode_looks_up_its_memory_at_the_pull_of_each_attempt(start, monkeypatch, end, is_early):
    """Before the data: a landing only cuts the table of its own attempt, which goes with the attempt."""
    pair = warm(start)
    features = first_features = offer(pair, FIRST)
    old_pages, new_pages = list(range(11, 1, -1)), list(range(10))
    before, epoch, pages = pair.target.kv.clone(), 0, old_pages
    if end == "release":
        pair.receiver.release(FIRST, 0, "cancel")
        assert not pair.receiver._moves._parts
        return
    if end == "newer attempt":
        epoch, pages, features = 1, new_pages, torch.zeros(10, 1024, dtype=torch.uint8)
        pair.sender.offer(Offer(room=FIRST, epoch=1, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
        pair.receiver.pull(
            PullRequest(
                room=FIRST, epoch=1, num_tokens=NUM_TOKENS, have=0, pages=tuple(new_pages), features=features,
                endpoint="p", peer_instance=P,
            )
        )  # fmt: skip
        pair.run()
    monkeypatch.setattr(ReceiverPages, "places", None)
    if is_early:
        pair.sender.launched(FIRST, epoch, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, epoch, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    assert not pair.receiver._moves._parts
    assert torch.equal(pair.target.kv[pages], pair.source.kv[:10])
    assert torch.equal(features, pair.source.features[:10])
    others = [page for page in range(12) if page not in pages]
    assert torch.equal(pair.target.kv[others], before[others]), "pages of another attempt"
    assert end == "complete" or not first_features.any()


def test_only_blocks_of_the_last_forward_go_unasked(start):
    pair = warm(start)
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, 20)
    pair.sender.launched(FIRST, 0, 20, NUM_TOKENS)  # ahead: the first one is not announced
    pair.sender.advance(FIRST, 0, 20)
    pair.run()
    sent = [message for message in pair.wire.said if isinstance(message, SlabBlock)]
    assert sum(block.count for block in sent) == 20 // 4 * 6144 // 4096, "those of the first forward, pulled"
    assert early_slots(pair) != "SlotRanges(0/8 held)"
    num_pulls = pair.wire.count(Pull)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(Pull) == num_pulls


def test_a_prompt_with_a_prefix_on_decode_gets_the_rest_unasked(start):
    pair = warm(start)
    features = offer(pair, FIRST, have=8)
    pair.sender.advance(FIRST, 0, 12)
    pair.run()
    num_pulls = pair.wire.count(Pull)
    pair.sender.launched(FIRST, 0, 12, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    assert pair.wire.count(Pull) == num_pulls
    assert torch.equal(pair.target.kv[list(range(9, 1, -1))], pair.source.kv[2:10])
    assert torch.equal(features[:8], pair.source.features[2:10])


@pytest.mark.parametrize("is_launched_first", [True, False])
def test_an_attach_behind_the_launch_finds_the_forward(start, is_launched_first):
    pair = warm(start)
    pair.sender.offer(Offer(room=FIRST, epoch=0, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
    pair.devices[0].polls = HELD
    if not is_launched_first:  # another forward is behind it by now
        offer(pair, SECOND)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    if not is_launched_first:
        pair.sender.launched(SECOND, 0, 0, NUM_TOKENS)
    features = attach(pair, FIRST)
    pair.run()
    pair.devices[0].polls = 1
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert (pair.wire.count(Pull) == 0) == is_launched_first
    assert len(pair.sender._device_slabs._early) == (0 if is_launched_first else 1), "no wait for the second"


def test_what_finds_no_early_slot_is_pulled(start, monkeypatch):
    monkeypatch.setattr("baton.kvtransfer.transports.shm.EARLY_SLOTS", 3)
    pair = warm(start)
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert (pair.wire.count(Pull), pair.wire.count(SlabBlock)) == (NUM_RUNS - 3, 2)


@pytest.mark.parametrize("num_early", [slow(0), slow(1), slow(2), 8])
def test_runs_of_far_forwards_keep_no_ready_room_waiting(start, monkeypatch, num_early):
    """128 rooms, a slab for three of them: each pull completes, and the clock stands still."""
    monkeypatch.setattr("baton.kvtransfer.transports.shm.EARLY_SLOTS", num_early)
    pair, rooms = warm(start), [f"{number:032x}" for number in range(1, 129)]
    far, near = rooms[64:], rooms[:64]
    features = {room: offer(pair, room) for room in far + near}
    pair.devices[0].polls = HELD
    for room in far + near:  # those whose forwards are far away come first, and get every early slot
        pair.sender.launched(room, 0, 0, NUM_TOKENS)
    pair.devices[0].polls = 1
    for room in rooms:
        pair.sender.advance(room, 0, NUM_TOKENS, 42)
        assert outcome(events_until_quiet(pair)) == ["Complete", "Released"], room
        pair.check_landed(features[room])
    assert pair.now == 0.0
    for end in (pair.sender, pair.receiver):
        assert (end.counters["shm_full"], end.counters["repulls"]) == (0, 0)
    assert pair.wire.count(m.Block) == 0
    assert early_slots(pair) == f"SlotRanges(0/{num_early} held)"


def test_all_rooms_of_one_forward_complete_without_a_timer(start):
    pair, rooms = warm(start), [f"{number:032x}" for number in range(1, 129)]
    for room in rooms:
        offer(pair, room)
    for room in rooms:
        pair.sender.launched(room, 0, 0, NUM_TOKENS)
    for room in rooms:
        pair.sender.advance(room, 0, NUM_TOKENS, 42)
    assert outcome(events_until_quiet(pair)) == sorted(["Complete", "Released"] * 128)
    assert pair.sender.counters["shm_full"] == pair.receiver.counters["repulls"] == 0


def test_pulls_wait_for_no_run_behind_a_forward(start):
    """The moves of early runs have a stream of their own."""
    pair = warm(start)
    offer(pair, SECOND)
    pair.devices[0].polls = HELD
    pair.sender.launched(SECOND, 0, 0, NUM_TOKENS)
    pair.devices[0].polls = 1
    features = offer(pair, FIRST)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    (waiting,) = pair.sender._device_slabs._early
    assert not waiting.move.is_done, "its forward runs"


def test_a_cancel_waits_for_no_forward_and_its_slots_for_the_move(start):
    pair = warm(start)
    offer(pair, FIRST)
    pair.devices[0].polls = HELD
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.release(FIRST, 0, "cancel")
    assert pair.devices[0]._early, "the cancel did not wait for the forward"
    assert early_slots(pair) == f"SlotRanges({NUM_RUNS}/8 held)"
    pair.run(1.0)
    assert early_slots(pair) == f"SlotRanges({NUM_RUNS}/8 held)", "the move still writes into them"
    pair.devices[0].finish()
    pair.run(1.0)
    assert early_slots(pair) == "SlotRanges(0/8 held)"
    assert pair.wire.count(SlabBlock) == 0


@pytest.mark.parametrize("end", ["release", "abort", "lease"])
def test_early_slots_of_a_room_that_ended_are_free(start, end):
    pair = warm(start)
    pair.wire.on_message = lambda message: [] if isinstance(message, SlabBlock | SlotFree) else [message]
    offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    pair.run()
    assert early_slots(pair) == f"SlotRanges({NUM_RUNS}/8 held)"
    if end == "release":
        pair.sender.release(FIRST, 0, "cancel")
    elif end == "abort":
        pair.receiver.release(FIRST, 0, "cancel")
        pair.run()
    else:
        pair.run(7.0)
    assert early_slots(pair) == "SlotRanges(0/8 held)"


def test_a_run_whose_descriptor_is_lost_is_pulled(start):
    pair, lost = warm(start), []
    pair.wire.on_message = lambda message: (
        [] if isinstance(message, SlabBlock) and not lost and not lost.append(1) else [message]
    )
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"], "the announcement brings the pulls"
    pair.check_landed(features)
    assert pair.wire.count(Pull) == NUM_RUNS
    assert early_slots(pair) == "SlotRanges(0/8 held)"


def test_a_short_run_whose_descriptor_is_lost_is_gathered_once(start):
    pair, lost = warm(start), []
    pair.wire.on_message = lambda message: (
        [] if isinstance(message, SlabBlock) and not lost and not lost.append(1) else [message]
    )
    offer(pair, FIRST)
    pair.sender.advance(FIRST, 0, 36)
    pair.run()
    lost.clear()
    before = pair.sender.counters["device_blocks"]
    pair.sender.launched(FIRST, 0, 36, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run(3.0)) == ["Complete", "Released"]
    assert pair.sender.counters["device_blocks"] - before == 2, "of the last page"


def test_a_corrupt_early_run_is_never_taken_for_a_block(start):
    pair = warm(start)
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.devices[0].finish()
    lane = pair.sender._device_slabs._lanes["00000001"]
    slot = lane.early.find((FIRST, 0, 0))
    memory = next(iter(pair.devices[0]._owned.values()))
    offset = lane.slab.slot(slot.index) - memory.address + 5
    memory.map[offset] = memory.map[offset] ^ 1
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.receiver.counters["digest_mismatches"] == 1


def test_an_early_run_of_another_process_or_attempt_is_dropped(start):
    pair = warm(start)
    offer(pair, FIRST)
    seen = []
    pair.wire.on_message = lambda message: (
        [_renamed(message, seen), message] if isinstance(message, SlabBlock) else [message]
    )
    features = offer(pair, SECOND)
    pair.sender.launched(SECOND, 0, 0, NUM_TOKENS)
    pair.sender.advance(SECOND, 0, NUM_TOKENS, 42)
    assert "Complete" in outcome(pair.run())
    pair.check_landed(features)
    assert seen


def _renamed(message: SlabBlock, seen: list[int]) -> SlabBlock:
    seen.append(1)
    return msgspec.structs.replace(message, instance="e" * 32)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_pair_of_which_one_knows_no_early_runs_pulls_all(start, monkeypatch, side):
    """A worker of an older version neither asks for early slots nor sends early runs."""
    if side == "decode":
        monkeypatch.setattr("baton.kvtransfer.transports.shm.EARLY_SLOTS", 0)
    pair = warm(start)
    requests = [message for message in pair.wire.said if isinstance(message, SlabRequest)]
    assert not requests
    features = offer(pair, FIRST)
    if side == "decode":
        pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(Pull) == NUM_RUNS


def test_early_runs_leave_memory_for_the_pulls_of_one_more_pair(start):
    pair = warm(start, device_slab_bytes=10 * SLOT_BYTES)
    assert early_slots(pair) == "SlotRanges(0/2 held)"
    assert pair.slots() == "DeviceLanes(SlabSlots(0/4 held))"
    features = offer(pair, FIRST)
    pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert pair.wire.count(Pull) == NUM_RUNS - 2


@pytest.mark.parametrize("is_early", [True, False])
def test_slots_smaller_than_a_block_hold_no_run(start, is_early):
    """Decode chooses the size of the slots, and a wrong choice must not end prefill."""
    pair = warm(start)
    pair.sender._device_slabs._lanes["00000001"].slab.slot_bytes = 2048
    features = offer(pair, FIRST)
    if is_early:
        pair.sender.launched(FIRST, 0, 0, NUM_TOKENS)
    pair.sender.advance(FIRST, 0, NUM_TOKENS, 42)
    assert outcome(pair.run()) == ["Complete", "Released"]
    pair.check_landed(features)
    assert early_slots(pair) == "SlotRanges(0/8 held)"


def test_a_room_of_which_nothing_was_attached_is_only_announced(start):
    pair = warm(start)
    pair.sender.offer(Offer(room=ROOM, epoch=1, num_tokens=NUM_TOKENS, pages=tuple(range(10))))
    pair.sender.launched(ROOM, 1, 0, NUM_TOKENS)
    pair.sender.launched("f" * 32, 0, 0, NUM_TOKENS)
    pair.sender.advance(ROOM, 1, NUM_TOKENS, 42)
    pair.run()
    assert pair.wire.count(SlabBlock) == 0
