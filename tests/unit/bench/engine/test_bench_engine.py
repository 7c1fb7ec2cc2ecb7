"""`baton bench engine` on a toy shape: its acceptance is as requested, its counts are checked by hand."""

import json
import math

import pytest
import torch
from baton.bench.engine.bench import launches, main, parser, settings_of
from baton.bench.engine.drafters import DRAFTERS, DraftWish
from baton.bench.engine.floors import Ceilings, PassCounts, Work, chain_step, mtp_step, parallel_step
from baton.bench.engine.mtp_model import modules_config
from baton.bench.engine.rig import Rig
from baton.bench.engine.shapes import SHAPES, head_config, target_config
from baton.engine.errors import CheckpointError
from baton.engine.kv.window_pool import WindowedPool
from baton.engine.models.weight_cuts import rank_config
from baton.engine.parallel.group import TensorGroup
from baton.engine.parallel.sharing import attention_parallel, tensor_parallel
from baton.engine.speculative.adaptive import MeasuredCosts
from baton.kernels import chained_launch
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ["--shape", "toy", "--device", "cpu", "--dtype", "float32", "--context", "12", "--repeats", "3"]


@pytest.mark.parametrize(
    ("accept_length", "graphs"),
    [
        slow(1, "off"),  # as blocks in `test_bench_blocks`
        slow(2, "off"),
        slow(3, "on"),
        slow(4, "off"),
    ],
)
def test_steps_yield_the_requested_accept_length_with_graphs_or_not(accept_length, graphs, tmp_path, capsys):
    kinds = sorted(DRAFTERS)
    out = tmp_path / "out.json"
    flags = [
        "--batch",
        "1",
        "2",
        "--prefill",
        "9",
        "--chunk-size",
        "8",
        "--graphs",
        graphs,
        "--json",
        str(out),
    ]
    assert main([*SMALL, *flags, "--drafts", "all", "--accept-length", str(accept_length)]) == 0
    document = json.loads(out.read_text())
    cells = {(cell["kind"], cell["size"]): cell for cell in document["cells"]}
    assert set(cells) == {("prefill", 9), *((kind, size) for kind in ("decode", *kinds) for size in (1, 2))}
    for kind in kinds:
        assert [cells[kind, size]["accepted"] for size in (1, 2)] == [accept_length] * 2
    assert [cells["decode", size]["accepted"] for size in (1, 2)] == [1.0] * 2
    paths = {kind: cell["path"] for (kind, _), cell in cells.items()}
    wanted = {"prefill": "breakable", **dict.fromkeys(("decode", *kinds), "graph")}
    assert paths == (wanted if graphs == "on" else dict.fromkeys(wanted, "eager"))
    assert all(
        cell["ratio"] == pytest.approx(cell["timing"]["wall"] / cell["floor_ms"]) for cell in cells.values()
    )
    assert "simulated" in capsys.readouterr().out


@pytest.mark.parametrize(("accept_length", "is_drafted"), [(1, False), slow(3, True)])
def test_adaptive_steps_are_measured_in_turn_with_plain_ones(
    accept_length, is_drafted, tmp_path, monkeypatch
):
    monkeypatch.setattr(MeasuredCosts, "step", fixed_cost)
    out = tmp_path / "out.json"
    flags = ["--batch", "2", "--prefill", "--graphs", "on", "--adaptive", "--spec-steps", "2"]
    assert main([*SMALL, *flags, "--accept-length", str(accept_length), "--json", str(out)]) == 0
    cells = {cell["kind"]: cell for cell in json.loads(out.read_text())["cells"]}
    plain, chosen = cells["decode in turn"], cells["adaptive eagle3"]
    assert (plain["path"], plain["accepted"]) == ("graph, 0 drafts", 1.0)
    assert chosen["path"] == ("graph, 2 drafts" if is_drafted else "graph, 0 drafts")
    assert chosen["accepted"] == accept_length


def fixed_cost(costs, shape, batch_size, context):
    """Of a step, so that the clock of a busy machine decides nothing."""
    return 1 + shape.steps / 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free", "keep"])
