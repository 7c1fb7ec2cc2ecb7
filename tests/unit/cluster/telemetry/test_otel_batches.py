"""A collector that is slow or away costs spans, and their number is known."""

import threading

import pytest
from baton.cluster.telemetry.otel_batches import QUEUE, BoundedBatches
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


class Collector(SpanExporter):
    """Answers with `result`, once it may."""

    def __init__(self, result=SpanExportResult.SUCCESS):
        self.result, self.may_answer, self.asked, self.taken = result, threading.Event(), threading.Event(), 0

    def export(self, spans):
        self.asked.set()
        assert self.may_answer.wait(30)
        self.taken += len(spans)
        if self.result is None:
            raise ConnectionError("away")
        return self.result


def made(collector, close_s=30.0):
    batches = BoundedBatches(collector, close_s)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(batches)
    return batches, provider.get_tracer("test")


def test_delivered_spans_are_not_counted_as_lost():
    collector = Collector()
    collector.may_answer.set()
    batches, tracer = made(collector)
    for _ in range(100):
        tracer.start_span("x").end()
    batches.shutdown()
    assert (collector.taken, batches.num_dropped) == (100, 0)


def test_spans_beyond_the_queue_are_dropped_and_counted():
    collector = Collector()
    batches, tracer = made(collector)
    for _ in range(600):  # more than a batch
        tracer.start_span("x").end()
    assert collector.asked.wait(30)
    for _ in range(QUEUE + 700):
        tracer.start_span("x").end()
    dropped = batches.num_dropped
    assert dropped >= 700
    collector.may_answer.set()
    batches.shutdown()
    assert collector.taken + dropped == 600 + QUEUE + 700
    assert batches.num_dropped == dropped


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, None])
def test_spans_that_the_collector_refuses_are_counted(result, caplog):
    collector = Collector(result)
    collector.may_answer.set()
    batches, tracer = made(collector)
    tracer.start_span("x").end()
    batches.shutdown()
    assert batches.num_dropped == 1


def test_the_end_waits_for_the_collector_in_bounded_time():
    collector = Collector()
    batches, tracer = made(collector, close_s=0.05)
    tracer.start_span("x").end()
    batches.shutdown()  # returns, though nobody answers
    assert collector.taken == 0
    collector.may_answer.set()
