"""The commands of the pages for users that need no GPU, run as written, but for the port and names."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import httpx
import pytest
from baton.tests.meta.doc_commands import PAGES, sections
from baton.tests.ports import free_port

pytestmark = pytest.mark.smollm2

ROOT = Path(__file__).resolve().parents[2]
SERVERS = ("baton up", "baton serve")
CLIENTS = ("baton bench serve", "baton chat", "baton top")  # they ask port 8000 unless told
READY_S = 120.0
COMMAND_S = 240.0


@pytest.fixture
def environment(tmp_path):
    scripts = sysconfig.get_path("scripts")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("BATON_")}
    return {**inherited, "PATH": f"{scripts}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}


def pointed(line, port):
    """A command that reaches the server of the test."""
    url = f" --url http://127.0.0.1:{port}" if line.startswith(CLIENTS) and "--url" not in line else ""
    command, _, comment = line.partition("  #")
    return command.replace("127.0.0.1:8000", f"127.0.0.1:{port}") + url + (f"  #{comment}" if comment else "")


@contextlib.contextmanager
def started(command, port, environment):
    """The server of `command`; it must end with exit code 0 on SIGTERM."""
    server = subprocess.Popen(
        ["bash", "-c", f"exec {command} --port {port}"], env=environment, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + READY_S
        while not is_ready(port):
            assert server.poll() is None, server.communicate()[0]
            assert time.monotonic() < deadline, "not ready"
            time.sleep(0.2)
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        output = server.communicate(timeout=60)[0]
    assert server.returncode == 0, output


def is_ready(port):
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    return False


def ran(block, port, environment, names):
    """The output of a block; every command of it must succeed."""
    for name, value in names.items():
        block = re.sub(rf"\b{name}\b", str(value), block)
    script = "\n".join(pointed(line, port) for line in block.splitlines())
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], env=environment, cwd=ROOT, timeout=COMMAND_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return done.stdout


def of_every_machine():
    return [section for page in PAGES for section in sections(page) if section.runs_here]


def test_the_commands_of_the_pages_work_as_written(environment, smollm2_dir, eagle3_dir):
    names = {"DIR": smollm2_dir, "HEAD": eagle3_dir}
    (laptop,) = [section for section in sections("quickstart") if section.title == "Laptop"]
    server, *_ = laptop.blocks
    assert server.startswith(SERVERS)
    port, said = free_port(), {}
    with started(server.strip(), port, environment):
        for section in of_every_machine():
            for block in section.blocks:
                if block.startswith(SERVERS) or ("| jq" in block and shutil.which("jq") is None):
                    continue
                said[str(section), block] = ran(block, port, environment, names)
    answers = "\n".join(said.values())
    assert "Paris" in answers
    assert "Recommendation" in answers
    assert len(said) >= 5


def test_the_second_server_of_the_quickstart_answers(environment, smollm2_dir):
    (laptop,) = [section for section in sections("quickstart") if section.title == "Laptop"]
    *_, server = laptop.blocks
    (question,) = [block for block in laptop.blocks if "curl" in block]
    port = free_port()
    with started(server.strip(), port, environment):
        assert "Paris" in ran(question.partition("baton chat")[0], port, environment, {})
