"""A bounded queue of spans for a slow or absent collector: at most QUEUE spans wait, and lost spans are
counted.

The SDK's own processor drops spans without counting them, and its shutdown waits for the collector without a
limit.
"""

import threading
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

QUEUE = 2048  # spans


class BoundedBatches(SpanProcessor):
    """Hands spans to `exporter` in batches, from a separate thread."""

    def __init__(self, exporter: SpanExporter, close_s: float) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0
        self.num_dropped = 0
        self._close_s = close_s
        self._batches = BatchSpanProcessor(_Counted(exporter, self), max_queue_size=QUEUE)

    def __repr__(self) -> str:
        return f"BoundedBatches({self._num_waiting} wait, {self.num_dropped} dropped)"

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Does nothing at the start of a span."""

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._lock:
            if self._num_waiting >= QUEUE:
                self.num_dropped += 1
                return
            self._num_waiting += 1
        self._batches.on_end(span)

    def taken(self, count: int) -> None:
        """Notes that `count` spans go to the collector."""
        with self._lock:
            self._num_waiting -= count

    def lost(self, count: int) -> None:
        """Notes that `count` spans were lost."""
        with self._lock:
            self.num_dropped += count

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._within(timeout_millis / 1000, self._batches.force_flush)

    def shutdown(self) -> None:
        """Sends waiting spans within CLOSE_S. Loses the rest."""
        self._within(self._close_s, self._batches.shutdown)

    @staticmethod
    def _within(seconds: float, work: Callable[[], object]) -> bool:
        # a daemon thread does not delay the end of the process
        thread = threading.Thread(target=work, name="last spans", daemon=True)
        thread.start()
        thread.join(seconds)
        return not thread.is_alive()


class _Counted(SpanExporter):
    """An exporter that counts exported and lost spans."""

    def __init__(self, exporter: SpanExporter, batches: BoundedBatches) -> None:
        self._exporter, self._of = exporter, batches

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._of.taken(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self._of.lost(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
