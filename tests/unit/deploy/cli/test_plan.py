"""The calculation behind `baton plan`, and how it learns from samples; and whom `baton drain` may end."""

import json
import os
import subprocess
import sys

import psutil
import pytest
from baton.cluster.errors import ConfigError
from baton.deploy.capacity.checkpoints import KVShape, shape_of
from baton.deploy.capacity.gpus import GPUS, gpu_named, kv_tokens_of, split_on
from baton.deploy.capacity.sizing import Measured, PlannedLoad, handoff_of, plan_of, prefill_s
from baton.deploy.capacity.worker_sizes import need_of
from baton.deploy.cli import plan
from baton.deploy.cli.drain import process_of, worker_of
from baton.deploy.cli.plan import FASTEST, HandoffSample, fit

LLAMA_8B = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, hidden_size=4096, num_features=3)
GPU = Measured(prefill_rate=24000, bandwidth=2.5e9, fixed_s=0.0005, tpot_s=0.01)


def test_sizes_of_a_token_are_those_of_the_published_table(tmp_path):
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(tmp_path)
    assert (shape.kv_bytes, LLAMA_8B.feature_bytes) == (128 * 1024, 24 * 1024)
    assert shape_of(tmp_path, dtype="float32").kv_bytes == 256 * 1024


@pytest.mark.parametrize(
    "text", ["[]", "{", "{}", '{"num_attention_heads": 0}', '{"num_attention_heads": "8"}']
)
def test_a_config_without_sizes_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config"):
        shape_of(tmp_path)


def test_a_prompt_of_one_chunk_is_exposed_as_a_whole():
    handoff = handoff_of(256, LLAMA_8B, GPU, 256)
    assert handoff.total_s == pytest.approx(256 * LLAMA_8B.token_bytes / 2.5e9 + 0.0005)
    assert handoff.exposed_s == handoff.total_s


def test_a_link_faster_than_prefill_exposes_the_last_chunk_only():
    fast = Measured(prefill_rate=24000, bandwidth=10e9)
    handoff = handoff_of(8192, LLAMA_8B, fast, 256)
    begun = 31 * 256 * LLAMA_8B.token_bytes % (4 << 20)  # of a block that the last chunk fills
    assert begun == 2 << 20
    assert handoff.exposed_s == pytest.approx((256 * LLAMA_8B.token_bytes + begun) / 10e9)
    assert handoff.total_s == pytest.approx(31 * 256 / 24000 + handoff.exposed_s)


def test_a_slower_link_exposes_what_prefill_does_not_hide():
    slow = Measured(prefill_rate=24000, bandwidth=1e9)
    handoff = handoff_of(8192, LLAMA_8B, slow, 256)
    whole = 8192 * LLAMA_8B.token_bytes / 1e9
    assert handoff.exposed_s == pytest.approx(256 / 24000 + whole - handoff.prefill_s)


def test_a_block_travels_when_the_chunk_that_fills_it_is_done():
    small = KVShape(num_layers=4, num_kv_heads=4, head_dim=32, hidden_size=128)  # 512 tokens fill a block
    tokens, chunk = 2048, 64
    link_bound = Measured(prefill_rate=24000, bandwidth=1e7)
    handoff = handoff_of(tokens, small, link_bound, chunk)
    assert small.token_bytes * 512 == 1 << 20
    assert handoff.total_s == pytest.approx(448 / 24000 + tokens * small.token_bytes / 1e7)
    one_block = handoff_of(500, small, link_bound, chunk)
    assert one_block.total_s == pytest.approx(436 / 24000 + 500 * small.token_bytes / 1e7)


def test_workers_follow_the_load():
    load = PlannedLoad(prompt=4000, output=300, rate=10, kv_memory=64 * 2**30, max_running=64)
    made = plan_of(LLAMA_8B, GPU, load)
    assert made.request_bytes == 4300 * 128 * 1024
    assert made.num_prefill == 3  # 10 * 0.167 s / 0.7
    assert made.num_decode == 1  # 30 of 64 * 0.85 places
    assert (
        plan_of(LLAMA_8B, GPU, PlannedLoad(prompt=4000, output=300, rate=40, max_running=64)).num_decode == 3
    )


def test_a_request_that_fits_no_worker_is_reported():
    made = plan_of(LLAMA_8B, GPU, PlannedLoad(prompt=4000, output=300, rate=1, kv_memory=2**28))
    assert (made.places, made.num_decode) == (0, 0)
    assert "does not fit" in made.advice[0]


def test_a_small_model_on_a_slow_link_is_advised_not_to_disaggregate():
    small = KVShape(num_layers=28, num_kv_heads=8, head_dim=128, hidden_size=1024)  # of 0.6B
    made = plan_of(
        small, Measured(prefill_rate=300000, bandwidth=2.5e9), PlannedLoad(prompt=2048, output=200, rate=1)
    )
    assert any("let decode compute" in text for text in made.advice)
    assert any("one process per GPU" in text for text in made.advice)
    big = PlannedLoad(prompt=8192, output=300, rate=2)
    assert plan_of(LLAMA_8B, Measured(prefill_rate=24000, bandwidth=5e9), big).advice == ()


def sample(tokens, handoff_s, prefill_s=0.1):
    return HandoffSample(tokens=tokens, num_bytes=tokens * 1000, handoff_s=handoff_s, prefill_s=prefill_s)


def test_link_and_fixed_cost_are_found_from_two_lengths():
    told = fit([sample(100, 0.003)] * 3, [sample(400, 0.006)] * 3, [sample(800, 0.1, 0.2)], 0.02)
    assert told.bandwidth == pytest.approx(1e8)
    assert told.fixed_s == pytest.approx(0.002)
    assert told.prefill_rate == pytest.approx(4000)