def test_layers_with_windows_are_measured_in_either_kind_of_pages(kind, toy_checkpoint, tmp_path, capsys):
    out, model = tmp_path / "out.json", toy_checkpoint("mistral")
    sizes = ["--batch", "2", "--prefill", "20", "--chunk-size", "8", "--graphs", "on", "--accept-length", "3"]
    assert main([*SMALL, "--model", str(model), "--window-kv", kind, *sizes, "--json", str(out)]) == 0
    cells = {cell["kind"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert cells["eagle3"]["accepted"] == 3
    assert cells["eagle3"]["path"] == "graph"


@pytest.mark.slow
def test_ranks_measure_in_step(tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--batch", "1", "2", "--prefill", "9", "--chunk-size", "8", "--json", str(out), "--tp", "2"]
    assert main([*SMALL, *flags, "--drafts", "eagle3,ngram"]) == 0
    cells = json.loads(out.read_text())["cells"]
    kinds = {(cell["kind"], cell["path"], cell["accepted"]) for cell in cells}
    paths = ("graph", "eager")
    assert {each for each in kinds if each[0] != "prefill"} == {
        *(("decode", path, 1.0) for path in paths),
        *((kind, path, 3.0) for kind in ("eagle3", "ngram") for path in paths),
    }
    assert "rank 0 of 2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--tp", "2", "--ep"], ["--dp-attention", "2", "--ep"]], ids=["tp", "dp"])
def test_ranks_that_share_experts_measure_in_step(tmp_path, capsys, flags):
    out = tmp_path / "out.json"
    sizes = ["--batch", "1", "2", "--prefill", "9", "--chunk-size", "8", "--json", str(out)]
    small = ["toy-moe" if flag == "toy" else flag for flag in SMALL]
    assert main([*small, *sizes, *flags, "--drafts", "ngram"]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert {cell["kind"] for cell in cells} == {"prefill", "decode", "ngram"}
    assert "rank 0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dp-attention", "2"], "dp_attention 2: the model is a LlamaForCausalLM without experts to share"),
        (["--dp-attention", "2", "--tp", "2"], "--tp 2: leave it out with --dp-attention 2"),
        (["--tp", "3"], "tp 3: the model has 4 attention heads, which 3 does not divide; use tp 1, 2, 4"),
        (["--tp", "2", "--adaptive"], "measure --adaptive with --tp 1"),
    ],
)
def test_ranks_that_cannot_measure_are_refused(flags, said, capsys):
    assert main([*SMALL, *flags, "--batch", "1"]) == 2
    assert said in capsys.readouterr().err


