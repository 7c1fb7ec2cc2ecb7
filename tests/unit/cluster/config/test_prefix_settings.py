"""Settings of prefixes that prefill pulls from decode: where decode listens, and when they serve nothing."""

import pytest
from baton.cluster.config.link_checks import check_links
from baton.cluster.config.load import ignored_settings, load_config
from baton.cluster.config.roles import DecodeConfig
from baton.cluster.errors import ConfigError


def decode(*flags):
    return load_config(DecodeConfig, ["--model=m", *flags], {})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prefix-bind=tcp://0.0.0.0:7300"], "--prefix-bind tcp://0.0.0.0:7300"),
        (["--prefix-bind=tcp://0.0.0.0:7300", "--trusted-network"], "--prefix-advertise"),
        (["--prefix-bind=tcp://0.0.0.0:7300", "--keys=/k"], "prefill"),
    ],
)
def test_an_open_address_needs_keys_and_another_one_to_call(flags, words):
    with pytest.raises(ConfigError) as caught:
        check_links(decode(*flags))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--prefix-bind=ipc:///run/x"],
        ["--prefix-bind=tcp://0.0.0.0:7300", "--trusted-network", "--prefix-advertise=tcp://node:7300"],
        ["--prefix-bind=tcp://0.0.0.0:7300", "--offer-prefixes=off"],
        ["--prefix-bind=tcp://0.0.0.0:7300", "--prefix-cache=off"],
        ["--prefix-bind=tcp://0.0.0.0:7300", "--tp=2"],
    ],
)
def test_a_good_address_is_taken_and_one_of_no_use_is_not_looked_at(flags):
    check_links(decode(*flags))


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--offer-prefixes=off", "--offer-prefixes is off"),
        ("--prefix-cache=off", "--prefix-cache is off"),
        ("--tp=2", "it has several ranks"),
        ("--dp-attention=2", "it has several ranks"),
    ],
)
def test_addresses_of_a_worker_that_offers_nothing_are_named(flag, reason):
    lines = ignored_settings(decode(flag, "--prefix-bind=tcp://127.0.0.1:7300", "--prefix-bulk-port=7301"))
    assert f"--prefix-bind is ignored: no prefix is offered while {reason}" in lines
    assert f"--prefix-bulk-port is ignored: no prefix is offered while {reason}" in lines
    assert not any("--prefix" in line for line in ignored_settings(decode(flag)))


def test_a_bulk_port_is_for_keys_over_tcp():
    line = "--prefix-bulk-port is ignored"
    assert any(line in found for found in ignored_settings(decode("--prefix-bulk-port=7301")))
    assert not any(
        line in found for found in ignored_settings(decode("--prefix-bulk-port=7301", "--keys=/k"))
    )
