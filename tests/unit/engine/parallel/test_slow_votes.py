"""A rank that waits long for the votes of the others says so once, and still gets the result or the error."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from baton.engine.errors import RanksApart
from baton.engine.parallel import group
from baton.engine.parallel.group import TensorGroup

LIMIT_S = 2.0  # of a vote


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[TensorGroup]:
    """Two ranks in threads, each with a process group of gloo."""
    store = dist.HashStore()

    def joined(rank: int) -> dist.ProcessGroup:
        return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LIMIT_S))

    with ThreadPoolExecutor(2) as threads:
        groups = dict(zip("01", threads.map(joined, range(2)), strict=True))
    monkeypatch.setattr(group, "group_of", groups.__getitem__)
    monkeypatch.setattr(group, "SLOW_S", 0.1)
    return [TensorGroup(rank=rank, size=2, votes=str(rank)) for rank in range(2)]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == group.__name__]


@pytest.mark.parametrize("is_so", [True, False])
def test_a_late_vote_counts_and_has_one_line(
    ranks: list[TensorGroup], caplog: pytest.LogCaptureFixture, is_so: bool
):
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as threads:
        early = threads.submit(ranks[0].agree, True)
        threading.Event().wait(0.5)
        assert lines(caplog) == [line for line in lines(caplog) if "rank 0 has waited 0.1 s" in line]
        assert len(lines(caplog)) == 1
        assert ranks[1].agree(is_so) is is_so
        assert early.result() is is_so
    assert len(lines(caplog)) == 1


def test_votes_in_time_have_no_line(ranks: list[TensorGroup], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            assert list(threads.map(lambda rank: rank.agree(True), ranks)) == [True, True]
    assert lines(caplog) == []


def test_a_vote_that_never_comes_ends_behind_the_line(
    ranks: list[TensorGroup], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING), pytest.raises(RanksApart):
        ranks[0].agree(True)
    assert len(lines(caplog)) == 1
