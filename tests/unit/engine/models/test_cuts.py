"""The parts of all ranks are the model: of every tensor, and of its heads; what cannot be cut is refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.kv.layouts import MHALayout
from baton.engine.models.moe import GPT_OSS_NAMES, QWEN_NAMES, MoEConfig
from baton.engine.models.quant.config import Fp8Form, Int4Form, QuantConfig
from baton.engine.models.quant.kv_scales import KV_SCALE_SUFFIXES
from baton.engine.models.quant.projections import Projections
from baton.engine.models.registry import MODELS, load_model_config
from baton.engine.models.weight_cuts import EXPERT_NUMBER, PARTS, cuts_of, rank_config
from baton.engine.models.weights import iter_safetensors, load_model
from baton.engine.parallel.group import TensorGroup
from baton.engine.parallel.sharing import Sharing, attention_parallel, tensor_parallel
from baton.kernels.fp8_scales import FP8
from baton.tests.parity.eagle3_toys import toy_target
from baton.tests.parity.quant_toys import (
    EXPERTS,
    FORMS,
    ORDERED,
    WIDE_EXPERTS,
    write_kv_scales,
    write_quantised,
)
from baton.tests.parity.quant_toys import SHAPE as QUANT_SHAPE
from baton.tests.parity.test_gpt_oss import write_packed
from safetensors.torch import load_file, save_file

LAYOUT = {"num_layers": 3, "page_size": 4, "dtype": torch.float32}
BLOCKS = QUANT_SHAPE | {"head_dim": 128}  # whole blocks on each of two ranks
MXFP4 = MoEConfig(
    num_experts=4, top_k=2, intermediate_size=64, is_normalised=True, names=GPT_OSS_NAMES, is_packed=True
)


WAYS: dict[str, Callable[[TensorGroup], Sharing]] = {
    "tp": tensor_parallel,
    "tp, ep": partial(tensor_parallel, by_expert=True),
    "dp": attention_parallel,
    "dp, ep": partial(attention_parallel, by_expert=True),
}


def ranks_of(num_ranks: int, way: str = "tp") -> list[Sharing]:
    """What each of `num_ranks` ranks shares."""
    return [WAYS[way](TensorGroup(rank=rank, size=num_ranks)) for rank in range(num_ranks)]


def parts_of(path: Path, num_ranks: int, way: str = "tp", **settings: str) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank as the checkpoint has them, without a process group: nothing is computed."""
    ranks = ranks_of(num_ranks, way)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Projections, "finish", lambda self: None)
        models = [load_model(path, dtype=torch.float32, sharing=rank, **settings)[0] for rank in ranks]
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


def test_one_scale_of_a_layers_keys_is_that_of_ranks_with_one_head_each(
    toy_checkpoint: Callable[..., Path], tmp_path: Path
):
    write_quantised(toy_checkpoint("qwen3", **QUANT_SHAPE, num_hidden_layers=1), tmp_path, "channel")
    scales = write_kv_scales(tmp_path, 1)
    for part in parts_of(tmp_path, 2, kv_dtype="fp8_e4m3"):
        for name, scale in scales.items():
            assert part[name].tolist() == pytest.approx([scale])


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


def assert_parts_are_whole(path: Path, num_ranks: int, way: str = "tp") -> None:
    """Each rank has its cut of every stored tensor, and together they have all of it."""
    config, ranks = load_model_config(path), parts_of(path, num_ranks, way)
    sharing = ranks_of(num_ranks, way)
    for name, stored in iter_safetensors(path):
        if EXPERT_NUMBER.search(name) and way.endswith("ep"):
            (part,) = [tensors[name] for tensors in ranks if name in tensors]
            assert part.dtype == stored.dtype or FP8 not in (part.dtype, stored.dtype), name
            whole = stored.float() if stored.numel() == 1 else stored.float().reshape(part.shape)
            torch.testing.assert_close(part.float(), whole.expand(part.shape), atol=0, rtol=0)
            continue
        if name not in ranks[0]:
            assert name.endswith(KV_SCALE_SUFFIXES), name
            continue
        whole = stored if stored.numel() > 1 else stored.expand(ranks[0][name].shape)
        whole = whole.view(-1) if ranks[0][name].dim() == 1 else whole
        whole = whole if whole.dtype != FP8 else whole.view(torch.uint8)
        covered = torch.zeros_like(whole)
        for rank, tensors in enumerate(ranks):
            part = tensors[name] if tensors[name].dtype != FP8 else tensors[name].view(torch.uint8)
            cut = cuts_of([name], config, sharing[rank]).get(name)
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
        elif stored.numel() > 1 and name.endswith(".weight") and way.startswith("tp"):
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
    own = MHALayout.of(rank_config(config, ranks_of(num_ranks)[0]), **LAYOUT)
    assert own == MHALayout.of(config, **LAYOUT).shard(num_ranks)


def test_query_heads_of_a_rank_meet_their_own_kv_heads():
    config = replace(toy_target(), num_heads=12, num_kv_heads=3, head_dim=1)
    for num_ranks in (1, 3, 6, 12):
        for rank in range(num_ranks):
            names = ["a.q_proj.weight", "a.k_proj.weight"]
            cuts = cuts_of(names, config, ranks_of(num_ranks)[rank]) if num_ranks > 1 else {}
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
        rank_config(replace(toy_target(), **changes), ranks_of(num_ranks)[0], "somewhere")
    assert said in str(caught.value)


