"""The units under a real systemd: started in order, a hung loop ended by the manager's watchdog, a clean stop in time."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from baton.deploy.keys import init
from baton.deploy.units import LAST_WORDS_S, WATCHDOG_S, main
from baton.tests.cluster.booted import booted, missing, prepare
from baton.tests.parity.toy_models import reference_greedy, reference_model

UNITS = ("baton-router.service", "baton-prefill@0.service", "baton-decode@1.service")
DRAIN_S = 20
PROMPT = [7, 80, 33, 150, 9, 212, 41, 5, 18, 99]
SETTINGS = f"""
[router]
drain_timeout_s = {DRAIN_S}
canary_s = 0
[prefill]
drain_timeout_s = {DRAIN_S}
dtype = "float32"
kv_memory_mb = 8
[decode]
drain_timeout_s = {DRAIN_S}
dtype = "float32"
kv_memory_mb = 8
"""
# the first prompt hangs the loop; the process's own watchdog stays out of it, so that the manager's must act
HANGS = "BATON_FAULT=prefill:chunk:1:hang\nBATON_ALLOW_FAULTS=1\nBATON_PREFILL_WATCHDOG_S=0\n"


@pytest.fixture
def machine(tmp_path, served_dir):
    if reason := missing():
        pytest.skip(reason)
    files = tmp_path / "files"
    command = prepare(files)
    shutil.copytree(served_dir, files / "srv" / "model")
    (files / "srv" / "model").chmod(0o755)
    for path in (files / "srv" / "model").iterdir():
        path.chmod(0o644)
    (tmp_path / "mine.toml").write_text(SETTINGS)
    flags = [f"--config={tmp_path}/mine.toml", f"--command={command}", "--model=/srv/model", "--device=cpu"]
    assert main([f"--prefix={files}", *flags]) == 0
    init(files / "etc" / "baton" / "keys", ["router", "prefill", "decode"], "here")
    (files / "etc" / "baton" / "prefill-0.env").write_text(HANGS)
    (tmp_path / "machine").mkdir()
    with booted(tmp_path / "machine", files) as made:
        yield made


def wait_for(predicate, seconds, what):
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.02)


def complete(machine, model, num_tokens):
    body = {"model": "model", "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}
    with machine.inside():
        answer = httpx.post(f"{machine.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == reference_greedy(reference_model(model), PROMPT, num_tokens)


def open_rooms(machine):
    with machine.inside():
        return httpx.get(f"{machine.url}/status").json()["router"]["open_rooms"]


def states(machine):
    return [machine.show(unit, "ActiveState").get("ActiveState") for unit in UNITS]


@pytest.mark.slow
def test_the_units_start_outlive_a_hung_loop_and_stop_in_time_under_a_real_systemd(machine, served_dir):
    wait_for(lambda: states(machine) == ["active"] * 3, 120, machine.journal)
    complete(machine, served_dir, 24)  # prefill hangs, the router notices, decode computes the prompt itself
    machine.run("rm", "/etc/baton/prefill-0.env")  # its next life is without a fault
    prefill = UNITS[1]
    wait_for(lambda: machine.show(prefill, "NRestarts") == {"NRestarts": "1"}, 2 * WATCHDOG_S, machine.journal)
    assert f"Watchdog timeout (limit {WATCHDOG_S}s)" in machine.journal(prefill)
    wait_for(lambda: states(machine) == ["active"] * 3, 60, machine.journal)
    with ThreadPoolExecutor(1) as asking:
        running = asking.submit(complete, machine, served_dir, 200)
        wait_for(lambda: open_rooms(machine), 20, machine.journal)
        began = time.monotonic()
        machine.run("systemctl", "stop", *UNITS)
        assert time.monotonic() - began < DRAIN_S + LAST_WORDS_S
        running.result()  # what ran was ended, not cut
    for unit in UNITS:
        ended = machine.show(unit, "ActiveState", "Result", "ExecMainStatus", "NRestarts")
        assert ended.pop("NRestarts") == ("1" if unit == prefill else "0")
        assert ended == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}, machine.journal(unit)
