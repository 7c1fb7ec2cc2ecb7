"""Traces of requests across processes, linked by the W3C trace context. This module defines what a role records.

A span is recorded after its work, from timestamps that the role keeps anyway; without tracing nothing is computed. Only the
router's span of a request is opened in advance, since the workers' spans are its children and their messages carry its
context. The OpenTelemetry SDK is loaded only when traces are configured (`otel`).
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from ..config.groups import TraceSettings
from ..errors import ConfigError
from ..process.process import Serve
from .trace_context import NOWHERE, TraceContext

Attribute = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Work that is over. Times are monotonic seconds."""

    name: str
    parent: TraceContext
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""  # kind of what it failed of


class OpenSpan(Protocol):
    """A span that has begun."""

    context: TraceContext
    """For its children."""

    def end(self, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """The first call counts."""


class Tracing(Protocol):
    """Takes spans. Its methods are called from the role's one thread."""

    @property
    def num_dropped(self) -> int:
        """Spans that did not get to the collector."""

    def begin(self, name: str, parent: TraceContext, start: float) -> OpenSpan:
        """A span of a request that a client sent with `parent`, or with none: a trace of its own."""

    def record(self, span: Span) -> None:
        """A span that is over; one without a parent belongs to a request that is not traced, and is dropped."""

    def close(self) -> None:
        """Sends what is kept. Idempotent."""


class Untraced:
    """Where nobody asked for traces: nothing is recorded, and a client's context goes on to workers, who may be asked."""

    num_dropped = 0

    def begin(self, name: str, parent: TraceContext, start: float) -> OpenSpan:
        return Passing(parent)

    def record(self, span: Span) -> None:
        """Dropped."""

    def close(self) -> None:
        """Nothing is kept."""


@dataclass
class Passing:
    """A span of which nothing is kept."""

    context: TraceContext = NOWHERE

    def end(self, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """Nobody hears it."""


def open_tracing(config: TraceSettings, instance: str) -> Tracing:
    """What a role records into. Raises ConfigError when traces are asked for and cannot be."""
    if not config.otlp_endpoint:
        return Untraced()
    parts = urlsplit(config.otlp_endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-endpoint {config.otlp_endpoint!r} is not a URL; write http://HOST:4318")
    try:
        module = importlib.import_module(".otel", __package__)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint needs {error.name}, which is not installed: pip install 'baton[otel]', or leave the flag out"
        ) from None
    tracing: Tracing = module.exporting(config, instance)
    return tracing


def closing(tracing: Tracing, serve: Serve) -> Serve:
    """Serves, then sends what is kept."""

    def run() -> int:
        try:
            return serve()
        finally:
            tracing.close()

    return run
