"""Hermes and Qwen: `<tool_call>`, a JSON object of `name` and `arguments`, `</tool_call>`.

`GuidedReader` reads answers that follow a grammar (`text/grammars`), which guarantees this form: arguments go
out while they grow. `HermesReader` reads answers without one.
"""

import re

from ..api.tool_bodies import CLOSE, OPEN
from .blocks import BROKEN, Block, BlockReader, JsonEnd, call_of, skip_space
from .parts import NOTHING, CallPart, Split, held_back, new_call_id

HEAD = re.compile(r'\s*\{"name": "([^"]*)", "arguments": ')


class HermesReader(BlockReader):
    """Reads calls of any JSON."""

    OPENERS = (OPEN,)

    def begin_block(self) -> None:
        self._json = JsonEnd()

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        start = skip_space(held, len(OPEN))
        end = self._json.of(held, start)
        if end is not None and end != BROKEN:
            rest = skip_space(held, end)
            if held.startswith(CLOSE, rest) or (is_last and rest == len(held)):
                call = call_of(held[start:end], "{}")
                length = min(len(held), rest + len(CLOSE))
                return Block(length, (call,)) if call is not None else Block(len(OPEN), None)
            if not is_last and CLOSE.startswith(held[rest:]):
                return None
        elif end is None and not is_last:
            return None
        return Block(len(OPEN), None)


class GuidedReader:
    """Splits the text of a guided answer.

    With `only_first` the text begins with a call or has none. This is needed for JSON answers, whose strings
    may spell anything. Text after the first call is dropped.
    """

    is_thinking = False

    def __init__(self, *, only_first: bool = False) -> None:
        self._held = ""
        self._only_first = only_first
        self._is_plain = False  # no call can follow
        self._json: JsonEnd | None = None  # finds the end of the arguments being read
        self._is_in_call = False
        self.num_calls = 0

    def __repr__(self) -> str:
        return f"GuidedReader({self.num_calls} calls, held={len(self._held)})"

    def feed(self, text: str) -> Split:
        self._held += text
        split = NOTHING
        while True:
            before = (len(self._held), self._is_in_call, self._json is not None)
            if self._json is not None:
                split += Split(calls=self._read_arguments(self._json))
            elif self._is_in_call:
                split += Split(calls=self._read_head())
            else:
                split += Split(self._read_text())
            if (len(self._held), self._is_in_call, self._json is not None) == before:
                return split

    def flush(self) -> Split:
        held, self._held = self._held, ""
        return Split("" if self.num_calls else f"{OPEN if self._is_in_call else ''}{held}")

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
            cut = len(self._held) - held_back(self._held, (OPEN,))
            said, self._held = self._held[:cut], self._held[cut:]
        return said if not self.num_calls else ""

    def _read_head(self) -> tuple[CallPart, ...]:
        found = HEAD.match(self._held)
        if found is None:
            return ()
        self._held, self._json = self._held[found.end() :], JsonEnd()
        self.num_calls += 1
        return (CallPart(self.num_calls - 1, new_call_id(), found.group(1)),)

    def _read_arguments(self, json: JsonEnd) -> tuple[CallPart, ...]:
        end = json.in_(self._held)
        text, rest = (self._held, "") if end is None else (self._held[:end], self._held[end:])
        self._held = rest
        if end is not None:
            self._json, self._is_in_call = None, False
        return (CallPart(self.num_calls - 1, arguments=text),) if text else ()
