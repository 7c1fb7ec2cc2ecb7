"""A DFLASH drafter drafts what its published formulas give, and never changes a token."""

from pathlib import Path

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.tests.parity.dflash_engine import DflashEngine, recomputed_block
from baton.tests.parity.dflash_toys import DFLASH_IDS, dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_engine import Engine, record_drafts
from baton.tests.parity.graph_engine import uses_kernels
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

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
        sampled(temperature=1.7, top_k=5),
        sampled(top_p=0.5, min_p=0.05),
        sampled(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3, logit_bias={3: 4.0}),
    ],
)
def test_sampled_output_with_a_seed_is_the_same_with_and_without_drafts(
    deep_target: Path, head: Path, params: SamplingParams
) -> None:
    plain = Engine(deep_target).generate(PROMPTS, params)
    assert DflashEngine(deep_target, head, steps=STEPS).generate(PROMPTS, params) == plain


@pytest.mark.parametrize("uses_graphs", [False, True], ids=["eager", "as on a device"])
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
