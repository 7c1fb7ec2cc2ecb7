"""Finds tool calls in the text of an answer while it grows.

A grammar (`text/grammars`) guarantees their form.
"""

import re
import secrets
from dataclasses import dataclass

from ..api.tool_bodies import OPEN

HEAD = re.compile(r'\s*\{"name": "([^"]*)", "arguments": ')


@dataclass(frozen=True)
class CallPart:
    """A part of a tool call. The first part has id and name; every part has a piece of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ArgumentScanner:
    """Finds the end of one JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """The number of characters of `text` that belong to the object; None when all do and more may
        follow."""
        for at, char in enumerate(text):
            if self._is_in_string:
                self._read_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False


class CallReader:
    """Splits the text of one choice into plain text and tool calls.

    With `only_first` the text begins with a call or has none. This is needed for JSON answers, whose strings
    may spell anything.
    """

    def __init__(self, *, only_first: bool = False) -> None:
        self._held = ""
        self._only_first = only_first
        self._is_plain = False  # no call can follow
        self._scanner: ArgumentScanner | None = None  # scanner of the arguments being read
        self._is_in_call = False
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"CallReader({self.num_calls} calls, held={len(self._held)})"

    def feed(self, text: str) -> tuple[str, list[CallPart]]:
        """The new (plain text, parts of calls) that `text` completes."""
        self._held += text
        said, parts = "", []
        while True:
            before = (len(self._held), self._is_in_call, self._scanner is not None)
            if self._scanner is not None:
                parts += self._read_arguments()
            elif self._is_in_call:
                parts += self._read_head()
            else:
                said += self._read_text()
            if (len(self._held), self._is_in_call, self._scanner is not None) == before:
                return said, parts

    def flush(self) -> str:
        """Ends the text: the plain text that was withheld so far."""
        held, self._held = self._held, ""
        return "" if self._is_in_call or self._scanner is not None or self.num_calls else held

    def _read_text(self) -> str:
        """Reads up to the next call. Text after the first call is dropped."""
        self._is_plain |= (
            self._only_first and not self.num_calls and not OPEN.startswith(self._held[: len(OPEN)])
        )
        at = -1 if self._is_plain else self._held.find(OPEN)
        if self._is_plain:
            said, self._held = self._held, ""
        elif at >= 0:
            said, self._held, self._is_in_call = self._held[:at], self._held[at + len(OPEN) :], True
        else:
            keep = next(
                n for n in range(min(len(OPEN) - 1, len(self._held)), -1, -1) if self._held.endswith(OPEN[:n])
            )
            cut = len(self._held) - keep
            said, self._held = self._held[:cut], self._held[cut:]
        return said if not self.num_calls else ""

    def _read_head(self) -> list[CallPart]:
        found = HEAD.match(self._held)
        if found is None:
            return []
        self._held, self._scanner = self._held[found.end() :], ArgumentScanner()
        self.num_calls += 1
        return [CallPart(self.num_calls - 1, f"call_{secrets.token_hex(12)}", found.group(1))]

    def _read_arguments(self) -> list[CallPart]:
        assert self._scanner is not None
        end = self._scanner.end_in(self._held)
        text, rest = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        self._held = rest
        if end is not None:
            self._scanner, self._is_in_call = None, False
        return [CallPart(self.num_calls - 1, arguments=text)] if text else []
