"""Steps launched before the one before was read say what steps say that wait for each other."""

import random
from pathlib import Path

import pytest
import torch
from baton.engine.request import Request
from baton.engine.sampling import choose, edits, logprobs
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape
from baton.engine.speculative.step import fused_step
from baton.engine.speculative.step.result import StepResult
from baton.engine.speculative.step.step_graphs import StepGraphs
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.overlap_engine import LateSteps, counting_reads, overlapped, run_ahead
from baton.tests.parity.test_adaptive_steps import Scripted
from baton.tests.variants import slow, witnesses

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)), [250, 3, 250, 3, 250, 3])
DRAFTS = {"off": None, "chain": (3, 1, 0), "tree": (3, 4, 8)}
GREEDY = ({"temperature": 0.0},) * 4
MIXED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "seed": 8, "top_k": 5},
    {"temperature": 0.9, "seed": 9, "top_p": 0.8, "min_p": 0.01},
)
EDITED = (
    {"temperature": 0.0, "frequency_penalty": 0.9, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "logit_bias": {5: 3.0, 9: -4.0}, "presence_penalty": 0.6},
    {"temperature": 1.0, "seed": 8, "top_k": 5, "logprobs": 0},
    {"temperature": 0.9, "seed": 9, "top_p": 0.8, "min_p": 0.01, "min_new_tokens": 9},
)
Params = tuple[dict[str, object], ...]


def engine_of(target: Path, head: Path, drafts: str, **options: object) -> Engine:
    shape = DRAFTS[drafts]
    if shape is None:
        return Engine(target, steps=0, **options)
    steps, topk, tokens = shape
    return Engine(target, head, steps=steps, topk=topk, tokens=tokens, **options)


def requests_of(engine: Engine, params: Params = MIXED, **changes: object) -> list[Request]:
    """One request per prompt, each with its own way of choosing tokens and its own length."""
    made = []
    for i, (prompt, choice) in enumerate(zip(PROMPTS, params, strict=True)):
        values = {"max_new_tokens": 11 + 4 * i, "ignore_eos": True, **choice, **changes}
        made.append(engine.prefill(prompt, SamplingParams(**values)))
    return made


@pytest.mark.parametrize(
    ("graphs", "steps"),
    [(False, LateSteps), (True, StepGraphs), slow(True, LateSteps)],
    ids=["eager-late", "graphs", "graphs-late"],
)
@pytest.mark.parametrize("drafts", witnesses(DRAFTS, {"off", "tree"}))
def test_the_tokens_are_those_of_steps_that_wait(
    target: Path, head: Path, drafts: str, graphs: bool, steps: type[StepGraphs]
) -> None:
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting))
    engine = engine_of(target, head, drafts)
    overlapped(engine, graphs=graphs, steps=steps)
    requests = requests_of(engine)
    results = run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == expected
    assert {result.path for result in results} == (
        {"late"} if steps is LateSteps else {"graph" if graphs else "eager"}
    )
    assert not engine.decoder.fallbacks


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_results_are_those_of_steps_that_wait(target: Path, head: Path, drafts: str) -> None:
    """Tokens, accept lengths and drafts of each step, as long as nobody has ended."""
    engines = [engine_of(target, head, drafts) for _ in range(2)]
    overlapped(engines[1])
    requests = [requests_of(engine, GREEDY, max_new_tokens=24) for engine in engines]
    late, waiting = run_ahead(engines[1], requests[1]), []
    while not any(request.is_finished for request in requests[0]):
        waiting.append(engines[0].decoder.step(requests[0]))
    assert len(waiting) > 4
    for ours, theirs in zip(late, waiting, strict=False):
        assert (ours.tokens, ours.accept_lens, ours.drafted, ours.is_bad) == (
            theirs.tokens, theirs.accept_lens, theirs.drafted, theirs.is_bad,
        )  # fmt: skip


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_token_that_ends_a_request_inside_a_block_ends_it_there(
    target: Path, head: Path, drafts: str
) -> None:
    free = engine_of(target, head, drafts)
    texts = free.run(requests_of(free))
    stops = tuple(sorted({text[7] for text in texts}))
    expected = engine_of(target, head, drafts)
    wanted = expected.run(requests_of(expected, stop_token_ids=stops))
    engine = engine_of(target, head, drafts)
    overlapped(engine, steps=LateSteps)
    requests = requests_of(engine, stop_token_ids=stops)
    run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == wanted
    assert {request.finish_reason for request in requests} == {"stop"}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "shapes", [slow([PLAIN, DraftShape.of(1), DraftShape.of(3)]), [PLAIN, DraftShape.of(2, 2, 7)]]
)
def test_a_step_policy_sees_the_acceptance_one_step_late(
    oracle: tuple[Path, Path], shapes: list[DraftShape], graphs: bool
) -> None:
    full, script = shapes[-1], [0, 0, len(shapes) - 1, 0, 1, 0]
    policies = [Scripted(shapes, list(script)) for _ in range(2)]
    engines = [
        Engine(*oracle, steps=full.steps, topk=full.topk, tokens=full.num_nodes, policy=policy)
        for policy in policies
    ]
    overlapped(engines[1], graphs=graphs)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    requests = [[engine.prefill(prompt, params) for prompt in ([1, 2, 3], [40])] for engine in engines]
    results = run_ahead(engines[1], requests[1])
    assert engines[0].run(requests[0]) == [request.output_ids for request in requests[1]]
    assert [result.accept_lens for result in results[: len(script)]] == [
        [1 + shapes[i].steps] * 2 for i in script
    ]
    assert policies[1].heard[: len(script)] == policies[0].heard[: len(script)]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager-late", "graphs"])
