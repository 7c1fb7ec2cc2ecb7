"""As many first tokens within the objective as any order could bring, and no prompt starves."""

import itertools
import random

import pytest
from baton.cluster.protocol.request_rank import PRIORITY_S
from baton.worker.first_token_plan import (
    FORWARD_SHARE,
    LATE_SHARE,
    FirstTokenPlan,
    ForwardPace,
    Prompt,
    shortest_first,
    split_late,
)
from hypothesis import given
from hypothesis import strategies as st

TOKEN_S, LAUNCH_S = 1e-4, 5e-3
BUDGET = 1000


def prompt(name, tokens, due, *, arrived=0.0, priority=0):
    return Prompt(item=name, tokens=tokens, arrived=arrived, due=due, priority=priority)


def ends(order):
    """(prompt, end) of prompts that are computed one after the other, a token a second."""
    return list(zip(order, itertools.accumulate(each.tokens for each in order), strict=True))


def num_on_time(order):
    return sum(end <= each.due for each, end in ends(order))


prompts = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=6).map(
    lambda drawn: [prompt(i, tokens, float(due)) for i, (tokens, due) in enumerate(drawn)]
)


@given(prompts)
def test_no_order_has_more_prompts_on_time(waiting):
    on_time, late = split_late(waiting, 0.0, 1.0)
    assert sorted(map(id, on_time + late)) == sorted(map(id, waiting))
    most = max(num_on_time(order) for order in itertools.permutations(waiting))
    assert len(on_time) == most == num_on_time(sorted(on_time, key=lambda each: each.due) + late)


@given(prompts)
def test_no_order_that_keeps_all_on_time_has_a_shorter_wait(waiting):
    on_time, _ = split_late(waiting, 0.0, 1.0)
    order = shortest_first(on_time, 0.0, 1.0)
    assert num_on_time(order) == len(on_time)
    able = [each for each in itertools.permutations(on_time) if num_on_time(each) == len(on_time)]
    assert sum(end for _, end in ends(order)) == min(sum(end for _, end in ends(each)) for each in able)


class Device:
    """Prompts that come, and a device that computes them as it is told, in virtual time."""

    def __init__(self, *, slo=0.5, noise=0.0, is_cut=True, plans=True, seed=0):
        self.plan, self.now, self.is_cut = FirstTokenPlan(slo), 0.0, is_cut
        self.noise, self.plans, self.rng = noise, plans, random.Random(seed)
        self.waiting, self.ended = [], []  # [name, left, arrived, priority]

    def come(self, name, tokens, *, arrived=None, priority=0):
        self.waiting.append([name, tokens, self.now if arrived is None else arrived, priority])

    def forward(self):
        """One forward. Returns [(name, tokens)]."""
        made = [
            prompt(each[0], each[1], each[2] + self.plan.slo_s, arrived=each[2], priority=each[3])
            for each in self.waiting
        ]
        if self.plans:
            budget = self.plan.budget(BUDGET) if self.is_cut else BUDGET
            ordered, owed = self.plan.order(made, budget, self.now)
        else:  # first come, first served
            budget, ordered, owed = BUDGET, made, None
        shares = self.plan.fill(ordered, owed, budget=budget, most=64, now=self.now, is_cut=self.is_cut)
        total = sum(share.tokens for share in shares)
        seconds = (LAUNCH_S + TOKEN_S * total) * (1 + self.noise * self.rng.random())
        self.now += seconds
        if self.plans:
            self.plan.pace.saw(total, seconds)
        for share in shares:
            each = next(one for one in self.waiting if one[0] == share.item)
            each[1] -= share.tokens
            assert each[1] >= 0
            if not each[1]:
                self.waiting.remove(each)
                self.ended.append((each[0], self.now - each[2]))
        return [(share.item, share.tokens) for share in shares]

    def run(self, arrivals, until):
        """`arrivals`: (time, tokens, priority), in order."""
        names = itertools.count(len(self.ended) + len(self.waiting))
        arrivals = list(arrivals)
        while self.now < until:
            while arrivals and arrivals[0][0] <= self.now:
                at, tokens, priority = arrivals.pop(0)
                self.come(next(names), tokens, arrived=at, priority=priority)
            if self.waiting:
                self.forward()
            else:
                self.now = arrivals[0][0] if arrivals else until
        return self


