"""`baton doctor` and `baton plan` choose the sizes that a worker of this host chooses."""

import json
from pathlib import Path

import pytest
import torch
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.cluster.errors import ConfigError
from baton.deploy.capacity.checkpoints import (
    count_head_weights,
    count_weights,
    head_dir,
    head_kv_bytes,
    shape_of,
)
from baton.deploy.capacity.worker_sizes import find_card, worker_need, worker_sizes
from baton.deploy.cli import plan
from baton.deploy.cli.findings import FAIL, OK, check_sizes
from baton.engine.auto_sizes import CONTEXT_BYTES, MIB, Card
from baton.engine.config import EngineConfig
from baton.engine.loader import EngineLoader
from baton.engine.models.registry import load_model_config
from baton.engine.models.weights import load_model, weight_bytes
from baton.tests.parity.dflash_toys import dflash_config, dflash_tensors, write_dflash
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.eagle_toys import eagle_config, eagle_tensors
from baton.tests.parity.mtp_toys import random_modules, write_mtp
from baton.tests.parity.quant_toys import EXPERTS, SHAPE, write_quantised
from baton.tests.parity.test_gpt_oss import write_packed
from baton.tests.parity.toy_models import FAMILIES
from safetensors.torch import save_file

H200 = "NVIDIA H200, 143771, 616, 143000, 9.0\nNVIDIA H200, 143771, 616, 20000, 9.0\n"
LLAMA_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip

SMALL_CPU = {"device": "cpu", "dtype": "float32", "kv_memory_mb": 3}


def loaded(config):
    loader = EngineLoader(EngineConfig.of(config), has_drafter=True)
    for _, run in loader.phases():
        run()
    return loader


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(16_060_522_496)  # sparse
    return tmp_path


QWEN_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}  # fmt: skip


GLM_EXPERTS = {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 1408, "n_shared_experts": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "experts",
    [
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
        QWEN_EXPERTS,
        QWEN_EXPERTS | {"mlp_only_layers": [3]},
        QWEN_EXPERTS | {"decoder_sparse_step": 2},
        QWEN_EXPERTS | {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 1024},
        GLM_EXPERTS,
        GLM_EXPERTS | {"first_k_dense_replace": 1},
    ],
)
def test_a_plan_counts_a_row_of_experts_as_the_engine_does(llama, experts):
    (llama / "config.json").write_text(json.dumps(LLAMA_8B | experts))
    planned = worker_need(llama, None, PrefillConfig(model=str(llama)), "bfloat16").model
    assert planned.intermediate_size == load_model_config(llama).row_width


def test_the_first_gpu_is_read_as_a_worker_sees_it():
    card = find_card("auto", lambda _: H200)
    assert (card.name, card.capability) == ("NVIDIA H200", (9, 0))
    assert card.total == 143155 * MIB
    assert card.free == 143000 * MIB - CONTEXT_BYTES
    assert find_card("cpu", lambda _: H200) == Card()
    for silent in ("", "no devices were found", "NVIDIA H200, [N/A], 616, 1, 9.0"):
        assert find_card("auto", lambda _, said=silent: said) == Card()


CUT = ("mistral", "gemma3", "gpt_oss")  # the first has a window in every layer, the others in some
WHOLE = [("llama", "auto"), ("deepseek_v3", "auto"), ("gpt_oss", "keep")]


@pytest.mark.parametrize(("family", "window_kv"), [*WHOLE, *((family, "auto") for family in CUT)])
@pytest.mark.parametrize("worker", [PrefillConfig, DecodeConfig])
def test_doctor_chooses_what_the_loader_chooses(toy_checkpoint, worker, family, window_kv):
    path = toy_checkpoint(family)
    config = worker(model=str(path), window_kv=window_kv, **SMALL_CPU)
    loader = EngineLoader(EngineConfig.of(config), has_drafter=worker is DecodeConfig)
    for _, run in loader.phases():
        run()
    assert worker_sizes(Card(), path, None, config) == loader.engine().sizes
    planned, budget = worker_need(path, None, config, "float32").per_token, loader._token_budget()
    assert planned == budget
    assert (budget.windows is not None) is ((family, window_kv) not in WHOLE)


