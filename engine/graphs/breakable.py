"""A breakable graph: recorded segments with eager breaks between them.

    segment 0, break 0, segment 1, break 1, ..., segment N        replayed in this order

A segment is fixed at capture: addresses, shapes, Python branches and scalars. A break is Python code that
runs again at every replay, on the tensor objects of the capture and on a new context. A graph without breaks
is a full graph. There is no global state: breakable code receives a `Breaks` object, which records during a
capture and calls otherwise.

Rules of a break body:
1. Its tensor arguments are those of the capture. Values that differ between forwards (lengths, page tables,
   metadata) come from the `context`, its first argument, and never from a closure.
2. It reads and writes only the first `context.num_rows` rows. Its optional keyword argument `out` is a
   tensor made before the break: the body fills the real rows, the runtime zeroes the others.
3. Writing into `out` is better than returning tensors, because each replay copies returned tensors into the
   tensors that were returned at capture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

import torch

from .backend import GraphBackend, GraphSegment
from .errors import GraphError
from .pytree import copy_into


@dataclass(frozen=True, kw_only=True)
class ReplayContext:
    """The values that differ between replays. Runners extend it with the values that their breaks read.

    `num_rows`: the real rows; the rows behind them are padding.
    """

    num_rows: int


ContextT = TypeVar("ContextT", bound=ReplayContext)
OutputT = TypeVar("OutputT")
ArgsP = ParamSpec("ArgsP")
ResultT = TypeVar("ResultT")


class Breaks(Generic[ContextT]):
    """The handle by which code declares its graph breaks. This class records nothing and calls the bodies at
    once.

    `is_recorded`: the forward is recorded for replays, so it must not depend on values of this run.
    """

    is_recorded = False

    def __init__(self, context: ContextT) -> None:
        self.context = context

    def graph_break(self, body: Callable[Concatenate[ContextT, ArgsP], ResultT]) -> Callable[ArgsP, ResultT]:
        """Mark `body` as a break (decorator or plain call).

        The result takes the arguments after the context.
        """

        def broken(*args: ArgsP.args, **kwargs: ArgsP.kwargs) -> ResultT:
            return cast(ResultT, self._run(_Break(body, args, kwargs)))

        return broken

    def _run(self, part: "_Break[ContextT]") -> object:
        return part.run(self.context)


class _Break(Generic[ContextT]):
    """One break of one graph. It holds its tensors, so that no other tensor can take their addresses."""

    def __init__(
        self, body: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self.body = body
        self.args = args
        self.kwargs = kwargs
        self.result: object = None

    def run(self, context: ContextT) -> object:
        result = self.body(context, *self.args, **self.kwargs)
        out = self.kwargs.get("out")
        if isinstance(out, torch.Tensor) and out.shape[0] > context.num_rows:
            out[context.num_rows :].zero_()
        return result

    def replay(self, backend: GraphBackend, context: ContextT) -> None:
        with backend.eager_region():
            result = self.run(context)
            if result is not self.result:
                copy_into(self.result, result, where=f"the break {_name_of(self.body)}")


class GraphCapture(Breaks[ContextT]):
    """The `Breaks` of a capture: each break closes a segment, runs the body and opens the next segment."""

    is_recorded = True

    def __init__(self, backend: GraphBackend, context: ContextT) -> None:
        super().__init__(context)
        self.parts: list[GraphSegment | _Break[ContextT]] = []
        self._backend = backend
        self._is_over = False
        self._is_inside_break = False

    def _run(self, part: _Break[ContextT]) -> object:
        if self._is_over:
            raise GraphError(
                f"{_name_of(part.body)} belongs to a capture that is over; give each forward the Breaks of "
                "its own"
            )
        if self._is_inside_break:  # a break inside a break runs eagerly anyway
            return part.run(self.context)
        self.parts.append(self._backend.close_segment())
        self._is_inside_break = True
        try:
            with self._backend.eager_region():
                result = part.run(self.context)
        finally:
            self._is_inside_break = False
        part.result = result
        self.parts.append(part)
        self._backend.open_segment()
        return result

    def record(self, fn: Callable[[Breaks[ContextT]], OutputT]) -> OutputT:
        """Run `fn` and record it into `parts`."""
        try:
            with self._backend.capturing():
                self._backend.open_segment()
                output = fn(self)
                self.parts.append(self._backend.close_segment())
            return output
        finally:
            self._is_over = True


class BreakableGraph(Generic[ContextT, OutputT]):
    """One graph: captured once, replayed often.

    It holds its segments, breaks and outputs, all tensors that cross a break, and the captured function with
    its closure (static inputs, the model and its weights). With `as_one_break` nothing is recorded: the whole
    function is the only break, which separates errors of the capture from errors of the function.
    """

    def __init__(self, backend: GraphBackend, *, name: str = "graph", as_one_break: bool = False) -> None:
        self.name = name
        self.backend = backend
        self.as_one_break = as_one_break
        self._parts: list[GraphSegment | _Break[ContextT]] = []
        self.segments: Sequence[GraphSegment] = ()
        """The recorded segments, in order."""
        self.num_bytes = 0
        """Bytes that only this graph holds, without its share of the backend's pool."""
        self._held: tuple[object, OutputT] | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the graph can be replayed."""
        return self._held is not None

    @property
    def num_breaks(self) -> int:
        """Breaks between the segments."""
        return len(self._parts) - len(self.segments)

    @property
    def output(self) -> OutputT:
        """The result of the last replay, in graph memory that the next replay on this backend overwrites.

        Raises GraphError before the capture.
        """
        if self._held is None:
            raise GraphError(f"{self.name} is not captured")
        return self._held[1]

    @torch.no_grad()
    def capture(
        self, fn: Callable[[Breaks[ContextT]], OutputT], context: ContextT, *, is_warm: bool = False
    ) -> OutputT:
        """Record one run of `fn` on `context`, after the warm-up runs of the backend.

        `is_warm`: the same code has run at another size, so there are no warm-up runs. Returns
        the output of that run; the same tensors hold the output of each replay. If `fn` raises, the graph
        stays uncaptured and the backend can capture the next one. Raises GraphError inside another capture,
        for a second capture, and in inference mode, whose composite operations would be recorded whole.
        """
        if self.is_captured:
            raise GraphError(f"{self.name} is already captured")
        if torch.is_inference_mode_enabled():
            raise GraphError(
                f"{self.name} cannot be captured in inference mode; no_grad is what a capture needs"
            )
        if self.backend.is_capturing:
            raise GraphError(f"{self.name} cannot be captured inside the capture of another graph")
        for _ in range(0 if is_warm else self.backend.num_warm_ups):
            self.backend.warm_up(partial(fn, Breaks(context)))
        recorder = GraphCapture(self.backend, context)
        output = recorder.record(partial(_run_as_one_break, fn) if self.as_one_break else fn)
        self._keep(recorder.parts)
        self._held = fn, output
        return output

    @torch.no_grad()
    def replay(self, context: ContextT) -> OutputT:
        """Run all parts with `context` on the present contents of the static inputs; returns `output`.

        Raises GraphError before the capture and inside another capture.
        """
        if self._held is None:
            raise GraphError(f"{self.name} is not captured")
        if self.backend.is_capturing:
            raise GraphError(f"{self.name} cannot be replayed while another graph is captured")
        for part in self._parts:
            if isinstance(part, _Break):
                part.replay(self.backend, context)
            else:
                part.replay()
        return self._held[1]

    def release(self) -> None:
        """Release segments, breaks and outputs. The graph is then uncaptured."""
        self._keep([])
        self._held = None

    def _keep(self, parts: list[GraphSegment | _Break[ContextT]]) -> None:
        self._parts = parts
        self.segments = [part for part in parts if not isinstance(part, _Break)]
        self.num_bytes = sum(segment.num_bytes for segment in self.segments)

    def __repr__(self) -> str:
        if not self.is_captured:
            return f"<BreakableGraph {self.name} on {self.backend.name}, not captured>"
        parts = f"{len(self.segments)} segments, {self.num_breaks} breaks"
        return f"<BreakableGraph {self.name} on {self.backend.name}, {parts}>"


def _run_as_one_break(fn: Callable[[Breaks[ContextT]], OutputT], breaks: Breaks[ContextT]) -> OutputT:
    def whole_forward(context: ContextT) -> OutputT:
        return fn(Breaks(context))

    return breaks.graph_break(whole_forward)()


def _name_of(body: Callable[..., object]) -> str:
    return getattr(body, "__name__", None) or type(body).__name__
