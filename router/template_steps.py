"""The steps of chat templates that are rendered in the router: each pays for what it takes and makes, in units.

A unit is about a tenth of a microsecond: a node of the template, CHARS_PER_UNIT characters, a quarter of a list's item. Who
has none left stops with OutOfFuel. What a step does to a value of a kind that templates rarely have there, or to one that
could be larger than it looks, is not worked out: it stops with Unusual. In both cases a worker renders the chat instead.
Otherwise a step does exactly what Jinja's own filter, operator or Python's method of that name does.
"""

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from operator import length_hint
from typing import Any, TypeAlias

from jinja2 import Undefined, pass_context
from jinja2.filters import FILTERS as JINJA
from jinja2.runtime import Context

Value: TypeAlias = Any  # JSON's kinds, Undefined, a namespace, a loop, a generator of Jinja's
SCALARS = frozenset({str, int, float, bool, type(None), Undefined})
TEXT = {str}
LISTS = frozenset({list, tuple})
ITEMS: type[Iterator[Value]] = type(iter([]))  # in place of Jinja's generators


class Safe(str):
    """A text marked as safe, which is a text where it is shown. In a sum Jinja would escape what is beside it."""

    __slots__ = ()

    def __getitem__(self, key: object) -> str:
        raise Unusual  # a part of it would be safe, too


KEPT = SCALARS | LISTS | {dict, Safe}
MAX_STRIPPED = 100  # kinds of characters at a text's ends
MAX_BITS = 64  # of an integer: to divide or to show a long one takes as long as the square of its length
NO_NUMBER = 16  # units: to find that a text is none
OPERATORS: dict[str, Callable[[Value, Value], Value]] = {
    "-": operator.sub,
    "/": operator.truediv,
    "//": operator.floordiv,
}
OPERATORS |= {"%": operator.mod}
OF_SCALARS = ("trim", "upper", "lower", "title", "capitalize", "string", "int", "float")
OF_TEXT = ("strip", "lstrip", "rstrip", "upper", "lower", "title", "capitalize", "startswith", "endswith")
SEARCHES = ("split", "rsplit", "find", "count")
OF_MAPPINGS = ("items", "keys", "values", "get")
PER_ITEM = ("selectattr", "rejectattr", "select", "reject", "map")
FILTERS = frozenset(
    (*OF_SCALARS, *PER_ITEM, "length", "count", "default", "d", "tojson", "list", "first", "last", "items")
)
FILTERS |= {"join", "replace", "safe"}
METHODS = frozenset((*OF_TEXT, *SEARCHES, *OF_MAPPINGS, "replace", "join"))


class OutOfFuel(Exception):
    """The rendering took all it may."""


class Unusual(Exception):
    """A value that is left to a worker."""


