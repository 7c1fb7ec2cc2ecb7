"""A process that has imported the roles and forks one per request: a worker lives after 0.3 s, not 4 s.

Lines of JSON on stdin: {"start": {name, role, argv, env, log, prepare}}; on stdout: {name, pid} and {name,
pid, code}. Each child is a process of its own: session, environment, output file, signals; it runs the role's
`main` as `python -m baton.<role>` would, under the audit hook of tests/audit. `prepare` names functions
"module:function" that are called in the child before. When stdin ends, every child is killed.
"""

import contextlib
import importlib
import json
import os
import selectors
import signal
import sys
import traceback

PRELOADED = (
    "baton.prefill.startup",
    "baton.decode.startup",
    "baton.router.app",
    "baton.router.text.tokenizer",
    "uvloop",
)
AUDIT = "baton.tests.audit.sitecustomize"
SERVER = 0  # the return of `serve` in the process that forks; a child returns its exit code


class Nursery:
    """The loop that forks and reaps."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        self._children: dict[int, tuple[str, int]] = {}  # pidfd -> (name, pid)
        self._buffer = b""

    def serve(self) -> int:
        """Until stdin ends."""
        self._say({"ready": os.getpid()})
        try:
            while True:
                for key, _ in self._selector.select():
                    if isinstance(key.fileobj, int):
                        self._reap(key.fileobj)
                        continue
                    data = os.read(sys.stdin.fileno(), 1 << 16)
                    if not data:
                        return SERVER
                    for line in self._lines(data):
                        order = json.loads(line)["start"]
                        if not self._fork(order):
                            return self._live(order)
        finally:
            for _, pid in self._children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _lines(self, data: bytes) -> list[bytes]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return lines

    def _say(self, message: dict) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    def _fork(self, order: dict) -> int:
        """0 in the child."""
        pid = os.fork()
        if pid:
            descriptor = os.pidfd_open(pid)
            self._children[descriptor] = (order["name"], pid)
            self._selector.register(descriptor, selectors.EVENT_READ)
            self._say({"name": order["name"], "pid": pid})
        return pid

    def _reap(self, descriptor: int) -> None:
        name, pid = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._say({"name": name, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _live(self, order: dict) -> int:
        """The child's life, to its exit code."""
        self._selector.close()
        for descriptor in self._children:
            os.close(descriptor)
        self._children = {}
        os.setsid()
        null, log = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        )
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        os.chdir("/")
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv = [f"baton-{order['role']}", *order["argv"]]
        try:
            importlib.import_module(AUDIT)  # it reads AUDIT_REPORT, which names the file for its findings
            for text in order["prepare"]:
                module, _, function = text.partition(":")
                getattr(importlib.import_module(module), function)()
            return importlib.import_module(f"baton.{order['role']}.__main__").main(order["argv"])
        except Exception:
            traceback.print_exc()
            return 71


def main() -> int:
    """Import first: what is imported here is shared by all children."""
    for module in PRELOADED:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork safely"
    return Nursery().serve()


if __name__ == "__main__":
    sys.exit(main())
