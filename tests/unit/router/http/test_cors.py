"""Which pages of other origins may call the API, and the form of the setting."""

import pytest
from baton.cluster.config.origins import origins_fault
from baton.router.http.cors import Cors, is_for_pages, is_foreign, is_simple

APP, OTHER = b"https://app.example.com", b"https://evil.example.com"
CHAT = b"/v1/chat/completions"


def values(headers, name):
    return [value for key, value in headers if key == name]


@pytest.mark.parametrize(("origin", "is_allowed"), [(APP, True), (OTHER, False), (b"null", False)])
def test_a_listed_origin_is_named_and_others_are_not(origin, is_allowed):
    headers = Cors("https://app.example.com,http://localhost:3000").headers(CHAT, {b"origin": [origin]})
    assert values(headers, b"access-control-allow-origin") == [origin] * is_allowed
    assert values(headers, b"vary") == [b"Origin"], "a cache may not give it to another origin"
    exposed = values(headers, b"access-control-expose-headers")
    assert len(exposed) == is_allowed
    assert not is_allowed or exposed[0].startswith(
        b"x-request-id, request-id, retry-after, x-ratelimit-limit-"
    )


def test_all_origins_are_a_star_and_credentials_are_never_allowed():
    cors, fields = Cors("*"), {b"origin": [OTHER], b"access-control-request-method": [b"POST"]}
    headers = cors.headers(CHAT, fields) + (cors.preflight("OPTIONS", CHAT, fields) or [])
    assert values(headers, b"access-control-allow-origin") == [b"*"]
    assert values(headers, b"access-control-allow-credentials") == []


@pytest.mark.parametrize(
    "path",
    [b"/drafts", b"/status", b"/metrics", b"/requests", b"/requests/x", b"/", b"/docs", b"/v1", b"/%76"],
)
def test_nothing_beside_the_api_is_ever_open_to_pages(path):
    fields = {b"origin": [APP], b"access-control-request-method": [b"POST"]}
    assert not is_for_pages(path)
    assert Cors("*").headers(path, fields) == []
    assert Cors("*").preflight("OPTIONS", path, fields) is None


def test_a_preflight_permits_what_was_asked_for_to_listed_origins_only():
    cors = Cors(APP.decode())
    asks = {
        b"access-control-request-method": [b"POST"],
        b"access-control-request-headers": [b"x-stainless-os"],
    }
    permission = cors.preflight("OPTIONS", CHAT, {b"origin": [APP], **asks})
    assert values(permission, b"access-control-allow-headers") == [b"x-stainless-os"]
    assert values(permission, b"access-control-allow-methods") == [b"GET, HEAD, POST"]
    assert cors.preflight("OPTIONS", CHAT, {b"origin": [OTHER], **asks}) == []
    assert cors.preflight("OPTIONS", CHAT, asks) is None
    assert cors.preflight("POST", CHAT, {b"origin": [APP], **asks}) is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({b"host": [b"h:80"]}, False),
        ({b"host": [b"h:80"], b"origin": [b"http://h:80"]}, False),
        ({b"host": [b"H:80"], b"origin": [b"https://h:80"], b"sec-fetch-site": [b"same-origin"]}, False),
        ({b"host": [b"h:80"], b"origin": [b"http://h:81"]}, True),
        ({b"host": [b"h:80"], b"origin": [b"null"]}, True),
        ({b"host": [b"h:80"], b"sec-fetch-site": [b"cross-site"]}, True),
        ({b"host": [b"h:80"], b"sec-fetch-site": [b"same-site"]}, True),
    ],
)
def test_a_request_of_a_page_of_another_origin_is_foreign(fields, expected):
    assert is_foreign(fields) is expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([b"application/json"], False),
        ([b"Application/JSON ; charset=utf-8"], False),
        ([], True),
        ([b"text/plain"], True),
        ([b"text/plain;application/json"], True),
        ([b"application/x-www-form-urlencoded"], True),
        ([b"application/json", b"text/plain"], True),
    ],
)
def test_a_browser_asks_before_it_sends_json_only(kinds, expected):
    assert is_simple({b"content-type": kinds} if kinds else {}) is expected


def test_an_origin_is_allowed_if_it_is_listed_and_the_only_one():
    assert Cors(APP.decode()).allows({b"origin": [APP]})
    assert not Cors(APP.decode()).allows({b"origin": [OTHER]})
    assert not Cors(APP.decode()).allows({b"origin": [APP, OTHER]})
    assert not Cors(APP.decode()).allows({})
    assert Cors("*").allows({b"origin": [OTHER]})


@pytest.mark.parametrize("text", ["", "*", "https://a.example", "http://localhost:3000,https://a.example"])
def test_origins_and_a_star_are_valid(text):
    assert origins_fault(text) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.example", "is no origin"),
        ("https://a.example/", "scheme, host and port only, such as https://a.example"),
        ("https://a.example/path", "such as https://a.example"),
        ("https://A.example", "lower case"),
        ("https://a:b", "is no origin"),
        ("https://a.example,", "holds ''"),
        ("https://a.example, https://b.example", "is no origin"),
        ("*,https://a.example", "write * alone"),
    ],
)
def test_what_is_no_origin_is_named_with_a_remedy(text, words):
    assert words in origins_fault(text)
