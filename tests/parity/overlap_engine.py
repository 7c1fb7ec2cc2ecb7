"""A parity engine whose steps are launched before the previous one is read, at once or very late."""

import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from baton.engine.capture.graph_set import GraphSet
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.guard import HOST_READS
from baton.engine.graphs.modes import DispatchMode, storage_of, storages_of
from baton.engine.graphs.pytree import tensors_of
from baton.engine.graphs.tape.arena import ArenaMemory
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.request import Request
from baton.engine.runner.lifecycle import Phase
from baton.engine.speculative.step.async_decoder import AsyncDecoder
from baton.engine.speculative.step.fused_step import FillMasks, StepKind
from baton.engine.speculative.step.result import StepResult
from baton.engine.speculative.step.step_graphs import Report, StepGraphs
from baton.tests.parity.eagle3_engine import Engine
from baton.tests.parity.graph_engine import at
from torch.overrides import TorchFunctionMode

MAX_CAPTURED = 6


class LateSteps(StepGraphs):
    """Runs a step when its report is asked for, or when as many are waiting as the host has room for."""

    def launch(
        self, slots: tuple[int, ...], kind: StepKind, fill: FillMasks | None = None, num_rows: int = 0
    ) -> tuple["LateReport", StepKind]:
        if fill is not None:
            return super().launch(slots, kind, fill)
        kind_run = self._covering(kind) if self.takes(kind, len(slots)) else kind
        return LateReport(lambda: super(LateSteps, self).launch(slots, kind)[0]), kind_run


class LateReport:
    path = "late"

    def __init__(self, run: Callable[[], Report]) -> None:
        self._run = run

    def rows(self) -> npt.NDArray[np.int64]:
        return self._run().rows()


def overlapped(
    engine: Engine,
    *,
    graphs: bool = False,
    steps: type[StepGraphs] = StepGraphs,
    backend: GraphBackend | None = None,
) -> AsyncDecoder:
    """Give `engine` a decoder that launches ahead; returns it. `graphs` are captured on `backend`, by default
    a tape."""
    made = engine.step_graphs(steps)
    if graphs:
        backend = backend or TapeBackend(ArenaMemory(1 << 16, poison=True))
        GraphSet(backend, at(Phase.POOLS_ALLOCATED)).capture_steps(made, MAX_CAPTURED)
    engine.decoder = AsyncDecoder(made, shape=engine.shape, policy=engine.policy)
    return engine.decoder


def run_ahead(
    engine: Engine, requests: Sequence[Request], until: Callable[[], bool] = lambda: False
) -> list[StepResult]:
    """Steps `requests` to their end, or until `until`; each step is launched before the previous is read."""
    decoder, flight, results = engine.decoder, None, []
    while True:
        live = [request for request in requests if not request.is_finished]
        newer = decoder.launch(live) if live and decoder.can_launch(live) and not until() else None
        if flight is not None:
            results.append(decoder.read(flight, [not request.is_finished for request in flight.requests]))
            for request in live:
                assert request.num_computed == request.num_tokens - 1
        elif newer is None:
            if not live or until():
                return results
            results.append(decoder.step(live))
        flight = newer


class Reads(TorchFunctionMode):
    """Records the methods and operations that make the host wait for the device, and live tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.operations = Operations(self)
        self.made: list[weakref.ref[torch.Tensor]] = []

    @property
    def num_kept(self) -> int:
        """Tensors made under the modes that somebody still holds."""
        gc.collect()
        return sum(made() is not None for made in self.made)

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if getattr(func, "__name__", "") in HOST_READS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operations(DispatchMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def dispatch(self, func: Callable, args: tuple, kwargs: dict) -> object:
        if torch.Tag.data_dependent_output in func.tags:
            self._reads.seen.append(str(func))
        known, result = storages_of(args, kwargs), func(*args, **kwargs)
        self._reads.made += [
            weakref.ref(made) for made in tensors_of(result) if storage_of(made) not in known
        ]
        return result


def counting_reads() -> Reads:
    return Reads()
