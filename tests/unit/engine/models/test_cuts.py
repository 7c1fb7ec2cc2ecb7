"""The parts of all ranks are the model: of every tensor, and of its heads; what cannot be cut is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.kv.layouts import MHALayout
from baton.engine.models.cuts import PARTS, cuts_of, rank_config
from baton.engine.models.moe import GPT_OSS_NAMES, QWEN_NAMES, MoEConfig
from baton.engine.models.quant.config import Fp8Form, Int4Form, QuantConfig
from baton.engine.models.quant.kv_scales import KV_SCALE_SUFFIXES
from baton.engine.models.quant.projections import Projections
from baton.engine.models.registry import MODELS, load_model_config
from baton.engine.models.weights import iter_safetensors, load_model
from baton.engine.parallel.group import TensorGroup
from baton.kernels.fp8_scales import FP8
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.parity.quant_toys import (
    FORMS,
    ORDERED,
    WIDE_EXPERTS,
    write_kv_scales,
    write_quantised,
)
from baton.tests.parity.quant_toys import SHAPE as QUANT_SHAPE
from baton.tests.parity.test_gpt_oss import write_packed

LAYOUT = {"num_layers": 3, "page_size": 4, "dtype": torch.float32}
BLOCKS = QUANT_SHAPE | {"head_dim": 128}  # whole blocks on each of two ranks
MXFP4 = MoEConfig(
    num_experts=4, top_k=2, intermediate_size=64, is_normalised=True, names=GPT_OSS_NAMES, is_packed=True
)


def parts_of(path: Path, num_ranks: int, **settings: str) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank as the checkpoint has them, without a process group: nothing is computed."""
    groups = [TensorGroup(rank=rank, size=num_ranks) for rank in range(num_ranks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Projections, "finish", lambda self: None)
        models = [load_model(path, dtype=torch.float32, group=group, **settings)[0] for group in groups]
    return [dict(model.tensors()) for model in models]


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        ("llama", 2),
        ("qwen3_moe", 4),
        ("mixtral", 2),
        ("deepseek_v2", 4),
        ("deepseek_v3", 2),
        ("qwen2_moe", 2),
        ("glm4_moe", 2),
        ("phi3", 2),
        ("olmo2", 4),
        ("gpt_oss", 2),
    ],
)
def test_the_parts_of_all_ranks_are_the_stored_tensor(
    toy_checkpoint: Callable[..., Path], family: str, num_ranks: int
):
    assert_parts_are_whole(toy_checkpoint(family, vocab_size=257), num_ranks)


@pytest.mark.parametrize("form", [form for form in FORMS if form != ORDERED])
def test_the_parts_of_a_quantised_checkpoint_are_the_stored_tensors(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, form: str
):
    write_quantised(toy_checkpoint("llama", **BLOCKS, num_hidden_layers=1), tmp_path, form)
    if form == "channel":
        write_kv_scales(tmp_path, 1)
    assert_parts_are_whole(tmp_path, 2)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("deepseek_v3", "block"),
        pytest.param("qwen3_moe", "block", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "gptq", marks=pytest.mark.slow),
        pytest.param("mixtral", "tensor", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "awq", marks=pytest.mark.slow),
    ],
)
def test_the_parts_of_quantised_experts_are_the_stored_tensors(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, form: str
):
    write_quantised(toy_checkpoint(family, **BLOCKS | WIDE_EXPERTS[family]), tmp_path, form)
    assert_parts_are_whole(tmp_path, 2)


def test_experts_in_4_bits_are_cut_between_their_blocks(toy_copy: Callable[..., Path], tmp_path: Path):
    write_packed(toy_copy("gpt_oss", intermediate_size=128, num_hidden_layers=1), tmp_path / "packed")
    assert_parts_are_whole(tmp_path / "packed", 4)


def assert_parts_are_whole(path: Path, num_ranks: int) -> None:
    """Each rank has its cut of every stored tensor, and together they have all of it."""
    config, ranks = load_model_config(path), parts_of(path, num_ranks)
    for name, stored in iter_safetensors(path):
        if name not in ranks[0]:
            assert name.endswith(KV_SCALE_SUFFIXES), name
            continue
        cut = cuts_of([name], config, TensorGroup(rank=0, size=num_ranks)).get(name)
        whole = stored if stored.numel() > 1 else stored.expand(ranks[0][name].shape)
        whole = whole.view(-1) if ranks[0][name].dim() == 1 else whole
        whole = whole if whole.dtype != FP8 else whole.view(torch.uint8)
        covered = torch.zeros_like(whole)
        for rank, tensors in enumerate(ranks):
            part = tensors[name] if tensors[name].dtype != FP8 else tensors[name].view(torch.uint8)
            cut = cuts_of([name], config, TensorGroup(rank=rank, size=num_ranks)).get(name)
            if cut is None or stored.numel() == 1:
                torch.testing.assert_close(part, whole.to(part.dtype), atol=0, rtol=0)
                continue
            assert not part.narrow(cut.dim, cut.size, part.shape[cut.dim] - cut.size).any()
            at = 0
            for first, size in cut.spans:
                held = part.narrow(cut.dim, at, size)
                wanted = whole.narrow(cut.dim, first, size).to(held.dtype)
                torch.testing.assert_close(held, wanted, atol=0, rtol=0)
                covered.narrow(cut.dim, first, size).fill_(1)
                at += size
        if covered.any():
            assert covered.all(), name
        elif stored.numel() > 1 and name.endswith(".weight"):
            assert name.rpartition(".")[0].rpartition(".")[2] not in PARTS, name


