"""Steps launched before the one before was read say what steps say that wait for each other."""

import random
from pathlib import Path

import pytest
from baton.engine import token_choice
from baton.engine.request import Request
from baton.engine.sampling_params import SamplingParams
from baton.engine.speculative import step_body
from baton.engine.speculative.device_steps import DeviceSteps
from baton.engine.speculative.draft_shape import PLAIN, DraftShape
from baton.engine.speculative.overlapped import host_reason
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.overlap_engine import LateSteps, counting_reads, overlapped, run_ahead
from baton.tests.parity.test_adaptive_steps import Scripted

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
Knobs = tuple[dict[str, object], ...]


def engine_of(target: Path, head: Path, drafts: str, **options: object) -> Engine:
    shape = DRAFTS[drafts]
    if shape is None:
        return Engine(target, steps=0, **options)
    steps, topk, tokens = shape
    return Engine(target, head, steps=steps, topk=topk, tokens=tokens, **options)


def requests_of(engine: Engine, knobs: Knobs = MIXED, **changes: object) -> list[Request]:
    """One request per prompt, each with its own way of choosing tokens and its own length."""
    made = []
    for i, (prompt, choice) in enumerate(zip(PROMPTS, knobs, strict=True)):
        params = {"max_new_tokens": 11 + 4 * i, "ignore_eos": True, **choice, **changes}
        made.append(engine.prefill(prompt, SamplingParams(**params)))
    return made


@pytest.mark.parametrize(
    ("graphs", "steps"),
    [(False, LateSteps), (True, DeviceSteps), pytest.param(True, LateSteps, marks=pytest.mark.slow)],
    ids=["eager-late", "graphs", "graphs-late"],
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_tokens_are_those_of_steps_that_wait(
    target: Path, head: Path, drafts: str, graphs: bool, steps: type[DeviceSteps]
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
    "shapes", [[PLAIN, DraftShape.of(1), DraftShape.of(3)], [PLAIN, DraftShape.of(2, 2, 7)]]
)
def test_steps_that_change_hear_of_their_acceptance_one_step_late(
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


def test_what_the_device_cannot_sample_is_stepped_by_the_host_in_between(target: Path, head: Path) -> None:
    """While a request with penalties lives, all steps wait; then the others are launched ahead again."""
    knobs = ({"temperature": 0.0, "frequency_penalty": 0.9}, *MIXED[1:])
    waiting = engine_of(target, head, "chain")
    expected = waiting.run(requests_of(waiting, knobs))
    engine = engine_of(target, head, "chain")
    overlapped(engine)
    requests = requests_of(engine, knobs)
    run_ahead(engine, requests[1:], until=lambda: requests[1].num_output > 4)
    ahead = engine.decoder.num_launched
    run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == expected
    assert engine.decoder.num_launched > ahead > 0
    assert set(engine.decoder.fallbacks) == {"penalties"}


@pytest.mark.parametrize("drafts", ["off", "chain"])
def test_a_nucleus_wider_than_the_device_looks_at_is_drawn_by_the_host(
    target: Path, head: Path, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps under way give it nothing and change nothing."""
    monkeypatch.setattr(step_body, "choose_tokens", token_choice.choose_fixed)
    knobs = (*MIXED[:3], {"temperature": 3.0, "seed": 9, "top_p": 0.97})
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting, knobs))
    monkeypatch.setattr(token_choice, "NUCLEUS_WIDTH", 16)
    engine = engine_of(target, head, drafts)
    overlapped(engine)
    requests = requests_of(engine, knobs)
    results = run_ahead(engine, requests)
    assert [request.output_ids for request in requests] == expected
    assert set(engine.decoder.fallbacks) == {"nucleus"}
    assert any([] in result.tokens for result in results)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_requests_that_join_and_leave_at_any_step_disturb_nobody(
    target: Path, head: Path, drafts: str
) -> None:
    waiting = engine_of(target, head, drafts)
    expected = waiting.run(requests_of(waiting))
    for seed in range(2):
        rng, engine = random.Random(seed), engine_of(target, head, drafts)
        decoder = overlapped(engine, graphs=seed == 0, steps=LateSteps if seed % 2 else DeviceSteps)
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
        assert decoder.steps.body.state.num_open == 0


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_steady_step_asks_the_device_for_nothing_and_keeps_nothing(
    target: Path, head: Path, drafts: str
) -> None:
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


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({}, None),
        ({"grammar": "g"}, "guided"),
        ({"min_new_tokens": 1}, "min_tokens"),
        ({"logprobs": 0}, "logprobs"),
    ],
)
def test_what_needs_the_host_is_named(knobs: dict[str, object], reason: str | None) -> None:
    assert host_reason(SamplingParams(**knobs)) == reason
