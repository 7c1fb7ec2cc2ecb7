"""The graphs of one engine: their capture by role, and their counts for heartbeats.

A prefill engine has target prefill graphs only. A decode engine has the graphs of a decode step and, with a
drafter, those of the draft prefill. An aggregated decode engine has target prefill graphs too.
"""

import logging
import time
from collections.abc import Sequence

import torch

from ..graphs.backend import GraphBackend
from ..graphs.buckets import batch_buckets, token_buckets
from ..graphs.cuda import CudaBackend
from ..graphs.graph_pool import GraphKind, GraphPool
from ..graphs.tape.arena import ArenaMemory
from ..graphs.tape.tape import TapeBackend
from ..graphs.votes import Vote, alone
from ..runner.lifecycle import Lifecycle, Phase
from ..runner.model_runner import ModelRunner
from ..runner.target_graphs import PrefillGraphs
from ..speculative.adaptive import MeasuredCosts
from ..speculative.drafters.protocol import Drafter
from ..speculative.step.step_graphs import StepGraphs
from .graph_self_test import SelfTest
from .step_self_test import StepSelfTest
from .step_timing import measure_steps

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Replays of a graph between two checks of its parameters' addresses. No code replaces them while an engine
# serves, so the check only guards against bugs. It is rare because it costs as much as launching a step.
CHECK_EVERY = 1024
PREFILL_KINDS = (GraphKind.TARGET_PREFILL, GraphKind.WHOLE_PREFILL)
STEP_KINDS = (GraphKind.DECODE_STEP, GraphKind.RANKED_STEP, GraphKind.EDITED_STEP)


def backend_for(device: torch.device) -> GraphBackend:
    """Device graphs on CUDA; elsewhere tapes that share their memory."""
    return CudaBackend(device) if device.type == "cuda" else TapeBackend(ArenaMemory())


class GraphSet:
    """Captures graphs on `backend`, after the pools exist and before serving.

    `as_one_break`: nothing is recorded, and each forward runs eagerly behind the graphs' interface. This
    separates errors of capture from errors of padding and planning. The capture methods raise LifecycleError
    in any other phase. All ranks that `vote` together call the same methods, and get the same graphs.
    """

    def __init__(
        self, backend: GraphBackend, lifecycle: Lifecycle, *, as_one_break: bool = False, vote: Vote = alone
    ) -> None:
        self.pool = GraphPool(backend, check_every=CHECK_EVERY, as_one_break=as_one_break, vote=vote)
        self._lifecycle = lifecycle

    def capture_prefill(self, runner: ModelRunner, max_tokens: int) -> None:
        """Captures target prefill for up to `max_tokens` tokens, within the capacity of the KV pool."""
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        buckets = token_buckets(min(max_tokens, runner.pool.num_slots - runner.pool.page_size))
        prefill = PrefillGraphs(self.pool, runner.model, runner.pool, buckets, runner.attention)
        prefill.capture()
        runner.graphs = prefill

    def capture_draft(self, drafter: Drafter, max_tokens: int) -> None:
        """Captures the draft's prefill for up to `max_tokens` tokens."""
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        drafter.capture(self.pool, max_tokens)

    def capture_steps(
        self, steps: StepGraphs, max_batch: int | None = None, *, sizes: Sequence[int] | None = None
    ) -> None:
        """Captures whole decode steps for up to `max_batch` requests, by default `steps.max_requests`.

        `sizes`: the batch sizes that get graphs, ascending; by default those of `batch_buckets`.
        """
        self._lifecycle.require(Phase.POOLS_ALLOCATED)
        pool = steps.step.runner.pool
        most = min(max_batch or steps.max_requests, pool.num_pages - 1)
        steps.capture(self.pool, sizes or batch_buckets(most))

    def self_test(
        self,
        runner: ModelRunner,
        drafter: Drafter | None,
        max_context: int,
        steps: StepGraphs | None = None,
        *,
        is_brief: bool = False,
    ) -> int:
        """Drops every graph that differs from the eager path, and returns their number. Zeroes the KV that it
        used. `is_brief`: one graph of each kind stands for all.
        """
        began = time.monotonic()
        tests: list[SelfTest | StepSelfTest] = [SelfTest(runner, drafter, max_context, is_brief=is_brief)]
        if steps is not None:
            tests.append(StepSelfTest(steps, is_brief=is_brief))
        dropped = sum(test.run() for test in tests)
        self.pool.forget_replays()
        compared = sum(test.num_compared for test in tests)
        seconds = time.monotonic() - began
        logger.info(
            "graph self-test%s: %d replays compared, %d graphs dropped, in %.2f s",
            ", brief since all have passed before" * is_brief,
            compared,
            dropped,
            seconds,
        )
        return dropped

    def measure_steps(self, steps: StepGraphs) -> MeasuredCosts | None:
        """Measures the captured steps. None without graphs of all shapes. These replays are not counted."""
        costs = measure_steps(steps, self.pool.vote)
        self.pool.forget_replays()
        return costs

    def log_report(self) -> None:
        """Logs one line per kind: number of graphs, buckets, memory and capture time."""
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
        """Number of existing graphs, by the names of heartbeats.

        Graphs of whole steps count as "verify" with drafts and as "decode" without.
        """
        kinds = {kind.kind: kind.rows for kind in self.pool.kinds()}
        steps = [rows for kind in STEP_KINDS for rows in kinds.get(kind.value, ())]
        return {
            "prefill": sum(len(kinds.get(kind.value, ())) for kind in PREFILL_KINDS),
            "draft_prefill": len(kinds.get(GraphKind.DRAFT_PREFILL.value, ())),
            "decode": sum(rows == 1 for rows in steps),
            "verify": sum(rows > 1 for rows in steps),
        }

    def counters(self) -> dict[str, float]:
        """Replays by kind, and fallbacks by kind and reason, since the start; monotonic."""
        counters: dict[str, float] = {}
        for kind in self.pool.kinds():
            counters[f"graph_replays_{kind.kind}"] = sum(kind.replays.values())
            counters[f"graph_pad_rows_{kind.kind}"] = kind.pad_rows
            counters |= {f"graph_fallback_{kind.kind}_{reason}": n for reason, n in kind.fallbacks.items()}
        return counters

    def __repr__(self) -> str:
        return f"<GraphSet {self.pool!r}>"
