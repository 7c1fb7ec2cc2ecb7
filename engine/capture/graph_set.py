"""The graphs of one engine: what its role captures, in which order, and what heartbeats say about them.

A prefill engine has target prefill graphs and nothing else; a decode engine has the graphs of a decode step, and the
draft's when it drafts. There is no switch that gives one role the other's.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..graphs.arena import ArenaMemory
from ..graphs.backend import GraphBackend
from ..graphs.buckets import batch_buckets, token_buckets
from ..graphs.cuda import CudaBackend
from ..graphs.inventory import GraphKind, GraphPool
from ..graphs.tape import TapeBackend
from ..kv_pool import KVPool
from ..lifecycle import Lifecycle, Phase
from ..model_runner import ModelRunner
from ..speculative.draft_graph_set import DraftGraphs
from ..speculative.drafters.eagle3 import DraftWorker
from ..speculative.drafters.prefill_graphs import DraftExtendGraphs, DraftLoopGraphs, DraftPrefillGraphs
from ..speculative.drafting.shape import DraftShape, planned_pages
from ..speculative.step.step_graphs import DeviceSteps
from ..speculative.tree_graphs import TreeLoopGraphs
from ..target_graphs import PrefillGraphs, TargetGraphs, VerifyGraphs
from .graph_self_test import SelfTest
from .step_self_test import StepSelfTest

logger = logging.getLogger(__name__)

MIB = 1 << 20
GRAPH_NAMES = {
    "prefill": GraphKind.TARGET_PREFILL,
    "draft_prefill": GraphKind.DRAFT_PREFILL,
    "verify": GraphKind.TARGET_VERIFY,  # those of one row are "decode"
    "draft": GraphKind.DRAFT_DECODE,
    "draft_extend": GraphKind.DRAFT_EXTEND,
}


def backend_for(device: torch.device) -> GraphBackend:
    """Device graphs on CUDA; elsewhere tapes that share their memory."""
    return CudaBackend(device) if device.type == "cuda" else TapeBackend(ArenaMemory())


class GraphSet:
    """Captures on `backend`, which must happen when the pools exist and before anything is served.

    `as_one_break`: nothing is recorded and each forward runs eagerly behind the graphs' interface, which tells errors of
    capturing from errors of padding and planning.
    """

    def __init__(self, backend: GraphBackend, lifecycle: Lifecycle, *, as_one_break: bool = False) -> None:
        self.pool = GraphPool(backend, as_one_break=as_one_break)
        self._lifecycle = lifecycle

    def capture_prefill(self, runner: ModelRunner, max_tokens: int) -> None:
        """Target prefill up to `max_tokens` tokens, as far as the KV pool can hold so many."""
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        buckets = token_buckets(min(max_tokens, _usable_slots(runner.pool)))
        prefill = PrefillGraphs(self.pool, runner.model, runner.pool, buckets)
        prefill.tokens.capture()
        runner.graphs = replace(runner.graphs or TargetGraphs(), prefill=prefill)

    def capture_decode(
        self, runner: ModelRunner, max_batch: int, shapes: Sequence[DraftShape], max_context: int
    ) -> None:
        """Decode or verify of each of `shapes`, the configured one first, for up to `max_batch` requests of up to
        `max_context` tokens each."""
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        max_pages = planned_pages(shapes, max_context, runner.pool.page_size)
        buckets = batch_buckets(min(max_batch, runner.pool.num_pages - 1))
        verifies = tuple(
            VerifyGraphs(
                self.pool,
                runner.model,
                runner.pool,
                buckets,
                num_rows=shape.num_nodes,
                max_pages=max_pages,
                has_tree=shape.is_tree,
            )
            for shape in shapes
        )
        for verify in verifies:
            verify.capture()
        runner.graphs = replace(runner.graphs or TargetGraphs(), verifies=verifies)

    def capture_draft(
        self,
        drafter: DraftWorker,
        max_batch: int,
        shapes: Sequence[DraftShape],
        max_context: int,
        max_tokens: int,
    ) -> None:
        """The draft's part of the same steps, and its prefill up to `max_tokens` tokens."""
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        head, pool = drafter.head, drafter.pool
        max_pages = planned_pages(shapes, max_context, pool.page_size)
        buckets = batch_buckets(min(max_batch, pool.num_pages - 1))
        common = (self.pool, head, pool, buckets)
        prefill = DraftPrefillGraphs(
            self.pool, head, pool, token_buckets(min(max_tokens, _usable_slots(pool)))
        )
        extends = tuple(DraftExtendGraphs(*common, num_rows=s.num_path, max_pages=max_pages) for s in shapes)
        chains = [shape for shape in shapes if shape.steps and not shape.is_tree]
        loops = tuple(DraftLoopGraphs(*common, num_rows=s.num_nodes, max_pages=max_pages) for s in chains)
        trees = [TreeLoopGraphs(*common, shape=s, max_pages=max_pages) for s in shapes if s.is_tree]
        prefill.tokens.capture()
        families: tuple[DraftExtendGraphs | DraftLoopGraphs | TreeLoopGraphs, ...] = (
            *extends,
            *loops,
            *trees,
        )
        for graphs in families:
            graphs.capture()
        tree = trees[0] if trees else None
        drafter.graphs = DraftGraphs(prefill=prefill, extends=extends, loops=loops, tree=tree)

    def capture_steps(self, steps: DeviceSteps) -> None:
        """Whole decode steps, for up to as many requests as `steps` takes."""
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        pool = steps.body.runner.pool
        steps.capture(self.pool, batch_buckets(min(steps.max_requests, pool.num_pages - 1)))

    def self_test(
        self,
        runner: ModelRunner,
        drafter: DraftWorker | None,
        max_context: int,
        steps: DeviceSteps | None = None,
    ) -> None:
        """Drop every graph that differs from the eager path; leaves the KV pools as they were, zeros."""
        tests: list[SelfTest | StepSelfTest] = [SelfTest(runner, drafter, max_context)]
        if steps is not None:
            tests.append(StepSelfTest(steps))
        dropped = sum(test.run() for test in tests)
        self.pool.forget_replays()
        compared = sum(test.num_compared for test in tests)
        logger.info("graph self-test: %d replays compared, %d graphs dropped", compared, dropped)

    def log_report(self) -> None:
        """One line per kind: how many, which, what they cost."""
        report = self.pool.report()
        for kind in report.kinds:
            logger.info(
                "%d %s graphs on %s, %d breaks, buckets %s: %.1f MiB in %.2f s",
                len(kind.buckets),
                kind.kind,
                report.backend,
                kind.num_breaks,
                list(kind.buckets),
                (kind.own_bytes + kind.pool_growth_bytes) / MIB,
                kind.capture_seconds,
            )
        logger.info("%d graphs, %.1f MiB shared", report.num_graphs, report.pool_bytes / MIB)

    def counts(self) -> dict[str, int]:
        """Graphs that exist now, by the names of heartbeats."""
        kinds = {kind.kind: kind.rows for kind in self.pool.kinds()}
        held = {name: len(kinds.get(kind.value, ())) for name, kind in GRAPH_NAMES.items()}
        decode = sum(rows == 1 for rows in kinds.get(GraphKind.TARGET_VERIFY.value, ()))
        verify = held.pop("verify") - decode
        return (
            held
            | ({"decode": decode} if decode or not verify else {})
            | ({"verify": verify} if verify else {})
        )

    def counters(self) -> dict[str, float]:
        """Replays by kind and fallbacks by kind and reason since the start; monotonic."""
        counters: dict[str, float] = {}
        for kind in self.pool.kinds():
            counters[f"graph_replays_{kind.kind}"] = sum(kind.replays.values())
            counters[f"graph_pad_rows_{kind.kind}"] = kind.pad_rows
            counters |= {f"graph_fallback_{kind.kind}_{reason}": n for reason, n in kind.fallbacks.items()}
        return counters

    def __repr__(self) -> str:
        return f"<GraphSet {self.pool!r}>"


def _usable_slots(pool: KVPool) -> int:
    return (pool.num_pages - 1) * pool.page_size
