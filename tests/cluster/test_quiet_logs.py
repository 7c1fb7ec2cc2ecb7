"""The log of `baton up` in normal operation: no WARNING at a start, a request and a stop; JSON lines."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import httpx
import psutil
import pytest
from baton.deploy.cli import drain
from baton.tests.cluster.serving import sse_events, wait_until

FLAGS = ("--device=cpu", "--dtype=float32", "--kv-memory-mb=8", "--threads=1", "--port=0")
LOUD = ("WARNING", "ERROR", "CRITICAL")


class Up:
    """`baton up` as a process. `lines` is its log so far."""

    def __init__(self, model, *flags, runtime):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton", "up", f"--model={model}", *FLAGS, *flags],
            cwd="/",
            env={**os.environ, "XDG_RUNTIME_DIR": runtime},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.model, self.lines, self.stdout = model.name, [], []
        pairs = ((self.process.stderr, self.lines), (self.process.stdout, self.stdout))
        self._readers = [threading.Thread(target=self._read, args=pair) for pair in pairs]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, lines):
        with stream:
            lines.extend(line.rstrip("\n") for line in iter(stream.readline, ""))

    def wait_for(self, find, what):
        """The first line for which `find` is true."""
        deadline = time.monotonic() + 120
        while True:
            found = next((line for line in [*self.lines, *self.stdout] if find(line)), None)
            if found is not None:
                return found
            assert self.process.poll() is None, "\n".join(self.lines)
            assert time.monotonic() < deadline, what + "\n" + "\n".join(self.lines)
            time.sleep(0.05)

    def interrupt(self):
        """Ctrl-C; returns its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(30)

    @property
    def loud(self):
        return [line for line in self.lines if any(f" {level} " in line for level in LOUD)]


@pytest.fixture
def start_up(served_dir):
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp", prefix="up-"))

        def start(*flags):
            up = Up(served_dir, *flags, runtime=runtime)
            stack.callback(up.end)
            return up

        yield start


def url_of(up):
    return up.wait_for(lambda line: line.startswith("ready "), "ready").split()[1]


def body(up, **more):
    return {"model": up.model, "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True, **more}


def worker_pid(url, role):
    """The PID of one worker of a role."""
    workers = httpx.get(f"{url}/status").json()["workers"]
    return next(worker["pid"] for worker in workers if worker["role"] == role)


def test_normal_operation_logs_no_warning_and_streams_outlive_ctrl_c(start_up):
    up = start_up("--canary-s=1", "--local-prefill=off")  # both workers have a part in the request
    url = url_of(up)
    assert httpx.post(f"{url}/v1/completions", json=body(up), timeout=60).status_code == 200
    time.sleep(2.5)  # several canaries
    counts = httpx.get(f"{url}/metrics").text
    passed = re.search(r'^baton_canaries_total\{[^}]*outcome="passed"[^}]*\} (\S+)', counts, re.MULTILINE)
    assert float(passed.group(1)) >= 2

    def completed():
        return sum(" completed " in line for line in up.lines)

    wait_until(lambda: completed() >= 2, 30, "both roles tell of the request")
    assert completed() == 2, "of the request alone"
    slow = body(up, max_tokens=400, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=slow, timeout=60) as response:
        events = sse_events(response)
        next(events)
        up.process.send_signal(signal.SIGINT)
        rest = list(events)
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert up.process.wait(60) == 0
    up.end()
    assert up.loud == []
    assert sum("router left" in line for line in up.lines) == 2
    assert any("stopping: running requests may end" in line for line in up.lines)


def test_a_second_ctrl_c_ends_open_streams_at_once(start_up):
    up = start_up()
    url = url_of(up)
    os.kill(worker_pid(url, "decode"), signal.SIGSTOP)  # the stream cannot end
    endless = body(up, stream=True)
    with contextlib.suppress(httpx.HTTPError):
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=60) as response:
            up.process.send_signal(signal.SIGINT)
            up.wait_for(lambda line: "router drains" in line, "the drain")
            began = time.monotonic()
            assert up.interrupt() == 0
            assert time.monotonic() - began < 10
            assert 'finish_reason":"length' not in response.read().decode()


def test_a_drained_worker_is_no_warning(start_up, capsys, monkeypatch):
    up = start_up("--prefill=2")
    url = url_of(up)
    deadline = time.monotonic() + 60
    while len(httpx.get(f"{url}/status").json()["workers"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    pid = worker_pid(url, "prefill")
    assert drain.main([str(pid), f"--url={url}"]) == 0
    ended = up.wait_for(lambda line: "child ended" in line, "its end")
    assert " INFO " in ended
    assert "reason=drained" in ended
    assert up.loud == []
    assert not psutil.pid_exists(pid)


def test_json_logs_of_up_are_json_lines_that_name_the_child(start_up):
    up = start_up("--log-format=json")
    ready = json.loads(up.wait_for(lambda line: '"ready"' in line, "ready"))
    url = ready["url"]
    assert httpx.post(f"{url}/v1/completions", json=body(up), timeout=60).status_code == 200
    assert up.interrupt() == 0
    up.end()
    assert up.stdout == []
    records = [json.loads(line) for line in up.lines]
    assert {record.get("child") for record in records} == {None, "router", "prefill-0", "decode-0"}
    loud = [(one["child"], one["message"], one.get("reason")) for one in records if one["level"] != "info"]
    assert loud == []
