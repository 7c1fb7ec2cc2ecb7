"""A dry run over some numbers of rows and some layers meets the kernels of all."""

from pathlib import Path

import pytest
import torch
from baton.engine.models.interface import CausalLM
from baton.engine.warmup.variants import first_layers, row_counts
from baton.tests.unit.engine.models.test_joined_layers import (
    FAMILIES,
    PLAIN,
    QUANTISED,
    model_of,
    one_row_each,
    planned_on_a_gpu,
)

FEW_ROWS, MOST_ROWS = 20, 70
# Up to four rows are joined, and more than five grouped.
MANY_EXPERTS = FAMILIES["qwen3-moe in blocks of 8 bits"] | {"num_experts": 64, "num_experts_per_tok": 2}


def variants(model: CausalLM, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> set[tuple[object, ...]]:
    """What a step of one row of each of `num_rows` requests launches on an H200."""
    run = one_row_each(model, num_rows)
    with planned_on_a_gpu(monkeypatch) as planned:
        model.compute_logits(run())
    return {launch.variant for launch in planned}


@pytest.fixture
def triton() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "family",
    [
        "llama", "llama in 8 bits", "llama in 4 bits", "qwen3-moe wholly in 4 bits",
        "qwen3-moe with attention in 8 bits", "qwen3-moe in blocks of 8 bits",
        "latents in blocks of 8 bits", "many experts in blocks of 8 bits",
    ],
)  # fmt: skip
@torch.no_grad()
def test_any_number_of_rows_launches_what_a_dry_run_met(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.version, "cuda", "13.0")  # whose library multiplies in blocks
    monkeypatch.setitem(FAMILIES, "many experts in blocks of 8 bits", MANY_EXPERTS)
    monkeypatch.setitem(QUANTISED, "many experts in blocks of 8 bits", "fp8-blocks")
    model = first_layers(model_of(family, None, torch.bfloat16, tmp_path, monkeypatch))
    most = MOST_ROWS if "blocks" in family else FEW_ROWS
    met = set().union(*(variants(model, count, monkeypatch) for count in row_counts(most)))
    for count in range(1, most + 1):
        assert not variants(model, count, monkeypatch) - met, count


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("llama in 4 bits", "mlp"), ("llama in 4 bits", "self_attn"),
        ("qwen3-moe wholly in 4 bits", "mlp"), ("qwen3-moe in blocks of 8 bits", "mlp"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_layers_whose_weights_are_stored_otherwise_are_not_left_out(
    family: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nor those behind them, whose first product meets the tiles of another kernel."""
    monkeypatch.setitem(FAMILIES, "mixed", FAMILIES[family] | {"num_hidden_layers": 7})
    monkeypatch.setitem(QUANTISED, "mixed", QUANTISED[family])
    monkeypatch.setitem(PLAIN, "mixed", {"modules_to_not_convert": [f"model.layers.3.{module}"]})
    model = model_of("mixed", None, torch.bfloat16, tmp_path, monkeypatch)
    short = first_layers(model)
    assert len(short.layers) == 6
    for count in (1, 2, 4, 8):
        assert variants(short, count, monkeypatch) == variants(model, count, monkeypatch), count
