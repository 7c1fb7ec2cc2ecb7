"""`baton bench serve`: puts load on an OpenAI-compatible endpoint and reports latency and throughput as
clients see them.

    baton bench serve --url http://127.0.0.1:8000 --concurrency 1 8 32 --requests 200 --input 512 --output 128
    baton bench serve --rate 2 4 8 --duration 60 --slo-ttft 500 --slo-itl 50 --plot load.png
    baton bench serve --compare http://a:8000 http://b:8000 --workload chat --concurrency 1 8 --curve ab.png

`figures` defines the figures, `load` schedules the requests, `workloads` has requests of mixed lengths, and
`compare` measures two servers in turn. The API key is read from BATON_API_KEY.
"""

import argparse
import asyncio
import importlib
import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...cluster.distribution import install_command
from ...cluster.errors import BatonError, ConfigError
from ...cluster.process.progress import JobProgress
from ...cluster.security.tls_faults import tls_fault
from .arguments import PROG, parse
from .client import LoadClient, TimedCall, Unexpected, endpoint_of
from .compare import Comparison, as_comparison_table, compare
from .figures import CurvePoint, Figures, Goals, figures_of
from .load import Bound, Level, Run, begin, drive, tell
from .prompts import Question, file_prompts, random_prompts
from .server import read_metrics, said
from .table import as_table
from .workloads import workload_of

