"""EAGLE3 on the real engine: drafts change how many tokens a step yields, never which."""

from pathlib import Path

import pytest
import torch
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.eagle3_engine import (
    NUM_PAGES,
    PAGE_SIZE,
    Engine,
    check_without_draft_state,
    features_of,
    recomputed_drafts,
    record_drafts,
    rows_of,
)
from baton.tests.parity.eagle3_toys import (
    ORACLE_IDS,
    RESERVED,
    head_config,
    head_tensors,
    successor,
    write_head,
)
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def target(deep_target: Path) -> Path:
    return deep_target


@pytest.fixture
def head(deep_head: Path) -> Path:
    return deep_head


PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)), [250, 3, 250, 3, 250, 3])


@pytest.fixture(scope="session")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("random"), head_config(2), head_tensors())


@pytest.fixture(scope="session")
def wrong_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that can propose one token only."""
    tensors = head_tensors()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:1]
    tensors["d2t"] = torch.tensor([77])
    del tensors["t2d"]
    return write_head(tmp_path_factory.mktemp("wrong"), head_config(2, draft_vocab_size=1), tensors)


def greedy(max_new_tokens: int = 24, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True, **changes)


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 11, "max_new_tokens": 24, "ignore_eos": True} | changes)
    )


@pytest.mark.parametrize("head", ["random_head", "wrong_head", None])
def test_greedy_output_is_that_of_transformers_whatever_the_head(
    target: Path, head: str | None, request: pytest.FixtureRequest
) -> None:
    engine = Engine(target, None if head is None else request.getfixturevalue(head))
    expected = [reference_greedy(reference_model(target), prompt, 24) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, greedy()) == expected
    if head is None:
        assert all(n == 1 for r in engine.results for n in r.accept_lens)


@pytest.mark.parametrize(
    "params",
    [
        sampled(),
        slow(sampled(temperature=0.3, seed=2**63 + 5)),
        sampled(temperature=1.7, top_k=5),
        slow(sampled(top_p=0.5, min_p=0.05)),
        sampled(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3),
        sampled(logit_bias={3: 4.0, 9: -5.0}),
        greedy(repetition_penalty=1.5),
    ],
)
def test_sampled_output_with_a_seed_is_the_same_with_and_without_drafts(
    target: Path, random_head: Path, params: SamplingParams
) -> None:
    plain = Engine(target).generate(PROMPTS, params)
    assert Engine(target, random_head).generate(PROMPTS, params) == plain
    assert Engine(target, random_head, steps=1).generate(PROMPTS[:1], params) == plain[:1]
    assert len({tuple(row) for row in plain}) == len(PROMPTS)


def test_with_drafts_that_can_match_some_are_accepted(oracle: tuple[Path, Path]) -> None:
    """Sampled drafts are accepted too: at temperature 1 the oracle target is random, with shared noise."""
    engine = Engine(*oracle)
    plain = Engine(oracle[0]).generate([[1, 2], [40]], sampled(max_new_tokens=60))
    assert engine.generate([[1, 2], [40]], sampled(max_new_tokens=60)) == plain
    assert sum(engine.accept_lens) > len(engine.accept_lens)


def test_a_draft_with_the_targets_logits_proposes_what_the_target_chooses(
    target: Path, tmp_path: Path
) -> None:
    tensors = head_tensors() | {"lm_head.weight": torch.zeros(256, 64)}
    del tensors["d2t"], tensors["t2d"]
    engine = Engine(target, write_head(tmp_path, head_config(2, draft_vocab_size=None), tensors))
    generator = torch.Generator().manual_seed(2)
    for seed in range(20):
        request = engine.prefill([seed + 1, 2], sampled(seed=seed, max_new_tokens=9))
        logits = 3 * torch.randn(1, 256, generator=generator)
        engine.drafter.states.logits[engine.decoder.coverage.known[request].row] = logits[0]
        rows = engine.sampler.build([request.sampling_row])
        choice = engine.sampler.sample(logits, rows).tokens.tolist()
        assert record_drafts(engine, request)[:1] == choice


def test_penalties_see_the_drafts_of_the_same_block(oracle: tuple[Path, Path]) -> None:
    """RESERVED follows itself, so a block repeats it until its count within the block changes the choice."""
    params = greedy(20, frequency_penalty=3.0)
    plain = Engine(oracle[0]).generate([[RESERVED]], params)
    engine = Engine(*oracle)
    assert engine.generate([[RESERVED]], params) == plain
    assert len(set(plain[0])) > 1
    assert max(engine.accept_lens) > 1


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_oracle_is_accepted_in_full_at_every_step(oracle: tuple[Path, Path], steps: int) -> None:
    engine = Engine(*oracle, steps=steps)
    outputs = engine.generate([[1, 2, 3], [40], [62, 0, 17, 5, 5]], greedy(40))
    for first, output in zip((3, 40, 5), outputs, strict=True):
        token = first
        for emitted in output:
            token = successor(token)
            assert emitted == token
    assert set(engine.accept_lens) == {steps + 1}


@pytest.mark.parametrize(
    "aux_ids",
    [(0, 2, 4), (2, 4, 6), (1, 3, 4), (5, 3, 1), (3, 1, 5)],
    ids=["below", "above", "last", "reverse", "swap"],
)
def test_the_oracle_is_rejected_with_features_of_other_layers_or_order(
    oracle: tuple[Path, Path], aux_ids: tuple[int, ...]
) -> None:
    engine = Engine(*oracle, aux_ids=aux_ids)
    wrong = engine.generate([[1, 2, 3], [40]], greedy(20))
    assert set(engine.accept_lens) == {1}
    assert Engine(*oracle, aux_ids=ORACLE_IDS).generate([[1, 2, 3], [40]], greedy(20)) == wrong
    assert all(RESERVED not in output for output in wrong)


def test_requests_of_a_mixed_batch_get_the_tokens_they_get_alone(target: Path, random_head: Path) -> None:
    all_params = [
        greedy(9),
        sampled(seed=3),
        sampled(seed=3, temperature=0.5, frequency_penalty=1.0),
        greedy(17),
    ]
    alone = [
        Engine(target, random_head).generate([prompt], params)[0]
        for prompt, params in zip(PROMPTS, all_params, strict=True)
    ]
    engine = Engine(target, random_head)
    together = [engine.prefill(prompt, params) for prompt, params in zip(PROMPTS, all_params, strict=True)]
    assert engine.run(together) == alone


def test_a_request_without_draft_state_is_served_beside_drafted_ones(target: Path, random_head: Path) -> None:
    plain = Engine(target).generate(PROMPTS[:2], greedy())
    check_without_draft_state(Engine(target, random_head), PROMPTS[:2], greedy(), plain)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5])
def test_a_request_ends_at_max_new_tokens_inside_an_accepted_block(
    oracle: tuple[Path, Path], max_new_tokens: int
) -> None:
    engine = Engine(*oracle)
    request = engine.prefill([1], greedy(max_new_tokens))
    assert engine.run([request]) == Engine(oracle[0]).generate([[1]], greedy(max_new_tokens))
    assert (request.num_output, request.finish_reason) == (max_new_tokens, "length")


def test_a_stop_token_inside_an_accepted_block_ends_the_request_there(oracle: tuple[Path, Path]) -> None:
    engine = Engine(*oracle)
    params = SamplingParams(
        temperature=0.0, max_new_tokens=30, stop_token_ids=[successor(successor(successor(1)))]
    )
    request = engine.prefill([1], params)
    engine.run([request])
    assert (request.num_output, request.finish_reason) == (3, "stop")
    assert engine.results[-1].tokens == [request.output_ids[1:]]
    assert engine.results[-1].accept_lens == [4]


def test_nothing_is_written_beyond_the_requests_pages(oracle: tuple[Path, Path]) -> None:
    engine = Engine(*oracle)
    request = engine.prefill(
        [1, 2, 3], greedy(12), pages=4
    )  # 16 slots; rows 0..13 are needed, drafts would go on
    others = [page for page in range(1, NUM_PAGES) if page not in request.pages]
    engine.runner.pool.kv[others], engine.drafter.pool.kv[others] = 7.0, 7.0
    assert engine.run([request]) == Engine(oracle[0]).generate([[1, 2, 3]], greedy(12))
    assert bool((engine.runner.pool.kv[others] == 7.0).all())
    assert bool((engine.drafter.pool.kv[others] == 7.0).all())


@pytest.mark.parametrize(("pages", "max_context"), [(4, 256), (9, 18)])
def test_no_token_is_accepted_without_a_slot_for_its_kv(
    oracle: tuple[Path, Path], pages: int, max_context: int
) -> None:
    engine = Engine(*oracle, max_context=max_context)
    request = engine.prefill([1, 2, 3], greedy(60), pages=pages)
    limit = min(pages * PAGE_SIZE, max_context)
    while request.num_computed < limit:
        engine.decoder.step([request])
        assert request.num_computed <= limit
    for pool in (engine.runner.pool, engine.drafter.pool):
        assert not bool(pool.kv[0, :, :, 1:].any()), "padding is written to slot 0 alone"
    expected = Engine(oracle[0]).generate([[1, 2, 3]], greedy(60))[0]
    assert request.output_ids == expected[: limit - 2]
    with pytest.raises(AssertionError, match="no page or no context left"):
        engine.decoder.step([request])


def test_the_last_positions_of_the_context_are_served_right(target: Path, random_head: Path) -> None:
    prompt = [i * 7 % 256 for i in range(500)]
    plain = Engine(target, max_context=512).generate([prompt], greedy(12))
    assert Engine(target, random_head, max_context=512).generate([prompt], greedy(12)) == plain


@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
def test_any_chunking_of_draft_prefill_gives_the_same_draft_kv_and_state(
    target: Path, random_head: Path, chunk: int
) -> None:
    whole, pieces = Engine(target, random_head), Engine(target, random_head)
    for prompt in PROMPTS:
        whole.prefill(prompt, greedy())
        pieces.prefill(prompt, greedy(), chunk=chunk)
    assert torch.allclose(pieces.drafter.pool.kv[1:], whole.drafter.pool.kv[1:], atol=1e-5)
    assert torch.allclose(pieces.drafter.states.logits[1:], whole.drafter.states.logits[1:], atol=1e-4)
    assert torch.allclose(pieces.drafter.states.hidden[1:], whole.drafter.states.hidden[1:], atol=1e-4)
    assert bool(whole.drafter.pool.kv[1:].any())


def test_draft_kv_after_decoding_is_that_of_a_prefill_of_the_same_tokens(
    target: Path, random_head: Path
) -> None:
    """Rows written from guesses are overwritten with rows from the target's features."""
    decoded = Engine(target, random_head)
    request = decoded.prefill(PROMPTS[0], greedy(30))
    while request.num_output < 20:
        decoded.decoder.step([request])
    fresh = Engine(target, random_head)
    again = fresh.prefill(request.all_ids[:-1], greedy(30))
    assert again.all_ids == request.all_ids
    rows = slice(0, request.num_tokens - 1)
    for draft_kv in zip(rows_of(decoded, request), rows_of(fresh, again), strict=True):
        assert torch.allclose(draft_kv[0][rows], draft_kv[1][rows], atol=1e-4)
    states = [
        e.drafter.states.logits[e.decoder.coverage.known[r].row]
        for e, r in ((decoded, request), (fresh, again))
    ]
    assert torch.allclose(*states, atol=1e-3)


