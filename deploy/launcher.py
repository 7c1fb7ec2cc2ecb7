"""`baton up`: a router, prefill workers and decode workers on this host, started, supervised and ended together.

1. Make a private directory for the sockets and choose endpoints in it (ipc), or free ports (tcp).
2. Work out the config of each child: what `up` was told on the command line, then the child's own variables and TOML
   table, then what `up` was told elsewhere. A wrong value shows here, before anything runs.
3. Start the children; restart those that crash; give up if one cannot start at all.
4. Ready when the router says so. At the end: SIGTERM, SIGKILL for what is left, remove the directory.
"""

import dataclasses
import http.client
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ..cluster.config import (
    COMMAND_LINE,
    DecodeConfig,
    PrefillConfig,
    RoleConfig,
    RouterConfig,
    UpConfig,
    known_variables,
    load_config,
    to_argv,
)
from ..cluster.config_fields import Value, as_text, flag_of, settings_of
from ..cluster.errors import StartupError
from ..cluster.life import EXIT_CANNOT_START, EXIT_OK, PARENT_VARIABLE, Shutdown, report_cannot_start, run_role
from ..cluster.log import PACKAGE, configure
from .supervise import ChildSpec, Process, SpawnedProcess, Supervisor

logger = logging.getLogger(__name__)

PROG = "baton up"
LONGEST_DIRECTORY = 80  # bytes; an ipc path has at most 107
STEP_S = 0.05
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # bind address -> address to reach it at

