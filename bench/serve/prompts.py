"""Prompts of `baton bench serve`: random tokens of given lengths, or the lines of a file."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ...cluster.errors import ConfigError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MOST_LENGTH = 1 << 24  # tokens of a prompt or an answer
MOST_FAULTS = 10  # bad lines of a file that one message names
Lengths = tuple[int, int]  # smallest and largest, in tokens
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request: its path, and the part of the body that differs between requests.

    `then`: the later turns of its conversation. Each is sent when the answer before it is complete.
    `answers_at`: where in the prompt's ids the answers to the turns before it begin; empty: the prompt has
    random ids there, whatever the answers are.
    """

    path: str
    body: dict[str, Any]
    then: tuple["Question", ...] = ()
    answers_at: tuple[int, ...] = ()

    def behind(self, answers: Sequence[Sequence[int]]) -> "Question":
        """The turn with these answers, as token ids, to the turns before it."""
        if not self.answers_at:
            return self
        ids = list(self.body["prompt"])
        for start, answer in zip(self.answers_at, answers, strict=True):
            ids[start : start + len(answer)] = answer
        return replace(self, body={**self.body, "prompt": ids})


def random_ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    """`count` random token ids from 3 to `vocab` - 1."""
    return [rng.randrange(3, vocab) for _ in range(count)]


def random_prompts(
    rng: random.Random, *, inputs: Lengths, outputs: Lengths, vocab: int, prefix: int
) -> Iterator[Question]:
    """Endless random prompts. All begin with the same `prefix` tokens; ids are 3 to `vocab` - 1."""
    head = random_ids(rng, prefix, vocab)
    while True:
        num_input, num_output = rng.randint(*inputs), rng.randint(*outputs)
        ids = (head + random_ids(rng, max(1, num_input - prefix), vocab))[: max(1, num_input)]
        yield Question(path=COMPLETION, body={"prompt": ids, "max_tokens": num_output})


def file_prompts(path: Path, rng: random.Random, outputs: Lengths) -> Iterator[Question]:
    """The prompts of a JSONL file, repeated without end.

    A line is {"prompt": text or ids} or {"messages": [...]}, and may have its own "max_tokens". Raises
    ConfigError for an unreadable file or lines of another form.
    """
    questions = read_lines(path, "--prompts", literal_question)

    def again() -> Iterator[Question]:
        while True:
            for question in questions:
                yield Question(path=question.path, body={"max_tokens": rng.randint(*outputs)} | question.body)

    return again()


def read_lines(path: Path, flag: str, parse: Callable[[dict[str, Any]], Item]) -> list[Item]:
    """What `parse` makes of the JSON object in each line that is not blank; `parse` raises ValueError.

    Raises ConfigError for an unreadable or empty file, and for bad lines, with one line of text for each.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other line separators may stand in a JSON text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
    found: list[Item] = []
    faults: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(parse(_object(line)))
        except ValueError as error:
            faults.append(f"{flag} {path}, line {number}: {error}")
    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = [f"{flag} {path}: {len(faults) - MOST_FAULTS} more bad lines"]
    if faults:
        raise ConfigError("\n".join(faults))
    if not found:
        raise ConfigError(f"{flag} {path} has no line")
    return found


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"write a JSON object instead of {line.strip()[:40]}")
    return value


def literal_question(value: dict[str, Any]) -> Question:
    """The request of {"prompt": ...} or {"messages": ...}; other fields but "max_tokens" are left out.

    Raises ValueError for another form.
    """
    if ("prompt" in value) == ("messages" in value):
        raise ValueError('write {"prompt": TEXT or [IDS]} or {"messages": [...]}')
    prompt, messages = value.get("prompt"), value.get("messages")
    is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    if "prompt" in value and not (prompt and (isinstance(prompt, str) or is_ids)):
        raise ValueError('"prompt" is a text or a list of token ids, and not empty')
    if "messages" in value and not (
        isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    ):
        raise ValueError('"messages" is a list of objects, and not empty')
    if "max_tokens" in value:
        positive(value, "max_tokens")
    kept: dict[str, Any] = {
        name: value[name] for name in ("prompt", "messages", "max_tokens") if name in value
    }
    return Question(path=CHAT if "messages" in value else COMPLETION, body=kept)


def positive(value: dict[str, Any], name: str) -> int:
    """The field `name`, from 1 to MOST_LENGTH. Raises ValueError for any other value or none."""
    found = value.get(name)
    if type(found) is not int or found < 1:
        raise ValueError(f'"{name}" is a whole number from 1 up, not {json.dumps(found)[:40]}')
    if found > MOST_LENGTH:
        raise ValueError(f'"{name}" is at most {MOST_LENGTH}, not {json.dumps(found)[:40]}')
    return found
