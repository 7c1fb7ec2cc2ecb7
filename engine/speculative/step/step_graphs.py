"""Launches whole decode steps and copies their reports to the host without waiting.

    launch   updates the list of slots if it changed, replays one graph, copies the report to pinned memory
    rows     waits for the event behind that copy, and for no later work

A step runs as a graph when a captured graph covers it, otherwise eagerly.
Legend: B requests, W columns of a report.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ...graphs.breakable import Breaks
from ...graphs.bucketed_graphs import EAGER, BatchShape, GraphFamily, GraphLimits
from ...graphs.buckets import bucket_for, sparse, with_middles
from ...graphs.graph_pool import FallbackReason, GraphKind, GraphPool
from ...host_copy import to_device
from ...parallel.group import SOLO, TensorGroup
from ...parallel.lockstep import Rounds, StepRows
from ...parallel.plan_messages import CatchUpPlan, StepPlan, StepShape, Tell
from ...runner.model_runner import ModelRunner
from ...runner.target_graphs import captured_mode
from ...sparse_rows import check_branches
from ..drafters.protocol import Drafter
from ..drafting.shape import PLAIN, DraftShape, planned_pages
from .device_state import EDIT_ENTRIES, PAD_SLOT, DeviceState
from .fused_step import FillMasks, FusedStep, StepContext, StepKind
from .late_rows import LateRows

logger = logging.getLogger(__name__)

# Host buffers of reports: one for the running step, one for the step before it, and one spare.
UNREAD_STEPS = 3
TOP_LOGPROBS = 20  # maximum in graphs; steps with more run eagerly


class Report:
    """The report of one step, possibly still in transfer to the host. `path`: "graph" or "eager"."""

    def __init__(self, values: npt.NDArray[np.int64], event: torch.cuda.Event | None, path: str) -> None:
        self._values = values
        self._event = event
        self.path = path

    def rows(self) -> npt.NDArray[np.int64]:
        """Waits for the step and returns `[B, W]` int64. Valid until UNREAD_STEPS further steps are
        launched.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._values


