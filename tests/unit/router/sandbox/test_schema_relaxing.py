"""Schemas of tools that cannot be enforced whole: followed as far as they can be, unless they are strict."""

import json

import msgspec
import pytest
from baton.router.api.body_checks import parse_body
from baton.router.api.body_types import ChatBody
from baton.router.errors import ApiError
from baton.router.sandbox.frames import REFUSED
from baton.router.sandbox.grammar_compiler import LIMITS, Plan, SandboxedCompiler, compiled
from baton.router.sandbox.schema_relaxing import FORMATS
from baton.router.text.grammars import plan_of
from llguidance import LLMatcher, LLTokenizer

TEXT = {"type": "string"}
# name -> the property's schema, a value that follows what is left of it, one that does not
TOOLS = {
    "zod 4 record": (
        {"type": "object", "propertyNames": TEXT, "additionalProperties": {"type": "number"}},
        {"a": 1},
        {"a": "b"},
    ),
    "zod email": (TEXT | {"pattern": "^(?!\\.)[a-z.]+@[a-z.]+$"}, "any text", 5),
    "set of pydantic": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], ["a"]),
    "zod to JSON Schema": ({"not": {}}, 5, None),
    "overlapping numbers": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 5, "a"),
    "one or more": ({"oneOf": [TEXT, {"const": "a"}], "anyOf": [TEXT, {"type": "null"}]}, "a", 5),
    "names by a pattern": ({"type": "object", "patternProperties": {"^(?!x)": TEXT}}, {"a": "b"}, 5),
    "conditions": (TEXT | {"if": {"const": "a"}, "then": {"minLength": 9}}, "a", 5),
    "several": (
        {"type": "array", "uniqueItems": True, "contains": TEXT, "items": TEXT | {"pattern": "(?=a)"}},
        ["b"],
        [5],
    ),
}


def of_property(schema):
    return json.dumps({"type": "object", "properties": {"x": schema}, "required": ["x"]}).encode()


def follows(schema_text, value, **more):
    grammar = compiled(Plan(tools=(("f", schema_text),), must_call=True, **more))
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    call = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(value)}}}\n</tool_call>'.encode()
    return matcher.try_consume_tokens(list(call)) == len(call) and matcher.is_accepting()


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_follow_what_can_be_enforced(name):
    schema, good, bad = TOOLS[name]
    text = of_property(schema)
    assert follows(text, {"x": good})
    assert not follows(text, {"y": good}), "the other parts of the schema are enforced"
    if bad is not None:
        assert not follows(text, {"x": bad})


@pytest.mark.parametrize("name", TOOLS)
def test_a_strict_function_is_followed_to_the_letter_or_refused(name):
    with pytest.raises(ApiError, match="tools: the parameters of f cannot be followed"):
        follows(of_property(TOOLS[name][0]), {}, strict=("f",))
    with pytest.raises(ApiError, match="response_format cannot be followed"):
        compiled(Plan(answer=of_property(TOOLS[name][0])))


def test_a_schema_that_nothing_is_left_of_takes_any_object():
    text = of_property({"type": "object", "patternProperties": {"^a": TEXT, "^ab": TEXT}})
    assert follows(text, {"anything": [1]})
    assert not follows(text, 5)


@pytest.mark.parametrize("form", ["path", "password", "binary", "int32", "uri-reference", "regex", "decimal"])
def test_an_unknown_format_is_a_note_in_every_schema(form):
    text = of_property(TEXT | {"format": form})
    assert follows(text, {"x": "any text"}, strict=("f",))
    compiled(Plan(answer=text))
    named = of_property({"type": "object", "properties": {"format": TEXT}, "required": ["format"]})
    assert not follows(named, {"x": {}}), "a property of this name is none"


@pytest.mark.parametrize("form", sorted(FORMATS - {"unknown"}))
def test_a_known_format_is_enforced(form):
    assert not follows(of_property(TEXT | {"format": form}), {"x": "no such thing!"})


def test_functions_are_strict_where_they_say_so():
    functions = [
        {"name": name, "strict": strict, "parameters": {"type": "object"}}
        for name, strict in (("a", True), ("b", False), ("c", None))
    ]
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    assert plan_of(parse_body(json.dumps(body).encode(), ChatBody)).strict == ("a",)


@pytest.mark.parametrize("schema", [{"type": "banana"}, {"$ref": "#/nope"}, {"minimum": 5, "maximum": 4}])
def test_a_schema_that_is_wrong_is_refused_for_every_function(schema):
    with pytest.raises(ApiError, match="tools: the parameters of f cannot be followed"):
        follows(of_property({"type": "integer"} | schema), {})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "it refers to nothing but itself"),
        ({"$ref": "https://example.org/s.json"}, "put that schema into $defs"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "write anyOf"),
    ],
)
def test_a_refusal_names_the_remedy(schema, said):
    plan = Plan(answer=json.dumps(schema).encode())
    reply = SandboxedCompiler().answer(msgspec.msgpack.encode(plan))
    assert reply.startswith(REFUSED)
    assert said in reply.decode()
