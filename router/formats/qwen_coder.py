"""Qwen3-Coder and later Qwen: calls as elements, in which every argument is text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

The tools' schemas say which values are text and which are JSON. Models sometimes leave out `<tool_call>`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..api.tool_bodies import CLOSE, OPEN, Tool
from .blocks import Block, BlockReader, json_of, skip_space

FUNCTION, FUNCTION_END = "<function=", "</function>"
HEAD = re.compile(r"<function=([^>\n]+)>")
PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
WORDS = {"true": True, "false": False, "null": None, "none": None}
Types = Mapping[str, frozenset[str]]  # JSON types of each argument


class QwenCoderReader(BlockReader):
    """Reads calls of tools whose schemas it knows."""

    OPENERS = (OPEN, FUNCTION)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        self._types = {tool.function.name: types_of(tool.function.schema) for tool in tools}

    def begin_block(self) -> None:
        self._num_seen = 0

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        opener = OPEN if held.startswith(OPEN) else FUNCTION
        start = skip_space(held, len(OPEN)) if opener == OPEN else 0
        if (
            not is_last
            and FUNCTION.startswith(held[start : start + len(FUNCTION)])
            and held.find(FUNCTION, start) < 0
        ):
            return None
        if not held.startswith(FUNCTION, start):
            return Block(len(opener), None)
        end = held.find(FUNCTION_END, self._num_seen)
        while end >= 0:
            end += len(FUNCTION_END)
            call = self._call_of(held, start, end)
            if call is not None:
                return self._closed(held, end, call, opener, is_last=is_last)
            end = held.find(FUNCTION_END, end)
        self._num_seen = max(0, len(held) - len(FUNCTION_END))
        return Block(len(opener), None) if is_last else None

    def _closed(
        self, held: str, end: int, call: tuple[str, str], opener: str, *, is_last: bool
    ) -> Block | None:
        """The block of a complete function, with the marker after it."""
        if opener == FUNCTION:
            return Block(end, (call,))
        rest = skip_space(held, end)
        if held.startswith(CLOSE, rest):
            return Block(rest + len(CLOSE), (call,))
        if CLOSE.startswith(held[rest:]):
            return Block(len(held), (call,)) if is_last else None
        return Block(end, (call,))

    def _call_of(self, held: str, start: int, end: int) -> tuple[str, str] | None:
        """The call in `held[start:end]`; None when it is not one, or not a whole one."""
        head = HEAD.match(held, start)
        if head is None:
            return None
        name, at = head[1].strip(), head.end()
        types = self._types.get(name, {})
        arguments: dict[str, object] = {}
        while found := PARAMETER.match(held, at, end):
            key, at = found[1].strip(), found.end()
            arguments[key] = value_of(found[2], types.get(key, frozenset()))
        is_whole = skip_space(held, at) == end - len(FUNCTION_END)
        return (name, json_of(arguments)) if is_whole else None


def types_of(schema: bytes) -> Types:
    """The JSON types of the properties of an object's schema; empty sets where it names none."""
    known: Any = msgspec.json.decode(schema)
    properties = known.get("properties") if isinstance(known, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: frozenset(_types_in(value)) for key, value in properties.items()}


def _types_in(schema: Any) -> set[str]:  # noqa: ANN401 - JSON
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(key) or ():
            types |= _types_in(part)
    return types


def value_of(text: str, types: frozenset[str]) -> object:
    """An argument as JSON: text where its types say so or nothing, else what the text spells in JSON."""
    if not types or ("string" in types and text.strip().lower() not in ("null", "none")):
        return text
    if "string" in types:
        return None if "null" in types else text
    word = text.strip()
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    try:
        return msgspec.json.decode(word)
    except (msgspec.DecodeError, RecursionError):
        return text
