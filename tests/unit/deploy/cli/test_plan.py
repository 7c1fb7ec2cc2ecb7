"""The calculation behind `baton plan`, and how it learns from samples; and whom `baton drain` may end."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from baton.cluster.errors import ConfigError
from baton.deploy.capacity.checkpoints import KVShape, shape_of
from baton.deploy.capacity.gpus import GPUS, cpu_of, gpu_named, kv_tokens_of, split_on
from baton.deploy.capacity.recommend import recommend
from baton.deploy.capacity.sizing import Measured, PlannedLoad, handoff_of, plan_of, prefill_s
from baton.deploy.capacity.worker_sizes import need_of
from baton.deploy.cli import plan
from baton.deploy.cli.drain import process_of, worker_of
from baton.deploy.cli.plan import FASTEST, HandoffSample, fit

LLAMA_8B = KVShape(num_layers=32, num_kv_heads=8, head_dim=128, hidden_size=4096, num_features=3)
GPU = Measured(prefill_rate=24000, bandwidth=2.5e9, fixed_s=0.0005, tpot_s=0.01)


WINDOWED = replace(LLAMA_8B, num_layers=4, num_features=1, windows=(0, 100, 0, 40), max_context=32768)


def test_layers_with_a_window_hold_and_move_the_last_tokens_alone():
    plain, layer = replace(WINDOWED, frees_windows=False), 4096
    assert WINDOWED.full_bytes == WINDOWED.window_bytes == 2 * layer == WINDOWED.kv_bytes // 2
    for tokens in (1, 99, 100):
        assert WINDOWED.held_bytes(tokens) == plain.held_bytes(tokens) == tokens * 4 * layer
        assert WINDOWED.moved_bytes(tokens, tokens) == tokens * plain.token_bytes
    assert WINDOWED.held_bytes(5000) - WINDOWED.held_bytes(4000) == 1000 * WINDOWED.full_bytes
    whole, features = WINDOWED.moved_bytes(5000, 5000), WINDOWED.feature_bytes
    assert whole == 5000 * (WINDOWED.full_bytes + features) + 100 * WINDOWED.window_bytes
    assert WINDOWED.moved_bytes(4900, 5000) == whole - 100 * plain.token_bytes
    assert plain.moved_bytes(4900, 5000) == 4900 * plain.token_bytes


def test_windows_leave_room_for_more_requests_and_shorten_a_hand_off():
    load = PlannedLoad(prompt=4000, output=96, rate=1.0, chunk=512, kv_memory=1e9, max_running=1000)
    measured = Measured(prefill_rate=1e4, bandwidth=1e8)
    kept = replace(WINDOWED, frees_windows=False)
    cut, whole = (plan_of(shape, measured, load) for shape in (WINDOWED, kept))
    assert 1.8 * whole.places < cut.places <= int(1e9 // WINDOWED.held_bytes(4096))
    assert cut.request_bytes == WINDOWED.held_bytes(4096)
    assert cut.handoff.total_s < 0.7 * whole.handoff.total_s
    assert cut.hiding_bandwidth < 0.7 * whole.hiding_bandwidth
    (token,) = (line for line in plan.report(WINDOWED, measured, load, cut, "") if line.startswith("Token"))
    assert "8.0 KiB, and 8.0 KiB while it is one of the last 100 tokens, and 8.0 KiB for the drafter" in token
    every = plan.report(replace(WINDOWED, windows=(100,) * 4), measured, load, cut, "")
    assert (
        every[0].split(maxsplit=1)[1].startswith("its KV cache has 16.0 KiB while it is one of the last 100 ")
    )


@pytest.mark.parametrize("windows", [(0, 100, 0, 40), (100,) * 4, (0, 0, 0, 5000), ()], ids=str)
@pytest.mark.parametrize("tokens", [60, 700, 6000])
def test_the_requests_of_a_pool_are_those_whose_pages_it_has(windows, tokens):
    """By counting pages of both kinds while requests come, one after the other."""
    shape, memory = replace(WINDOWED, windows=windows), 1e9
    budget = shape.page_budget
    pages = budget.num_pages(int(memory)) - 1
    in_windows = budget.num_window_pages(pages + 1) - 1 if shape.window else math.inf
    count = 0
    while pages >= tokens and in_windows >= shape.held_in_windows(tokens):
        pages, in_windows, count = pages - tokens, in_windows - shape.held_in_windows(tokens), count + 1
    assert abs(shape.requests_in(memory, tokens) - count) <= (0 if shape.window else 1)
    assert count > 3


def test_a_window_bounds_what_prompts_compute_and_steps_read():
    for shape in (WINDOWED, replace(WINDOWED, frees_windows=False)):
        assert shape.attended_share(40) == shape.rows_read(40) / 10 == 4
        assert shape.rows_read(1000) == (2 * 1000 + 100 + 40) / 4
        pairs = sum(min(i, window or i) for window in shape.windows for i in range(1, 10001))
        assert shape.attended_share(10000) == pytest.approx(2 * pairs / 1e8, rel=1e-3)


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
    assert any("moving a prompt takes" in text for text in made.advice)
    assert any("decoding hardly feels" in text for text in made.advice)
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
    monkeypatch.setattr(plan, "_on_cluster", lambda *_: (GPU, off, ["said"]))
    monkeypatch.setattr(plan.ChatClient, "get", lambda *_: {})
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
    told = (
        f"{prefill}P:{decode}D (baton up --prefill {prefill} --decode {decode}), because of all splits of 8"
    )
    assert capsys.readouterr().out.startswith(f"Recommendation: {told}")
    assert plan.main([*flags, "--prompt=100", "--output=4000"]) == 0
    assert capsys.readouterr().out.startswith("Recommendation: 8 aggregated workers (baton serve --decode 8)")


def test_a_rate_of_the_command_line_wins_over_the_data_sheet(llama_8b, capsys):
    flags = [f"--model={llama_8b}", "--gpu=H200"]
    assert plan.main([*flags, "--prefill-rate=5000", "--max-running=7"]) == 0
    out = capsys.readouterr().out
    assert "computes 5000 tokens/s" in out
    assert "holds 7 requests at once" in out
    assert "from --prefill-rate; the others estimated from the data sheet of H200" in out
    assert plan.main(flags) == 0
    assert "5000 tokens/s" not in capsys.readouterr().out


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


# --- recommendations ----------------------------------------------------------------------------------------


def sentence(measured=GPU, shape=LLAMA_8B, num_gpus=0, **load):
    """The recommendation for a load, as (prefill, decode, the sentence)."""
    planned = PlannedLoad(**{"prompt": 4000, "output": 300, "rate": 10, "max_running": 64} | load)
    made = recommend(shape, measured, planned, plan_of(shape, measured, planned), num_gpus)
    return made.prefill, made.decode, str(made)


def test_separate_workers_are_recommended_with_their_command_and_load():
    prefill, decode, text = sentence(replace(GPU, bandwidth=10e9))
    assert (prefill, decode) == (3, 1)
    assert text.startswith(
        "Recommendation: 3P:1D (baton up --prefill 3 --decode 1), because 10 requests/s keep 3"
    )
    assert "3 prefill workers 56% busy and fill 1 decode worker to " in text
    assert "next to 166.7 ms for the prompt." in text


def test_the_busy_share_in_the_sentence_is_what_the_load_takes():
    text = sentence(Measured(prefill_rate=10000, bandwidth=1e11), prompt=1000, rate=6, output=10)[2]
    assert "1 prefill worker 60% busy" in text, "6 prompts of 0.1 s in a second"


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (
            {"measured": replace(GPU, bandwidth=1e9)},
            "moving a prompt takes 623.1 ms and computing it 166.7 ms",
        ),
        ({"prompt": 100, "measured": replace(GPU, bandwidth=1e11)}, "decoding hardly feels"),
        ({"rate": 0.1, "measured": replace(GPU, bandwidth=1e11)}, "busy 2% of its time"),
    ],
)
def test_where_a_hand_off_does_not_pay_workers_are_aggregated(change, because):
    prefill, decode, text = sentence(**change)
    assert prefill == 0
    assert f"(baton serve --decode {decode}), because " in text
    assert because in text


def test_aggregated_workers_have_time_for_prompts_and_tokens():
    slow = replace(GPU, bandwidth=1e9)
    counts = [sentence(slow, rate=rate)[1] for rate in (0.5, 2, 20)]
    assert counts == sorted(counts)
    # 20 prompts of 0.167 s at 70 % and 20 * 3 s of one of 64 * 0.85 places
    assert counts[-1] == math.ceil(20 * (4000 / 24000 / 0.7 + 3 / (64 * 0.85)))


def test_a_request_that_fits_nowhere_is_the_recommendation():
    prefill, decode, text = sentence(kv_memory=2**28)
    assert (prefill, decode) == (0, 0)
    assert "no such worker, because a request holds 0.52 GiB of KV cache and a decode worker has 0.25" in text


def test_rates_follow_the_size_of_the_model_and_the_card(llama_8b, capsys):
    def told(*flags):
        assert plan.main([f"--model={llama_8b}", *flags]) == 0
        return capsys.readouterr().out

    rates = [
        int(re.search(r"computes (\d+) tokens/s", told(f"--gpu={name}"))[1])
        for name in ("L4", "A100", "H200")
    ]
    assert rates == sorted(rates)
    assert rates[2] / rates[1] == pytest.approx(989 / 312, rel=0.01)
    config = json.loads((llama_8b / "config.json").read_text())
    (llama_8b / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 64}))
    deeper = int(re.search(r"computes (\d+) tokens/s", told("--gpu=H200"))[1])
    assert deeper == pytest.approx(rates[2] / 2, rel=0.1)


def test_a_cpu_is_estimated_in_float32_by_its_cores(toy_checkpoint, capsys):
    assert plan.main([f"--model={toy_checkpoint('llama')}", "--gpu=CPU", "--memory"]) == 0
    assert plan.main([f"--model={toy_checkpoint('llama')}", "--gpu=CPU"]) == 0
    assert "cores and memory channels of CPU (1.28 TFLOP/s, 102.4 GB/s)" in capsys.readouterr().out
    assert cpu_of(64).tflops == 4 * cpu_of(16).tflops
    assert cpu_of(64).gb_per_s == cpu_of(32).gb_per_s == 2 * cpu_of(16).gb_per_s


def test_the_sizes_of_a_running_cluster_are_those_of_its_workers():
    def worker(role, **sizes):
        return {"role": role, "chosen": {name: {"value": value, "why": ""} for name, value in sizes.items()}}

    status = {"workers": [
        worker("prefill", chunk_size=4096), worker("decode", max_running=128, kv_memory_mb=90000),
        worker("decode", max_running=64, kv_memory_mb=50000), {"role": "decode", "chosen": None},
    ]}  # fmt: skip
    read = plan.with_sizes_of(plan.PlanConfig(model="m"), status)
    assert (read.chunk, read.max_running, read.kv_memory_mb) == (4096, 64, 50000)
    given = plan.PlanConfig(model="m", chunk=256, given=frozenset({"chunk"}))
    assert plan.with_sizes_of(given, status).chunk == 256
    assert plan.with_sizes_of(given, {"workers": []}) == given


def test_windows_are_planned_as_the_workers_of_a_cluster_have_them(toy_checkpoint, capsys):
    pages, sizes = ({name: {"value": "9", "why": ""}} for name in ("page_size", "window_pages"))
    cut, whole = ({"workers": [{"chosen": chosen}, {"chosen": None}]} for chosen in (pages | sizes, pages))
    asked = plan.PlanConfig(model="m")
    assert plan.with_sizes_of(asked, cut).window_kv == "free"
    assert plan.with_sizes_of(asked, whole).window_kv == "keep"
    assert plan.with_sizes_of(replace(asked, window_kv="free"), whole).window_kv == "free"
    said = {}
    for kind in ("auto", "free", "keep"):
        arguments = [f"--model={toy_checkpoint('gpt_oss')}", "--gpu=H200", f"--window-kv={kind}"]
        assert plan.main(arguments) == plan.main([*arguments, "--memory"]) == 0
        said[kind] = capsys.readouterr().out
    assert said["auto"] == said["free"]
    assert said["free"].count("while it is one of the last") == 2
    assert "while" not in said["keep"]


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