@pytest.mark.parametrize("drafts", witnesses(DRAFTS, {"off", "tree"}))
def test_edited_requests_are_launched_ahead_beside_others(
    target: Path, head: Path, drafts: str, graphs: bool
) -> None:
    """Penalties, biases, minimum lengths and logprobs: tokens and logprobs are those of steps that wait."""
    stops = {"stop_token_ids": tuple(range(0, 256, 12))}
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting, EDITED, **stops))
    free = engine_of(target, head, drafts)
    assert free.run(requests_of(free, EDITED)) != expected, "some request is stopped"
    engine = engine_of(target, head, drafts)
    overlapped(engine, graphs=graphs, steps=StepGraphs if graphs else LateSteps)
    requests = requests_of(engine, EDITED, **stops)
    results = run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == expected
    assert requests[3].num_output > 9
    assert not engine.decoder.fallbacks
    assert {result.path for result in results} == {"graph" if graphs else "late"}
    found, wanted = (logprobs_of(each, [0, 2]) for each in (results, waiting.results))
    assert len(found) == len(wanted) > 8
    for ours, theirs in zip(sorted(found), sorted(wanted), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def logprobs_of(results: list[StepResult], num_tops: list[int]) -> list[tuple[float, ...]]:
    """Each token's log probability and those of the likeliest."""
    entries = [entry for result in results for mine in result.logprobs for entry in mine]
    assert {len(entry.top) for entry in entries} == set(num_tops)
    return [(entry.logprob, *(value for _, value in entry.top)) for entry in entries]


@pytest.mark.parametrize("drafts", ["off", "chain"])
def test_a_nucleus_wider_than_the_devices_candidates_uses_the_host(
    target: Path, head: Path, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps under way give it nothing and change nothing, its draft state included."""
    params = (*MIXED[:3], {"temperature": 3.0, "seed": 9, "top_p": 0.97})
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting, params))

    def as_on_a_device(*args: object, is_ranked: bool, is_exact: bool) -> object:
        form = choose.choose_exact if is_exact else choose.choose_fixed
        return form(*args, is_ranked=is_ranked)

    monkeypatch.setattr(fused_step, "choose_tokens", as_on_a_device)
    engine = engine_of(target, head, drafts)
    overlapped(engine)
    requests = requests_of(engine, params)
    states = [] if engine.drafter is None else [x.clone() for x in engine.drafter.anchors]
    with monkeypatch.context() as narrow:
        narrow.setattr(choose, "NUCLEUS_WIDTH", 16)
        flight = engine.decoder.launch(requests)
        first = engine.decoder.read(flight, [True] * 4)
        assert (first.tokens[3], first.is_bad) == ([], [False] * 4)
        for before, now in zip(states, engine.drafter.anchors if states else (), strict=True):
            place = engine.decoder.coverage.known[requests[3]].row
            assert torch.equal(before[place], now[place])
            assert not torch.equal(before, now), "the other requests moved on"
        results = run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == expected
    assert set(engine.decoder.fallbacks) == {"nucleus"}
    assert len(results) > 5


@pytest.mark.parametrize("drafts", witnesses(DRAFTS, {"off", "chain"}))
def test_requests_joining_and_leaving_change_no_other_requests_tokens(
    target: Path, head: Path, drafts: str
) -> None:
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting))
    for seed in range(2):
        rng, engine = random.Random(seed), engine_of(target, head, drafts)
        decoder = overlapped(engine, graphs=seed == 0, steps=LateSteps if seed % 2 else StepGraphs)
        requests = requests_of(engine)
        left = engine.prefill(
            PROMPTS[0], SamplingParams(temperature=1.0, seed=3, max_new_tokens=30, ignore_eos=True)
        )
        present, gone = [requests[0], left], set()
        while len(present) < 5 or not all(request.is_finished for request in requests):
            budget = decoder.num_launched + rng.randrange(1, 4)
            run_ahead(
                engine,
                [r for r in present if r not in gone],
                until=lambda b=budget, d=decoder: d.num_launched >= b,
            )
            if len(present) < 5:
                present.append(requests[len(present) - 1])
            elif left not in gone:
                gone.add(left)
                decoder.forget(left)
        assert [request.output_ids for request in requests] == expected
        for request in requests:
            decoder.forget(request)
        assert decoder.steps.step.state.num_open == 0


@pytest.mark.parametrize("drafts", witnesses(DRAFTS, {"off", "tree"}))
def test_a_steady_step_neither_synchronises_nor_allocates(target: Path, head: Path, drafts: str) -> None:
    engine = engine_of(target, head, drafts)
    decoder = overlapped(engine, graphs=True)
    requests = requests_of(engine, max_new_tokens=40)
    flight = decoder.read(decoder.launch(requests), [True] * 4) and decoder.launch(requests)
    reads = counting_reads()
    for _ in range(3):
        with reads, reads.operations:
            newer = decoder.launch(requests)
            result = decoder.read(flight, [True] * 4)
        assert all(result.tokens)
        flight = newer
    assert reads.seen == []
    assert reads.num_kept == 0


@pytest.mark.parametrize("drafts", DRAFTS)
def test_steps_that_wait_and_steps_ahead_in_turn_give_the_same_tokens(
    target: Path, head: Path, drafts: str
) -> None:
    """A request that was stepped by `step` and then launched ahead stays where it is when another one
    joins."""
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting))
    engine = engine_of(target, head, drafts)
    decoder = overlapped(engine)
    requests = requests_of(engine)
    for count in range(1, 5):
        live = requests[:count]
        decoder.step(live)
        flight = decoder.launch(live)
        newer = decoder.launch(live)
        decoder.read(flight, [True] * count)
        decoder.read(newer, [not request.is_finished for request in live])
        decoder.step([request for request in live if not request.is_finished])
    run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == expected


def test_a_padding_row_advances_no_request(target: Path, head: Path) -> None:
    """Not the request that had the place before, which was cancelled and whose pages belong to another
    now."""
    engine, alone = (engine_of(target, head, "chain") for _ in range(2))
    decoder = overlapped(engine, graphs=True)
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    first, second, left, cancelled = (engine.prefill([9, 4 + i], params, pages=12) for i in range(4))
    decoder.step([first, second, left, cancelled])
    for request in (cancelled, left):
        decoder.forget(request)
    engine.next_page = min(cancelled.pages)
    joining = engine.prefill(PROMPTS[2], params, pages=16)
    assert set(cancelled.pages) < set(joining.pages)
    run_ahead(engine, [first, second, joining])
    assert joining.output_ids == alone.generate([PROMPTS[2]], params)[0]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_bad_logits_behind_rejected_drafts_fail_no_request(
    target: Path, head: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain = (engine_of(target, head, "chain") for _ in range(2))
    compute = engine.runner.model.compute_logits

    def bad_at_the_last_node(rows: torch.Tensor) -> torch.Tensor:
        logits = compute(rows)
        is_step = rows.shape[0] % 4 == 0
        last = torch.arange(rows.shape[0], device=rows.device) % 4 == 3
        return logits.masked_fill(last[:, None], float("nan")) if is_step else logits

    with monkeypatch.context() as broken:
        broken.setattr(engine.runner.model, "compute_logits", bad_at_the_last_node)
        overlapped(engine, graphs=graphs)
    requests = requests_of(engine, GREEDY)
    monkeypatch.setattr(engine.runner.model, "compute_logits", bad_at_the_last_node)
    result = engine.decoder.step(requests)
    assert max(result.accept_lens) < 4, "else the last node would be read"
    assert result.is_bad == [False] * 4
    expected = plain.run(requests_of(plain, GREEDY))
    for request, wanted in zip(requests, expected, strict=True):
        assert request.output_ids == wanted[: request.num_output]
        assert request.num_output > 1


@pytest.mark.parametrize("drafts", witnesses(DRAFTS, {"off", "tree"}))
def test_the_fixed_forms_of_a_device_can_be_recorded_and_choose_the_same(
    target: Path, head: Path, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tape records their insides, refusing whatever looks at the host."""
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting, EDITED))

    def choose_as_on_a_device(*args: object, is_ranked: bool, is_exact: bool) -> object:
        assert not is_exact
        return choose.choose_fixed(*args, is_ranked=is_ranked)

    def edit_as_on_a_device(
        logits: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        given: edits.LogitEdits,
        **more: object,
    ) -> torch.Tensor:
        return edits.edit_fixed(
            logits, positions, slots, given, more["drafts"], more["ancestors"], more["masks"]
        )

    monkeypatch.setattr(fused_step, "choose_tokens", choose_as_on_a_device)
    monkeypatch.setattr(fused_step, "edit_logits", edit_as_on_a_device)
    monkeypatch.setattr(fused_step, "top_logprobs", logprobs.top_fixed)
    engine = engine_of(target, head, drafts)
    made = engine.decoder.steps
    made.kinds = tuple(kind for kind in made.kinds if kind.is_edited)
    engine.step_graphs = lambda _: made
    overlapped(engine, graphs=True)
    requests = requests_of(engine, EDITED)
    results = run_ahead(engine, requests)
    assert {result.path for result in results} == {"graph"}
    assert [request.output_ids for request in requests] == expected
    found, wanted = (logprobs_of(each, [0, 2]) for each in (results, waiting.results))
    for ours, theirs in zip(sorted(found), sorted(wanted), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
