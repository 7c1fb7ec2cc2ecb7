"""Test setup of `baton bench router`: routers with workers that answer at once, wrk, and CPU times of
processes."""

import re
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped,unused-ignore]

from ...cluster.errors import StartupError
from ...cluster.security.api_keys import ApiKey, make_api_key, write_api_keys
from .direct import DirectClient
from .texts import different, same

IDS, CHAT = "token ids", "chat"
PATHS = {IDS: "/v1/completions", CHAT: "/v1/chat/completions"}
PROMPT_IDS = list(range(100, 200))
MAX_TOKENS = 16


@dataclass(frozen=True)
class WrkSample:
    """One run of wrk."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  # CPU time of the measured process per request
    num_bad: int


class RouterBench:
    """Processes and files of one run."""

    def __init__(self, model: str, folder: Path, stack: ExitStack) -> None:
        self.model, self.folder, self._stack = model, folder, stack
        self.key, key_id, digest = make_api_key()
        write_api_keys(folder / "keys.json", [ApiKey(id=key_id, name="bench", sha256=digest)])

    def start(self, *command: str) -> psutil.Process:
        """Starts a child process that ends with this run."""
        log = self._stack.enter_context((self.folder / f"{secrets.token_hex(4)}.log").open("wb"))
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        self._stack.callback(_end, child)
        return psutil.Process(child.pid)

    @contextmanager
    def router(self, *steps: str) -> Iterator[tuple[psutil.Process, int]]:
        """Starts a router with its workers. Returns (router, its port)."""
        port = free_port()
        processes = self._start_router(port, [], steps)
        wait_for(port, "/ready")
        yield processes[0], port
        stop(processes)

    @contextmanager
    def pair(self, cores: Sequence[int | None]) -> Iterator[tuple[list[psutil.Process], int]]:
        """Starts one router per entry of `cores`, each with workers of its own, behind one port.

        A router is pinned to its core; None leaves it unpinned. Returns (routers, their common port).
        """
        port = free_port()
        started = [self._start_router(port, ["--share-port"], (), core) for core in cores]
        routers = [router for router, _ in started]
        until(
            lambda: all(listens(router, port) for router in routers),
            "the routers do not all listen within 60 s",
        )
        yield routers, port
        for processes in started:
            stop(processes)

    def _start_router(
        self, port: int, more: Sequence[str], steps: Sequence[str], core: int | None = None
    ) -> tuple[psutil.Process, psutil.Process]:
        """Starts a router and its workers. Returns (router, its workers)."""
        control = self.control()
        flags = [
            f"--model={self.model}",
            "--served-model=bench",
            f"--port={port}",
            f"--control-bind={control}",
        ]
        flags += [
            f"--api-keys={self.folder}/keys.json",
            "--max-queue=65536",
            "--log-level=error",
            "--canary-s=0",
            *more,
        ]
        kept = [] if core is None else ["taskset", "-c", str(core)]
        router = self.start(*kept, sys.executable, "-m", "baton.router", *flags)
        return router, self.start(sys.executable, "-m", "baton.bench.router.workers", control, *steps)

    def control(self) -> str:
        """A new endpoint for workers."""
        return f"ipc://{self.folder}/control-{secrets.token_hex(2)}"

    def workers_alone(self, seconds: float) -> float:
        """The median time of a request at the two workers without a router, in milliseconds."""
        client = DirectClient(self.control())
        workers = self.start(sys.executable, "-m", "baton.bench.router.workers", client.endpoint)
        try:
            client.greet(PROMPT_IDS, MAX_TOKENS)
            times = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                times.append(client.ask())
        finally:
            client.close()
            workers.terminate()
            workers.wait(20)
        return 1000 * statistics.median(times)

    def script(self, kind: str) -> str:
        """The wrk script for requests of `kind`, of some 640 bytes each."""
        body: dict[str, object] = {"model": "bench", "max_tokens": MAX_TOKENS, "seed": 1}
        if kind == IDS:
            text = same(self.key, body | {"prompt": PROMPT_IDS, "temperature": 0, "user": "x" * 130})
        else:
            text = different(self.key, body)
        path = self.folder / f"{kind.replace(' ', '-')}.lua"
        path.write_text(text)
        return str(path)

    def load(
        self, routers: Sequence[psutil.Process], port: int, kind: str, connections: int, seconds: float
    ) -> WrkSample:
        """Runs wrk against one port for `seconds`, rounded to whole seconds as wrk requires."""
        url = f"http://127.0.0.1:{port}{PATHS[kind]}"
        before = sum(map(cpu_s, routers))
        told = [f"-t{len(routers)}", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency"]
        command = ["wrk", *told, "-s", self.script(kind), url]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        num = int(found(r"(\d+) requests in", said) or 0)
        num_bad = int(found(r"Non-2xx or 3xx responses: (\d+)", said) or 0)
        cpu_us = 1e6 * (sum(map(cpu_s, routers)) - before) / max(1, num)
        p50, p99 = (milliseconds(found(rf"{share}%\s+([\d.]+\w+)", said)) for share in (50, 99))
        return WrkSample(float(found(r"Requests/sec:\s+([\d.]+)", said) or 0), p50, p99, cpu_us, num_bad)


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and its children, in seconds."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def wait_for(port: int, path: str) -> None:
    """Waits until a GET of `path` succeeds. Raises StartupError after a time-out."""

    def answers() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2, trust_env=False).is_success
        return False

    until(answers, f"nothing answers at port {port} within 60 s")


def until(is_true: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        if time.monotonic() > deadline:
            raise StartupError(failure)
        time.sleep(0.1)


def listens(process: psutil.Process, port: int) -> bool:
    return any(one.status == "LISTEN" and one.laddr.port == port for one in process.net_connections("tcp"))


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


def milliseconds(text: str) -> float:
    """Milliseconds from a time of wrk such as 1.20ms, 350.00us or 1.10s."""
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    return float(match.group(1)) * units[match.group(2)] if match else float("nan")


def stop(processes: tuple[psutil.Process, psutil.Process]) -> None:
    """Ends a router and its workers, in the reverse order of `processes`."""
    for process in reversed(processes):
        process.terminate()
        process.wait(20)


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(5)
    child.kill()
    child.wait(5)
