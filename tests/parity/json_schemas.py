"""Random JSON schemas of moderate size whose every document is short, so that a random model ends what it begins."""

import json
import random

from llguidance import LLMatcher

WORDS = ("name", "size", "kind", "ok", "a b", "x-1", "list", "next", "value", "_")
VALUES = ("red", 7, None, True, "green", -1.5, ["x"], {"y": 0})
MOST_CHARS = 6


def schemas(count, seed=0):
    """`count` different schemas."""
    rng = random.Random(seed)
    found = {}
    while len(found) < count:
        schema = {"$defs": {"leaf": leaf(rng)}, **thing(rng, 0)}
        found.setdefault(json.dumps(schema), schema)
    return list(found.values())


def thing(rng, depth):
    """An object or an array, or further down anything."""
    kinds = [an_object, an_object, an_array] if depth == 0 else [an_object, an_array, a_choice, leaf, leaf, a_ref]
    return rng.choice(kinds)(rng, depth)


def an_object(rng, depth):
    names = rng.sample(WORDS, rng.randint(1, 4 - depth))
    return {
        "type": "object",
        "properties": {name: thing(rng, depth + 1) if depth < 2 else leaf(rng) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def an_array(rng, depth):
    least = rng.randint(0, 2)
    items = thing(rng, depth + 1) if depth < 2 else leaf(rng)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def a_choice(rng, depth):
    return {"anyOf": [leaf(rng) for _ in range(rng.randint(1, 3))]}


def a_ref(rng, depth):
    return {"$ref": "#/$defs/leaf"}


def leaf(rng, depth=0):
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


def grammar_of(schema):
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
