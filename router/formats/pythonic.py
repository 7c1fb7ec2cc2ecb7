"""Llama 3.2, Llama 4 and ToolACE: the whole answer is a list of Python calls, `[f(a="x", b=[1, 2]), g()]`.

Some versions write it between `<|python_start|>` and `<|python_end|>`. Arguments are literals. A parser of
this file reads them, since Python's own would compile text of a model.
"""

import re
from typing import NoReturn

from .blocks import Block, BlockReader, json_of, skip_space

START, END = "<|python_start|>", "<|python_end|>"
BEGIN = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
BEGIN_SO_FAR = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*)?\s*")
TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_][\w.]*)|(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"""
    r"""|(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<mark>[][(){},=:]))""",
    re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
DEEPEST = 32


class PythonicReader(BlockReader):
    """Reads an answer that is one list of calls. An answer that begins otherwise has none."""

    OPENERS = (START, "[", END)
    STARTS_TEXT = True

    def begin_block(self) -> None:
        self._list = _ListEnd()

    def block_of(self, held: str, *, is_last: bool) -> Block | None:
        if held.startswith(END):
            return Block(len(END), () if self.num_calls else None)
        opener = START if held.startswith(START) else ""
        start = skip_space(held, len(opener))
        broken = Block(max(1, len(opener)), None)
        if BEGIN.match(held, start) is None:
            is_open = start == len(held) or BEGIN_SO_FAR.fullmatch(held, start) is not None
            return None if is_open and not is_last else broken
        end = self._list.of(held, start)
        if end is None:
            return broken if is_last else None
        try:
            calls = tuple(_Calls(held[start:end]).read())
        except ValueError:
            return broken
        return Block(end, calls)


class _ListEnd:
    """Finds the end of a list in brackets, in text that arrives in pieces."""

    def __init__(self) -> None:
        self._num_seen = self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def of(self, held: str, start: int) -> int | None:
        """The index after the list that begins at `start`; None while it is open."""
        for at in range(start + self._num_seen, len(held)):
            char = held[at]
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = char == "\\"
                self._quote = "" if char == self._quote else self._quote
            elif char in "\"'":
                self._quote = char
            elif char in "[({":
                self._depth += 1
            elif char in "])}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        self._num_seen = len(held) - start
        return None


class _Calls:
    """Parses a list of calls with literal arguments."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def read(self) -> list[tuple[str, str]]:
        """Names and arguments as JSON text. Raises ValueError for anything else than calls."""
        self._take("[")
        calls = []
        while not self._has("]"):
            calls.append(self._call())
            if not self._has(",", is_kept="]"):
                self._fail()
        if self._text[self._at :].strip():
            self._fail()
        return calls

    def _call(self) -> tuple[str, str]:
        name, arguments = self._name(), {}
        self._take("(")
        while not self._has(")"):
            key = self._name()
            self._take("=")
            arguments[key] = self._value(0)
            if not self._has(",", is_kept=")"):
                self._fail()
        return name, json_of(arguments)

    def _value(self, depth: int) -> object:
        kind, text = self._token()
        if depth > DEEPEST:
            self._fail()
        if kind == "text":
            return ESCAPE.sub(_unescaped, text[1:-1])
        if kind == "number":
            return float(text) if set(text) & set(".eE") else int(text[:4000])
        if kind == "name" and text in WORDS:
            return WORDS[text]
        if text in ("[", "("):
            return self._items("]" if text == "[" else ")", depth)
        if text == "{":
            return self._object(depth)
        return self._fail()

    def _items(self, closing: str, depth: int) -> list[object]:
        items = []
        while not self._has(closing):
            items.append(self._value(depth + 1))
            if not self._has(",", is_kept=closing):
                self._fail()
        return items

    def _object(self, depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        while not self._has("}"):
            key = self._value(depth + 1)
            self._take(":")
            made[str(key)] = self._value(depth + 1)
            if not self._has(",", is_kept="}"):
                self._fail()
        return made

    def _name(self) -> str:
        kind, text = self._token()
        return text if kind == "name" else self._fail()

    def _token(self) -> tuple[str, str]:
        found = TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            self._fail()
        self._at = found.end()
        return found.lastgroup, found[found.lastgroup]

    def _take(self, mark: str) -> None:
        if not self._has(mark):
            self._fail()

    def _has(self, mark: str, is_kept: str = "") -> bool:
        """Whether `mark` follows, which is read, or `is_kept`, which is not."""
        at = skip_space(self._text, self._at)
        if self._text.startswith(mark, at):
            self._at = at + len(mark)
            return True
        return bool(is_kept) and self._text.startswith(is_kept, at)

    def _fail(self) -> NoReturn:
        raise ValueError(f"no call at {self._at}")


def _unescaped(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    if code:
        return chr(int(code, 16))
    return ESCAPED.get(found[3], found[3] if found[3] in "\\\"'" else found[0])
