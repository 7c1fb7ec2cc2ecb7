"""Real processes with keys: they serve as without, and a worker with other keys stays outside and says why."""

import os
import subprocess
import sys

import psutil
import pytest
from baton.cluster.keyring import read_key
from baton.deploy.keys import add, init
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.cluster.serving import complete, serving, status, wait_until
from baton.tests.parity.toy_models import reference_greedy, reference_model

PROMPT = [7, 80, 33, 150, 9, 212, 41, 5, 18, 99, 120, 61, 3, 77, 240, 14, 15, 16, 200, 31]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, toy_checkpoint):
    directory = tmp_path_factory.mktemp("served")
    for path in toy_checkpoint("llama", vocab_size=330).iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return save_tokenizer(directory)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    directory = tmp_path_factory.mktemp("host") / "keys"
    init(directory, ["router", "prefill", "decode"], "here")
    return directory


@pytest.fixture(scope="module")
def cluster(model_dir, keys):
    with serving(model_dir, keys=str(keys), transport="tcp", kv_memory_mb=8, threads=1) as running:
        yield running


def test_a_cluster_with_keys_answers_with_the_model_s_tokens(cluster, model_dir):
    ids, document = complete(cluster, PROMPT, max_tokens=12)
    assert ids == reference_greedy(reference_model(model_dir), PROMPT, 12)
    assert document["timeline"]["handoff_bytes"] > 0
    prefill = next(worker for worker in status(cluster)["workers"] if worker["role"] == "prefill")
    assert prefill["counters"]["peers_refused"] == 0


def test_only_the_ports_that_must_listen_do_and_on_loopback_only(cluster):
    listening = {}
    for child in cluster.children:
        connections = psutil.Process(child.pid).net_connections("inet")
        listening[child.name] = [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]
    assert {name: len(found) for name, found in listening.items()} == {"router": 2, "prefill-0": 1, "decode-0": 0}
    assert {address.ip for found in listening.values() for address in found} == {"127.0.0.1"}
    assert cluster.config.port in {address.port for address in listening["router"]}


@pytest.mark.parametrize("who", ["unlisted", "no keys", "a decode key as prefill"])
def test_a_worker_with_other_keys_does_not_register_and_says_why(cluster, model_dir, keys, tmp_path, who):
    role = "prefill" if who == "a decode key as prefill" else "decode"
    mine = tmp_path / "mine"
    init(mine, [role], "intruder")
    router = read_key(keys, "router")
    add(mine, router.public, "router", "r", 3600, 0.0)
    if role == "prefill":  # its key is listed, as another role's
        add(keys, read_key(mine, "prefill").public, "decode", "intruder", 3600, 0.0)
    control = next(flag for flag in cluster._supervisor.children[0].spec.argv if flag.startswith("--control-bind="))
    flags = [f"--router={control.partition('=')[2]}", f"--model={model_dir}", "--device=cpu", "--kv-memory-mb=8"]
    flags += [] if who == "no keys" else [f"--keys={mine}"]
    said = tmp_path / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"baton.{role}", *flags],
            stderr=output, cwd="/", env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    words = {
        "unlisted": "reason=the peer refused our key",
        "no keys": "remedy=if the router runs with --keys",
        "a decode key as prefill": "reason=a decode key may not register a prefill worker",
    }[who]
    try:
        wait_until(lambda: words in said.read_text().replace('"', ""), 60, "the worker says why")
        assert len(status(cluster)["workers"]) == 2
        assert process.poll() is None, "it goes on trying"
    finally:
        process.terminate()
        process.wait(20)
    assert len(complete(cluster, PROMPT, max_tokens=4)[0]) == 4