def test_a_rank_reads_its_part_of_the_target(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    whole = PassCounts.of_target(target, 2)
    part = PassCounts.of_target(rank_config(target, tensor_parallel(TensorGroup(size=2))), 2).of_rank(2)
    assert (part.body, part.kv, part.vocab) == (whole.body // 2, whole.kv // 2, whole.vocab // 2)


def test_a_rank_computes_the_rows_of_all_with_its_experts(tmp_path):
    target = target_config("qwen3-30b-a3b", "", tmp_path)
    group = TensorGroup(size=4)
    whole, part = (
        PassCounts.of_target(config, 2)
        for config in (target, rank_config(target, attention_parallel(group, by_expert=True)))
    )
    assert (part.body, part.kv, part.vocab) == (whole.body, whole.kv, whole.vocab)
    assert part.experts == whole.experts // 4
    one, four = whole.step(8, 1, 100, logit_rows=1), part.step(8, 1, 100, logit_rows=1)
    assert four.num_flops == one.num_flops, "each row meets as many experts, on some rank"
    assert four.num_bytes < one.num_bytes


def test_a_step_of_modules_is_a_verify_and_one_pass_of_each(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    module = PassCounts.of_module(modules_config(target, "bfloat16", 3), 2)
    counts = PassCounts.of_target(target, 2)
    assert module.body == counts.body // 32
    works = mtp_step(counts, module, 3, batch=2, steps=3, context=100)
    assert len(works) == 4, "verify, and three modules over the front and the verified rows"
    weights = module.body + module.fc + module.vocab
    assert works[1].num_bytes == 2 * (weights + 2 * (100 + 2 + 4) * 2048)
    shared = mtp_step(counts, module, 1, batch=2, steps=3, context=100)
    assert len(shared) == 4, "verify, two drafts (the first is remembered), extend"
    assert shared[1].num_bytes == 2 * (weights + 2 * 101 * 2048)


def test_a_parallel_step_drafts_all_but_the_first_in_one_pass(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    counts = PassCounts.of_target(target, 2)
    head = PassCounts.of_head(head_config(target, "bfloat16", 32000, tmp_path), 2)
    chain, parallel = (
        step(counts, head, batch=2, steps=4, context=100) for step in (chain_step, parallel_step)
    )
    assert (len(chain), len(parallel)) == (5, 3)
    assert (parallel[0], parallel[-1]) == (chain[0], chain[-1])
    assert parallel[1].num_bytes == chain[1].num_bytes + 2 * 2 * 2 * head.kv, "two more rows of KV each"
    assert parallel_step(counts, head, 2, 1, 100) == chain_step(counts, head, 2, 1, 100)


def test_the_floor_of_an_8b_decode_step_is_its_weights_and_the_batch_s_kv(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    counts = PassCounts.of_target(target, 2)
    weights = (
        8_030_261_248 - 128256 * 4096 - (2 * 32 + 1) * 4096
    )  # all parameters but the embedding and the norms
    assert counts.body + counts.vocab == weights
    step = counts.step(4, 1, 1023, logit_rows=1)
    assert step.num_bytes == 2 * weights + 4 * 1024 * 131072, "128 KiB of KV a token"
    assert step.num_flops == 4 * (2 * weights + 1023 * 32 * 4 * 4096)
    prefill = counts.prefill(1024)
    end = 4096 * 4096 + 3 * 4096 * 14336  # of the last layer, for one row
    products = 1024 * (counts.body - end) + end + counts.vocab
    assert prefill.num_flops == 2 * products + 1024 * 1025 // 2 * 32 * 4 * 4096


def test_an_chain_step_is_a_verify_and_one_pass_of_the_head_per_draft(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    head = PassCounts.of_head(head_config(target, "bfloat16", 32000, tmp_path), 2)
    works = chain_step(PassCounts.of_target(target, 2), head, batch=2, steps=3, context=100)
    assert len(works) == 4, "verify, two drafts (the first is remembered), extend"
    layer = 8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert [head.body, head.vocab, head.fc] == [layer, 32000 * 4096, 3 * 4096 * 4096]
    assert works[1].num_bytes == 2 * (layer + head.vocab + 2 * 101 * 2048)
    assert works[3].num_bytes == 2 * (layer + head.vocab + head.fc + 2 * 104 * 2048)
    assert works[3].num_flops == 2 * (2 * 4 * (layer + head.fc) + 2 * head.vocab + 4 * 100 * 4 * 4096)


def test_a_floor_is_the_longer_of_moving_and_computing():
    ceilings = Ceilings(copy_bytes_per_s=100.0, matmul_flop_per_s=10.0)
    assert ceilings.seconds(Work(num_bytes=500, num_flops=20)) == 5.0
    assert ceilings.seconds(Work(num_bytes=500, num_flops=80)) == 8.0


def test_the_floor_of_experts_is_those_that_random_rows_use(tmp_path):
    counts = PassCounts.of_target(target_config("qwen3-30b-a3b", "", tmp_path), 2)
    expert = 3 * 2048 * 768
    assert counts.experts == 48 * 128 * expert
    one = counts.step(1, 1, 1023, logit_rows=1)
    weights = counts.body + 48 * 8 * expert + counts.vocab
    assert one.num_bytes == 2 * (weights + 1024 * counts.kv), "8 of 128 experts a layer"
    assert one.num_flops == 2 * weights + 1023 * counts.attention
    two = counts.step(2, 1, 1023, logit_rows=1)
    assert two.num_bytes == pytest.approx(one.num_bytes + 2 * (48 * 7.5 * expert + 1024 * counts.kv))
    many = counts.prefill(8192)
    assert many.num_bytes == pytest.approx(
        2 * (counts.body + counts.experts + counts.vocab + 8192 * counts.kv)
    )
    end = 4096 * 2048 + 128 * 2048 + 8 * expert  # of the last layer, for one row
    products = 8192 * (counts.body + 48 * 8 * expert - end) + end + counts.vocab
    assert many.num_flops == pytest.approx(2 * products + 8192 * 8193 // 2 * counts.attention)


def test_the_floor_of_quantised_experts_is_their_bytes(tmp_path):
    """Those of Qwen3 have a byte a value as all matrices, those of gpt-oss 4.25 bits beside floats."""
    counts = PassCounts.of_target(target_config("qwen3-30b-a3b", "", tmp_path, "fp8-blocks"), 2)
    step = counts.step(1, 1, 1023, logit_rows=1)
    read = counts.body + counts.experts * counts.used_share
    assert step.num_bytes == pytest.approx(read + 2 * (counts.vocab + 1024 * counts.kv))
    (tmp_path / "of gpt-oss").mkdir()
    counts = PassCounts.of_target(target_config("gpt-oss-120b", "", tmp_path / "of gpt-oss", "mxfp4"), 2)
    prompt = counts.prefill(8192)
    of_experts = 4.25 / 8 * counts.experts
    assert prompt.num_bytes == pytest.approx(of_experts + 2 * (counts.body + counts.vocab + 8192 * counts.kv))
    assert 60e9 < of_experts < 62e9
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"--quantize mxfp4.*take gpt-oss"):
        target_config("toy", "", tmp_path / "other", "mxfp4")


def test_built_in_shapes_are_models_of_the_sizes_in_their_names(tmp_path):
    sizes = {
        "llama-3.1-8b": 8.03e9,
        "llama-3.1-70b": 70.55e9,
        "llama-3.2-1b": 1.236e9,
        "smollm2-135m": 134.5e6,
        "qwen3-30b-a3b": 30.53e9,
        "deepseek-v2-lite": 15.71e9,
        "gpt-oss-20b": 20.91e9,
        "gpt-oss-120b": 116.8e9,
        "mistral-7b-v0.1": 7.242e9,
        "gemma-3-1b": 999.9e6,
        "gemma-3-12b": 11.77e9,
    }
    for name in SHAPES.keys() - {"toy", "toy-moe", "toy-latent", "toy-gpt-oss"}:
        folder = tmp_path / name
        folder.mkdir()
        config = target_config(name, "", folder)
        counts = PassCounts.of_target(config, 2)
        total = counts.body + counts.experts + counts.vocab * (1 if config.tie_word_embeddings else 2)
        assert math.isclose(total, sizes[name], rel_tol=0.001), name


def test_lookup_costs_the_verify_alone_and_eagle_reads_fc_in_every_pass(tmp_path):
    target = target_config("llama-3.1-8b", "", tmp_path)
    counts = PassCounts.of_target(target, 2)
    wish = DraftWish(
        config=target, dtype=torch.bfloat16, device=torch.device("cpu"), draft_vocab_size=32000, steps=3,
        accept_length=2, page_size=16, capacity=4, folder=tmp_path,
    )  # fmt: skip
    assert DRAFTERS["ngram"](wish).step(counts, 2, 3, 100) == [counts.step(2, 4, 100, logit_rows=4)]
    works = DRAFTERS["eagle"](wish).step(counts, 2, 3, 100)
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert len(works) == 4
    assert works[1].num_bytes == 2 * (layer + 2 * 4096**2 + 128256 * 4096 + 2 * 101 * 2048)


def test_bad_options_are_one_line_that_names_the_value_and_the_remedy(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main([*SMALL, "--drafts", "eagle3,medusa"])
    everything = "eagle3,p-eagle,eagle,dflash,mtp,mtp-deep,ngram"
    assert f"'medusa': write all, or some of {everything}" in capsys.readouterr().err
    assert main([*SMALL, "--spec-steps", "2", "--accept-length", "4"]) == 2
    assert "--accept-length 4" in capsys.readouterr().err
    assert main([*SMALL, "--context", "500"]) == 2
    assert "512 positions" in capsys.readouterr().err
    assert main([*SMALL, "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([*SMALL, "--device", "cuda"]) == 2
        assert "no usable CUDA device" in capsys.readouterr().err


def test_launches_are_chained_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chained_launch, "has_chained_launches", lambda device: True)
    device = torch.device("cuda")
    for given, options in (
        ([], {"CHAINED": True, "launch_pdl": True}),
        (["--unchained"], {"CHAINED": False}),
    ):
        with launches(parser().parse_args(given)):
            assert chained_launch.chained(device) == options
    assert chained_launch.are_chained(device), "the context ends with the measurements"


SAMPLED = "temperature=0.7,top_k=20,top_p=0.8,repetition_penalty=1.05"


@pytest.mark.parametrize("sampling", [SAMPLED, "temperature=1,top_p=0.9"])
def test_sampled_requests_take_graphs_that_cover_their_steps(sampling, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--batch", "2", "--prefill", "9", "--graphs", "on", "--sampling", sampling, "--json", str(out)]
    assert main([*SMALL, *flags]) == 0
    cells = {cell["kind"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert [cells[kind]["path"] for kind in ("decode", "eagle3")] == ["graph"] * 2
    # a drawn draft may be right where the likeliest one is wrong
    assert [cells[kind]["accepted"] for kind in ("decode", "eagle3")] == [1.0, pytest.approx(3.0, abs=0.2)]


@pytest.mark.parametrize("sampling", ["warmth=1", "top_p", "top_p=2", "top_k=x", ""])
def test_sampling_that_cannot_be_measured_is_refused_by_name(sampling, capsys):
    with pytest.raises(SystemExit, match="2"):
        parser().parse_args(["--sampling", sampling])
    assert sampling.partition("=")[0] in capsys.readouterr().err


def test_requests_keep_their_window_pages_behind_measured_steps():
    flags = ["--shape", "toy-gpt-oss", "--graphs", "on", "--adaptive", "--batch", "1", "2", "--prefill", "9"]
    flags += ["--spec-steps", "1", "--accept-length", "2"]
    with torch.no_grad():
        rig = Rig(settings_of(parser().parse_args([*SMALL, *flags])))
    pool = rig.runner.pool
    assert isinstance(pool, WindowedPool)
    assert pool.table[1:].count_nonzero() == pool.num_lendable > 0
