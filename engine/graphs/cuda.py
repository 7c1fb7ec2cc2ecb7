"""The CUDA backend: one torch.cuda.CUDAGraph per segment, all in one memory pool, captured on one stream.

The pool can be shared because graphs of one process never replay at the same time. Memory in the pool is
either held by a tensor (outputs, values that cross a break) or written again before it is read.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from .backend import GraphBackend
from .errors import GraphError
from .guard import HOST_READS, HostReadGuard, HostSyncGuard


class CudaSegment:
    """One captured graph. An empty one is never launched."""

    num_ops: int | None
    num_bytes = 0

    def __init__(self, graph: torch.cuda.CUDAGraph, *, is_empty: bool) -> None:
        self.graph = graph
        self.num_ops = 0 if is_empty else None
        self._is_empty = is_empty

    def replay(self) -> None:
        """Launch on the current stream."""
        if not self._is_empty:
            self.graph.replay()


class CudaBackend(GraphBackend):
    """Captures on its own stream. Replays go to the caller's current stream.

    `generators`: random generators used inside graphs, beside the device's default one.
    """

    name = "cuda"
    num_warm_ups = 1

    def __init__(
        self, device: torch.device | str = "cuda", *, generators: Sequence[torch.Generator] = ()
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self._generators = tuple(generators)
        self._open: tuple[torch.cuda.CUDAGraph, ExitStack] | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def warm_up(self, run: Callable[[], object]) -> None:
        """As `GraphBackend.warm_up`, on the capture stream."""
        with self._on_capture_stream():
            run()
        torch.cuda.synchronize(self.device)

    def open_segment(self) -> None:
        """As `GraphBackend.open_segment`. Raises GraphError outside a capture or inside an open segment."""
        if self._open is not None or not self.is_capturing:
            raise GraphError("a CUDA segment opens once, inside a capture")
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        # Other threads (transfers) may allocate and synchronise; only this thread's errors abort the capture.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        modes = ExitStack()
        if self.is_guarded:
            guard = HostReadGuard(HOST_READS)
            modes.enter_context(guard)
            modes.enter_context(HostSyncGuard(guard))
        self._open = (graph, modes)

    def close_segment(self) -> CudaSegment:
        """End the capture and launch the captured graph.

        Capturing computes nothing, and the next break needs values.
        """
        if self._open is None:
            raise GraphError("no CUDA segment is open")
        graph, modes = self._open
        self._open = None
        modes.close()
        segment = CudaSegment(graph, is_empty=_end_capture(graph))
        self.launch_first(segment)
        return segment

    def pool_bytes(self) -> int:
        """Bytes that the allocator holds for the pool, used or not."""
        wanted = tuple(self.pool)
        segments = torch.cuda.memory_snapshot(wanted)  # type: ignore[no-untyped-call]
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == wanted)

    @contextmanager
    def _session(self) -> Iterator[None]:
        # A collection during capture could free device memory, which a capturing stream must not do. One
        # before the first capture suffices: a collection takes longer than a capture.
        torch.cuda.synchronize(self.device)
        if self._keeper is None:
            gc.collect()
            torch.cuda.empty_cache()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with self._on_capture_stream():
                self._keep_pool()
                yield
        finally:
            if was_enabled:
                gc.enable()
        torch.cuda.synchronize(self.device)

    def _keep_pool(self) -> None:
        """Keeps the pool alive with an empty graph.

        torch deletes a pool with its last graph, and its host allocator then refuses the pool's id (2.11).
        Without this graph, a first capture that fails would spoil all later ones.
        """
        if self._keeper is None:
            self._keeper = torch.cuda.CUDAGraph()
            self._keeper.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            _end_capture(self._keeper)

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def _abort_segment(self) -> None:
        if self._open is None:
            return
        graph, modes = self._open
        self._open = None
        modes.close()
        try:
            _end_capture(graph)
        except RuntimeError as error:
            # The driver had invalidated the capture. Ending it still took the stream out of capture mode.
            warnings.warn(f"an aborted capture ended with: {error}", stacklevel=2)

    def __repr__(self) -> str:
        return f"<CudaBackend {self.device}, pool {tuple(self.pool)}, capturing {self.is_capturing}>"


def _end_capture(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture. Returns whether it is empty, which torch reports only by a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.capture_end()
    is_empty = False
    for warning in caught:
        if "graph is empty" in str(warning.message).lower():
            is_empty = True
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return is_empty
