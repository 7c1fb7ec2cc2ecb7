"""The parts into which readers split the text of an answer: reasoning, plain text and tool calls."""

import secrets
from typing import NamedTuple, Protocol

from msgspec import Struct


class CallPart(Struct, frozen=True, gc=False):
    """A part of a tool call. The first part has id and name; every part has a piece of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Split(NamedTuple):
    """What a piece of text adds to the parts of an answer."""

    text: str = ""
    calls: tuple[CallPart, ...] = ()
    reasoning: str = ""

    def __add__(self, other: "Split") -> "Split":  # type: ignore[override]
        return Split(self.text + other.text, self.calls + other.calls, self.reasoning + other.reasoning)


NOTHING = Split()


class Reader(Protocol):
    """Splits one answer. `feed` takes its text in pieces of any size; their sizes change no result."""

    @property
    def num_calls(self) -> int: ...

    @property
    def is_thinking(self) -> bool:
        """Whether the text fed next continues reasoning."""

    def feed(self, text: str) -> Split:
        """The parts that `text` completes."""

    def flush(self) -> Split:
        """Ends the text: what was withheld so far. A call that is not complete becomes text."""


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """The number of characters at the end of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        tail = text[-count:]
        if any(len(marker) > count and marker.startswith(tail) for marker in markers):
            return count
    return 0
