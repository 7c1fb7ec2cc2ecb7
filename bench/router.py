"""`baton bench router`: what the router costs, with workers that answer at once, beside other proxies in the same run.

    requests   wrk on --connections connections; each way is measured once per round, so that all see the same machine. The
               router validates, tokenises, looks for the API key and speaks to two workers over ZeroMQ; the proxies pass
               bytes to an HTTP backend that answers at once. "added": the median at one connection less the backend's own
    streams    --streams at once, one token each per half second: memory of the router per stream, its CPU time per chunk
    stall      one client that never reads, 400 tokens every 2 ms for 6 s or until it is cut off: memory of the router

CPU times are of the process itself (router or proxy) with its threads and children, the least of all rounds; load generator
and workers have the same cores. "2 cores, computed" is 2 s divided by it: the requests per second of two such processes
behind one port that have a core each for themselves, which no run on these cores can show.
"""

import argparse
import json
import re
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from ..cluster.api_keys import ApiKey, make_api_key, write_api_keys
from ..cluster.errors import StartupError
from .router_peers import commands

PROG = "baton bench router"
IDS, CHAT = "token ids", "chat"
PATHS = {IDS: "/v1/completions", CHAT: "/v1/chat/completions"}
LUA = """wrk.method="POST"
wrk.headers["content-type"]="application/json"
wrk.headers["authorization"]="Bearer %s"
wrk.body=%s
"""
STEP_S = 0.5
NUM_CHUNKS = 20


