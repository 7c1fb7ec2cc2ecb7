"""Rotary tables: the same numbers as transformers', for the settings of models people run."""

import json
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.rope import RopeConfig, RotaryEmbedding, read_rope_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

SETTINGS = {
    "smollm2": (64, 8192, {"rope_type": "default", "rope_theta": 100000.0}),
    "linear": (96, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama-3.1": (
        128,
        16384,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen-yarn": (
        128,
        16384,
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "yarn-mscale": (
        64,
        8192,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ),
    "yarn-attention-factor": (
        32,
        2048,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.3,
            "truncate": False,
        },
    ),
}
SOURCE = Path("config.json")


@pytest.mark.parametrize("name", SETTINGS)
def test_rotated_queries_and_keys_equal_transformers(name: str):
    head_dim, length, settings = SETTINGS[name]
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=length,
        rope_parameters=dict(settings),
    )
    generator = torch.Generator().manual_seed(0)
    positions = torch.cat((torch.arange(40), torch.randint(0, length, (40,), generator=generator)))
    positions[-1] = length - 1
    q, k = (
        torch.randn(80, 3, head_dim, generator=generator),
        torch.randn(80, 2, head_dim, generator=generator),
    )
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=1)
    raw = json.loads(json.dumps({"max_position_embeddings": length, "rope_parameters": settings}))
    ours = RotaryEmbedding(read_rope_config(raw, SOURCE), head_dim, length).apply(q, k, positions)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_old_and_new_spelling_read_the_same():
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0}}
    old = {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_rope_config(new, SOURCE) == read_rope_config(old, SOURCE)
    assert read_rope_config(new, SOURCE) == RopeConfig(theta=20000.0, rope_type="linear", factor=2.0)


def test_without_any_setting_it_is_plain_rope_at_base_10000():
    assert read_rope_config({}, SOURCE) == RopeConfig(theta=10000.0)
    assert read_rope_config({"rope_scaling": None, "rope_theta": 5e5}, SOURCE) == RopeConfig(theta=5e5)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"rope_scaling": {"rope_type": "ntk"}}, ["rope_type", "'ntk'", "yarn"]),
        (
            {"max_position_embeddings": 8, "rope_scaling": {"rope_type": "longrope", "short_factor": "1"}},
            ["short_factor", "'1'", "list of positive numbers"],
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "None", "positive number"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, ["rope_scaling.factor", "'two'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, ["rope_scaling.factor", "nan"]),
        (
            {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "llama3", "factor": 8}},
            ["rope_parameters.low_freq_factor"],
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, ["original_max_position_embeddings"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling", "'yarn'", "object"]),
        ({"rope_theta": "big"}, ["rope_theta", "'big'"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer type"]),
    ],
)
def test_an_unknown_rope_setting_is_one_clear_line(raw: dict, words: list[str]):
    with pytest.raises(CheckpointError) as caught:
        read_rope_config(raw, SOURCE)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in [str(SOURCE), *words]), message


def test_an_odd_head_dimension_is_refused():
    with pytest.raises(ValueError, match="head_dim 5"):
        RotaryEmbedding(RopeConfig(), 5, 8)
