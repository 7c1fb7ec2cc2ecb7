"""Laws of what a GPU gives: rates by name, memory for KV, division of memory, and the ratio of roles."""

import json
import struct
from dataclasses import replace

import pytest
from baton.cluster.config.roles import DecodeConfig
from baton.cluster.errors import ConfigError
from baton.deploy.capacity.checkpoints import (
    KVShape,
    count_weights,
    feature_layers,
    head_dir,
    rank_weights,
)
from baton.deploy.capacity.gpus import (
    GPUS,
    TYPICAL,
    estimate,
    gpu_model,
    gpu_named,
    kv_tokens_of,
    least_share,
    load_on,
    shares_of,
    split_on,
)
from baton.deploy.capacity.sizing import Measured, PlannedLoad, handoff_of, plan_of, split_of
from baton.deploy.capacity.worker_sizes import need_of, worker_need
from baton.deploy.cli.plan import PlanConfig
from baton.engine.auto_sizes import GPU_SHARE, Card, EngineRole

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
H200 = gpu_named("H200")


@pytest.fixture
def need(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return need_of(tmp_path)


def with_head(need):
    return replace(need, decode=replace(need.decode, role=EngineRole(is_decode=True, num_nodes=4)))


def test_weights_are_counted_from_the_config_and_from_shards(tmp_path, toy_checkpoint):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert count_weights(tmp_path) == 8_030_261_248  # what its publisher's index says
    toy = toy_checkpoint("llama")
    shards = count_weights(toy)
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    assert shards == count_weights(tmp_path)


def test_a_head_adds_its_weights_and_the_kv_of_its_layer_to_decode(tmp_path):
    model, draft = tmp_path / "model", tmp_path / "head"
    for folder, config in ((model, LLAMA_8B), (draft, {"hidden_size": 4096, "num_attention_heads": 32})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"fc.weight": {"shape": [4096, 12288], "dtype": "BF16", "data_offsets": [0, 0]}})
    shard = struct.pack("<Q", len(header)) + header.encode()
    (draft / "model.safetensors").write_bytes(shard)
    need = need_of(model, draft)
    assert need.has_head
    assert need.decode.model.weight_bytes - need.prefill.model.weight_bytes == 2 * 4096 * 12288
    assert need.decode.per_token.draft_bytes == 2 * 8 * 128 * 2  # as wide as a layer of the target
    assert need.prefill.per_token.feature_bytes == 3 * 4096 * 2


@pytest.mark.parametrize(
    ("name", "memory_gib", "tflops", "gb_per_s"),
    [
        ("NVIDIA H200", 139, 989, 4800),
        ("NVIDIA H100 80GB HBM3", 79, 989, 3350),
        ("NVIDIA H100 PCIe", 79, 756, 2000),
        ("NVIDIA A100-SXM4-40GB", 39, 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 79, 312, 2039),
        ("NVIDIA L40S", 44, 362, 864),
        ("NVIDIA L4", 22, 121, 300),
        ("NVIDIA A10G", 22, 70, 600),
        ("NVIDIA GeForce RTX 4090", 23, 165, 1008),
        ("A card of next year", 300, 989, 3350),
    ],
)
def test_rates_follow_the_name_and_memory_is_the_drivers(name, memory_gib, tflops, gb_per_s):
    found = gpu_model(Card(name=name, total=memory_gib << 30, capability=(9, 0)))
    assert (found.tflops, found.gb_per_s, found.memory) == (tflops, gb_per_s, memory_gib << 30)


def test_estimates_lie_near_the_published_measurements_of_an_h200(need):
    load = replace(load_on(H200.card, need), prompt=1024, max_running=128)
    found = estimate(H200, need, load)
    seconds = 1024 / found.prefill_rate + found.slowing * 1024**2 / 2
    assert seconds == pytest.approx(0.0245, rel=0.25)
    assert found.tpot_s == pytest.approx(0.00955, rel=0.25)
    assert estimate(H200, with_head(need), load).tpot_s < found.tpot_s


def test_hand_offs_over_nvlink_take_what_two_h200s_took(need):
    """1.5 to 1.8 ms for 1024 tokens; without NVLink they cross the host's memory."""
    load = replace(load_on(H200.card, need), prompt=1024)
    found = estimate(H200, need, load)
    assert handoff_of(1024, need.shape, found, load.chunk).exposed_s == pytest.approx(0.0016, rel=0.2)
    for name, has_nvlink in (
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-PCIE-40GB", False),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H100 NVL", False),
        ("NVIDIA H200 NVL", False),
        ("NVIDIA L40S", False),
        ("A card of next year", False),
    ):
        gpu = gpu_model(Card(name=name, total=80 << 30, capability=(9, 0)))
        link = estimate(gpu, need, load)
        assert (link.bandwidth > 1e11) == has_nvlink, name
        assert (link.fixed_s > 0) == has_nvlink, name


