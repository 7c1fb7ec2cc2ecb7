"""The only import of Triton. Every kernel file takes `jit` and `tl` from here, with types.

Triton exists for Linux alone. Elsewhere the torch references still run; launching a kernel there raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]
except ImportError:  # no wheel for this platform; nothing on it can call a launcher with a CUDA tensor
    triton = tl = TensorDescriptor = None

__all__ = [
    "Kernel",
    "Rows",
    "cdiv",
    "jit",
    "jit_varying",
    "next_power_of_2",
    "rows_of",
    "tensor_descriptor",
    "tl",
]


class Kernel(Protocol):
    """`kernel[grid](...)` launches it; kernels call their helpers by plain calls."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...
    def __call__(self, *args: object, **kwargs: object) -> tl.tensor: ...


def jit(function: Callable[..., object]) -> Kernel:
    """Decorator: compiles `function` as a Triton kernel or as a helper of kernels."""
    kernel: Kernel = _NoTriton() if triton is None else triton.jit(function)
    return kernel


def jit_varying(*names: str) -> Callable[[Callable[..., object]], Kernel]:
    """Decorator like `jit`.

    Values of the named integers change with the load, so no variant is compiled for them.

    By default Triton compiles new variants for 1 and for multiples of 16, in the middle of serving.
    """

    def decorate(function: Callable[..., object]) -> Kernel:
        kernel: Kernel = (
            _NoTriton() if triton is None else triton.jit(function, do_not_specialize=list(names))
        )
        return kernel

    return decorate


class _NoTriton:
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        raise RuntimeError(
            "this platform has no Triton; keep the tensors on the CPU, where torch computes the same"
        )

    def __call__(self, *args: object, **kwargs: object) -> tl.tensor:
        return self[()]


def tensor_descriptor(x: torch.Tensor, block: tuple[int, ...]) -> object:
    """A kernel argument that copies a `block` of the contiguous `x` in one operation."""
    return TensorDescriptor.from_tensor(x, list(block))


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
