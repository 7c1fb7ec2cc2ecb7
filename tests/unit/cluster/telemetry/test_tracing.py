"""Traces by the OpenTelemetry SDK, kept in memory: one trace spans router, prefill and decode."""

import pytest
from baton.cluster.config.load import ignored_settings
from baton.cluster.config.roles import DecodeConfig, PrefillConfig, RouterConfig
from baton.cluster.errors import ConfigError
from baton.cluster.protocol.messages import Failed, Prefill, Reserve
from baton.cluster.telemetry import otel
from baton.cluster.telemetry import tracing as module
from baton.cluster.telemetry.otel import OtelTracing
from baton.cluster.telemetry.trace_context import NOWHERE, TraceContext, carried_by
from baton.cluster.telemetry.tracing import Span, Untraced, closing, open_tracing
from baton.decode.queues import DecodeRoom
from baton.decode.spans import decode_spans
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.prefill.queues import PrefillQueues, PrefillRoom
from baton.prefill.spans import prefill_spans
from baton.router.endpoints.request_spans import end_request
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job, Tag
from baton.tests.unit.router.scheduling.test_dispatcher import D, Sampling, World
from baton.tests.unit.router.scheduling.test_history import say, serve
from baton.worker.spans import RoomSpans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

CLIENT = "00-" + "4b" * 16 + "-" + "00f067aa0ba902b7" + "-01"
STATE = "rojo=00f067aa0ba902b7,1a@congo=t61rcWkgMzE"
WALL_NS = 1_700_000_000_000_000_000


class Kept:
    """Traces of one role on a clock that the test moves."""

    def __init__(self, role, clock, sample=1.0):
        self._exporter = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self._exporter)
        wall = lambda: WALL_NS + int(clock() * 1e9)  # noqa: E731
        self.tracing = OtelTracing(processor, role, "7" * 32, sample=sample, clock=clock, wall=wall)

    @property
    def spans(self):
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time)


def seconds(span):
    return (span.start_time - WALL_NS) / 1e9, (span.end_time - WALL_NS) / 1e9


def submit(world, kept, parent="", state=""):
    """One request as the service submits it."""
    span = kept.tracing.begin("chat tiny", TraceContext(parent, state), world.now)
    tag = Tag(
        reply_id="chatcmpl-1",
        span=span,
        on_end=lambda request, now: end_request(kept.tracing, request, "tiny", now),
    )
    job = Job(prompt_ids=[5] * 16, sampling=Sampling(max_new_tokens=4), arrived=world.now, tokenize_s=0.0)
    [entry] = world.dispatcher.submit([job], Inbox(lambda: world.now), tag)
    return entry


def room_request(message):
    return Request(
        room=message.room,
        epoch=message.epoch,
        prompt_ids=message.prompt_ids,
        sampling=SamplingParams(),
        eos_ids=(),
    )


@pytest.fixture
def world():
    world = World().join()
    world.now = 100.0
    return world


def test_one_trace_goes_through_router_prefill_and_decode(world):
    clock = lambda: world.now  # noqa: E731
    router, prefill, decode = (Kept(role, clock) for role in ("router", "prefill", "decode"))
    entry = submit(world, router, CLIENT, STATE)
    [ordered], [reserved] = world.of(b"p", Prefill), world.of(b"d", Reserve)
    assert ordered.traceparent == reserved.traceparent != CLIENT
    assert ordered.tracestate == reserved.tracestate == STATE
    queues = PrefillQueues(8)
    queues.on_left = RoomSpans(prefill.tracing, clock, prefill_spans).left
    room = PrefillRoom(request=room_request(ordered), arrived=100.0, deadline=None, trace=carried_by(ordered))
    queues.add(room)
    room.started, room.finished, room.cached_tokens, room.chunks = 100.1, 100.3, 8, 2
    decoding = DecodeRoom(
        request=room_request(reserved), arrived=100.0, deadline=None, have=0, features=None,
        trace=carried_by(reserved), landed_at=100.4, started_at=100.5, handoff_s=0.05, handoff_bytes=4096,
        handoff_blocks=2, verify_steps=2, drafted=6, accepted=1,
    )  # fmt: skip
    decoding.request.append([9, 8, 7, 6], ())
    decoding.request.finish_reason = "length"
    serve(world, entry)
    world.now = 101.0
    queues.remove(room)
    RoomSpans(decode.tracing, clock, decode_spans).left(decoding)
    root = next(span for span in router.spans if span.kind is SpanKind.SERVER)
    others = [span for kept in (router, prefill, decode) for span in kept.spans if span is not root]
    assert [span.name for span in others] == ["queue", "prefill", "hand-off", "decode"]
    assert f"{root.context.trace_id:032x}" == CLIENT.split("-")[1]
    assert f"{root.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert {(span.context.trace_id, span.parent.span_id) for span in others} == {
        (root.context.trace_id, root.context.span_id)
    }
    assert {span.context.trace_state.to_header() for span in (root, *others)} == {STATE}
    moments = [(100.0, 100.0), (100.0, 100.3), (100.0, 100.4), (100.5, world.now)]
    assert [seconds(span) for span in others] == [pytest.approx(pair) for pair in moments]
    assert others[2].attributes["baton.handoff_bytes"] == 4096
    assert others[3].attributes["baton.accepted_tokens"] == 1
    assert all(span.attributes["baton.room"] == entry.room.room for span in others)
    assert [span.resource.attributes["service.name"] for span in (root, *others[1:3])] == [
        "baton-router", "baton-prefill", "baton-decode",
    ]  # fmt: skip


