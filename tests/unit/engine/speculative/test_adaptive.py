"""The number of drafted tokens follows cost and yield, steadily and never to the disadvantage."""

import random

import pytest
from baton.engine.speculative.adaptive import (
    MARGIN,
    PROBE_STEPS,
    MeasuredCosts,
    StepCosts,
    StepPolicy,
    expected_tokens,
)
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape

COSTS = StepCosts(draft=0.1, knee_rows=160.0)
FIXED = DraftShape.of(5)


def policy(shape: DraftShape = FIXED, costs: StepCosts = COSTS) -> StepPolicy:
    return StepPolicy(shape.candidates(), costs)


def run(
    chosen: StepPolicy,
    batch_size: int,
    share_kept: float,
    steps: int,
    seed: int = 0,
    shares: list[float] | None = None,
) -> list[DraftShape]:
    """Steps of a drafter whose drafts are right with probability `share_kept`, or `shares` by level; a step
    that drafts nothing looks at the first proposal."""
    rng, shapes = random.Random(seed), []
    for _ in range(steps):
        shape = chosen.choose(batch_size)
        shapes.append(shape)
        kept, tried = ([0] * max(shape.steps, 1) for _ in range(2))
        for _ in range(batch_size):
            for level in range(max(shape.steps, 1)):
                tried[level] += 1
                if rng.random() >= (share_kept if shares is None else shares[level]):
                    break
                kept[level] += 1
        chosen.observe(kept, tried)
    return shapes


def cost_per_token(
    shapes: list[DraftShape], batch_size: int, share_kept: float, costs: StepCosts = COSTS
) -> float:
    """What the steps are expected to cost, divided by what they are expected to yield."""
    cost = sum(costs.step(shape, batch_size) for shape in shapes)
    return cost / sum(expected_tokens(shape, [share_kept]) for shape in shapes)


def test_the_expected_yield_is_the_geometric_sum():
    for share in (0.0, 0.3, 0.9):
        expected = (1 - share**6) / (1 - share)
        assert expected_tokens(FIXED, [share]) == pytest.approx(expected)
    assert expected_tokens(FIXED, [1.0]) == 6
    assert expected_tokens(DraftShape.of(2), [0.5, 0.2, 0.9]) == pytest.approx(1.6)


def test_every_part_of_a_step_has_its_cost():
    costs = StepCosts(draft=0.5, knee_rows=10.0)
    assert costs.step(PLAIN, 10) == pytest.approx(2 + 0.5 * 2)  # decode and an extend of one row
    assert costs.step(DraftShape.of(2), 5) == pytest.approx(2.5 + 0.5 * (1.5 + 2.5))
    assert costs.step(DraftShape.of(2, 4, 10), 1) == pytest.approx(2 + 0.5 * (1.4 + 1.3))


