"""`baton bench pages`: KV pages that grow beside whole reservations, and beside an oracle that knows how long
each answer gets.

    baton bench checkpoint DIR --shape llama-3.2-1b --answers 200
    baton bench pages --model DIR/target --pages 3000 --concurrency 96 --requests 768 --max-tokens 16384

One server after the other, each on the same pool, gets the same requests with the same seeds:

    grow     pages as tokens come; every request asks for --max-tokens, and ends by itself
    oracle   pages for the whole answer from the start; every request asks for exactly as many tokens as
             its answer had in the run of `grow`. No server could know that
    whole    pages for the whole answer from the start; every request asks for --max-tokens

The answers of all runs are compared token for token. Flags behind `--` go to the server.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cluster.process.progress import JobProgress
from ...engine.models.registry import load_model_config
from ..arguments import at_least
from ..child_server import serving
from ..job import report_of, run_job, split_arguments
from ..router.rig import free_port
from ..serve.client import endpoint_of
from .load import AnswerClient, PagesLoad, PagesRun, run_load

PROG = "baton bench pages"
GROW, ORACLE, WHOLE = "grow", "oracle", "whole"
WARMUP = 8  # requests


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run of a mode."""

    mode: str
    run: PagesRun
    num_different: int
    """Answers that differ from those of the first run of `grow`."""


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench pages`. Returns 0, 1 where a run failed or had errors, 2 for a wrong argument."""
    given, extra = split_arguments(argv)
    options = parse(given)
    found: list[Measured] = []

    def text() -> str:
        return report_of(found, as_document, as_table, is_json=options.json)

    def work(progress: JobProgress) -> tuple[str, int]:
        for one in measure(options, extra, progress):
            found.append(one)  # at once: an interrupted run has it
        return text(), int(any(one.run.errors for one in found))

    return run_job(PROG, work, text)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options in `argv`. Exits with code 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=(__doc__ or "").split(": ", 1)[1].split("\n\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a checkpoint of `baton bench checkpoint --answers N`")
    add("--pages", type=at_least(2), required=True, metavar="N", help="KV pages of 16 tokens of the server")
    add("--max-running", type=at_least(1), default=128, metavar="N", help="places of the server (128)")
    add("--concurrency", type=at_least(1), default=64, metavar="N", help="clients (64)")
    add("--requests", type=at_least(1), default=256, metavar="N", help="requests of a run (256)")
    add("--input", type=at_least(1), default=256, metavar="N", help="tokens of a prompt (256)")
    add("--max-tokens", type=at_least(1), default=16384, metavar="N", help="that a request asks for (16384)")
    add("--block", type=at_least(0), default=0, metavar="N",
        help="every second block of N requests has longer answers; 0: all are alike (0)")  # fmt: skip
    add("--longer", type=at_least(1), default=200, metavar="N", help="least tokens of these answers (200)")
    add("--rounds", type=at_least(1), default=1, metavar="N", help="runs of each mode (1)")
    add("--modes", nargs="+", choices=(GROW, ORACLE, WHOLE), default=[GROW, ORACLE, WHOLE], metavar="MODE",
        help="grow, oracle, whole; grow is always first (all)")  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="S", help="longest wait for an answer (600)")
    add("--seed", type=int, default=0, help="of prompts and answers (0)")
    add("--json", action="store_true", help="one JSON document instead of a table")
    return parser.parse_args(argv)


def measure(options: argparse.Namespace, extra: Sequence[str], progress: JobProgress) -> Iterator[Measured]:
    """Runs all modes, `grow` first in each round. Raises BatonError when a server does not start, or there is
    no checkpoint."""
    vocab = load_model_config(Path(options.model)).vocab_size
    load = PagesLoad(
        num_requests=options.requests,
        width=options.concurrency,
        prompt_tokens=options.input,
        vocab=vocab,
        seed=options.seed,
        block=options.block,
        longer=options.longer,
    )
    modes = [GROW, *(mode for mode in options.modes if mode != GROW)]
    known: list[list[int]] = []  # the answers of the first run
    for number in range(options.rounds):
        for mode in modes:
            progress.begin(f"{mode}, round {number + 1} of {options.rounds}")
            limits = [max(1, len(answer)) for answer in known] if mode == ORACLE else None
            run = _run(options, extra, load, mode, limits or [options.max_tokens] * load.num_requests)
            known = known or run.answers
            num_different = sum(a != b for a, b in zip(run.answers, known, strict=True))
            yield Measured(mode=mode, run=run, num_different=num_different)


def _run(
    options: argparse.Namespace, extra: Sequence[str], load: PagesLoad, mode: str, limits: Sequence[int]
) -> PagesRun:
    reserve = GROW if mode == GROW else WHOLE
    arguments = [
        "serve", f"--model={options.model}", "--served-model=bench", f"--pages={options.pages}",
        f"--max-running={options.max_running}", f"--reserve={reserve}", "--canary-s=0",
        f"--queue-timeout-s={options.timeout:g}", "--log-level=warning", "--access-log=off", *extra,
    ]  # fmt: skip
    port = free_port()
    with serving(arguments, port) as url:
        return asyncio.run(_ask(options, url, load, limits))


async def _ask(options: argparse.Namespace, url: str, load: PagesLoad, limits: Sequence[int]) -> PagesRun:
    client = AnswerClient(endpoint_of(url), asyncio.get_running_loop().time, timeout_s=options.timeout)
    try:
        warm = PagesLoad(
            num_requests=WARMUP, width=WARMUP, prompt_tokens=load.prompt_tokens, vocab=load.vocab, seed=-1
        )
        await run_load(client, warm, [8] * WARMUP)
        client.answers.clear()
        return await run_load(client, load, limits)
    finally:
        client.close()


def as_table(found: Sequence[Measured]) -> str:
    """A markdown row for each run, then the ratios of the modes to the oracle, and of `grow` to `whole`."""
    heads = (
        "mode", "ended", "errors", "tokens an answer", "tok/s", "steady tok/s", "running", "pages in use",
        "retracted", "TTFT p50 / p99, s", "other answers",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found:
        run = one.run
        num_errors = sum(run.errors.values())
        cells = [
            one.mode, str(len(run.answers) - num_errors), str(num_errors),
            f"{run.num_tokens / max(1, len(run.answers)):.0f}", f"{run.tokens_per_s:.1f}",
            f"{run.steady_tokens_per_s:.1f}", f"{_mean(run.running):.1f}", f"{_mean(run.pages_used):.0%}",
            f"{run.retracted:.0f}", f"{_share(run.ttft_s, 0.5):.2f} / {_share(run.ttft_s, 0.99):.2f}",
            str(one.num_different),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"{mode}: {ratio:.3f} of the oracle" for mode, ratio in ratios(found).items())]
    if (times := times_whole(found)) is not None:
        lines.append(f"{GROW}: {times:.2f} times {WHOLE}")
    lines += [f"{one.mode}: {count} x {kind}" for one in found for kind, count in one.run.errors.items()]
    return "\n".join(lines).rstrip() + "\n"


def ratios(found: Sequence[Measured]) -> dict[str, float]:
    """The steady throughput of each mode by that of the oracle: medians over the rounds."""
    rates = _rates(found)
    oracle = rates.pop(ORACLE, None)
    return {} if oracle is None else {mode: rate / max(1e-9, oracle) for mode, rate in rates.items()}


def times_whole(found: Sequence[Measured]) -> float | None:
    """The steady throughput of `grow` by that of `whole`, alike; None where `whole` was not run."""
    rates = _rates(found)
    return rates[GROW] / max(1e-9, rates[WHOLE]) if WHOLE in rates else None


def _rates(found: Sequence[Measured]) -> dict[str, float]:
    """The steady tokens a second of each mode: the median of its rounds."""
    rounds: dict[str, list[float]] = {}
    for one in found:
        rounds.setdefault(one.mode, []).append(one.run.steady_tokens_per_s)
    return {mode: statistics.median(rates) for mode, rates in rounds.items()}


def as_document(found: Sequence[Measured]) -> dict[str, object]:
    """The figures for JSON."""
    return {
        "runs": [
            {
                "mode": one.mode,
                "requests": len(one.run.answers),
                "errors": one.run.errors,
                "tokens": one.run.num_tokens,
                "seconds": one.run.seconds,
                "tokens_per_s": one.run.tokens_per_s,
                "steady_tokens_per_s": one.run.steady_tokens_per_s,
                "running": _mean(one.run.running),
                "pages_used": _mean(one.run.pages_used),
                "retracted": one.run.retracted,
                "ttft_p50_s": _share(one.run.ttft_s, 0.5),
                "different": one.num_different,
            }
            for one in found
        ],
        "of_oracle": ratios(found),
        "times_whole": times_whole(found),
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _share(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