KEY_VARIABLE = "BATON_API_KEY"
SHOWN_S = 0.5  # between two looks at the progress of a run
Questions = Callable[[random.Random], Iterator[Question]]
EXTENSIONS = {"ignore_eos": True, "return_token_ids": True}  # extensions of baton, vLLM and SGLang


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The settings that all levels share."""

    model: str
    common: dict[str, Any]  # fields of every body
    questions: Iterator[Question]
    bound: Bound
    goals: Goals
    warmup: int
    rng: random.Random
    takes_turns: bool = False


class ServeBench:
    """Runs load levels one after the other against one endpoint.

    `routers` are the URLs that metrics are read from, if they differ from the endpoint.
    """

    def __init__(
        self,
        client: LoadClient,
        plan: LoadPlan,
        routers: Sequence[LoadClient] = (),
        progress: JobProgress | None = None,
    ) -> None:
        self._client, self._plan = client, plan
        self._progress = progress or JobProgress()
        self._routers = routers or [client]

    async def ask(self, question: Question, due: float) -> TimedCall:
        """Sends one request that is due at `due`, in seconds on the loop's clock."""
        body = {"model": self._plan.model, "stream": True, "stream_options": {"include_usage": True}}
        return await self._client.ask(question.path, {**body, **self._plan.common, **question.body}, due)

    async def warm_up(self) -> None:
        """Sends requests that are not measured, four at a time. Raises BatonError when none is answered."""
        if not self._plan.warmup:
            return
        run, bound = begin(Level(width=min(4, self._plan.warmup))), Bound(num_requests=self._plan.warmup)
        self._progress.begin("warming up")
        telling = asyncio.ensure_future(tell(run, bound, self._progress.show, SHOWN_S))
        try:
            await drive(run, self._plan.questions, self.ask, bound, self._plan.rng)
        finally:
            telling.cancel()
        if run.num_errors == len(run.calls):
            raise BatonError(f"{self._client.endpoint} answers nothing: {run.calls[0].error}")

    async def measure(self, level: Level, prefix: str = "") -> tuple[Run, Figures]:
        """Runs one level and returns its figures. `prefix` tells its progress from that of other runs."""
        plan = self._plan
        before, run = await read_metrics(self._routers), begin(level)
        self._progress.begin(f"{prefix}{level}")
        telling = asyncio.ensure_future(tell(run, plan.bound, self._progress.show, SHOWN_S))
        try:
            await drive(run, plan.questions, self.ask, plan.bound, plan.rng, takes_turns=plan.takes_turns)
        finally:
            telling.cancel()
        return run, figures_of(run, plan.goals, said(before, await read_metrics(self._routers)))


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench serve`.

    Returns 0 when every level had an answer, 1 when one had none, 2 for a wrong argument.
    """
    options = parse(argv)
    try:
        for flag, path in (("--plot", options.plot), ("--curve", options.curve)):
            if path and importlib.util.find_spec("PIL") is None:
                raise ConfigError(f"{flag} needs Pillow: {install_command('plot')}")
        if options.compare:
            compared = asyncio.run(_compare(options))
            _show_comparison(options, compared)
            runs = [figures for each in compared for pair in each.rounds for figures in pair]
        else:
            found = asyncio.run(_run(options))
            _show(options, found)
            runs = [figures for _, figures in found]
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 2
    except BatonError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted\n")
        return 130
    return 0 if all(figures.num_ok for figures in runs) else 1


async def _run(options: argparse.Namespace) -> list[tuple[Run, Figures]]:
    client = client_of(options, options.url, "--url")
    routers = [
        client_of(options, url.strip(), "--metrics") for url in options.metrics.split(",") if url.strip()
    ]
    progress = JobProgress()
    try:
        bench = ServeBench(client, await plan_of(options, client), routers, progress)
        if routers and not await read_metrics(routers):
            raise BatonError(
                f"--metrics {options.metrics}: one shows no metrics of a router; correct it, or the key"
            )
        await bench.warm_up()
        return [await bench.measure(level) for level in levels_of(options)]
    finally:
        progress.close()
        for one in (client, *routers):
            one.close()


async def _compare(options: argparse.Namespace) -> list[Comparison]:
    clients = [client_of(options, url, "--compare") for url in options.compare]
    questions = questions_of(options)
    progress = JobProgress()
    try:
        plans = [await plan_of(options, client) for client in clients]
        for client, plan in zip(clients, plans, strict=True):
            await ServeBench(client, plan, progress=progress).warm_up()

        async def measure(side: int, level: Level, number: int) -> Figures:
            name = f"{options.seed} {level} {number}"  # both sides get the same requests at the same times
            plan = replace(
                plans[side],
                questions=questions(random.Random(name)),
                rng=random.Random(f"arrivals {name}"),
            )
            one = ServeBench(clients[side], plan, progress=progress)
            return (await one.measure(level, f"{'AB'[side]}, round {number + 1} of {options.rounds}: "))[1]

        return await compare(measure, levels_of(options), options.rounds)
    finally:
        progress.close()
        for client in clients:
            client.close()


def client_of(options: argparse.Namespace, url: str, flag: str) -> LoadClient:
    """A client of `url`. Raises ConfigError naming `flag` for an invalid URL, and for an invalid API key."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{KEY_VARIABLE} is no API key")
    clock = asyncio.get_running_loop().time
    return LoadClient(endpoint_of(url, flag), clock, api_key=key, timeout_s=options.timeout)


def levels_of(options: argparse.Namespace) -> list[Level]:
    """The load levels that the options name, in the order given."""
    return [Level(rate=rate) for rate in options.rate] or [
        Level(width=width) for width in options.concurrency
    ]


async def plan_of(options: argparse.Namespace, client: LoadClient) -> LoadPlan:
    """The plan that the options describe.

    Raises ConfigError for a wrong option, BatonError when the endpoint names no model.
    """
    questions = questions_of(options)(random.Random(options.seed))
    common = options.sampling | ({} if options.plain else EXTENSIONS)
    if options.prompts and not options.plain:
        common = common | {"ignore_eos": False}
    return LoadPlan(
        model=options.model or await model_of(client),
        common=common,
        questions=questions,
        bound=bound_of(options),
        goals=Goals(ttft_ms=options.slo_ttft, itl_ms=options.slo_itl),
        warmup=options.warmup,
        rng=random.Random(f"arrivals {options.seed}"),
        takes_turns=options.take_turns,
    )


def questions_of(options: argparse.Namespace) -> Questions:
    """Makes the endless requests of the options from a random generator.

    Raises ConfigError for a file or workload that cannot be used.
    """
    if options.workload:
        return workload_of(
            options.workload,
            vocab=options.vocab,
            seed=options.seed,
            context=options.context,
            is_plain=options.plain,
            has_own_answers=options.own_answers,
        ).questions
    if options.prompts:
        return lambda rng: file_prompts(Path(options.prompts), rng, options.output)
    return lambda rng: random_prompts(
        rng, inputs=options.input, outputs=options.output, vocab=options.vocab, prefix=options.shared_prefix
    )


def bound_of(options: argparse.Namespace) -> Bound:
    """The bound that the options set; 100 requests by default."""
    if not options.requests and not options.duration:
        return Bound(num_requests=100)
    never = Bound()
    return Bound(
        num_requests=options.requests or never.num_requests, seconds=options.duration or never.seconds
    )


async def model_of(client: LoadClient) -> str:
    """The first model in the endpoint's list. Raises BatonError when the list cannot be read or is empty."""
    try:
        status, body = await client.get("/v1/models")
        if status == 200:
            return str(json.loads(body)["data"][0]["id"])
        answer = f"{client.endpoint}/v1/models answers {status}{_words_of(body)}"
        if status == 401:
            raise BatonError(f"{answer}; put an API key into the environment variable {KEY_VARIABLE}")
        raise BatonError(answer if status == 400 else f"{answer}; name the model with --model")
    except (OSError, EOFError, Unexpected) as error:
        raise BatonError(why_not_reached(str(client.endpoint), error)) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise BatonError(f"{client.endpoint}/v1/models names no model; give one with --model") from None


def why_not_reached(url: str, error: Exception) -> str:
    """One line with the reason why the endpoint cannot be reached."""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {url}"
    if isinstance(error, EOFError):
        return f"{url} closed the connection in place of an answer"
    return tls_fault(url, error) or f"{url} cannot be reached: {error or type(error).__name__}"


def _words_of(body: bytes) -> str:
    """The message of an OpenAI error object in brackets; "" for any other body."""
    try:
        return f" ({json.loads(body)['error']['message']})"
    except (ValueError, KeyError, TypeError):
        return ""


def _show(options: argparse.Namespace, found: Sequence[tuple[Run, Figures]]) -> None:
    if options.json:
        document = {"url": options.url, "levels": [figures.as_dict() for _, figures in found]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(as_table([figures for _, figures in found]))
    if options.plot:
        _draw("--plot", options.plot, "draw", [run for run, _ in found], f"{options.url}: {_load(options)}")
    if options.curve:
        points = [CurvePoint.median([figures]) for _, figures in found]
        _draw("--curve", options.curve, "draw_curves", {options.url: points}, _load(options))


def _show_comparison(options: argparse.Namespace, found: Sequence[Comparison]) -> None:
    if options.json:
        document = {"compare": options.compare, "levels": [each.as_dict() for each in found]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(as_comparison_table(found, options.compare))
    if options.curve:
        curves = {
            f"{side}: {url}": [each.point(number) for each in found]
            for number, (side, url) in enumerate(zip("AB", options.compare, strict=True))
        }
        _draw("--curve", options.curve, "draw_curves", curves, _load(options))


def _draw(flag: str, path: str, function: str, shown: object, title: str) -> None:
    """Draws with a function of `plot`, which imports Pillow. Raises BatonError for a file that cannot be
    written.
    """
    try:
        getattr(importlib.import_module(".plot", __package__), function)(shown, Path(path), title)
    except OSError as error:
        raise BatonError(f"{flag} {path}: {error}") from None


def _load(options: argparse.Namespace) -> str:
    """The requests in words."""
    named = options.workload or options.prompts
    return named or f"{_range(options.input)} tokens in, {_range(options.output)} out"


def _range(lengths: tuple[int, int]) -> str:
    low, high = lengths
    return str(low) if low == high else f"{low}-{high}"
