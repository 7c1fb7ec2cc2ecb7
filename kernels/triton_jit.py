"""The only import of Triton. Every kernel file takes `jit` and `tl` from here, with types.

Triton exists for Linux alone. Elsewhere the torch references still run; launching a kernel there raises.

Triton compiles a variant of a kernel for each combination of dtypes, constants and properties of its
arguments. `planned_launches` collects the launches of a dry run without running them, and `Launch.compile`
compiles one, so that a server has every variant before its first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeGuard, TypeVar

import torch

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]
except ImportError:  # no wheel for this platform; nothing on it can call a launcher with a CUDA tensor
    triton = tl = TensorDescriptor = None
    JITFunction = object

try:
    from triton.experimental import gluon  # type: ignore[import-untyped]
    from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
    from triton.experimental.gluon._runtime import GluonJITFunction  # type: ignore[import-untyped]
    from triton.experimental.gluon.language.nvidia import hopper as warpgroups  # type: ignore[import-untyped]
    from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-untyped]
        TensorDescriptor as TileDescriptor,
    )

    mbarrier, tma = warpgroups.mbarrier, warpgroups.tma
except (ImportError, AttributeError):
    gl = gluon = mbarrier = tma = warpgroups = TileDescriptor = None
    GluonJITFunction = JITFunction

__all__ = [
    "ALIGNMENT",
    "Compiled",
    "Kernel",
    "Launch",
    "PointerArgument",
    "Rows",
    "cdiv",
    "constexpr_function",
    "descriptor_of",
    "gl",
    "gluon_jit",
    "gluon_jit_varying",
    "has_gluon",
    "is_descriptor",
    "is_tile_descriptor",
    "jit",
    "jit_varying",
    "mbarrier",
    "next_power_of_2",
    "planned_launch",
    "planned_launches",
    "rows_of",
    "tensor_descriptor",
    "tile_descriptor",
    "tl",
    "tma",
    "triton_version",
    "warpgroups",
    "watch_compilations",
]

Given = ParamSpec("Given")
Made = TypeVar("Made")

ALIGNMENT = 16  # bytes of an address, and the factor of an integer, that Triton compiles variants for
INT32_MAX = 2**31 - 1
# Gluon, the lower language of Triton, is experimental: its names may change with each version. These compile.
GLUON_VERSIONS = ((3, 6), (3, 7))


class Kernel(Protocol):
    """`kernel[grid](...)` launches it; kernels call their helpers by plain calls."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...
    def __call__(self, *args: object, **kwargs: object) -> tl.tensor: ...


def jit(function: Callable[..., object]) -> Kernel:
    """Decorator: compiles `function` as a Triton kernel or as a helper of kernels."""
    kernel: Kernel = _NoTriton() if triton is None else _Planned(function)
    return kernel


def jit_varying(*names: str) -> Callable[[Callable[..., object]], Kernel]:
    """Decorator like `jit`.

    The named integers and the addresses of the named pointers change with the load, so no variant is compiled
    for their values.

    By default Triton compiles new variants for integers that are 1 or multiples of 16, and for addresses that
    are multiples of 16, in the middle of serving. Name every integer that depends on the batch, and every
    pointer into a tensor whose offset depends on it.
    """

    def decorate(function: Callable[..., object]) -> Kernel:
        kernel: Kernel = _NoTriton() if triton is None else _Planned(function, do_not_specialize=list(names))
        return kernel

    return decorate


def has_gluon() -> bool:
    """Whether this version of Triton has the Gluon that kernels here are written in."""
    return gl is not None and tuple(map(int, triton_version().split(".")[:2])) in GLUON_VERSIONS


def gluon_jit(function: Callable[..., object]) -> Kernel:
    """As `jit`, for Gluon. Only launched where `has_gluon`."""
    return gluon_jit_varying()(function)


def gluon_jit_varying(*names: str) -> Callable[[Callable[..., object]], Kernel]:
    """As `jit_varying`, for Gluon. Only launched where `has_gluon`."""

    def decorate(function: Callable[..., object]) -> Kernel:
        kernel: Kernel = _NoTriton() if gl is None else _PlannedGluon(function, do_not_specialize=list(names))
        return kernel

    return decorate


