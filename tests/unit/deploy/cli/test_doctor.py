"""Ten faults are planted on a host that is well otherwise; the doctor finds each and names a remedy."""

import contextlib
import http.server
import importlib.metadata
import json
import resource
import shutil
import socket
import threading
import time
from functools import partial

import pytest
from baton.cluster.config.roles import DecodeConfig
from baton.deploy.cli import doctor
from baton.deploy.cli.findings import (
    FAIL,
    OK,
    WARN,
    check_cache_budgets,
    check_distribution,
    check_fabric,
    check_gpu,
    check_limits,
    check_link,
    check_model,
    check_paths,
    check_shm,
    check_versions,
)
from baton.deploy.cli.pull_test import Link, measure, serve
from baton.deploy.keys.keys import init
from baton.deploy.up import launcher
from baton.tests.cluster.router_fakes import save_tokenizer

PREFILL = {
    "role": "prefill", "instance": "a1" * 16, "state": "serving", "host": "h", "pid": 1,
    "heartbeat_age_s": 0.1,
    "fingerprint": "f0" * 16,
}  # fmt: skip
DECODE = {**PREFILL, "role": "decode", "instance": "b2" * 16}


@pytest.fixture
def model(toy_copy):
    directory = toy_copy("llama", shard_size="40KB", vocab_size=330)
    save_tokenizer(directory)
    return directory


@pytest.fixture
def keys(tmp_path):
    init(tmp_path / "keys", ["router", "prefill", "decode"], "here")
    return tmp_path / "keys"


