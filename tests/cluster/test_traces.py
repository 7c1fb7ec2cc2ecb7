"""A served request's trace as a collector gets it from three processes."""

import http.server
import threading

import httpx
import pytest
from baton.cluster.protocol.messages import Prefill, Reserve
from baton.tests.cluster.router_fakes import BODY, until
from baton.tests.cluster.serving import random_ids, served_model, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = "4b" * 16
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture
def collector():
    """(address, list of (service, span))"""
    spans = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                spans.extend(
                    (names["service.name"], span) for scope in resource.scope_spans for span in scope.spans
                )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", spans
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("parents", "states", "carried"),
    [
        ([PARENT], ["a=1", "b@c=2 , d=3"], (PARENT, "a=1,b@c=2,d=3")), ([PARENT], ["a=1", "a=2"], (PARENT,
        "")),
        ([PARENT, PARENT], ["a=1"], ("", "")), (["no"], ["a=1"], ("", "")), ([], ["a=1"], ("", "")),
    ],
    ids=["good", "bad state", "two parents", "bad parent", "no parent"],
)  # fmt: skip
def test_the_trace_headers_of_a_client_reach_both_workers(start, parents, states, carried):
    running, script = start()
    prefill, decode = running.pair(script)
    headers = [("traceparent", parent) for parent in parents] + [("tracestate", state) for state in states]
    assert httpx.post(running.url + "/v1/chat/completions", json=BODY, headers=headers).status_code == 200
    for order in (prefill.of(Prefill)[-1], decode.of(Reserve)[-1]):
        assert (order.traceparent, order.tracestate) == carried


@pytest.mark.slow
def test_a_collector_gets_one_trace_of_three_processes(served_dir, collector):
    address, spans = collector
    env = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with serving(
        served_dir, env=env, prefill=1, decode=1, kv_memory_mb=8, threads=1, otlp_endpoint=address
    ) as cluster:
        body = {
            "model": served_model(cluster),
            "prompt": random_ids(20, 330, seed=1),
            "max_tokens": 8,
            "ignore_eos": True,
        }
        headers = [("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b@c=2 , d=3")]
        assert (
            httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=60).status_code
            == 200
        )
        until(lambda: len(spans) >= 5, "five spans came", 20)
    assert {span.trace_id.hex() for _, span in spans} == {TRACE}
    names = sorted((service, span.name.split()[0]) for service, span in spans)
    assert names == [
        ("baton-decode", "decode"), ("baton-decode", "hand-off"), ("baton-prefill", "prefill"),
        ("baton-router", "queue"), ("baton-router", "text_completion"),
    ]  # fmt: skip
    assert {span.trace_state for _, span in spans} == {"a=1,b@c=2,d=3"}
    root = next(span for _, span in spans if span.name.startswith("text_completion"))
    for _, span in spans:
        assert span is root or span.parent_span_id == root.span_id
        assert root.start_time_unix_nano - 2e7 <= span.start_time_unix_nano <= span.end_time_unix_nano, (
            span.name
        )
