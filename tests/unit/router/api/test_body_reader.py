"""Unknown fields are refused, or left out, logged once per name, and told in a header."""

import json
import logging

import pytest
from baton.router.api.body_reader import MAX_IN_HEADER, MAX_LOGGED, BodyReader, header_of
from baton.router.api.body_types import ChatBody
from baton.router.errors import ApiError

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def read(reader, **more):
    return reader.read(json.dumps(CHAT | more).encode(), ChatBody)


def test_unknown_fields_are_refused():
    with pytest.raises(ApiError, match="'num_ctx' is not a field"):
        read(BodyReader(ignores_unknown=False), num_ctx=1)


def test_an_ignored_field_is_logged_once_for_each_name(caplog):
    reader = BodyReader(ignores_unknown=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            body, ignored = read(reader, num_ctx=1, messages=[{**CHAT["messages"][0], "mood": 1}] * 2)
            assert (body.messages[1].text, len(ignored)) == ("hi", 3)
    assert len(caplog.records) == 2, "num_ctx and messages[].mood"
    with caplog.at_level(logging.WARNING):
        read(reader, **{f"x{i}": 1 for i in range(2 * MAX_LOGGED)})
    assert len(caplog.records) == MAX_LOGGED + 1


def test_the_header_has_no_bytes_that_a_client_chose_freely():
    assert header_of(("num_ctx", "messages[0].mood")) == b"num_ctx, messages[0].mood"
    assert header_of(("a\r\nset-cookie: x", "ü")) == b"a??set-cookie??x, ?"
    many = header_of(tuple(f"x{i}" for i in range(MAX_IN_HEADER + 3)))
    assert many.endswith(b"x15, and 3 more")