QWEN3_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


@pytest.fixture
def experts(tmp_path):
    folder = tmp_path / "experts"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_30B))
    return need_of(folder)


def test_estimates_with_experts_lie_near_measurements_of_an_h200(experts):
    """2048 tokens take 27.9 ms, and decode steps of 8 and 128 requests 8.1 and 19.4 ms."""
    load = replace(load_on(H200.card, experts), prompt=1024)
    assert 2048 / estimate(H200, experts, load).prefill_rate == pytest.approx(0.0279, rel=0.25)
    for num_requests, seconds in ((8, 0.0081), (128, 0.0194)):
        found = estimate(H200, experts, replace(load, max_running=num_requests))
        assert found.tpot_s == pytest.approx(seconds, rel=0.35), num_requests


def test_decode_gets_more_gpus_where_its_steps_read_all_experts(experts):
    weights = experts.decode.weights
    of_one_row = replace(weights, others=int(weights.read_by(1)), experts=0, num_experts=0)
    as_if_dense = replace(experts, decode=replace(experts.decode, weights=of_one_row))
    cards = [H200.card] * 8
    assert split_on(cards, experts)[1] > split_on(cards, as_if_dense)[1]


def test_rows_of_all_ranks_and_of_drafts_choose_experts(experts):
    decode = experts.decode
    alone, drafting = decode.step_bytes(4, 0), replace(decode, role=replace(decode.role, num_nodes=4))
    assert alone == decode.weights.read_by(4)
    assert drafting.step_bytes(4, 0) == decode.step_bytes(16, 0) > alone
    assert replace(decode, expert_ranks=2).step_bytes(4, 0) == decode.step_bytes(8, 0)
    assert decode.step_bytes(4, 250) == alone + 1000 * experts.shape.kv_bytes


