"""`baton up`: starts, supervises and ends a router, prefill workers and decode workers on this host.

1. Make a private directory for the sockets and choose endpoints in it (ipc), or free ports (tcp). Download
checkpoints of the hub, find the GPUs and deal them to workers. 2. Merge the config of each child: first
`up`'s command line, then the child's own variables and TOML table, then `up`'s other settings. A wrong value
is reported here, before any child runs. 3. Start the children; restart those that crash; give up if one
cannot start at all. 4. Wait until the router reports ready. 5. On SIGTERM or Ctrl-C drain: the router
finishes its requests within drain_timeout_s, and the workers run until then. After that SIGTERM to all,
SIGKILL to the rest, and at once on a second signal. Remove the directory.
"""

import dataclasses
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import httpx

from ...cluster.config.load import load_config
from ...cluster.config.roles import DecodeConfig, RouterConfig, UpConfig
from ...cluster.errors import StartupError
from ...cluster.net.endpoints import bracketed
from ...cluster.process.log import PACKAGE, configure, fields, is_json
from ...cluster.process.process import (
    EXIT_CANNOT_START,
    EXIT_OK,
    OPERATOR_VARIABLE,
    Shutdown,
    report_cannot_start,
    run_role,
)
from ...cluster.process.sd_notify import Notifier, notifier_of, waiting
from .children import PROG, ROUTER, Command, child_configs, child_specs, role_command
from .dealing import Deal, table_of
from .gpu_list import Gpu, find_gpus
from .local_checkpoints import fetch_once, with_directories
from .settle import check_children, settle
from .supervise import ChildSpec, Process, SpawnedProcess, Supervisor

logger = logging.getLogger(__name__)

LONGEST_DIRECTORY = 80  # bytes; an ipc path has at most 107
STEP_S = 0.05
LAST_FRAMES_S = 3.0  # beyond its drain time, for the router's last errors to clients
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # bind address -> address to reach it at


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildInfo:
    """The state of one child; `pid` is None while it is down."""

    name: str
    role: str
    pid: int | None
    num_starts: int