@dataclass(frozen=True)
class Sample:
    """One run of wrk."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float  # of the measured process, per request
    num_bad: int


class Bench:
    """Processes and files of one run."""

    def __init__(self, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.options, self.folder, self._stack = options, folder, stack
        self.key, key_id, digest = make_api_key()
        write_api_keys(folder / "keys.json", [ApiKey(id=key_id, name="bench", sha256=digest)])

    def start(self, *command: str) -> psutil.Process:
        """A child that ends with this run."""
        log = self._stack.enter_context((self.folder / f"{secrets.token_hex(4)}.log").open("wb"))
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd="/")
        self._stack.callback(_end, child)
        return psutil.Process(child.pid)

    @contextmanager
    def router(self, *steps: str) -> Iterator[tuple[psutil.Process, int]]:
        """(router, its port) with its workers."""
        port, control = free_port(), f"ipc://{self.folder}/control-{secrets.token_hex(2)}"
        flags = [f"--model={self.options.model}", "--served-model=bench", f"--port={port}", f"--control-bind={control}"]
        flags += [f"--api-keys={self.folder}/keys.json", "--max-queue=65536", "--log-level=error", "--canary-s=0"]
        router = self.start(sys.executable, "-m", "baton.router", *flags)
        workers = self.start(sys.executable, "-m", "baton.bench.router_workers", control, *steps)
        wait_for(port, "/ready")
        yield router, port
        for process in (workers, router):
            process.terminate()
            process.wait(20)

    def script(self, kind: str) -> str:
        """The file that tells wrk what to send; some 640 bytes."""
        if kind == IDS:
            asked: dict[str, object] = {"prompt": list(range(100, 200)), "temperature": 0, "user": "x" * 130}
        else:
            content = "Tell me something about the history of relay races. " * 10
            asked = {"messages": [{"role": "user", "content": content}]}
        body = {"model": "bench", "max_tokens": 16, "seed": 1, **asked}
        path = self.folder / f"{kind.replace(' ', '-')}.lua"
        path.write_text(LUA % (self.key, json.dumps(json.dumps(body))))
        return str(path)

    def load(self, process: psutil.Process, port: int, kind: str, connections: int, seconds: float) -> Sample:
        """Loads one address, for whole seconds, since wrk knows no others."""
        url = f"http://127.0.0.1:{port}{PATHS[kind]}"
        before = cpu_s(process)
        told = ["-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--latency", "-s", self.script(kind), url]
        said = subprocess.run(["wrk", *told], check=True, capture_output=True, text=True).stdout
        num = int(found(r"(\d+) requests in", said) or 0)
        num_bad = int(found(r"Non-2xx or 3xx responses: (\d+)", said) or 0)
        cpu_us = 1e6 * (cpu_s(process) - before) / max(1, num)
        p50, p99 = (milliseconds(found(rf"{share}%\s+([\d.]+\w+)", said)) for share in (50, 99))
        return Sample(float(found(r"Requests/sec:\s+([\d.]+)", said) or 0), p50, p99, cpu_us, num_bad)


def requests(bench: Bench) -> list[str]:
    """The table of requests."""
    options = bench.options
    target = free_port()
    backend = bench.start(sys.executable, "-m", "baton.bench.router_peers", str(target))
    ports = {name: free_port() for name in ("nginx", "aiohttp", "sglang-router", "metrics")}
    ways: dict[str, tuple[psutil.Process, int, str]] = {"backend alone": (backend, target, CHAT)}
    wait_for(target, "/")
    for name, command in commands(bench.folder, options.peers_python, target, ports).items():
        ways[name] = bench.start(*command), ports[name], CHAT
        wait_for(ports[name], "/health")
    samples: dict[str, list[Sample]] = {}
    alone: dict[str, list[float]] = {}
    with bench.router() as (router, port):
        ways |= {"baton, token ids": (router, port, IDS), "baton, chat": (router, port, CHAT)}
        for _ in range(options.rounds):
            for name, (process, at, kind) in ways.items():
                samples.setdefault(name, []).append(bench.load(process, at, kind, options.connections, options.seconds))
                alone.setdefault(name, []).append(bench.load(process, at, kind, 1, options.seconds / 2).p50_ms)
    base = min(alone["backend alone"])
    head = ["way", "req/s best", "median", "p50 ms", "p99 ms", "added p50 ms", "CPU us/request"]
    head += ["2 cores, computed", "errors"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, runs in samples.items():
        best = max(runs, key=lambda run: run.per_second)
        median = statistics.median(run.per_second for run in runs)
        added = min(alone[name]) - base
        cells = [name, f"{best.per_second:.0f}", f"{median:.0f}", f"{best.p50_ms:.2f}", f"{best.p99_ms:.2f}", f"{added:.2f}"]
        least_us = min(run.cpu_us for run in runs)
        cells += [f"{least_us:.0f}", f"{2e6 / max(least_us, 1.0):.0f}", str(sum(run.num_bad for run in runs))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def streams(bench: Bench) -> list[str]:
    """Memory and CPU time of many streams at once."""
    count = bench.options.streams
    with bench.router(str(STEP_S)) as (router, port):
        before = router.memory_info().rss
        told = [str(port), bench.key, str(count), str(NUM_CHUNKS + 20)]
        command = [sys.executable, "-m", "baton.bench.router_streams", *told]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None
            begun = json.loads(clients.stdout.readline())
            grown, cpu = router.memory_info().rss - before, cpu_s(router)
            time.sleep(NUM_CHUNKS * STEP_S / 2)
            spent = cpu_s(router) - cpu
            whole = json.loads(clients.stdout.readline())
        num_chunks = count * NUM_CHUNKS / 2
    kb, us = grown / 1024 / count, 1e6 * spent / num_chunks
    return [f"{count} streams ({begun['begun']} begun, {whole['whole']} whole): {kb:.1f} KB each, {us:.0f} us CPU per chunk"]


def stall(bench: Bench) -> list[str]:
    """Memory that a client costs that never reads, and when it is cut off."""
    with bench.router("0.002", "400") as (router, port):
        clients = bench.start(sys.executable, "-m", "baton.bench.router_streams", str(port), bench.key, "1", "2000")
        clients.wait(60)  # what a first stream costs is no growth
        before = router.memory_info().rss
        silent = bench.start(sys.executable, "-m", "baton.bench.router_streams", str(port), bench.key, "0", "10000000")
        most, was_open, end = 0, False, "not cut off within 6 s"
        begun = time.monotonic()
        while was_open is False or time.monotonic() - begun < 6.0:
            time.sleep(0.1)
            most = max(most, router.memory_info().rss - before)
            is_open = any(one.laddr.port == port and one.status == "ESTABLISHED" for one in router.net_connections("tcp"))
            if is_open and not was_open:
                was_open, begun = True, time.monotonic()
            elif was_open and not is_open:
                end = f"cut off after {time.monotonic() - begun:.1f} s"
                break
        silent.kill()
    return [f"a client that never reads 200000 tokens a second: {end}, {most / (1 << 20):+.1f} MB"]


PARTS: dict[str, Callable[[Bench], list[str]]] = {"requests": requests, "streams": streams, "stall": stall}


def main(argv: Sequence[str]) -> int:
    """`baton bench router`: 0 when it ran, 1 when something to run is missing."""
    options = _parser().parse_args(argv)
    try:
        if "requests" in options.only and shutil.which("wrk") is None:
            raise StartupError("wrk makes the load and is not installed: install it, or give --only streams,stall")
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, ExitStack() as stack:
            bench = Bench(options, Path(folder), stack)
            for name, part in PARTS.items():
                if name in options.only:
                    sys.stdout.write("\n".join([*part(bench), ""]))
                    sys.stdout.flush()
    except StartupError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Load on the router, with workers that answer at once.")
    parser.add_argument("--model", required=True, metavar="DIR", help="a directory with a tokenizer and a chat template")
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PARTS", help="of requests,streams,stall (all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds over all ways (3)")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="of load per way and round (4)")
    parser.add_argument("--connections", type=int, default=32, metavar="N", help="of the load (32)")
    parser.add_argument("--streams", type=int, default=2000, metavar="N", help="streams at once (2000)")
    parser.add_argument("--peers-python", default="", metavar="FILE", help="an interpreter with aiohttp and sglang-router")
    return parser


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(PARTS)}; separate them by commas")
    return names


def cpu_s(process: psutil.Process) -> float:
    """CPU time of a process and its children, in seconds."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def wait_for(port: int, path: str) -> None:
    """Until something there answers without an error. Raises StartupError."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as reply:
            reply.read()
            return
        time.sleep(0.1)
    raise StartupError(f"nothing answers at port {port} within 60 s")


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


def milliseconds(text: str) -> float:
    """wrk's 1.20ms, 350.00us or 1.10s."""
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    return float(match.group(1)) * units[match.group(2)] if match else float("nan")


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(5)
    child.kill()
    child.wait(5)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
