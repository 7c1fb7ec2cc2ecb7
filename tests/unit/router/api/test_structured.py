"""The constraints of OpenAI, vLLM and SGLang on an answer: how each is read, and that two are refused."""

import json

import pytest
from baton.router.api.body_checks import check_chat, parse_body
from baton.router.api.body_types import ChatBody, CompletionBody
from baton.router.api.response_bodies import ResponseBody, chat_of, in_words_of_responses
from baton.router.api.structured import Constraint
from baton.router.errors import ApiError
from baton.router.text.grammars import plan_of

BASE = {
    ChatBody: {"messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"prompt": "hi"},
    ResponseBody: {"input": "hi"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TOOL = {"type": "function", "function": {"name": "f"}}
CASES = {
    "guided_json": ("guided_json", SCHEMA, "json", TEXT),
    "guided_json as text": ("guided_json", TEXT, "json", TEXT),
    "json_schema": ("json_schema", TEXT, "json", TEXT),
    "guided_regex": ("guided_regex", "[ab]+", "regex", "[ab]+"),
    "regex": ("regex", "[ab]+", "regex", "[ab]+"),
    "guided_choice": ("guided_choice", ["yes", "no"], "choice", '["yes","no"]'),
    "guided_grammar": ("guided_grammar", 'start: "a"', "grammar", 'start: "a"'),
    "ebnf": ("ebnf", 'root ::= "a"', "grammar", 'root ::= "a"'),
    "structured json": ("structured_outputs", {"json": SCHEMA}, "json", TEXT),
    "structured regex": ("structured_outputs", {"regex": "a"}, "regex", "a"),
    "structured choice": ("structured_outputs", {"choice": ["a"]}, "choice", '["a"]'),
    "structured grammar": ("structured_outputs", {"grammar": "x"}, "grammar", "x"),
    "structured object": ("structured_outputs", {"json_object": True}, "json", '{"type":"object"}'),
}


def read(kind, **more):
    body = parse_body(json.dumps(BASE[kind] | more).encode(), kind)
    if isinstance(body, ResponseBody):
        body = chat_of(body)
        check_chat(body)
    return body


def error_of(kind=ChatBody, **more):
    with pytest.raises(ApiError) as caught:
        read(kind, **more)
    assert caught.value.status == 400
    return (in_words_of_responses(caught.value) if kind is ResponseBody else caught.value).body


@pytest.mark.parametrize("kind", BASE)
@pytest.mark.parametrize("case", CASES)
def test_each_way_to_constrain_an_answer_is_read(kind, case):
    name, value, wanted, text = CASES[case]
    constraint = read(kind, **{name: value}).constraint
    assert constraint.kind == wanted
    if wanted == "json":
        assert json.loads(constraint.text) == json.loads(text)
    else:
        assert constraint.text.decode() == text
    assert constraint.param.partition(".")[0] == name
    plan = plan_of(read(kind, **{name: value}))
    assert (plan.answer, plan.kind, plan.field) == (constraint.text, wanted, constraint.param)


@pytest.mark.parametrize("kind", BASE)
def test_two_constraints_are_one_clear_error(kind):
    error = error_of(kind, guided_regex="a", guided_choice=["a"])
    assert error.message == "guided_regex and guided_choice each constrain the answer: give one of them"
    assert error.param == "guided_choice"
    error = error_of(kind, structured_outputs={"regex": "a", "json": SCHEMA})
    assert "structured_outputs.json and structured_outputs.regex" in error.message
    schema = {"type": "json_schema", "name": "s", "schema": SCHEMA}
    given = (
        {"text": {"format": schema}}
        if kind is ResponseBody
        else {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}
    )
    assert error_of(kind, **given, guided_json=SCHEMA).param == "guided_json"


def test_a_format_of_text_and_nulls_constrain_nothing():
    more = {"response_format": {"type": "text"}, "guided_json": None, "guided_choice": None}
    assert read(ChatBody, **more, guided_regex="a").constraint == Constraint("regex", b"a", "guided_regex")
    assert read(ChatBody, **more).constraint is None
    assert not plan_of(read(ChatBody, **more))


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "is empty: give json"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "use tools"),
        ({"guided_choice": []}, "guided_choice", "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice", "Expected `array"),
        ({"guided_json": 7}, "guided_json", "expected a JSON schema"),
        ({"guided_json": "{"}, "guided_json", "no JSON schema"),
        ({"guided_regex": ""}, "guided_regex", "length"),
        ({"guided_regex": "a", "tools": [TOOL]}, "guided_regex", "guided_regex and tools exclude"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "min_tokens and guided_choice exclude"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos and regex exclude"),
    ],
)
def test_a_constraint_that_cannot_be_meant_is_refused(more, param, words):
    error = error_of(**more)
    assert (error.param, words in error.message) == (param, True), error.message


def test_tools_that_may_not_be_called_leave_room_for_any_constraint():
    body = read(ChatBody, guided_regex="a", tools=[TOOL], tool_choice="none")
    assert (plan_of(body).kind, plan_of(body).tools) == ("regex", ())
    with_schema = plan_of(read(ChatBody, guided_json=SCHEMA, tools=[TOOL]))
    assert (with_schema.field, len(with_schema.tools)) == ("guided_json", 1)