class Cluster:
    """A cluster on this host. Call `start`, `wait_ready` and `stop`; a with-statement starts and stops it.

    Clients connect to `url`. `output` receives the children's lines (default stderr). `command_of` makes the
    command line of a role from its flags. `gpus_of` finds the GPUs that an environment shows.
    """

    def __init__(
        self,
        config: UpConfig,
        *,
        env: Mapping[str, str] = os.environ,
        output: TextIO | None = None,
        command_of: Command | None = None,
        gpus_of: Callable[[Mapping[str, str]], tuple[Gpu, ...]] = find_gpus,
    ) -> None:
        # from `prepare` on with the router's host, port and drain time, and with the numbers of workers
        self.config = config
        self.settled: Deal | None = None  # workers and their GPUs, from `prepare` on
        self.failure = ""  # the reason why the cluster cannot continue
        self.failure_code = EXIT_CANNOT_START  # 2 where a child refused a setting
        self._gpus_of = gpus_of
        self._specs: list[ChildSpec] = []
        self._env, self._output, self._command_of = env, output or sys.stderr, command_of or role_command
        self.own_urls: list[str] = []  # URLs of the routers' own ports, from `start` on
        self._token = secrets.token_hex(32)
        self._directory: Path | None = None
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._drain_s = 0.0
        self._num_decode = 0  # decode workers as routers see them, from `prepare` on

    def __repr__(self) -> str:
        return f"Cluster({self.url}, {self._supervisor or 'not started'})"

    def __enter__(self) -> "Cluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of the router for clients."""
        return self._url_at(self.config.port)

    @property
    def drain_s(self) -> float:
        """Seconds for an orderly end of the router: its drain time, and its last writes."""
        return self.config.drain_timeout_s + LAST_FRAMES_S

    @property
    def children(self) -> list[ChildInfo]:
        """The children in this order: routers, prefill workers, decode workers."""
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

    def prepare(self) -> None:
        """Everything before the first child runs: downloads, the choice of GPUs, the children's settings.

        Raises ConfigError for invalid settings and for a model that does not fit, CheckpointError for a
        download that fails.
        """
        remove_stale_directories(_runtime_parent(self._env))
        self._directory = _make_directory(self._env)
        try:
            fetch = fetch_once()
            check_children(self.config, self._env, self._directory)
            self.settled = settled = settle(self.config, self._env, self._gpus_of, fetch)
            self.config = dataclasses.replace(self.config, prefill=settled.prefill, decode=settled.decode)
            children = [
                (name, with_directories(child, fetch))
                for name, child in child_configs(self.config, self._env, self._directory, settled)
            ]
            routers = [child for _, child in children if isinstance(child, RouterConfig)]
            decode = [child for _, child in children if isinstance(child, DecodeConfig)]
            self._num_decode = sum(child.dp_attention for child in decode)
            router = routers[0]
            self.config = dataclasses.replace(
                self.config, host=router.host, port=router.port, drain_timeout_s=router.drain_timeout_s,
                tls_cert=router.tls_cert, tls_key=router.tls_key,
            )  # fmt: skip
            self.own_urls = [self._url_at(router.own_port) for router in routers if router.own_port]
            env = {**self._env, OPERATOR_VARIABLE: self._token}
            self._specs = child_specs(children, self.config, env, self._directory, self._command_of, settled)
        except BaseException:
            self._remove_directory()
            raise

    def start(self) -> None:
        """Starts the children and their supervision, after `prepare` if that did not run. Raises its
        errors."""
        assert self._supervisor is None, "a cluster starts once"
        if not self._specs:
            self.prepare()
        self._supervisor = Supervisor(self._specs, self._spawn)
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()

    def wait_ready(
        self, timeout: float = 600.0, *, all_workers: bool = True, give_up: threading.Event | None = None
    ) -> bool:
        """Waits until /ready answers 200 and, with `all_workers`, every worker serves.

        True when ready, False when `give_up` was set or `stop` called first. Raises StartupError when a child
        cannot start or after `timeout` seconds.
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
                raise StartupError(
                    f"{self.url} was not ready within {timeout:g} s; the children's lines say why"
                )
            self._stopping.wait(0.1)
        return False

    def stop(self, hurry: threading.Event | None = None, *, drain_s: float = 0.0) -> None:
        """Ends all children within 5 s (at once when `hurry` is or gets set) and removes the sockets.
        Idempotent.

        With `drain_s` the router first gets that many seconds to finish its requests.
        """
        self._hurry, self._drain_s = hurry or self._hurry, drain_s
        self._stopping.set()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(STEP_S)  # an unbounded wait would delay the handling of signals until its end
        self._remove_directory()

    def _supervise(self) -> None:
        """The supervisor's thread.

        It starts and ends all children, since the kernel signals a child when the thread that started it
        ends.
        """
        supervisor = self._supervisor
        assert supervisor is not None
        try:
            while not self._stopping.is_set() and not supervisor.failure:
                supervisor.step()
                self._stopping.wait(STEP_S)
            self.failure, self.failure_code = supervisor.failure, supervisor.failure_code
        except Exception as error:
            logger.exception("supervision crashed")
            self.failure = f"supervision crashed: {error}"
        finally:
            if self._drain_s and not self.failure:
                supervisor.drain(ROUTER, self._drain_s, self._hurry)
            supervisor.stop(self._hurry)

    def _spawn(self, spec: ChildSpec) -> Process:
        is_json = self.config.log_format == "json"
        return SpawnedProcess(spec, self._output, f"baton {spec.role}: ", as_json=is_json)

    def _url_at(self, port: int) -> str:
        scheme = "https" if self.config.tls_cert else "http"
        return f"{scheme}://{bracketed(WILDCARDS.get(self.config.host, self.config.host))}:{port}"

    def _is_ready(self, all_workers: bool) -> bool:
        """Asks each router separately. An answer of another process at the port does not count."""
        if any(fetch(url, "/ready") is None for url in (self.url, *self.own_urls)):
            return False
        ours = {child.pid for child in self.children if child.role == ROUTER}
        return {self._ready_pid(url, all_workers) for url in self.own_urls or [self.url]} == ours

    def _ready_pid(self, url: str, all_workers: bool) -> int:
        """The PID of the router at `url` once enough of its workers serve; 0 before."""
        status = self._status(url)
        return 0 if status is None or (all_workers and self._missing(status[1])) else status[0]

    def missing_workers(self) -> str:
        """Those of its workers that do not serve yet, as the first router sees them; "" for none."""
        status = self._status((self.own_urls or [self.url])[0])
        return self._missing(status[1] if status is not None else [])

    def _missing(self, serving: Sequence[str]) -> str:
        wanted = {"prefill": self.config.prefill, "decode": self._num_decode}
        missing = {role: count - serving.count(role) for role, count in wanted.items()}
        return ", ".join(f"{missing[role]} of {wanted[role]} {role}" for role in wanted if missing[role] > 0)

    def _status(self, url: str) -> tuple[int, list[str]] | None:
        """The PID of the router at `url` and the roles of its serving workers."""
        try:
            status = json.loads(fetch(url, "/status", self._token) or "{}")
            pid, workers = int(status["router"]["pid"]), status["workers"]
            return pid, [worker["role"] for worker in workers if worker["state"] == "serving"]
        except (ValueError, KeyError, TypeError):
            return None

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


# --- places and ports ---------------------------------------------------------------------------------------


def fetch(url: str, path: str, token: str = "") -> bytes | None:
    """The body of a GET that is answered with 200, else None.

    The server is a child of this process, so its certificate is not checked.
    """
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        reply = httpx.get(f"{url}{path}", headers=headers, timeout=2.0, verify=False, trust_env=False)
    except httpx.HTTPError:
        return None
    return reply.content if reply.status_code == 200 else None


def _runtime_parent(env: Mapping[str, str]) -> Path:
    """The parent of runtime directories: $XDG_RUNTIME_DIR if usable, else the temporary directory."""
    candidate = env.get("XDG_RUNTIME_DIR", "")
    is_usable = (
        candidate and len(candidate.encode()) <= LONGEST_DIRECTORY - 24 and os.access(candidate, os.W_OK)
    )
    return Path(candidate) if is_usable else Path("/tmp")


def _make_directory(env: Mapping[str, str]) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{PACKAGE}-{os.getpid()}-", dir=_runtime_parent(env)))  # mode 0700


def remove_stale_directories(parent: Path) -> None:
    """Removes runtime directories of this user whose launcher was killed and could not clean up."""
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


# --- the command --------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Runs `baton up` and returns its exit code."""
    return run_cluster(PROG, argv)


