"""Nested objects of bodies: published fields are known, and unserved or unknown ones are refused by name."""

import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from baton.router.api.body_checks import parse_body
from baton.router.api.body_types import ChatBody, CompletionBody
from baton.router.api.fields import INSIDE
from baton.router.api.response_bodies import ResponseBody, chat_of
from baton.router.api.response_items import ITEMS
from baton.router.endpoints.openapi import INNER, openapi_of
from baton.router.errors import ApiError
from msgspec import Struct
from openai.types import completion_create_params
from openai.types.chat import ParsedFunctionToolCall
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import (
    ParsedResponseFunctionToolCall,
    ParsedResponseOutputText,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    response_create_params,
)
from typing_extensions import get_type_hints, is_typeddict

DOCS = Path(__file__).resolve().parents[4] / "docs" / "api.md"
BASE = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"model": "m", "prompt": "hi"},
    ResponseBody: {"model": "m", "input": "hi"},
}
PUBLISHED = {
    ChatBody: chat_create_params.CompletionCreateParamsBase,
    CompletionBody: completion_create_params.CompletionCreateParamsBase,
    ResponseBody: response_create_params.ResponseCreateParamsBase,
}
CALLED = {"name": "f", "arguments": "{}"}
CALL = {"type": "function", "id": "c", "function": CALLED}
ITEM = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f"}
SCHEMA = {"name": "s", "schema": {"type": "object"}}


def said_by_assistant(call):
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


