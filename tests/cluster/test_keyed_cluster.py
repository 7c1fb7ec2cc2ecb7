"""Real processes with keys serve as without, and a worker with other keys is refused with a reason."""

import os
import subprocess
import sys

import pytest
from baton.cluster.security.keyring import read_key
from baton.deploy.keys.keys import add, init
from baton.engine.weights_hash import WeightsHash
from baton.tests.cluster.serving import complete, status, wait_until
from baton.tests.parity.toy_models import reference_greedy, reference_model

PROMPT = [7, 80, 33, 150, 9, 212, 41, 5, 18, 99, 120, 61, 3, 77, 240, 14, 15, 16, 200, 31]


def test_a_cluster_with_keys_answers_with_the_model_s_tokens(keyed_cluster, served_dir):
    before = num_refused(keyed_cluster)
    ids, document = complete(keyed_cluster, PROMPT, max_tokens=12)
    assert ids == reference_greedy(reference_model(served_dir), PROMPT, 12)
    assert document["timeline"]["handoff_bytes"] > 0
    assert num_refused(keyed_cluster) == before


def test_both_workers_report_the_hash_of_all_weights(keyed_cluster, served_dir):
    def hashes():
        return [worker["weights_hash"] for worker in status(keyed_cluster)["workers"]]

    whole = WeightsHash(served_dir, cache_files=[])
    whole.start()
    assert whole.wait(60)
    wait_until(lambda: hashes() == [whole.value] * 2, 60, "heartbeats bring the hash")
    assert {worker["phase"] for worker in status(keyed_cluster)["workers"]} == {"serving"}
    assert status(keyed_cluster)["unpaired"] == []


def num_refused(cluster):
    prefill = next(worker for worker in status(cluster)["workers"] if worker["role"] == "prefill")
    return prefill["counters"]["peers_refused"]


@pytest.mark.parametrize("who", ["unlisted", "no keys", "a decode key as prefill"])
def test_s31_a_worker_with_other_keys_is_refused_with_a_reason(
    keyed_cluster, served_dir, shared_keys, tmp_path, who
):
    role = "prefill" if who == "a decode key as prefill" else "decode"
    mine = tmp_path / "mine"
    init(mine, [role], "intruder")
    router = read_key(shared_keys, "router")
    add(mine, router.public, "router", "r", 3600, 0.0)
    if role == "prefill":  # its key is listed, as another role's
        add(shared_keys, read_key(mine, "prefill").public, "decode", "intruder", 3600, 0.0)
    control = next(
        flag for flag in keyed_cluster._supervisor.children[0].spec.argv if flag.startswith("--control-bind=")
    )
    flags = [
        f"--router={control.partition('=')[2]}",
        f"--model={served_dir}",
        "--device=cpu",
        "--kv-memory-mb=8",
    ]
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
        assert len(status(keyed_cluster)["workers"]) == 2
        assert process.poll() is None, "it goes on trying"
    finally:
        process.terminate()
        process.wait(20)
    assert len(complete(keyed_cluster, PROMPT, max_tokens=4)[0]) == 4
