"""Each graph of a whole decode step against the same step run eagerly, before anything is served.

Both run over as many rows as the graph has, so that the same products are computed: reports and lengths must be equal,
written KV nearly so. The comparison writes into the first pages of the KV pools and leaves them as it found them, zeros.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..graphs.breakable import ReplayContext
from ..graphs.family import GraphFamily, PathDecision
from ..graphs.inventory import FallbackReason
from ..page_table import pages_for
from ..sampling.params import SamplingParams
from ..speculative.drafters.states import PAD_ROW
from ..speculative.step.device_state import Joining
from ..speculative.step.fused_step import StepKind
from ..speculative.step.step_graphs import DeviceSteps
from .graph_self_test import SEED, TOLERANCES, edges, relative_error

logger = logging.getLogger(__name__)

KNOBS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, min_p=0.01),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
)


class StepSelfTest:
    """All graphs of `steps`."""

    def __init__(self, steps: DeviceSteps) -> None:
        self.steps = steps
        self.num_compared = 0
        self._body = steps.body

    @torch.no_grad()
    def run(self) -> int:
        """Compare all; returns how many graphs were dropped because they differ."""
        dropped = 0
        for kind, family in self.steps.families.items():
            for bucket, size in edges(family):
                difference = self._difference(kind, family, bucket, size) if bucket in family.captured else ""
                if difference:
                    name = f"{family.kind.value} {bucket}"
                    logger.error(
                        "graph %s differs from the eager path at %d: %s; dropped", name, size, difference
                    )
                    family.drop(bucket)
                    family.pool.count_fallback(family.kind, FallbackReason.CAPTURE_FAILED)
                    dropped += 1
        return dropped

    def _difference(
        self, kind: StepKind, family: GraphFamily[ReplayContext, torch.Tensor], bucket: int, size: int
    ) -> str:
        """What differs between the paths, from the same state and the same KV, or ""."""
        joining, state = self._joining(size, kind), self._body.state
        slots = tuple(state.open() for _ in joining)
        self.steps.tell(slots)
        results = []
        for is_graph in (False, True):
            self._prepare(slots, joining)
            if is_graph:
                decision = PathDecision(kind=family.kind, bucket=bucket)
                report = family.replay(decision, ReplayContext(num_rows=len(slots)))
            else:
                report = self._body.run(self.steps.slots[:bucket], kind)
            results.append((report[: len(slots)].clone(), *(kv.clone() for kv in self._pages(joining))))
        self._leave(slots, joining)
        self.num_compared += 1
        (eager, *eager_kv), (graphed, *graphed_kv) = results
        if not torch.equal(eager, graphed):
            return f"{int((eager != graphed).any(dim=1).sum())} of {len(slots)} reports"
        errors = [relative_error(*pair) for pair in zip(eager_kv, graphed_kv, strict=True)]
        tolerance = TOLERANCES[self._body.runner.pool.dtype]
        return ", ".join(f"KV {i} by {error:.2g}" for i, error in enumerate(errors) if not error <= tolerance)

    def _joining(self, size: int, kind: StepKind) -> list[Joining]:
        """`size` requests with contexts of several lengths, or as many as the pool has room for."""
        pool, found, next_page = self._body.runner.pool, [], 1
        drafter, spare = self._body.drafter, kind.shape.spare_slots
        spread = max(min(2 * pool.page_size, self._body.max_context - spare), 1)
        for i in range(size):
            length = 1 + i * 5 % spread
            count = min(
                pages_for(length + spare, pool.page_size), pool.num_pages - 1
            )  # one request always fits
            if next_page + count > pool.num_pages:
                break
            knobs = KNOBS[i % (len(KNOBS) if kind.is_ranked else 2)]
            found.append(
                Joining(
                    newest=i,
                    length=length,
                    remaining=spare,
                    capacity=min(count * pool.page_size, self._body.max_context),
                    draft_row=PAD_ROW if drafter is None else drafter.states.open(),
                    pages=range(next_page, next_page + count),
                    sampling=replace(knobs, seed=i),
                )
            )
            next_page += count
        return found

    def _prepare(self, slots: Sequence[int], joining: Sequence[Joining]) -> None:
        """The state and the KV that both paths begin with."""
        self._body.state.write(slots, joining)
        generator = torch.Generator(self._body.state.device)
        for kv in self._pages(joining):
            kv.normal_(generator=generator.manual_seed(SEED))
        if self._body.drafter is not None:
            for values in (self._body.drafter.states.hidden, self._body.drafter.states.logits):
                values.normal_(generator=generator.manual_seed(SEED))

    def _leave(self, slots: Sequence[int], joining: Sequence[Joining]) -> None:
        for slot, each in zip(slots, joining, strict=True):
            self._body.state.close(slot)
            if self._body.drafter is not None:
                self._body.drafter.states.close(each.draft_row)
        for kv in self._pages(joining):
            kv.zero_()
        if self._body.drafter is not None:
            self._body.drafter.states.hidden.zero_()
            self._body.drafter.states.logits.zero_()

    def _pages(self, joining: Sequence[Joining]) -> list[torch.Tensor]:
        """The KV of all pages of `joining` in each pool."""
        drafter, end = self._body.drafter, max(each.pages[-1] for each in joining) + 1
        pools = [self._body.runner.pool, *([] if drafter is None else [drafter.pool])]
        return [pool.kv[1:end] for pool in pools]
