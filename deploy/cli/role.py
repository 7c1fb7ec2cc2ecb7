"""`baton role NODE prefill|decode`: change the role of a running worker.

NODE is the first digits of an instance, as `baton top` shows it, or the worker's PID. The order goes over the
router, which takes it from an operator's key. The worker accepts no new requests, finishes the running ones,
and its process starts again in the other role. After --drain-s the rest goes on at other workers. The last
worker of a role that serves keeps it.
"""

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.config.fields import Setting, check_fields, did_you_mean, read_command_line, setting
from ...cluster.errors import BatonError, ConfigError
from .client import KEY_VARIABLE, ChatClient
from .command import run_command
from .drain import worker_of

PROG = "baton role"
SUMMARY = "Change the role of a running worker: baton role NODE prefill|decode"
ROLES = ("prefill", "decode")
LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """Role."""

    url: str = setting("http://127.0.0.1:8000", Setting(help="router that knows the worker", metavar="URL"))
    drain_s: float = setting(
        30.0,
        Setting(
            help="time for running requests; then they go on elsewhere", unit="s", minimum=0, maximum=3600
        ),
    )
    timeout_s: float = setting(
        600.0, Setting(help="longest wait for the worker in its new role", unit="s", minimum=0, maximum=3600)
    )

    def __post_init__(self) -> None:
        check_fields(self)


def main(argv: Sequence[str]) -> int:
    """Runs `baton role`.

    Returns 0 when the worker serves in its new role, 1 when it does not, 2 for a wrong argument.
    """
    return run_command(PROG, lambda: _run(list(argv)))


def _run(argv: list[str]) -> int:
    names = [word for word in argv[:2] if not word.startswith("-")]
    if len(names) < 2:
        read_command_line(RoleConfig, argv[len(names) :], PROG, SUMMARY)  # --help
        raise ConfigError(f"write {PROG} NODE prefill, or {PROG} NODE decode")
    node, role = names
    if role not in ROLES:
        hint = did_you_mean(role, ROLES)
        raise ConfigError(f"{role!r} is no role of a worker{hint or '; write prefill or decode'}")
    config = RoleConfig(**read_command_line(RoleConfig, argv[2:], PROG, SUMMARY))  # type: ignore[arg-type]
    client = ChatClient(config.url, api_key=os.environ.get(KEY_VARIABLE, ""))
    worker = worker_of(client.get("/status"), node)
    name = f"{worker['role']} {worker['instance'][:8]}"
    order = {"instance": worker["instance"], "order": secrets.token_hex(16), "role": role}
    client.post("/roles", {**order, "drain_s": config.drain_s})
    sys.stdout.write(f"{name} (pid {worker['pid']}) drains, then returns as {role}\n")
    sys.stdout.flush()
    return _wait(client, worker["instance"], name, config.timeout_s)


def _wait(client: ChatClient, instance: str, name: str, timeout_s: float) -> int:
    began, shown = time.monotonic(), ""
    while time.monotonic() - began < timeout_s:
        move = _move_of(client.get("/status"), instance)
        if move["state"] != shown:
            shown = move["state"]
            sys.stdout.write(f"{name}: {shown} after {move['seconds']:.1f} s\n")
            sys.stdout.flush()
        if shown == "done":
            return 0
        if shown in ("refused", "lost"):
            raise BatonError(f"{name} keeps its role: {move['fault'] or 'it did not come back'}")
        time.sleep(LOOK_S)
    raise BatonError(f"{name} is not back after {timeout_s:g} s; its log says why")


def _move_of(status: Mapping[str, Any], instance: str) -> Mapping[str, Any]:
    """The newest change of this worker. Raises BatonError for a router that has forgotten it."""
    moves = [move for move in status["router"]["role_changes"] if move["instance"] == instance]
    if not moves:
        raise BatonError("the router was restarted and does not know the order; look at `baton top`")
    found: Mapping[str, Any] = moves[-1]
    return found
