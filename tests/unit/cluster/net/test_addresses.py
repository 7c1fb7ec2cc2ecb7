"""Listening addresses of the roles, and the addresses that other hosts use for them."""

import pytest
from baton.cluster.net.endpoints import advertise_fault, is_wildcard, reached_at

BOUND = "tcp://0.0.0.0:7200"


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://*:1"])
def test_addresses_that_stand_for_all_addresses_are_known(endpoint: str) -> None:
    assert is_wildcard(endpoint)
    assert "--kv-advertise" in advertise_fault(endpoint, "")


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://node:1", "ipc:///0.0.0.0:1"]
)
def test_an_address_of_its_own_can_be_called_as_it_is(endpoint: str) -> None:
    assert not is_wildcard(endpoint)
    assert advertise_fault(endpoint, "") == ""
    assert reached_at(endpoint, "") == endpoint


def test_the_advertised_address_replaces_the_bound_one_and_keeps_its_port() -> None:
    assert reached_at(BOUND, "tcp://node-3:9000") == "tcp://node-3:9000"
    assert reached_at(BOUND, "tcp://node-3:0") == "tcp://node-3:7200"
    assert reached_at(BOUND, "tcp://[fd00::3]:0") == "tcp://[fd00::3]:7200"
    assert reached_at("ipc:///run/kv", "ipc:///run/other:0") == "ipc:///run/other:0"


@pytest.mark.parametrize(
    ("bind", "advertised"),
    [
        (BOUND, "node-3:9000"),
        (BOUND, "tcp://node-3:65536"),
        (BOUND, "tcp://0.0.0.0:7200"),
        ("ipc:///run/kv", "tcp://node-3:0"),
    ],
)
def test_an_address_that_cannot_be_called_is_refused_with_its_value(bind: str, advertised: str) -> None:
    assert repr(advertised) in advertise_fault(bind, advertised)
