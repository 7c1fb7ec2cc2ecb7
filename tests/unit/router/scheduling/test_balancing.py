"""The worker that each policy chooses."""

import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from baton.cluster.config.router_groups import DECODE_POLICIES, PREFILL_POLICIES
from baton.router.scheduling.balancing import decode_balancer, prefill_balancer
from baton.router.scheduling.prefixes import SeenPrompt, expect_prompt
from baton.router.workers.registry import Load
from baton.tests.unit.router.workers.test_eligibility import worker

PROMPT = SeenPrompt(range(100))  # 6 whole pages of 16


def picker(role, name, seed=0):
    make = prefill_balancer if role == "prefill" else decode_balancer
    return make(name, Random(seed))


def holding(role, load=(), prompt=PROMPT):
    """Worker "a", which has the prompt cached."""
    made = worker("a", role, load)
    expect_prompt(made, prompt, 1.0)
    return made


def picked(policy, *workers, prompt=PROMPT):
    return policy.pick(workers, prompt).instance[0]


ALL = [("prefill", name) for name in PREFILL_POLICIES] + [("decode", name) for name in DECODE_POLICIES]


@pytest.mark.parametrize(("role", "name"), ALL)
def test_every_policy_uses_every_worker_of_an_even_load(role, name):
    policy, workers = picker(role, name), [worker(letter, role) for letter in "abcd"]
    counts = Counter()
    for i in range(80):
        chosen = policy.pick(workers, SeenPrompt([i] * 100))
        chosen.ledger[str(i), 0] = Load(pages=1, tokens=100)
        policy.placed(chosen)
        counts[chosen.instance] += 1
    assert len(counts) == 4
    assert max(counts.values()) <= 26, counts


def test_cache_aware_prefill_follows_the_prefix_until_the_queue_outweighs():
    policy, idle = picker("prefill", "cache-aware"), worker("b", "prefill")  # 96 tokens cached
    assert picked(policy, holding("prefill", [(0, 95)]), idle) == "a"
    assert picked(policy, holding("prefill", [(0, 97)]), idle) == "b"
    other = SeenPrompt(range(100), "other tenant")
    assert picked(policy, holding("prefill", [(0, 1)]), idle, prompt=other) == "b"


def test_a_prompt_that_is_cached_as_a_whole_still_costs_its_last_page():
    prompt = SeenPrompt(range(96))
    policy = picker("prefill", "cache-aware")
    assert policy.cost(holding("prefill", prompt=prompt), prompt) == 16


def test_a_session_returns_to_its_decode_worker_unless_it_is_much_fuller():
    policy, idle = picker("decode", "session"), worker("b", "decode")
    assert picked(policy, holding("decode", [(10, 1)] * 2), idle) == "a"
    assert picked(policy, holding("decode", [(10, 1)] * 4), idle) == "b"
    assert picked(policy, holding("decode", [(1, 1)]), idle, prompt=SeenPrompt([7] * 100)) == "b"


def test_least_loaded_decode_counts_places_and_pages():
    policy = picker("decode", "least-loaded")
    assert picked(policy, worker("a", "decode", [(1, 1)] * 3), worker("b", "decode", [(1, 1)])) == "b"
    assert picked(policy, worker("a", "decode", [(60, 1)]), worker("b", "decode", [(5, 1)] * 2)) == "b"


def test_round_robin_goes_round_whatever_the_load_and_a_newcomer_is_next():
    policy, first = (
        picker("decode", "round-robin"),
        [worker("a", "decode", [(50, 1)] * 4), worker("b", "decode")],
    )
    order = ""
    for workers in [first] * 4 + [[*first, worker("c", "decode")]] * 3:
        chosen = policy.pick(workers, PROMPT)
        policy.placed(chosen)
        order += chosen.instance[0]
    assert order == "ababcab"


def test_power_of_two_never_takes_the_fullest_and_equal_seeds_agree():
    workers = [worker("a", "decode", [(9, 1)] * 5), worker("b", "decode", [(1, 1)]), worker("c", "decode")]
    one, other = picker("decode", "power-of-two"), picker("decode", "power-of-two")
    choices = [picked(one, *workers) for _ in range(60)]
    assert set(choices) == {"b", "c"}
    assert [picked(other, *workers) for _ in range(60)] == choices


def test_the_page_on_the_router_describes_every_policy_and_no_other():
    page = (Path(__file__).resolve().parents[4] / "docs/router.md").read_text()
    for heading, names in (("--prefill-policy", PREFILL_POLICIES), ("--decode-policy", DECODE_POLICIES)):
        table = page.partition(f"| `{heading}`")[2].partition("\n\n")[0]
        cells = [line.split("|")[1] for line in table.splitlines()[2:]]
        assert re.findall(r"`([a-z-]+)`", "".join(cells)) == list(names)