@pytest.mark.parametrize("lost", ["shape", "dtype", "data_offsets"])
def test_a_shard_whose_header_lacks_a_key_is_one_line(tmp_path, lost):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    entry = {"shape": [4, 4], "dtype": "BF16", "data_offsets": [0, 32]}
    del entry[lost]
    header = json.dumps({"model.norm.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ConfigError) as caught:
        need_of(tmp_path)
    assert str(caught.value) == f"{tmp_path}: a shard's header has no usable '{lost}'; copy the shard again"


@pytest.mark.parametrize("lost", ["vocab_size", "num_experts_per_tok"])
def test_a_config_that_lacks_a_key_is_not_blamed_on_a_shard(tmp_path, lost):
    config = {key: value for key, value in QWEN3_30B.items() if key != lost}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: {lost} is None"):
        need_of(tmp_path)


@pytest.mark.parametrize("has_head", [False, True])
def test_an_embedding_that_is_the_head_is_read_by_every_step(tmp_path, has_head):
    """Some families tie both by default, and their configs do not say so."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    names = ["model.embed_tokens.weight", "model.norm.weight"] + ["lm_head.weight"] * has_head
    entry = {"shape": [8, 4], "dtype": "BF16", "data_offsets": [0, 64]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    weights = rank_weights(tmp_path, 2)
    assert weights.total == 64 * len(names)
    assert weights.read_by(1) == 128


def test_ranks_share_all_weights_and_experts_by_their_own_number(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    whole, part = rank_weights(tmp_path, 2), rank_weights(tmp_path, 2, tp=2, expert_ranks=4)
    assert (part.others, part.embedding, part.experts) == (
        whole.others // 2, whole.embedding // 2, whole.experts // 4,
    )  # fmt: skip


def test_a_step_reads_the_experts_that_its_rows_choose(experts):
    weights = experts.decode.weights
    assert weights.total == experts.decode.model.weight_bytes
    assert weights.embedding == 151936 * 2048 * 2
    assert weights.read_by(1) == pytest.approx(weights.others + weights.experts * 8 / 128)
    reads = [weights.read_by(rows) for rows in (0, 1, 2, 8, 64, 10_000)]
    assert reads == sorted(reads)
    assert reads[0] == weights.others
    assert reads[-1] == pytest.approx(weights.total - weights.embedding)


def test_kv_tokens_are_none_where_the_weights_do_not_fit(need):
    card = replace(H200.card, total=16 << 30, free=16 << 30)
    assert kv_tokens_of(card, need, is_decode=True) == 0
    card = gpu_named("H100").card
    tokens = kv_tokens_of(card, need, is_decode=True)
    assert 300_000 < tokens < card.total // need.shape.kv_bytes
    assert kv_tokens_of(card, need, is_decode=True, share=0.45) < tokens / 2


@pytest.mark.parametrize("is_decode", [False, True])
def test_the_least_share_is_the_first_that_holds_a_typical_request(need, is_decode):
    card = gpu_named("L40S").card
    least = least_share(card, need, is_decode=is_decode)
    tokens = [kv_tokens_of(card, need, is_decode=is_decode, share=least - part) for part in (0.0, 0.001)]
    assert tokens[0] >= TYPICAL.prompt + TYPICAL.output > tokens[1]


def test_workers_get_shares_that_they_fit_into_and_no_more_than_all(need):
    for roles in ([False, True], [True, True], [False, False, True, True]):
        shares = shares_of(H200.card, need, roles)
        assert sum(shares) < GPU_SHARE + 1e-9
        assert all(
            kv_tokens_of(H200.card, need, is_decode=is_decode, share=share) >= 2304
            for is_decode, share in zip(roles, shares, strict=True)
        )
    assert shares_of(gpu_named("RTX 4090").card, need, [False, True]) == []


def test_the_split_is_the_best_of_all_and_follows_the_load():
    load = PlannedLoad(prompt=4000, output=300, rate=1, max_running=64)
    rates = Measured(prefill_rate=24000, bandwidth=2.5e9, tpot_s=0.01)
    prefill, decode = split_of(8, SHAPE, rates, load)
    assert prefill + decode == 8

    def highest_rate(num_prefill):
        """The highest rate for which `baton plan` asks for no more workers than these."""
        low, high = 0.0, 1000.0
        for _ in range(40):
            middle = (low + high) / 2
            plan = plan_of(SHAPE, rates, replace(load, rate=middle))
            is_served = plan.num_prefill <= num_prefill and plan.num_decode <= 8 - num_prefill
            low, high = (middle, high) if is_served else (low, middle)
        return low

    assert prefill == max(range(1, 8), key=highest_rate)
    longer = split_of(8, SHAPE, rates, replace(load, prompt=16000))
    assert longer[0] > prefill
    assert split_of(8, SHAPE, rates, replace(load, output=3000))[1] > decode


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: f"{gpu.name}, {gpu.memory_mib}")
def test_every_listed_gpu_is_split_between_both_roles(gpu, need):
    for count in (2, 3, 8):
        prefill, decode = split_on([gpu.card] * count, need)
        assert min(prefill, decode) >= 1
        assert prefill + decode == count


def test_the_typical_load_is_the_one_of_the_plan_command():
    config = PlanConfig(model="m")
    assert (TYPICAL.prompt, TYPICAL.output) == (config.prompt, config.output)


def test_lookup_verifies_several_tokens_without_weights_kv_or_features(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    plain, looked_up = (
        worker_need(tmp_path, head_dir(draft), DecodeConfig(model="m", draft=draft, spec_steps=4), "bfloat16")
        for draft in ("", "ngram")
    )
    assert (looked_up.role.num_nodes, looked_up.role.spare_slots, looked_up.role.num_features) == (5, 5, 0)
    assert plain.role.num_nodes == 1
    assert looked_up.model == plain.model
    assert looked_up.per_token == plain.per_token


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, 1),
        ({"architectures": ["LlamaForCausalLMEagle"], "draft_vocab_size": 100}, 1),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, 3),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, 3),
        ({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": False}}, 1),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, 2),
        ({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}, 1),
        ({"architectures": ["MiMoForCausalLM"]}, 1),
        ({"architectures": ["LlamaForCausalLMEagle3"], "num_nextn_predict_layers": 2}, 3),
        ({"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 9]}, 2),
        ({"architectures": ["DFlashDraftModel"], "target_layer_ids": [1, 5, 9, 13, 17]}, 5),
        ({"architectures": ["DFlashDraftModel"], "num_hidden_layers": 4}, 4),
    ],
)
def test_features_of_a_head_are_counted_by_its_kind(config, count):
    assert len(feature_layers(config)) == count