@pytest.mark.parametrize("costs", [COSTS, StepCosts(draft=0.3, knee_rows=6.0)], ids=["gpu", "cpu"])
@pytest.mark.parametrize("share_kept", [0.0, 0.2, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("batch_size", [1, 8, 64, 256])
@pytest.mark.parametrize("shape", [FIXED, DraftShape.of(3, 4, 13)], ids=["chain", "tree"])
def test_the_choice_is_near_the_best_and_no_dearer_than_the_fixed_shape(shape, batch_size, share_kept, costs):
    """On a drafter of known quality, once measured; the estimate from few drafts may be off by little."""
    chosen = policy(shape, costs)
    run(chosen, batch_size, share_kept, 100)
    settled = cost_per_token(run(chosen, batch_size, share_kept, 200, seed=1), batch_size, share_kept, costs)
    fixed = {each: cost_per_token([each], batch_size, share_kept, costs) for each in shape.candidates()}
    assert settled <= fixed[shape] * 1.01
    assert settled <= min(fixed.values()) * (1 + MARGIN + 0.04)


def test_large_batches_or_poor_drafts_end_drafting_and_small_ones_resume():
    chosen = policy()
    assert run(chosen, 1, 0.8, 60)[-1].steps == 5
    assert run(chosen, 512, 0.8, 3)[-1].steps <= 1, "the load is known at once"
    assert run(chosen, 1, 0.8, 3)[-1].steps == 5
    assert run(chosen, 32, 0.02, 200)[-1] == PLAIN
    assert run(chosen, 8, 0.9, 200)[-1].steps == 5, (
        "the first proposals that nobody asked for were seen to match"
    )


def test_more_load_never_drafts_more_and_more_acceptance_never_less():
    for share in (0.3, 0.6, 0.9):
        steps = []
        for batch_size in (1, 4, 16, 64, 256, 1024):
            chosen = policy()
            for _ in range(400):
                chosen.observe([int(100 * share)] * 5, [100] * 5)
            steps.append(chosen.choose(batch_size).steps)
        assert steps == sorted(steps, reverse=True)
    by_share = []
    for share in range(0, 101, 10):
        chosen = policy()
        for _ in range(400):
            chosen.observe([share] * 5, [100] * 5)
        by_share.append(chosen.choose(16).steps)
    assert by_share == sorted(by_share)
    assert by_share[0] == 0


def test_at_a_threshold_the_current_shape_is_kept():
    """Where two shapes are worth the same, noise in what is observed does not send it to and fro."""
    chosen = policy()
    border = next(
        batch for batch in range(1, 400)
        if abs(chosen.rate(DraftShape.of(2), batch) / chosen.rate(DraftShape.of(3), batch) - 1) < 0.002
    )  # fmt: skip
    run(chosen, border, 0.6, 400)
    assert chosen.num_changes <= 6
    assert sum(chosen.chosen.values()) == 400


def test_a_shape_stays_within_the_margin_and_never_below_the_configured():
    chosen = StepPolicy((PLAIN, DraftShape.of(1), DraftShape.of(2)), COSTS)
    chosen.current = PLAIN
    for batch_size in range(1, 600):
        before, rates = chosen.current, {shape: chosen.rate(shape, batch_size) for shape in chosen.shapes}
        after = chosen.choose(batch_size)
        assert rates[after] >= rates[DraftShape.of(2)]
        if after != before and rates[before] >= rates[DraftShape.of(2)]:
            assert rates[after] > rates[before] * (1 + MARGIN)


def test_no_samples_change_nothing_and_invalid_samples_are_refused():
    chosen = policy()
    before = chosen.share_kept
    chosen.observe([0], [0])
    assert chosen.share_kept == before
    with pytest.raises(AssertionError):
        chosen.observe([3], [2])


MEASURED = MeasuredCosts(
    seconds={
        PLAIN: {1: 4.0, 64: 4.4, 128: 5.0},
        DraftShape.of(3): {1: 5.0, 64: 8.0, 128: 13.0},
    },
    kv_seconds=0.0001,
)


@pytest.mark.parametrize(
    ("shape", "batch_size", "seconds"),
    [(PLAIN, 1, 4.0), (PLAIN, 96, 4.7), (DraftShape.of(3), 128, 13.0), (DraftShape.of(3), 256, 26.0)],
)
def test_measured_costs_are_linear_between_the_measured_sizes(shape, batch_size, seconds):
    assert MEASURED.step(shape, batch_size, 0) == pytest.approx(seconds)
    assert MEASURED.step(shape, batch_size, 1000) == pytest.approx(seconds + 0.1)


@pytest.mark.parametrize("costs", [MEASURED, StepCosts(draft=0.1, knee_rows=160.0, kv=1e-5)])
def test_a_long_context_makes_drafts_cheaper_in_comparison(costs):
    chosen = StepPolicy((PLAIN, DraftShape.of(3)), costs)
    gains = [
        chosen.rate(DraftShape.of(3), 128, context) / chosen.rate(PLAIN, 128, context)
        for context in (0, 128 * 1024, 128 * 8192)
    ]
    assert gains[0] < gains[1] < gains[2]
    assert chosen.choose(128, 0) == PLAIN
    assert chosen.choose(128, 128 * 8192) == DraftShape.of(3)


def test_drafts_that_are_never_right_behind_the_first_are_not_drafted():
    """The first draft is always right and the second never: one draft yields as much as five."""
    chosen = policy(costs=StepCosts(draft=0.1, knee_rows=160.0))
    steps = run(chosen, 64, 0.0, 400, shares=[1.0, 0.0, 0.0, 0.0, 0.0])
    assert [shape.steps for shape in steps[-50:]].count(1) >= 45


def test_longer_chains_are_tried_again_when_later_drafts_become_right():
    chosen = policy()
    run(chosen, 16, 0.0, 400, shares=[0.9, 0.0, 0.0, 0.0, 0.0])
    assert chosen.current.steps == 1
    later = run(chosen, 16, 0.9, 600)
    assert later[-1].steps == 5


def blind(shape: DraftShape, costs: StepCosts) -> StepPolicy:
    """The policy of a drafter of blocks, which shows nothing of the drafts that it does not make."""
    return StepPolicy(shape.candidates(), costs, is_watched=False)


def run_blindly(
    chosen: StepPolicy, batch_size: int, share_kept: float, steps: int, seed: int = 0
) -> list[int]:
    rng, lengths = random.Random(seed), []
    for _ in range(steps):
        shape = chosen.choose(batch_size)
        lengths.append(shape.steps)
        kept, tried = ([0] * shape.steps for _ in range(2))
        for _ in range(batch_size):
            for level in range(shape.steps):
                tried[level] += 1
                if rng.random() >= share_kept:
                    break
                kept[level] += 1
        chosen.observe(kept, tried)
    return lengths


def test_a_block_costs_one_draft_forward_whatever_its_length():
    blocks, chains = (StepCosts(draft=0.2, knee_rows=160.0, is_block=is_block) for is_block in (True, False))
    longer, shorter = (blocks.step(DraftShape.of(steps), 1) for steps in (15, 3))
    assert longer - shorter == pytest.approx(12 * 1.2 / 160)
    assert blocks.step(PLAIN, 8) == chains.forward(8), "a plain step runs no draft forward"
    assert chains.step(DraftShape.of(15), 1) > 3 * longer


@pytest.mark.parametrize(("batch_size", "share_kept", "length"), [(1, 0.9, 15), (1, 0.3, 3), (300, 0.5, 0)])
def test_blocks_are_as_long_as_load_and_acceptance_allow(batch_size, share_kept, length):
    costs = StepCosts(draft=0.15, knee_rows=160.0, is_block=True)
    lengths = run_blindly(blind(DraftShape.of(15), costs), batch_size, share_kept, 4000)[2000:]
    assert abs(max(set(lengths), key=lengths.count) - length) <= length // 3, lengths


def test_a_policy_that_sees_nothing_of_plain_steps_probes_now_and_then():
    costs = StepCosts(draft=0.15, knee_rows=6.0, is_block=True)
    chosen = blind(DraftShape.of(7), costs)
    late = run_blindly(chosen, 4, 0.0, 9 * PROBE_STEPS)[PROBE_STEPS:]
    assert chosen.current.steps == 0
    assert [late.count(length) for length in (0, 1)] == [8 * (PROBE_STEPS - 1), 8], "a probe is short"
    resumed = run_blindly(chosen, 1, 1.0, 40 * PROBE_STEPS)
    assert resumed[-1] > 1, "and shows when drafts are accepted again"
