"""The examples run as they are: two_hosts.sh makes a cluster, and the others are run against it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import yaml
from baton.tests.lock_files import ROOT
from baton.tests.meta.kubernetes.manifests import needs
from baton.tests.parity.fresh_chats import FRESH_CHATS
from baton.tests.parity.prompts import CHATS
from baton.tests.ports import free_port

EXAMPLES = ROOT / "examples"
READY_S, EXAMPLE_S = 120, 120
STOP_S = 30
MORE = "--device cpu --kv-memory-mb 256 --threads 1"


@contextmanager
def running(environment, role, log):
    with log.open("w") as sink:
        process = subprocess.Popen(
            [EXAMPLES / "two_hosts.sh", role], env=environment, stdout=sink, stderr=sink, cwd=log.parent
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


@pytest.fixture(scope="module")
def environment(smollm2_dir, eagle3_dir, tmp_path_factory):
    """Variables of the examples; a cluster of two_hosts.sh serves."""
    directory = tmp_path_factory.mktemp("hosts")
    port = free_port()
    made = {
        **os.environ,
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "MODEL": str(smollm2_dir), "DRAFT": str(eagle3_dir), "KEYS": str(directory / "keys"), "MORE": MORE,
        "ROUTER": "127.0.0.1", "HERE": "127.0.0.1",
        "HTTP_PORT": str(port), "CONTROL_PORT": str(free_port()), "KV_PORT": str(free_port()),
        "PREFIX_PORT": str(free_port()),
        "BATON_URL": f"http://127.0.0.1:{port}",
    }  # fmt: skip
    subprocess.run([EXAMPLES / "two_hosts.sh", "keys"], env=made, check=True, capture_output=True)
    logs = [directory / "prefill.log", directory / "decode.log"]
    with ExitStack() as stack:
        for log in logs:
            stack.enter_context(running(made, log.stem, log))
        until = time.monotonic() + READY_S
        while not is_ready(made["BATON_URL"]):
            assert time.monotonic() < until, "".join(log.read_text() for log in logs)
            time.sleep(0.2)
        yield made


def is_ready(url):
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def said_by(environment, *command):
    done = subprocess.run(
        [str(word) for word in command],
        env=environment, capture_output=True, text=True, timeout=EXAMPLE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.smollm2
def test_the_chat_client_streams_an_answer_and_its_counts(environment):
    said = said_by(environment, sys.executable, EXAMPLES / "chat_client.py", "Name one colour.")
    answer, _, counted = said.strip().rpartition("\n\n")
    assert answer
    assert counted.startswith("smollm2-135m-instruct: ")
    assert " tokens in, " in counted


@pytest.mark.smollm2
def test_the_model_calls_the_function_with_valid_arguments(environment):
    said = said_by(environment, sys.executable, EXAMPLES / "tools.py")
    call = said.splitlines()[0]
    arguments = json.loads(call.removeprefix("call: weather(").partition(") -> ")[0])
    assert arguments.keys() == {"city", "unit"}
    assert json.loads(call.partition(") -> ")[2])["city"] == arguments["city"]


@pytest.mark.smollm2
def test_the_structured_answer_is_the_object(environment):
    person = json.loads(said_by(environment, sys.executable, EXAMPLES / "structured_output.py"))
    assert person.keys() == {"name", "born", "field"}


@pytest.mark.smollm2
def test_the_benchmark_measures_every_load(environment):
    small = {**environment, "CLIENTS": "1 2", "REQUESTS": "3", "INPUT": "16", "OUTPUT": "4", "JSON": "1"}
    measured = json.loads(said_by(small, EXAMPLES / "benchmark.sh"))
    assert len(measured["levels"]) == 2, measured


def test_the_training_prompts_are_chats_of_every_kind():
    printed = said_by(dict(os.environ), sys.executable, "-P", EXAMPLES / "training_prompts.py", "300")
    chats = [json.loads(line)["messages"] for line in printed.splitlines()]
    assert len(chats) == 300
    assert len(set(printed.splitlines())) == 300
    assert {chat[0]["role"] for chat in chats} == {"system", "user"}
    assert {chat[-1]["role"] for chat in chats} == {"user"}
    assert not [turn for chat in chats for turn in chat if "{" in turn["content"]], "an unfilled word"


def test_no_training_prompt_is_nearly_one_that_drafters_are_measured_with():
    measured = [runs(texts_of(chat.messages()), 3) for chat in CHATS]
    fresh = set().union(*(runs(texts_of(chat.messages()), 5) for chat in FRESH_CHATS))
    assert len(fresh) > 400
    printed = said_by(dict(os.environ), sys.executable, "-P", EXAMPLES / "training_prompts.py", "5000")
    for line in printed.splitlines():
        asked = texts_of(json.loads(line)["messages"])
        words = runs(asked, 3)
        assert all(len(words & other) < 0.45 * len(words | other) for other in measured), asked
        assert not runs(asked, 5) & fresh, asked


def texts_of(messages):
    """What was asked: all messages but those of the model."""
    return [message["content"] for message in messages if message["role"] != "assistant"]


def runs(texts, length):
    """All runs of `length` words of `texts`; a shorter text is one run."""
    words = re.findall(r"\w+", " ".join(texts).lower())
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


@needs("helm")
@pytest.mark.parametrize(("release", "name"), [("baton", "baton"), ("chat", "chat-baton")])
def test_the_kubernetes_example_renders_the_release(release, name):
    environment = {**os.environ, "RELEASE": release, "IMAGE": "registry.test/baton", "MODEL_CLAIM": "weights"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    rendered = said_by(environment, EXAMPLES / "kubernetes.sh", "render")
    objects = [one for one in yaml.safe_load_all(rendered) if one]
    assert "registry.test/baton" in rendered
    assert "claimName: weights" in rendered
    assert name in {one["metadata"]["name"] for one in objects if one["kind"] == "Service"}
    shown = (EXAMPLES / "kubernetes.sh").read_text()
    assert all(verb in shown for verb in ("helm upgrade --install", "port-forward", "helm uninstall"))


def test_every_example_is_listed_and_runnable():
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or f"]({path.name})" in listed
        assert path.suffix != ".sh" or os.access(path, os.X_OK)
