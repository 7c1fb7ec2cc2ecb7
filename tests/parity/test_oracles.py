"""Acceptance is exact for drafts tuned to fail at known positions and for drafts from the draft's KV."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.adaptive import StepCosts, StepPolicy
from baton.engine.speculative.drafters.protocol import DraftView, Proposal
from baton.engine.speculative.drafting.shape import DraftShape
from baton.tests.parity.eagle3_engine import PAGE_SIZE, Engine
from baton.tests.parity.graph_engine import arena, kv_of, with_graphs
from baton.tests.parity.oracles import (
    DISTANCE,
    VOCAB,
    expected_accept_length,
    follower,
    is_right,
    tune,
    write_memory_oracle,
)
from baton.tests.parity.toy_engine import random_ids
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

Plant = Callable[[Engine, Request], None]


MASK = 3  # a token that prompts have, too


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_memory_oracle(tmp_path_factory.mktemp("memory"))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_memory_oracle(tmp_path_factory.mktemp("parallel"), MASK)


@pytest.fixture(params=["token by token", "parallel"])
def either(
    request: pytest.FixtureRequest, memory: tuple[Path, Path], parallel: tuple[Path, Path]
) -> tuple[Path, Path]:
    """The memory pair with either kind of head."""
    return parallel if request.param == "parallel" else memory


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)


def prompt_of(seed: int, length: int = 2 * DISTANCE) -> list[int]:
    return random_ids(length, seed=seed, vocab_size=VOCAB)


def continued(prompt: list[int], count: int) -> list[int]:
    """What the target says behind `prompt`."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(follower(ids[-1 - DISTANCE]))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("chunk", "has_graphs"), [(5, True), (1000, False), slow(5, False), slow(1000, True)]
)
def test_the_draft_keeps_the_state_that_its_next_tokens_need(either, has_graphs, chunk):
    engine = Engine(*either)
    if has_graphs:
        with_graphs(engine, arena())
    prompts = [prompt_of(seed, 12 + 5 * seed) for seed in range(3)]
    tokens = engine.run([engine.prefill(prompt, greedy(33), chunk=chunk) for prompt in prompts])
    assert tokens == [continued(prompt, 33) for prompt in prompts]
    assert set(engine.accept_lens) == {1 + engine.steps}


@pytest.mark.parametrize("has_graphs", [False, True])
def test_rows_that_the_drafter_observes_late_are_those_of_every_step(memory, has_graphs):
    """Plain steps of changing batches, more of them than may wait; then drafts look their rows up."""
    plain, full = DraftShape.of(0), DraftShape.of(3)
    policy = StepPolicy([plain, full], StepCosts(draft=0.1, knee_rows=100.0))
    engine = Engine(*memory, policy=policy)
    if has_graphs:
        with_graphs(engine, arena())
    prompts = [prompt_of(seed, 12 + 5 * seed) for seed in range(3)]
    requests = [engine.prefill(prompt, greedy(60)) for prompt in prompts]
    policy.choose = lambda batch_size, context=0: plain
    for step in range(21):
        engine.decoder.step(requests[: 1 + step % 3])
        late = [engine.decoder.coverage.most_late([request]) for request in requests]
        assert max(late) <= engine.decoder.steps.late_rows == 8
        covered = [engine.decoder.num_covered(request) for request in requests]
        counted = zip(requests, late, strict=True)
        assert covered == [request.num_tokens - 1 - waiting for request, waiting in counted]
    policy.choose = lambda batch_size, context=0: full
    tokens = engine.run(requests)
    assert tokens == [continued(prompt, 60) for prompt in prompts]
    drafted = [length for result in engine.results for length in result.accept_lens]
    assert set(drafted[:-3]) == {1 + engine.steps}