class StepGraphs:
    """Launches steps of `step` in order.

    `capture` makes graphs of `kinds`. Other kinds, and batches of more than `max_requests`, run eagerly.
    `announce` tells the other ranks of each step before it is launched; they `follow`. With `rounds` each
    step is one of all ranks, whose sizes the caller learns from `agree` before it launches.
    """

    def __init__(self, step: FusedStep, kinds: Sequence[StepKind], max_requests: int) -> None:
        self.step = step
        self.announce: Tell | None = None
        self.rounds: Rounds | None = None
        self.has_common_sizes = False  # graphs of all kinds have the same sizes
        self.kinds = tuple(kinds)
        self.max_requests = max_requests
        self.device = step.state.device
        is_cuda = self.device.type == "cuda"
        self.slots = torch.zeros(max_requests, dtype=torch.int64, device=self.device)
        self._told: tuple[int, ...] = ()
        width = max(map(step.report_width, self.kinds))
        self._hosts = [
            torch.zeros(max_requests * width, dtype=torch.int64, pin_memory=is_cuda)
            for _ in range(UNREAD_STEPS)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._events = [
            torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
            for _ in range(UNREAD_STEPS)
        ]
        self._num_launched = 0
        self.families: dict[StepKind, GraphFamily[StepContext, torch.Tensor]] = {}
        self.catch_up_graphs: GraphFamily[StepContext, torch.Tensor] | None = None
        self._covered: dict[StepKind, StepKind] = {}  # requested kind -> captured kind
        # Tensors besides the parameters that graphs read, by whether the graphs have logit edits.
        self._frozen: dict[bool, tuple[torch.Tensor, ...]] = {}

    def capture(self, graphs: GraphPool, buckets: Sequence[int]) -> None:
        """Captures a graph of each kind and bucket; of ranked and edited kinds for fewer of the buckets, and
        for powers of two only where ranks agree on sizes.
        """
        state, drafter = self.step.state, self.step.drafter
        if any(kind.is_edited for kind in self.kinds):
            state.reserve_edits(EDIT_ENTRIES, has_counts=True)
            logger.info("logit edits of %d places: %.1f MiB", state.num_slots, state.edit_bytes / (1 << 20))
        if drafter is not None:
            drafter.reserve(self.max_requests)
        self._frozen = {is_edited: self._anchors(is_edited) for is_edited in (False, True)}
        for kind in self.kinds:
            limits = GraphLimits(
                is_by_token=False, rows=kind.shape.num_nodes, hidden=captured_mode(self.step.runner.model)
            )
            sizes = buckets
            if self.has_common_sizes:
                sizes = sparse(buckets)
            elif kind.is_ranked or kind.is_edited:
                sizes = with_middles(buckets)
            family: GraphFamily[StepContext, torch.Tensor] = GraphFamily(
                graphs, graph_kind_of(kind), sizes, limits
            )
            self.families[kind] = family

            def forward(bucket: int, breaks: Breaks[StepContext], kind: StepKind = kind) -> torch.Tensor:
                return self.step.run(self.slots[:bucket], kind, breaks)

            family.capture(forward, lambda bucket: StepContext(num_rows=bucket), self._parameters)
        self._covered.clear()
        if self.step.late is not None:
            self.catch_up_graphs = GraphFamily(
                graphs, GraphKind.DRAFT_CATCH_UP, buckets, GraphLimits(is_by_token=False)
            )
            self.catch_up_graphs.capture(
                lambda bucket, breaks: self.step.catch_up(self.slots[:bucket], breaks),
                lambda bucket: StepContext(num_rows=bucket),
                self._parameters,
            )

    @property
    def late_rows(self) -> int:
        """Steps without drafts after which `catch_up` is due; 0 if each step observes."""
        return 0 if self.step.late is None else self.step.late.num_rows

    def catch_up(self, slots: tuple[int, ...]) -> None:
        """Lets the drafter observe the late rows of the requests in `slots`, behind all earlier steps."""
        self.tell(slots)
        padded, family = self._padded(len(slots)), self.catch_up_graphs
        context = StepContext(num_rows=len(slots))
        decision = EAGER
        if family is not None and self._is_unmoved(False):
            decision = family.decide(BatchShape(size=padded))
        if self.announce is not None:
            num_rows = decision.bucket if decision.is_graph else padded
            self.announce(CatchUpPlan(slots=list(slots), num_rows=num_rows, is_graph=decision.is_graph))
        if family is not None and decision.is_graph:
            family.replay(decision, context)
        else:
            self.step.catch_up(self.slots[:padded], Breaks(context))

    def takes(self, kind: StepKind, count: int) -> bool:
        """Whether a step of `count` requests would run as a graph."""
        family = self._family_of(kind)
        shape = BatchShape(size=self._padded(count), rows=kind.shape.num_nodes)
        return family is not None and family.peek(shape).is_graph and self._is_fresh(self._covering(kind))

    def agree(self, kind: StepKind, count: int) -> tuple[StepKind, int]:
        """The kind of the next step that all ranks take together, of which this one has `count` requests of
        `kind`, and its rows. With one rank: `kind`, and 0 for any number of rows.

        Raises RanksLeft if a rank has left.
        """
        if self.rounds is None:
            return kind, 0
        own, buckets = kind.shape, next((family.buckets for family in self.families.values()), ())
        rows = bucket_for(buckets, count) or count
        found = self.rounds.step(StepRows(rows, own.num_nodes, own.steps, own.topk))
        shape = DraftShape(steps=found.steps, topk=found.topk, num_nodes=found.nodes)
        self.rounds.agreed(found.requests * found.nodes)
        return kind if shape == own else replace(kind, shape=shape, watched=None), found.requests

    def run_idle(self) -> None:
        """This rank's part of a step for which it has no requests, if others take one."""
        assert self.rounds is not None, "a rank alone has no idle steps"
        found = self.rounds.step(StepRows())
        if not found.requests:
            return
        shape = DraftShape(steps=found.steps, topk=found.topk, num_nodes=found.nodes)
        self.rounds.agreed(found.requests * found.nodes)
        kind = next((kind for kind in self.kinds if kind.shape == shape), StepKind(shape=shape))
        self.tell((PAD_SLOT,) * found.requests)
        self._run((), kind, StepContext(num_rows=0), found.requests)

    def launch(
        self, slots: tuple[int, ...], kind: StepKind, fill: FillMasks | None = None, num_rows: int = 0
    ) -> tuple[Report, StepKind]:
        """Launches a step of the requests in `slots` behind all earlier ones, of `num_rows` rows if not 0.

        Returns without waiting for the device, unless `fill` has grammar masks to write. The returned kind
        covers the requested kind and determines the layout of the report.
        """
        count = len(slots)
        self.tell((*slots, *[PAD_SLOT] * (num_rows - count)))
        values, path, kind = self._run(slots, kind, StepContext(num_rows=count, fill=fill), num_rows)
        return self._on_its_way(values[:count], path), kind

    def _run(
        self, slots: tuple[int, ...], kind: StepKind, context: StepContext, num_rows: int
    ) -> tuple[torch.Tensor, str, StepKind]:
        """Runs a step of the requests in `slots`, which the device was told of: its report, its path, and the
        kind that ran.
        """
        padded, family, decision = num_rows or self._padded(len(slots)), self._family_of(kind), EAGER
        if family is not None:
            found = family.decide(BatchShape(size=padded, rows=kind.shape.num_nodes))
            if found.is_graph and self._is_fresh(self._covering(kind), is_counted=True):
                kind, decision = self._covering(kind), found
        if self.announce is not None:
            rows = decision.bucket if decision.is_graph else padded
            self.announce(_plan_of(slots, kind, rows, is_graph=decision.is_graph))
        if family is not None and decision.is_graph:
            if self.rounds is not None:
                self.rounds.rows.check(decision.bucket * kind.shape.num_nodes)
            return family.replay(decision, context), "graph", kind
        return self.step.run(self.slots[:padded], kind, Breaks(context)), "eager", kind

    def follow(self, plan: StepPlan | CatchUpPlan) -> None:
        """Does as another rank what rank 0 announced: a step without choices, or a catch-up.

        The shapes of all collectives follow from the rows of the plan, so a rank may run a step eagerly that
        rank 0 replays.
        """
        slots, rows = tuple(plan.slots), plan.num_rows
        self.tell((*slots, *[0] * (rows - len(slots))))
        context = StepContext(num_rows=len(slots))
        if isinstance(plan, CatchUpPlan):
            family, kind = self.catch_up_graphs, None
        else:
            watched = None if plan.watched is None else _shape_of(plan.watched)
            kind = StepKind(shape=_shape_of(plan.shape), watched=watched)
            family = self.families.get(kind)
        if plan.is_graph and family is not None and self._is_unmoved(False):
            decision = family.peek(BatchShape(size=rows, rows=kind.shape.num_nodes if kind else 0))
            if decision.is_graph and decision.bucket == rows:
                family.replay(decision, context)
                return
        if kind is None:
            self.step.catch_up(self.slots[:rows], Breaks(context))
        else:
            self.step.run(self.slots[:rows], kind, Breaks(context))

    def tell(self, slots: tuple[int, ...]) -> None:
        """Updates the device's list of slots, padded with the padding slot."""
        if slots == self._told:
            return
        most = self._padded(len(slots))
        if most > self.slots.shape[0]:  # graphs read the old list, so larger batches run eagerly
            self.slots = torch.zeros(2 * most, dtype=torch.int64, device=self.device)
        listed = torch.tensor([*slots, *[0] * (self.slots.shape[0] - len(slots))], dtype=torch.int64)
        self.slots.copy_(to_device(listed, self.device))
        self._told = slots

    def _on_its_way(self, values: torch.Tensor, path: str) -> Report:
        index = self._num_launched % UNREAD_STEPS
        self._num_launched += 1
        event, num_values = self._events[index], values.numel()
        if self._hosts[index].numel() < num_values:
            is_cuda = self.device.type == "cuda"
            self._hosts[index] = torch.zeros(num_values, dtype=torch.int64, pin_memory=is_cuda)
            self._arrays[index] = self._hosts[index].numpy()
        self._hosts[index][:num_values].view(values.shape).copy_(values, non_blocking=True)
        if event is not None:
            event.record()
        return Report(self._arrays[index][:num_values].reshape(values.shape), event, path)

    def _covering(self, kind: StepKind) -> StepKind:
        """The cheapest captured kind that covers `kind`; `kind` itself without one."""
        if kind not in self._covered:
            found = [captured for captured in self.families if captured.covers(kind)]
            self._covered[kind] = min(found, key=lambda each: (each.is_edited, each.is_ranked), default=kind)
        return self._covered[kind]

    def _family_of(self, kind: StepKind) -> GraphFamily[StepContext, torch.Tensor] | None:
        return self.families.get(self._covering(kind))

    def _padded(self, count: int) -> int:
        """`count` rounded up to the runner's row multiple."""
        multiple = self.step.runner.row_multiple
        return -(-count // multiple) * multiple

    def _is_fresh(self, kind: StepKind, *, is_counted: bool = False) -> bool:
        """Whether the states are still at the addresses that graphs of `kind` captured.

        They move when more requests than reserved, or requests with more biases, join.
        """
        is_fresh = self._is_unmoved(kind.is_edited)
        if is_counted and not is_fresh:
            family = self.families[kind]
            family.pool.count_fallback(family.kind, FallbackReason.BATCH_OVER_PLANNED)
        return is_fresh

    def _is_unmoved(self, is_edited: bool) -> bool:
        frozen, anchors = self._frozen[is_edited], self._anchors(is_edited)
        return len(anchors) == len(frozen) and all(map(_is_one, anchors, frozen))

    def _anchors(self, is_edited: bool) -> tuple[torch.Tensor, ...]:
        state, drafter = self.step.state, self.step.drafter
        late = () if self.step.late is None else self.step.late.anchors
        edits = state.edit_anchors if is_edited else ()
        return (self.slots, *state.anchors, *edits, *late, *(() if drafter is None else drafter.anchors))

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        drafter, own = self.step.drafter, [*self.step.runner.model.parameters()]
        return own if drafter is None else own + [(f"draft {name}", x) for name, x in drafter.parameters()]

    def __repr__(self) -> str:
        return f"<StepGraphs {len(self.families)} kinds, {self._num_launched} launched, {self.step.state!r}>"


def _plan_of(slots: Sequence[int], kind: StepKind, num_rows: int, *, is_graph: bool) -> StepPlan:
    watched = None if kind.watched is None else _sizes_of(kind.watched)
    return StepPlan(
        slots=list(slots), shape=_sizes_of(kind.shape), num_rows=num_rows, is_graph=is_graph, watched=watched
    )


def _sizes_of(shape: DraftShape) -> StepShape:
    return StepShape(steps=shape.steps, topk=shape.topk, num_nodes=shape.num_nodes)


def _shape_of(sizes: StepShape) -> DraftShape:
    return DraftShape(steps=sizes.steps, topk=sizes.topk, num_nodes=sizes.num_nodes)


def _is_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other


def graph_kind_of(kind: StepKind) -> GraphKind:
    if kind.is_edited:
        return GraphKind.EDITED_STEP
    return GraphKind.RANKED_STEP if kind.is_ranked else GraphKind.DECODE_STEP


def step_graphs(
    runner: ModelRunner,
    drafter: Drafter | None,
    *,
    shapes: Sequence[DraftShape],
    watched: DraftShape | None = None,
    max_requests: int,
    max_context: int,
    group: TensorGroup = SOLO,
    make: type[StepGraphs] = StepGraphs,
) -> StepGraphs:
    """Steps of any of `shapes`, and plain ones, for up to `max_requests` requests of up to `max_context`
    tokens.

    A step without drafts compares the first proposals of shape `watched`. If the drafter allows it, the step
    leaves its row and the comparison to a later `catch_up`. Each shape has three kinds with graphs: greedy or
    free sampling, ranked sampling, and edited logits with logprobs. Raises CheckpointError for trees that are
    too deep for the target's attention.
    """
    every = list(dict.fromkeys([*shapes, PLAIN]))
    deepest = max((shape.num_path for shape in every if shape.is_tree), default=0)
    check_branches(runner.pool, deepest, runner.model.config.forms.windows)
    late_rows = 0 if drafter is None or watched is None else drafter.late_rows
    late_shapes = [DraftShape.of(late_rows - 1)] if late_rows else []
    max_pages = planned_pages([*every, *late_shapes], max_context, runner.pool.page_size)
    vocab_size = runner.model.config.vocab_size
    state = DeviceState(max_requests + 1, max_pages, vocab_size, runner.pool.device)
    late = None
    if drafter is not None:
        drafter.reserve(max_requests)
        if late_rows and watched is not None:
            late = LateRows(state, late_rows, watched, drafter.feature_width, runner.model.dtype)
    num_top = min(TOP_LOGPROBS, vocab_size)
    kinds = [
        kind
        for shape in every
        for common in [StepKind(shape=shape, watched=None if shape.steps else watched)]
        for kind in (
            common,
            replace(common, is_ranked=True),
            replace(common, is_ranked=True, is_edited=True, num_top=num_top),
        )
    ]
    return make(FusedStep(runner, drafter, state, max_context, late, group), kinds, max_requests)