def test_a_link_too_fast_to_measure_gives_no_negative_rate():
    told = fit([sample(100, 0.003)], [sample(400, 0.002)], [sample(800, 0.1, 0.2)], 0.02)
    assert told.bandwidth == FASTEST
    assert told.fixed_s == pytest.approx(0.003, rel=1e-3)


def test_prefill_that_slows_with_the_context_is_learned_from_two_chunks():
    true = Measured(prefill_rate=5000, bandwidth=1e9, slowing=2e-7)
    chunk, two = (sample(n, 0.006, prefill_s(n, true)) for n in (256, 512))
    told = fit([sample(64, 0.003)], [chunk], [two], 0.02)
    assert told.slowing == pytest.approx(2e-7)
    assert prefill_s(2048, told) == pytest.approx(prefill_s(2048, true))


@pytest.mark.parametrize(("off", "code"), [(0.2, 0), (-0.3, plan.EXIT_OFF), (0.3, plan.EXIT_OFF)])
def test_a_prediction_beyond_the_allowed_error_fails(toy_checkpoint, capsys, monkeypatch, off, code):
    monkeypatch.setattr(plan, "_on_cluster", lambda config, shape: (GPU, off, ["said"]))
    flags = [f"--model={toy_checkpoint('llama')}", "--url=http://x"]
    assert plan.main(flags) == 0
    assert plan.main([*flags, "--within=25"]) == code
    assert ("off by" in capsys.readouterr().err) == bool(code)


def test_the_command_prints_sizes_without_a_cluster(toy_checkpoint, capsys):
    assert plan.main([f"--model={toy_checkpoint('llama')}", "--bandwidth=2.5", "--rate=2"]) == 0
    assert "2.50 GB/s" in capsys.readouterr().out
    assert plan.main(["--bandwidth=2.5"]) == 2
    assert "--model" in capsys.readouterr().err


@pytest.fixture
def llama_8b(tmp_path):
    config = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_deals_gpus_as_up_does(llama_8b, capsys):
    flags = [f"--model={llama_8b}", "--gpu=H200", "--num-gpus=8"]
    assert plan.main(flags) == 0
    prefill, decode = split_on([gpu_named("H200").card] * 8, need_of(llama_8b))
    assert f"8 GPUs, one worker each: {prefill} prefill and {decode} decode" in capsys.readouterr().out
    assert plan.main([*flags, "--prompt=100", "--output=4000"]) == 0
    assert "8 GPUs, one worker each: 1 prefill and 7 decode" in capsys.readouterr().out


def test_a_rate_of_the_command_line_wins_over_the_data_sheet(llama_8b, capsys):
    flags = [f"--model={llama_8b}", "--gpu=H200"]
    assert plan.main([*flags, "--prefill-rate=5000", "--max-running=7"]) == 0
    out = capsys.readouterr().out
    assert "5000 tok/s" in out
    assert "7 at once" in out
    assert plan.main(flags) == 0
    assert "5000 tok/s" not in capsys.readouterr().out


def test_the_memory_of_every_known_gpu_is_shown(llama_8b, capsys):
    assert plan.main([f"--model={llama_8b}", "--memory"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("weights 15.0 GiB, KV of a token 128.0 KiB")
    assert len(rows) == len(GPUS)
    (h200,) = (row for row in rows if row.startswith("H200"))
    assert f"{kv_tokens_of(gpu_named('H200').card, need_of(llama_8b), is_decode=True):,}" in h200
    (l4,) = (row for row in rows if row.startswith("L4 "))
    assert l4.endswith(" -"), "two copies of the weights do not fit"


def test_a_gpu_that_is_not_listed_and_a_split_of_one_are_refused(llama_8b, capsys):
    assert plan.main([f"--model={llama_8b}", "--gpu=H20"]) == 2
    assert "did you mean 'H200'" in capsys.readouterr().err
    assert plan.main([f"--model={llama_8b}", "--num-gpus=1"]) == 2
    assert "one GPU is not split" in capsys.readouterr().err


# --- drain --------------------------------------------------------------------------------------------------

STATUS = {
    "workers": [
        {"role": "prefill", "instance": "aa11" + "0" * 28, "pid": 4001, "host": "h"},
        {"role": "decode", "instance": "aa22" + "0" * 28, "pid": 4002, "host": "h"},
    ]
}


def test_a_worker_is_selected_by_exactly_one_of_instance_and_pid():
    assert worker_of(STATUS, "aa2")["role"] == "decode"
    assert worker_of(STATUS, "4001")["role"] == "prefill"
    for node in ("aa", "", "400", "zz"):
        with pytest.raises(ConfigError, match="prefill aa110000"):
            worker_of(STATUS, node)


def test_only_the_selected_worker_of_this_host_is_ended():
    worker = {"role": "decode", "instance": "a" * 32, "pid": os.getpid(), "host": "here"}
    with pytest.raises(ConfigError, match="is no baton decode"):
        process_of(worker, "here")
    with pytest.raises(ConfigError, match="runs on here"):
        process_of(worker, "elsewhere")
    started = [sys.executable, "-c", "print(flush=True); input()", "baton.decode"]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()  # before it is loaded, a process has no command line
        assert process_of({**worker, "pid": child.pid}, "here").pid == child.pid
        child.communicate(b"\n")


def test_a_process_without_a_command_line_is_no_worker(monkeypatch):
    worker = {"role": "decode", "instance": "a" * 32, "pid": os.getpid(), "host": "here"}
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: [])
    with pytest.raises(ConfigError, match="is no baton decode"):
        process_of(worker, "here")
