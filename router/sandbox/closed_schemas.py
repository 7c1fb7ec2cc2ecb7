"""Closes the objects of a JSON schema: keys that it does not name are forbidden, as the grammars of other
servers do by default.

JSON Schema allows any further key where a schema does not say `additionalProperties`, and a model that may
invent keys does so. An object stays as it is

- if it says `additionalProperties`, `patternProperties` or `unevaluatedProperties` itself;
- if it names no property, so that any object is meant;
- if it needs keys that it does not name;
- if it holds together with another schema (`allOf` of several, `anyOf` beside properties, `not`, `if`, a
  `$ref` with siblings): each alone would forbid the keys of the other.
"""

from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
MAPS = ("properties", "patternProperties", "$defs", "definitions")
SINGLES = ("items", "additionalProperties", "additionalItems", "contains", "unevaluatedItems")
LISTS = ("prefixItems", "items")
BRANCHES = ("anyOf", "oneOf")
SAYING = ("additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties")
JOINING = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef")
OWN = ("properties", "required", "allOf", "$ref", "not", "if")  # what branches hold together with


def closed(schema: object) -> object:
    """A copy of a schema whose objects are closed. Raises RecursionError for one nested too deeply."""
    return _closed(schema, _joined_refs(schema))


def _closed(schema: object, joined: frozenset[str], pointer: str = "#") -> object:
    """`joined` are the references that hold together with another schema."""
    if not isinstance(schema, dict):
        return schema
    made: Schema = {}
    is_branching = not any(key in schema for key in OWN)
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            value = {name: _closed(part, joined, f"{pointer}/{key}/{name}") for name, part in value.items()}
        elif key in SINGLES and isinstance(value, dict):
            value = _closed(value, joined, f"{pointer}/{key}")
        elif (key in LISTS or (key in BRANCHES and is_branching)) and isinstance(value, list):
            value = [_closed(part, joined, f"{pointer}/{key}/{at}") for at, part in enumerate(value)]
        made[key] = value
    if pointer not in joined and _is_closable(schema):
        made["additionalProperties"] = False
    return made


def _is_closable(schema: Schema) -> bool:
    named, needed = schema.get("properties"), schema.get("required", ())
    if not isinstance(named, dict) or not isinstance(needed, (list, tuple)):
        return False
    return all(name in named for name in needed) and not any(key in schema for key in (*SAYING, *JOINING))


def _joined_refs(schema: object) -> frozenset[str]:
    """The references inside of schemas that hold together with another one, and what these refer to."""
    found: set[str] = set()
    todo: list[tuple[object, bool]] = [(schema, False)]  # a part, and whether it is joined
    while todo:
        part, is_joined = todo.pop()
        if isinstance(part, list):
            todo += [(item, is_joined) for item in part]
        elif isinstance(part, dict):
            is_mixed = is_joined or len([key for key in part if key in OWN or key in BRANCHES]) > 1
            ref = part.get("$ref")
            if is_mixed and isinstance(ref, str) and (pointer := _pointer_of(ref)) not in found:
                found.add(pointer)
                todo.append((_at(schema, pointer), True))
            for key, value in part.items():
                several = key == "allOf" and isinstance(value, list) and len(value) > 1
                joins = key in JOINING and (is_mixed or several or key not in (*BRANCHES, "allOf", "$ref"))
                todo.append((value, joins))
    return frozenset(found)


def _pointer_of(ref: str) -> str:
    return unquote(ref).replace("~1", "/").replace("~0", "~")


def _at(schema: object, pointer: str) -> object:
    """The definition that a pointer such as "#/$defs/a" names; None for other pointers."""
    parts = pointer.split("/", 2)
    inside = schema.get(parts[1]) if isinstance(schema, dict) and len(parts) == 3 else None
    return inside.get(parts[2]) if isinstance(inside, dict) else None
