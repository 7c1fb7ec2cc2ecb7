"""Launches whole decode steps, as graphs where there are some, and brings their reports to the host without waiting.

    launch   slots of the batch (told again only when they change), one graph, one copy of the report to pinned memory
    rows     waits for the event behind that copy, and for nothing that was launched later

Legend: B requests, W columns of a report.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...graphs.breakable import Breaks, ReplayContext
from ...graphs.family import BatchShape, GraphFamily, GraphLimits
from ...graphs.inventory import FallbackReason, GraphKind, GraphPool
from ...host_copy import to_device
from ...target_graphs import captured_mode
from ..drafters.prefill_graphs import parameters_of
from .fused_step import StepBody, StepKind

UNREAD_STEPS = (
    3  # reports that may wait on the host: that of a step under way, of the one before it, and one to spare
)


class Report:
    """What one step said, on its way to the host or there. `path`: "graph" or "eager"."""

    def __init__(self, values: npt.NDArray[np.int64], event: torch.cuda.Event | None, path: str) -> None:
        self._values = values
        self._event = event
        self.path = path

    def rows(self) -> list[list[int]]:
        """`[B][W]`; waits for this step. To be asked for before UNREAD_STEPS more were launched."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._values.tolist()
        return rows


class DeviceSteps:
    """Steps of `body` for up to `max_requests` requests, of any of `kinds`."""

    def __init__(self, body: StepBody, kinds: Sequence[StepKind], max_requests: int) -> None:
        self.body = body
        self.kinds = tuple(kinds)
        self.max_requests = max_requests
        device = body.state.device
        self.slots = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._told: tuple[int, ...] = ()
        is_cuda, width = device.type == "cuda", max(kind.report_width for kind in self.kinds)
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
        self.families: dict[StepKind, GraphFamily[ReplayContext, torch.Tensor]] = {}
        self._frozen: torch.Tensor | None = None  # the draft states that graphs read

    def capture(self, graphs: GraphPool, buckets: Sequence[int]) -> None:
        """A graph of each kind and bucket."""
        runner, drafter = self.body.runner, self.body.drafter
        self._frozen = None if drafter is None else drafter.states.hidden
        for kind in self.kinds:
            limits = GraphLimits(
                is_by_token=False, rows=kind.shape.num_nodes, hidden=captured_mode(runner.model)
            )
            name = GraphKind.RANKED_STEP if kind.is_ranked else GraphKind.DECODE_STEP
            family: GraphFamily[ReplayContext, torch.Tensor] = GraphFamily(graphs, name, buckets, limits)
            self.families[kind] = family

            def forward(bucket: int, _: Breaks[ReplayContext], kind: StepKind = kind) -> torch.Tensor:
                return self.body.run(self.slots[:bucket], kind)

            family.capture(forward, lambda bucket: ReplayContext(num_rows=bucket), self._parameters)

    def launch(self, slots: tuple[int, ...], kind: StepKind) -> Report:
        """Step the requests in `slots`, behind everything launched before; returns at once where the device is one."""
        self.tell(slots)
        values, path = self._run(len(slots), kind)
        index = self._num_launched % UNREAD_STEPS
        self._num_launched += 1
        event, num_values = self._events[index], values.numel()
        self._hosts[index][:num_values].view(values.shape).copy_(values, non_blocking=True)
        if event is not None:
            event.record()
        return Report(self._arrays[index][:num_values].reshape(values.shape), event, path)

    def _run(self, count: int, kind: StepKind) -> tuple[torch.Tensor, str]:
        family = self.families.get(kind)
        if family is not None:
            shape = BatchShape(size=count, rows=kind.shape.num_nodes)
            decision = family.decide(shape)
            if decision.is_graph and self._is_fresh():
                return family.replay(decision, ReplayContext(num_rows=count))[:count], "graph"
        return self.body.run(self.slots[:count], kind), "eager"

    def tell(self, slots: tuple[int, ...]) -> None:
        """The device's list of slots, filled up with the padding slot."""
        if slots != self._told:
            listed = torch.tensor([*slots, *[0] * (self.max_requests - len(slots))], dtype=torch.int64)
            self.slots.copy_(to_device(listed, self.slots.device))
            self._told = slots

    def _is_fresh(self) -> bool:
        """Whether the draft states lie where the graphs read them: they move when more requests come than expected."""
        drafter = self.body.drafter
        is_fresh = drafter is None or drafter.states.hidden is self._frozen
        if not is_fresh:
            family = next(iter(self.families.values()))
            family.pool.count_fallback(family.kind, FallbackReason.BATCH_OVER_PLANNED)
        return is_fresh

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        drafter = self.body.drafter
        own = [*self.body.runner.model.tensors()]
        return (
            own
            if drafter is None
            else own + [(f"draft {name}", x) for name, x in parameters_of(drafter.head)]
        )

    def __repr__(self) -> str:
        return f"<DeviceSteps {len(self.kinds)} kinds, {self._num_launched} launched, {self.body.state!r}>"
