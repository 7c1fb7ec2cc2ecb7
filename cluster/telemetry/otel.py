"""Traces by the OpenTelemetry SDK: spans are batched in a separate thread (`otel_batches`) and sent as OTLP
over HTTP.

Imported only when traces are configured, since the packages are the extra `otel`. The SDK's
environment variables apply (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_SCHEDULE_DELAY);
the collector's address is the setting.
"""

import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as SdkSpan

from ..config.groups import TraceSettings
from ..process.release import release
from .otel_batches import BoundedBatches
from .trace_context import TraceContext
from .tracing import Attribute, OpenSpan, Span

PATH = "/v1/traces"  # path of OTLP over HTTP
CLOSE_S = 2.0  # seconds that an ending process waits for the collector


def exporting(config: TraceSettings, instance: str) -> "OtelTracing":
    """Tracing that exports to the collector in the settings."""
    exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint.rstrip("/") + PATH)
    return OtelTracing(BoundedBatches(exporter, CLOSE_S), config.role, instance, sample=config.trace_sample)


class OtelTracing:
    """`Tracing` over a span processor. `clock` gives monotonic seconds, `wall` Unix nanoseconds."""

    def __init__(
        self,
        processor: SpanProcessor,
        role: str,
        instance: str,
        *,
        sample: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        resource = Resource.create(
            {
                "service.name": f"baton-{role}",
                "service.namespace": "baton",
                "service.version": release(),
                "service.instance.id": instance,
            }
        )
        sampler = ParentBased(TraceIdRatioBased(sample))
        self._processor = processor
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton", release())
        self._clock, self._wall = clock, wall
        self._is_closed = False

    @property
    def num_dropped(self) -> int:
        return self._processor.num_dropped if isinstance(self._processor, BoundedBatches) else 0

    def begin(self, name: str, parent: TraceContext, start: float) -> OpenSpan:
        context = _context_of(parent) if parent else Context()
        span = self._tracer.start_span(
            name, context, kind=SpanKind.SERVER, start_time=self.nanoseconds(start)
        )
        return _Open(self, span, parent.state)

    def record(self, span: Span) -> None:
        if span.parent:
            made = self._tracer.start_span(
                span.name, _context_of(span.parent), start_time=self.nanoseconds(span.start)
            )
            self.finish(made, span.end, span.attributes, span.error)

    def finish(self, span: SdkSpan, at: float, attributes: Mapping[str, Attribute], error: str) -> None:
        """Ends a span at monotonic `at`."""
        span.set_attributes(attributes)
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self.nanoseconds(at))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._provider.shutdown()  # sends waiting spans

    def nanoseconds(self, moment: float) -> int:
        """Unix nanoseconds of a monotonic time, by the clocks' current difference, since Unix time may be
        adjusted."""
        return self._wall() - int((self._clock() - moment) * 1e9)


class _Open:
    """A span in progress."""

    def __init__(self, tracing: OtelTracing, span: SdkSpan, state: str) -> None:
        self._tracing, self._span, self._is_over = tracing, span, False
        made = span.get_span_context()
        parent = f"00-{made.trace_id:032x}-{made.span_id:016x}-{int(made.trace_flags) & 1:02x}"
        self.context = TraceContext(parent, state)  # the client's tracestate, unchanged

    def end(self, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        if not self._is_over:
            self._is_over = True
            self._tracing.finish(self._span, at, attributes, error)


def _context_of(parent: TraceContext) -> Context:
    _, trace, span, flags = parent.parent.split("-")
    context = SpanContext(
        int(trace, 16),
        int(span, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([parent.state]),
    )
    return set_span_in_context(NonRecordingSpan(context), Context())