def constexpr_function(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorator: `function` makes constants of constants while a kernel in Gluon is compiled."""
    made: Callable[Given, Made] = function if gluon is None else gluon.constexpr_function(function)
    return made


# --- launches that are planned and compiled before they run -------------------------------------------------


@dataclass(frozen=True)
class PointerArgument:
    """A tensor argument as Triton sees it: its dtype, and its address modulo ALIGNMENT."""

    dtype: torch.dtype
    offset: int

    @staticmethod
    def of(x: torch.Tensor) -> PointerArgument:
        """The argument that `x` is if its storage begins at an aligned address."""
        return PointerArgument(x.dtype, int(x.storage_offset()) * x.element_size() % ALIGNMENT)

    def data_ptr(self) -> int:
        return self.offset


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One planned launch. Launches with equal `variant` share one compiled kernel.

    `variant` is the kernel's name followed by one word per argument and option.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[object, ...]
    options: dict[str, object]
    variant: tuple[str, ...]

    def prepare(self) -> None:
        """Makes the kernel's table of variants for the current device, before threads share it.

        Threads that made it at once would lose each other's variants.
        """
        tables = getattr(self.kernel, "device_caches", None)
        if tables is not None:
            _ = tables[triton.runtime.driver.active.get_current_device()]

    def compile(self) -> Callable[[], None]:
        """Compiles the variant for the current device, or takes it from Triton's cache on disk.

        Threads may compile different variants at once. Returns the function that loads the variant onto the
        device. One thread must load all variants, after all are compiled. Raises Triton's errors.
        """
        compiled = self.kernel.warmup(*self.arguments, grid=self.grid, **self.options)
        # Triton 3.6 builds a host stub per signature with a C compiler, and imports all stubs under one
        # name. In several threads, a kernel could get the stub of another. The stub that is made here only
        # fills the cache on disk; the kernel's own is made by `load`.
        make_stub = getattr(triton.runtime.driver.active, "launcher_cls", None)
        if make_stub is not None and compiled is not None:
            make_stub(compiled.src, compiled.metadata)

        def load() -> None:
            if compiled is not None:
                _ = compiled.run  # the property loads the binary and the stub

        return load

    def __str__(self) -> str:
        return f"{self.variant[0]}({', '.join(self.variant[1:])})"


_plan: ContextVar[list[Launch] | None] = ContextVar("planned launches", default=None)


@contextmanager
def planned_launches() -> Iterator[list[Launch]]:
    """Collects the kernels launched in this context (and thread) instead of running them.

    Their outputs stay unwritten, so only runs on fake tensors make sense. Tensors begin at aligned addresses.
    """
    found: list[Launch] = []
    token = _plan.set(found)
    try:
        yield found
    finally:
        _plan.reset(token)


class _Launches:
    """A Triton kernel whose launches `planned_launches` can collect."""

    params: Any
    __name__: str

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        plan = _plan.get()
        if plan is None:
            launch: Callable[..., object] = super().__getitem__(grid)  # type: ignore[misc]
            return launch

        def note(*args: object, **options: object) -> None:
            arguments = tuple(map(_argument, args))
            given = {name: _argument(value) for name, value in options.items()}
            plan.append(planned_launch(self, grid, arguments, given))

        return note

    def words(self, arguments: tuple[object, ...], options: dict[str, object]) -> Iterator[str]:
        """One word per parameter, with what Triton compiles a variant for, then the options."""
        rest = dict(options)
        for i, param in enumerate(self.params):
            value = arguments[i] if i < len(arguments) else rest.pop(param.name)
            if param.is_constexpr:
                yield f"{param.name}={value}"
            else:
                yield f"{param.name}:{_word(value, is_varying=bool(param.do_not_specialize))}"
        yield from (f"{name}={value}" for name, value in sorted(rest.items()))


class _Planned(_Launches, JITFunction):  # type: ignore[misc]
    pass


class _PlannedGluon(_Launches, GluonJITFunction):  # type: ignore[misc]
    pass


def planned_launch(
    kernel: _Launches, grid: tuple[int, ...], arguments: tuple[object, ...], options: dict[str, object]
) -> Launch:
    """A launch of `kernel`, whose tensors are PointerArguments, with the name of its variant."""
    variant = (kernel.__name__, *kernel.words(arguments, options))
    return Launch(kernel=kernel, grid=grid, arguments=arguments, options=options, variant=variant)


def _argument(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return PointerArgument.of(value)
    return value


def _word(value: object, *, is_varying: bool) -> str:
    if isinstance(value, PointerArgument):
        is_aligned = not is_varying and value.offset == 0
        return f"*{str(value.dtype).removeprefix('torch.')}{'/16' if is_aligned else ''}"
    if isinstance(value, bool) or not isinstance(value, int):
        block = getattr(value, "block_shape", "")  # of a tensor descriptor
        return f"{type(value).__name__}{getattr(getattr(value, 'base', None), 'dtype', '')}{block}"
    if value == 1 and not is_varying:
        return "1"
    width = "i32" if -INT32_MAX <= value <= INT32_MAX else "i64"
    return f"{width}{'/16' if not is_varying and value % ALIGNMENT == 0 else ''}"


class _JitInfo(Protocol):
    """What Triton tells its hooks about a kernel."""

    name: str


class _CompileHook:
    """The hook that Triton calls after each compilation. `before` was set by others and is called, too."""

    def __init__(self, before: Callable[..., object] | None) -> None:
        self.before = before
        self.listeners: list[Callable[[Compiled], None]] = []

    def __call__(self, *, fn: _JitInfo, repr: str, **details: object) -> object:
        for tell in list(self.listeners):
            tell(Compiled(kernel=fn.name.rpartition(".")[2], variant=repr))
        return None if self.before is None else self.before(fn=fn, repr=repr, **details)


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A variant that Triton compiled, or read from its cache on disk: `kernel` and `variant` name it."""

    kernel: str
    variant: str


def watch_compilations(tell: Callable[[Compiled], None]) -> Callable[[], None]:
    """Calls `tell` after every kernel variant that this process has to compile or to read from disk.

    Any thread may call it. Returns the function that ends the watch. Does nothing without Triton, or where
    Triton has no such hook.
    """
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "jit_post_compile_hook"):
        return lambda: None
    hook = runtime.jit_post_compile_hook
    if not isinstance(hook, _CompileHook):
        hook = runtime.jit_post_compile_hook = _CompileHook(hook)
    hook.listeners.append(tell)

    def end() -> None:
        if tell in hook.listeners:
            hook.listeners.remove(tell)

    return end