def measured(device):
    """The device after some forwards, whose times are known."""
    for i in range(6):
        device.come(f"first {i}", 100 * (i + 1))
        device.forward()
    device.waiting.clear()
    device.ended.clear()
    return device


def mixed(rng, rate, seconds, *, long_share=0.1, shorts=(20, 300), longs=(2000, 6000)):
    """Arrivals of a Poisson process: mostly short prompts, some long ones."""
    at, found = 0.0, []
    while at < seconds:
        at += rng.expovariate(rate)
        tokens = rng.randint(*(longs if rng.random() < long_share else shorts))
        found.append((at, tokens, 0))
    return found


def share_met(device):
    return sum(wait <= device.plan.slo_s for _, wait in device.ended) / max(1, len(device.ended))


@pytest.mark.parametrize("rate", [10, 16, pytest.param(30, marks=pytest.mark.slow)])
def test_more_first_tokens_are_in_time_than_first_come_first_served(rate):
    arrivals = mixed(random.Random(rate), rate, 120.0)
    met = {}
    for plans in (True, False):
        device = Device(plans=plans, noise=0.05).run(arrivals, 120.0)
        met[plans] = sum(wait <= device.plan.slo_s for _, wait in device.ended) / len(arrivals)
    assert met[True] >= met[False]
    if rate >= 16:  # some 0.9 of what the device can do, and more
        assert met[True] > 1.5 * met[False], met
        assert met[True] > 0.6, met


def test_all_are_in_time_where_the_device_has_time_for_all():
    device = Device(noise=0.05).run(mixed(random.Random(1), 8, 200.0, longs=(800, 1500)), 200.0)
    assert share_met(device) > 0.98


def test_a_short_prompt_is_not_stuck_behind_a_long_one():
    device = measured(Device())
    device.come("long", 40 * BUDGET)
    for _ in range(3):
        device.forward()
    device.come("short", 50)
    assert device.forward()[0][0] == "short"
    waits = dict(device.ended)
    assert waits["short"] <= FORWARD_SHARE * device.plan.slo_s


def test_a_long_prompt_ends_though_short_ones_fill_the_device():
    device = measured(Device())
    device.come("long", 8 * BUDGET)
    num_forwards = 0
    while any(each[0] == "long" for each in device.waiting):
        for i in range(40):
            if len(device.waiting) < 200:
                device.come((num_forwards, i), 60)
        device.forward()
        num_forwards += 1
        assert num_forwards < 200
    budget = device.plan.budget(BUDGET)
    assert num_forwards <= 8 * BUDGET / (LATE_SHARE * budget) + 2


def test_a_long_prompt_ends_also_where_prompts_are_not_cut():
    device = measured(Device(is_cut=False))
    device.come("long", 8 * BUDGET)
    for num_forwards in range(200):
        for i in range(40):
            if len(device.waiting) < 200:
                device.come((num_forwards, i), 60)
        assert len(device.forward()) >= 1
        if not any(each[0] == "long" for each in device.waiting):
            break
    else:
        raise AssertionError("the long prompt starves")
    assert 1 < num_forwards < 60


def test_an_urgent_prompt_goes_before_the_next_part_of_a_less_urgent_one():
    device = measured(Device())
    device.come("batch", 5 * BUDGET, priority=1)
    assert {name for name, _ in device.forward()} == {"batch"}
    device.come("urgent", 3 * BUDGET)
    taken = [device.forward()[0] for _ in range(2)]
    assert {name for name, _ in taken} == {"urgent"}


def test_urgent_prompts_do_not_starve_a_less_urgent_one():
    device = measured(Device())
    device.come("batch", BUDGET, priority=1)
    start = device.now
    while any(each[0] == "batch" for each in device.waiting):
        while len(device.waiting) < 30:
            device.come(object(), 300)
        device.forward()
        assert device.now < start + 2 * PRIORITY_S, "it waits for as long as its class costs, and its share"
    assert device.now > start + PRIORITY_S


