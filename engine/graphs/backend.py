"""The interface of a graph backend: recording and replay of segments."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from ..errors import RanksApart
from .errors import GraphError, VotedDown
from .votes import Vote, alone


class GraphSegment(Protocol):
    """A recorded stretch of tensor work. Inputs, weights and outputs are bound by address."""

    @property
    def num_ops(self) -> int | None:
        """Operations per replay; 0 for an empty segment, None if the backend does not know."""

    @property
    def num_bytes(self) -> int:
        """Bytes that only this segment holds. The backend counts the memory of a shared pool."""

    def replay(self) -> None:
        """Run the recorded work on the present contents of its inputs."""


class GraphBackend(ABC):
    """Records segments.

    One backend with one memory pool serves all graphs of a process, one capture at a time.

    When `close_segment` returns, the segment has run exactly once. Its tensors then hold computed values for
    the break behind it. Subclasses implement the underscored methods.
    """

    name = "?"
    num_warm_ups = 0

    def __init__(self) -> None:
        self.is_capturing = False
        # Whether a capture refuses host reads by name. A backend whose driver refuses them anyway, without a
        # name, may save the check where the same code was captured before.
        self.is_guarded = True
        self.vote: Vote = alone  # of the ranks that capture the same graphs together

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The context of one whole capture, breaks included.

        After it ends, even with an error, the next capture may start.

        Raises GraphError for a capture inside a capture.
        """
        if self.is_capturing:
            raise GraphError("a graph is already being captured on this backend; captures do not nest")
        self.is_capturing = True
        try:
            with self._session():
                try:
                    yield
                except BaseException:
                    self._abort_segment()
                    raise
        finally:
            self.is_capturing = False

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once, eagerly, in the place of the later capture: libraries allocate and tune outside of the
        graph.
        """
        run()

    def launch_first(self, segment: GraphSegment) -> None:
        """Runs a segment that was recorded without running, once all ranks have recorded it: it may hold
        sums over them.

        Raises VotedDown if another rank has not, and RanksApart for an error of the run, in which the other
        ranks wait.
        """
        if not self.vote(True):
            raise VotedDown("another rank could not record it")
        try:
            segment.replay()
        except RuntimeError as error:
            if self.vote is alone:
                raise
            raise RanksApart(f"a new graph cannot run, and the other ranks wait in it: {error}") from error

    @abstractmethod
    def open_segment(self) -> None:
        """Start to record."""

    @abstractmethod
    def close_segment(self) -> GraphSegment:
        """Stop recording."""

    def eager_region(self) -> AbstractContextManager[object]:
        """The context of each break body, at capture and at replay."""
        return nullcontext()

    @abstractmethod
    def pool_bytes(self) -> int:
        """Bytes of the pool that all segments share."""

    def _session(self) -> AbstractContextManager[object]:
        return nullcontext()

    @abstractmethod
    def _abort_segment(self) -> None:
        """Discard the open segment, if any, in whatever state the failure left it."""