class _NoTriton:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        raise RuntimeError(
            "this platform has no Triton; keep the tensors on the CPU, where torch computes the same"
        )

    def __call__(self, *args: object, **kwargs: object) -> tl.tensor:
        return self[()]


def triton_version() -> str:
    """The version of Triton; "" without it."""
    return "" if triton is None else str(triton.__version__)


def tensor_descriptor(x: torch.Tensor, block: tuple[int, ...]) -> object:
    """A kernel argument that copies a `block` of the contiguous `x` in one operation."""
    return descriptor_of(_base_of(x), list(x.shape), list(x.stride()), list(block))


def tile_descriptor(x: torch.Tensor, block: tuple[int, ...]) -> object:
    """As `tensor_descriptor`, for kernels in Gluon: to shared memory, swizzled by 128 bytes or the block's
    width.
    """
    return descriptor_of(_base_of(x), list(x.shape), list(x.stride()), list(block), is_tile=True)


def is_descriptor(value: object) -> TypeGuard[Any]:
    """Whether `value` is a kernel argument of `tensor_descriptor` or `tile_descriptor`."""
    return TensorDescriptor is not None and isinstance(value, (TensorDescriptor, TileDescriptor or ()))


def is_tile_descriptor(value: object) -> bool:
    return TileDescriptor is not None and isinstance(value, TileDescriptor)


def _base_of(x: torch.Tensor) -> torch.Tensor | PointerArgument:
    """`x`, without its address in a dry run, where it has none."""
    return x if _plan.get() is None else PointerArgument.of(x)


def descriptor_of(
    base: torch.Tensor | PointerArgument,
    shape: list[int],
    strides: list[int],
    block: list[int],
    *,
    is_tile: bool = False,
) -> object:
    """The descriptor of a tensor, which need not exist for planned launches."""
    if is_tile:
        return TileDescriptor(base, shape, strides, block, _tile_layout(base.dtype, block[-1]))
    return TensorDescriptor(base, shape, strides, block)


def _tile_layout(dtype: torch.dtype, width: int) -> object:
    swizzle = min(128, width * dtype.itemsize)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=2)


def cdiv(n: int, size: int) -> int:
    """The number of blocks of `size` that hold `n`: n / size, rounded up."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two not below `n`, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


class Rows(NamedTuple):
    """`x` as `num_rows` rows of its last dimension.

    Row i begins at element (i // inner) * outer_stride + (i % inner) * inner_stride. Heads sliced from a
    wider projection therefore need no copy.
    """

    x: torch.Tensor
    num_rows: int
    inner: int
    outer_stride: int
    inner_stride: int


def rows_of(x: torch.Tensor) -> Rows:
    """The rows of `x` `[..., D]`, copied only if two strides cannot describe them."""
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1]).contiguous()
    if x.dim() == 2:
        return Rows(x, x.shape[0], 1, x.stride(0), 0)
    return Rows(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
