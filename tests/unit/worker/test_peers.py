"""A rank beside others: signals reach all, all leave together, and a rank that hangs is named."""

import os
import subprocess
import sys
import time

import pytest
from baton.cluster.process.process import Shutdown
from baton.tests.unit.worker.test_peer_table import tables
from baton.worker.peer_table import PeerOrder, PeerState
from baton.worker.peers import PeerLife, PeerRanks


def lives(num_ranks: int) -> tuple[list[PeerLife], list[list[float]]]:
    """The life of each rank, and when its watchdog was fed."""
    fed: list[list[float]] = [[] for _ in range(num_ranks)]
    ranks = [
        PeerLife(table, Shutdown(), own.append, lambda: None)
        for table, own in zip(tables(num_ranks), fed, strict=True)
    ]
    return ranks, fed


def test_signals_of_rank_0_reach_all_ranks_in_order():
    (one, *others), fed = lives(3)
    for life in (one, *others):
        life.turn(1.0)
    assert fed == [[1.0]] * 3
    assert not any(life._shutdown.drain.is_set() for life in others)
    one._shutdown.drain.set()
    for life in (one, *others):
        life.turn(2.0)
    assert all(life._shutdown.drain.is_set() and not life._shutdown.stop.is_set() for life in others)
    one._shutdown.stop.set()
    for life in (one, *others):
        life.turn(3.0)
    assert all(life._shutdown.stop.is_set() for life in others)


def test_a_signal_to_another_rank_alone_is_no_order():
    """Service managers signal all processes of a worker; rank 0 decides."""
    (one, other), _ = lives(2)
    other._shutdown.drain.set()
    other.turn(1.0)
    one.turn(1.0)
    assert one.table.order is PeerOrder.SERVE


def test_ranks_leave_when_all_have_drained():
    (one, other), _ = lives(2)
    assert not one.may_leave()
    assert not one.may_leave()
    assert other.may_leave()
    assert one.may_leave()
    one.leave()
    assert other.table.state_of(0) is PeerState.HAS_LEFT


@pytest.fixture
def ranks() -> PeerRanks:
    """Rank 1 is a process that does nothing."""
    table, _ = tables(2)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    made = PeerRanks([process], os.memfd_create("meeting"), table, 0.5, end=lambda code: None)
    yield made
    process.kill()
    process.wait()


def test_the_rank_that_fell_silent_first_is_named_rank_0_too(ranks: PeerRanks):
    ranks.begin_serving()
    table, other = ranks.table, type(ranks.table)(ranks.table._descriptors, 1, 2)
    for _ in range(8):
        table.beat()
        other.beat()
        assert ranks.look() == ""
    other.beat()
    assert ranks.look() == "", "silent for one look"
    other.beat()
    found = ranks.look()
    assert found.startswith(f"rank 0 (pid {os.getpid()}) hangs: no sign of life for 0.5 s")
    table.beat()
    assert [ranks.look() for _ in range(3)][-1].startswith("rank 1 ")


def test_a_rank_that_has_left_may_end_and_one_that_has_not_may_not(ranks: PeerRanks):
    other = type(ranks.table)(ranks.table._descriptors, 1, 2)
    (process,) = ranks.processes
    other.enter(PeerState.HAS_LEFT)
    assert ranks.look() == ""
    process.kill()
    process.wait()
    assert "was killed by SIGKILL" in ranks.look(), "it had left, and did not end well"


def test_closing_lets_ranks_end_by_themselves(ranks: PeerRanks):
    (process,) = ranks.processes
    process.kill()
    began = time.monotonic()
    ranks.close()
    assert time.monotonic() - began < 5
    assert ranks.table.order is PeerOrder.STOP
    assert ranks.table.state_of(0) is PeerState.HAS_LEFT
