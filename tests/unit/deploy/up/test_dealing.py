"""Laws of dealing: how many workers of each role, on which GPU, with which share of its memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, UpConfig
from baton.cluster.errors import ConfigError
from baton.deploy.capacity.checkpoints import KVShape, RankWeights
from baton.deploy.capacity.gpus import least_share
from baton.deploy.capacity.worker_sizes import ModelNeed, WorkerNeed, need_of_roles
from baton.deploy.up.children import child_configs
from baton.deploy.up.dealing import Wish, deal, deal_without_gpus, table_of
from baton.deploy.up.gpu_list import Gpu
from baton.deploy.up.settle import HELP_TOKENS, settle
from baton.engine.auto_sizes import GPU_SHARE, EngineRole, ModelSizes
from baton.engine.kv.budget import PageBudget
from baton.engine.models.weights import iter_safetensors

GIB = 2**30
SHAPE = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
MODEL = ModelSizes(
    hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128256,
    max_context=131072, dtype_bytes=2, num_layers=32, num_weights=7_500_000_000, weight_bytes=16_060_000_000,
)  # fmt: skip
PREFILL = WorkerNeed(
    model=MODEL,
    role=EngineRole(is_decode=False),
    per_token=PageBudget(kv_bytes=SHAPE.kv_bytes),
    weights=RankWeights(others=15_000_000_000, embedding=1_060_000_000),
)
NEED = ModelNeed(shape=SHAPE, prefill=PREFILL, decode=replace(PREFILL, role=EngineRole(is_decode=True)))
DRAFTING = EngineRole(is_decode=True, num_features=3, num_nodes=4, num_shapes=4, spare_slots=4)
WITH_HEAD = replace(NEED, decode=replace(NEED.decode, role=DRAFTING))


def h200s(count):
    return [
        Gpu(index=str(at), name="NVIDIA H200", memory=140 * GIB, capability=(9, 0)) for at in range(count)
    ]


def counts(settled):
    return settled.prefill, settled.decode


def owners(settled):
    return {place.worker: place.gpu.index for place in settled.places}


def test_without_gpus_each_role_has_one_worker_unless_told():
    assert counts(deal_without_gpus(Wish())) == (1, 1)
    assert counts(deal_without_gpus(Wish(prefill=0, decode=3))) == (0, 3)
    assert counts(deal_without_gpus(Wish(prefill=2))) == (2, 1)


def test_one_gpu_gets_one_worker_that_computes_prompts_itself():
    settled = deal(h200s(1), NEED, Wish())
    assert counts(settled) == (0, 1)
    assert owners(settled) == {"decode-0": "0"}
    assert settled.places[0].memory_share == 0.0
    assert "no hand-off" in settled.places[0].why


@pytest.mark.parametrize("need", [NEED, WITH_HEAD])
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_each_of_several_gpus_gets_one_worker_and_each_role_has_one(need, count):
    settled = deal(h200s(count), need, Wish())
    assert settled.prefill >= 1
    assert settled.decode >= 1
    assert settled.prefill + settled.decode == count
    assert sorted(owners(settled).values()) == [str(at) for at in range(count)]
    assert {place.memory_share for place in settled.places} == {0.0}


def test_two_gpus_are_prefill_on_the_first_and_decode_on_the_second():
    assert owners(deal(h200s(2), WITH_HEAD, Wish())) == {"prefill-0": "0", "decode-0": "1"}


def test_a_head_makes_decode_faster_so_prefill_gets_more_gpus():
    deals = [
        [deal(h200s(count), need, Wish()).prefill for need in (NEED, WITH_HEAD)] for count in range(2, 17)
    ]
    assert all(plain <= drafting for plain, drafting in deals)
    assert any(plain < drafting for plain, drafting in deals)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(prefill=3, decode=1), (3, 1)),
        (Wish(prefill=3), (3, 1)),
        (Wish(decode=3), (1, 3)),
        (Wish(prefill=0), (0, 4)),
        (Wish(prefill=0, decode=2), (0, 2)),
        (Wish(prefill=9), (9, 1)),
    ],
)
def test_the_numbers_of_the_settings_win_and_the_rest_is_filled(wish, expected):
    assert counts(deal(h200s(4), NEED, wish)) == expected


def test_one_gpu_with_a_number_for_prefill_only_has_a_decode_worker_too():
    assert counts(deal(h200s(1), NEED, Wish(prefill=1))) == (1, 1)
    assert counts(deal(h200s(1), NEED, Wish(decode=2))) == (0, 2)


def test_workers_on_one_gpu_divide_its_memory_and_say_so():
    settled = deal(h200s(1), WITH_HEAD, Wish(prefill=1, decode=1))
    prefill, decode = settled.places
    assert GPU_SHARE - 0.005 < prefill.memory_share + decode.memory_share < GPU_SHARE + 0.001
    assert (
        decode.memory_share > prefill.memory_share > least_share(h200s(1)[0].card, WITH_HEAD, is_decode=False)
    )
    assert "2 workers share it" in prefill.why
    assert f"{decode.memory_share:.0%}" in decode.why


def test_a_given_share_of_the_memory_is_what_is_divided():
    settled = deal(h200s(1), NEED, Wish(prefill=1, decode=1, memory_share=0.5))
    assert 0.49 < sum(place.memory_share for place in settled.places) < 0.501


def test_more_workers_than_gpus_spread_evenly_with_both_roles_on_each():
    settled = deal(h200s(2), NEED, Wish(prefill=2, decode=2))
    assert owners(settled) == {"prefill-0": "0", "prefill-1": "1", "decode-0": "0", "decode-1": "1"}
    alone = deal(h200s(2), NEED, Wish(prefill=2, decode=1))
    assert [place.memory_share > 0 for place in alone.places] == [True, False, True]


def test_gpus_without_a_worker_are_named():
    settled = deal(h200s(3), NEED, Wish(prefill=1, decode=1))
    assert owners(settled) == {"prefill-0": "0", "decode-0": "1"}
    assert any("GPU 2 stays idle" in note for note in settled.notes)


def test_decode_gets_the_gpus_with_more_memory():
    mixed = [*h200s(1)]
    mixed.append(Gpu(index="1", name="NVIDIA L40S", memory=44 * GIB, capability=(8, 9)))
    assert owners(deal(mixed, NEED, Wish())) == {"prefill-0": "1", "decode-0": "0"}


def test_fewer_workers_than_gpus_take_those_with_the_most_memory():
    small = Gpu(index="9", name="NVIDIA L40S", memory=44 * GIB, capability=(8, 9))
    settled = deal([small, *h200s(2)], NEED, Wish(prefill=1, decode=1))
    assert owners(settled) == {"prefill-0": "0", "decode-0": "1"}


def test_a_gpu_that_is_too_small_is_left_out_and_named():
    display = Gpu(index="2", name="NVIDIA T400", memory=4 * GIB, capability=(8, 9))
    settled = deal([*h200s(2), display], NEED, Wish())
    assert "2" not in owners(settled).values()
    assert counts(settled) == (1, 1)
    assert any(note.startswith("GPU 2 is left out: it has 4.0 GiB") for note in settled.notes)


def test_a_gpu_counts_by_what_other_processes_leave_free():
    first, second = h200s(2)
    full = replace(first, held=130 * GIB)
    settled = deal([full, second], NEED, Wish())
    assert (counts(settled), owners(settled)) == ((0, 1), {"decode-0": "1"})
    (note,) = (note for note in settled.notes if "left out" in note)
    assert note.startswith("GPU 0 is left out: other processes hold 130.0 of its 140.0 GiB, the model needs")
    busy = replace(second, held=40 * GIB)
    settled = deal([first, busy], NEED, Wish())
    assert owners(settled) == {"prefill-0": "1", "decode-0": "0"}, "decode gets the GPU with more free memory"
    assert "Other processes hold 40.0 of 140.0 GiB of GPU 1; its worker uses the rest." in settled.notes


def test_workers_on_a_shared_gpu_divide_what_is_free_of_it():
    (gpu,) = h200s(1)
    settled = deal([replace(gpu, held=70 * GIB)], NEED, Wish(prefill=1, decode=1))
    assert 0.49 < sum(place.memory_share for place in settled.places) <= 0.5
    assert any("its workers divide the rest" in note for note in settled.notes)


def test_a_model_that_only_an_idle_gpu_holds_is_refused_with_the_remedy():
    (gpu,) = h200s(1)
    with pytest.raises(ConfigError, match=r"10.0 are free, since other processes hold 130.0; end"):
        deal([replace(gpu, held=130 * GIB)], NEED, Wish())


@pytest.mark.parametrize(
    ("on_gpu", "wish", "expected", "placed"),
    [
        ("decode", {}, (1, 2), {"decode-0": "0", "decode-1": "1"}),
        ("decode", {"prefill": 3, "decode": 1}, (3, 1), {"decode-0": "0"}),
        ("decode", {"prefill": 0}, (0, 2), {"decode-0": "0", "decode-1": "1"}),
        ("prefill", {}, (2, 1), {"prefill-0": "0", "prefill-1": "1"}),
    ],
)
def test_a_role_on_the_cpu_gets_no_gpu_and_is_named(on_gpu, wish, expected, placed):
    settled = deal(h200s(2), NEED, Wish(on_gpu=frozenset((on_gpu,)), **wish))
    assert (counts(settled), owners(settled)) == (expected, placed)
    on_cpu = [note for note in settled.notes if note.endswith("runs on the CPU, as its device says.")]
    assert len(on_cpu) == sum(expected) - len(placed)


def test_needs_follow_the_drafts_of_each_role(toy_checkpoint):
    model = str(toy_checkpoint("llama"))
    prefill = PrefillConfig(model=model)
    plain, looked_up, off = (
        need_of_roles(prefill, DecodeConfig(model=model, **more))
        for more in ({}, {"draft": "ngram", "spec_steps": 2}, {"draft": "ngram", "no_draft": True})
    )
    assert (plain.has_head, looked_up.has_head, off.has_head) == (False, True, False)
    assert looked_up.decode.role.num_nodes == 3


def test_a_model_that_fits_no_gpu_is_refused_with_the_memory_that_would_do():
    small = [Gpu(index="0", name="NVIDIA L4", memory=22 * GIB, capability=(8, 9))]
    large = replace(NEED.decode, model=replace(MODEL, weight_bytes=140_000_000_000))
    heavy = replace(NEED, decode=large)
    with pytest.raises(ConfigError, match=r"GPU 0: NVIDIA L4, 22.0 GiB cannot hold 1 decode.*--device cpu"):
        deal(small, heavy, Wish())
    with pytest.raises(ConfigError, match=r"1 prefill and 1 decode.*--prefill 0"):
        deal(small, NEED, Wish(prefill=1, decode=1))


def test_the_table_names_each_worker_its_gpu_its_role_and_the_reason():
    lines = table_of(deal(h200s(2), NEED, Wish()))
    assert lines[0].split() == ["worker", "GPU", "role", "why"]
    assert [line.split()[:2] for line in lines[1:3]] == [["prefill-0", "0:"], ["decode-0", "1:"]]
    assert lines[1].endswith("1 : 1 serves the most requests")
    assert lines[3].startswith("The ratio is for prompts of 2048 and answers of 256 tokens")
    assert len(table_of(deal(h200s(2), NEED, Wish(prefill=1, decode=1)))) == 3
    assert "prompts and tokens" in table_of(deal(h200s(1), NEED, Wish()))[1]


def test_gpus_are_dealt_as_many_at_a_time_as_a_worker_has_ranks():
    settled = deal(h200s(5), NEED, Wish(prefill=0, ranks=2))
    assert owners(settled) == {"decode-0": "0,1", "decode-1": "2,3"}
    assert any("GPU 4 stays idle: a worker takes 2 of one kind." in note for note in settled.notes)
    mixed = [replace(gpu, name="NVIDIA A100") if gpu.index in "02" else gpu for gpu in h200s(4)]
    assert set(owners(deal(mixed, NEED, Wish(prefill=0, ranks=2))).values()) == {"0,2", "1,3"}


def test_a_group_of_gpus_counts_as_its_fullest_one():
    gpus = [replace(gpu, held=30 * GIB) if gpu.index == "1" else gpu for gpu in h200s(2)]
    (place,) = deal(gpus, NEED, Wish(prefill=0, ranks=2)).places
    assert (place.gpu.index, place.gpu.held) == ("0,1", 30 * GIB)


def test_fewer_gpus_than_ranks_are_refused_by_number():
    with pytest.raises(ConfigError, match=r"^there are 2 GPUs .* needs 4 of one kind; lower --tp"):
        deal(h200s(2), NEED, Wish(prefill=0, ranks=4))


def test_a_rank_needs_its_part_of_weights_and_kv(toy_checkpoint):
    path = str(toy_checkpoint("llama"))
    roles = PrefillConfig(model=path), DecodeConfig(model=path)
    whole = need_of_roles(*roles)
    half = need_of_roles(*(replace(role, tp=2) for role in roles))
    assert half.decode.model.weight_bytes * 2 == whole.decode.model.weight_bytes
    assert half.decode.per_token.kv_bytes * 2 == whole.decode.per_token.kv_bytes
    copies = need_of_roles(*(replace(role, tp=4) for role in roles))  # of two KV heads
    assert copies.decode.per_token.kv_bytes == half.decode.per_token.kv_bytes


def test_a_rank_with_attention_of_its_own_needs_all_weights_but_experts(toy_checkpoint):
    path = str(toy_checkpoint("qwen3_moe"))
    prefill, decode = PrefillConfig(model=path), DecodeConfig(model=path)
    whole = need_of_roles(prefill, decode).decode
    ranks = need_of_roles(prefill, replace(decode, dp_attention=2, ep=True)).decode
    experts = 2 * (whole.model.weight_bytes - ranks.model.weight_bytes)
    stored = {name: tensor.numel() for name, tensor in iter_safetensors(Path(path))}
    of_experts = sum(count for name, count in stored.items() if ".experts." in name)
    assert experts == 2 * of_experts  # in bfloat16
    assert ranks.per_token.kv_bytes == whole.per_token.kv_bytes
    assert ranks.model.num_heads == whole.model.num_heads
    # the rows of both ranks pass through each one's experts
    assert ranks.model.intermediate_size == 2 * whole.model.intermediate_size


def test_roles_whose_workers_take_other_numbers_of_gpus_are_refused(toy_checkpoint):
    path = str(toy_checkpoint("qwen3_moe"))

    def settled(*flags):
        config = load_config(UpConfig, [f"--model={path}", "--prefill=1", "--decode=1", *flags], {})
        return settle(config, {}, lambda env: tuple(h200s(4)), lambda name, setting: Path(name))

    with pytest.raises(ConfigError, match=r"prefill takes 1 GPUs \(--tp\) and decode 2 .*--dp-attention"):
        settled("--dp-attention=2")
    assert settled("--dp-attention=2", "--device=cpu").places == ()
    alone = load_config(UpConfig, [f"--model={path}", "--prefill=0", "--dp-attention=2"], {})
    dealt = settle(alone, {}, lambda env: tuple(h200s(4)), lambda name, setting: Path(name))
    assert owners(dealt) == {"decode-0": "0,1", "decode-1": "2,3"}


def test_decode_helps_prefill_where_each_has_gpus_of_its_own(toy_checkpoint, tmp_path):
    path = str(toy_checkpoint("llama"))

    def limits(count, *flags, env=None):
        config = load_config(UpConfig, [f"--model={path}", *flags], env or {})
        settled = settle(config, env or {}, lambda env: tuple(h200s(count)), lambda name, setting: Path(name))
        children = dict(child_configs(config, env or {}, tmp_path, settled))
        assert any("--local-prefill-queued-max" in note for note in settled.notes) == bool(
            settled.local_prefill_queued_max
        )
        return children["router"].local_prefill_queued_max

    assert limits(2) == HELP_TOKENS
    assert limits(1) == limits(0) == 0, "one worker computes all"
    assert limits(1, "--prefill=1", "--decode=1") == 0, "on one GPU it would help nobody"
    assert limits(2, "--device=cpu") == 0
    assert limits(2, "--local-prefill=off") == 0
    assert (
        limits(2, "--local-prefill-queued-max=0")
        == limits(2, env={"BATON_UP_LOCAL_PREFILL_QUEUED_MAX": "0"})
        == 0
    )
    assert limits(2, env={"BATON_ROUTER_LOCAL_PREFILL_QUEUED_MAX": "5"}) == 5
    assert limits(2, "--local-prefill-queued-max=64") == 64
