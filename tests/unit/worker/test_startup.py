"""The start of a worker: one order of phases for both roles, and no phase before those that it needs."""

import pytest
from baton.cluster.config.load import load_config
from baton.cluster.config.roles import DecodeConfig, PrefillConfig
from baton.cluster.errors import StartupError
from baton.decode.startup import DecodeStartup
from baton.prefill.startup import PrefillStartup, advertised_endpoint
from baton.tests.unit.router.workers.test_registry import hello
from baton.worker.identity import objectives_of, small_pool_warning

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
        with pytest.raises(StartupError, match=r"no attribute .engine"):
            startup.open_sockets()
    finally:
        startup.link.close()


def test_a_worker_tells_the_objectives_that_it_was_given():
    def told(config, *flags):
        found = objectives_of(load_config(config, ["--model=m", *flags], {}))
        assert {choice.why for choice in found.values()} <= {"given"}
        return {name: choice.value for name, choice in found.items()}

    assert told(PrefillConfig) == told(DecodeConfig) == {}
    assert told(PrefillConfig, "--slo-ttft-ms=300") == {"slo_ttft_ms": "300"}
    both = told(DecodeConfig, "--slo-ttft-ms=300", "--slo-itl-ms=12.5")
    assert both == {"slo_ttft_ms": "300", "slo_itl_ms": "12.5"}


@pytest.mark.parametrize(("kind", "config"), ROLES, ids=["prefill", "decode"])
def test_a_worker_runs_with_the_sizes_that_it_tells_the_router(kind, config, toy_checkpoint):
    flags = ["--device=cpu", "--dtype=float32", "--max-context=100", "--threads=1"]
    started = kind(load_config(config, [f"--model={toy_checkpoint('llama')}", *flags], {}), "1" * 32)
    started.read_keys()
    started.load_engine()
    started.kv_endpoint = "tcp://127.0.0.1:1"
    hello = started.make_hello()
    told = {name: choice.value for name, choice in hello.chosen.items()}
    assert told["max_context"] == hello.max_context == started.engine.max_context == 100
    assert told["page_size"] == hello.page_size == 16
    assert (told["graphs"], hello.chosen["max_context"].why) == ("off", "given")
    assert hello.max_running == told["max_batch" if hello.role == "prefill" else "max_running"]
    assert ("chunk_size" in told) == ("max_batch" in told) == (hello.role == "prefill")


def test_an_advertised_address_keeps_the_key_of_the_bound_one():
    bound = "tcp://127.0.0.1:7200"
    assert advertised_endpoint("", bound) == bound
    config = PrefillConfig(model="m", kv_advertise="tcp://example.org:7300")
    assert advertised_endpoint(config.kv_advertise, bound) == "tcp://example.org:7300"
    key = "ab" * 32
    assert advertised_endpoint(config.kv_advertise, f"{bound}#{key}") == f"tcp://example.org:7300#{key}"


@pytest.mark.parametrize(("pages", "spec_tokens", "holds"), [(32, 0, 0), (31, 0, 496), (32, 7, 505)])
def test_a_pool_that_cannot_hold_the_context_is_warned_of(pages, spec_tokens, holds):
    told = small_pool_warning(
        hello(pages_total=pages, spec_tokens=spec_tokens, page_size=16, max_context=512)
    )
    assert (f"holds {holds} tokens" in told, "--kv-memory-mb" in told) == (bool(holds), bool(holds))
