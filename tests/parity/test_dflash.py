"""A DFLASH drafter drafts what its published formulas give, and never changes a token."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.capture.graph_set import GraphSet
from baton.engine.errors import CheckpointError, LifecycleError
from baton.engine.graphs.graph_pool import GraphKind
from baton.engine.request import Request
from baton.engine.row_attention import RowPlan
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.dflash import DflashDrafter
from baton.engine.speculative.drafters.dflash_head import DflashHead
from baton.tests.parity.dflash_engine import DflashEngine, recomputed_block
from baton.tests.parity.dflash_toys import DFLASH_IDS, MASK, dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_engine import (
    PAGE_SIZE,
    Engine,
    check_without_draft_state,
    features_of,
    record_drafts,
)
from baton.tests.parity.graph_engine import (
    MAX_TOKENS,
    arena,
    enable,
    kv_of,
    poison,
    uses_kernels,
    with_graphs,
)
from baton.tests.parity.test_draft_graphs import batch_of
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [random_ids(length, seed=length) for length in (3, 17, 9, 26)]
STEPS = 5
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
# config keys, and what they mean: the window and the causality of each layer
LAYOUTS = {
    "full": ({}, (None, None), (False, False)),
    "sliding": (SLIDING, (None, 9), (False, True)),
    "sliding, not causal": (SLIDING | {"is_causal": False}, (None, 9), (False, False)),
    "causal": ({"is_causal": True}, (None, None), (True, True)),
    "window below the block": (
        SLIDING | {"is_causal": False, "sliding_window": 3},
        (None, 3),
        (False, False),
    ),
}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dflash(tmp_path_factory.mktemp("dflash"), dflash_config(), dflash_tensors())


def greedy(max_new_tokens: int = 24, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True, **changes)


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 11, "max_new_tokens": 24, "ignore_eos": True} | changes)
    )


def test_greedy_output_is_that_of_transformers(deep_target: Path, head: Path) -> None:
    engine = DflashEngine(deep_target, head, steps=STEPS)
    expected = [reference_greedy(reference_model(deep_target), prompt, 24) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, greedy()) == expected


@pytest.mark.parametrize(
    "params",
    [
        sampled(),
        slow(sampled(temperature=1.7, top_k=5)),
        slow(sampled(top_p=0.5, min_p=0.05)),
        sampled(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3, logit_bias={3: 4.0}),
    ],
)
def test_sampled_output_with_a_seed_is_the_same_with_and_without_drafts(
    deep_target: Path, head: Path, params: SamplingParams
) -> None:
    plain = Engine(deep_target).generate(PROMPTS, params)
    assert DflashEngine(deep_target, head, steps=STEPS).generate(PROMPTS, params) == plain


@pytest.mark.parametrize("uses_graphs", [False, slow(True)], ids=["eager", "as on a device"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_a_full_recompute_without_a_cache(
    deep_target: Path, tmp_path: Path, layout: str, uses_graphs: bool
) -> None:
    changes, windows, are_causal = LAYOUTS[layout]
    tensors = dflash_tensors(seed=4)
    engine = DflashEngine(deep_target, write_dflash(tmp_path, dflash_config(**changes), tensors), steps=STEPS)
    if uses_graphs:
        uses_kernels(engine)
    seen = []
    compute = engine.drafter.head.compute_logits
    engine.drafter.head.compute_logits = lambda out: seen.append(compute(out)) or seen[-1]
    for prompt in PROMPTS[1:]:
        request = engine.prefill(prompt, greedy(30))
        for _ in range(3):
            before = list(request.all_ids)
            drafts = record_drafts(engine, request)
            expected = recomputed_block(
                deep_target, tensors, before, 1 + STEPS, DFLASH_IDS, windows=windows, are_causal=are_causal
            )
            torch.testing.assert_close(seen[-1], expected, atol=1e-3, rtol=1e-3)
            assert drafts == expected.argmax(-1).tolist()


def test_layouts_of_attention_differ_in_their_drafts(deep_target: Path) -> None:
    """Otherwise the test above could not see which one runs."""
    ids, logits = random_ids(27, seed=5), []
    for _, windows, are_causal in LAYOUTS.values():
        logits.append(
            recomputed_block(
                deep_target,
                dflash_tensors(4),
                ids,
                1 + STEPS,
                DFLASH_IDS,
                windows=windows,
                are_causal=are_causal,
            )
        )
    for i, one in enumerate(logits):
        for other in logits[:i]:
            assert float((one - other).abs().max()) > 0.05


def test_a_block_with_the_targets_logits_proposes_what_the_target_chooses(
    deep_target: Path, head: Path
) -> None:
    """At a temperature, each place of a block draws with the noise of the target at that place."""
    engine = DflashEngine(deep_target, head, steps=STEPS)
    generator, seen = torch.Generator().manual_seed(2), []
    for seed in range(10):
        request = engine.prefill([seed + 1, 2], sampled(seed=seed, max_new_tokens=20))
        logits = 3 * torch.randn(STEPS, engine.vocab_size, generator=generator)
        engine.drafter.head.compute_logits = lambda out, logits=logits: logits
        row = request.sampling_row
        rows = [replace(row, position=row.position + place) for place in range(STEPS)]
        chosen = engine.sampler.sample(logits, engine.sampler.build(rows)).tokens.tolist()
        assert record_drafts(engine, request) == chosen
        seen += chosen
    assert len(set(seen)) > STEPS


@pytest.fixture(scope="module")
def plain_and_graphed(deep_target: Path, head: Path) -> tuple[DflashEngine, DflashEngine, GraphSet]:
    """An engine without graphs, and one in which those of the drafter's context run."""
    plain, graphed = DflashEngine(deep_target, head), DflashEngine(deep_target, head)
    graphs = with_graphs(graphed, arena(), set())
    enable(graphed, {GraphKind.DRAFT_PREFILL})
    return plain, graphed, graphs


