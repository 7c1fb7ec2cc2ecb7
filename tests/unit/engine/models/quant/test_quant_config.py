"""The quantisation of a checkpoint is understood, or refused in one line with key, value and remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.engine.errors import CheckpointError
from baton.engine.models.quant.config import Fp8Form, Int4Form, QuantConfig
from baton.engine.models.quant.registry import quantise_at_load, read_quantisation
from baton.engine.models.weights import load_model, weight_bytes
from baton.tests.parity.quant_toys import EXPERTS, QUANTISED, SHAPE, compressed, write_quantised
from safetensors.torch import load_file, save_file

SOURCE = Path("config.json")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def read(section: object) -> QuantConfig | None:
    return read_quantisation({"quantization_config": section}, SOURCE)


def refusal(action: Callable[..., object], *arguments: object, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_section_is_no_quantisation():
    assert read_quantisation({}, SOURCE) is None
    assert read(None) is None


def test_each_method_is_read():
    assert read(BLOCKS) == QuantConfig(form=Fp8Form(scale_name="weight_scale_inv", has_blocks=True))
    assert read({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}) == (
        QuantConfig(form=Fp8Form(has_input_scale=True), ignored=("lm_head",))
    )
    assert read(compressed("channel")) == QuantConfig(form=Fp8Form(), ignored=("lm_head",))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    assert read(awq) == QuantConfig(form=Int4Form(packing="awq", group_size=128))
    assert read(GPTQ) == QuantConfig(form=Int4Form(packing="gptq", group_size=32, zero_offset=1))
    ordered = Int4Form(packing="gptq", group_size=32, zero_offset=1, has_order=True)
    assert read(GPTQ | {"desc_act": True}) == QuantConfig(form=ordered)
    assert read(GPTQ | {"desc_act": True, "static_groups": True}) == read(GPTQ)
    second = QuantConfig(form=Int4Form(packing="gptq", group_size=32))
    assert read(GPTQ | {"checkpoint_format": "gptq_v2"}) == second
    scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
    found = read(compressed("tensor") | {"kv_cache_scheme": scheme})
    assert found is not None
    assert found.has_kv_scales


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ([], None),
        ("fp8", ["quantization_config", "JSON object"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "compressed-tensors"]),
        (BLOCKS | {"weight_block_size": [64, 128]}, ["weight_block_size", "[64, 128]", "[128, 128]"]),
        (BLOCKS | {"fmt": "e5m2"}, ["fmt", "e5m2", "e4m3"]),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "list of module names"]),
        ({"quant_method": "awq", "bits": 3, "group_size": 64}, ["quantization_config.bits", "3"]),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, ["group_size", "100", "32, 64, 128"]),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, ["version", "gemv"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, ["group_size", "-1"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": 1}, ["desc_act", "true or false"]),
        (GPTQ | {"lm_head": True}, ["quantization_config.lm_head = True", "lm_head false"]),
        (
            GPTQ | {"dynamic": {"+:.*up_proj": {"bits": 8}}},
            ["quantization_config.dynamic", "+:.*up_proj", "-:"],
        ),
        (GPTQ | {"dynamic": {"-:.*mlp": {}, ".*up_proj": {"bits": 8}}}, [".dynamic", "'.*up_proj' gives"]),
        (GPTQ | {"dynamic": {"-:(": {}}}, [".dynamic", "'-:(' is no regular expression"]),
        (GPTQ | {"dynamic": ["-:.*mlp"]}, [".dynamic", "JSON object"]),
        (compressed("group"), ["config_groups.group_0.weights.strategy", "group", "channel"]),
        (
            compressed("channel") | {"format": "pack-quantized"},
            ["format", "pack-quantized", "float-quantized"],
        ),
        (compressed("channel") | {"config_groups": {}}, ["config_groups", "exactly one group"]),
        (
            compressed("channel") | {"kv_cache_scheme": {"type": "int", "num_bits": 8}},
            ["kv_cache_scheme.type"],
        ),
    ],
)
def test_other_forms_are_refused(section: object, words: list[str] | None):
    if words is None:
        assert read(section) is None
        return
    message = refusal(read, section)
    assert all(word in message for word in ["config.json", *words]), message


@pytest.mark.parametrize(
    ("entry", "module", "is_ignored"),
    [
        ("lm_head", "lm_head", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp", "model.layers.0.mlp.gate_proj", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("re:.*self_attn", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
    ],
)
def test_ignored_names_are_dotted_parts_or_expressions(entry: str, module: str, is_ignored: bool):
    assert QuantConfig(form=Fp8Form(), ignored=(entry,)).is_ignored(module) == is_ignored


def test_modules_that_gptqmodel_leaves_out_keep_their_floats():
    found = read(GPTQ | {"lm_head": False, "dynamic": {r"-:.*\.1\..*up": {}, "-:model.embed": {}}})
    assert found is not None
    assert found.is_ignored("model.layers.1.mlp.up_proj")
    assert not found.is_ignored("model.layers.11.mlp.up_proj")
    assert not found.is_ignored("model.layers.1.mlp.down_proj")
    assert read(GPTQ | {"dynamic": {}}) == read(GPTQ | {"dynamic": None}) == read(GPTQ)


def test_a_quantised_checkpoint_is_not_rounded_again():
    assert "quantised already" in refusal(quantise_at_load, "fp8", read(BLOCKS), SOURCE)
    assert "none or fp8" in refusal(quantise_at_load, "fp4", None, SOURCE)


def damaged(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return refusal(load_model, path, dtype=torch.float32)


def test_tensors_of_another_form_are_refused(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    plain = toy_checkpoint("llama", **SHAPE)
    name = "model.layers.1.mlp.up_proj.weight"
    path = tmp_path / "channel"
    write_quantised(plain, path, "channel")
    found = load_file(path / "model.safetensors")[name]
    assert f"{name}_scale" in damaged(path, lambda tensors: tensors.pop(f"{name}_scale"))
    write_quantised(plain, tmp_path / "floats", "channel")
    as_float = damaged(tmp_path / "floats", lambda tensors: tensors.update({name: found.float()}))
    assert name in as_float
    assert "float8_e4m3fn" in as_float
    write_quantised(plain, tmp_path / "order", "gptq")
    name = "model.layers.0.mlp.down_proj.g_idx"
    message = damaged(tmp_path / "order", lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    assert name in message
    assert "desc_act" in message
    write_quantised(plain, tmp_path / "part", "channel", ignore=["model.layers.0.self_attn.q_proj"])
    message = refusal(load_model, tmp_path / "part", dtype=torch.float32)
    assert "model.layers.0.self_attn.q_proj" in message
    assert "k_proj, v_proj" in message


def test_experts_that_no_kernel_runs_are_refused(toy_checkpoint: Callable[..., Path], tmp_path: Path):
    experts = toy_checkpoint("qwen3_moe", **SHAPE | EXPERTS["qwen3_moe"])
    write_quantised(experts, tmp_path / "order", "gptq_ordered")
    message = refusal(load_model, tmp_path / "order", dtype=torch.float32)
    assert "model.layers.0.mlp.experts.*" in message
    assert "desc_act false" in message
    ignore = ["model.layers.0.mlp.experts.0.up_proj"]
    write_quantised(experts, tmp_path / "part", "channel", ignore=ignore)
    message = refusal(load_model, tmp_path / "part", dtype=torch.float32)
    assert "quantization_config ignores model.layers.0.mlp.experts.0.up_proj" in message
    narrow = toy_checkpoint("qwen3_moe", **SHAPE | EXPERTS["qwen3_moe"] | {"moe_intermediate_size": 96})
    write_quantised(narrow, tmp_path / "narrow", "block")
    message = refusal(load_model, tmp_path / "narrow", dtype=torch.float32)
    assert "experts.0.gate_proj: 96 outputs are no multiple of 128" in message
    write_quantised(experts, tmp_path / "missing", "block")
    name = "model.layers.0.mlp.experts.3.down_proj.weight_scale_inv"
    assert f"tensor {name} is missing" in damaged(tmp_path / "missing", lambda tensors: tensors.pop(name))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_rounding_while_loading_equals_rounding_rows(toy_checkpoint: Callable[..., Path], family: str):
    """Each row's largest value becomes 448, the largest e4m3, and other matrices keep their floats."""
    path = toy_checkpoint(family, **SHAPE | EXPERTS.get(family, {}))
    model, config = load_model(path, dtype=torch.float32, quantize="fp8")
    ours, stored = dict(model.tensors()), load_file(path / "model.safetensors")
    assert str(config.quant) == "fp8"
    assert ours["lm_head.weight"].dtype == torch.float32
    rounded = {name for name in stored if QUANTISED.search(name) and "kv_b_proj" not in name}
    for name, weight in stored.items():
        if name in rounded:
            scales = weight.abs().amax(1) / 448
            expected = (weight / scales[:, None]).to(torch.float8_e4m3fn)
            torch.testing.assert_close(ours[f"{name}_scale"], scales)
            assert torch.equal(ours[name].float(), expected.float()), name
        else:
            assert ours[name].dtype == torch.float32, name
    num_rounded = sum(stored[name].numel() for name in rounded)
    whole = weight_bytes(path, torch.bfloat16)
    assert weight_bytes(path, torch.bfloat16, quantize="fp8") == whole - num_rounded


@pytest.mark.parametrize(
    ("entry", "skipped"),
    [
        (r"re:model\.language_model\.layers\.0\..*", True),
        ("re:language_model.model.layers.0.*", True),
        (r"re:.*language_model.*layers\.0\.mlp.*", True),
        ("re:.*mlp.down_proj", True),
        (r"re:^(?!.*language_model).*", False),
        (r"re:^(?!model\.language_model\.layers).*$", False),
        (r"re:^(?!language_model\.model\.layers).*$", False),
        ("re:.*vision_tower.*", False),
    ],
)
def test_a_regular_expression_may_name_modules_of_the_whole(entry: str, skipped: bool):
    """Of a checkpoint that also reads images: its text model has names without `language_model` here."""
    found = QuantConfig(form=Fp8Form(), ignored=(entry,))
    assert found.is_ignored("model.layers.0.mlp.down_proj") == skipped
