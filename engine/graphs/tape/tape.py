"""The CPU backend: a dispatch mode records the operations of a segment, and a flat loop repeats them.

It keeps exactly what a device graph keeps: addresses, shapes and scalars. Python branches, weights and
buffers are frozen, the next replay overwrites outputs, and host reads are refused. Code that fails on a
device therefore fails here.

A result is a view or new memory. The recorder finds out by comparing storages when the operation runs,
because the schemas of `reshape` and `to` leave aliasing open. Views need no replay, since addresses
do not change.
"""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

import torch

from ..backend import GraphBackend
from ..errors import GraphError
from ..guard import ADDRESS_READS, HOST_READS, HostReadGuard, recordable
from ..modes import Args, DispatchMode, Kwargs, Operation, storage_of, storages_of
from ..pytree import map_items, tensors_of
from .steps import Call, Step, StepMaker


class TapeMemory(Protocol):
    """The memory for results of recorded operations."""

    def place(self, fresh: torch.Tensor) -> torch.Tensor:
        """The tensor with which code under capture continues: `fresh` or an equal one elsewhere."""

    def bind(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tape's entry for `tensor`: the same memory, but not necessarily a reference that keeps it."""

    def counts(self, bound: torch.Tensor) -> bool:
        """Whether a tape that holds `bound` keeps its memory alive."""

    def eager_region(self) -> AbstractContextManager[object]:
        """The context of break bodies."""

    @property
    def num_bytes(self) -> int:
        """Bytes shared by all tapes."""


class KeptMemory:
    """Memory in which each result stays where its operation put it. Each tape keeps all of its results."""

    num_bytes = 0

    def place(self, fresh: torch.Tensor) -> torch.Tensor:
        return fresh

    def bind(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def counts(self, bound: torch.Tensor) -> bool:
        return True

    def eager_region(self) -> AbstractContextManager[object]:
        return nullcontext()


class TapeSegment:
    """The steps of one segment."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.num_bytes = 0

    @property
    def num_ops(self) -> int:
        return len(self.steps)

    def replay(self) -> None:
        for step in self.steps:
            step()


class TapeBackend(GraphBackend):
    """Segments as lists of bound calls. `memory` chooses the place of their results."""

    name = "tape"

    def __init__(self, memory: TapeMemory | None = None) -> None:
        super().__init__()
        self.memory = KeptMemory() if memory is None else memory
        self._maker = StepMaker()
        self._open: tuple[TapeSegment, ExitStack] | None = None

    def open_segment(self) -> None:
        """As `GraphBackend.open_segment`. Raises GraphError outside a capture or inside an open segment."""
        if self._open is not None or not self.is_capturing:
            raise GraphError("a tape segment opens once, inside a capture")
        segment, modes = TapeSegment(), ExitStack()
        guard = HostReadGuard(HOST_READS | ADDRESS_READS)
        modes.enter_context(guard)
        modes.enter_context(_Recorder(segment, self.memory, self._maker, guard))
        self._open = (segment, modes)

    def close_segment(self) -> TapeSegment:
        """As `GraphBackend.close_segment`. Raises GraphError without an open segment."""
        if self._open is None:
            raise GraphError("no tape segment is open")
        segment, modes = self._open
        self._open = None
        modes.close()
        return segment

    def eager_region(self) -> AbstractContextManager[object]:
        return self.memory.eager_region()

    def pool_bytes(self) -> int:
        return self.memory.num_bytes

    def _abort_segment(self) -> None:
        if self._open is not None:
            self.close_segment()

    def __repr__(self) -> str:
        return f"<TapeBackend {type(self.memory).__name__}, capturing {self.is_capturing}>"


class _Recorder(DispatchMode):
    """Runs each operation and records the part that a replay must repeat."""

    def __init__(
        self, segment: TapeSegment, memory: TapeMemory, maker: StepMaker, guard: HostReadGuard
    ) -> None:
        super().__init__()
        self._segment = segment
        self._memory = memory
        self._maker = maker
        self._guard = guard

    def dispatch(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        with self._guard.suspended():
            operation = recordable(func, args, kwargs)
            known = storages_of(args, kwargs)
            result = self._place(operation(*args, **kwargs), known)
            self._write_down((operation, args, kwargs), result, known)
        return result

    def _place(self, result: object, known: set[int]) -> object:
        """`result`, with its new tensors in the places chosen by the memory."""
        if isinstance(result, torch.Tensor):
            return result if storage_of(result) in known else self._memory.place(result)
        return map_items(result, lambda item: self._place(item, known))

    def _write_down(self, call: Call, result: object, known: set[int]) -> None:
        func, args, kwargs = call
        outputs = [None if storage_of(t) in known else self._memory.bind(t) for t in tensors_of(result)]
        bound = (
            func,
            tuple(map(self._bind, args)),
            {name: self._bind(value) for name, value in kwargs.items()},
        )
        step = self._maker.make(bound, outputs)
        if step is not None:
            self._segment.steps.append(step)
        kept = [output for output in outputs if output is not None and self._memory.counts(output)]
        self._segment.num_bytes += sum(output.untyped_storage().nbytes() for output in kept)

    def _bind(self, tree: object) -> object:
        return self._memory.bind(tree) if isinstance(tree, torch.Tensor) else map_items(tree, self._bind)