def test_a_cached_prefix_with_the_same_next_token_needs_no_new_draft_row(
    target: Path, random_head: Path
) -> None:
    engine = Engine(target, random_head)
    owner = engine.prefill(list(range(40, 64)), greedy())
    shared = 3 * PAGE_SIZE
    prompt = [*range(40, 40 + shared + 1), 99, 98, 97]
    whole = Engine(target, random_head)
    expected = whole.prefill(prompt, greedy(8))
    request = Request(room="b" * 32, epoch=0, prompt_ids=prompt, sampling=greedy(8))
    request.pages = [*owner.pages[:3], *range(300, 306)]
    request.append(expected.output_ids, ())
    engine.decoder.draft_prefill(request, features_of(whole, prompt)[shared:], shared)
    assert engine.decoder.coverage.is_warm(request)
    for mine, theirs in zip(rows_of(engine, request), rows_of(whole, expected), strict=True):
        assert torch.allclose(mine[: len(prompt)], theirs[: len(prompt)], atol=1e-4)
    states = [
        e.drafter.states.logits[e.decoder.coverage.known[r].row]
        for e, r in ((engine, request), (whole, expected))
    ]
    assert torch.allclose(*states, atol=1e-3)


@pytest.mark.parametrize(
    "switches", [{}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}]
)
def test_drafts_are_those_of_a_full_recompute_without_a_cache(
    target: Path, tmp_path: Path, switches: dict[str, bool]
) -> None:
    tensors = head_tensors(seed=4)
    if "fc_norm" in switches:
        tensors |= {f"fc_norm.{i}.weight": torch.rand(64) + 0.5 for i in range(3)}
    engine = Engine(target, write_head(tmp_path, head_config(2, **switches), tensors))
    request = engine.prefill(PROMPTS[0], greedy(30))
    for _ in range(4):
        before = list(request.all_ids)
        drafts = record_drafts(engine, request)
        assert drafts == recomputed_drafts(target, tensors, before, switches)


