"""The base of readers whose calls stand in blocks of text: an opening marker, calls, and an end.

A block is withheld until it is complete. Then its calls are parts of the answer, each as a whole. The text of
a block without a valid call is plain text. So a call that clients have seen is complete, and no text of a
malformed one is lost.
"""

import json
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import msgspec

from .parts import NOTHING, CallPart, Split, held_back, new_call_id

Calls = tuple[tuple[str, str], ...]  # names, and arguments as JSON text
OUTSIDE_STRINGS = frozenset(" \t\r\n,:+-.0123456789truefalsnE")


class Block(NamedTuple):
    """A complete block: its length in characters, and its calls; None: it is plain text."""

    length: int
    calls: Calls | None


class BlockReader:
    """Splits text into plain text and the calls of blocks. Subclasses know the form of a block."""

    OPENERS: ClassVar[tuple[str, ...]]
    STARTS_TEXT: ClassVar[bool] = False  # a block stands at the beginning of the text, or after another block

    is_thinking = False

    def __init__(self) -> None:
        self._held = ""
        self._is_in_block = False
        self._has_text = False  # plain text other than white space has come
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_calls} calls, held={len(self._held)})"

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        """The block at the beginning of `held`; None while more of it must come.

        With `is_last` nothing more comes. A model may end its answer in place of the closing marker.
        """
        raise NotImplementedError

    def begin_block(self) -> None:
        """A block begins. Subclasses forget what they know of the one before it."""

    def feed(self, text: str) -> Split:
        self._held += text
        return self._read(is_last=False)

    def flush(self) -> Split:
        split = self._read(is_last=True)
        rest, self._held = self._held, ""
        return split + self._plain(rest)

    def _read(self, *, is_last: bool) -> Split:
        split = NOTHING
        while self._held:
            if not self._is_in_block:
                split += self._read_text()
                if not self._is_in_block:
                    break
            block = self.block_of(self._held, is_last=is_last)
            if block is None:
                break
            split += self._take(block)
        return split

    def _read_text(self) -> Split:
        """Plain text up to the next block. The possible beginning of a marker is withheld."""
        held = self._held
        if self.STARTS_TEXT:
            start = len(held) - len(held.lstrip())
            if self._has_text or not any(
                marker.startswith(held[start : start + len(marker)]) for marker in self.OPENERS
            ):
                self._held = ""
                return self._plain(held)
            at = [start] if held.startswith(self.OPENERS, start) else []
            keep = len(held)
        else:
            at = [found for marker in self.OPENERS if (found := held.find(marker)) >= 0]
            keep = held_back(held, self.OPENERS)
        if at:
            self._is_in_block, self._held = True, held[min(at) :]
            self.begin_block()
            return self._plain(held[: min(at)])
        cut = len(held) - max(keep, len(held) - len(held.rstrip()) if self.num_calls else 0)
        self._held = held[cut:]
        return self._plain(held[:cut])

    def _plain(self, text: str) -> Split:
        """Plain text. White space around calls is dropped."""
        if self.num_calls and not text.strip():
            return NOTHING
        self._has_text |= bool(text.strip())
        return Split(text)

    def _take(self, block: Block) -> Split:
        text, self._held = self._held[: block.length], self._held[block.length :]
        self._is_in_block = False
        if block.calls is None:
            self._has_text = True
            return Split(text)
        first = self.num_calls
        self.num_calls += len(block.calls)
        return Split(
            calls=tuple(
                CallPart(number, new_call_id(), name, arguments)
                for number, (name, arguments) in enumerate(block.calls, first)
            )
        )


def call_of(text: str, default: str = "") -> tuple[str, str] | None:
    """The call that a JSON object of `name` and `arguments` (or `parameters`) spells; None if it spells none.

    `default` are the arguments of an object without any.
    """
    try:
        call = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(call["name"], type=str)
    except (msgspec.DecodeError, KeyError, RecursionError):
        return None
    raw = call.get("arguments", call.get("parameters"))
    arguments = arguments_of(default if raw is None else bytes(raw).decode())
    return (name, arguments) if name and arguments is not None else None


def arguments_of(text: str) -> str | None:
    """The arguments of a call, JSON text of an object, as written; None if they are none."""
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return text.strip()


def skip_space(text: str, at: int) -> int:
    """The index of the first character of `text` from `at` on that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def json_of(arguments: Mapping[str, object]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


BROKEN = -1


class JsonEnd:
    """Finds the end of one JSON value in brackets, in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._num_seen = 0  # characters looked at by `of`
        self._end: int | None = None  # what `of` has found

    def in_(self, piece: str) -> int | None:
        """The number of characters of the next piece up to the end of the value.

        None while the value is open, BROKEN when it is no JSON.
        """
        for at, char in enumerate(piece):
            if self._is_in_string:
                self._read_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1 if self._depth == 0 else BROKEN
            elif self._depth == 0 or char not in OUTSIDE_STRINGS:
                return BROKEN
        return None

    def of(self, held: str, start: int) -> int | None:
        """The index after the value that begins at `start`; None while it is open, BROKEN for no JSON.

        `held` is the text of the call before, and more.
        """
        if self._end is None:
            begin = start + self._num_seen
            end = self.in_(held[begin:])
            self._end = end if end is None or end == BROKEN else begin + end
            self._num_seen = len(held) - start
        return self._end

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
