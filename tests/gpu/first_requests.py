"""Time to the first token of the first 20 requests after the start, against the next of the same lengths.

    python -m baton.tests.gpu.first_requests --url http://127.0.0.1:8000

Run it when the server has just become ready, before any other request. The requests have 1 to 8192 tokens,
cold and behind a cached prefix, and go one after the other. The same lengths follow three times, with other
tokens. Exit code 1 if a first time is more than twice the median of the later ones of its length.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

LIMIT = 2.0
ROUNDS = 3  # after the first
VOCAB = 30000
FIRST_ID = 300  # beyond special tokens and bytes
NEW_TOKENS = 4


@dataclass(frozen=True)
class Kind:
    """A prompt of `length` tokens, the first `prefix` of which an earlier prompt of the round had."""

    length: int
    prefix: int = 0


KINDS = (
    *(Kind(length) for length in (1, 2, 7, 16, 17, 100, 256, 513, 1024, 2048, 4096, 8192)),
    Kind(65, 48),
    Kind(256, 128),
    Kind(700, 512),
    Kind(1024, 512),
    Kind(2048, 1024),
    Kind(4096, 2048),
    Kind(8192, 4096),
    Kind(8192, 8176),
)


def prompts_of(seed: int) -> list[list[int]]:
    """The prompts of a round. Each prefix is that of the round's longest cold prompt."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(FIRST_ID, VOCAB) for _ in range(count)]

    cold = {kind: ids(kind.length) for kind in KINDS if not kind.prefix}
    longest = max(cold.values(), key=len)
    return [cold.get(kind) or longest[: kind.prefix] + ids(kind.length - kind.prefix) for kind in KINDS]


def ttft_ms(client: httpx.Client, model: str, ids: list[int]) -> float:
    """Milliseconds to the first token of one streamed request. Raises RuntimeError without a token."""
    body = {"model": model, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:") and not first:
                first = time.perf_counter() - began
    if not first or answer.status_code != 200:
        raise RuntimeError(f"a prompt of {len(ids)} tokens: status {answer.status_code}, no token")
    return first * 1e3


def table_of(first: Sequence[float], later: Sequence[Sequence[float]]) -> tuple[list[str], float]:
    """The lines of the table, and the worst ratio."""
    lines, worst = [f"{'tokens':>7} {'cached':>7} {'first ms':>9} {'later ms':>9} {'ratio':>6}"], 0.0
    for kind, ours, others in zip(KINDS, first, zip(*later, strict=True), strict=True):
        median = statistics.median(others)
        worst = max(worst, ours / median)
        lines.append(f"{kind.length:7} {kind.prefix:7} {ours:9.1f} {median:9.1f} {ours / median:6.2f}")
    return lines, worst


def main(argv: Sequence[str]) -> int:
    """Runs the rounds, prints the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the endpoint")
    options = parser.parse_args(list(argv))
    with httpx.Client(base_url=options.url, timeout=120.0, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        first, *later = (
            [ttft_ms(client, model, ids) for ids in prompts_of(seed)] for seed in range(1 + ROUNDS)
        )
    lines, worst = table_of(first, later)
    sys.stdout.write("\n".join([*lines, f"worst ratio {worst:.2f}, at most {LIMIT:g} is asked for"]) + "\n")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
