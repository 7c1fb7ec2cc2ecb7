"""Ranks agree on the sizes of each forward, in turns, and one without work joins the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from baton.engine.errors import LifecycleError
from baton.engine.models.moe import QWEN_NAMES, MixtureOfExperts, MoEConfig
from baton.engine.parallel.expert_rows import LockstepRows
from baton.engine.parallel.group import TensorGroup
from baton.engine.parallel.lockstep import (
    PromptRows,
    RanksLeft,
    Rounds,
    StepRows,
    Turn,
    largest_prompts,
    largest_step,
)
from baton.kernels.row_ops import FASTEST, ROWS_OF_ONE_RANK, named_joins


@dataclass
class Others:
    """What the other ranks want, turn by turn. `calls`: whether they are in a turn, one answer a look."""

    wishes: list[Sequence[int]] = field(default_factory=list)
    calls: list[bool] = field(default_factory=list)
    heard: list[tuple[Turn, tuple[int, ...]]] = field(default_factory=list)
    num_rests: int = 0

    def swap(self, turn: Turn, wish: Sequence[int]) -> list[Sequence[int]]:
        self.heard.append((turn, tuple(wish)))
        if not self.wishes:
            raise RanksLeft
        return [wish, self.wishes.pop(0)]

    @property
    def is_called(self) -> bool:
        return self.calls.pop(0) if self.calls else False

    def rest(self) -> None:
        self.num_rests += 1


def rounds_with(others: Others) -> Rounds:
    """Whose idle turns only say that this rank wants nothing."""
    rounds = Rounds(others, LockstepRows(TensorGroup(rank=1, size=2)))
    rounds.idle_prompts = lambda: rounds.prompts(PromptRows()) and None
    rounds.idle_step = lambda: rounds.step(StepRows()) and None
    return rounds


def test_the_largest_wish_is_agreed_on():
    assert largest_prompts([(5, 1), (16, 0), (0, 0)]) == PromptRows(16, 1)
    # the most requests, in the largest shape: a chain of 3 drafts, not the plain step of 9 requests
    assert largest_step([(2, 4, 3, 1), (9, 1, 0, 1), (0, 0, 0, 0)]) == StepRows(9, 4, 3, 1)
    assert largest_step([(0, 0, 0, 0)] * 2) == StepRows()


def test_a_step_of_this_rank_joins_the_prompts_of_others_first():
    others = Others(wishes=[(16, 1), (2, 1, 0, 1)])
    rounds = rounds_with(others)
    assert rounds.step(StepRows(1, 1, 0, 1)) == StepRows(2, 1, 0, 1)
    assert others.heard == [(Turn.PROMPTS, (0, 0)), (Turn.STEP, (1, 1, 0, 1))]
    assert rounds.finish()
    assert not others.num_rests, "it may have more to do"
    assert rounds.has_streams


def test_a_rank_with_prompts_only_takes_part_in_the_step_too():
    others = Others(wishes=[(0, 0), (0, 0, 0, 0)])
    rounds = rounds_with(others)
    assert rounds.prompts(PromptRows(8, 1)) == PromptRows(8, 1)
    assert rounds.finish()
    assert [turn for turn, _ in others.heard] == [Turn.PROMPTS, Turn.STEP]
    assert not rounds.has_streams


def test_a_rank_without_work_joins_when_it_is_called_and_rests_when_not():
    others = Others(wishes=[(4, 1), (0, 0, 0, 0)], calls=[True])
    rounds = rounds_with(others)
    assert rounds.finish(), "it ran idle rows"
    assert rounds.num_rounds == 1
    assert not rounds.finish()
    assert others.num_rests == 1
    others.calls = [False, True]  # called between the look and the rest
    assert rounds.finish(), "it must look again at once"


def test_one_forward_over_prompts_a_round():
    rounds = rounds_with(Others(wishes=[(0, 0)] * 2))
    rounds.prompts(PromptRows(1, 1))
    with pytest.raises(LifecycleError, match="one forward over prompts"):
        rounds.prompts(PromptRows(1, 1))


def test_nothing_runs_once_a_rank_has_left():
    rounds = rounds_with(Others(wishes=[(0, 0)]))
    rounds.prompts(PromptRows(1, 1))
    for _ in range(3):
        with pytest.raises(RanksLeft):
            rounds.finish()
        with pytest.raises(RanksLeft):
            rounds.prompts(PromptRows(1, 1))
        with pytest.raises(RanksLeft):
            rounds.step(StepRows(1, 1, 0, 1))


def test_rows_are_checked_once_ranks_agree():
    rows = LockstepRows(TensorGroup(rank=1, size=2))
    rows.check(17)  # before serving all ranks run the same
    rounds = Rounds(Others(), rows)
    with pytest.raises(LifecycleError, match=r"rank 1 enters the experts with 17 rows.* agreed on 0"):
        rows.check(17)
    rounds.agreed(17)
    rows.check(17)
    with pytest.raises(LifecycleError, match="agreed on 17"):
        rows.gather(torch.zeros(16, 4))
    assert rows.own(torch.arange(6)).tolist() == [3, 4, 5]


def test_experts_that_ranks_share_are_not_joined_with_other_steps():
    """A kernel that computes a layer's experts at once knows nothing of the rows of other ranks."""
    config = MoEConfig(
        num_experts=16,
        top_k=2,
        intermediate_size=32,
        is_normalised=True,
        names=QWEN_NAMES,
        shared_size=32,
    )
    for rows, wanted in ((ROWS_OF_ONE_RANK, True), (LockstepRows(TensorGroup(rank=0, size=2)), False)):
        ops = replace(FASTEST, expert_rows=rows)
        layer = MixtureOfExperts(64, config, dtype=torch.float32, device="cpu", ops=ops)
        assert layer.joins(named_joins("all"), 1) is wanted
