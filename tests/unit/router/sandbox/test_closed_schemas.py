"""Objects of a schema allow no key that it does not name, unless it says otherwise."""

import json

import pytest
from baton.router.sandbox.closed_schemas import closed
from baton.router.sandbox.grammar_compiler import Plan, compiled
from llguidance import LLMatcher, LLTokenizer

NUMBER = {"type": "integer"}
POINT = {"type": "object", "properties": {"x": NUMBER}}
SHUT = {**POINT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (POINT, SHUT),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": POINT}, {"type": "array", "items": SHUT}),
        ({"prefixItems": [POINT], "items": False}, {"prefixItems": [SHUT], "items": False}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        (
            {"$defs": {"p": POINT}, "properties": {"a": {"$ref": "#/$defs/p"}}, "required": ["a"]},
            {
                "$defs": {"p": SHUT}, "properties": {"a": {"$ref": "#/$defs/p"}}, "required": ["a"],
                "additionalProperties": False,
            },
        ),
        (
            {"$defs": {"p": POINT}, "allOf": [{"$ref": "#/$defs/p"}]},
            {"$defs": {"p": SHUT}, "allOf": [{"$ref": "#/$defs/p"}]},
        ),
        ({"additionalProperties": POINT}, {"additionalProperties": SHUT}),
    ],
)  # fmt: skip
def test_an_object_that_names_its_keys_is_closed(schema, wanted):
    before = json.dumps(schema)
    assert closed(schema) == wanted
    assert json.dumps(schema) == before, "a copy"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**POINT, "additionalProperties": True},
        {**POINT, "additionalProperties": NUMBER},
        {**POINT, "patternProperties": {"^y": NUMBER}},
        {**POINT, "unevaluatedProperties": False},
        {**POINT, "required": ["x", "y"]},
        {**POINT, "minProperties": 2},
        {"allOf": [POINT, {"properties": {"y": NUMBER}}]},
        {**POINT, "anyOf": [{"properties": {"y": NUMBER}}, {"required": ["x"]}]},
        {"$defs": {"p": POINT}, "allOf": [{"$ref": "#/$defs/p"}, {"properties": {"y": NUMBER}}]},
        {"$defs": {"p": POINT}, "$ref": "#/$defs/p", "properties": {"y": NUMBER}},
        {
            "$defs": {"a/b": POINT, "q": {"$ref": "#/$defs/a~1b"}},
            "allOf": [{"$ref": "#/$defs/q"}, {"properties": {"y": NUMBER}}],
        },
        True,
    ],
)
def test_an_object_that_may_need_other_keys_stays_open(schema):
    assert closed(schema) == schema


def follows(plan, text):
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, compiled(plan), log_level=0)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("is_open", [False, True])
def test_answers_and_calls_have_invented_keys_only_where_allowed(is_open):
    inner = {**POINT, "additionalProperties": True} if is_open else POINT
    schema = json.dumps({"type": "object", "properties": {"at": inner}, "required": ["at"]}).encode()
    invented = '{"at": {"x": 1, "unit:": "KM"}}'
    call = '<tool_call>\n{"name": "go", "arguments": %s}\n</tool_call>'
    for plan, form in ((Plan(answer=schema), "%s"), (Plan(tools=(("go", schema),), must_call=True), call)):
        assert follows(plan, form % '{"at": {"x": 1}}')
        assert follows(plan, form % invented) is is_open
        assert not follows(plan, form % '{"at": {"x": 1}, "b": 2}')
