"""A cluster with a DFLASH drafter serves transformers' tokens, whatever the drafter drafts."""

from functools import partial
from pathlib import Path

import pytest
import torch
from baton.tests.cluster.serving import at_once, complete, pages_held, serving, wait_until
from baton.tests.parity.dflash_toys import dflash_config, write_dflash
from baton.tests.parity.test_cluster_tokens import assert_same

pytestmark = pytest.mark.smollm2

IDS = (1, 8, 14, 20, 27)
SIZES = {
    "hidden_size": 576,
    "intermediate_size": 256,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "num_target_layers": 30,
    "max_position_embeddings": 8192,
}


def random_blocks() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Random weights in SmolLM2's width; layer 1 has a window that most prompts exceed."""
    config = dflash_config(
        IDS,
        dflash_config={"mask_token_id": 16, "target_layer_ids": list(IDS)},
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=24,
        **SIZES,
    )
    generator = torch.Generator().manual_seed(1)
    hidden, inner, heads, kv_heads = 576, 256, 9 * 64, 3 * 64
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (hidden, 5 * hidden),
        "hidden_norm": (hidden,),
        "norm": (hidden,),
    }
    for p in ("layers.0.", "layers.1."):
        shapes |= {p + "input_layernorm": (hidden,), p + "post_attention_layernorm": (hidden,)}
        shapes |= {f"{p}self_attn.{n}_proj": (kv_heads, hidden) for n in "kv"}
        shapes |= {p + "self_attn.q_proj": (heads, hidden), p + "self_attn.o_proj": (hidden, heads)}
        shapes |= {f"{p}self_attn.{n}_norm": (64,) for n in "qk"}
        shapes |= {f"{p}mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
        shapes |= {p + "mlp.down_proj": (hidden, inner)}
    tensors = {
        f"{name}.weight": torch.ones(shape)
        if "norm" in name
        else 0.05 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    return config, tensors


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dflash(tmp_path_factory.mktemp("dflash"), *random_blocks())


def check(references, smollm2_dir, drafter, **settings):
    with serving(smollm2_dir, drafter, spec_steps=7, kv_memory_mb=768, **settings) as cluster:
        for _ in range(2):  # the second round finds its prompts cached
            jobs = [partial(complete, cluster, reference.prompt_ids) for reference in references]
            answers = at_once(jobs, 8)
            same = [assert_same(r, ids) for r, (ids, _) in zip(references, answers, strict=True)]
            assert sum(same) >= len(same) - 2, "more ties than real text has"
            lines = [document["timeline"] for _, document in answers]
            assert (
                sum(line["drafted"] for line in lines) > 7 * sum(line["verify_steps"] for line in lines) / 2
            )
        wait_until(lambda: not any(pages_held(cluster)[0].values()), 60, "every page free again")


@pytest.mark.parametrize("chunk", [64])
def test_served_tokens_equal_transformers(reference_greedy, smollm2_dir, drafter, chunk):
    few = sorted(reference_greedy.values(), key=lambda reference: len(reference.prompt_ids))
    check(few[::6], smollm2_dir, drafter, chunk_size=chunk)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", [16, 64, 0])
def test_all_served_tokens_equal_transformers(reference_greedy, smollm2_dir, drafter, chunk):
    check(list(reference_greedy.values()), smollm2_dir, drafter, chunk_size=chunk)
