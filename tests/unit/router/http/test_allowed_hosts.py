"""Which names in Host a router answers to, and the form of the setting."""

import pytest
from baton.cluster.config.host_names import hosts_fault
from baton.cluster.config.roles import RouterConfig
from baton.router.http.allowed_hosts import allowed_hosts_of


def admits(given, **settings):
    hosts = allowed_hosts_of(RouterConfig(model="m", **settings))
    return hosts is None or hosts.admits(given.encode("latin-1"))


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8000", "LocalHost:1", "localhost.", "a.localhost:8000", "127.0.0.1:8000",
        "127.9.9.9", "[::1]", "[::1]:8000", "127.0.0.1:",
    ],
)  # fmt: skip
def test_names_of_this_host_are_allowed_at_any_port(host):
    assert admits(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.com", "evil.example.com:8000", "localhost.evil.example.com", "notlocalhost", "",
        "127.0.0.1.evil.example.com", "128.0.0.1", "10.0.0.1:8000", "0.0.0.0", "[::2]", "[::1]x",
        "a@localhost", "localhost:8000:1", "localhost/x", "::1:x", ".localhost.x", "\xe9.x",
    ],
)  # fmt: skip
def test_other_names_are_not(host):
    assert not admits(host)
    assert admits(host, allowed_hosts="*")


def test_the_host_that_was_given_and_listed_names_are_allowed():
    listed = {"allowed_hosts": "llm.example.com,10.0.0.1,[fd00::5]"}
    for host in ("LLM.example.com:443", "llm.example.com.", "10.0.0.1", "[fd00::5]:8000", "localhost"):
        assert admits(host, **listed), host
    for host in ("example.com", "x.llm.example.com", "10.0.0.2", "[fd00::6]"):
        assert not admits(host, **listed), host
    assert admits("127.5.0.1:8000", host="127.5.0.1")
    assert admits("[fd00::7]:8000", host="fd00::7", allowed_hosts="x")


@pytest.mark.parametrize(
    ("settings", "is_limited"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": "llm.example.com"}, True),
        ({"api_keys": "keys.json"}, False),
        ({"api_keys": "keys.json", "allowed_hosts": "llm.example.com"}, True),
        ({"allowed_hosts": "*"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": "*"}, False),
    ],
)
def test_hosts_are_limited_where_neither_keys_nor_the_network_protect(settings, is_limited):
    assert (allowed_hosts_of(RouterConfig(model="m", **settings)) is not None) == is_limited


@pytest.mark.parametrize("text", ["", "*", "a", "llm.example.com,b_c", "10.0.0.1", "[fd00::5]", "fd00::5"])
def test_hosts_and_a_star_are_valid(text):
    assert hosts_fault(text) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("*,a", "write * alone"),
        ("*.example.com", "write each name"),
        ("a,", "holds ''"),
        ("a, b", "is no host"),
        ("https://a", "is no host"),
        ("a/x", "is no host"),
        ("a:8000", "leave out the port"),
        ("[fd00::5]:8000", "leave out the port"),
        ("-a", "is no host"),
    ],
)
def test_what_is_no_host_is_named_with_a_remedy(text, words):
    assert words in hosts_fault(text)
