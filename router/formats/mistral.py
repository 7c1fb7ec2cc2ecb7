"""Mistral: `[TOOL_CALLS]` and a list of JSON objects, or in later versions a name and its arguments.

[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, ...]
[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]...
[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]...
"""

import re

import msgspec

from .blocks import BROKEN, Block, BlockReader, Calls, JsonEnd, arguments_of, call_of, skip_space

OPENER, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
NAME_SO_FAR = re.compile(r"[\w.-]*(?:\[[A-Z_]*\]?\w*)*\s*")


class MistralReader(BlockReader):
    """Reads calls of all versions."""

    OPENERS = (OPENER,)

    def begin_block(self) -> None:
        self._json = JsonEnd()

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        broken = Block(len(OPENER), None)
        start = skip_space(held, len(OPENER))
        name = ""
        if start == len(held):
            return broken if is_last else None
        if held[start] != "[":
            found = NAME.match(held, start)
            if found is None:
                is_open = NAME_SO_FAR.fullmatch(held, start) is not None
                return None if is_open and not is_last else broken
            name, start = found[1], found.end()
        end = self._json.of(held, start)
        if end is None and not is_last:
            return None
        if end is None or end == BROKEN:
            return broken
        calls = _named(name, held[start:end]) if name else _listed(held[start:end])
        return broken if calls is None else Block(end, calls)


def _named(name: str, text: str) -> Calls | None:
    arguments = arguments_of(text)
    return None if arguments is None else ((name, arguments),)


def _listed(text: str) -> Calls | None:
    try:
        calls = [
            call_of(bytes(raw).decode(), "{}") for raw in msgspec.json.decode(text, type=list[msgspec.Raw])
        ]
    except (msgspec.DecodeError, RecursionError):
        return None
    known = tuple(call for call in calls if call is not None)
    return known if known and len(known) == len(calls) else None
