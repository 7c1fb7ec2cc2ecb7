"""Workloads of `baton bench serve --workload`: mixed lengths, conversations, shared prefixes.

A workload is a named mix (parameters and motivation: `mixes.json`) or a JSONL file. Prompts are random
token ids, so only lengths and shared beginnings matter. The answers in the history of a conversation are
random ids too, of the length that was asked for: two servers thus get the same prompts, whatever they answer.

Each line of a file is one of

    {"prompt_tokens": 900, "output_tokens": 120}                        one request
    {"turns": [{"prompt_tokens": 70, "output_tokens": 200}, ...]}       a conversation, turn by turn
    {"prompt": TEXT or [IDS], "max_tokens": 64}                         a request with this prompt
    {"messages": [...], "max_tokens": 64}                               a chat with these messages

The first two may have "prefix" and "prefix_tokens": so many tokens before all others, the same in every line
with this name of a prefix.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from .prompts import COMPLETION, Question, literal_question, positive, random_ids, read_lines

FILE = Path(__file__).with_name("mixes.json")
FORMS = 'write "prompt_tokens" and "output_tokens", or "turns", "prompt" or "messages"'
LENGTH_FIELDS = {"prompt_tokens", "output_tokens"}
PREFIX_FIELDS = {"prefix", "prefix_tokens"}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """New prompt tokens and answer tokens of one request."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns behind the first `prefix_tokens` tokens of the named prefix."""

    turns: tuple[Turn, ...]
    prefix: str = ""
    prefix_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """A number of tokens: exp of a normal distribution with deviation `sigma`, cut at `low` and `high`."""

    median: float
    sigma: float
    low: int
    high: int

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Lognormal":
        """From `mixes.json`, which names the median, or the mean of the distribution before it is cut."""
        sigma = values["sigma"]
        median = values["median"] if "median" in values else values["mean"] / math.exp(sigma**2 / 2)
        return cls(median=median, sigma=sigma, low=values["low"], high=values["high"])

    def draw(self, rng: random.Random) -> int:
        """A random number of tokens."""
        return min(self.high, max(self.low, round(self.median * math.exp(rng.gauss(0.0, self.sigma)))))


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A named workload. `turns`: their mean number (geometric) and the largest."""

    prompt: Lognormal
    output: Lognormal
    turns: tuple[float, int] = (1.0, 1)
    num_prefixes: int = 0
    prefix_tokens: int = 0

    def draw(self, rng: random.Random) -> Conversation:
        """A random conversation."""
        mean, high = self.turns
        count = 1
        while count < high and rng.random() < 1 - 1 / mean:
            count += 1
        prefix = str(rng.randrange(self.num_prefixes)) if self.num_prefixes else ""
        turns = tuple(
            Turn(prompt_tokens=self.prompt.draw(rng), output_tokens=self.output.draw(rng))
            for _ in range(count)
        )
        return Conversation(turns=turns, prefix=prefix, prefix_tokens=self.prefix_tokens if prefix else 0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Where the requests of a load come from.

    Ids are 3 to `vocab` - 1. A prompt and its answer together have at most `context` tokens (0: no limit):
    the prompt is cut at its end, and a conversation ends before the first turn that would exceed it.
    `has_own_answers`: prompts of later turns have the answers of the server in them, not random ids.
    """

    source: Mix | tuple[Conversation | Question, ...]
    vocab: int
    seed: int
    context: int = 0
    has_own_answers: bool = False

    def questions(self, rng: random.Random) -> Iterator[Question]:
        """Endless requests; equal states of `rng` give equal requests. Prefixes depend on `seed` alone."""
        while True:
            if isinstance(self.source, Mix):
                yield self._question(self.source.draw(rng), rng)
            else:
                for item in self.source:
                    yield item if isinstance(item, Question) else self._question(item, rng)

    def _question(self, conversation: Conversation, rng: random.Random) -> Question:
        ids = random_ids(
            random.Random(f"prefix {self.seed} {conversation.prefix}"), conversation.prefix_tokens, self.vocab
        )
        made: list[Question] = []
        answers_at: list[int] = []
        for turn in conversation.turns:
            ids = ids + random_ids(rng, turn.prompt_tokens, self.vocab)
            output, room = turn.output_tokens, self.context or math.inf
            if len(ids) + output > room:
                if made:
                    break
                output = min(output, max(1, self.context // 2))
                ids = ids[: self.context - output]
            known = tuple(answers_at) if self.has_own_answers else ()
            body = {"prompt": ids, "max_tokens": output}
            made.append(Question(path=COMPLETION, body=body, answers_at=known))
            answers_at.append(len(ids))
            ids = ids + random_ids(rng, output, self.vocab)
        first, *later = made
        return Question(path=first.path, body=first.body, then=tuple(later))


def named_mixes() -> dict[str, Mix]:
    """The workloads of `mixes.json` by name."""
    return {name: _mix(values) for name, values in json.loads(FILE.read_text(encoding="utf-8")).items()}


def workload_of(
    name: str, *, vocab: int, seed: int, context: int, is_plain: bool, has_own_answers: bool = False
) -> Workload:
    """The workload of a mix's name, or of the JSONL file `name`.

    `is_plain`: literal lines get no field of an extension. Raises ConfigError for an unknown name, an
    unreadable file or bad lines.
    """
    mixes = named_mixes()
    if name not in mixes and not Path(name).is_file():
        raise ConfigError(f"--workload {name}: no such file, and no mix of this name: {', '.join(mixes)}")

    def parse(value: dict[str, Any]) -> Conversation | Question:
        return parse_line(value, is_plain=is_plain)

    source: Mix | Sequence[Conversation | Question]
    source = mixes[name] if name in mixes else tuple(read_lines(Path(name), "--workload", parse))
    return Workload(source=source, vocab=vocab, seed=seed, context=context, has_own_answers=has_own_answers)


def parse_line(value: dict[str, Any], *, is_plain: bool) -> Conversation | Question:
    """A line of a workload file. Raises ValueError with the fault and what to write."""
    if "prompt" in value or "messages" in value:
        _check_names(value, {"prompt", "messages", "max_tokens"})
        question = literal_question(value)
        body = {"max_tokens": 128} | ({} if is_plain else {"ignore_eos": False}) | question.body
        return Question(path=question.path, body=body)
    if "turns" in value:
        _check_names(value, {"turns"} | PREFIX_FIELDS)
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError('"turns" is a list of {"prompt_tokens": N, "output_tokens": N}, and not empty')
        for turn in turns:
            _check_names(turn, LENGTH_FIELDS)
    elif LENGTH_FIELDS & set(value):
        _check_names(value, LENGTH_FIELDS | PREFIX_FIELDS)
        turns = [value]
    else:
        raise ValueError(FORMS)
    made = tuple(
        Turn(prompt_tokens=positive(turn, "prompt_tokens"), output_tokens=positive(turn, "output_tokens"))
        for turn in turns
    )
    prefix = value.get("prefix", "")
    if not isinstance(prefix, str) or (PREFIX_FIELDS & set(value) and not prefix):
        raise ValueError('"prefix" is the name of a shared beginning, a text that is not empty')
    return Conversation(
        turns=made, prefix=prefix, prefix_tokens=positive(value, "prefix_tokens") if prefix else 0
    )


def _check_names(value: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f'unknown field "{unknown[0]}"; known here: {", ".join(sorted(known))}')


def _mix(values: dict[str, Any]) -> Mix:
    turns, prefixes = values.get("turns"), values.get("prefixes")
    return Mix(
        prompt=Lognormal.of(values["prompt_tokens"]),
        output=Lognormal.of(values["output_tokens"]),
        turns=(turns["mean"], turns["high"]) if turns else (1.0, 1),
        num_prefixes=prefixes["count"] if prefixes else 0,
        prefix_tokens=prefixes["tokens"] if prefixes else 0,
    )
