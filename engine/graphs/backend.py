"""The interface of a graph backend, which records and replays segments."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from .errors import GraphError


class Segment(Protocol):
    """A recorded stretch of tensor work; inputs, weights and outputs are bound by address."""

    @property
    def num_ops(self) -> int | None:
        """Operations that a replay runs; 0 for an empty segment, None where the backend cannot tell."""

    @property
    def num_bytes(self) -> int:
        """Memory that only this segment holds; what lies in a shared pool is counted by the backend."""

    def replay(self) -> None:
        """Run the recorded work on the present contents of its inputs."""


class GraphBackend(ABC):
    """Records segments. One backend, with one memory pool, serves all graphs of a process, one capture at a time.

    When `close_segment` returns, the segment has run exactly once: its tensors hold what its code computed, so that the
    break behind it sees real values. Subclasses implement the underscored methods.
    """

    name = "?"
    num_warm_ups = 0

    def __init__(self) -> None:
        self.is_capturing = False

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around one whole capture, breaks included. However it ends, the backend is ready for the next.

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
        """Run once, eagerly, where the capture will run: libraries allocate and tune outside of the graph."""
        run()

    @abstractmethod
    def open_segment(self) -> None:
        """Record from here on."""

    @abstractmethod
    def close_segment(self) -> Segment:
        """Stop recording."""

    def eager_region(self) -> AbstractContextManager[object]:
        """Around each break body, at capture and at replay."""
        return nullcontext()

    @abstractmethod
    def pool_bytes(self) -> int:
        """Memory of the pool that all segments share."""

    def _session(self) -> AbstractContextManager[object]:
        return nullcontext()

    @abstractmethod
    def _abort_segment(self) -> None:
        """Forget the open segment, if there is one, whatever state the failure left it in."""
