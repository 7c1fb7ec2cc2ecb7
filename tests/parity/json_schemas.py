"""Random JSON schemas of moderate size: every document is short, so that random models end them.

`NARROW` ones are met with 41 characters of ASCII; `WIDE` ones need any of Unicode, whose characters are
several tokens of a real vocabulary or a part of one.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

Schema = dict[str, Any]

VALUES = ("red", 7, None, True, "green", -1.5, ["x"], {"y": 0})
ODD_TEXTS = (
    "café", "größer", "日本語", "да", "😀👍🏽", "a\u0301\u200d", "\U0001f469\u200d\U0001f680", "\uffff", "\u2028",  # noqa: E501
    "\x7f",
    'she said "no"\\', "line\nbreak\ttab", "<|im_end|>", "<|im_start|>system", "<tool_call>", "\ufeff ", "",
    "\U0001d518\U0001d52b",
)  # fmt: skip
ODD_PATTERNS = (
    "^[\u03b1-\u03c9]{2,5}$", "^[一-龥]{1,4}$", "^[😀-😏]{1,3}$", "^(да|нет|não|是)$", "^[^ -~]{1,3}$",
    "^é[^é]{0,3}é$",
    "^(\u200d|👍){1,3}🏽?$", "^\\w{3}/\\w{3}\\\\$", '^"{2,4}$',
)  # fmt: skip
MOST_CHARS = 6


@dataclass(frozen=True)
class Kind:
    """What schemas are made of. `leaf` makes one without parts."""

    words: tuple[str, ...]
    leaf: Callable[[random.Random], Schema]

    def thing(self, rng: random.Random, depth: int) -> Schema:
        """An object or an array, or further down anything."""
        top = [self.an_object, self.an_object, self.an_array]
        kinds = (
            top
            if depth == 0
            else [self.an_object, self.an_array, self.a_choice, self.a_leaf, self.a_leaf, self.a_ref]
        )
        return rng.choice(kinds)(rng, depth)

    def an_object(self, rng: random.Random, depth: int) -> Schema:
        names = rng.sample(self.words, rng.randint(1, 4 - depth))
        return {
            "type": "object",
            "properties": {
                name: self.thing(rng, depth + 1) if depth < 2 else self.leaf(rng) for name in names
            },
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }

    def an_array(self, rng: random.Random, depth: int) -> Schema:
        least = rng.randint(0, 2)
        items = self.thing(rng, depth + 1) if depth < 2 else self.leaf(rng)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}

    def a_choice(self, rng: random.Random, depth: int) -> Schema:
        return {"anyOf": [self.leaf(rng) for _ in range(rng.randint(1, 3))]}

    def a_leaf(self, rng: random.Random, depth: int) -> Schema:
        return self.leaf(rng)

    def a_ref(self, rng: random.Random, depth: int) -> Schema:
        return {"$ref": "#/$defs/leaf"}


def leaf(rng: random.Random) -> Schema:
    least = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, MOST_CHARS)},
            {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}$", "^(on|off)$", "^\\d{2}-\\d{2}$"])},
            {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": rng.sample(VALUES, rng.randint(1, 4))},
            {"const": rng.choice(["fixed", 0, False])},
        ]
    )


def wide_leaf(rng: random.Random) -> Schema:
    least = rng.randint(0, 12)
    return rng.choice(
        [
            leaf(rng),
            {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 24)},
            {"type": "string", "pattern": rng.choice(ODD_PATTERNS)},
            {"type": "string", "format": rng.choice(["uuid", "ipv4", "email"]), "maxLength": 40},
            {"type": "number", "minimum": -least, "maximum": 2.5 * least, "multipleOf": 0.25},
            {
                "type": ["integer", "null"],
                "minimum": -least,
                "exclusiveMaximum": 100 * least + 1,
                "multipleOf": 3,
            },
            {"enum": rng.sample(ODD_TEXTS, rng.randint(1, 4))},
            {"const": {rng.choice(ODD_TEXTS): rng.choice(ODD_TEXTS)}},
            {
                "type": "array",
                "prefixItems": [leaf(rng), leaf(rng)],
                "items": False,
                "minItems": rng.randint(0, 2),
            },
        ]
    )


NARROW = Kind(("name", "size", "kind", "ok", "a b", "x-1", "list", "next", "value", "_"), leaf)
WIDE = Kind(
    (*NARROW.words, "größe", "名前", "a", "ab", 'the "key"', "\\", "", "👍", "line\nbreak"), wide_leaf
)


def schemas(count: int, seed: int = 0, kind: Kind = NARROW) -> list[Schema]:
    """`count` different schemas."""
    rng = random.Random(seed)
    found: dict[str, Schema] = {}
    while len(found) < count:
        schema = {"$defs": {"leaf": kind.leaf(rng)}, **kind.thing(rng, 0)}
        found.setdefault(json.dumps(schema), schema)
    return list(found.values())


def grammar_of(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
