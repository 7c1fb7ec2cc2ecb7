"""Parts of prompts between decode steps keep the tail of the gaps within the bound, and are no smaller."""

import random

import pytest
from baton.decode.chunk_budget import LEAST_TOKENS, SHARE, ChunkBudget, Gap, StepGaps

MOST = 4096


class Device:
    """Gaps of `step` seconds, `launch` more for a part of a prompt and `token` for each of its tokens."""

    def __init__(self, step, launch, token, *, noise=0.05, seed=1):
        self.step, self.launch, self.token, self.noise = step, launch, token, noise
        self.rng = random.Random(seed)

    def gap(self, tokens):
        exact = self.step + (self.launch + self.token * tokens if tokens else 0.0)
        return exact * (1 + self.noise * abs(self.rng.gauss(0, 1)))

    def ideal(self, slo):
        """The tokens of a part that fills the bound without any noise."""
        return (slo - self.step - self.launch) / self.token


def played(budget, device, count, *, share=0.8):
    """(gaps, tokens of the parts): prompts wait in a `share` of the gaps."""
    gaps, parts = [], []
    for _ in range(count):
        tokens = budget.tokens if device.rng.random() < share else 0
        gaps.append(device.gap(tokens))
        parts += [tokens] * (tokens > 0)
        budget.saw(Gap(seconds=gaps[-1], num_tokens=tokens))
    return gaps, parts


def tail(gaps):
    return sorted(gaps)[int(0.99 * len(gaps))]


def test_the_delay_of_a_part_is_what_it_adds_to_a_step():
    budget, device = ChunkBudget(MOST, 0.0), Device(0.008, 0.001, 22e-6)
    assert budget.delay(1024) == 0.0
    for _ in range(300):
        budget.saw(Gap(seconds=device.gap(0), num_tokens=0))
    assert budget.delay(1024) == 0.0, "no part was seen yet"
    for number in range(400):
        tokens = 1024 * (number % 50 == 0)
        budget.saw(Gap(seconds=device.gap(tokens), num_tokens=tokens))
    assert budget.delay(1024) == pytest.approx(0.001 + 1024 * 22e-6, rel=0.15)


@pytest.mark.parametrize("share", [0.8, 1.0])
@pytest.mark.parametrize(
    ("step", "launch", "token", "slo"),
    [
        (0.010, 0.020, 20e-6, 0.05),  # a GPU: a launch is dear, a token is cheap
        (0.010, 0.000, 200e-6, 0.05),
        (0.030, 0.005, 50e-6, 0.08),
        (0.060, 0.010, 2e-3, 0.25),  # a CPU
    ],
)
def test_the_tail_of_the_gaps_stays_within_the_bound(step, launch, token, slo, share):
    budget, device = ChunkBudget(MOST, slo), Device(step, launch, token)
    played(budget, device, 400, share=share)
    gaps, parts = played(budget, device, 2000, share=share)
    assert tail(gaps) <= slo
    assert sum(parts) / len(parts) >= 0.5 * min(MOST, device.ideal(slo))


def test_a_fixed_part_of_the_same_size_for_all_breaks_the_bound():
    gaps, _ = played(ChunkBudget(MOST, 0.0), Device(0.010, 0.000, 200e-6), 500)
    assert tail(gaps) > 0.05


def test_parts_shrink_when_the_steps_get_longer_and_grow_again():
    budget, device = ChunkBudget(MOST, 0.05), Device(0.010, 0.005, 100e-6)
    played(budget, device, 600)
    before = budget.tokens
    device.step = 0.030
    gaps, _ = played(budget, device, 600)
    assert budget.tokens < 0.7 * before
    assert tail(gaps[200:]) <= 0.05
    device.step = 0.010
    played(budget, device, 1200)
    assert budget.tokens > 0.8 * before


def test_prompts_go_on_where_the_steps_alone_exceed_the_bound():
    budget, device = ChunkBudget(MOST, 0.02), Device(0.030, 0.005, 100e-6)
    played(budget, device, 300)
    assert budget.tokens == LEAST_TOKENS
    assert ChunkBudget(5, 0.02).tokens == 5


def test_one_long_pause_does_not_stop_prompts_for_long():
    budget, device = ChunkBudget(MOST, 0.05), Device(0.010, 0.005, 100e-6)
    played(budget, device, 600)
    before = budget.tokens
    budget.saw(Gap(seconds=0.5, num_tokens=before))
    played(budget, device, 300)
    assert budget.tokens > 0.6 * before


def test_without_a_bound_or_a_measured_gap_the_setting_decides():
    budget = ChunkBudget(256, 0.0)
    budget.saw(Gap(seconds=9.0, num_tokens=256))
    assert budget.tokens == 256
    assert ChunkBudget(32, 0.05).tokens == 32
    assert ChunkBudget(256, 1e9).tokens < 256, "the first part is a careful one"
    roomy = ChunkBudget(256, 1e9)
    for _ in range(5):
        roomy.saw(Gap(seconds=0.01, num_tokens=64))
    assert roomy.tokens == 71, "a part is a tenth larger than the largest one of late"
    assert SHARE < 1


def test_gaps_behind_token_1_count_by_their_share_of_all():
    """One stream in ten begins before each step, and waits for a step more."""
    for share, is_kept in ((10, True), (1000, False)):
        budget, device = ChunkBudget(MOST, 0.05), Device(0.010, 0.002, 100e-6, noise=0.0)
        longest = []
        for _ in range(3000):
            tokens = budget.tokens
            gap = device.gap(tokens)
            longest.append(gap + device.step)
            firsts = (gap + device.step,) if device.rng.random() < 100 / share else ()
            budget.saw(Gap(seconds=gap, num_tokens=tokens, num_streams=100, firsts=firsts * 10))
        assert (max(longest[2000:]) <= 0.05) == is_kept, share


@pytest.mark.parametrize(("launches_ahead", "tokens"), [(False, [7, 0, 5]), (True, [5, 7, 0])])
def test_a_gap_has_the_prompt_tokens_that_were_computed_in_it(launches_ahead, tokens):
    gaps, found = StepGaps(launches_ahead=launches_ahead), []
    for at, (rooms, launched) in enumerate([("a", 5), ("ab", 12), ("b", 12), ("b", 17), ("c", 20)]):
        found.append(gaps.step([(room, 0) for room in rooms], launched, float(at)))
    assert found[0] is None
    assert [(gap.seconds, gap.num_tokens) for gap in found if gap] == [(1.0, count) for count in tokens]
    assert found[4] is None, "other streams began, and nobody waited for them"


def test_a_stream_that_begins_has_a_gap_of_its_own():
    gaps = StepGaps(launches_ahead=False)
    gaps.step([("a", 0)], 0, 1.0)
    gaps.begin([("b", 0), ("ended", 0)], 1.5)
    gap = gaps.step([("a", 0), ("b", 0)], 5, 4.0)
    assert gap == Gap(seconds=3.0, num_tokens=5, num_streams=2, firsts=(2.5,))
    assert gaps.step([("a", 0), ("b", 0)], 5, 5.0).firsts == ()
    gaps.step([("a", 0)], 5, 60.0)
    assert gaps._begun == {}
