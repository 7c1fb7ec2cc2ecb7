"""The tables of a room's states, leases and tombstones."""

import pytest
from baton.cluster.protocol.messages import Layout
from baton.kvtransfer.protocol.layout import KVLayout
from baton.kvtransfer.protocol.session import (
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    InFlight,
    Lease,
    ReceiverRoom,
    ReceiverState,
    SenderRoom,
    SenderState,
    Tombstones,
    TransferCounters,
)
from baton.kvtransfer.transport import Offer, PullRequest

LAYOUT = Layout(
    fingerprint="f", dtype="float32", page_size=2, num_layers=1, num_kv_heads=1, head_dim=1, block_bytes=16
)
OFFER = Offer(room="a" * 32, epoch=0, num_tokens=6, pages=(1, 2, 3))
REQUEST = PullRequest(
    room="a" * 32,
    epoch=0,
    num_tokens=6,
    have=0,
    pages=(1, 2, 3),
    features=None,
    endpoint="p",
    peer_instance="b" * 32,
)


@pytest.mark.parametrize("table", [SENDER_TRANSITIONS, RECEIVER_TRANSITIONS])
def test_every_state_can_reach_an_end_and_ends_lead_nowhere(table: dict) -> None:
    ends = {state for state, following in table.items() if not following}
    assert len(ends) == 2
    for state in table:
        seen, todo = set(), [state]
        while todo:
            seen.add(now := todo.pop())
            todo += [following for following in table[now] if following not in seen]
        assert seen & ends


def test_every_open_state_can_be_given_up() -> None:
    for state, following in SENDER_TRANSITIONS.items():
        assert not following or SenderState.DROPPED in following, state
    for state, following in RECEIVER_TRANSITIONS.items():
        assert not following or ReceiverState.LOST in following, state


def test_an_illegal_transition_raises() -> None:
    with pytest.raises(AssertionError):
        SenderRoom(OFFER, Lease(1, 0)).move(SenderState.RELEASED)
    with pytest.raises(AssertionError):
        ReceiverRoom(REQUEST, Lease(1, 0)).move(ReceiverState.COMPLETE)


def test_a_lease_ends_after_its_time_without_progress() -> None:
    lease = Lease(5.0, now=10.0)
    assert not lease.is_over(14.999)
    lease.renew(14.0)
    assert not lease.is_over(18.999)
    assert lease.is_over(19.0)


def test_prefills_lease_runs_only_while_decode_must_act() -> None:
    room = SenderRoom(OFFER, Lease(5, 0))
    assert not room.waits_for_decode  # prefill computes
    room.tokens_ready = 2
    assert room.waits_for_decode  # nobody has attached
    room.stream = KVLayout(LAYOUT).stream(6, 0)
    room.num_pulled = 1
    assert not room.waits_for_decode  # all that was announced was pulled
    room.tokens_ready = 4
    assert room.waits_for_decode
    room.num_pulled, room.tokens_ready, room.first_token = 3, 6, 7
    assert room.waits_for_decode  # for its Release


def test_blocks_that_land_out_of_order_count_once_the_gap_closes() -> None:
    room = ReceiverRoom(REQUEST, Lease(5, 0), stream=KVLayout(LAYOUT).stream(6, 0))
    room.in_flight = {block: InFlight(0.0) for block in range(3)}
    leading = []
    for block in (2, 1, 0):
        room.land(block)
        assert room.is_landed(block)
        leading.append(room.num_leading)
    assert leading == [0, 0, 3]
    assert room.has_all
    assert not room.landed_ahead
    assert not room.in_flight


def test_runs_that_land_out_of_order_count_once_the_gap_closes() -> None:
    room = ReceiverRoom(REQUEST, Lease(5, 0), stream=KVLayout(LAYOUT).stream(6, 0))
    room.in_flight = {block: InFlight(0.0) for block in range(6)}
    leading = []
    for run in ((2, 2), (5, 1), (0, 2), (4, 1)):
        room.land(*run)
        assert all(room.is_landed(block) for block in range(run[0], sum(run)))
        leading.append(room.num_leading)
    assert leading == [0, 0, 4, 6]
    assert not room.landed_ahead
    assert not room.in_flight


@pytest.mark.parametrize("runs", [[(0, 2), (2, 3)], [(2, 3), (0, 2)], [(3, 2), (1, 2), (0, 1)]])
def test_runs_that_come_unasked_are_pulled_by_none(runs: list) -> None:
    room = ReceiverRoom(REQUEST, Lease(5, 0), stream=KVLayout(LAYOUT).stream(6, 0))
    for run in runs:
        room.came_unasked(*run, 1.0)
        assert all(room.are_in_flight(*other) for other in runs[: runs.index(run) + 1])
    assert (room.next_block, room.unasked, room.num_pulls) == (5, set(), 0)
    room.in_flight.update(dict.fromkeys((5, 6), InFlight(2.0)))
    room.in_flight[7] = InFlight(2.0)
    assert room.num_pulls == 2, "blocks of one pull share it; another one of that time is another pull"


def test_tombstones_are_bounded_in_number_and_time() -> None:
    stones = Tombstones(limit=3, seconds=10)
    for i in range(5):
        stones.bury(f"room{i}", 0, is_success=True, reason="", now=float(i))
    assert len(stones) == 3
    assert stones.find("room1", 0) is None
    assert stones.find("room2", 0) is not None
    stones.sweep(13.5)
    assert len(stones) == 1
    assert stones.find("room4", 0) is not None


def test_a_tombstone_covers_its_attempt_and_earlier_ones() -> None:
    stones = Tombstones()
    stones.bury("room", 2, is_success=False, reason="cancelled", now=0.0)
    stones.bury("room", 1, is_success=True, reason="late", now=0.0)
    assert stones.find("room", 3) is None
    for epoch in (0, 1, 2):
        stone = stones.find("room", epoch)
        assert stone is not None
        assert (stone.epoch, stone.reason) == (2, "cancelled")


def test_counters_are_numbers_by_name() -> None:
    counters = TransferCounters(repulls=2)
    assert counters.snapshot()["repulls"] == 2.0
    assert all(isinstance(value, float) for value in counters.snapshot().values())
