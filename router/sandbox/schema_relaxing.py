"""Weakens JSON schemas that llguidance, as of 1.9, does not follow.

Formats that it does not know are left out of every schema: JSON Schema takes a `format` for a note unless a
reader says otherwise. Arguments of a function that is not `strict` follow what can be enforced, as with other
servers: libraries add keywords (`uniqueItems`, `propertyNames`, patterns with look-ahead) to schemas of
tools, and one of forty tools is no reason to refuse a request. What is left out only forbids.
"""

import json
import re
from collections.abc import Callable

from llguidance import LLMatcher

from .schema_rewrite import OF_NAMED_SCHEMAS, OF_SCHEMA, OF_SCHEMAS, Json

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
ANY_OBJECT: dict[str, Json] = {"type": "object"}
MAX_ROUNDS = 8  # each leaves something out
# A schema that says nothing sensible, by words of llguidance, is refused all the same.
WRONG = ("Invalid type", "does not exist", "Unsatisfiable", "does not fetch")
UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[[^]]*\])")
Change = Callable[[dict[str, Json]], dict[str, Json]]


def without_unknown_formats(schema: Json) -> Json:
    """A copy of a schema without formats that nothing here enforces. Raises RecursionError."""
    return _changed(schema, _drop_format)


def relaxed(schema: Json, fault: str) -> Json | None:
    """A weaker schema, for llguidance's `fault` of this one; at last that of any object. None for one that is
    wrong.
    """
    if any(words in fault for words in WRONG):
        return None
    weaker: Json = schema
    if found := UNKNOWN_KEYS.search(fault):
        names = frozenset(json.loads(found[1]))
        weaker = _changed(schema, lambda part: {key: part[key] for key in part if key not in names})
    elif "oneOf" in fault:
        weaker = _changed(schema, _join_one_of)
    elif "regex" in fault:
        weaker = _changed(schema, _drop_patterns)
    if weaker != schema:
        return weaker
    return None if schema == ANY_OBJECT else ANY_OBJECT


def _changed(schema: Json, change: Change) -> Json:
    """A copy of a schema with `change` made to each schema in it."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Json] = {}
    for key, value in schema.items():
        if key in OF_NAMED_SCHEMAS and isinstance(value, dict):
            made[key] = {name: _changed(part, change) for name, part in value.items()}
        elif key in OF_SCHEMAS and isinstance(value, list):
            made[key] = [_changed(part, change) for part in value]
        else:
            made[key] = _changed(value, change) if key in OF_SCHEMA else value
    return change(made)


def _drop_format(part: dict[str, Json]) -> dict[str, Json]:
    form = part.get("format")
    is_unknown = isinstance(form, str) and form not in FORMATS
    return {key: part[key] for key in part if key != "format"} if is_unknown else part


def _join_one_of(part: dict[str, Json]) -> dict[str, Json]:
    """Any of several in the place of exactly one."""
    if "oneOf" not in part:
        return part
    made = {key: part[key] for key in part if key != "oneOf"}
    if "anyOf" not in part:
        return made | {"anyOf": part["oneOf"]}
    others = part.get("allOf")
    return made | {"allOf": [*(others if isinstance(others, list) else []), {"anyOf": part["oneOf"]}]}


def _drop_patterns(part: dict[str, Json]) -> dict[str, Json]:
    """Leaves out patterns that cannot be compiled; of names, all of them."""
    made = dict(part)
    if not _is_regex(made.get("pattern", "")):
        del made["pattern"]
    names = made.get("patternProperties")
    if isinstance(names, dict) and not all(map(_is_regex, names)):
        del made["patternProperties"]
        made.pop("additionalProperties", None)
    return made


def _is_regex(pattern: Json) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not LLMatcher.validate_grammar(grammar)
