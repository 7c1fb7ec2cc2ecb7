"""`baton bench`: one subcommand per benchmark, each imported only when it is chosen."""

import importlib
import sys
from collections.abc import Sequence

from ..cluster.config.fields import did_you_mean
from ..cluster.process.process import EXIT_USAGE

PACKAGE = "baton"
BENCHES = {
    "checkpoint": (
        ".bench.engine.checkpoint",
        "a model and a head of random weights in a real shape, to measure servers with",
    ),
    "engine": (
        ".bench.engine.bench",
        "decode, EAGLE3 and prefill steps of one engine, beside what the device could do",
    ),
    "pages": (
        ".bench.pages.bench",
        "KV pages that grow beside whole reservations, and an oracle that knows each answer's length",
    ),
    "load": (
        ".bench.engine.load",
        "weights read by the loader, beside plain reads of the same files, and the memory that it takes",
    ),
    "router": (
        ".bench.router.bench",
        "requests and streams through the router, with workers that answer at once, beside proxies",
    ),
    "serve": (".bench.serve.bench", "load on an OpenAI endpoint, or on two in turn: TTFT, ITL, goodput"),
    "tiers": (
        ".bench.tiers.bench",
        "first tokens by turn of conversations that do not fit the KV pool, with tiers below it",
    ),
    "transfer": (
        ".bench.transfer.bench",
        "throughput of the KV hand-off, per transport, beside raw sockets and memcpy",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench NAME ...` and returns its exit code."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0
    if name not in BENCHES:
        hint = did_you_mean(name, BENCHES) or f"; benchmarks: {', '.join(BENCHES)}"
        sys.stderr.write(f"baton bench: unknown benchmark {name!r}{hint}\n")
        return EXIT_USAGE
    code = importlib.import_module(BENCHES[name][0], PACKAGE).main(argv[1:])
    assert isinstance(code, int)
    return code


def usage() -> str:
    """The text of `baton bench --help`."""
    lines = ["usage: baton bench NAME [options]", "", "benchmarks:"]
    lines += [f"  {name:<10} {text}" for name, (_, text) in BENCHES.items()]
    return "\n".join([*lines, "", "`baton bench NAME --help` shows its options.", ""])