def hole_in_the_prompt(engine: Engine, request: Request) -> None:
    row = request.num_prompt - 4
    engine.drafter.pool.kv[request.pages[row // PAGE_SIZE], :, :, row % PAGE_SIZE] = 0.0


def rows_in_each_others_slots(engine: Engine, request: Request) -> None:
    first, second = (request.pages[(request.num_prompt - 2 - i * PAGE_SIZE) // PAGE_SIZE] for i in (0, 1))
    engine.drafter.pool.kv[[first, second]] = engine.drafter.pool.kv[[second, first]]


def guesses_never_overwritten(engine: Engine, request: Request) -> None:
    observe = engine.drafter.observe

    def keeps_guesses(*args: object) -> None:
        before = engine.drafter.pool.kv.clone()
        observe(*args)
        engine.drafter.pool.kv.copy_(before)

    engine.drafter.observe = keeps_guesses


STATES = [hole_in_the_prompt, rows_in_each_others_slots, guesses_never_overwritten]


@pytest.mark.parametrize("plant", STATES)
def test_a_draft_with_wrong_state_is_detected_and_changes_no_token(either, plant):
    check_plant(Engine(*either), plant)


def check_plant(engine: Engine, plant: Plant) -> None:
    prompt = prompt_of(3)
    request = engine.prefill(prompt, greedy(40))
    plant(engine, request)
    assert engine.run([request]) == [continued(prompt, 40)]
    assert min(engine.accept_lens) < 1 + engine.steps


@pytest.mark.parametrize("steps", [1, 2, DISTANCE])
def test_parallel_drafts_of_any_number_are_accepted_in_full(parallel, steps):
    engine = Engine(*parallel, steps=steps)
    assert engine.generate([prompt_of(1)], greedy(41)) == [continued(prompt_of(1), 41)]
    assert set(engine.accept_lens) == {1 + steps}


def mask_rows_at_one_position(engine: Engine, request: Request) -> None:
    propose = engine.drafter.propose

    def proposing(view: DraftView, shape: DraftShape) -> Proposal:
        return propose(replace(view, positions=view.positions[:, :1].expand(view.positions.shape)), shape)

    engine.drafter.propose = proposing


def mask_without_its_hidden(engine: Engine, request: Request) -> None:
    engine.drafter.head.mask_input = torch.zeros_like(engine.drafter.head.mask_input)


def mask_rows_one_place_early(engine: Engine, request: Request) -> None:
    """The first of them overwrites the newest committed row."""
    propose = engine.drafter.propose

    def proposing(view: DraftView, shape: DraftShape) -> Proposal:
        return propose(replace(view, kv_rows=view.kv_rows - 1), shape)

    engine.drafter.propose = proposing


@pytest.mark.parametrize(
    "plant", [mask_rows_at_one_position, mask_without_its_hidden, mask_rows_one_place_early]
)
def test_wrong_mask_rows_are_detected_and_change_no_token(parallel, plant):
    check_plant(Engine(*parallel), plant)


def test_tuned_drafts_are_accepted_up_to_the_first_corrupted_one(memory):
    alpha, count, seeds = 0.7, 180, range(6)
    engine = Engine(*memory)
    tune(engine, alpha, seed=5)
    prompts = [prompt_of(seed) for seed in seeds]
    requests = [engine.prefill(prompt, greedy(count)) for prompt in prompts]
    lengths, accepted = [request.num_tokens for request in requests], []
    while not any(request.is_finished for request in requests):
        result = engine.decoder.step(requests)
        for row, request in enumerate(requests):
            rights = [is_right(5, row, lengths[row] + j, alpha) for j in range(engine.steps)]
            expected = 1 + (rights.index(False) if False in rights else engine.steps)
            left = request.num_prompt + count - lengths[row]
            assert min(result.accept_lens[row], left) == min(expected, left)
            accepted += [expected] if left > engine.steps else []
            lengths[row] = request.num_tokens
    assert all(
        request.output_ids == continued(prompt, len(request.output_ids))
        for request, prompt in zip(requests, prompts, strict=True)
    )
    assert set(accepted) == {1, 2, 3, 4}
    assert abs(sum(accepted) / len(accepted) - expected_accept_length(alpha, engine.steps)) < 0.3


def test_m4_4_after_any_accept_length_the_draft_kv_is_that_of_a_prefill(memory):
    engine, scratch, prompt = Engine(*memory), Engine(*memory), prompt_of(1)
    tune(engine, 0.6)
    request = engine.prefill(prompt, greedy(180))
    seen = set()
    while not request.is_finished and len(seen) < 4:
        seen |= set(engine.decoder.step([request]).accept_lens)
        anew = scratch.prefill(request.all_ids[:-1], greedy(1))
        assert anew.output_ids == request.all_ids[-1:]
        for mine, other in zip(kv_of(engine, request), kv_of(scratch, anew), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
        scratch.decoder.forget(anew)
        scratch.next_page = 1
    assert seen == {1, 2, 3, 4}
