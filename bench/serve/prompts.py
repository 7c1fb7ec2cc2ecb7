"""Prompts of `baton bench serve`: random tokens of given lengths, or the lines of a file."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Lengths = tuple[int, int]  # smallest and largest, in tokens


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request: its path, and the part of the body that differs between requests."""

    path: str
    body: dict[str, Any]


def random_prompts(
    rng: random.Random, *, inputs: Lengths, outputs: Lengths, vocab: int, prefix: int
) -> Iterator[Question]:
    """Endless random prompts. All begin with the same `prefix` tokens; ids are 3 to `vocab` - 1."""
    head = [rng.randrange(3, vocab) for _ in range(prefix)]
    while True:
        num_input, num_output = rng.randint(*inputs), rng.randint(*outputs)
        ids = (head + [rng.randrange(3, vocab) for _ in range(max(1, num_input - prefix))])[
            : max(1, num_input)
        ]
        yield Question(path=COMPLETION, body={"prompt": ids, "max_tokens": num_output})


def file_prompts(path: Path, rng: random.Random, outputs: Lengths) -> Iterator[Question]:
    """The prompts of a JSONL file, repeated without end.

    A line is {"prompt": text or ids} or {"messages": [...]}, and may have its own "max_tokens". Raises
    ConfigError for an unreadable file or a line of another form.
    """
    questions = _read(path)

    def again() -> Iterator[Question]:
        while True:
            for question in questions:
                yield Question(path=question.path, body={"max_tokens": rng.randint(*outputs)} | question.body)

    return again()


def _read(path: Path) -> list[Question]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from None
    found = [
        _question(line, f"--prompts {path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise ConfigError(f"--prompts {path} has no line")
    return found


def _question(line: str, where: str) -> Question:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise ConfigError(f'{where}: write {{"prompt": TEXT or [IDS]}} or {{"messages": [...]}}')
    kept = {name: value[name] for name in ("prompt", "messages", "max_tokens") if name in value}
    return Question(path=CHAT if "messages" in value else COMPLETION, body=kept)
