"""`baton bench router`: the router's cost with workers that answer at once, compared with other proxies in
one run.

    requests   wrk on --connections connections. Each target is measured once per round, so that all see the
               same machine. The router validates, tokenises, looks for the API key and sends orders to two
               workers over ZeroMQ. The proxies pass bytes to an HTTP backend that answers at once. "alone":
               the median at one connection; "added": the same less the median of the backend asked directly
               (the HTTP backend, or the two workers over ZeroMQ)
    pair       two routers behind one port, three times the connections. With four cores or more each router
               is pinned to one of its own, and load and workers use the others. With fewer cores all share
               them
    streams    --streams at once, one token each per half second: memory of the router per stream, its CPU
               time per chunk
    stall      one client that never reads, 400 tokens every 2 ms for 6 s or until it is cut off: memory of
               the router

CPU times are those of the routers or the proxy with threads and children; the table shows the least of all
rounds. Load generator and workers run on the same cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from ...cluster.errors import StartupError
from .peers import commands
from .rig import CHAT, IDS, RouterBench, WrkSample, cpu_s, free_port, wait_for

PROG = "baton bench router"
STEP_S = 0.5
NUM_CHUNKS = 20


def requests(bench: RouterBench, options: argparse.Namespace) -> list[str]:
    """The table of requests."""
    target = free_port()
    backend = bench.start(sys.executable, "-m", "baton.bench.router.peers", str(target))
    ports = {name: free_port() for name in ("nginx", "aiohttp", "sglang-router", "metrics")}
    ways: dict[str, tuple[psutil.Process, int, str]] = {"backend alone": (backend, target, CHAT)}
    wait_for(target, "/")
    for name, command in commands(bench.folder, options.peers_python, target, ports).items():
        ways[name] = bench.start(*command), ports[name], CHAT
        wait_for(ports[name], "/health")
    samples: dict[str, list[WrkSample]] = {}
    alone: dict[str, list[float]] = {}
    behind: dict[str, list[float]] = {}  # the backends, asked directly
    with bench.router() as (router, port):
        ways |= {"baton, token ids": (router, port, IDS), "baton, chat": (router, port, CHAT)}
        for _ in range(options.rounds):
            for name, (process, at, kind) in ways.items():
                samples.setdefault(name, []).append(
                    bench.load([process], at, kind, options.connections, options.seconds)
                )
                alone.setdefault(name, []).append(
                    bench.load([process], at, kind, 1, options.seconds / 2).p50_ms
                )
            behind.setdefault("workers", []).append(bench.workers_alone(options.seconds / 2))
    behind["backend"] = alone["backend alone"]
    lines = header(
        "way",
        "req/s best",
        "median",
        "p50 ms",
        "p99 ms",
        "alone p50 ms",
        "added p50 ms",
        "CPU us/request",
        "errors",
    )
    for name, runs in samples.items():
        base = min(behind["workers" if name.startswith("baton") else "backend"])
        lines.append(row(name, runs, min(alone[name]), base))
    return [*lines, f"the two workers of baton, asked directly: {min(behind['workers']):.2f} ms"]


def pair(bench: RouterBench, options: argparse.Namespace) -> list[str]:
    """The table of two routers behind one port."""
    cores = sorted(os.sched_getaffinity(0))
    has_others = len(cores) >= 4
    os.sched_setaffinity(0, cores[2:] if has_others else cores)
    try:
        base = bench.workers_alone(options.seconds / 2)
        lines = header(
            "way",
            "req/s best",
            "median",
            "p50 ms",
            "p99 ms",
            "alone p50 ms",
            "added p50 ms",
            "CPU us/request",
            "errors",
        )
        with bench.pair(cores[:2] if has_others else [None, None]) as (routers, port):
            for kind in (IDS, CHAT):
                num, rounds = 3 * options.connections, range(options.rounds)
                runs = [bench.load(routers, port, kind, num, options.seconds) for _ in rounds]
                alone = [bench.load(routers[:1], port, kind, 1, options.seconds / 2) for _ in rounds]
                lines.append(row(f"two routers, {kind}", runs, min(one.p50_ms for one in alone), base))
    finally:
        os.sched_setaffinity(0, cores)
    where = "a core each, all else on the others" if has_others else "all on the same cores"
    return [
        *lines,
        f"two routers of {len(cores)} cores, {where}; their workers, asked directly: {base:.2f} ms",
    ]


def header(*names: str) -> list[str]:
    """The header lines of a markdown table."""
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def row(name: str, runs: Sequence[WrkSample], alone_ms: float, base_ms: float) -> str:
    """The table row of one target: the best of its runs."""
    best = max(runs, key=lambda run: run.per_second)
    median = statistics.median(run.per_second for run in runs)
    cells = [
        name,
        f"{best.per_second:.0f}",
        f"{median:.0f}",
        f"{best.p50_ms:.2f}",
        f"{best.p99_ms:.2f}",
        f"{alone_ms:.2f}",
    ]
    cells += [f"{alone_ms - base_ms:.2f}", f"{min(run.cpu_us for run in runs):.0f}"]
    return "| " + " | ".join([*cells, str(sum(run.num_bad for run in runs))]) + " |"


def streams(bench: RouterBench, options: argparse.Namespace) -> list[str]:
    """The table of many streams at once: memory per stream, CPU time per chunk."""
    count = options.streams
    with bench.router(str(STEP_S)) as (router, port):
        before = router.memory_info().rss
        told = [str(port), bench.key, str(count), str(NUM_CHUNKS + 20)]
        command = [sys.executable, "-m", "baton.bench.router.streams", *told]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as clients:
            assert clients.stdout is not None
            begun = json.loads(clients.stdout.readline())
            grown, cpu = router.memory_info().rss - before, cpu_s(router)
            time.sleep(NUM_CHUNKS * STEP_S / 2)
            spent = cpu_s(router) - cpu
            whole = json.loads(clients.stdout.readline())
        num_chunks = count * NUM_CHUNKS / 2
    kb, us = grown / 1024 / count, 1e6 * spent / num_chunks
    return [
        f"{count} streams ({begun['begun']} begun, {whole['whole']} whole): {kb:.1f} KB each, "
        f"{us:.0f} us CPU per chunk"
    ]


def stall(bench: RouterBench, options: argparse.Namespace) -> list[str]:
    """The table of a client that never reads: the router's memory, and the time until the client is cut
    off."""
    with bench.router("0.002", "400") as (router, port):
        clients = bench.start(
            sys.executable, "-m", "baton.bench.router.streams", str(port), bench.key, "1", "2000"
        )
        clients.wait(60)  # the one-time cost of a first stream is not counted
        before = router.memory_info().rss
        silent = bench.start(
            sys.executable, "-m", "baton.bench.router.streams", str(port), bench.key, "0", "10000000"
        )
        most, was_open, end = 0, False, "not cut off within 6 s"
        begun = time.monotonic()
        while was_open is False or time.monotonic() - begun < 6.0:
            time.sleep(0.1)
            most = max(most, router.memory_info().rss - before)
            is_open = any(
                one.laddr.port == port and one.status == "ESTABLISHED"
                for one in router.net_connections("tcp")
            )
            if is_open and not was_open:
                was_open, begun = True, time.monotonic()
            elif was_open and not is_open:
                end = f"cut off after {time.monotonic() - begun:.1f} s"
                break
        silent.kill()
    return [f"a client that never reads 200000 tokens a second: {end}, {most / (1 << 20):+.1f} MB"]


Part = Callable[[RouterBench, argparse.Namespace], list[str]]
PARTS: dict[str, Part] = {"requests": requests, "pair": pair, "streams": streams, "stall": stall}


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench router`. Returns 0 on success, 1 when a program is missing."""
    options = _parser().parse_args(argv)
    try:
        for program, parts in (("wrk", {"requests", "pair"}), ("taskset", {"pair"})):
            if parts.intersection(options.only) and shutil.which(program) is None:
                without = ",".join(name for name in PARTS if name not in parts)
                raise StartupError(f"{program} is not installed: install it, or give --only {without}")
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, ExitStack() as stack:
            bench = RouterBench(options.model, Path(folder), stack)
            for name, part in PARTS.items():
                if name in options.only:
                    sys.stdout.write("\n".join([*part(bench, options), ""]))
                    sys.stdout.flush()
    except StartupError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description="Load on the router, with workers that answer at once."
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="a directory with a tokenizer and a chat template"
    )
    names = ",".join(PARTS)
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PARTS", help=f"of {names} (all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds over all ways (3)")
    parser.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="of load per way and round (4)"
    )
    parser.add_argument("--connections", type=int, default=32, metavar="N", help="of the load (32)")
    parser.add_argument("--streams", type=int, default=2000, metavar="N", help="streams at once (2000)")
    parser.add_argument(
        "--peers-python", default="", metavar="FILE", help="an interpreter with aiohttp and sglang-router"
    )
    return parser


def _parts(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is none of {', '.join(PARTS)}; separate them by commas"
        )
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