def test_logprobs_are_the_models_own_with_drafts_as_without(oracle: tuple[Path, Path]) -> None:
    found = []
    for head in (oracle[1], None):
        engine = Engine(oracle[0], head)
        engine.run([engine.prefill([3], greedy(9, logprobs=2)), engine.prefill([8], greedy(9))])
        assert all(not result.logprobs[1] for result in engine.results if len(result.logprobs) > 1)
        found.append([entry for result in engine.results for entry in result.logprobs[0]])
    assert len(found[0]) == len(found[1]) == 8
    for with_drafts, without in zip(*found, strict=True):
        assert with_drafts.logprob == pytest.approx(without.logprob, abs=1e-4)
        assert with_drafts.top[0] == (without.top[0][0], pytest.approx(with_drafts.logprob))
        assert len(with_drafts.top) == 2


def test_non_finite_logits_flag_only_their_own_request(target: Path, random_head: Path) -> None:
    engine = Engine(target, random_head)
    sick, well = (engine.prefill(prompt, greedy()) for prompt in PROMPTS[:2])
    engine.runner.pool.kv[sick.pages] = float("nan")
    result = engine.decoder.step([sick, well])
    assert result.is_bad == [True, False]
    assert (result.tokens[0], sick.num_output) == ([], 1)
    assert result.tokens[1]


