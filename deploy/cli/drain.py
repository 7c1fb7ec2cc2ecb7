"""`baton drain NODE`: end a worker of this host once its requests have ended.

NODE is the first digits of an instance, as `baton top` shows it, or the worker's PID. The command sends
SIGTERM, as a service manager would: the worker accepts no new requests, finishes the running ones and exits.
The router has no such command, so access to its socket is not enough to end a worker. For a worker on another
host, run the command on that host.
"""

import itertools
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped,unused-ignore]

from ...cluster.config.fields import Setting, check_fields, read_command_line, setting
from ...cluster.errors import BatonError, ConfigError
from .client import KEY_VARIABLE, ChatClient
from .command import run_command

PROG = "baton drain"
SUMMARY = "Drain a worker of this host, then end it: baton drain NODE"
LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class DrainConfig:
    """Drain."""

    url: str = setting("http://127.0.0.1:8000", Setting(help="router that knows the worker", metavar="URL"))
    timeout_s: float = setting(
        60.0, Setting(help="longest wait for its end", unit="s", minimum=0, maximum=3600)
    )

    def __post_init__(self) -> None:
        check_fields(self)


def main(argv: Sequence[str]) -> int:
    """Runs `baton drain`.

    Returns 0 when the worker has left, 1 when it still runs, 2 for a wrong argument.
    """
    return run_command(PROG, lambda: _run(list(argv)))


def worker_of(status: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """The worker that `node` names. Raises ConfigError for none or several."""
    workers = status.get("workers", [])
    found = [
        worker
        for worker in workers
        if node and (worker["instance"].startswith(node) or str(worker["pid"]) == node)
    ]
    if len(found) != 1:
        known = ", ".join(
            f"{worker['role']} {worker['instance'][:8]} (pid {worker['pid']})" for worker in workers
        )
        what = "no worker" if not found else f"{len(found)} workers"
        raise ConfigError(f"{node!r} names {what}; known: {known or 'none'}")
    worker: Mapping[str, Any] = found[0]
    return worker


def process_of(worker: Mapping[str, Any], host: str) -> psutil.Process:
    """The worker's process. Raises ConfigError for a worker of another host, or when its PID is reused."""
    if worker["host"] != host:
        raise ConfigError(
            f"{worker['role']} {worker['instance'][:8]} runs on {worker['host']}; run `{PROG}` there"
        )
    try:
        process = psutil.Process(worker["pid"])
        words = process.cmdline()
    except psutil.Error as error:
        raise ConfigError(
            f"PID {worker['pid']} cannot be looked at ({error}); is it in another container?"
        ) from None
    # an empty command line: a kernel thread, or a program that is being loaded
    is_role = any(
        word == f"baton.{worker['role']}" or (word.rpartition("/")[2] == "baton" and after == worker["role"])
        for word, after in itertools.pairwise([*words, ""])
    )
    if not is_role:
        raise ConfigError(
            f"PID {worker['pid']} is no baton {worker['role']} here; is it in another container?"
        )
    return process


def _run(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        read_command_line(DrainConfig, argv, PROG, SUMMARY)  # --help
        raise ConfigError(f"no worker named; write {PROG} INSTANCE or {PROG} PID")
    config = DrainConfig(**read_command_line(DrainConfig, argv[1:], PROG, SUMMARY))  # type: ignore[arg-type]
    client = ChatClient(config.url, api_key=os.environ.get(KEY_VARIABLE, ""))
    worker = worker_of(client.get("/status"), argv[0])
    process = process_of(worker, socket.gethostname())
    name = f"{worker['role']} {worker['instance'][:8]}"
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied:
        raise BatonError(f"{name} belongs to another user; try again as root, or stop its unit") from None
    sys.stdout.write(f"{name} drains (pid {process.pid})\n")
    sys.stdout.flush()
    return _wait(process, name, config.timeout_s)


def _wait(process: psutil.Process, name: str, timeout_s: float) -> int:
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            sys.stdout.write(f"{name} left after {time.monotonic() - began:.1f} s\n")
            return 0
        time.sleep(LOOK_S)
    raise BatonError(f"{name} is still there after {timeout_s:g} s; wait on, or stop its unit")
