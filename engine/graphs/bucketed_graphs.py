"""The graphs of one kind, one per bucket, and the choice of a graph for each batch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from .breakable import Breaks, ContextT, OutputT
from .buckets import bucket_for
from .errors import GraphError, VotedDown
from .graph_pool import FallbackReason, GraphKind, GraphPool, NamedTensors, PooledGraph

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PathDecision:
    """The path of one batch.

    Either the graph of `kind` at `bucket`, or the eager path (`bucket` 0) for `reason`; `reason` is None if
    graphs are off. Without `is_replayed`, what the graph was captured from runs eagerly in its place, on the
    same inputs and as many rows.
    """

    kind: GraphKind | None = None
    bucket: int = 0
    reason: FallbackReason | None = None
    is_replayed: bool = True

    @property
    def is_graph(self) -> bool:
        """Whether a graph runs the batch."""
        return self.bucket > 0


EAGER = PathDecision()


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The inputs of the decision.

    `size`: tokens, or requests for graphs by batch size. `rows`: rows per request. `pages`: columns of the
    page table. `requests`: their number, for graphs by tokens. Each of these three is 0 if any number fits.
    `hidden`: the requested hidden rows, as CaptureHidden. `has_embeds`: the caller passes embeddings, which
    graphs cannot use, because they look embeddings up themselves.
    """

    size: int
    rows: int = 0
    pages: int = 0
    requests: int = 0
    hidden: int = 0
    has_embeds: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphLimits:
    """The limits for which the graphs of a kind were captured.

    Fields are those of BatchShape; 0 means no limit.

    `is_by_token`: buckets count tokens. A batch that leaves more than half of its bucket empty then runs
    eagerly.
    """

    is_by_token: bool
    rows: int = 0
    pages: int = 0
    requests: int = 0
    hidden: int = 0


class GraphFamily(Generic[ContextT, OutputT]):
    """All graphs of `kind`. With `is_enabled` False, every batch takes the eager path."""

    def __init__(self, pool: GraphPool, kind: GraphKind, buckets: Sequence[int], limits: GraphLimits) -> None:
        self.pool = pool
        self.kind = kind
        self.buckets = tuple(sorted(buckets))
        self.limits = limits
        self.is_enabled = True
        self._graphs: dict[int, PooledGraph[ContextT, OutputT]] = {}
        self._lost: dict[int, FallbackReason] = {}  # why a bucket has no graph
        self._forward: Callable[[int, Breaks[ContextT]], OutputT] | None = None  # what was captured

    @property
    def captured(self) -> tuple[int, ...]:
        """The buckets that have a graph, ascending."""
        return tuple(sorted(self._graphs))

    def capture(
        self,
        forward: Callable[[int, Breaks[ContextT]], OutputT],
        context: Callable[[int], ContextT],
        parameters: NamedTensors,
    ) -> None:
        """Capture every bucket, the largest first: `forward(bucket, breaks)` under `context(bucket)`.

        A bucket whose capture fails on some rank is logged and runs eagerly on all.
        """
        self._forward = forward
        logger.info(
            "capturing %d %s graphs, %d down to %d",
            len(self.buckets),
            self.kind.value,
            self.buckets[-1],
            self.buckets[0],
        )
        for bucket in reversed(self.buckets):
            try:
                graph = self.pool.capture(
                    self.kind,
                    bucket,
                    lambda breaks, bucket=bucket: forward(bucket, breaks),  # type: ignore[misc]
                    context(bucket),
                    parameters=parameters,
                    rows=self.limits.rows,
                )
            except RuntimeError as error:  # a graph's own errors and the device's, out of memory among them
                logger.error(
                    "graph %s %d cannot be captured, its batches run eagerly: %s",
                    self.kind.value,
                    bucket,
                    error,
                )
                self._lose(bucket, is_voted=isinstance(error, VotedDown))
            else:
                self._graphs[bucket] = graph
                logger.debug("captured %s %d", self.kind.value, bucket)

    def peek(self, shape: BatchShape) -> PathDecision:
        """The decision for a batch of this shape, without counting it."""
        reason = self._objection(shape)
        if reason is not None:
            return PathDecision(kind=self.kind, reason=reason)
        return PathDecision(kind=self.kind, bucket=bucket_for(self.buckets, shape.size))

    def decide(self, shape: BatchShape) -> PathDecision:
        """The decision for a batch of this shape. Call it once per batch, because it counts fallbacks."""
        decision = self.peek(shape)
        if decision.reason is not None:
            self.pool.count_fallback(self.kind, decision.reason)
        return decision

    def replay(self, decision: PathDecision, context: ContextT) -> OutputT:
        """Replay the chosen graph. The next replay overwrites its outputs.

        Raises GraphError for a decision without a graph of this kind.
        """
        if decision.kind is not self.kind or decision.bucket not in self._graphs:
            raise GraphError(f"{decision} is no decision for the graphs {self.captured} of {self.kind.value}")
        if not decision.is_replayed:
            assert self._forward is not None, "a captured bucket was captured from something"
            return self._forward(decision.bucket, Breaks(context))
        return self._graphs[decision.bucket].replay(context)

    def drop(self, bucket: int) -> None:
        """Release the graph of `bucket`. Its batches run eagerly from then on."""
        self._graphs.pop(bucket)
        self.pool.drop(self.kind, bucket, self.limits.rows)

    def drop_if_wrong(self, bucket: int, size: int, difference: str) -> bool:
        """Drops the graph of `bucket` if some rank found a difference from the eager path at `size`: each
        tells its own, "" without one, and all call this together.
        """
        if self.pool.vote(not difference):
            return False
        found = difference or "on another rank"
        logger.error(
            "graph %s %d differs from the eager path at %d: %s; dropped, its batches run eagerly",
            self.kind.value,
            bucket,
            size,
            found,
        )
        self.drop(bucket)
        self._lose(bucket, is_voted=not difference)
        self.pool.count_fallback(self.kind, self._lost[bucket])
        return True

    def _lose(self, bucket: int, *, is_voted: bool) -> None:
        self._lost[bucket] = FallbackReason.RANK_VOTE if is_voted else FallbackReason.CAPTURE_FAILED

    def _objection(self, shape: BatchShape) -> FallbackReason | None:
        limits, bucket = self.limits, bucket_for(self.buckets, shape.size)
        for is_so, reason in (
            (shape.size == 0, FallbackReason.IDLE_RANK),
            (not self.is_enabled, FallbackReason.DISABLED),
            (shape.hidden > limits.hidden, FallbackReason.HIDDEN_MODE),
            (shape.has_embeds, FallbackReason.CALLER_EMBEDS),
            (limits.rows not in (0, shape.rows), FallbackReason.VERIFY_MODE),
            (0 < limits.pages < shape.pages, FallbackReason.CONTEXT_OVER_PLANNED),
            (0 < limits.requests < shape.requests, FallbackReason.BATCH_OVER_PLANNED),
            (not bucket and limits.is_by_token, FallbackReason.TOKENS_OVER_MAX),
            (not bucket, FallbackReason.BATCH_OVER_PLANNED),
            (bucket not in self._graphs, self._lost.get(bucket, FallbackReason.CAPTURE_FAILED)),
            (limits.is_by_token and bucket > 2 * shape.size, FallbackReason.PADDING_OVER_2X),
        ):
            if is_so:
                return reason
        return None

    def __repr__(self) -> str:
        return f"<GraphFamily {self.kind.value}, captured {self.captured} of {self.buckets}>"
