"""A worker that cannot start says so in one line that names value and remedy. It exits with 1, and with 2 for
a wrong setting."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS = "eagle_aux_hidden_state_layer_ids"
HEAD = Path(__file__).parents[2] / "assets" / "smollm2-135m-eagle3"


def run(role, *flags, code=1):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", f"baton.{role}", "--device=cpu", "--kv-memory-mb=8", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd="/", check=False)
    said = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode == code, done.stderr
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"baton {role}: ")
    assert "Traceback" not in done.stderr
    return said[0]


def test_a_missing_shard_is_named(toy_copy):
    path = toy_copy("llama", shard_size="40KB")
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.unlink()
    assert victim.name in run("prefill", f"--model={path}")


def test_a_head_for_another_hidden_size_names_both(toy_checkpoint):
    path = toy_checkpoint("llama", num_hidden_layers=28, vocab_size=49152)
    line = run("decode", f"--model={path}", f"--draft={HEAD}")
    assert "576" in line
    assert "64" in line


def test_layers_that_the_target_does_not_have_are_named(toy_checkpoint, tmp_path):
    target, head = toy_checkpoint("llama"), shutil.copytree(HEAD, tmp_path / "head")
    same = {
        name: json.loads((target / "config.json").read_text())[name] for name in ("hidden_size", "vocab_size")
    }
    config = json.loads((head / "config.json").read_text()) | same | {"eagle_config": {LAYERS: [4, 15, 99]}}
    (head / "config.json").write_text(json.dumps(config))
    line = run("prefill", f"--model={target}", f"--draft={head}")
    assert "99" in line
    assert LAYERS in line


def test_an_address_in_use_is_named(toy_checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        line = run("prefill", f"--model={toy_checkpoint('llama')}", f"--kv-bind={endpoint}")
    assert endpoint in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model=/no/such/model"], "/no/such/model"),
        (["--model=x", "--kv-bind=tcp://0.0.0.0:7200"], "--trusted-network"),
        (["--model=x", "--kv-bind=tcp://0.0.0.0:7200", "--trusted-network"], "--kv-advertise"),
        (["--model=x", "--kv-cipher=aes-128-gcm"], "--keys"),
        (["--model=x", "--page-size=-1"], "page-size"),
        (["--model=x", "--spec-stepz=3"], "spec-stepz"),
        ([], "--model"),
    ],
    ids=[
        "no such model",
        "public bind",
        "bound to all addresses",
        "sealed without keys",
        "bad number",
        "unknown flag",
        "no model",
    ],
)
def test_a_wrong_setting_is_named(flags, words):
    assert words in run("prefill", *flags, code=2)
