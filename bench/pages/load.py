"""The load of `baton bench pages`: requests whose answers end by themselves, and what clients and server saw.

Request i has the same prompt and seed in every run, so its answer is the same. Clients of a closed loop ask
for them in order.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ..serve.client import Connect, LoadClient, TargetUrl, TimedCall, Unexpected
from ..serve.prompts import COMPLETION, random_ids

LOOK_S = 0.5  # between two looks at the server


class AnswerClient(LoadClient):
    """Also keeps the token ids of each answer."""

    def __init__(
        self,
        endpoint: TargetUrl,
        clock: Callable[[], float],
        *,
        timeout_s: float,
        connect: Connect = asyncio.open_connection,
    ) -> None:
        super().__init__(endpoint, clock, timeout_s=timeout_s, connect=connect)
        self.answers: dict[int, list[int]] = {}  # by the id of the call

    def _take(self, call: TimedCall, data: bytes) -> None:
        super()._take(call, data)
        if data != b"[DONE]":
            for choice in json.loads(data).get("choices") or []:
                self.answers.setdefault(id(call), []).extend(choice.get("token_ids") or [])


@dataclass(frozen=True, kw_only=True)
class PagesLoad:
    """`num_requests` prompts of `prompt_tokens` random ids below `vocab`, by `width` clients.

    Of `block` requests after the other, every second block has answers that do not end within their first
    `longer` tokens: whoever learns from the last answers how long the next ones get is wrong at each border.
    """

    num_requests: int
    width: int
    prompt_tokens: int
    vocab: int
    seed: int = 0
    block: int = 0
    longer: int = 0

    def body(self, number: int, max_tokens: int) -> dict[str, Any]:
        """Request `number`: one seed, one answer."""
        rng = random.Random(f"{self.seed} {number}")
        is_longer = bool(self.block) and number // self.block % 2 == 1
        return {
            "min_tokens": min(max_tokens, self.longer) if is_longer else 0,
            "model": "bench",
            "prompt": random_ids(rng, self.prompt_tokens, self.vocab),
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": 1000 * self.seed + number,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


@dataclass(eq=False)
class PagesRun:
    """One run. Times are seconds since its begin."""

    answers: list[list[int]]
    """Token ids of each request, in order."""
    errors: dict[str, int]
    seconds: float = 0.0
    steady_tokens_per_s: float = 0.0
    """While every client had a request: from the end of as many requests as there are clients, to the last
    begin."""
    ttft_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    """Requests in the batch at each look of that time."""
    pages_used: list[float] = field(default_factory=list)
    """The share of pages in use, alike."""
    retracted: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers by the time of the whole run."""
        return self.num_tokens / max(1e-9, self.seconds)


async def run_load(client: AnswerClient, load: PagesLoad, max_tokens: Sequence[int]) -> PagesRun:
    """Asks for all requests; `max_tokens` has the limit of each."""
    clock = asyncio.get_running_loop().time
    before, began = await _retractions(client), clock()
    calls: dict[int, TimedCall] = {}
    waiting = list(range(load.num_requests))[::-1]
    looks: list[tuple[float, int, float]] = []
    looking = asyncio.ensure_future(_look(client, looks, clock))

    async def ask_on() -> None:
        while waiting:
            number = waiting.pop()
            calls[number] = await client.ask(COMPLETION, load.body(number, max_tokens[number]), clock())

    try:
        await asyncio.gather(*(ask_on() for _ in range(load.width)))
    finally:
        looking.cancel()
    run = PagesRun(answers=[client.answers.get(id(calls[number]), []) for number in range(load.num_requests)],
                   errors={}, seconds=clock() - began)  # fmt: skip
    for call in calls.values():
        if call.error:
            run.errors[call.error] = run.errors.get(call.error, 0) + 1
        elif call.arrivals:
            run.ttft_s.append(call.arrivals[0][0] - call.due)
    start, end = _steady(list(calls.values()), load.width, began)
    tokens = sum(n for call in calls.values() for at, n in call.arrivals if start <= at < end)
    run.steady_tokens_per_s = tokens / max(1e-9, end - start)
    run.running = [running for at, running, _ in looks if start <= at < end]
    run.pages_used = [used for at, _, used in looks if start <= at < end]
    run.retracted = await _retractions(client) - before
    return run


def _steady(calls: Sequence[TimedCall], width: int, began: float) -> tuple[float, float]:
    """The time in which every client had a request and the first ones had ended."""
    ends = sorted(call.ended for call in calls)
    start, end = ends[min(width, len(ends)) - 1], max(call.sent for call in calls)
    return (start, end) if start < end else (began, ends[-1])


async def _look(
    client: LoadClient, looks: list[tuple[float, int, float]], clock: Callable[[], float]
) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            status, body = await client.get("/status")
        except (OSError, EOFError, Unexpected):
            continue
        if status == 200:
            workers = [each for each in json.loads(body)["workers"] if each["role"] == "decode"]
            total = sum(each["pages_total"] for each in workers)
            free = sum(each["pages_free"] for each in workers)
            looks.append((clock(), sum(each["running"] for each in workers), 1 - free / max(1, total)))


async def _retractions(client: LoadClient) -> float:
    status, body = await client.get("/metrics")
    if status != 200:
        return 0.0
    families = text_string_to_metric_families(body.decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "baton_retractions_total")