def test_weights_rounded_at_load_are_rounded_alike_on_all_ranks(toy_checkpoint: Callable[..., Path]):
    """Rows of a matrix that is cut by its inputs have one scale."""
    path = toy_checkpoint("phi3", num_hidden_layers=1)
    (whole,), ranks = parts_of(path, 1, quantize="fp8"), parts_of(path, 2, quantize="fp8")
    layer = "model.layers.0."
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        both = [rank[f"{layer}{name}.weight"].view(torch.uint8) for rank in ranks]
        assert torch.equal(torch.cat(both, dim=1), whole[f"{layer}{name}.weight"].view(torch.uint8))
        for rank in ranks:
            assert torch.equal(rank[f"{layer}{name}.weight_scale"], whole[f"{layer}{name}.weight_scale"])
    rows = [rank[f"{layer}mlp.gate_up_proj.weight_scale"].chunk(2) for rank in ranks]
    gates, ups = zip(*rows, strict=True)
    assert torch.equal(torch.cat((*gates, *ups)), whole[f"{layer}mlp.gate_up_proj.weight_scale"])


def test_a_rank_reads_its_part_of_the_bytes_only(toy_checkpoint: Callable[..., Path], caplog):
    caplog.set_level("INFO", "baton.engine.models.weights")
    path = toy_checkpoint("llama", hidden_size=128, intermediate_size=512, num_hidden_layers=1)
    whole = sum(tensor.nbytes for _, tensor in iter_safetensors(path))
    read = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in parts_of(path, 2)]
    norms = 3 * 128 * 4
    assert [bytes_of for bytes_of in read] == [(whole - norms) // 2 + norms] * 2
    assert all("weights: 0.00 GiB" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_a_ranks_config_has_the_kv_layout_of_a_shard(num_kv_heads: int, num_ranks: int):
    config = replace(toy_target(), num_heads=8, num_kv_heads=num_kv_heads)
    own = MHALayout.of(rank_config(config, num_ranks), **LAYOUT)
    assert own == MHALayout.of(config, **LAYOUT).shard(num_ranks)


def test_query_heads_of_a_rank_meet_their_own_kv_heads():
    config = replace(toy_target(), num_heads=12, num_kv_heads=3, head_dim=1)
    for num_ranks in (1, 3, 6, 12):
        for rank in range(num_ranks):
            group = TensorGroup(rank=rank, size=num_ranks)
            cuts = cuts_of(["a.q_proj.weight", "a.k_proj.weight"], config, group) if num_ranks > 1 else {}
            if not cuts:
                continue
            queries, keys = cuts["a.q_proj.weight"], cuts["a.k_proj.weight"]
            each, local = 12 // 3, queries.size // keys.size
            ((query, _),), ((key, _),) = queries.spans, keys.spans
            wanted = [(query + i) // each for i in range(queries.size)]
            assert wanted == [key + i // local for i in range(queries.size)]


@pytest.mark.parametrize(
    ("changes", "num_ranks", "said"),
    [
        (
            {"num_heads": 9, "num_kv_heads": 3},
            2,
            "9 attention heads, which 2 does not divide; use tp 1, 3",
        ),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "has 3 KV heads, which cannot be dealt to 2 ranks"),
        ({"intermediate_size": 97}, 2, "has intermediate_size 97, which 2 does not divide; use tp 1"),
        ({"architecture": "SparseBlockForCausalLM"}, 2, "runs on one device only; use tp 1"),
        (
            {"quant": QuantConfig(form=Fp8Form(has_blocks=True)), "head_dim": 128, "intermediate_size": 384},
            2,
            "intermediate_size 384 in blocks of 128 with one scale, which 2 ranks would cut; use tp 1",
        ),
        (
            {"quant": QuantConfig(form=Fp8Form(has_blocks=True)), "intermediate_size": 256, "head_dim": 96},
            2,
            "width of queries 384 in blocks of 128 with one scale, which 2 ranks would cut",
        ),
        (
            {
                "quant": QuantConfig(form=Int4Form(packing="awq", group_size=128)),
                "head_dim": 64,
                "intermediate_size": 128,
            },
            2,
            "intermediate_size 128 in groups of 128 with one scale, which 2 ranks would cut; use tp 1",
        ),
        (
            {
                "quant": QuantConfig(form=Int4Form(packing="gptq", group_size=32, has_order=True)),
                "head_dim": 64,
                "intermediate_size": 128,
            },
            2,
            "inputs in the order of activations (desc_act), whose groups 2 ranks would cut",
        ),
        (
            {
                "quant": QuantConfig(form=Fp8Form(has_blocks=True)),
                "head_dim": 128,
                "moe": replace(MXFP4, intermediate_size=384, is_packed=False, names=QWEN_NAMES),
            },
            2,
            "expert intermediate size 384 in blocks of 128 with one scale, which 2 ranks would cut",
        ),
        (
            {"moe": replace(MXFP4, intermediate_size=96)},
            2,
            "expert intermediate size 96 in blocks of 32 with one scale, which 2 ranks would cut",
        ),
    ],
    ids=[
        "heads",
        "kv-heads",
        "width",
        "architecture",
        "fp8-mlp",
        "fp8-heads",
        "int4",
        "order",
        "fp8-experts",
        "mxfp4",
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_what_fits(
    changes: dict[str, object], num_ranks: int, said: str
):
    with pytest.raises(CheckpointError, match=r"^tp 2: the model at somewhere") as caught:
        rank_config(replace(toy_target(), **changes), num_ranks, "somewhere")
    assert said in str(caught.value)


def test_every_architecture_but_the_sparse_one_can_be_cut():
    refused = []
    for entry in MODELS:
        try:
            rank_config(replace(toy_target(), architecture=entry.architecture), 2)
        except CheckpointError:
            refused.append(entry.architecture)
    assert refused == ["SparseBlockForCausalLM"]
