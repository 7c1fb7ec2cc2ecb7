"""Every field of the published API has its word in the table, the table is what the bodies do, and the docs show it."""

import json
from pathlib import Path

import pytest
from baton.router.api_bodies import ChatBody, CompletionBody
from baton.router.errors import ApiError
from baton.router.openai import parse_body
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params

DOCS = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BASE = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionBody: {"model": "m", "prompt": "hi"},
}
PUBLISHED = {ChatBody: chat_create_params, CompletionBody: completion_create_params}
HEADINGS = {ChatBody: "## POST /v1/chat/completions", CompletionBody: "## POST /v1/completions"}
BODIES = list(BASE)


def parse(kind, **more):
    return parse_body(json.dumps(BASE[kind] | more).encode(), kind)


def fields_in(state):
    return [(kind, name) for kind in BODIES for name, field in kind.TABLE.items() if field.state == state]


def of_docs(heading):
    """The rows (name, state, says) of the first table below a heading."""
    text = DOCS.read_text().partition(heading + "\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in row) for row in rows]


@pytest.mark.parametrize("kind", BODIES)
def test_no_field_of_the_published_schema_is_missing_from_the_table(kind):
    base = PUBLISHED[kind].CompletionCreateParamsBase.__annotations__
    assert {*base, "stream"} <= set(kind.TABLE)


def test_every_published_stream_option_is_taken():
    published = chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__
    for name in published:
        assert parse(ChatBody, stream=True, stream_options={name: True}).stream


@pytest.mark.parametrize("kind", BODIES)
def test_the_table_has_the_fields_of_the_body_and_no_other(kind):
    assert set(kind.TABLE) == set(kind.__struct_fields__)


@pytest.mark.parametrize(("kind", "name"), fields_in("refused"))
def test_a_refused_field_is_named_unless_it_asks_for_nothing(kind, name):
    with pytest.raises(ApiError) as caught:
        parse(kind, **{name: {"some": "thing"}})
    assert (caught.value.status, caught.value.body.param) == (400, name)
    for harmless in (b"null", *kind.TABLE[name].harmless):
        assert parse(kind, **{name: json.loads(harmless)}).model == "m"


@pytest.mark.parametrize(("kind", "name"), fields_in("ignored"))
def test_an_ignored_field_may_say_anything(kind, name):
    for value in (None, True, "text", 1.5, [], {"a": {"b": []}}):
        assert parse(kind, **{name: value}).model == "m"


@pytest.mark.parametrize(("kind", "name"), fields_in("works"))
def test_a_field_that_works_refuses_what_it_cannot_mean(kind, name):
    with pytest.raises(ApiError) as caught:
        parse(kind, **{name: {"no": {"such": "thing"}}})
    assert (caught.value.status, caught.value.body.param) == (400, name)


@pytest.mark.parametrize("kind", BODIES)
def test_the_docs_show_the_table(kind):
    expected = [(f"`{name}`", field.state, field.says) for name, field in kind.TABLE.items()]
    assert of_docs(HEADINGS[kind]) == expected
