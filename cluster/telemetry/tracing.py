"""Traces of requests across processes, linked by the W3C trace context. This module defines the interface for
a role's spans.

A span is recorded after its work, from timestamps that the role keeps anyway; without tracing nothing is
computed. Only the router's span of a request is opened in advance, since the workers' spans are its children
and their messages carry its context. The OpenTelemetry SDK is loaded only when traces are configured
(`otel`).
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from ..config.groups import TraceSettings
from ..distribution import install_command
from ..errors import ConfigError
from ..process.process import Serve
from .trace_context import NOWHERE, TraceContext

Attribute = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Completed work. Times are monotonic seconds."""

    name: str
    parent: TraceContext
    start: float
    end: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""  # kind of the failure; "": none


class OpenSpan(Protocol):
    """A span in progress."""

    context: TraceContext
    """The context for its child spans."""

    def end(self, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """Ends the span. Later calls have no effect."""


class Tracing(Protocol):
    """The destination of spans. Its methods are called from one thread of the role."""

    @property
    def num_dropped(self) -> int:
        """The number of spans lost on the way to the collector."""

    def begin(self, name: str, parent: TraceContext, start: float) -> OpenSpan:
        """Opens the span of a request. Without a client's `parent` it begins a new trace."""

    def record(self, span: Span) -> None:
        """Records a completed span. A span without a parent belongs to an untraced request and is dropped."""

    def close(self) -> None:
        """Sends recorded spans. Idempotent."""


class Untraced:
    """Tracing that records nothing and passes a client's context on to workers, which may trace."""

    num_dropped = 0

    def begin(self, name: str, parent: TraceContext, start: float) -> OpenSpan:
        return Passing(parent)

    def record(self, span: Span) -> None:
        """Drops the span."""

    def close(self) -> None:
        """Does nothing."""


@dataclass
class Passing:
    """A span that is not recorded."""

    context: TraceContext = NOWHERE

    def end(self, at: float, attributes: Mapping[str, Attribute], error: str = "") -> None:
        """Does nothing."""


def open_tracing(config: TraceSettings, instance: str) -> Tracing:
    """The destination of a role's spans.

    Raises ConfigError when traces are configured and cannot be exported.
    """
    if not config.otlp_endpoint:
        return Untraced()
    parts = urlsplit(config.otlp_endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-endpoint {config.otlp_endpoint!r} is not a URL; write http://HOST:4318")
    try:
        module = importlib.import_module(".otel", __package__)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-endpoint needs {error.name}, which is not installed: {install_command('otel')}, or "
            "leave the flag out"
        ) from None
    tracing: Tracing = module.exporting(config, instance)
    return tracing


def closing(tracing: Tracing, serve: Serve) -> Serve:
    """Wraps `serve` so that it sends recorded spans at its end."""

    def run() -> int:
        try:
            return serve()
        finally:
            tracing.close()

    return run