# What holds such an object, and one that is served.
PLACES = {
    "`stream_options`": (ChatBody, lambda it: {"stream": True, "stream_options": it}, {}),
    "`structured_outputs`": (ChatBody, lambda it: {"structured_outputs": it}, {"regex": "a"}),
    "a message of a chat": (ChatBody, lambda it: {"messages": [it]}, ITEM),
    "a call of it": (ChatBody, said_by_assistant, CALL),
    "the call's `function`": (ChatBody, lambda it: said_by_assistant(CALL | {"function": it}), CALLED),
    "a part of type text or input_text": (
        ResponseBody, lambda it: {"input": [ITEM | {"content": [it]}]}, {"type": "input_text", "text": "hi"},
    ),
    "a part of type output_text": (
        ResponseBody, lambda it: {"input": [ITEM | {"content": [it]}]}, {"type": "output_text", "text": "hi"},
    ),
    "an item of type message": (ResponseBody, lambda it: {"input": [it]}, ITEM),
    "an item of type function_call": (
        ResponseBody, lambda it: {"input": [it]}, {"type": "function_call", "call_id": "c", **CALLED},
    ),
    "an item of type function_call_output": (
        ResponseBody, lambda it: {"input": [it]}, {"type": "function_call_output", "call_id": "c",
        "output": "hi"},
    ),
    "an item of type reasoning": (ResponseBody, lambda it: {"input": [ITEM, it]}, {"type": "reasoning"}),
    "a tool of /v1/responses": (ResponseBody, lambda it: {"tools": [it]}, {"type": "function", "name": "f"}),
    "`text` of /v1/responses": (ResponseBody, lambda it: {"text": it}, {}),
}  # fmt: skip
# Objects that have nothing but fields that work.
PLAIN = {
    "a part of a chat": (ChatBody, lambda it: {"messages": [ITEM | {"content": [it]}]}, {"type": "text",
    "text": "hi"}),
    "a tool": (ChatBody, lambda it: {"tools": [it]}, {"type": "function", "function": FUNCTION}),
    "its function": (ChatBody, lambda it: {"tools": [{"type": "function", "function": it}]}, FUNCTION),
    "tool_choice": (
        ChatBody, lambda it: {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": it},
        {"type": "function", "function": FUNCTION},
    ),
    "response_format": (ChatBody, lambda it: {"response_format": it}, {"type": "json_schema",
    "json_schema": SCHEMA}),
    "its json_schema": (ChatBody, lambda it: {"response_format": {"type": "json_schema", "json_schema": it}},
    SCHEMA),
    "text.format": (ResponseBody, lambda it: {"text": {"format": it}}, {"type": "json_schema", **SCHEMA}),
    "an output's part": (
        ResponseBody, lambda it: {"input": [{"type": "function_call_output", "call_id": "c",
        "output": [it]}]},
        {"type": "input_text", "text": "hi"},
    ),
    "tool_choice of /v1/responses": (
        ResponseBody, lambda it: {"tools": [{"type": "function", "name": "f"}], "tool_choice": it},
        {"type": "function", "name": "f"},
    ),
}  # fmt: skip
ANYTHING = (None, True, "text", 1.5, [], {"a": {"b": []}})


def ask(kind, more):
    body = parse_body(json.dumps(BASE[kind] | more).encode(), kind)
    return chat_of(body) if kind is ResponseBody else body


def refusal_of(kind, more):
    with pytest.raises(ApiError) as caught:
        ask(kind, more)
    assert caught.value.status == 400
    assert caught.value.body.type == "invalid_request_error"
    return caught.value.body


def fields_in(state):
    return [
        (place, name)
        for place, table in INSIDE.items()
        for name, field in table.items()
        if field.state == state
    ]


# --- the published schema -----------------------------------------------------------------------------------


def objects_in(annotation):
    """The types of JSON objects that an annotation allows."""
    if is_typeddict(annotation) or (isinstance(annotation, type) and issubclass(annotation, Struct)):
        return [annotation]
    return [found for part in get_args(annotation) for found in objects_in(part)]


def words_in(annotation):
    """The strings that an annotation allows."""
    if get_origin(annotation) is Literal:
        return {word for word in get_args(annotation) if isinstance(word, str)}
    return {word for part in get_args(annotation) for word in words_in(part)}


def fields_of(kind):
    """A type's fields by their names in JSON, with what they allow; `input` by what its items are read as."""
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        return hints
    fields = {info.encode_name: hints[info.name] for info in msgspec.structs.fields(kind)}
    if tag := kind.__struct_config__.tag_field:
        fields[tag] = Literal[kind.__struct_config__.tag]
    if kind is ResponseBody:
        fields["input"] = tuple[tuple(ITEMS.values())]
    return fields


def twin_of(published, ours):
    """Which of our types reads such an object, by the words that `type` may say; None: none does."""
    words = words_in(fields_of(published).get("type", Any))
    matching = [kind for kind in ours if not words or words & words_in(fields_of(kind).get("type", Any))]
    return matching[0] if matching else None


def compared(published, ours, at):
    """(published fields unknown to our type, (place, type) of published objects that it does not read)"""
    unknown, unread = [], []
    known = fields_of(ours)
    for name, annotation in fields_of(published).items():
        if name not in known:
            unknown.append(f"{at}.{name}")
            continue
        readers = objects_in(known[name])
        for inner in objects_in(annotation) if readers else ():
            twin = twin_of(inner, readers)
            if twin is None:
                unread += [(f"{at}.{name}", word) for word in sorted(words_in(fields_of(inner)["type"]))]
            else:
                more_unknown, more_unread = compared(inner, twin, f"{at}.{name}")
                unknown += more_unknown
                unread += more_unread
    return unknown, unread


COMPARED = {kind: compared(PUBLISHED[kind], kind, kind.__name__) for kind in BASE}
UNREAD = sorted({pair for _, unread in COMPARED.values() for pair in unread})
HOLDERS = {
    "ChatBody.messages.content": lambda it: {"messages": [ITEM | {"content": [it]}]},
    "ChatBody.messages.tool_calls": said_by_assistant,
    "ChatBody.tools": lambda it: {"tools": [it]},
    "ChatBody.tool_choice": lambda it: {"tool_choice": it},
    "ResponseBody.input": lambda it: {"input": [it]},
    "ResponseBody.input.content": lambda it: {"input": [ITEM | {"content": [it]}]},
    "ResponseBody.input.output": lambda it: {
        "input": [{"type": "function_call_output", "call_id": "c", "output": [it]}]
    },
    "ResponseBody.tools": lambda it: {"tools": [it]},
    "ResponseBody.tool_choice": lambda it: {"tool_choice": it},
}


@pytest.mark.parametrize("kind", list(BASE))
def test_every_nested_field_of_the_published_schema_is_known(kind):
    unknown, _ = COMPARED[kind]
    assert unknown == []


def test_the_comparison_reaches_deeply_nested_fields():
    places = {place for place, _ in UNREAD}
    assert places == set(HOLDERS)


@pytest.mark.parametrize(("place", "word"), UNREAD)
def test_a_published_object_that_is_not_served_is_refused_by_its_type(place, word):
    kind = ChatBody if place.startswith("Chat") else ResponseBody
    error = refusal_of(kind, HOLDERS[place]({"type": word, "some": "thing"}))
    assert word in error.message
    assert error.param == place.split(".")[1]


# --- ours ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [*PLACES, *PLAIN])
def test_an_unknown_field_is_refused_by_its_name(place):
    kind, holder, served = (PLACES | PLAIN)[place]
    assert ask(kind, holder(served)).model == "m"
    error = refusal_of(kind, holder(served | {"no_such_field": None}))
    assert "no_such_field' is not a field" in error.message
    assert error.param in holder(served)


@pytest.mark.parametrize(("place", "name"), fields_in("ignored"))
def test_an_ignored_field_may_have_any_value(place, name):
    kind, holder, served = PLACES[place]
    texts = [message.text for message in ask(kind, holder(served)).messages]
    for value in ANYTHING:
        assert [message.text for message in ask(kind, holder(served | {name: value})).messages] == texts


@pytest.mark.parametrize(("place", "name"), fields_in("refused"))
def test_a_refused_field_is_named_unless_its_value_is_a_default(place, name):
    kind, holder, served = PLACES[place]
    error = refusal_of(kind, holder(served | {name: {"some": "thing"}}))
    assert f".{name} is not supported" in error.message
    assert error.param in holder(served)
    for harmless in (b"null", *INSIDE[place][name].harmless):
        assert ask(kind, holder(served | {name: json.loads(harmless)})).model == "m"


@pytest.mark.parametrize("missing", ["call_id", "name", "arguments"])
def test_a_tool_call_without_its_required_fields_is_refused(missing):
    kind, holder, served = PLACES["an item of type function_call"]
    error = refusal_of(kind, holder({name: value for name, value in served.items() if name != missing}))
    assert missing in error.message
    assert error.param == "input"


def test_an_answer_dumped_by_the_client_is_valid_input():
    text = ParsedResponseOutputText.model_validate(
        {"type": "output_text", "text": "hello", "annotations": []}
    )
    told = {
        "id": "i",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text.model_dump()],
    }
    called = {"id": "i", "type": "function_call", "call_id": "c", "status": "completed", **CALLED}
    made = [
        ResponseReasoningItem.model_validate({"id": "i", "type": "reasoning", "summary": []}),
        ResponseOutputMessage.model_validate(told),
        ResponseFunctionToolCall.model_validate(called),
        ParsedResponseFunctionToolCall.model_validate(called),
    ]
    items = [ITEM, *[item.model_dump() for item in made], told]
    messages = ask(ResponseBody, {"input": items}).messages
    assert [(message.role, message.text, len(message.tool_calls or ())) for message in messages] == [
        ("user", "hi", 0), ("assistant", "hello", 2), ("assistant", "hello", 0),
    ]  # fmt: skip
    call = ParsedFunctionToolCall.model_validate(CALL)
    assert ask(ChatBody, said_by_assistant(call.model_dump())).messages[0].tool_calls[0].id == "c"


