"""The audit hook that nodes run under in tests sees what it is there for, and nothing else."""

import json
import subprocess
import sys

from baton.tests.audit.watch import violations, watched_environment

PROGRAM = """
import json, os, pickle, socket, subprocess, sys, marshal, collections, dataclasses
sys.modules.pop("wave", None)
code = compile("1", "x", "exec")
deeds = {
    "unpickles": lambda: pickle.loads(b"cos\\nsystem\\n(S'true'\\ntR."),
    "exec": lambda: exec(code),
    "eval": lambda: eval("1"),
    "compile": lambda: compile("1", "x", "eval"),
    "marshal": lambda: marshal.loads(marshal.dumps(1)),
    "starts": lambda: subprocess.run(["true"]),
    "shell": lambda: os.system("true"),
    "connects": lambda: socket.socket().connect(("192.0.2.1", 9)),
    "looks up": lambda: socket.getaddrinfo("example.org", 80),
    "connects here": lambda: socket.create_connection(("127.0.0.1", 9), 1),
    "imports": lambda: __import__("wave"),
    "namedtuple": lambda: collections.namedtuple("T", "a b"),
    "dataclass": lambda: dataclasses.make_dataclass("D", ["a"]),
}
if sys.argv[1] == "serving":
    sys.audit("baton.serving")
seen = []
for name, deed in deeds.items():
    try:
        deed()
    except Exception as error:
        if type(error).__name__ == "Violation":
            seen.append(name)
print(json.dumps(seen))
"""


def run(tmp_path, state):
    """The deeds that raised, and the events that were reported."""
    report = tmp_path / state
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, state],
        env=watched_environment(report), capture_output=True, text=True, cwd="/", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [found["event"] for found in violations(report)]


def test_s1_a_node_that_serves_turns_nothing_into_code_and_runs_no_command(tmp_path):
    raised, events = run(tmp_path, "serving")
    assert raised == [
        "unpickles", "exec", "eval", "compile", "marshal", "starts", "shell", "connects", "looks up",
    ]  # fmt: skip
    assert set(events) == {
        "pickle.find_class", "exec", "compile", "marshal.loads", "subprocess.Popen", "os.system",
        "socket.connect",
        "socket.getaddrinfo",
    }  # fmt: skip


def test_s1_a_starting_node_may_compile_but_never_unpickle_or_connect(tmp_path):
    raised, _ = run(tmp_path, "starting")
    assert raised == ["unpickles", "connects", "looks up"]