@contextlib.contextmanager
def router(workers, *, ahead_s=0.0):
    """What a router says to the doctor; its clock is `ahead_s` ahead of ours."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"router": {"clock": time.time() + ahead_s}, "workers": workers}).encode()
            self.send_response_only(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def examined(capsys, *flags):
    """(exit code, findings that are not well)"""
    code = doctor.main(["--json", "--device=cpu", *flags])
    found = json.loads(capsys.readouterr().out)
    assert all(finding["remedy"] for finding in found if finding["level"] != OK)
    return code, [finding for finding in found if finding["level"] == FAIL]


def one(capsys, check, words, *flags):
    code, faults = examined(capsys, *flags)
    assert code == doctor.EXIT_FOUND
    assert {fault["check"] for fault in faults} == {check}, faults
    assert any(words in fault["text"] for fault in faults), faults


def test_a_healthy_host_has_no_finding(capsys, model, keys, tmp_path):
    (tmp_path / "c.toml").write_text(
        f'[router]\nmodel = "{model}"\nport = 0\ncontrol_bind = "tcp://127.0.0.1:0"\n'
    )
    with router([PREFILL, DECODE]) as url:
        flags = [f"--model={model}", f"--keys={keys}", f"--config={tmp_path}/c.toml", f"--url={url}"]
        assert examined(capsys, *flags) == (0, [])


def test_fault_1_a_missing_shard_is_found(capsys, model):
    victim = sorted(model.glob("*.safetensors"))[1]
    victim.unlink()
    one(capsys, "model", victim.name, f"--model={model}")


def test_fault_2_a_truncated_shard_is_found(capsys, model):
    victim = sorted(model.glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-100])
    one(capsys, "model", "its header says", f"--model={model}")


def test_fault_3_a_head_of_another_model_is_found(capsys, model, tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"hidden_size": 4096}')
    one(capsys, "model", "hidden_size 4096", f"--model={model}", f"--draft={tmp_path}/head")


def test_a_head_may_be_narrower_and_name_the_inputs_of_layers(model, tmp_path):
    target = json.loads((model / "config.json").read_text())
    key, last = "eagle_aux_hidden_state_layer_ids", target["num_hidden_layers"]
    head = {"hidden_size": 8, "target_hidden_size": target["hidden_size"], key: [1, last]}
    (tmp_path / "config.json").write_text(json.dumps(head))
    assert [finding.level for finding in check_model(model, tmp_path)] == [OK]
    (tmp_path / "config.json").write_text(json.dumps(head | {key: [1, last + 1]}))
    (found,) = check_model(model, tmp_path)
    assert (found.level, f"reads layer {last + 1}" in found.text) == (FAIL, True)


def test_lookup_asks_for_no_head(model):
    config = doctor.DoctorConfig(model=str(model), draft="ngram", device="cpu")
    found = [finding for finding in doctor.examine(config) if finding.check in ("model", "sizes")]
    assert {finding.level for finding in found} == {OK}
    assert len(found) == 3, "the model, and the sizes of both roles"


def test_fault_4_a_secret_key_readable_by_others_is_found(capsys, keys):
    (keys / "decode.key").chmod(0o644)
    one(capsys, "keys", "readable by others", f"--keys={keys}")


def test_fault_5_a_role_without_an_admitted_key_is_found(capsys, keys, tmp_path):
    shutil.rmtree(keys)
    init(keys, ["router", "decode"], "here")
    one(capsys, "keys", "admits no prefill", f"--keys={keys}", "--roles=router,decode")


@pytest.mark.parametrize("setting", ["port", "own_port"])
def test_fault_6_a_port_in_use_is_found(capsys, model, tmp_path, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "c.toml").write_text(
            f'[router]\nmodel = "{model}"\n{setting} = {port}\n[prefill]\nmodel = "{model}"\n'
        )
        one(capsys, "ports", str(port), f"--config={tmp_path}/c.toml", "--roles=router")


def test_fault_7_workers_that_cannot_pair_are_found(capsys):
    with router([PREFILL, {**DECODE, "fingerprint": "e0" * 16}]) as url:
        one(capsys, "pairing", "e0e0e0e0", f"--url={url}")


def test_fault_8_a_silent_worker_and_a_missing_role_are_found(capsys):
    with router([{**PREFILL, "heartbeat_age_s": 9.0}]) as url:
        one(capsys, "pairing", "silent for 9.0 s", f"--url={url}")
        one(capsys, "pairing", "no decode worker", f"--url={url}")


def test_aggregated_workers_need_no_prefill_worker(capsys):
    with router([{**DECODE, "aggregated": True}]) as url:
        assert examined(capsys, f"--url={url}") == (0, [])
    with router([DECODE]) as url:
        one(capsys, "pairing", "no prefill worker", f"--url={url}")


def test_fault_9_clocks_that_differ_are_found(capsys):
    with router([PREFILL, DECODE], ahead_s=3600) as url:
        one(capsys, "clock", "behind", f"--url={url}")


def test_fault_10_a_slow_or_dead_link_is_found(capsys, monkeypatch):
    monkeypatch.setattr("baton.deploy.cli.pull_test.SILENCE_S", 30.0)  # its other end is a thread here
    monkeypatch.setattr("baton.deploy.cli.doctor.measure", partial(measure, seconds=0.2))
    endpoints, over = [], threading.Event()
    tell = {"on_ready": endpoints.append, "is_over": over.is_set}
    serving = threading.Thread(
        target=serve, args=("tcp://127.0.0.1:0",), kwargs={"trusted_network": False, **tell}
    )
    serving.start()
    deadline = time.monotonic() + 60
    while not endpoints and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        one(capsys, "link", "less than", f"--pull={endpoints[0]}", "--least=10000")
        link = measure(endpoints[0], 0.2)
        assert link.bytes_per_s > 1e5
        assert 0 < link.round_trip_s < 10
    finally:
        over.set()
        serving.join()
    monkeypatch.setattr("baton.deploy.cli.pull_test.SILENCE_S", 1.0)
    one(capsys, "link", "cannot be reached", f"--pull={endpoints[0]}")


def test_a_router_that_does_not_answer_is_a_finding(capsys):
    one(capsys, "pairing", "127.0.0.1:9", "--url=http://127.0.0.1:9")


def test_a_dependency_that_is_missing_or_too_old_is_named():
    installed = {"torch": "2.4.0", "numpy": "2.1"}

    def version_of(name):
        try:
            return installed[name]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    wanted = [
        "torch>=2.11",
        "numpy>=1.26",
        "pyzmq>=26",
        'gguf>=1; extra == "demo"',
        "x; python_version < '3'",
    ]
    found = check_versions(wanted, version_of)
    assert [finding.text for finding in found] == ["torch 2.4.0 is not >=2.11", "pyzmq is not installed"]


def test_a_source_tree_that_is_not_installed_is_a_warning_and_no_crash():
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    (finding,) = check_distribution("baton-serve", requires)
    assert (finding.level, finding.check) == (WARN, "versions")
    assert "baton-serve is not installed" in finding.text
    assert "pip install" in finding.remedy
    assert check_distribution("baton-serve", lambda name: None)[0].level == OK


@pytest.mark.parametrize(
    ("device", "said", "levels"),
    [
        ("cuda", {}, [FAIL]),
        ("cpu", {}, [OK]),
        ("cuda", {"--query-gpu": "0, H200, 580, 141 GiB\n"}, [OK]),
        ("cuda", {"--query-gpu": "0, A, 1, 1\n1, A, 1, 1\n"}, [OK, WARN]),
        ("cuda", {"--query-gpu": "0, A, 1, 1\n1, A, 1, 1\n", "nvlink": "Link 0: 26.5 GB/s\n"}, [OK]),
    ],
)
def test_the_report_lists_gpus_and_their_links(device, said, levels):
    def run(command):
        return next((text for word, text in said.items() if any(word in part for part in command)), "")

    assert [finding.level for finding in check_gpu(device, run)] == levels


def test_few_files_and_cores_are_found():
    files, cores, space = resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS
    limits = {files: (256, 256), cores: (-1, -1), space: (-1, -1)}
    assert [finding.level for finding in check_limits(limits.__getitem__)] == [FAIL, WARN]


@pytest.mark.parametrize(("mib", "level"), [(None, OK), (600, FAIL), (8192, WARN)])
def test_a_limit_on_address_space_is_found(mib, level):
    size = resource.RLIM_INFINITY if mib is None else mib << 20
    limits = {
        resource.RLIMIT_NOFILE: (65536, 65536), resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_AS: (size, resource.RLIM_INFINITY),
    }  # fmt: skip
    (finding,) = check_limits(limits.__getitem__)
    assert (finding.level, f"at most {mib} MiB" in finding.text) == (level, mib is not None)
    assert ("ulimit -v unlimited" in finding.remedy) == (mib is not None)


def test_missing_shared_memory_is_found(tmp_path):
    assert check_shm(tmp_path / "none")[0].level == WARN


def test_the_fabric_between_hosts_is_named_and_an_unused_one_is_a_finding():
    assert "no device for RDMA" in check_fabric([], "")[0].text
    assert "NIXL 1.5.1 is installed" in check_fabric([], "1.5.1")[0].text
    assert check_fabric(["mlx5_1", "mlx5_0"], "1.5.1")[0].text.startswith(
        "NIXL 1.5.1 with RDMA by mlx5_0, mlx5_1"
    )
    (finding,) = check_fabric(["mlx5_0"], "")
    assert (finding.level, "baton-serve[nixl]" in finding.remedy) == (WARN, True)


def test_a_fast_link_has_no_finding():
    assert check_link("x", lambda endpoint: Link(bytes_per_s=2e9, round_trip_s=1e-4), 1e9)[0].level == OK


def test_an_unknown_role_is_refused_as_a_setting(capsys):
    assert doctor.main(["--roles=router,prefil"]) == 2
    assert "'prefil'" in capsys.readouterr().err


def test_the_probe_server_binds_a_public_address_only_when_permitted(capsys):
    assert doctor.main(["--serve-pull=tcp://0.0.0.0:0"]) == 2
    assert "trusted" in capsys.readouterr().err


def test_the_ways_of_hand_offs_are_named_with_their_rates():
    def worker(role: str, host: str = "h", device: str = "cuda:0", **paths: float) -> dict[str, object]:
        state = {"state": "serving", "instance": role * 8, "host": host, "device": device}
        return {"role": role, "paths": paths, **state}

    fast = check_paths({"workers": [worker("prefill"), worker("decode", cuda_slab=210.5)]})
    assert [(f.level, f.text) for f in fast] == [("ok", "decode decodede on h: cuda_slab at 210.50 GB/s")]
    (mixed,) = check_paths({"workers": [worker("prefill"), worker("decode", **{"cuda_slab+shm": 90.0})]})
    assert mixed.level == "ok"
    (slow,) = check_paths({"workers": [worker("prefill"), worker("decode", shm=6.1)]})
    assert (slow.level, "shm at 6.10 GB/s" in slow.text) == ("warn", True)
    assert "blocks take another way" in slow.remedy
    (other,) = check_paths({"workers": [worker("prefill", host="g"), worker("decode", zmq_blocks=1.0)]})
    assert other.level == "ok"
    assert check_paths({"workers": [worker("prefill"), worker("decode")]}) == []


@pytest.fixture
def written(tmp_path):
    """A function that writes a config file and returns the flag that names it."""

    def write(text):
        (tmp_path / "c.toml").write_text(text)
        return f"--config={tmp_path}/c.toml"

    return write


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[upp]\nmodel = "m"\n', "unknown table [upp]; did you mean [up]?"),
        ('[up]\nmodel = "m"\nprefil = 2\n', "unknown key 'prefil'; did you mean 'prefill'?"),
        ('[up]\nmodel = "m"\nchunk_size = "x"\n', "write a whole number"),
        ('[up]\nmodel = "m"\n[decode]\nwatchdog_s = -1\n', "below the smallest allowed"),
        ("[up]\nport = 0\n", "under [up]"),
        ("[prefill]\nchunk_size = 64\n", "under [prefill]"),
        ('[up]\nmodel = "m"\nhost = "0.0.0.0"\n', "--api-keys FILE, --tls-cert FILE and --tls-key FILE"),
        ('[up]\nmodel = "m"\nprefill = 0\naggregated = false\n', "decode computes the prompts"),
    ],
)
def test_a_file_that_up_would_refuse_is_refused_with_the_same_words(capsys, written, text, words):
    flag = written(text)
    assert doctor.main([flag]) == 2
    by_doctor = capsys.readouterr().err.removeprefix("baton doctor: ")
    assert words in by_doctor
    assert launcher.main([flag]) == 2
    by_up = capsys.readouterr().err.removeprefix("baton up: ")
    assert by_up == by_doctor or "[prefill]" in words, "without a table [up], up has no model either"


def test_the_model_and_ports_of_up_are_looked_at(capsys, written, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flag = written(f'[up]\nmodel = "{model}"\nport = {port}\n[decode]\nmetrics_port = 0\n')
        one(capsys, "ports", f"--port tcp://127.0.0.1:{port}", flag)
    assert examined(capsys, flag) == (0, [])
    assert doctor.main([flag, "--device=cpu"]) == 0
    told = capsys.readouterr().out
    assert f"{model}: whole" in told
    assert "prefill on " in told
    assert "decode on " in told
    sorted(model.glob("*.safetensors"))[0].unlink()
    one(capsys, "model", "is missing", flag)


def test_each_role_has_the_model_of_its_own_table(capsys, written, model):
    flag = written(f'[prefill]\nmodel = "{model}"\n[decode]\nmodel = "/nope"\n')
    one(capsys, "model", "/nope is no directory", flag)
    assert examined(capsys, flag, "--roles=prefill") == (0, [])


def test_a_model_of_the_hub_is_not_downloaded(capsys, written, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert doctor.main([written('[up]\nmodel = "org/model"\n'), "--json", "--device=cpu"]) == 0
    (found,) = [each for each in json.loads(capsys.readouterr().out) if each["check"] == "model"]
    assert (found["level"], "org/model is not on this host" in found["text"]) == (WARN, True)


def test_cache_budgets_are_held_against_free_memory_and_disk(tmp_path):
    decode = partial(DecodeConfig, model="m")
    assert check_cache_budgets([(decode(), 1)]) == []
    host, disk = check_cache_budgets(
        [(decode(host_cache_gib=0.01, disk_cache=str(tmp_path / "new"), disk_cache_gib=0.01), 2)]
    )
    assert (host.level, disk.level) == (OK, OK)
    assert host.text.startswith("prefixes in host memory: 0.02 GiB of ")
    assert disk.text.startswith(f"prefixes in {tmp_path / 'new'}: 0.02 GiB of ")
    host, disk = check_cache_budgets(
        [(decode(host_cache_gib=30000, disk_cache=str(tmp_path), disk_cache_gib=2**19), 2)]
    )
    assert (host.level, disk.level) == (FAIL, FAIL)
    assert "start fewer workers" in host.remedy
    assert disk.remedy == "give less"