class Meter:
    """What one rendering may still take, and the steps that it pays."""

    def __init__(self) -> None:
        self.left = 0  # units

    def __repr__(self) -> str:
        return f"Meter({self.left} units left)"

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise OutOfFuel

    def steps(self) -> dict[str, Callable[..., Value]]:
        """By the names that `template_rules` gives them."""
        steps: dict[str, Callable[..., Value]] = {
            "_round": self.spend,
            "_tested": self.tested,
            "_plain": self.plain,
            "_kept": self.kept,
            "_made": self.made,
            "_shown": self.shown,
            "_sum": self.added,
            "_concat": self.concat,
        }
        steps |= {f"_{name}": self._comparison(name) for name in ("eq", "ne", "lt", "lteq", "gt", "gteq")}
        steps |= {"_in": self.contains, "_notin": lambda value, of: not self.contains(value, of)}
        steps |= {name: self._of_scalars(name, JINJA[name]) for name in OF_SCALARS}
        steps |= {name: self._per_item(name) for name in PER_ITEM}
        steps |= {"length": len, "count": len, "default": JINJA["default"], "d": JINJA["default"]}
        steps |= {"tojson": self.as_json, "list": self.as_list, "join": self.joined, "replace": self.replaced}
        steps |= {"first": lambda value: self._end(value, 0), "last": lambda value: self._end(value, -1)}
        steps |= {f".{name}": self._of_text(name) for name in OF_TEXT}
        steps |= {f".{name}": self._search(getattr(str, name)) for name in SEARCHES}
        steps |= {f".{name}": self._of_mapping(getattr(dict, name)) for name in OF_MAPPINGS}
        steps |= {".replace": self._replace_in_text, ".join": self._join_by_text}
        return steps | {"items": self.items, "safe": self.safe}

    def tested(self, value: Value, units: int) -> Value:
        """The outcome of a loop's condition, which took `units`."""
        self.spend(units)
        return value

    def plain(self, value: Value) -> Value:
        """A value that holds no others."""
        kind = type(value)
        if kind not in SCALARS or (kind is int and value.bit_length() > MAX_BITS):
            raise Unusual
        return value

    def kept(self, value: Value) -> Value:
        """A value that may be a field of a namespace, which no namespace is."""
        if type(value) not in KEPT:
            raise Unusual
        return value

    def shown(self, value: Value) -> Value:
        """A value that becomes a part of the text."""
        kind = type(value)
        if kind is str:
            self.left -= 1 + (len(value) >> 3)
            if self.left < 0:
                raise OutOfFuel
        elif kind is Safe:
            self.spend(1 + (len(value) >> 3))
        else:
            self.left -= 8 * (kind is float)  # of which the shortest digits are searched for
            self.plain(value)
        return value

    def safe(self, value: Value) -> Value:
        """As text that needs no escaping, of which templates of chats know none."""
        return value if type(value) is Safe else Safe(self.made(str(self.plain(value))))

    def made(self, value: Value) -> Value:
        """A value that was not there before; no value that is paid for is more than doubled until then."""
        kind = type(value)
        if kind is str:
            self.left -= 1 + (len(value) >> 3)
            if self.left < 0:
                raise OutOfFuel
        elif kind in LISTS:
            self.spend(1 + 4 * len(value))
        else:
            self.plain(value)
        return value

    def added(self, *summands: Value) -> Value:
        """Of two or more, from left to right."""
        if set(map(type, summands)) == TEXT:
            return self._glued(summands)
        total, *others = summands
        for other in others:
            total = self._two(total, other)
        return total

    def concat(self, *values: Value) -> str:
        """Two or more as one text."""
        return self._glued([str(value if type(value) is Safe else self.plain(value)) for value in values])

    def _glued(self, texts: Sequence[str]) -> str:
        self.spend(1 + (sum(map(len, texts)) >> 3))
        return "".join(texts)

    def _two(self, left: Value, right: Value) -> Value:
        if type(left) is Safe or type(right) is Safe:
            raise Unusual
        if type(left) is not type(right) and not (
            isinstance(left, (int, float)) and isinstance(right, (int, float))
        ):
            raise Unusual
        return self.made(left + right)

    def calculated(self, by: str, left: Value, right: Value) -> Value:
        """Of numbers; `%` of texts would be formatting, of any width."""
        if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            raise Unusual
        return self.made(OPERATORS[by](self.plain(left), self.plain(right)))

    def contains(self, value: Value, of: Value) -> bool:
        """value in of."""
        self.plain(value)
        size = len(value) if type(value) is str else 1
        if type(of) in LISTS:
            self.spend(1 + len(of) * (1 + (size >> 6)))
        elif type(of) is str and type(value) is str:
            self._search_for(of, value)
        elif type(of) is dict:
            self.spend(1 + (size >> 3))
        else:
            raise Unusual
        return value in of

    def as_json(
        self, value: Value, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False
    ) -> str:
        """As `transformers` writes it, which escapes nothing for HTML."""
        self.spend(12)  # for a writer of its own
        self._weigh(value, 1 if indent is None else 4, 0)
        made = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)
        self.made(made)
        return made

    def as_list(self, value: Value) -> list[Value]:
        if type(value) in LISTS or type(value) in (str, dict):
            self.spend(1 + 4 * len(value))
            return list(value)
        self.spend(1 + 4 * length_hint(self._items(value)))
        return list(value)

    def items(self, value: Value) -> Iterator[Value]:
        """Of a mapping; once, as from Jinja's generator."""
        if type(value) is not dict:
            raise Unusual
        self.spend(1 + 4 * len(value))
        return iter(list(value.items()))

    def joined(self, value: Value, by: Value = "") -> str:
        items = self._items(value)
        self.spend(1 + 4 * length_hint(items))
        pieces, between = [str(self.plain(item)) for item in items], str(self.plain(by))
        self.spend((sum(map(len, pieces)) + len(between) * len(pieces)) >> 3)
        return between.join(pieces)

    def replaced(self, value: Value, old: Value, new: Value, count: Value = None) -> str:
        return self._replace(str(self.plain(value)), str(self.plain(old)), str(self.plain(new)), count)

    def _replace_in_text(self, value: Value, old: Value, new: Value, count: Value = -1) -> str:
        if not (type(value) is str and type(old) is str and type(new) is str):
            raise Unusual
        return self._replace(value, old, new, count)

    def _join_by_text(self, between: Value, value: Value) -> str:
        if type(between) is not str or not (
            type(value) in LISTS and all(type(item) is str for item in value)
        ):
            raise Unusual
        return self.joined(value, between)

    def _replace(self, text: str, old: str, new: str, count: Value) -> str:
        count = -1 if count is None else count
        if type(count) is not int:
            raise Unusual
        self._search_for(text, old)
        self.spend(text.count(old) * (1 + (len(new) >> 3)) + (len(text) >> 3))
        return text.replace(old, new, count)

    def _items(self, value: Value) -> Iterator[Value]:
        """Of a list, or of what a filter takes from one item by item."""
        if type(value) is ITEMS:
            return value
        if type(value) not in LISTS:
            raise Unusual
        return iter(value)

    def _end(self, value: Value, index: int) -> Value:
        if type(value) is ITEMS and index == 0:
            return next(value)
        if not value or (type(value) is not str and type(value) not in LISTS):
            raise Unusual
        return value[index]

    def _weigh(self, value: Value, times: int, depth: int) -> None:
        """Pays for JSON `times` what that costs; it is as deep as the request was. Indented, it goes through each level."""
        kind, units = type(value), 4 if times == 1 else 4 + depth
        if kind is str:
            units += len(value) >> 3
        elif kind is dict:
            units += sum([4 + (len(key) >> 3) for key in value])
        elif kind not in LISTS:
            self.plain(value)
        self.left -= units * times
        if self.left < 0:
            raise OutOfFuel
        if kind is dict or kind in LISTS:
            for item in value.values() if kind is dict else value:
                self._weigh(item, times, depth + 1)

    def _search_for(self, text: str, sought: str) -> None:
        """What it costs to look for one text in another, at worst."""
        self.spend(1 + (len(text) >> 3) * (1 + (len(sought) >> 2)))

    def _of_scalars(self, name: str, work: Callable[..., Value]) -> Callable[..., Value]:
        def step(value: Value, *given: Value) -> Value:
            for one in (value, *given):
                self.shown(one)
            if type(value) is Safe:
                raise Unusual
            if name in ("int", "float"):
                self.spend(NO_NUMBER)
            if name == "title" and type(value) is str:  # word by word
                self.spend(len(value))
            if name == "int" and len(given) > 1:  # its base: without end, if it is a power of two
                raise Unusual
            if any(type(one) is str and len(one) > MAX_STRIPPED for one in given):
                raise Unusual
            return self.made(work(value, *given))

        return step

    def _of_text(self, name: str) -> Callable[..., Value]:
        of_scalars = self._of_scalars(name, getattr(str, name))

        def step(text: Value, *given: Value) -> Value:
            if type(text) is not str:
                raise Unusual
            return of_scalars(text, *given)

        return step

    def _search(self, work: Callable[..., Value]) -> Callable[..., Value]:
        def step(text: Value, *given: Value) -> Value:
            for one in (text, *given):
                self.plain(one)
            if type(text) is not str:
                raise Unusual
            sought = given[0] if given and type(given[0]) is str else ""
            self._search_for(text, sought)
            if work in (str.split, str.rsplit):
                self.spend(4 * (text.count(sought) if sought else len(text) >> 1) + (len(text) >> 3))
            return work(text, *given)

        return step

    def _of_mapping(self, work: Callable[..., Value]) -> Callable[..., Value]:
        def step(mapping: Value, *given: Value) -> Value:
            if type(mapping) is not dict:
                raise Unusual
            self.spend(1)
            return work(mapping, *given)

        return step

    def _per_item(self, name: str) -> Callable[..., Value]:
        work = JINJA[name]

        @pass_context
        def step(context: Context, value: Value, *given: Value, **options: Value) -> Value:
            self.spend(1 + 16 * length_hint(self._items(value)))
            return iter(
                list(work(context, value, *given, **options))
            )  # all at once, since that was paid; read once

        return step

    def _comparison(self, name: str) -> Callable[[Value, Value], bool]:
        work: Callable[[Value, Value], bool] = getattr(operator, {"lteq": "le", "gteq": "ge"}.get(name, name))

        def step(left: Value, right: Value) -> bool:
            if type(left) not in SCALARS and type(right) not in SCALARS:
                raise Unusual
            if type(left) is str is type(right):
                self.spend(1 + (min(len(left), len(right)) >> 6))
            return work(left, right)

        return step
