"""Unknown fields: all are named in one error, or all are left out and reported."""

import json
import time

import pytest
from baton.router.api.body_checks import parse_body
from baton.router.api.body_types import ChatBody, CompletionBody
from baton.router.api.response_bodies import ResponseBody
from baton.router.api.unknown_fields import MAX_NAMED, MAX_VISITED
from baton.router.errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "hi", "shade": 1}], "mood": 2}
RESPONSE = {"input": [{"role": "user", "content": "hi", "mood": 1}, {"type": "reasoning", "depth": 2}]}


def error_of(body, kind=ChatBody, ignored=None):
    with pytest.raises(ApiError) as caught:
        parse_body(json.dumps(body).encode(), kind, ignored)
    assert caught.value.status == 400
    return caught.value.body


@pytest.mark.parametrize(
    ("kind", "body", "paths"),
    [
        (ChatBody, CHAT | {"num_ctx": 1, "mirostat": 2}, ["num_ctx", "mirostat"]),
        (
            ChatBody,
            {"messages": [MESSAGE], "num_ctx": 1},
            ["messages[0].content[0].shade", "messages[0].mood", "num_ctx"],
        ),
        (
            ChatBody,
            CHAT | {"tools": [{"type": "function", "function": {"name": "f", "async": 1}, "x": 2}]},
            ["tools[0].function.async", "tools[0].x"],
        ),
        (ResponseBody, RESPONSE | {"num_ctx": 1}, ["input[0].mood", "input[1].depth", "num_ctx"]),
        (CompletionBody, {"prompt": "hi", "a": 1, "stream_options": {"b": 1}}, ["a", "stream_options.b"]),
    ],
)
def test_all_unknown_fields_are_named_or_left_out(kind, body, paths):
    error = error_of(body, kind)
    assert error.code == "unknown_parameter"
    assert error.param == paths[0].partition("[")[0].partition(".")[0]
    assert all(f"'{path}'" in error.message for path in paths)
    ignored: list[str] = []
    if "stream_options" in body:
        body = body | {"stream": True}
    cleaned = parse_body(json.dumps(body).encode(), kind, ignored)
    assert ignored == paths
    known = {"messages": cleaned.messages} if kind is ChatBody else {}
    assert all(message.role == "user" for message in known.get("messages", ()))


def test_a_misspelt_field_gets_a_hint():
    assert error_of(CHAT | {"max_token": 5}).message.endswith("; did you mean 'max_tokens'?")
    both = error_of(CHAT | {"max_token": 5, "temprature": 1}).message
    assert "did you mean 'max_tokens'?" in both
    assert "did you mean 'temperature'?" in both


def test_a_switch_of_templates_is_told_its_place():
    said = error_of(CHAT | {"enable_thinking": False}).message
    assert said.endswith("is not a field of this request; templates take it in chat_template_kwargs")



def test_a_wrong_type_is_refused_where_unknown_fields_are_ignored():
    for body, code in (
        (CHAT | {"num_ctx": 1, "n": "2"}, "invalid_type"),
        (CHAT | {"num_ctx": 1, "n": 0}, "invalid_value"),
        ({"num_ctx": 1}, "missing_required_parameter"),
        (CHAT | {"num_ctx": 1, "web_search_options": {}}, "unsupported_parameter"),
    ):
        assert error_of(body, ignored=[]).code == code


def test_a_body_without_unknown_fields_reports_none():
    ignored: list[str] = []
    assert parse_body(json.dumps(CHAT).encode(), ChatBody, ignored).model is None
    assert ignored == []


def test_the_search_of_a_large_body_is_bounded():
    many = CHAT | {f"x{i}": i for i in range(MAX_NAMED + 5)}
    assert error_of(many).message.endswith("and 5 more are not fields of this request")
    body = {"messages": [{"role": "user", "content": "hi"}] * (2 * MAX_VISITED) + [{"no": 1}]}
    raw = json.dumps(body).encode()
    for ignored in (None, []):
        began = time.process_time()
        with pytest.raises(ApiError) as caught:
            parse_body(raw, ChatBody, ignored)
        assert time.process_time() - began < 1.0
        assert caught.value.body.message.startswith(f"messages[{2 * MAX_VISITED}]: 'no'"), "the decoder's"
        assert caught.value.body.code == "unknown_parameter"
