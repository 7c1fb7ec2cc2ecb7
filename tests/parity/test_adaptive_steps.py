"""Steps that change from verify to verify, to none and back: tokens stay, and the draft is ready at once."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from baton.engine.auto_sizes import LATE_ROWS
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.adaptive import StepCosts, StepPolicy
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape
from baton.engine.speculative.step.device_state import PAD_SLOT
from baton.engine.speculative.step.fused_step import StepKind
from baton.kernels.step_glue import DRAFT_ROW, LENGTH, NEWEST, REMAINING
from baton.tests.parity import eagle3_engine
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.graph_engine import arena, with_graphs
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)))


def greedy(max_new_tokens: int = 20, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True, **changes)


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=11, max_new_tokens=16, ignore_eos=True, **changes)


class Scripted(StepPolicy):
    """Chooses what it is told, step by step, and remembers what it hears."""

    def __init__(self, shapes: list[DraftShape], script: list[int]) -> None:
        super().__init__(shapes, StepCosts(draft=0.1, knee_rows=100.0))
        self.script, self.heard = script, []

    def choose(self, batch_size: int, context: int = 0) -> DraftShape:
        self.current = self.shapes[self.script.pop(0)] if self.script else self.shapes[-1]
        return self.current

    def observe(self, kept: Sequence[int], tried: Sequence[int]) -> None:
        self.heard.append((sum(kept), sum(tried)))


CHAINS = [DraftShape.of(steps) for steps in (0, 1, 3)]
TREES = [PLAIN, DraftShape.of(2, 2, 7)]


@pytest.mark.parametrize(
    ("shapes", "has_graphs"),
    [
        pytest.param(CHAINS, True, id="chain-graphs"),
        pytest.param(TREES, False, id="tree"),
        slow(CHAINS, False, id="chain"),
        slow(TREES, True, id="tree-graphs"),
    ],
)
def test_the_oracle_is_accepted_in_full_when_drafting_resumes(
    oracle: tuple[Path, Path], shapes: list[DraftShape], has_graphs: bool
) -> None:
    """The drafter observes the rows of plain steps late, but before the next step with drafts."""
    script = [0] * (LATE_ROWS + 1) + [len(shapes) - 1, 0, 1, 0]
    policy = Scripted(shapes, list(script))
    full = shapes[-1]
    engine = Engine(*oracle, steps=full.steps, topk=full.topk, tokens=full.num_nodes, policy=policy)
    if has_graphs:
        graphs = with_graphs(engine, arena())
        assert (graphs.counts()["decode"], graphs.counts()["verify"]) == (9, 9 * (len(shapes) - 1))
    assert engine.generate([[1, 2, 3], [40]], greedy(60)) == Engine(oracle[0]).generate(
        [[1, 2, 3], [40]], greedy(60)
    )
    lengths = [set(result.accept_lens) for result in engine.results]
    assert lengths[:-1] == [{1 + shapes[i].steps} for i in script] + [{1 + full.steps}] * (
        len(lengths) - 1 - len(script)
    )
    assert policy.heard[0] == (2, 2), "first proposals that were not offered would have been right"
    assert policy.heard[1] == (2 * full.steps, 2 * full.steps), "one comparison for all rows of a catch-up"
    if has_graphs:
        assert {result.path for result in engine.results} == {"graph"}


@pytest.mark.parametrize("shapes", [slow(CHAINS, id="chain"), pytest.param(TREES, id="tree")])
def test_tokens_do_not_depend_on_the_steps_of_each_verify(
    target: Path, head: Path, shapes: list[DraftShape]
) -> None:
    params = [greedy(), sampled(), sampled(top_p=0.8, repetition_penalty=1.2)]
    plain = Engine(target)
    expected = plain.run([plain.prefill(prompt, p) for prompt, p in zip(PROMPTS, params, strict=False)])
    full, script = shapes[-1], [i * i % len(shapes) for i in range(60)]
    policy = Scripted(shapes, script)
    engine = Engine(target, head, steps=full.steps, topk=full.topk, tokens=full.num_nodes, policy=policy)
    with_graphs(engine, arena())
    assert engine.run([engine.prefill(p, q) for p, q in zip(PROMPTS, params, strict=False)]) == expected
    assert all(0 <= kept <= tried for kept, tried in policy.heard)


@pytest.mark.parametrize(
    ("shapes", "has_graphs"),
    [
        pytest.param(CHAINS, False, id="chain"),
        pytest.param(TREES, False, id="tree"),
        pytest.param(CHAINS, True, id="chain-graphs"),
        slow(TREES, True, id="tree-graphs"),
    ],
)
def test_rows_observed_late_give_the_draft_kv_of_rows_observed_at_once(
    target: Path, head: Path, shapes: list[DraftShape], has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, found = shapes[-1], []
    for late in (8, 0):
        monkeypatch.setattr(Eagle3Drafter, "late_rows", late)
        policy = Scripted(shapes, [0] * 19 + [1, 0, 0, 1] + [0] * 9)
        engine = Engine(target, head, steps=full.steps, topk=full.topk, tokens=full.num_nodes, policy=policy)
        if has_graphs:
            with_graphs(engine, arena())
        params = (greedy(50), greedy(30), sampled())
        requests = [engine.prefill(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        tokens = engine.run(requests)
        assert engine.decoder.steps.late_rows == late
        kv, size = engine.drafter.pool.kv, engine.drafter.page_size
        rows = [  # but the newest, which the drafter may still have to see
            kv[request.pages[i // size], :, :, i % size]
            for request in requests
            for i in range(request.num_tokens - 10)
        ]
        found.append((tokens, [result.accept_lens for result in engine.results], torch.stack(rows).clone()))
    (tokens, lengths, kv), (same_tokens, same_lengths, same_kv) = found
    assert (tokens, lengths) == (same_tokens, same_lengths)
    assert torch.allclose(kv, same_kv, atol=1e-4)


def test_the_policy_sees_warm_requests_only_and_at_most_what_was_drafted(
    oracle: tuple[Path, Path],
) -> None:
    script = [2, *[0] * (LATE_ROWS + 1)]
    policy = Scripted(CHAINS, list(script))
    engine = Engine(*oracle, policy=policy, aux_ids=(1, 3, 4))
    cold, warm = (engine.prefill(prompt, greedy(60)) for prompt in ([1, 2], [40]))
    engine.decoder.forget(cold)
    for _ in script:
        engine.decoder.step([cold, warm])
    assert policy.heard == [(0, 1), (0, 1)]


def test_unrequested_proposals_match_where_drafts_would_have(oracle: tuple[Path, Path]) -> None:
    """At temperature 1 a proposal depends on the noise of its position, which must be that of the target's
    choice. Steps without drafts tell it when the drafter catches up."""
    heard = []
    for script in ([0] * (LATE_ROWS + 1), [1]):
        policy = Scripted(CHAINS, list(script))
        engine = Engine(*oracle, policy=policy)
        params = [sampled() for _ in range(8)]
        requests = [engine.prefill([7 * i + 1, 3 * i], p) for i, p in enumerate(params)]
        for _ in script:
            engine.decoder.step(requests)
        heard.append(policy.heard)
    assert heard[0] == heard[1]
    ((kept, tried),) = heard[0]
    assert 0 < kept <= tried == 8


@pytest.mark.parametrize("shapes", [pytest.param(CHAINS, id="chain"), slow(TREES, id="tree")])
def test_measured_steps_leave_no_trace_and_cost_time(
    target: Path, head: Path, shapes: list[DraftShape]
) -> None:
    full = shapes[-1]
    policy = Scripted(shapes, [i % len(shapes) for i in range(20)])
    engine = Engine(target, head, steps=full.steps, topk=full.topk, tokens=full.num_nodes, policy=policy)
    graphs = with_graphs(engine, arena(), max_batch=engine.decoder.steps.max_requests)
    costs = graphs.measure_steps(engine.decoder.steps)
    assert costs is not None
    assert set(costs.seconds) == set(shapes)
    assert all(seconds > 0 for measured in costs.seconds.values() for seconds in measured.values())
    for pool in (engine.runner.pool, engine.drafter.pool):
        assert not pool.kv[1:].any()
    assert engine.decoder.steps.step.state.num_open == 0
    assert graphs.counters()["graph_replays_decode_step"] == 0
    requests = [engine.prefill(prompt, greedy()) for prompt in PROMPTS]
    plain = Engine(target)
    assert engine.run(requests) == plain.run([plain.prefill(prompt, greedy()) for prompt in PROMPTS])


@pytest.mark.parametrize("num_pages", [400, pytest.param(9, id="a-pool-for-few")])
def test_measured_steps_are_of_requests_that_differ(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    """At each size they begin with equal states, with tokens of their own, and none ends within the steps."""
    monkeypatch.setattr(eagle3_engine, "NUM_PAGES", num_pages)
    engine = Engine(target, head, steps=3, policy=Scripted(CHAINS, []))
    steps = engine.decoder.steps
    graphs = with_graphs(engine, arena(), max_batch=steps.max_requests)
    seen: dict[tuple[StepKind, int], list[torch.Tensor]] = {}
    launch = steps.launch

    def watched(slots: tuple[int, ...], kind: StepKind) -> object:
        own = [slot for slot in slots if slot != PAD_SLOT]
        states = steps.step.state.integers[own]
        assert len(set(states[:, DRAFT_ROW].tolist())) == len(own)
        assert (states[:, REMAINING] > kind.shape.steps).all()
        is_cut = num_pages < 400 and len(slots) == steps.max_requests  # padding requests fill it up
        assert 1 <= len(own) < len(slots) if is_cut else own
        assert len(own) == len(slots) or num_pages < 400
        seen.setdefault((kind, len(slots)), []).append(states.clone())
        return launch(slots, kind)

    monkeypatch.setattr(steps, "launch", watched)
    assert graphs.measure_steps(steps) is not None
    assert len(seen) == len(CHAINS) * 4  # 1, 2, 4 and 8 requests
    for (kind, _), (first, *later) in seen.items():
        assert len(set(first[:, NEWEST].tolist())) == len(first)
        assert torch.equal(first, seen[kind, 8][0][: len(first)])
        assert later
        assert all((each[:, LENGTH] > first[:, LENGTH]).all() for each in later)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_kv_is_read_at_the_rate_of_the_weights_of_a_step(
    toy_checkpoint: Callable[..., Path], family: str
) -> None:
    """A step of one request reads 3 of 6 experts."""
    engine = Engine(toy_checkpoint(family))
    graphs = with_graphs(engine, arena(), max_batch=engine.decoder.steps.max_requests)
    costs = graphs.measure_steps(engine.decoder.steps)
    experts = {True: 0, False: 0}
    for name, weight in engine.runner.model.tensors():
        experts[".experts." in name] += weight.nbytes
    assert bool(experts[True]) is (family == "qwen3_moe")
    layout = engine.runner.pool.layout
    rate = (experts[False] + experts[True] * 3 / 6) / costs.seconds[PLAIN][1]
    assert costs.kv_seconds == pytest.approx(layout.page_bytes / layout.page_size / rate)


def test_nothing_is_measured_without_graphs_of_all_batch_sizes(target: Path, head: Path) -> None:
    engine = Engine(target, head, steps=3, policy=Scripted(CHAINS, []))
    graphs = with_graphs(engine, arena(), max_batch=1)
    assert graphs.measure_steps(engine.decoder.steps) is None
