"""Rewrites JSON schemas where llguidance, as of 1.9, allows texts that a schema forbids.

Two cases are known:

1. A character class of a pattern that contains backspace, tab, form feed and carriage return, such as `[^"]`,
   is taken to contain the quotation mark and the backslash too. Such classes lose the backspace, so answers
   may not contain one there.
2. Undeclared names of an object may be written with escapes, so `{"\\u0061": 1}` passes as undeclared where
   `a` is declared. Names that follow a pattern have one spelling, so such objects get a pattern that every
   name follows. llguidance compiles no patterns that overlap, so objects with patterns of their own stay as
   they are.

Besides the backspace, a rewritten schema means the same.
"""

import re

Json = object
EVERY_NAME: dict[str, Json] = {"patternProperties": {"": {}}, "additionalProperties": False}
# keywords by what they hold
OF_SCHEMA = frozenset(
    {"additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else"}
)
OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
OF_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
NOT_BACKSPACE = "&&[^\\x08]]"
# A class without these has no backspace: a complement, an escape of other characters, or a control code.
MAY_HAVE_BACKSPACE = re.compile(r"^\[\^|\\[^dws.\-/\\\[\](){}*+?|^$]|[\x00-\x1f]|\[\^")
COMPLEMENT = re.compile(r"\\P(\{[^}]*\}|.)", re.DOTALL)  # all characters but those of a Unicode property


def rewritten(schema: Json, *, has_one_spelling: bool = True) -> Json:
    """The schema to compile. `schema` is not changed. Without `has_one_spelling` only patterns are rewritten.

    Raises RecursionError.
    """
    if not isinstance(schema, dict):
        return schema
    made = {key: _value(key, value, has_one_spelling) for key, value in schema.items()}
    is_open = bool(made.get("properties")) and made.get("additionalProperties") is not False
    parts = made.get("allOf", [])
    if has_one_spelling and is_open and not made.get("patternProperties") and isinstance(parts, list):
        made["allOf"] = [*parts, EVERY_NAME]
    return made


def _value(key: str, value: Json, has_one_spelling: bool) -> Json:
    def part_of(part: Json) -> Json:
        return rewritten(part, has_one_spelling=has_one_spelling)

    if isinstance(value, dict):
        if key in OF_NAMED_SCHEMAS:
            is_pattern = key == "patternProperties"
            return {_pattern(name) if is_pattern else name: part_of(part) for name, part in value.items()}
        return part_of(value) if key in OF_SCHEMA else value
    if isinstance(value, list) and key in OF_SCHEMAS:
        return [part_of(part) for part in value]
    return _pattern(value) if key == "pattern" and isinstance(value, str) else value


def _pattern(text: str) -> str:
    """A regular expression whose classes contain no backspace."""
    made, at = [], 0
    while at < len(text):
        end = _end_of_part(text, at)
        part = text[at:end]
        is_class = part[0] == "[" and MAY_HAVE_BACKSPACE.search(part)
        made.append(f"[{part}{NOT_BACKSPACE}" if is_class or COMPLEMENT.fullmatch(part) else part)
        at = end
    return "".join(made)


def _end_of_part(text: str, at: int) -> int:
    """The index behind the class, the escape or the single character that begins at `at`."""
    if text[at] == "\\":
        found = COMPLEMENT.match(text, at)
        return found.end() if found else at + 2
    if text[at] != "[":
        return at + 1
    depth, end = 0, at
    while end < len(text):
        if text[end] == "\\":
            end += 2
            continue
        depth += {"[": 1, "]": -1}.get(text[end], 0)
        end += 1
        if not depth:
            return end
    return len(text)  # without an end: llguidance refuses it
