"""Keys and values in 8 bits: the tokens are those of transformers with a cache that is rounded alike."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.weights import load_model
from baton.tests.parity.quant_toys import SHAPE, rounded_greedy, write_kv_scales, write_quantised
from baton.tests.parity.sparse_toys import built, sparse_config, write_sparse_checkpoint
from baton.tests.parity.toy_engine import ToyEngine, random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, NUM_TOKENS = random_ids(45, seed=3), 12
# A value whose float32 inputs differ in their last bit may round to its neighbour, 6 % away. Measured 0 to
# 0.1 on logits of standard deviation 20; scales of another layer give 5 and more.
TOLERANCE = 0.5


def assert_same_tokens(path: Path, values: Path, scales: dict[str, float]) -> None:
    ours = ToyEngine(path, kv_dtype="fp8_e4m3")
    assert ours.pool.dtype == torch.float8_e4m3fn
    tokens, logits = rounded_greedy(reference_model(values), PROMPT, NUM_TOKENS, scales)
    found = ours.run(("whole", PROMPT)).logits[-1]
    torch.testing.assert_close(found, logits, atol=TOLERANCE, rtol=0)
    assert ours.greedy(PROMPT, NUM_TOKENS) == tokens
    ours.run(("parts", PROMPT[:20]))
    ours.run(("parts", PROMPT[20:21]))
    torch.testing.assert_close(ours.run(("parts", PROMPT[21:])).logits[-1], logits, atol=TOLERANCE, rtol=0)


def test_without_scales_keys_and_values_are_rounded_as_they_are(toy_checkpoint: Callable[..., Path]):
    path = toy_checkpoint("llama")
    assert_same_tokens(path, path, {})
    assert ToyEngine(path).pool.page_bytes == 4 * ToyEngine(path, kv_dtype="fp8_e4m3").pool.page_bytes


def test_scales_of_the_checkpoint_are_those_of_their_layer(
    toy_checkpoint: Callable[..., Path], tmp_path: Path
):
    path = tmp_path / "scaled"
    values = write_quantised(toy_checkpoint("qwen3", **SHAPE), path, "channel")
    scales = write_kv_scales(path, num_layers=3)
    assert_same_tokens(path, values, scales)
    plain = ToyEngine(path)  # scales are for 8 bits only
    assert plain.greedy(PROMPT, 8) == reference_greedy(reference_model(values), PROMPT, 8)


def test_a_pool_in_8_bits_keeps_no_other_values(toy_checkpoint: Callable[..., Path]):
    """Values beyond the largest become the largest, and the sink stays zero."""
    ours = ToyEngine(toy_checkpoint("llama"), kv_dtype="fp8_e4m3")
    ours.run(("a", PROMPT))
    pages = ours.pages["a"]
    assert torch.isfinite(ours.pool.kv[pages].float()).all()
    assert not ours.pool.kv[0].view(torch.uint8).any()


def test_an_attention_without_a_form_in_8_bits_is_refused(tmp_path: Path):
    write_sparse_checkpoint(tmp_path, built(sparse_config(), torch.float32))
    with pytest.raises(CheckpointError, match=r"kv_dtype fp8_e4m3: SparseBlock.*--kv-dtype auto"):
        load_model(tmp_path, dtype=torch.float32, kv_dtype="fp8_e4m3")