Command = Callable[[str, Sequence[str]], list[str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildInfo:
    """One child as it is now; `pid` is None while it is down."""

    name: str
    role: str
    pid: int | None
    num_starts: int


class Cluster:
    """A cluster on this host. `start`, `wait_ready`, use `url`, `stop`; or a with-statement, which starts and stops.

    `output` takes the children's lines (default stderr); `command_of` makes the command line of a role from its flags.
    """

    def __init__(
        self,
        config: UpConfig,
        *,
        env: Mapping[str, str] = os.environ,
        output: TextIO | None = None,
        command_of: Command | None = None,
    ) -> None:
        self.config = dataclasses.replace(config, port=config.port or free_port(config.host))
        self.failure = ""  # why the cluster cannot go on
        self._env, self._output, self._command_of = env, output or sys.stderr, command_of or role_command
        self._directory: Path | None = None
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._hurry = threading.Event()

    def __repr__(self) -> str:
        return f"Cluster({self.url}, {self._supervisor or 'not started'})"

    def __enter__(self) -> "Cluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients reach the router."""
        return f"http://{_bracketed(WILDCARDS.get(self.config.host, self.config.host))}:{self.config.port}"

    @property
    def children(self) -> list[ChildInfo]:
        """Router, prefill and decode workers, in this order."""
        if self._supervisor is None:
            return []
        return [
            ChildInfo(
                name=child.spec.name,
                role=child.spec.role,
                pid=process.pid if (process := child.process) else None,
                num_starts=child.num_starts,
            )
            for child in self._supervisor.children
        ]

    def start(self) -> None:
        """Start the children and their supervision; raises ConfigError for settings that cannot be."""
        assert self._supervisor is None, "a cluster starts once"
        remove_stale_directories(_runtime_parent(self._env))
        self._directory = _make_directory(self._env)
        try:
            specs = child_specs(self.config, self._env, self._directory, self._command_of)
        except Exception:
            self._remove_directory()
            raise
        self._supervisor = Supervisor(specs, self._spawn)
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def wait_ready(
        self, timeout: float = 600.0, *, all_workers: bool = True, give_up: threading.Event | None = None
    ) -> bool:
        """Wait until /ready answers 200 and, with `all_workers`, every worker is registered.

        True when ready, False when `give_up` was set or `stop` called first. Raises StartupError when a child cannot
        start or time is up.
        """
        deadline = time.monotonic() + timeout
        while not (give_up is not None and give_up.is_set()):
            if self.failure:
                raise StartupError(self.failure)
            if self._stopping.is_set():
                return False
            if self._is_ready(all_workers):
                return True
            if time.monotonic() > deadline:
                raise StartupError(f"{self.url} was not ready within {timeout:g} s; the children's lines say why")
            self._stopping.wait(0.1)
        return False

    def stop(self, hurry: threading.Event | None = None) -> None:
        """End all children within 5 s (at once when `hurry` is or gets set) and remove the sockets. Idempotent."""
        self._hurry = hurry or self._hurry
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._remove_directory()

    def _supervise(self) -> None:
        """The supervisor's thread: it starts and ends all children, since a child is told when its thread dies."""
        supervisor = self._supervisor
        assert supervisor is not None
        try:
            while not self._stopping.is_set() and not supervisor.failure:
                supervisor.step()
                self._stopping.wait(STEP_S)
            self.failure = supervisor.failure
        except Exception as error:
            logger.exception("supervision crashed")
            self.failure = f"supervision crashed: {error}"
        finally:
            supervisor.stop(self._hurry)

    def _spawn(self, spec: ChildSpec) -> Process:
        return SpawnedProcess(spec, self._output, f"baton {spec.role}: ")

    def _is_ready(self, all_workers: bool) -> bool:
        """Asks the router; whoever else answers at its port, while ours finds it taken, is not it."""
        if fetch(self.url, "/ready") is None:
            return False
        document = fetch(self.url, "/status")
        try:
            status = json.loads(document or "{}")
            is_ours = status["router"]["pid"] == self.children[0].pid
            roles = [worker["role"] for worker in status["workers"]]
        except (ValueError, KeyError, TypeError):
            return False
        wanted = {"prefill": self.config.prefill, "decode": self.config.decode} if all_workers else {}
        return is_ours and all(roles.count(role) >= count for role, count in wanted.items())

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


# --- what the children are told ---------------------------------------------------------------------------------------


def role_command(role: str, flags: Sequence[str]) -> list[str]:
    """The command line of a role; -P keeps the current directory, whose folders may shadow packages, off sys.path."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *safe, "-m", f"{PACKAGE}.{role}", *flags]


def child_specs(config: UpConfig, env: Mapping[str, str], directory: Path, command_of: Command) -> list[ChildSpec]:
    """All children of `up`, their endpoints in `directory` or on free ports."""
    is_ipc = config.transport == "ipc"
    control = f"ipc://{directory}/control" if is_ipc else f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    threads = config.threads or _threads_per_worker(config, env)
    plan: list[tuple[str, type[RoleConfig], dict[str, Value]]] = [("router", RouterConfig, {"control_bind": control})]
    for i in range(config.prefill):
        kv = f"ipc://{directory}/kv-{i}" if is_ipc else "tcp://127.0.0.1:0"
        plan.append((f"prefill-{i}", PrefillConfig, {"router": control, "kv_bind": kv}))
    plan += [(f"decode-{i}", DecodeConfig, {"router": control}) for i in range(config.decode)]
    specs = []
    for name, cls, wiring in plan:
        child = child_config(cls, config, env, wiring, threads)
        specs.append(
            ChildSpec(
                name=name,
                role=cls.role,
                argv=tuple(command_of(cls.role, to_argv(child))),
                env=child_environment(env, getattr(child, "threads", 1) or threads),
                cwd=str(directory),
            )
        )
    return specs


def child_config(
    cls: type[RoleConfig], config: UpConfig, env: Mapping[str, str], wiring: Mapping[str, Value], threads: int
) -> RoleConfig:
    """What one child is told, see step 2 above. `wiring` are the endpoints, which nobody else may choose."""
    flags = [f"{flag_of(name)}={value}" for name, value in wiring.items()]
    flags += [f"--config={config.config}"] if config.config else []
    defaults: dict[str, Value] = {}
    own = settings_of(cls)
    for name, described in settings_of(UpConfig).items():
        value = getattr(config, name)
        if name not in own or name == "config":
            continue
        source = config.explicit.get(name, "" if value == described.default else COMMAND_LINE)
        if source == COMMAND_LINE:  # also what a program set on UpConfig itself
            flags.append(f"{flag_of(name)}={as_text(value)}")
        else:
            defaults[name] = value
    if "threads" in own and not config.threads:
        defaults["threads"] = threads
    known = set(known_variables())
    child = load_config(cls, flags, {k: v for k, v in env.items() if k in known}, prog=PROG, defaults=defaults)
    paths = {name: _absolute(getattr(child, name)) for name in ("model", "draft") if name in own}
    return dataclasses.replace(child, **paths)  # type: ignore[arg-type]


def child_environment(env: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a child: no settings of ours (flags say all), threads that sleep while they wait."""
    child = {name: value for name, value in env.items() if not name.startswith("BATON_")}
    child["OMP_NUM_THREADS"] = str(threads)
    child["OMP_WAIT_POLICY"] = "passive"  # idle threads of one worker would steal the cores of another
    child["PYTHONUNBUFFERED"] = "1"
    child[PARENT_VARIABLE] = str(os.getpid())
    return child


def _threads_per_worker(config: UpConfig, env: Mapping[str, str]) -> int:
    """Prefill and decode seldom compute at the same moment, so each role may use all cores."""
    asked = env.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(config.prefill, config.decode))


def _absolute(path: str) -> str:
    """An existing path made absolute, since children run elsewhere; a hub id stays."""
    expanded = Path(path).expanduser()
    return str(expanded.resolve()) if path and expanded.exists() else path


# --- places and ports -------------------------------------------------------------------------------------------------


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise StartupError(f"cannot listen on {host!r}: {error.strerror or error}; choose another --host") from None
        port: int = probe.getsockname()[1]
        return port


def fetch(url: str, path: str) -> bytes | None:
    """The body of a GET that is answered with 200, else None."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2.0)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        return body if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _runtime_parent(env: Mapping[str, str]) -> Path:
    """Where runtime directories go: $XDG_RUNTIME_DIR if it can be used, else the temporary directory."""
    candidate = env.get("XDG_RUNTIME_DIR", "")
    is_usable = candidate and len(candidate.encode()) <= LONGEST_DIRECTORY - 24 and os.access(candidate, os.W_OK)
    return Path(candidate) if is_usable else Path("/tmp")


def _make_directory(env: Mapping[str, str]) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{PACKAGE}-{os.getpid()}-", dir=_runtime_parent(env)))  # mode 0700


def remove_stale_directories(parent: Path) -> None:
    """Remove runtime directories of this user whose launcher is gone (it was killed and could not clean up)."""
    for path in parent.glob(f"{PACKAGE}-*-*"):
        pid = path.name.split("-")[1]
        with suppress(OSError):
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not _is_running(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """`baton up`; returns the exit code."""
    return run_role(PROG, lambda: _prepare(argv))


def _prepare(argv: Sequence[str]) -> Callable[[], int]:
    config = load_config(UpConfig, argv, os.environ)
    configure("up", level=config.log_level, log_format=config.log_format)
    shutdown = Shutdown()
    shutdown.install()
    cluster = Cluster(config)
    cluster.start()
    return lambda: _serve(cluster, shutdown)


def _serve(cluster: Cluster, shutdown: Shutdown) -> int:
    """Until a signal or a failure; the cluster is gone when this returns."""
    began = time.monotonic()
    try:
        if cluster.wait_ready(float("inf"), all_workers=False, give_up=shutdown.drain):
            sys.stdout.write(f"ready  {cluster.url}  ({time.monotonic() - began:.1f} s)\n")
            sys.stdout.flush()
        while not shutdown.drain.wait(0.2):
            if cluster.failure:
                raise StartupError(cluster.failure)
        return EXIT_OK
    except StartupError as error:
        cluster.stop(shutdown.stop)
        report_cannot_start(PROG, error)
        return EXIT_CANNOT_START
    finally:
        cluster.stop(shutdown.stop)
