"""All graphs of a process: their number, memory and replays by kind, and the reasons of eager forwards."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic

import torch

from ..errors import RanksApart
from .backend import GraphBackend
from .breakable import BreakableGraph, Breaks, ContextT, OutputT
from .errors import GraphError, StaleGraph, VotedDown
from .votes import Vote, alone

logger = logging.getLogger(__name__)

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class GraphKind(Enum):
    """The kind of forward that a graph holds."""

    TARGET_PREFILL = "target_prefill"  # by token bucket, breakable
    WHOLE_PREFILL = "whole_prefill"  # the same with attention inside, for few tokens on short contexts, full
    DRAFT_PREFILL = "draft_prefill"  # by token bucket, breakable
    DECODE_STEP = "decode_step"  # a whole step, from drafts to the next newest token, by batch size, full
    RANKED_STEP = "ranked_step"  # the same where top-k or top-p must be looked at
    EDITED_STEP = "edited_step"  # the same with edited logits, grammar masks (a break) and logprobs
    DRAFT_CATCH_UP = "draft_catch_up"  # the drafter observes rows of earlier steps, by batch size, full

    @property
    def is_decode(self) -> bool:
        """Whether only decode servers own such graphs; a prefill server has none."""
        return self not in (GraphKind.TARGET_PREFILL, GraphKind.WHOLE_PREFILL, GraphKind.DRAFT_PREFILL)


class FallbackReason(Enum):
    """The reason of an eager forward where graphs of its kind are wanted."""

    TOKENS_OVER_MAX = "tokens_over_max"
    PADDING_OVER_2X = "padding_over_2x"  # the bucket has more than twice the real rows
    VERIFY_MODE = "verify_mode"  # a verify of fixed shape has a graph of its own kind
    HIDDEN_MODE = "hidden_mode"  # more hidden rows asked for than captured
    CALLER_EMBEDS = "caller_embeds"
    LOGPROB_TAIL = "logprob_tail"
    CONTEXT_OVER_PLANNED = "context_over_planned"
    BATCH_OVER_PLANNED = "batch_over_planned"
    LORA = "lora"
    MULTIMODAL = "multimodal"
    IDLE_RANK = "idle_rank"
    RANK_VOTE = "rank_vote"  # another rank could not capture the graph, or found it wrong
    CAPTURE_FAILED = "capture_failed"
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True)
class KindReport:
    """The graphs of one kind."""

    kind: str
    """Value of the GraphKind."""
    buckets: tuple[int, ...]
    """Sizes (tokens or requests) that have a graph now, ascending, once for each number of rows."""
    rows: tuple[int, ...]
    """Rows per request of each of these graphs; 0 where any will do."""
    num_breaks: int
    """Breaks of each graph; 0: full graphs."""
    own_bytes: int
    """Memory that these graphs hold beside the shared pool."""
    pool_growth_bytes: int
    """How much the shared pool grew while such graphs were captured, as of the newest full report."""
    capture_seconds: float
    """Time that capturing them took."""
    replays: dict[int, int]
    """Replays by bucket since the start, of dropped graphs too."""
    pad_rows: int
    """Rows replayed that were not real, since the start."""
    fallbacks: dict[str, int]
    """Forwards that ran eagerly instead, by reason, since the start."""


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """A snapshot of all graphs."""

    backend: str
    """Which backend holds them."""
    num_graphs: int
    """Graphs that exist now."""
    num_decode_graphs: int
    """Those of decode kinds; 0 on a prefill server."""
    pool_bytes: int
    """Memory of the pool that all graphs share."""
    own_bytes: int
    """Memory that single graphs hold beside it."""
    kinds: tuple[KindReport, ...]
    """One entry for each kind that has, had or missed a graph, in the order of GraphKind."""


class BoundTensors:
    """Parameters by name, with the addresses that a graph has bound.

    The tensors of the capture are kept alive. Otherwise a new tensor could take the address of a freed one
    unnoticed.
    """

    def __init__(self, named: NamedTensors) -> None:
        self._named = named
        self._bound = dict(named())

    def stale(self) -> list[str]:
        """Names of tensors that were moved, reshaped, added or removed. Changed contents do not count."""
        now = dict(self._named())
        names = [*self._bound, *(name for name in now if name not in self._bound)]
        return [name for name in names if _identity(self._bound.get(name)) != _identity(now.get(name))]


class PooledGraph(Generic[ContextT, OutputT]):
    """A graph of the pool, with a count of its replays."""

    def __init__(
        self,
        graph: BreakableGraph[ContextT, OutputT],
        kind: GraphKind,
        bucket: int,
        pool: "GraphPool",
        rows: int = 0,
    ) -> None:
        self.graph = graph
        self.kind = kind
        self.bucket = bucket
        self.rows = rows
        self.bound: BoundTensors | None = None
        self.num_replays = 0
        self.capture_seconds = 0.0
        self._pool = pool

    def replay(self, context: ContextT) -> OutputT:
        """Replays the graph as `BreakableGraph.replay`.

        Every `check_every`th replay checks the addresses of the parameters and raises StaleGraph for a
        replaced tensor.
        """
        self.num_replays += 1
        if self._pool.check_every and self.num_replays % self._pool.check_every == 0:
            self.require_fresh()
        output = self.graph.replay(context)
        self._pool.count_replay(self.kind, self.bucket, self.bucket - context.num_rows)
        return output

    def require_fresh(self) -> None:
        """Raises StaleGraph unless every parameter is still at its bound address."""
        stale = self.bound.stale() if self.bound is not None else []
        if stale:
            shown = ", ".join(stale[:4]) + (f" and {len(stale) - 4} more" if len(stale) > 4 else "")
            raise StaleGraph(f"{self.graph.name} reads old memory of {shown}; drop and capture it again")

    def __repr__(self) -> str:
        return f"<PooledGraph {self.kind.value} {self.bucket}, {self.graph!r}>"


class GraphPool:
    """The graphs of all runners of a process, on one backend.

    Every `check_every`th replay of a graph compares the addresses of the parameters, which costs a walk over
    them; 0: none. With `as_one_break` nothing is recorded and every forward runs eagerly behind the same
    interface. Graphs exist on all ranks that `vote` together, or on none.
    """

    def __init__(
        self,
        backend: GraphBackend,
        *,
        check_every: int = 0,
        as_one_break: bool = False,
        vote: Vote = alone,
    ) -> None:
        self.backend = backend
        self.vote = backend.vote = vote
        self.check_every = check_every
        self.as_one_break = as_one_break
        self.num_captured = 0  # captures so far, of dropped graphs, too
        self._graphs: dict[tuple[GraphKind, int, int], PooledGraph[Any, Any]] = {}
        self._replays: Counter[tuple[GraphKind, int]] = Counter()
        self._pad_rows: Counter[GraphKind] = Counter()
        self._fallbacks: Counter[tuple[GraphKind, FallbackReason]] = Counter()
        # Asking the backend for its pool's size may take as long as a capture, so it is asked between kinds.
        self._growth: Counter[GraphKind] = Counter()
        self._checked: set[tuple[GraphKind, int]] = set()  # the code that was warmed up and guarded
        self._measured: tuple[GraphKind, int] | None = None  # the kind being captured, and the pool before it

    def capture(
        self,
        kind: GraphKind,
        bucket: int,
        fn: Callable[[Breaks[ContextT]], OutputT],
        context: ContextT,
        *,
        parameters: NamedTensors | None = None,
        rows: int = 0,
    ) -> PooledGraph[ContextT, OutputT]:
        """Capture `fn` at `bucket` rows. Graphs of a kind may differ in `rows`, the rows per request.

        Code is warmed up at its first size; where another size fails without that, it gets its own run.
        `parameters`: the tensors whose exchange makes the graph stale. Runners capture their largest bucket
        first, so smaller ones fit into the memory that it left. Raises GraphError if the graph exists
        already, VotedDown if another rank could not capture it.
        """
        name = f"{kind.value} {bucket}" + (f" x {rows}" if rows else "")
        if (kind, bucket, rows) in self._graphs:
            raise GraphError(f"{name} is already captured; drop it first")
        graph = BreakableGraph[ContextT, OutputT](self.backend, name=name, as_one_break=self.as_one_break)
        pooled = PooledGraph(graph, kind, bucket, self, rows)
        if self._measured is None or self._measured[0] is not kind:
            self._settle_growth()
            self._measured = kind, self.backend.pool_bytes()
        start = time.monotonic()
        self.num_captured += 1
        is_known = (kind, rows) in self._checked
        self.backend.is_guarded = not is_known
        error = self._try(graph, fn, context, is_warm=is_known)
        if error is not None and is_known and self._may_run(error):
            logger.info("%s is captured again, behind a run: %s", name, error)
            error = self._try(graph, fn, context)
        if error is not None:
            raise error
        self._checked.add((kind, rows))
        pooled.capture_seconds = time.monotonic() - start
        pooled.bound = BoundTensors(parameters) if parameters is not None else None
        self._graphs[kind, bucket, rows] = pooled
        return pooled

    def _try(
        self,
        graph: BreakableGraph[ContextT, OutputT],
        fn: Callable[[Breaks[ContextT]], OutputT],
        context: ContextT,
        *,
        is_warm: bool = False,
    ) -> RuntimeError | None:
        """Captures `graph` on all ranks. Otherwise it is captured on none, and the reason is returned.

        A rank that fails while others are in a run cannot vote with them: its "no" raises RanksApart.
        """
        try:
            graph.capture(fn, context, is_warm=is_warm)
        except VotedDown as error:  # the vote is over
            return error
        except RuntimeError as error:
            self._say_no(graph.name, error)
            return error
        if self.vote(True):
            return None
        graph.release()
        return VotedDown("another rank could not capture it")

    def _may_run(self, error: RuntimeError) -> bool:
        """Whether all ranks try again behind a run: one that has no memory would leave the others in it."""
        return self.vote is alone or self.vote("out of memory" not in str(error))

    def _say_no(self, name: str, error: RuntimeError) -> None:
        """Votes against a graph that failed with `error` here."""
        try:
            self.vote(False)
        except RanksApart as apart:
            raise RanksApart(f"{name} cannot be captured: {error}; {apart}") from error

    def drop(self, kind: GraphKind | None = None, bucket: int | None = None, rows: int | None = None) -> int:
        """Release all graphs, or those of one kind, bucket or number of rows.

        Their counters stay. Returns the number of graphs.
        """
        wanted = (kind, bucket, rows)
        self._settle_growth()
        keys = [key for key in self._graphs if all(w in (None, k) for w, k in zip(wanted, key, strict=True))]
        for key in keys:
            self._graphs.pop(key).graph.release()
        return len(keys)

    def _settle_growth(self) -> None:
        """Counts how much the pool grew for the kind that was captured last."""
        if self._measured is not None:
            kind, before = self._measured
            self._growth[kind] += self.backend.pool_bytes() - before
            self._measured = None

    def stale(self) -> dict[str, list[str]]:
        """Names of exchanged parameters, by the graph that still reads the old ones."""
        found = {g.graph.name: g.bound.stale() for g in self._graphs.values() if g.bound is not None}
        return {name: names for name, names in found.items() if names}

    def count_replay(self, kind: GraphKind, bucket: int, pad_rows: int) -> None:
        """Count one replay of `bucket` with `pad_rows` padding rows."""
        self._replays[kind, bucket] += 1
        self._pad_rows[kind] += pad_rows

    def count_fallback(self, kind: GraphKind, reason: FallbackReason) -> None:
        """Count one eager forward for `reason`."""
        self._fallbacks[kind, reason] += 1

    def forget_replays(self) -> None:
        """Reset the replay counters, for example after a self-test."""
        self._replays.clear()
        self._pad_rows.clear()

    def report(self) -> PoolReport:
        """The graphs that exist now, and the counters since the start."""
        self._settle_growth()
        graphs = list(self._graphs.values())
        return PoolReport(
            backend=self.backend.name,
            num_graphs=len(graphs),
            num_decode_graphs=sum(graph.kind.is_decode for graph in graphs),
            pool_bytes=self.backend.pool_bytes(),
            own_bytes=sum(graph.graph.num_bytes for graph in graphs),
            kinds=self.kinds(),
        )

    def kinds(self) -> tuple[KindReport, ...]:
        """The report's entries by kind, for every heartbeat.

        The full report may walk through the device's allocator.
        """
        seen = {key[0] for counts in (self._graphs, self._replays, self._fallbacks) for key in counts}
        graphs = list(self._graphs.values())
        return tuple(self._kind_report(kind, graphs) for kind in GraphKind if kind in seen)

    def _kind_report(self, kind: GraphKind, graphs: Sequence[PooledGraph[Any, Any]]) -> KindReport:
        mine = sorted((g for g in graphs if g.kind is kind), key=lambda g: (g.bucket, g.rows))
        return KindReport(
            kind=kind.value,
            buckets=tuple(graph.bucket for graph in mine),
            rows=tuple(graph.rows for graph in mine),
            num_breaks=max((graph.graph.num_breaks for graph in mine), default=0),
            own_bytes=sum(graph.graph.num_bytes for graph in mine),
            pool_growth_bytes=self._growth[kind],
            capture_seconds=sum(graph.capture_seconds for graph in mine),
            replays={
                bucket: count
                for (k, bucket), count in sorted(self._replays.items(), key=_by_bucket)
                if k is kind
            },
            pad_rows=self._pad_rows[kind],
            fallbacks={reason.value: count for (k, reason), count in self._fallbacks.items() if k is kind},
        )

    def __repr__(self) -> str:
        counts = Counter(kind.value for kind, *_ in self._graphs)
        return (
            f"<GraphPool {self.backend.name}, graphs {dict(counts)}, {sum(self._replays.values())} replays>"
        )


def _by_bucket(item: tuple[tuple[GraphKind, int], int]) -> int:
    return item[0][1]


def _identity(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