def test_workers_with_tiers_are_planned_with_whole_pages(toy_checkpoint):
    path = toy_checkpoint("gpt_oss")
    plain, tiered = DecodeConfig(model=str(path)), DecodeConfig(model=str(path), host_cache_gib=1.0)
    whole, cut = (worker_need(path, None, config, "float32").per_token for config in (tiered, plain))
    assert whole.windows is None
    assert cut.windows is not None
    assert whole.kv_bytes == cut.kv_bytes + cut.windows.kv_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_windows_of_a_checkpoint_are_those_of_its_engine(toy_checkpoint, family):
    path = toy_checkpoint(family)
    assert shape_of(path).windows == load_model_config(path).forms.windows
    assert shape_of(path).max_context == load_model_config(path).max_position_embeddings


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("deepseek")])
def test_keys_that_a_config_lacks_have_the_values_of_its_family(toy_checkpoint, tmp_path, family):
    config = json.loads((toy_checkpoint(family) / "config.json").read_text())
    for key in (
        "head_dim",
        "num_key_value_heads",
        "sliding_window",
        "layer_types",
        "max_position_embeddings",
    ):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 8}))
    shape, loaded = shape_of(tmp_path), load_model_config(tmp_path)
    assert (shape.head_dim, shape.num_kv_heads) == (loaded.head_dim, loaded.num_kv_heads)
    assert (shape.windows, shape.max_context) == (loaded.forms.windows, loaded.max_position_embeddings)