def test_a_prompt_that_ends_gets_no_company_that_makes_it_late():
    plan = FirstTokenPlan(1.0)
    for tokens in (100, 200, 300, 400):
        plan.pace.saw(tokens, 0.01 + tokens * 1e-3)
    tight, long = prompt("tight", 50, due=0.10), prompt("long", 5000, due=9.0)
    shares = plan.fill([tight, long], None, budget=500, most=8, now=0.0)
    assert shares[0].tokens == 50
    assert 0 < sum(share.tokens for share in shares) <= 91
    late = prompt("late", 50, due=0.02)  # whatever it goes with
    shares = plan.fill([late, long], None, budget=500, most=8, now=0.0)
    assert sum(share.tokens for share in shares) == 500


@pytest.mark.parametrize("size", [30, 100, 250])
def test_a_late_prompt_has_its_share_of_forwards_over_one_prompt(size):
    plan, taken = FirstTokenPlan(1.0), {"first": 0, "late": 0}
    late = prompt("late", 5000, due=0.0)
    for forward in range(1, 401):
        shares = plan.fill([prompt("first", size, due=9.0), late], late, budget=100, most=1, now=0.0)
        (share,) = shares
        taken[share.item] += share.tokens
        assert taken["late"] <= LATE_SHARE * sum(taken.values()) + 100, forward
        assert taken["late"] >= LATE_SHARE * sum(taken.values()) - 100, forward


def test_tokens_behind_others_take_the_time_of_all():
    pace = ForwardPace()
    assert pace.behind(100) is None, "nothing is known"
    for tokens in (64, 128, 256, 512):
        pace.saw(tokens, 0.01 + tokens * 1e-4)
    behind = pace.behind(100)
    assert behind is not None
    assert behind(200) == pytest.approx(0.01 + 300 * 1e-4)


def test_forwards_are_short_but_never_mostly_launch():
    pace = ForwardPace()
    assert pace.tokens_within(0.001, 512) == 512, "nothing is known"
    for tokens in (64, 128, 256, 512):
        pace.saw(tokens, 0.01 + tokens * 1e-4)
    assert pace.tokens_within(0.03, 8192) == pytest.approx(200, abs=2)
    assert pace.tokens_within(0.001, 8192) == pytest.approx(100, abs=2), "half of the time it computes"
    assert pace.tokens_within(9.0, 512) == 512


@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 400), st.floats(0, 50), st.integers(-1, 1)), min_size=1, max_size=20
    ),
    budget=st.integers(1, 200),
    most=st.integers(1, 8),
    is_cut=st.booleans(),
    now=st.floats(0, 60),
)
def test_a_forward_has_each_prompt_once_and_no_more_than_its_budget(drawn, budget, most, is_cut, now):
    plan = FirstTokenPlan(5.0)
    for tokens in (10, 20, 30):
        plan.pace.saw(tokens, 0.01 + tokens * 0.01)
    waiting = [
        prompt(i, tokens, arrived + 5.0, arrived=arrived, priority=priority)
        for i, (tokens, arrived, priority) in enumerate(drawn)
    ]
    ordered, owed = plan.order(waiting, budget, now)
    assert sorted(each.item for each in ordered) == list(range(len(waiting)))
    shares = plan.fill(ordered, owed, budget=budget, most=most, now=now, is_cut=is_cut)
    assert 1 <= len(shares) <= most
    assert len({share.item for share in shares}) == len(shares)
    assert all(1 <= share.tokens <= drawn[share.item][0] for share in shares)
    if is_cut:
        assert sum(share.tokens for share in shares) <= budget
    else:
        assert all(share.tokens == drawn[share.item][0] for share in shares)
        assert sum(share.tokens for share in shares) <= max(budget, shares[0].tokens)
    if owed is not None and (is_cut and most > 1):
        assert owed.item in [share.item for share in shares]
