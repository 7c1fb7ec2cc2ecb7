"""Every field of the published API is in the table, the bodies follow the table, and the docs show it."""

import json
import re
from pathlib import Path

import pytest
from baton.router.api.body_checks import check_chat, parse_body
from baton.router.api.body_types import ChatBody, CompletionBody
from baton.router.api.message_bodies import MessageBody
from baton.router.api.request_headers import REQUEST_HEADERS
from baton.router.api.response_bodies import ResponseBody, chat_of
from baton.router.endpoints.openapi import OPERATIONS, openapi_of
from baton.router.errors import ApiError
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

DOCS = Path(__file__).resolve().parents[4] / "docs" / "api.md"
BASE = {
    ResponseBody: {"model": "m", "input": "hi"},
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"model": "m", "prompt": "hi"},
    MessageBody: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}
PUBLISHED = {
    ChatBody: chat_create_params.CompletionCreateParamsBase,
    CompletionBody: completion_create_params.CompletionCreateParamsBase,
    ResponseBody: response_create_params.ResponseCreateParamsBase,
}
# of the client anthropic 2.12.0, which is not installed here; the last two lines are betas
OF_MESSAGES = {
    "max_tokens", "messages", "model", "cache_control", "container", "diagnostics", "inference_geo",
    "metadata", "output_config", "service_tier", "speed", "stop_sequences", "system", "temperature",
    "thinking", "tools", "tool_choice", "top_k", "top_p", "context_management", "mcp_servers",
    "billing_policy", "compaction", "fallback_credit_token", "fallbacks", "output_format", "thread",
}  # fmt: skip
HEADINGS = {
    ChatBody: "## POST /v1/chat/completions",
    CompletionBody: "## POST /v1/completions",
    ResponseBody: "## POST /v1/responses",
    MessageBody: "## POST /v1/messages",
}
BODIES = list(BASE)
SCHEMAS = ("guided_json", "json_schema")  # any object may be one


def parse(kind, **more):
    return parse_body(json.dumps(BASE[kind] | more).encode(), kind)


def checked(kind, **more):
    body = parse(kind, **more)
    if kind is ResponseBody:
        check_chat(chat_of(body))


def fields_in(state):
    return [(kind, name) for kind in BODIES for name, field in kind.TABLE.items() if field.state == state]


def of_docs(heading):
    """The rows (name, state, says) of the first table below a heading."""
    text = DOCS.read_text().partition(heading + "\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in row) for row in rows]


@pytest.mark.parametrize("kind", BODIES)
def test_no_field_of_the_published_schema_is_missing_from_the_table(kind):
    published = PUBLISHED[kind].__annotations__ if kind in PUBLISHED else OF_MESSAGES
    assert {*published, "stream"} <= set(kind.TABLE)


def test_every_published_stream_option_is_taken():
    published = chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__
    for name in published:
        assert parse(ChatBody, stream=True, stream_options={name: True}).stream


@pytest.mark.parametrize("kind", BODIES)
def test_the_table_has_the_fields_of_the_body_and_no_other(kind):
    assert set(kind.TABLE) == set(kind.__struct_fields__)


@pytest.mark.parametrize(("kind", "name"), fields_in("refused"))
def test_a_refused_field_is_named_unless_its_value_is_a_default(kind, name):
    with pytest.raises(ApiError) as caught:
        parse(kind, **{name: {"some": "thing"}})
    assert (caught.value.status, caught.value.body.param) == (400, name)
    for harmless in (b"null", *kind.TABLE[name].harmless):
        assert parse(kind, **{name: json.loads(harmless)}).model == "m"


@pytest.mark.parametrize(("kind", "name"), fields_in("ignored"))
def test_an_ignored_field_may_have_any_value(kind, name):
    for value in (None, True, "text", 1.5, [], {"a": {"b": []}}):
        assert parse(kind, **{name: value}).model == "m"


@pytest.mark.parametrize(("kind", "name"), fields_in("works"))
def test_a_supported_field_refuses_invalid_values(kind, name):
    wrong = 7 if name in SCHEMAS else {"no": {"such": "thing"}}
    with pytest.raises(ApiError) as caught:
        checked(kind, **{name: wrong})
    assert (caught.value.status, caught.value.body.param) == (400, name)


@pytest.mark.parametrize("kind", BODIES)
def test_the_docs_show_the_table(kind):
    expected = [(f"`{name}`", field.state, field.says) for name, field in kind.TABLE.items()]
    assert of_docs(HEADINGS[kind]) == expected


def test_the_document_lists_exactly_the_served_fields():
    document = openapi_of(["m"])
    for kind in BODIES:
        schema = document["components"]["schemas"][kind.__name__]
        served = {name for name, field in kind.TABLE.items() if field.state != "refused"}
        assert set(schema["properties"]) == served
        assert schema["properties"]["model"]["enum"] == ["m"]
        assert schema["additionalProperties"] is False
    text = json.dumps(document)
    for name in set(re.findall(r"#/components/schemas/(\w+)", text)):
        assert name in document["components"]["schemas"]
    assert set(document["paths"]) == {operation.path for operation in OPERATIONS}


@pytest.mark.parametrize("is_keyed", [False, True])
def test_the_document_lists_authorisation_headers_and_retry_after(is_keyed):
    document = openapi_of(["m"], is_keyed=is_keyed)
    [scheme] = document["components"]["securitySchemes"]
    headers = [field.name.decode() for field in REQUEST_HEADERS]
    for path, ways in document["paths"].items():
        for method, made in ways.items():
            asked = [[], [{scheme: []}]] if is_keyed else [[], [{}, {scheme: []}]]
            assert made["security"] == asked[path not in ("/health", "/ready", "/version")], path
            read = [field["name"] for field in made.get("parameters", ()) if field["in"] == "header"]
            assert read == (headers if "text/event-stream" in made["responses"]["200"]["content"] else []), (
                path
            )
            for status, answer in made["responses"].items():
                assert ("Retry-After" in answer.get("headers", ())) is (status in ("429", "503")), (
                    method,
                    path,
                    status,
                )
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_the_docs_show_the_headers():
    expected = [(f"`{field.name.decode()}`", field.says) for field in REQUEST_HEADERS]
    rows = DOCS.read_text().partition("| header | |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert [tuple(row.strip("| ").split(" | ")) for row in rows] == expected
