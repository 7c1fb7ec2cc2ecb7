"""Ranks of which one cannot capture a graph: all lose it, none waits for another. Ranks are threads.

Recording runs nothing and a segment runs behind its vote, as on a device. A sum over ranks is a barrier with
a limit, so a rank that waits for another one fails.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from baton.engine.errors import RanksApart
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.breakable import Breaks, ReplayContext
from baton.engine.graphs.bucketed_graphs import BatchShape, GraphFamily, GraphLimits, PathDecision
from baton.engine.graphs.graph_pool import FallbackReason, GraphKind, GraphPool

NUM_RANKS = 2
NO_S, LIMIT_S = 1.0, 20.0  # the longest wait of a "no", and any other
BUCKETS = (1, 2, 4)


class Ballot:
    """The votes of all ranks, and their sums. A rank that leaves ends all waits."""

    def __init__(self) -> None:
        self._votes = [True] * NUM_RANKS
        self._at = threading.Barrier(NUM_RANKS, timeout=LIMIT_S)
        self._sums = threading.Barrier(NUM_RANKS, timeout=LIMIT_S)
        self.num_votes = [0] * NUM_RANKS

    def vote(self, rank: int, is_so: bool) -> bool:
        self.num_votes[rank] += 1
        self._votes[rank] = is_so
        try:
            self._at.wait(LIMIT_S if is_so else NO_S)
            found = all(self._votes)
            self._at.wait()
        except threading.BrokenBarrierError:
            raise RanksApart("nobody comes") from None
        return found

    def leave(self) -> None:
        self._at.abort()
        self._sums.abort()

    def sum(self) -> None:
        """One sum over all ranks. Raises RuntimeError where the others do not come."""
        try:
            self._sums.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank waits for ever") from None


class Segment:
    num_ops, num_bytes = 1, 0

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class Device(GraphBackend):
    """As a device: what is recorded runs once the segment is closed. `fails_at` gets "record", "break",
    "launch" or "warm up" and may raise.
    """

    name, num_warm_ups = "fake", 1

    def __init__(self, ballot: Ballot, fails_at: Callable[[str], None]) -> None:
        super().__init__()
        self.ballot, self.fails_at = ballot, fails_at

    def warm_up(self, run: Callable[[], object]) -> None:
        self.fails_at("warm up")
        run()
        self.ballot.sum()

    def open_segment(self) -> None:
        self.fails_at("record")

    def close_segment(self) -> Segment:
        segment = Segment(self._run)
        self.launch_first(segment)
        return segment

    def _run(self) -> None:
        self.fails_at("launch")
        self.ballot.sum()

    def pool_bytes(self) -> int:
        return 0

    def _abort_segment(self) -> None:
        pass


def forward(bucket: int, breaks: Breaks[ReplayContext]) -> torch.Tensor:
    out = torch.zeros(bucket)
    breaks.graph_break(lambda context, x, out: out.copy_(x))(torch.ones(bucket), out=out)
    return out


def capture_on_all(fails: Callable[[int, int, str], bool]) -> list[GraphFamily[ReplayContext, torch.Tensor]]:
    """The graphs of each rank, captured together; `fails(rank, bucket, at)`."""
    ballot = Ballot()

    def capture(rank: int) -> GraphFamily[ReplayContext, torch.Tensor]:
        now: list[int] = []

        def fails_at(at: str) -> None:
            if fails(rank, now[-1], at):
                raise RuntimeError(f"planted: no memory to {at}")

        pool = GraphPool(Device(ballot, fails_at), vote=lambda is_so: ballot.vote(rank, is_so))
        family: GraphFamily[ReplayContext, torch.Tensor] = GraphFamily(
            pool, GraphKind.TARGET_PREFILL, BUCKETS, GraphLimits(is_by_token=False)
        )

        def context(bucket: int) -> ReplayContext:
            now.append(bucket)
            return ReplayContext(num_rows=bucket)

        try:
            family.capture(forward, context, lambda: [])
        except RanksApart:
            ballot.leave()
            raise
        for bucket in family.captured:  # sums over ranks: all have the same graphs
            family.replay(PathDecision(kind=family.kind, bucket=bucket), ReplayContext(num_rows=bucket))
        return family

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        futures = [threads.submit(capture, rank) for rank in range(NUM_RANKS)]
        families = [future.result() for future in futures]
    assert len(set(ballot.num_votes)) == 1
    return families


def reason_of(family: GraphFamily[ReplayContext, torch.Tensor], bucket: int) -> FallbackReason | None:
    return family.peek(BatchShape(size=bucket)).reason


@pytest.mark.parametrize("bucket", [4, 2])
def test_what_one_rank_cannot_record_no_rank_has(bucket: int):
    one, other = capture_on_all(lambda rank, at_bucket, at: (rank, at_bucket, at) == (1, bucket, "record"))
    assert one.captured == other.captured == tuple(size for size in BUCKETS if size != bucket)
    assert reason_of(one, bucket) is FallbackReason.RANK_VOTE
    assert reason_of(other, bucket) is FallbackReason.CAPTURE_FAILED


def test_the_segment_behind_a_break_is_voted_on_too():
    seen = []

    def fails(rank: int, bucket: int, at: str) -> bool:
        if (rank, bucket, at) == (0, 2, "record"):
            seen.append(at)
            return len(seen) % 2 == 0
        return False

    one, other = capture_on_all(fails)
    assert len(seen) == 4, "both attempts fail behind the break"
    assert one.captured == other.captured == (1, 4)


def test_all_ranks_capture_again_when_one_needs_a_run_before():
    seen = []

    def fails(rank: int, bucket: int, at: str) -> bool:
        seen.append((rank, bucket, at))
        return at == "record" and rank == 1 and bucket == 2 and (1, 2, "warm up") not in seen

    one, other = capture_on_all(fails)
    assert one.captured == other.captured == BUCKETS
    assert {(rank, 2, "warm up") for rank in range(NUM_RANKS)} <= set(seen)


def test_no_rank_tries_again_behind_a_run_for_which_one_has_no_memory():
    seen = []

    def fails(rank: int, bucket: int, at: str) -> bool:
        seen.append((bucket, at))
        if (rank, bucket, at) == (1, 2, "record"):
            raise RuntimeError("CUDA error: out of memory")
        return False

    one, other = capture_on_all(fails)
    assert one.captured == other.captured == (1, 4)
    assert (2, "warm up") not in seen


def test_a_run_that_fails_on_all_ranks_costs_the_graph_alone():
    one, other = capture_on_all(lambda rank, bucket, at: (bucket, at) == (4, "warm up"))
    assert one.captured == other.captured == (1, 2)


@pytest.mark.parametrize("at", ["warm up", "launch"])
def test_a_run_that_fails_on_one_rank_ends_the_start(at: str):
    with pytest.raises(RanksApart):
        capture_on_all(lambda rank, bucket, found: (rank, bucket, found) == (1, 4, at))


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_graph_that_one_rank_finds_wrong_is_dropped_by_all(wrong: int):
    families = capture_on_all(lambda *_: False)
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        dropped = threads.map(
            lambda rank: families[rank].drop_if_wrong(2, 2, "planted" * (rank == wrong)), range(NUM_RANKS)
        )
        assert list(dropped) == [True, True]
        kept = threads.map(lambda family: family.drop_if_wrong(4, 4, ""), families)
        assert list(kept) == [False, False]
    assert [family.captured for family in families] == [(1, 4)] * 2
    assert reason_of(families[wrong], 2) is FallbackReason.CAPTURE_FAILED
    assert reason_of(families[1 - wrong], 2) is FallbackReason.RANK_VOTE
