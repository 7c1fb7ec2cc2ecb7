"""/docs has every operation, an example of each that is accepted, and no raw markup of the field table."""

import json
import re

from baton.router.api.body_checks import parse_body
from baton.router.api.body_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from baton.router.api.response_bodies import ResponseBody
from baton.router.endpoints.docs_page import EXAMPLES, docs_page
from baton.router.endpoints.openapi import OPERATIONS, openapi_of


def text_of(served="<m>"):
    return docs_page(openapi_of([served])).body.decode()


def without_script(page):
    return re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)


def test_every_operation_is_in_the_contents_and_has_a_section():
    page = without_script(text_of())
    for operation in OPERATIONS:
        anchor = operation.method + re.sub(r"[^a-z0-9]+", "-", operation.path).rstrip("-")
        assert page.count(f'href="#{anchor}"') == 1
        assert page.count(f'id="{anchor}"') == 1
    assert "<m>" not in page
    assert "&lt;m&gt;" in page


def test_the_page_loads_nothing_and_has_no_raw_backticks_or_links():
    page = without_script(text_of())
    assert "`" not in page
    assert not re.findall(r"\]\(|<!-- ", page)
    assert "<code>include_usage</code>" in page
    assert not re.findall(r"<(?:link(?! rel=\"icon\")|img|iframe)|https?://(?!www\.w3\.org)|@import", page)
    policy = docs_page(openapi_of(["m"])).headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_every_example_is_a_body_that_the_router_takes():
    kinds = {
        "/v1/chat/completions": ChatBody,
        "/v1/completions": CompletionBody,
        "/v1/responses": ResponseBody,
        "/tokenize": TokenizeBody,
        "/detokenize": DetokenizeBody,
    }
    for path, kind in kinds.items():
        parse_body(json.dumps({"model": "m", **EXAMPLES[path]}).encode(), kind)
    bodies = {operation.path for operation in OPERATIONS if operation.body is not None}
    assert set(EXAMPLES) == bodies - {"/drafts", "/roles"}, "orders change the cluster and are no examples"