@pytest.mark.parametrize(
    "content", [b'"\xff"', b'"\\ud800"', b'[{"type":"input_text","text":"\xff"}]', b"[" * 9999]
)
def test_items_that_cannot_be_read_are_refused(content):
    raw = b'{"model": "m", "input": [{"role": "user", "content": ' + content + b"}]}"
    with pytest.raises(ApiError) as caught:
        chat_of(parse_body(raw, ResponseBody))
    assert caught.value.status == 400


def test_every_table_is_shown_and_each_has_a_place():
    assert set(PLACES) == set(INSIDE)
    assert {id(kind.TABLE) for kind in INNER} == {id(table) for table in INSIDE.values()}
    text = DOCS.read_text().partition("## Inside of them\n")[2].partition("\n## ")[0]
    shown = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    expected = [
        [place, f"`{name}`", field.state, field.says]
        for place, table in INSIDE.items()
        for name, field in table.items()
    ]
    assert shown == expected


def test_the_document_shows_no_refused_field_of_an_inner_object():
    schemas = openapi_of(["m"])["components"]["schemas"]
    for kind in INNER:
        for name, field in kind.TABLE.items():
            assert (name in schemas[kind.__name__]["properties"]) is (field.state != "refused"), (kind, name)
    items = schemas["ResponseBody"]["properties"]["input"]["anyOf"][1]["items"]["anyOf"]
    assert {item["$ref"].rsplit("/", 1)[-1] for item in items} == {kind.__name__ for kind in ITEMS.values()}
