"""Ranks hear of each other by shared memory: wishes in order, calls, orders, and who is alive or has left."""

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from baton.engine.errors import LifecycleError
from baton.engine.parallel.lockstep import RanksLeft, Turn
from baton.worker.peer_table import PeerDescriptors, PeerOrder, PeerState, PeerTable


def tables(num_ranks: int) -> list[PeerTable]:
    descriptors = PeerDescriptors.create(num_ranks)
    return [PeerTable(descriptors, rank, num_ranks) for rank in range(num_ranks)]


def test_every_rank_hears_the_wishes_of_all_in_every_turn():
    """Ranks come at times of their own; none reads the wish of a later turn."""
    num_ranks, num_turns = 3, 300
    ranks = tables(num_ranks)

    def live(table: PeerTable) -> list[list[list[int]]]:
        own = random.Random(table.rank)
        found = []
        for turn in range(num_turns):
            if own.random() < 0.05:
                time.sleep(own.random() * 0.002)
            kind = Turn.STEP if turn % 2 else Turn.PROMPTS
            found.append(table.swap(kind, (turn, table.rank, own.randrange(100))))
        return found

    with ThreadPoolExecutor(num_ranks) as pool:
        heard = list(pool.map(live, ranks))
    assert heard[0] == heard[1] == heard[2]
    assert [[wish[:2] for wish in turn] for turn in heard[0]] == [
        [[turn, rank] for rank in range(num_ranks)] for turn in range(num_turns)
    ]


def test_ranks_in_different_turns_all_say_so():
    one, other = tables(2)
    with ThreadPoolExecutor(2) as pool:
        found = [
            pool.submit(table.swap, turn, (1, 2)) for table, turn in ((one, Turn.PROMPTS), (other, Turn.STEP))
        ]
        errors = [future.exception() for future in found]
    assert [type(error) for error in errors] == [LifecycleError] * 2
    assert "rank 0 is in turn PROMPTS of round 1, and rank 1 in turn 2" in str(errors[0])


def test_a_rank_that_waits_gives_signs_of_life_until_another_leaves():
    one, other = tables(2)
    alive, waits = one.seen_alive(0), threading.Event()
    one.on_wait = waits.set
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.swap, Turn.PROMPTS, (1, 1))
        assert waits.wait(5)
        assert other.seen_alive(0) > alive
        other.enter(PeerState.HAS_LEFT)
        assert isinstance(waiting.exception(timeout=5), RanksLeft)


def test_a_rank_that_left_behind_its_wish_is_still_heard():
    one, other = tables(2)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(table.swap, Turn.STEP, (table.rank,)) for table in (one, other)]
        assert [future.result() for future in both] == [[[0], [1]]] * 2
    other.enter(PeerState.HAS_LEFT)
    with pytest.raises(RanksLeft):
        one.swap(Turn.PROMPTS, (1,))


def test_a_rank_that_rests_is_called():
    one, other = tables(2)
    assert not other.is_called
    assert not other.wait_for_call(0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.swap, Turn.PROMPTS, (3, 1))
        while not other.is_called:
            time.sleep(0.001)
        assert not other.wait_for_call(0), "it does not rest, and will look by itself"
        assert other.swap(Turn.PROMPTS, (0, 0)) == waiting.result() == [[3, 1], [0, 0]]
        other.rest()
        waiting = pool.submit(one.swap, Turn.STEP, (3, 1))
        assert other.wait_for_call(5)
        assert other.is_called
        assert other.swap(Turn.STEP, (0, 0)) == waiting.result()
    assert not other.is_called


def test_orders_and_states_only_go_on():
    one, other = tables(2)
    one.order = PeerOrder.DRAIN
    one.order = PeerOrder.SERVE
    assert other.order is PeerOrder.DRAIN
    one.order = PeerOrder.STOP
    assert other.order is PeerOrder.STOP
    other.enter(PeerState.IS_DONE)
    other.enter(PeerState.SERVES)
    assert one.state_of(1) is PeerState.IS_DONE
    assert not one.are_all_done
    one.enter(PeerState.HAS_LEFT)
    assert other.are_all_done


def test_other_memory_is_no_table():
    descriptors = PeerDescriptors.create(2)
    with pytest.raises(ValueError, match="no table of 3 ranks"):
        PeerTable(descriptors, 0, 3)
    empty = os.memfd_create("empty")
    os.ftruncate(empty, 1 << 12)
    with pytest.raises(ValueError, match="no table of 2 ranks"):
        PeerTable(PeerDescriptors(empty, descriptors.ready, descriptors.call), 0, 2)