def test_every_architecture_but_the_sparse_one_can_be_cut():
    refused = []
    for entry in MODELS:
        try:
            rank_config(replace(toy_target(), architecture=entry.architecture), ranks_of(2)[0])
        except CheckpointError:
            refused.append(entry.architecture)
    assert refused == ["SparseBlockForCausalLM"]


OTHERS = ("qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
EVEN = {"mixtral": {"num_local_experts": 4, "num_hidden_layers": 1}}  # others have an even number


@pytest.mark.parametrize("way", ["tp, ep", "dp", "dp, ep"])
@pytest.mark.parametrize(
    "family", ["mixtral", *(pytest.param(family, marks=pytest.mark.slow) for family in OTHERS)]
)
def test_experts_are_dealt_whole_or_by_their_widths_to_their_ranks(
    toy_checkpoint: Callable[..., Path], family: str, way: str
):
    assert_parts_are_whole(toy_checkpoint(family, **EVEN.get(family, {})), 2, way)


def test_packed_experts_are_dealt_whole(toy_copy: Callable[..., Path], tmp_path: Path):
    """Also where their widths could not be cut."""
    write_packed(toy_copy("gpt_oss", intermediate_size=32, num_hidden_layers=1), tmp_path / "packed")
    for way in ("tp, ep", "dp, ep"):
        assert_parts_are_whole(tmp_path / "packed", 2, way)


@pytest.mark.parametrize(
    ("family", "form", "way"),
    [
        ("qwen3_moe", "block", "tp, ep"),
        pytest.param("deepseek_v3", "block", "dp, ep", marks=pytest.mark.slow),
        pytest.param("mixtral", "tensor", "tp, ep", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "gptq", "dp, ep", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "awq", "dp, ep", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "channel", "dp", marks=pytest.mark.slow),
    ],
)
def test_quantised_experts_are_dealt_whole_or_by_their_widths(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, form: str, way: str
):
    """Whole also where their widths could not be cut."""
    sizes = BLOCKS | EXPERTS[family] | EVEN.get(family, {})
    write_quantised(toy_checkpoint(family, **sizes), tmp_path / form, form)
    assert_parts_are_whole(tmp_path / form, 2, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_reads_no_bytes_of_the_experts_of_others(
    toy_checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture, way: str
):
    caplog.set_level("INFO", "baton.engine.models.weights")
    path = toy_checkpoint("mixtral", **EVEN["mixtral"])
    whole = {name: tensor.nbytes for name, tensor in iter_safetensors(path)}
    experts = sum(size for name, size in whole.items() if EXPERT_NUMBER.search(name))
    for tensors in parts_of(path, 2, way):
        own = sum(tensor.nbytes for name, tensor in tensors.items() if EXPERT_NUMBER.search(name))
        assert own == experts // 2
        if way.startswith("dp"):
            rest = sum(tensor.nbytes for name, tensor in tensors.items() if not EXPERT_NUMBER.search(name))
            assert rest == sum(whole.values()) - experts


def test_a_missing_expert_is_missed_by_its_rank_an_unknown_one_by_all(
    toy_copy: Callable[..., Path],
):
    path = toy_copy("mixtral", **EVEN["mixtral"])
    file = path / "model.safetensors"
    stored = load_file(file)
    name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    last = name.format(load_model_config(path).moe.num_experts - 1)
    first, second = ranks_of(2, "tp, ep")
    save_file({key: tensor for key, tensor in stored.items() if key != last}, file)
    load_model(path, dtype=torch.float32, sharing=first)
    with pytest.raises(CheckpointError, match=f"tensor {last} is missing"):
        load_model(path, dtype=torch.float32, sharing=second)
    save_file(stored | {name.format(99): stored[last].clone()}, file)
    for sharing in (first, second):
        with pytest.raises(CheckpointError, match=r"experts\.99\.w1\.weight is unknown"):
            load_model(path, dtype=torch.float32, sharing=sharing)


SOME_EXPERTS = MoEConfig(num_experts=6, top_k=2, intermediate_size=40, is_normalised=True, names=QWEN_NAMES)


@pytest.mark.parametrize(
    ("way", "num_ranks", "changes", "said"),
    [
        ("tp, ep", 4, {"moe": SOME_EXPERTS, "num_heads": 4}, "6 experts, which 4 does not divide; use tp 1,"),
        ("dp, ep", 4, {"moe": SOME_EXPERTS}, "6 experts, which 4 does not divide; use dp_attention 2, 3, 6"),
        ("dp", 3, {"moe": SOME_EXPERTS}, "width 40, which 3 does not divide; use dp_attention 2, 4, 5"),
        ("tp, ep", 2, {}, "without experts to share; use tp 2 without ep"),
        ("dp", 2, {}, "without experts to share; start as many workers instead"),
        ("dp", 2, {"moe": replace(MXFP4, intermediate_size=96)}, "in blocks of 32 with one scale, which 2"),
        ("dp", 2, {"moe": replace(SOME_EXPERTS, intermediate_size=384), "quant": QuantConfig(
            form=Fp8Form(has_blocks=True))}, "384 in blocks of 128 with one scale, which 2 ranks would cut; "
            "use dp_attention 3"),
    ],
)  # fmt: skip
def test_experts_that_ranks_cannot_share_are_refused_with_what_fits(
    way: str, num_ranks: int, changes: dict[str, object], said: str
):
    with pytest.raises(CheckpointError) as caught:
        rank_config(replace(toy_target(), **changes), ranks_of(num_ranks, way)[0], "somewhere")
    text = str(caught.value).replace("expert intermediate size", "width")
    assert said in text
    assert text.startswith(f"{ranks_of(num_ranks, way)[0].setting}: the model at somewhere ")
