"""Texts that llguidance allows against the schema are not allowed after the rewrite; others still are."""

import json

import jsonschema
import pytest
from baton.router.errors import ApiError
from baton.router.sandbox.frames import REFUSED
from baton.router.sandbox.grammar_compiler import Plan, SandboxedCompiler, compiled
from baton.router.sandbox.schema_rewrite import rewritten
from llguidance import LLMatcher, LLTokenizer
from msgspec import msgpack

TEXTS = [
    r'"a"', r'"\""', r'"\\"', r'"\n"', r'"\t\r"', '"é"', r'"\"ab\""', r'"\"a\"b\""', '"ab"', r'"a\\b"',
    '"日本"',
]  # fmt: skip
PATTERNS = [
    '^[^"]{1,3}$', r"^[^\\]{1,3}$", "^[^'\"]+$", "^[^ -~]{1,3}$", r'^[^\s"]+$', '^"[^"]*"$', r'^[^"\\]+$',
    r"^[\x00-\x1f]+$", r'^[\x00-!#-\uffff]+$', r'^(a|[^"])+$', r"^[a-c\[\]]+$", "^.+$",
]  # fmt: skip
OPEN = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": True}
OBJECTS = [
    OPEN, {**OPEN, "additionalProperties": {"type": "integer"}}, {**OPEN, "required": ["a", "z"]},
    {"$defs": {"o": OPEN}, "$ref": "#/$defs/o"}, {"anyOf": [OPEN, {"type": "null"}]},
    {"type": "array", "items": OPEN}, {"type": "array", "prefixItems": [OPEN]},
    {"allOf": [OPEN, {"properties": {"b": {"type": "integer"}}}]},
    {"type": "object", "properties": {"x": OPEN}, "additionalProperties": False},
    {**OPEN, "patternProperties": {"^b": {"type": "integer"}}},
    {"allOf": [OPEN, {"patternProperties": {"^b": {"type": "integer"}}}]},
]  # fmt: skip
NAMED = [
    '{"a": "x"}', '{"a": 1}', '{"b": 1}', '{"b": "x"}', '{"a": "x", "z": 1}', '{"a": "x", "z": null}', "{}",
    '[{"a": "y"}]', '[{"a": 1}]', '{"x": {"a": "y"}}', '{"x": {"a": "y", "b": 1}}', r'{"a": "x", "\"\n": 1}',
]  # fmt: skip
ESCAPED = [r'{"\u0061": 1}', r'{"a": "x", "\u0061": 1}', r'[{"\u0061": 1}]', r'{"x": {"\u0061": 1}}']


@pytest.fixture(scope="module")
def tokenizer():
    return LLTokenizer("byte")


def allows(tokenizer, schema, text):
    matcher = LLMatcher(tokenizer, compiled(Plan(answer=json.dumps(schema).encode())), log_level=0)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def is_valid(schema, text):
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_allows_what_it_means(tokenizer, pattern):
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in TEXTS if allows(tokenizer, schema, text) != is_valid(schema, text)] == []


@pytest.mark.parametrize("schema", OBJECTS, ids=json.dumps)
def test_objects_allow_what_they_allowed(tokenizer, schema):
    assert [text for text in NAMED if allows(tokenizer, schema, text) != is_valid(schema, text)] == []


@pytest.mark.parametrize("schema", OBJECTS[:-2], ids=json.dumps)
def test_an_escaped_name_does_not_pass_as_an_undeclared_one(tokenizer, schema):
    wrong = [text for text in ESCAPED if not is_valid(schema, text)]
    assert wrong
    assert [text for text in wrong if allows(tokenizer, schema, text)] == []


def test_values_that_look_like_schemas_stay_and_the_given_schema_too():
    data = {"properties": {"a": {"pattern": '[^"]'}}}
    schema = {"const": data, "enum": [data], "default": data, "properties": {"pattern": {"const": '[^"]'}}}
    before = json.dumps(schema)
    made = rewritten(schema)
    assert (made["const"], made["enum"], made["default"]) == (data, [data], data)
    assert made["properties"] == schema["properties"]
    assert json.dumps(schema) == before


@pytest.mark.parametrize("pattern", ["[", "[^", "\\P", "[a\\", "[[]"])
def test_a_broken_pattern_is_refused(pattern):
    with pytest.raises(ApiError):
        compiled(Plan(answer=json.dumps({"type": "string", "pattern": pattern}).encode()))


def test_a_schema_that_refers_to_nothing_but_itself_is_refused():
    for schema in (b'{"$ref":"#"}', b'{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'):
        assert SandboxedCompiler().answer(msgpack.encode(Plan(answer=schema)))[:1] == REFUSED
