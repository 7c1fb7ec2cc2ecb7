"""Guards that refuse operations which code under capture must not use.

A graph cannot contain a result that the host waits for: no value read back, no shape that depends on data, no
tensor built from host data. On a device such an operation would break the capture; on CPU it would silently
freeze one value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from .errors import CaptureRefused
from .modes import Args, DispatchMode, Kwargs, Operation
from .pytree import tensors_of

# Tensor methods that read memory without passing the dispatcher.
HOST_READS = frozenset({"item", "tolist", "numpy", "__array__", "__dlpack__"})
# Addresses passed to foreign code: harmless on a device, which records the launches of its kernels.
ADDRESS_READS = frozenset({"data_ptr"})
# On a device these copy from the host before any operation is dispatched.
HOST_BUILDERS = frozenset({torch.tensor, torch.as_tensor})

MASKED_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
COPIES = frozenset({"aten::_to_copy", "aten::copy_"})


class HostReadGuard(TorchFunctionMode):
    """Refuses tensor methods that read memory without passing the dispatcher, in this thread.

    Raises CaptureRefused from the refused call.
    """

    def __init__(self, forbidden: frozenset[str]) -> None:
        super().__init__()
        self._forbidden = forbidden
        self._is_suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Lifts the guard inside an operation: a custom kernel may read the addresses of its arguments."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    def __torch_function__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        name = getattr(func, "__name__", "")
        if name in self._forbidden and not self._is_suspended:
            raise CaptureRefused(
                f"Tensor.{name} inside a capture reads memory where the graph cannot see it; "
                "do it before or after the graph, or in a break"
            )
        if func in HOST_BUILDERS and not self._is_suspended and next(tensors_of(args), None) is None:
            raise CaptureRefused(
                f"torch.{name} inside a capture builds a tensor from host data; build it before"
            )
        return func(*args, **(kwargs or {}))


class HostSyncGuard(DispatchMode):
    """Refuses operations only; for backends whose driver does the recording."""

    def __init__(self, reads: HostReadGuard) -> None:
        super().__init__()
        self._reads = reads

    def dispatch(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Run the operation. Raises CaptureRefused if a graph cannot hold it."""
        with self._reads.suspended():
            return recordable(func, args, kwargs)(*args, **kwargs)


def recordable(func: Operation, args: Args, kwargs: Kwargs) -> OpOverload:
    """The operation, if a graph can hold this call of it. Raises CaptureRefused otherwise, naming it."""
    if not isinstance(func, OpOverload):
        raise CaptureRefused(f"{func} inside a capture is not a plain operation and cannot be replayed")
    reason = _objection(func, args, kwargs)
    if reason:
        raise CaptureRefused(f"{func} inside a capture {reason}")
    return func


class _Traits(NamedTuple):
    """What the schema of an operation says of recording it; torch takes long to read a schema."""

    objection: str | None  # to every call
    is_masked_indexing: bool
    is_lift: bool
    is_copy: bool


@cache
def _traits_of(func: OpOverload) -> _Traits:
    schema, objection = func._schema, None
    is_indexing = schema.name in MASKED_INDEXING
    if torch.Tag.data_dependent_output in func.tags:
        objection = (
            "waits for a value on the host (.item(), bool(), int(), torch.equal); keep it on the device"
        )
    elif torch.Tag.dynamic_output_shape in func.tags and not is_indexing:
        objection = "has an output whose shape depends on data; give it a fixed size"
    elif torch.Tag.inplace_view in func.tags:
        objection = (
            "changes the shape or memory of a tensor in place, which a replay would do again; make a new view"
        )
    elif not schema.returns and not schema.is_mutable:
        objection = (
            "declares neither a result nor a mutated argument, so nothing of it would be replayed; "
            "declare mutates_args"
        )
    return _Traits(objection, is_indexing, schema.name.startswith("aten::lift"), schema.name in COPIES)


def _objection(func: OpOverload, args: Args, kwargs: Kwargs) -> str | None:
    traits = _traits_of(func)
    if traits.objection is not None:
        return traits.objection
    if traits.is_masked_indexing and any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_of(args[1])
    ):
        return (
            "indexes with a boolean mask, so its shape depends on data; "
            "use torch.where or index with integers"
        )
    if traits.is_lift and any(tensor.dim() > 0 for tensor in tensors_of(args)):
        return "builds a tensor from host data (torch.tensor, from_numpy); build it once, before the capture"
    if traits.is_copy and _devices(args, kwargs) > 1:
        return "copies between devices; copy into a static buffer before the replay"
    return None


def _devices(args: Args, kwargs: Kwargs) -> int:
    wanted = kwargs.get("device")
    named = {wanted.type} if isinstance(wanted, torch.device) else set()
    return len(named | {tensor.device.type for tensor in tensors_of(args)})
