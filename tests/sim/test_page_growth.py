"""Decode takes pages as tokens come, and a full pool takes them from the newest room: same answers, no leak.

Free pages hold NaN and are looked at after every turn, so a row that is read or written outside of a room's
pages is found.
"""

import random
from functools import partial

import pytest
from baton.cluster.protocol.messages import Cancel, Failed, Finished, Prefill, Refused, Reserve, Sampling
from baton.engine.speculative.step.step_graphs import step_graphs
from baton.router.rooms.attempt import RETRACTED
from baton.router.scheduling.output_estimates import claim_of
from baton.tests.parity.overlap_engine import LateSteps
from baton.tests.sim.test_workers import prompts
from baton.tests.sim.worker_pair import ENDPOINT, D, P, Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

DRAFTS = {"off": None, "chain": {}, "tree": {"spec_topk": 3, "spec_tokens": 8}}
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
    {"temperature": 0.0, "logprobs": 2},
)
NUM_TOKENS = 30
EXPECTED = 3  # far too few, so that the pool fills up
MOST_TURNS = 3000


class Asked:
    """A request as a router keeps it: each attempt is a room of its own and continues the tokens so far."""

    def __init__(self, pair, number, prompt, sampling, *, is_local=False, priority=0):
        self.pair, self.number, self.prompt, self.is_local = pair, number, list(prompt), is_local
        self.priority = priority
        self.sampling = {"ignore_eos": True, "max_new_tokens": NUM_TOKENS, **sampling}
        self.told, self.retractions, self.attempt, self.is_done = [], 0, -1, False
        self.start()

    @property
    def room(self):
        return name(10_000 * self.number + self.attempt)

    def start(self):
        self.attempt += 1
        left = self.sampling["max_new_tokens"] - len(self.told)
        expected, granted = claim_of(EXPECTED, len(self.told), left, self.retractions)
        common = {
            "room": self.room,
            "epoch": 0,
            "prompt_ids": self.prompt + self.told,
            "num_output": len(self.told),
            "sampling": Sampling(**{**self.sampling, "max_new_tokens": left}),
            "deadline_ms": 0,
            "priority": self.priority,
        }
        where = {} if self.is_local else {"prefill_endpoint": ENDPOINT, "prefill_instance": P}
        order = Reserve(instance=D, expected_output=expected, granted_output=granted, **where, **common)
        self.pair.decode.handle(order, self.pair.clock.now)
        link = self.pair.links[D]
        refused = [m for m in link.to_router if isinstance(m, Refused) and m.room == self.room]
        if not refused and not self.is_local:
            keeps_pages = self.retractions > 0
            self.pair.prefill.handle(
                Prefill(instance=P, keeps_pages=keeps_pages, **common), self.pair.clock.now
            )
        self.is_waiting = bool(refused)

    def follow(self):
        """Reads the attempt's end, if it has one, and begins another where its pages were taken back."""
        end = self.pair.ends.get(self.room)
        refused = [m for m in self.pair.refused if m.room == self.room]
        if refused and not self.is_waiting:  # by a worker that had it in its queue
            for instance, worker in ((P, self.pair.prefill), (D, self.pair.decode)):
                worker.handle(Cancel(room=self.room, epoch=0, instance=instance), self.pair.clock.now)
            self.start()
            return
        if self.is_waiting:
            self.start()
        elif isinstance(end, Failed):
            assert (end.kind, end.retryable) == (RETRACTED, True), end
            self.told += self.pair.tokens.get(self.room, [])  # none, where its prompt was still on its way
            for instance, worker in ((P, self.pair.prefill), (D, self.pair.decode)):
                worker.handle(Cancel(room=self.room, epoch=0, instance=instance), self.pair.clock.now)
            self.retractions += 1
            self.start()
        elif isinstance(end, Finished) and not self.is_done:
            self.told += self.pair.tokens[self.room]
            self.is_done = True


def pair_of(target, head, drafts, **settings):
    shape = DRAFTS[drafts]
    return Pair(target, head if shape is not None else "", **{**(shape or {}), **settings})


def played(pair, asked, rng=None):
    """Turns until every request of `asked` is done."""
    for _ in range(MOST_TURNS):
        pair.turn(rng)
        for each in asked:
            each.follow()
        if all(each.is_done for each in asked):
            pair.run(rng)
            return
    raise AssertionError(f"not done after {MOST_TURNS} turns: {pair.decode!r}")