def run_cluster(
    prog: str, argv: Sequence[str], adjust: Callable[[UpConfig], UpConfig] = lambda config: config
) -> int:
    """Runs the cluster of the command line `argv` and returns the exit code. `adjust` changes its settings.

    `prog` names the command in its help and its errors.
    """
    return run_role(prog, lambda: _prepare(prog, argv, adjust))


def _prepare(prog: str, argv: Sequence[str], adjust: Callable[[UpConfig], UpConfig]) -> Callable[[], int]:
    config = adjust(load_config(UpConfig, argv, os.environ, prog=prog))
    configure("up", level=config.log_level, log_format=config.log_format)
    # With --log-level debug, httpx would log a line per poll of /ready.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    shutdown = Shutdown()
    notifier = notifier_of(os.environ)
    cluster = Cluster(config)
    # before the handlers of signals, so that a signal ends a download at once
    with waiting(notifier, "fetching checkpoints"):
        cluster.prepare()
    shutdown.install()
    if cluster.settled is not None and cluster.settled.places:
        _tell(table_of(cluster.settled), "workers dealt to GPUs")
    cluster.start()
    return lambda: _serve(prog, cluster, shutdown, notifier)


def _tell(lines: Sequence[str], message: str, **values: object) -> None:
    """Writes lines for a person to stdout, or with JSON logs a record in their place."""
    if is_json():
        logger.info(message, extra=fields(**values) if values else fields(lines=list(lines)))
        return
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _tell_serving(cluster: Cluster, began: float, missing: str) -> None:
    """Some workers serve, which is less than what was ordered: decode alone computes the prompts, too."""
    seconds = round(time.monotonic() - began, 1)
    line = f"serving  {cluster.url}  ({seconds:.1f} s), not yet started: {missing}"
    _tell([line], "serving", url=cluster.url, seconds=seconds, missing=missing)


def _tell_ready(cluster: Cluster, began: float) -> None:
    seconds, watched = round(time.monotonic() - began, 1), ",".join(cluster.own_urls)
    lines = [f"ready  {cluster.url}  ({seconds:.1f} s)"]
    lines += [f"watch  baton top --url {watched}"] * bool(watched)
    _tell(lines, "ready", url=cluster.url, seconds=seconds, own_urls=watched)


def _serve(prog: str, cluster: Cluster, shutdown: Shutdown, notifier: Notifier) -> int:
    """Runs the cluster until a signal or a failure. All children have ended when it returns."""
    began = time.monotonic()
    try:
        with waiting(notifier, "waiting for workers"):
            is_serving = cluster.wait_ready(float("inf"), all_workers=False, give_up=shutdown.drain)
        is_told = not is_serving
        if is_serving:
            notifier.ready(f"serving at {cluster.url}")
            if missing := cluster.missing_workers():
                _tell_serving(cluster, began, missing)
        while True:
            if not is_told and not cluster.missing_workers():
                _tell_ready(cluster, began)
                is_told = True
            if shutdown.drain.wait(0.2):
                break
            notifier.ping(time.monotonic())
            if cluster.failure:
                raise StartupError(cluster.failure)
        notifier.stopping("draining")
        extra = fields(drain_s=cluster.config.drain_timeout_s)
        logger.info("stopping: running requests may end, a second signal ends them now", extra=extra)
        cluster.stop(shutdown.stop, drain_s=cluster.drain_s)
        return EXIT_OK
    except StartupError as error:
        cluster.stop(shutdown.stop)
        report_cannot_start(prog, error)
        return cluster.failure_code
    finally:
        cluster.stop(shutdown.stop)
