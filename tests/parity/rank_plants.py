"""Faults that one rank alone meets while it starts, by name. Each is a context that is open during the start.

All ranks must end the start with the same graphs, or end: a graph holds sums over ranks, so a rank that skips
one leaves the others waiting in it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

from baton.engine.capture.graph_self_test import SelfTest
from baton.engine.capture.graph_set import GraphSet
from baton.engine.capture.step_self_test import StepSelfTest
from baton.engine.graphs.breakable import BreakableGraph
from baton.engine.graphs.errors import VotedDown
from baton.engine.graphs.tape.tape import TapeBackend
from baton.engine.loader import EngineLoader
from baton.engine.parallel import group
from baton.engine.speculative.drafting.shape import PLAIN

BUCKET = 4  # the size whose graphs meet the fault


def _fails_behind(times: int) -> Callable[[], AbstractContextManager[None]]:
    """The capture of some graphs fails as often, behind the forward."""

    @contextmanager
    def planted() -> Iterator[None]:
        capture, left = BreakableGraph.capture, {}

        def failing(self, *args, **options):
            output = capture(self, *args, **options)
            if self.name.split()[1] == str(BUCKET) and left.setdefault(self.name, times):
                left[self.name] -= 1
                self.release()
                raise RuntimeError("planted: an operation is not permitted")
            return output

        with patch.object(BreakableGraph, "capture", failing):
            yield

    return planted


@contextmanager
def _fails_inside() -> Iterator[None]:
    """The capture of some graphs fails in its forward, in which the others wait for this rank."""
    capture = BreakableGraph.capture

    def fails(breaks: object) -> None:
        raise RuntimeError("planted: out of memory")

    def failing(self, fn, *args, **options):
        is_due = self.name.split()[1] == str(BUCKET)
        return capture(self, fails if is_due else fn, *args, **options)

    with patch.object(BreakableGraph, "capture", failing), patch.object(group, "FAILED_S", 3.0):
        yield


@contextmanager
def _differs() -> Iterator[None]:
    """The self test finds a difference at the larger edge of some graphs, so that it skips the other."""
    prefill, step, late = SelfTest._difference, StepSelfTest._difference, StepSelfTest._late_difference

    def prefill_difference(self, trial):
        return prefill(self, trial) or "planted" * (trial.bucket == trial.size == BUCKET)

    def step_difference(self, trial, family, bucket, size):
        return step(self, trial, family, bucket, size) or "planted" * (bucket == size == BUCKET)

    def late_difference(self, trial, family, bucket, size):
        return late(self, trial, family, bucket, size) or "planted" * (bucket == size == BUCKET)

    with (
        patch.object(SelfTest, "_difference", prefill_difference),
        patch.object(StepSelfTest, "_difference", step_difference),
        patch.object(StepSelfTest, "_late_difference", late_difference),
    ):
        yield


def _measures(*, drops: bool) -> Callable[[], AbstractContextManager[None]]:
    """Steps are measured as on a GPU; one graph of a step has been lost before, if `drops`."""

    @contextmanager
    def planted() -> Iterator[None]:
        def measure(self, graphs: GraphSet) -> None:
            steps = self._engine.steps
            if drops:
                family = next(family for kind, family in steps.families.items() if kind.shape == PLAIN)
                family.drop(BUCKET)
            graphs.measure_steps(steps)

        with patch.object(EngineLoader, "_measure_steps", measure):
            yield

    return planted


@contextmanager
def _votes() -> Iterator[None]:
    """Not a fault: ranks vote behind each segment of a new graph, as on a GPU."""
    close = TapeBackend.close_segment

    def voting(self):
        segment = close(self)
        if not self.vote(True):
            raise VotedDown("another rank could not record it")
        return segment

    with patch.object(TapeBackend, "close_segment", voting):
        yield


PLANTS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "capture fails": _fails_behind(2),
    "capture fails once": _fails_behind(1),
    "fails inside a forward": _fails_inside,
    "differs": _differs,
    "measures": _measures(drops=False),
    "lacks a step": _measures(drops=True),
    "votes on segments": _votes,
}
