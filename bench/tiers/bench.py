"""`baton bench tiers`: the time to the first token by turn of conversations that do not fit the KV pool,
without tiers below it, with host memory, with a disk, and with pulls from decode.

    baton bench checkpoint DIR --shape llama-3.1-8b
    baton bench tiers --model DIR/target --disk /var/tmp/baton-tiers

    none, host, disk   one worker that computes prompts and decodes
    pair, pull         a prefill worker with the same pool, and a decode worker whose pool holds all
                       conversations: prefill computes what its pool has lost, or pulls it from decode

Conversations take turns with each other, each behind a document of its own, so between two turns of a
conversation lies one of each other. One server after the other gets the same requests: `none` and `pair`
compute every prompt again. Flags behind `--` go to the server.
"""

import argparse
import asyncio
import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...cluster.process.progress import JobProgress
from ...engine.models.registry import load_model_config
from ..arguments import at_least
from ..child_server import serving
from ..job import report_of, run_job, split_arguments
from ..router.rig import free_port
from ..serve.bench import EXTENSIONS, LoadPlan, ServeBench
from ..serve.client import LoadClient, endpoint_of
from ..serve.figures import Figures, Goals
from ..serve.load import Bound, Level
from ..serve.workloads import Conversation, Turn, Workload

PROG = "baton bench tiers"
NONE, HOST, DISK, PAIR, PULL = "none", "host", "disk", "pair", "pull"
KINDS = (NONE, HOST, DISK, PAIR, PULL)
COMPUTES = {HOST: NONE, DISK: NONE, PULL: PAIR}  # the same workers without a tier
PAGE_TOKENS = 16
MOVED = {
    "host_in_mb": "into host memory",
    "host_out_mb": "back",
    "disk_in_mb": "onto disk",
    "disk_out_mb": "from disk",
}


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench tiers`. Returns 0, 1 where a run failed or had errors, 2 for a wrong argument."""
    given, extra = split_arguments(argv)
    options = parse(given)

    found: dict[str, Figures] = {}

    def text() -> str:
        return report_of(found, as_document, as_table, is_json=options.json)

    def work(progress: JobProgress) -> tuple[str, int]:
        vocab = load_model_config(Path(options.model)).vocab_size
        for tier in options.tiers:
            found[tier] = _measured(options, tier, extra, vocab, progress)
        return text(), int(any(figures.errors for figures in found.values()))

    return run_job(PROG, work, text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options in `argv`. Exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="The time to the first token by turn, without tiers, with host memory, with a disk.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a checkpoint")
    add("--pages", type=at_least(2), default=720, metavar="N", help=f"KV pages of {PAGE_TOKENS} tokens (720)")
    add("--host-gib", type=float, default=12.0, metavar="N", help="host memory of that run (12)")
    add(
        "--disk", default="", metavar="DIR", help="directory of the disk tier, which is made; needed for disk"
    )
    add("--disk-gib", type=float, default=12.0, metavar="N", help="of the disk in that run (12)")
    add("--tiers", nargs="+", choices=KINDS, default=[NONE, HOST, DISK], metavar="TIER",
        help="none, host, disk, pair, pull (none host disk)")  # fmt: skip
    add("--conversations", type=at_least(1), default=20, metavar="N", help="that take turns (20)")
    add("--turns", type=at_least(2), default=10, metavar="N", help="of each (10)")
    add("--document", type=at_least(1), default=2000, metavar="N", help="tokens before the first turn (2000)")
    add("--question", type=at_least(1), default=64, metavar="N", help="new tokens of a turn (64)")
    add("--answer", type=at_least(1), default=16, metavar="N", help="tokens of an answer (16)")
    add("--concurrency", type=at_least(1), default=2, metavar="N", help="clients (2)")
    add("--json", action="store_true", help="one JSON document instead of a table")
    options = parser.parse_args(argv)
    if DISK in options.tiers and not options.disk:
        parser.error("the disk tier needs a directory: --disk DIR, or leave it out: --tiers none host")
    return options


def _measured(
    options: argparse.Namespace, tier: str, extra: Sequence[str], vocab: int, progress: JobProgress
) -> Figures:
    common = [
        f"--model={options.model}", "--served-model=bench", "--canary-s=0", "--log-level=warning",
        "--access-log=off",
    ]  # fmt: skip
    progress.begin(f"{tier}: starts")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        arguments = [*_server(options, tier, Path(folder)), *common, *extra]
        with serving(arguments, port) as url:
            return asyncio.run(_asked(options, tier, url, vocab, progress))


def _server(options: argparse.Namespace, tier: str, folder: Path) -> list[str]:
    """The command of a server with this tier and its own options. `folder` is for its files."""
    if tier not in (PAIR, PULL):
        arguments = ["serve", f"--pages={options.pages}"]
        if tier == HOST:
            arguments.append(f"--host-cache-gib={options.host_gib:g}")
        elif tier == DISK:
            arguments += [f"--disk-cache={options.disk}", f"--disk-cache-gib={options.disk_gib:g}"]
        return arguments
    tokens = options.document + options.turns * (options.question + options.answer)
    num_pages = (options.conversations + options.concurrency) * -(-tokens // PAGE_TOKENS)
    config = folder / "pair.toml"
    config.write_text(f"[prefill]\npages = {options.pages}\n\n[decode]\npages = {num_pages}\n")
    pulls = "always" if tier == PULL else "off"
    return ["up", "--prefill=1", "--decode=1", "--local-prefill-tokens=0", f"--prefix-pulls={pulls}",
            f"--config={config}"]  # fmt: skip


async def _asked(
    options: argparse.Namespace, tier: str, url: str, vocab: int, progress: JobProgress
) -> Figures:
    client = LoadClient(endpoint_of(url), asyncio.get_running_loop().time)
    first = Turn(prompt_tokens=options.document + options.question, output_tokens=options.answer)
    later = Turn(prompt_tokens=options.question, output_tokens=options.answer)
    talk = Conversation(turns=(first, *[later] * (options.turns - 1)))
    plan = LoadPlan(
        model="bench",
        common={"temperature": 0.0} | EXTENSIONS,
        questions=Workload(source=(talk,), vocab=vocab, seed=0, has_own_answers=True).questions(
            random.Random(5)
        ),
        bound=Bound(num_requests=options.conversations * options.turns),
        goals=Goals(),
        warmup=2,
        rng=random.Random(0),
        takes_turns=True,
    )
    try:
        bench = ServeBench(client, plan, progress=progress)
        await bench.warm_up()
        _, figures = await bench.measure(Level(width=options.concurrency), f"{tier}: ")
        return figures
    finally:
        client.close()


def late_ttft_ms(found: dict[str, Figures]) -> dict[str, float]:
    """The median TTFT from turn 2 on of each tier, in milliseconds: that of the medians of the turns.

    A tier where no later turn was answered has none.
    """
    later = {tier: figures.ttft_by_turn[1:] for tier, figures in found.items()}
    return {tier: statistics.median(times) for tier, times in later.items() if times}


def times_faster(found: dict[str, Figures]) -> dict[str, float]:
    """The median TTFT from turn 2 on of the same workers without a tier by that with each tier."""
    late = late_ttft_ms(found)
    return {
        tier: late[COMPUTES[tier]] / max(1e-9, value)
        for tier, value in late.items()
        if COMPUTES.get(tier) in late
    }


def as_table(found: dict[str, Figures]) -> str:
    """A markdown row for each tier: the median TTFT of each turn and from turn 2 on in milliseconds, and the
    bytes that were moved.
    """
    num_turns = max((len(figures.ttft_by_turn) for figures in found.values()), default=0)
    heads = ["tier", *(f"turn {n + 1}" for n in range(num_turns)), "from turn 2", "errors", "moved"]
    lines = ["Median ms to the first token.", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    late = late_ttft_ms(found)
    for tier, figures in found.items():
        said = figures.server
        moved = [f"{said[name]:.0f} MB {what}" for name, what in MOVED.items() if name in said]
        if tier in (PAIR, PULL) and "cached_share" in said:
            moved.append(f"{said['cached_share']:.0%} of the prompts were cached or pulled")
        times = [f"{value:.0f}" for value in (*figures.ttft_by_turn, late.get(tier, math.nan))]
        cells = [tier, *times, str(sum(figures.errors.values())), ", ".join(moved)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *(f"{tier}: {ratio:.1f} times faster from turn 2 on" for tier, ratio in times_faster(found).items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def as_document(found: dict[str, Figures]) -> dict[str, object]:
    """The figures for JSON."""
    return {
        "tiers": {tier: figures.as_dict() for tier, figures in found.items()},
        "ttft_from_turn_2_ms": late_ttft_ms(found),
        "times_faster_from_turn_2": times_faster(found),
    }