def test_features_of_another_width_and_gaps_in_the_draft_rows_are_refused(
    target: Path, random_head: Path
) -> None:
    engine = Engine(target, random_head)
    request = engine.prefill(PROMPTS[0], greedy())
    engine.decoder.forget(request)
    with pytest.raises(ValueError, match=r"\[2, 191\].*\[2, 192\]"):
        engine.decoder.draft_prefill(request, torch.zeros(2, 191), 0)
    engine.decoder.forget(request)
    engine.decoder.draft_prefill(request, torch.zeros(2, 192), 0)
    with pytest.raises(AssertionError, match=r"draft rows 2\.\.3 would stay unwritten"):
        engine.decoder.draft_prefill(request, torch.zeros(2, 192), 4)
    with pytest.raises(AssertionError, match="not there yet"):
        engine.decoder.draft_prefill(request, torch.zeros(30, 192), 2)
    assert not engine.decoder.coverage.is_warm(request)


def test_an_empty_batch_and_an_empty_prefill_pass_through(target: Path, random_head: Path) -> None:
    engine = Engine(target, random_head)
    assert engine.decoder.step([]).tokens == []
    engine.decoder.draft_prefill_batch([])


def test_a_negative_number_of_steps_is_refused(target: Path) -> None:
    with pytest.raises(ValueError, match="spec_steps -1"):
        Engine(target, steps=-1)