def test_sizes_that_a_head_s_config_lacks_are_the_target_s(toy_checkpoint, tmp_path):
    """Not the defaults of the family that its config names."""
    target = shape_of(toy_checkpoint("llama"))
    head = {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(head))
    assert head_kv_bytes(tmp_path, target, 3) == target.kv_bytes // target.num_layers


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [({"layer_types": ["linear_attention"]}, "correct it"), ({"sliding_window": "9"}, "check that")],
)
def test_doctor_names_a_wrong_window_and_its_remedy(toy_checkpoint, tmp_path, wrong, remedy):
    config = json.loads((toy_checkpoint("gpt_oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    (found,) = check_sizes(Card(), tmp_path, None, DecodeConfig(model="m"))
    assert next(iter(wrong)) in found.text
    assert remedy in found.remedy


def test_no_number_of_positions_is_that_of_the_family(toy_checkpoint, tmp_path):
    config = json.loads((toy_checkpoint("qwen2") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": None}))
    assert shape_of(tmp_path).max_context == load_model_config(tmp_path).max_position_embeddings == 32768


def test_layers_of_unknown_families_are_not_judged(toy_checkpoint, tmp_path):
    config = json.loads((toy_checkpoint("llama") / "config.json").read_text())
    odd = {"architectures": ["OtherForCausalLM"], "layer_types": ["linear_attention"]}
    (tmp_path / "config.json").write_text(json.dumps(config | odd))
    assert shape_of(tmp_path).windows == ()


def test_a_wrong_list_of_layers_is_one_line(toy_checkpoint, tmp_path):
    config = json.loads((toy_checkpoint("gpt_oss") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["sliding_attention"]}))
    with pytest.raises(ConfigError, match=r"layer_types = .*give one for each layer"):
        shape_of(tmp_path)


@pytest.mark.parametrize("layers", ["", "0,1", "1"])
@pytest.mark.parametrize("no_draft", [False, True])
def test_doctor_counts_the_layers_that_prefill_offers(toy_checkpoint, tmp_path, layers, no_draft):
    path = toy_checkpoint("llama", num_hidden_layers=12)
    draft = write_dflash(tmp_path, dflash_config((9, 1)), dflash_tensors(num_features=2))
    sizes = {"device": "cpu", "dtype": "float32", "kv_memory_mb": 3}
    config = PrefillConfig(
        model=str(path), draft=str(draft), no_draft=no_draft, feature_layers=layers, **sizes
    )
    loader = EngineLoader(EngineConfig.of(config), has_drafter=False)
    for _, run in loader.phases():
        run()
    assert worker_sizes(Card(), path, draft, config) == loader.engine().sizes


def test_an_8b_on_a_gpu_is_sized_with_its_weights(llama):
    card = find_card("auto", lambda _: H200)
    prefill, decode = PrefillConfig(model="m"), DecodeConfig(model="m")
    assert worker_sizes(card, llama, None, prefill).chunk_size == 2048
    sizes = worker_sizes(card, llama, None, decode)
    assert sizes.max_running == 256
    assert 0.9 * card.total - 16_060_522_496 - sizes.kv_bytes - CONTEXT_BYTES == pytest.approx(
        sizes.reserved, abs=2 * MIB
    )


def test_doctor_tells_the_sizes_and_refuses_what_the_worker_refuses(llama):
    card = find_card("auto", lambda _: H200)
    (well,) = check_sizes(card, llama, None, DecodeConfig(model="m"))
    assert well.level == OK
    assert "decode on NVIDIA H200, 143155 MiB" in well.text
    assert "max_running 256" in well.text
    (ill,) = check_sizes(card, llama, None, DecodeConfig(model="m", gpu_memory_share=0.1))
    assert (ill.level, "--gpu-memory-share" in ill.remedy) == (FAIL, True)


def test_plan_takes_the_chunk_and_places_of_a_worker_here(llama):
    listed = {"nvidia-smi": ""}

    def planned(**settings):
        card = find_card("auto", lambda _: listed["nvidia-smi"])
        return plan.with_worker_sizes(plan.PlanConfig(model=str(llama), **settings), card)

    assert (planned().chunk, planned().max_running, planned().kv_memory_mb) == (256, 16, 1024)
    listed["nvidia-smi"] = H200
    assert (planned().chunk, planned().max_running) == (2048, 256)
    assert planned().kv_memory_mb > 100_000
    assert planned(chunk=0, max_running=3).max_running == 3
    assert planned(chunk=0).chunk == 0
    with pytest.raises(ConfigError, match="give at most"):
        planned(kv_memory_mb=200_000)


@pytest.mark.parametrize("ids", [(9, 1, 5, 7, 2), None])
def test_doctor_counts_the_features_and_the_kv_of_a_block_drafter(toy_checkpoint, tmp_path, ids):
    path = toy_checkpoint("llama", num_hidden_layers=12)
    tensors = dflash_tensors(num_features=2 if ids is None else len(ids))
    draft = write_dflash(tmp_path, dflash_config(ids), tensors)
    shape = shape_of(path, draft, "float32")
    sizes = {"device": "cpu", "dtype": "float32", "kv_memory_mb": 3}
    config = DecodeConfig(model=str(path), draft=str(draft), **sizes)
    loader = EngineLoader(EngineConfig.of(config), has_drafter=True)
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    assert shape.num_features == len(engine.feature_ids) == (2 if ids is None else 5)
    assert head_kv_bytes(draft, shape, 3) == engine.drafter.pool.layout.bytes_per_token
    assert worker_sizes(Card(), path, draft, config) == engine.sizes


@pytest.mark.parametrize(("count", "steps"), [(1, 3), (3, 2)])
@pytest.mark.parametrize("dialect", ["deepseek", "mimo"])
def test_doctor_counts_mtp_modules_beside_their_target_once(toy_checkpoint, tmp_path, dialect, count, steps):
    target = toy_checkpoint("llama", num_hidden_layers=4)
    path = write_mtp(tmp_path, target, dialect, random_modules(target, count), is_beside=True)
    shape, sizes = shape_of(path, path, "float32"), {"device": "cpu", "dtype": "float32", "kv_memory_mb": 3}
    config = DecodeConfig(model=str(path), draft=str(path), spec_steps=steps, **sizes)
    loader = EngineLoader(EngineConfig.of(config), has_drafter=True)
    for _, run in loader.phases():
        run()
    engine = loader.engine()
    assert head_kv_bytes(path, shape, steps) == engine.drafter.pool.layout.bytes_per_token
    assert worker_sizes(Card(), path, path, config) == engine.sizes
    modules = sum(each.numel() for module in random_modules(target, count) for each in module.values())
    assert (count_weights(path), count_head_weights(path)) == (count_weights(target), modules)


def test_modules_that_a_config_does_not_count_are_planned_as_they_run(toy_checkpoint, tmp_path):
    target = toy_checkpoint("qwen2", num_hidden_layers=4)
    modules = random_modules(target, 1, bias=True)
    keys = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": None}
    path = write_mtp(tmp_path, target, "mimo", modules, is_beside=True, **keys)
    shape = shape_of(path, path, "float32")
    engine = loaded(DecodeConfig(model=str(path), draft=str(path), **SMALL_CPU)).engine()
    assert shape.num_features == len(engine.feature_ids) == 1
    assert head_kv_bytes(path, shape, 3) == engine.drafter.pool.layout.bytes_per_token
    assert count_head_weights(path) == sum(each.numel() for each in modules[0].values())


@pytest.mark.parametrize("adaptive", ["on", "off"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle", "dflash", "mtp", "ngram"])
def test_late_rows_are_planned_for_heads_that_observe_late_alone(toy_checkpoint, tmp_path, kind, adaptive):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    write = {
        "eagle3": lambda: write_head(tmp_path, head_config(2), head_tensors()),
        "eagle": lambda: write_head(tmp_path, eagle_config(), eagle_tensors()),
        "dflash": lambda: write_dflash(tmp_path, dflash_config(), dflash_tensors()),
        "mtp": lambda: write_mtp(tmp_path, target, "qwen", random_modules(target, 1)),
        "ngram": lambda: "ngram",
    }
    draft = str(write[kind]())
    config = DecodeConfig(model=str(target), draft=draft, spec_adaptive=adaptive, **SMALL_CPU)
    loader = loaded(config)
    planned = worker_need(target, head_dir(draft), config, "float32").role.late_rows
    assert planned == loader._role().late_rows == loader.engine().steps.late_rows
    assert (planned > 0) is (adaptive == "on" and "eagle" in kind)


def test_the_layers_of_a_head_are_those_of_its_tensors(toy_checkpoint, tmp_path):
    """A published EAGLE3 head has the layers of its target in its config."""
    target = toy_checkpoint("llama", num_hidden_layers=4)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 28}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(target, None, "float32")
    each = shape.kv_bytes // shape.num_layers
    assert head_kv_bytes(tmp_path, shape, 3) == 28 * each
    nested = {"speculators_model_type": "eagle3", "transformer_layer_config": {"head_dim": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config | nested))
    assert head_kv_bytes(tmp_path, shape, 3) == 28 * each * 2 // shape.head_dim
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ("midlayer.self_attn.q_proj.weight", "fc.weight")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert head_kv_bytes(tmp_path, shape, 3) == each


@pytest.mark.parametrize("form", ["channel", "awq", "rounded at load"])
def test_planned_bytes_of_quantised_weights_are_those_of_a_worker(toy_checkpoint, tmp_path: Path, form: str):
    """Also the tokens of a pool in 8 bits, which hold half the bytes of bfloat16."""
    path, quantize = toy_checkpoint("llama", **SHAPE), "fp8"
    if form != "rounded at load":
        write_quantised(path, tmp_path / "checkpoint", form)
        path, quantize = tmp_path / "checkpoint", "none"
    config = DecodeConfig(model=str(path), quantize=quantize, kv_dtype="fp8_e4m3")
    planned = worker_need(path, None, config, "bfloat16")
    assert planned.model.weight_bytes == weight_bytes(path, torch.bfloat16, quantize=quantize)
    whole = worker_need(path, None, DecodeConfig(model=str(path)), "bfloat16")
    assert 2 * planned.per_token.kv_bytes == whole.per_token.kv_bytes
    plain = worker_need(toy_checkpoint("llama", **SHAPE), None, DecodeConfig(model="m"), "bfloat16")
    assert plain.model.num_weights == pytest.approx(planned.model.num_weights, rel=0.02)
    model, _ = load_model(path, dtype=torch.bfloat16, quantize=quantize)
    loader = EngineLoader(config, has_drafter=True)
    loader._model, loader._model_config = model, model.config
    assert planned.model.num_weights == pytest.approx(loader._forward_weights(), rel=0.1)


EXPERT_FORMS = [("qwen3_moe", "block"), ("mixtral", "awq"), ("deepseek_v3", "channel"), ("gpt_oss", "mxfp4")]


@pytest.mark.parametrize(("family", "form"), [*EXPERT_FORMS, ("deepseek_v3", "rounded at load")])
def test_planned_bytes_of_quantised_experts_are_those_of_a_worker(
    toy_checkpoint, toy_copy, tmp_path: Path, family: str, form: str
):
    """By the headers, and within a tenth by the tensors once they are loaded."""
    path, quantize = tmp_path / "checkpoint", "none"
    if form == "mxfp4":
        write_packed(toy_copy(family, hidden_size=352, intermediate_size=480, num_hidden_layers=1), path)
    elif form == "rounded at load":
        path, quantize = toy_checkpoint(family, **SHAPE | EXPERTS[family]), "fp8"
    else:
        write_quantised(toy_checkpoint(family, **SHAPE | EXPERTS[family] | {"hidden_size": 256}), path, form)
    planned = worker_need(path, None, DecodeConfig(model=str(path), quantize=quantize), "bfloat16")
    assert planned.model.weight_bytes == weight_bytes(path, torch.bfloat16, quantize=quantize)
    model, _ = load_model(path, dtype=torch.bfloat16, quantize=quantize)
    held = sum(tensor.nbytes for _, tensor in model.tensors())
    assert planned.model.weight_bytes == pytest.approx(held, rel=0.1)
    loader = EngineLoader(EngineConfig(model=str(path), quantize=quantize), has_drafter=False)
    loader._model, loader._model_config = model, model.config
    assert planned.model.num_weights == pytest.approx(loader._forward_weights(), rel=0.1)