def undisturbed(target, head, drafts, wanted):
    pair = pair_of(target, head, drafts, pages=400, max_running=8)
    for i, (prompt, sampling) in enumerate(wanted):
        pair.send(name(i), prompt, **{"max_new_tokens": NUM_TOKENS, **sampling})
        pair.run(turns=2000)
    return [pair.tokens[name(i)] for i in range(len(wanted))]


@pytest.mark.parametrize(
    ("drafts", "overlap", "is_local", "graphs"),
    [
        ("off", "on", False, "off"),
        ("chain", "off", True, "off"),
        pytest.param("tree", "on", False, "off", marks=pytest.mark.slow),
        pytest.param("off", "off", False, "off", marks=pytest.mark.slow),
        pytest.param("off", "on", True, "off", marks=pytest.mark.slow),
        pytest.param("chain", "on", False, "off", marks=pytest.mark.slow),
        pytest.param("chain", "on", False, "on", marks=pytest.mark.slow),
        pytest.param("tree", "off", True, "on", marks=pytest.mark.slow),
    ],
)
def test_retracted_requests_give_the_tokens_of_an_undisturbed_run(
    target, head, drafts, overlap, is_local, graphs, monkeypatch
):
    if overlap == "on":
        monkeypatch.setattr("baton.engine.loader.step_graphs", partial(step_graphs, make=LateSteps))
    rng = random.Random(f"{drafts}{overlap}{is_local}")
    wanted = [(prompt, SAMPLING[i % len(SAMPLING)]) for i, prompt in enumerate(prompts(rng, 6))]
    pair = pair_of(
        target, head, drafts, overlap=overlap, graphs=graphs, graph_self_test=False, pages=34, max_running=8
    )
    pair.decode.growth.ahead_tokens = 4
    asked = [
        Asked(pair, i, prompt, sampling, is_local=is_local) for i, (prompt, sampling) in enumerate(wanted)
    ]
    played(pair, asked)
    retracted = [each.retractions for each in asked]
    assert sum(retracted) >= 3, "the pool was never full, so this shows nothing"
    assert pair.decode.stats().counters["retractions"] == sum(retracted)
    assert max(retracted) <= 5, "each grant is twice the one before"
    assert [each.told for each in asked] == undisturbed(target, head, drafts, wanted)
    pair.assert_nothing_is_held()


def test_more_requests_run_at_once_than_whole_outputs_fit(target, head):
    pairs = {}
    for grows in (True, False):
        pair = pairs[grows] = pair_of(target, head, "off", pages=40, max_running=8)
        pair.decode.growth.is_on, pair.decode.growth.ahead_tokens = grows, 4
        asked = [Asked(pair, i, [7, 8, 9, i], {"temperature": 0.0}) for i in range(8)]
        most = 0
        for _ in range(MOST_TURNS):
            pair.turn()
            most = max(most, pair.decode.stats().running)
            for each in asked:
                each.follow()
            if all(each.is_done for each in asked):
                break
        pairs[grows] = most
    assert pairs == {True: 8, False: 4}, "40 pages of 4 tokens, 35 tokens each"


def test_the_newest_room_gives_its_pages_up(target, head):
    pair = pair_of(target, head, "off", pages=30, max_running=8)
    pair.decode.growth.ahead_tokens = 0
    asked = [Asked(pair, i, [7, 8, 9, i], {"temperature": 0.0}) for i in range(4)]
    played(pair, asked)
    retracted = [each.retractions for each in asked]
    assert retracted[0] == 0, "the oldest"
    assert sum(retracted) > 0
    assert sum(retracted[2:]) >= sum(retracted[:2])


def test_a_room_without_an_expectation_holds_its_whole_output(target, head):
    pair = pair_of(target, head, "off", pages=24, max_running=8)
    pair.send(name(0), [7, 8, 9], max_new_tokens=60)  # as of a router that does not expect anything
    while pair.decode.stats().running == 0:
        pair.turn()
    assert len(pair.decode.queues.get(name(0), 0).request.pages) == 16
    newer = Asked(pair, 9, [5, 6], {"temperature": 0.0})
    for _ in range(300):
        pair.turn()
        newer.follow()
    assert len(pair.tokens[name(0)]) == 60
    assert isinstance(pair.ends[name(0)], Finished)
    assert newer.is_done