def test_the_span_of_a_request_has_the_attributes_of_the_conventions(world):
    kept = Kept("router", lambda: world.now)
    serve(world, submit(world, kept))
    root = next(span for span in kept.spans if span.kind is SpanKind.SERVER)
    told = root.attributes
    assert (root.name, root.parent) == ("chat tiny", None)
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", "tiny")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (16, 4)
    assert (told["gen_ai.response.id"], told["gen_ai.request.max_tokens"]) == ("chatcmpl-1", 4)
    assert told["baton.time_to_first_token"] == pytest.approx(0.2)
    assert seconds(root) == pytest.approx((100.0, 100.4))
    assert root.status.status_code is StatusCode.UNSET
    assert not any("5, 5" in str(value) for value in told.values()), "no prompt"


def test_the_span_of_a_failed_or_cancelled_request_says_so(world):
    kept = Kept("router", lambda: world.now)
    entry = submit(world, kept)
    world.dispatcher.fail_all("Shutdown", "over")
    failed = next(span for span in kept.spans if span.kind is SpanKind.SERVER)
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "failed")
    other = submit(world, kept)
    world.dispatcher.client_left(other)
    left = kept.spans[-1] if kept.spans[-1].kind is SpanKind.SERVER else kept.spans[-2]
    assert (left.status.status_code, left.attributes["baton.outcome"]) == (StatusCode.UNSET, "cancelled")
    assert entry.room.room != other.room.room


def test_every_wait_for_a_pair_is_a_span(world):
    kept = Kept("router", lambda: world.now)
    entry = submit(world, kept)
    world.now += 0.5
    world.dispatcher.on_message(b"d", serve_failed(entry))
    world.now += 0.5
    world.dispatcher.tick()
    serve(world, entry)
    waits = [(span.attributes["baton.epoch"], seconds(span)) for span in kept.spans if span.name == "queue"]
    assert [epoch for epoch, _ in waits] == [0, 1]
    assert waits[1][1][0] == pytest.approx(100.5)


def serve_failed(entry):
    room = {"room": entry.room.room, "epoch": 0, "instance": D}
    return Failed(kind="BadLogits", message="x", retryable=True, **room)


def test_a_request_that_is_not_sampled_is_traced_by_no_process(world):
    kept = Kept("router", lambda: world.now)
    entry = submit(world, kept, CLIENT[:-1] + "0")
    serve(world, entry)
    assert kept.spans == []
    assert world.of(b"p", Prefill)[0].traceparent.endswith("-00")
    workers = Kept("prefill", lambda: world.now)
    workers.tracing.record(
        Span(name="prefill", parent=carried_by(world.of(b"p", Prefill)[0]), start=1.0, end=2.0)
    )
    assert workers.spans == []


def test_a_share_of_the_requests_is_traced(world):
    none, some = (Kept("router", lambda: world.now, sample=share) for share in (0.0, 1.0))
    for kept in (none, some):
        serve(world, submit(world, kept))
    assert (len(none.spans), len(some.spans)) == (0, 2)


def test_without_traces_a_client_s_context_goes_on_to_the_workers(world):
    span = Untraced().begin("chat", TraceContext(CLIENT, STATE), 0.0)
    assert span.context == TraceContext(CLIENT, STATE)
    world.dispatcher.submit(
        [Job(prompt_ids=[5], sampling=Sampling(max_new_tokens=2), arrived=100.0, tokenize_s=0.0)],
        Inbox(lambda: world.now),
        Tag(span=span),
    )
    assert (
        carried_by(world.of(b"p", Prefill)[0])
        == carried_by(world.of(b"d", Reserve)[0])
        == TraceContext(CLIENT, STATE)
    )
    say(world)


@pytest.mark.parametrize("config", [RouterConfig, PrefillConfig, DecodeConfig])
def test_traces_that_are_asked_for_need_the_package(config, monkeypatch):
    def missing(name, package=None):
        raise ModuleNotFoundError("No module", name="opentelemetry")

    asked = config(model="m", otlp_endpoint="http://127.0.0.1:4318")
    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(
        ConfigError, match=r"--otlp-endpoint needs opentelemetry.*pip install 'baton-serve\[otel\]'"
    ):
        open_tracing(asked, "7" * 32)
    assert isinstance(open_tracing(config(model="m"), "7" * 32), Untraced), "not asked for"


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "ftp://h", "http://", "x"])
def test_a_collector_that_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="is not a URL"):
        open_tracing(RouterConfig(model="m", otlp_endpoint=url), "7" * 32)


def test_a_share_without_a_collector_is_warned_of():
    assert ignored_settings(RouterConfig(model="m", trace_sample=0.5)) == [
        "--trace-sample is ignored: without --otlp-endpoint nothing is traced"
    ]


def test_buffered_spans_are_sent_when_a_process_ends(monkeypatch):
    asked, exporter = [], InMemorySpanExporter()
    monkeypatch.setattr(otel, "OTLPSpanExporter", lambda endpoint: asked.append(endpoint) or exporter)
    tracing = open_tracing(PrefillConfig(model="m", otlp_endpoint="http://127.0.0.1:4318/"), "7" * 32)
    assert asked == ["http://127.0.0.1:4318/v1/traces"]
    span = tracing.begin("x", NOWHERE, 0.0)
    span.end(1.0, {})
    span.end(2.0, {"late": True})
    assert closing(tracing, lambda: 3)() == 3
    assert [span.name for span in exporter.get_finished_spans()] == ["x"]
    assert "late" not in exporter.get_finished_spans()[0].attributes
    tracing.close()
