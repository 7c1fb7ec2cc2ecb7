"""Finds, for each recorded operation, the cheapest call that repeats it.

A call through the operator object converts each argument by schema; the Python binding of the same operation
is about twice as fast. The mapping from bindings to overloads is not documented, so it is tested: the binding
is called under a mode that runs nothing, and must request exactly the recorded overload with the recorded
arguments.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch._ops import OpOverload

from ..modes import Args, DispatchMode, Kwargs, Operation
from ..pytree import tensors_of

Step: TypeAlias = Callable[[], object]
Call: TypeAlias = tuple[OpOverload, Args, Kwargs]

# These copy one tensor into another dtype or layout, so a copy into the output repeats them.
COPYING = frozenset({"aten::clone", "aten::_to_copy"})
# The contents of their output are undefined.
UNFILLED = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)


@dataclass(frozen=True, kw_only=True)
class OperationTraits:
    """The schema of an overload, read once: each of its attributes is converted anew by torch."""

    is_mutable: bool
    is_unfilled: bool
    is_copying: bool
    arguments: frozenset[str]
    into: OpOverload | None
    """The `out` overload."""

    @classmethod
    def of(cls, func: OpOverload) -> "OperationTraits":
        schema = func._schema
        return cls(
            is_mutable=schema.is_mutable,
            is_unfilled=schema.name in UNFILLED,
            is_copying=schema.name in COPYING,
            arguments=frozenset(argument.name for argument in schema.arguments),
            into=_find_out_overload(func),
        )


class StepMaker:
    """Makes steps. Remembers the schema of each operation and the binding of each signature."""

    def __init__(self) -> None:
        self._traits: dict[OpOverload, OperationTraits] = {}
        self._bindings: dict[object, Callable[..., object]] = {}

    def make(self, call: Call, outputs: Sequence[torch.Tensor | None]) -> Step | None:
        """The step that repeats `call`; None if there is nothing to do.

        `outputs`: the place of each tensor result of the call, None for a result that aliases an argument.
        """
        func, args, kwargs = call
        traits = self._traits_of(func)
        fresh = [output for output in outputs if output is not None]
        if not fresh:
            return self._fastest(call) if traits.is_mutable else None
        if traits.is_unfilled:
            return None
        if traits.is_mutable:
            return partial(_run_and_copy, self._fastest(call), outputs)
        if traits.is_copying:
            return partial(fresh[0].copy_, next(tensors_of(args)))
        if traits.into is not None and len(outputs) == 1:
            return self._fastest((traits.into, args, kwargs | {"out": fresh[0]}))
        return partial(_run_and_copy, self._fastest(call), outputs)

    def _traits_of(self, func: OpOverload) -> OperationTraits:
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = OperationTraits.of(func)
        return traits

    def _fastest(self, call: Call) -> Step:
        func, args, kwargs = call
        if kwargs:
            taken = self._traits_of(func).arguments
            kwargs = {name: value for name, value in kwargs.items() if name in taken}
        key = func, _signature(args, kwargs)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = _find_binding((func, args, kwargs))
        return partial(binding, *args, **kwargs)


def _find_out_overload(func: OpOverload) -> OpOverload | None:
    """The overload with the same arguments plus one `out`, if it has its own kernel; else None.

    Many are generated: they run the functional overload and copy, with more overhead than a plain run and
    copy.
    """
    packet = func.overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        rest = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if outs == ["out"] and _same_arguments(rest, wanted) and _has_kernel(candidate):
            return candidate
    return None


def _same_arguments(rest: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> bool:
    """Whether the arguments are equal, or `wanted` only adds dtype, layout, device and the like, which an
    output implies.
    """
    options = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    return rest == wanted or (
        rest == wanted[: len(rest)] and {name for name, _ in wanted[len(rest) :]} <= options
    )


def _has_kernel(overload: OpOverload) -> bool:
    return bool(overload.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU))


def _run_and_copy(run: Step, outputs: Sequence[torch.Tensor | None]) -> None:
    results = run()
    for output, result in zip(outputs, tensors_of(results), strict=True):
        if output is not None:
            output.copy_(result)


def _signature(*trees: object) -> tuple[object, ...]:
    """A hashable value, equal for calls that differ only in the contents, sizes and addresses of their
    tensors.
    """
    parts: list[object] = []
    places: dict[int, int] = {}
    for tree in trees:
        _describe(tree, places, parts)
    return tuple(parts)


def _describe(tree: object, places: dict[int, int], parts: list[object]) -> None:
    """Appends what a signature says of `tree`. `places`: the tensors seen so far, by their id."""
    if isinstance(tree, torch.Tensor):
        parts += (places.setdefault(id(tree), len(places)), tree.dtype, tree.dim())
    elif isinstance(tree, dict):
        parts.append(len(tree))
        for name, value in tree.items():
            parts.append(name)
            _describe(value, places, parts)
    elif isinstance(tree, (tuple, list)):
        parts += (type(tree), len(tree))
        for item in tree:
            _describe(item, places, parts)
    else:
        parts += (type(tree), tree)


def _find_binding(call: Call) -> Callable[..., object]:
    """The Python binding that reaches the call's overload; the overload itself if there is none."""
    func, args, kwargs = call
    for binding in _bindings(func):
        if _asks_for(partial(binding, *args, **kwargs), call):
            return binding
    return func


def _bindings(func: OpOverload) -> Iterator[Callable[..., object]]:
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "aten":
        for owner in (torch.Tensor if name.endswith("_") else torch, torch._C._nn):
            binding = getattr(owner, name, None)
            if callable(binding):
                yield binding


def _asks_for(step: Step, call: Call) -> bool:
    """Whether `step` requests exactly the operation and arguments that `call` requests."""
    func, args, kwargs = call
    direct, through = _Probe(), _Probe()
    with direct:
        func(*args, **kwargs)
    try:
        with through:
            step()
    except (TypeError, ValueError, RuntimeError):  # the binding does not take these arguments
        return False
    return len(through.calls) == len(direct.calls) == 1 and _is_same(through.calls[0], direct.calls[0])


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


class _Probe(DispatchMode):
    """Records the requested operation without running it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Operation, Args, Kwargs]] = []

    def dispatch(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        self.calls.append((func, args, kwargs))
        stand_in = next(tensors_of((kwargs.get("out"), args)), None)
        stand_in = torch.empty(0) if stand_in is None else stand_in
        count = len(func._schema.returns) if isinstance(func, OpOverload) else 1
        return stand_in if count == 1 else (stand_in,) * count
