"""The start of a worker: one order of phases for both roles, and no phase before those that it needs."""

import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.cluster.errors import StartupError
from baton.decode.startup import DecodeStartup
from baton.prefill.startup import PrefillStartup, advertised_endpoint

ROLES = [(PrefillStartup, PrefillConfig), (DecodeStartup, DecodeConfig)]


@pytest.fixture(params=ROLES, ids=["prefill", "decode"])
def startup(request, tmp_path):
    kind, config = request.param
    return kind(load_config(config, [f"--model={tmp_path}"], {}), "1" * 32)


def test_both_roles_start_in_one_order(startup):
    assert [name for name, _ in startup.phases()] == [
        "prepare the process",
        "read keys",
        "open metrics and traces",
        "load the engine",
        "open sockets",
        "build the main loop",
    ]


def test_a_main_loop_needs_an_engine(startup):
    with pytest.raises(AttributeError, match="tracing"):
        startup.build_loop()
    startup.read_keys()
    startup.open_telemetry()
    with pytest.raises(AttributeError, match="engine"):
        startup.build_loop()


def test_sockets_open_only_after_the_engine_is_loaded(startup):
    startup.read_keys()
    try:
        with pytest.raises(StartupError, match="layout"):
            startup.open_sockets()
    finally:
        startup.link.close()


def test_an_advertised_address_keeps_the_key_of_the_bound_one():
    bound = "tcp://127.0.0.1:7200"
    assert advertised_endpoint(bound, "") == bound
    assert advertised_endpoint(bound, "tcp://example.org:7300") == "tcp://example.org:7300"
    key = "ab" * 32
    assert advertised_endpoint(f"{bound}#{key}", "tcp://example.org:7300") == f"tcp://example.org:7300#{key}"
