"""Finds every field of a body that its type does not have.

The decoders stop at the first unknown field. This walk names all of them, for one error or to leave them
out. It runs only for bodies with such a field.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from ...cluster.config.fields import did_you_mean
from ..errors import ApiError, bad_request, printable
from .response_bodies import ResponseBody
from .response_items import ITEMS

MAX_VISITED = 20_000  # objects and list elements of a body; about 10 ms
MAX_NAMED = 32  # fields in one error
SWITCHES, SWITCH_KWARGS = ("enable_thinking", "thinking"), "chat_template_kwargs"


@dataclass(frozen=True)
class UnknownField:
    """A field that the type of its object does not have."""

    where: str  # path of its object, such as "messages[0]"; "": the body
    name: str
    holder: dict[str, Any]
    known: tuple[str, ...]  # the fields of the object's type

    @property
    def path(self) -> str:
        return f"{self.where}.{self.name}" if self.where else self.name

    @property
    def param(self) -> str:
        """The field of the body that it is, or is in."""
        return self.path.partition(".")[0].partition("[")[0] if self.where else self.name


class _Walk:
    """One walk over a body."""

    def __init__(self) -> None:
        self._num_visited = 0

    def find(self, value: object, kind: inspect.Type, where: str) -> Iterator[UnknownField]:
        self._num_visited += 1
        if self._num_visited > MAX_VISITED:
            return
        if isinstance(kind, inspect.Metadata):
            yield from self.find(value, kind.type, where)
        elif isinstance(kind, inspect.UnionType):
            chosen = next((one for one in kind.types if _fits(value, one)), None)
            if chosen is not None:
                yield from self.find(value, chosen, where)
        elif isinstance(kind, inspect.ListType) and isinstance(value, list):
            for number, item in enumerate(value):
                yield from self.find(item, kind.item_type, f"{where}[{number}]")
        elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
            yield from self._find_in_object(value, kind, where)

    def _find_in_object(
        self, value: dict[str, Any], kind: inspect.StructType, where: str
    ) -> Iterator[UnknownField]:
        if kind.tag_field is not None and value.get(kind.tag_field, kind.tag) != kind.tag:
            return  # another kind of object, whose fields are unknown; the decoder refuses it
        types = {field.encode_name: field.type for field in kind.fields}
        for name, item in value.items():
            if name in types:
                inner = f"{where}.{name}" if where else name
                if kind.cls is ResponseBody and name == "input":
                    yield from self._find_in_items(item)
                else:
                    yield from self.find(item, types[name], inner)
            elif name != kind.tag_field:
                yield UnknownField(where, name, value, tuple(types))

    def _find_in_items(self, items: object) -> Iterator[UnknownField]:
        """The input of /v1/responses, each item of which has a type by its `type`."""
        for number, item in enumerate(items if isinstance(items, list) else ()):
            kind = ITEMS.get(item.get("type") or "message") if isinstance(item, dict) else None
            if kind is not None:
                yield from self.find(item, inspect.type_info(kind), f"input[{number}]")


def unknown_fields(body: object, kind: type) -> list[UnknownField]:
    """The unknown fields of a decoded body, in order; of a very large body, those of its beginning."""
    return list(_Walk().find(body, inspect.type_info(kind), ""))


def unknown_field_error(found: list[UnknownField]) -> ApiError:
    """The ApiError (400) that names all of them; there is at least one."""
    names = [printable(one.path) for one in found[:MAX_NAMED]]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    hints = [_hint(one) for one in found[:MAX_NAMED]]
    if len(found) == 1:
        text = f"{names[0]} is not a field of this request{hints[0]}"
    else:
        told = [f"{name} ({hint[2:]})" if hint else name for name, hint in zip(names, hints, strict=True)]
        text = f"{', '.join(told)}{more} are not fields of this request"
    if any(".content[" in one.where for one in found):
        text += "; parts of a message's content are text"
    return bad_request(text, param=found[0].param, code="unknown_parameter")


def without(raw: bytes, kind: type) -> tuple[bytes, list[str]]:
    """A body without its unknown fields, and their paths. Raises one of UNREADABLE."""
    body = msgspec.json.decode(raw)
    found = unknown_fields(body, kind)
    for one in found:
        del one.holder[one.name]
    return msgspec.json.encode(body), [one.path for one in found]


def _hint(one: UnknownField) -> str:
    if one.name in SWITCHES and SWITCH_KWARGS in one.known:
        return f"; templates take it in {SWITCH_KWARGS}"
    return did_you_mean(one.name, one.known)


def _fits(value: object, kind: inspect.Type) -> bool:
    """Whether a member of a union is the one for `value`."""
    if isinstance(kind, inspect.Metadata):
        return _fits(value, kind.type)
    if isinstance(kind, inspect.ListType):
        return isinstance(value, list)
    if not isinstance(kind, inspect.StructType) or not isinstance(value, dict):
        return False
    return kind.tag_field is None or value.get(kind.tag_field) == kind.tag