@pytest.mark.parametrize("count", [1, 15, 16, 17, 24, 25])
def test_m2_3_context_rows_at_bucket_edges_equal_eager(
    plain_and_graphed: tuple[DflashEngine, DflashEngine, GraphSet], count: int
) -> None:
    plain, graphed, graphs = plain_and_graphed
    for engine in (plain, graphed):
        engine.drafter.pool.kv.zero_()
    counter = "graph_fallback_draft_prefill_tokens_over_max"
    before = graphs.counters().get(counter, 0)
    batches = [batch_of(engine, count) for engine in (plain, graphed)]
    poison(graphed)
    expected, found = (
        engine.drafter.prefill_rows(batch) for engine, batch in zip((plain, graphed), batches, strict=True)
    )
    assert batches[1].decision.is_graph is (count <= MAX_TOKENS)
    assert graphs.counters().get(counter, 0) - before == (count > MAX_TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(graphed.drafter.pool.kv, plain.drafter.pool.kv, atol=1e-5, rtol=1e-5)
    assert bool(plain.drafter.pool.kv[1:].any())


def test_m3_4_no_rows_pass_through_every_forward(deep_target: Path, head: Path) -> None:
    engine = DflashEngine(deep_target, head)
    for has_graphs in (False, True):
        if has_graphs:
            with_graphs(engine, arena())
        engine.drafter.prefill([])
        engine.decoder.draft_prefill_batch([])
        assert engine.decoder.step([]).tokens == []
        assert engine.drafter.prefill_rows(batch_of(engine, 0)).shape == (0, 64)


@pytest.mark.parametrize("layout", ["full", "sliding"])
def test_m5_5_steps_padded_to_a_multiple_equal_unpadded_ones(
    deep_target: Path, tmp_path: Path, layout: str
) -> None:
    """Idle requests of the padding have blocks, too: in the sink, seen by nobody."""
    head = write_dflash(tmp_path, dflash_config(**LAYOUTS[layout][0]), dflash_tensors(seed=4))
    plain, padded = DflashEngine(deep_target, head, steps=STEPS), DflashEngine(deep_target, head, steps=STEPS)
    padded.runner.row_multiple = 4
    expected = plain.generate(PROMPTS[:3], greedy())
    assert padded.generate(PROMPTS[:3], greedy()) == expected
    assert [r.accept_lens for r in padded.results] == [r.accept_lens for r in plain.results]
    assert not bool(padded.drafter.pool.kv[0, :, :, 0].any()), "the sink stays zero"


def test_m5_2_a_block_changed_after_its_plan_is_refused(deep_target: Path, head: Path) -> None:
    engine = DflashEngine(deep_target, head, steps=STEPS)
    attend, seen = RowPlan.attend, []

    def late(plan: RowPlan, layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        if plan.pool is engine.drafter.pool:
            seen.append(plan)
            plan.kv_lens += 1
        return attend(plan, layer, *qkv)

    request = engine.prefill(PROMPTS[0], greedy())
    with pytest.MonkeyPatch.context() as planting:
        planting.setattr(RowPlan, "attend", late)
        with pytest.raises(LifecycleError, match="plan after the last change"):
            engine.decoder.step([request])
    assert seen


def test_m3_5_features_of_another_width_or_dtype_are_refused(deep_target: Path, head: Path) -> None:
    engine = DflashEngine(deep_target, head)
    request = engine.prefill(PROMPTS[0], greedy())
    engine.decoder.forget(request)
    with pytest.raises(ValueError, match=r"\[2, 191\].*\[2, 192\]"):
        engine.decoder.draft_prefill(request, torch.zeros(2, 191), 0)
    engine.decoder.forget(request)
    with pytest.raises(ValueError, match=r"float64.*float32"):
        engine.decoder.draft_prefill(request, torch.zeros(2, 192, dtype=torch.float64), 0)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_any_chunking_gives_the_same_draft_kv(deep_target: Path, head: Path, chunk: int) -> None:
    whole, pieces = DflashEngine(deep_target, head), DflashEngine(deep_target, head)
    for prompt in PROMPTS:
        whole.prefill(prompt, greedy())
        pieces.prefill(prompt, greedy(), chunk=chunk)
    assert torch.allclose(pieces.drafter.pool.kv[1:], whole.drafter.pool.kv[1:], atol=1e-5)
    assert bool(whole.drafter.pool.kv[1:].any())


def test_m4_4_after_any_step_the_draft_kv_is_that_of_a_prefill(deep_target: Path, head: Path) -> None:
    decoded, fresh = (DflashEngine(deep_target, head, steps=STEPS) for _ in range(2))
    request = decoded.prefill(PROMPTS[1], greedy(30))
    while request.num_output < 20:
        decoded.decoder.step([request])
    again = fresh.prefill(request.all_ids[:-1], greedy(30))
    assert again.all_ids == request.all_ids
    for mine, other in zip(kv_of(decoded, request), kv_of(fresh, again), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_cached_page_serves_prompts_that_differ_behind_it(deep_target: Path, head: Path) -> None:
    """A draft row depends on no later token, so the last row of a shared page is right for both prompts."""
    engine, whole = DflashEngine(deep_target, head), DflashEngine(deep_target, head)
    owner = engine.prefill(list(range(40, 64)), greedy())
    shared = 3 * PAGE_SIZE
    prompt = [*range(40, 40 + shared), 99, 98, 97]
    expected = whole.prefill(prompt, greedy(8))
    request = Request(room="b" * 32, epoch=0, prompt_ids=prompt, sampling=greedy(8))
    request.pages = [*owner.pages[:3], *range(300, 306)]
    request.append(expected.output_ids, ())
    engine.decoder.draft_prefill(request, features_of(whole, prompt)[shared:], shared)
    assert engine.decoder.coverage.is_warm(request)
    mine, theirs = (
        e.drafter.pool.kv[r.pages].transpose(1, 3).flatten(0, 1)[: len(prompt)]
        for e, r in ((engine, request), (whole, expected))
    )
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_request_without_draft_state_is_served_beside_drafted_ones(deep_target: Path, head: Path) -> None:
    plain = Engine(deep_target).generate(PROMPTS[:2], greedy())
    check_without_draft_state(DflashEngine(deep_target, head, steps=STEPS), PROMPTS[:2], greedy(), plain)


def test_the_last_positions_of_the_context_are_served_right(deep_target: Path, tmp_path: Path) -> None:
    head = write_dflash(tmp_path, dflash_config(max_position_embeddings=512), dflash_tensors())
    prompt = [i * 7 % 256 for i in range(500)]
    plain = Engine(deep_target, max_context=512).generate([prompt], greedy(12))
    assert (
        DflashEngine(deep_target, head, max_context=512, steps=STEPS).generate([prompt], greedy(12)) == plain
    )


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"output_multiplier": 0.5}, lambda x: 0.5 * x),
        ({"final_logit_softcapping": 2.0}, lambda x: 2 * (x / 2).tanh()),
        ({"final_logit_softcapping": 2.0, "output_multiplier": 3.0}, lambda x: 2 * (3 * x / 2).tanh()),
    ],
)
def test_logits_are_scaled_and_capped_as_the_config_says(
    deep_target: Path, head: Path, tmp_path: Path, changes: dict[str, float], same: Callable
) -> None:
    plain = DflashEngine(deep_target, head).drafter.head
    changed = DflashEngine(deep_target, write_dflash(tmp_path, dflash_config(**changes), dflash_tensors()))
    out = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(changed.drafter.head.compute_logits(out), same(plain.compute_logits(out)))


def test_embeddings_are_scaled_as_the_config_says(deep_target: Path, head: Path, tmp_path: Path) -> None:
    plain = DflashEngine(deep_target, head).drafter.head
    config = dflash_config(input_embedding_scale=8.0)
    changed = DflashEngine(deep_target, write_dflash(tmp_path, config, dflash_tensors())).drafter.head
    newest = torch.tensor([7, 9])
    assert torch.equal(changed.embed_block(newest, 3), 8 * plain.embed_block(newest, 3))
    assert torch.equal(
        plain.embed_block(newest, 3).view(2, 3, -1)[:, 1:], plain.embed_tokens[MASK].expand(2, 2, 64)
    )


def test_a_model_that_shares_nothing_yet_cannot_run(deep_target: Path, head: Path) -> None:
    shared = DflashEngine(deep_target, head).drafter.head
    bare = DflashHead(shared.config, dtype=torch.float32)
    with pytest.raises(LifecycleError, match="shared"):
        bare.project(torch.zeros(1, 192), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(LifecycleError, match="shared"):
        DflashDrafter(bare, num_pages=4, page_size=4)
    with pytest.raises(CheckpointError, match=r"lm_head has shape \[255, 64\].*\[256, 64\]"):
        bare.share(torch.zeros(256, 64), torch.zeros(255, 64), 64)
