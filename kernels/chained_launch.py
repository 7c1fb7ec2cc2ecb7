"""Launches of a kernel while the one before it ends: programmatic dependent launch.

A step of few rows is a chain of kernels that take 2 to 60 us each, and starting one takes about 1 us after
the one before has ended. A kernel that is launched in this way starts when every program of the one before
has called `release_next` or has ended. `wait_for_previous` then waits until all that the one before wrote
can be seen.

Laws of such a kernel:

- every program calls `wait_for_previous` first, before it touches memory. So a kernel that has ended implies
  that all before it have;
- a program calls `release_next` behind its main loop, just before it stores. Earlier is slower: programs
  of the next kernel then fill the multiprocessors that are free first, and others get none. A decode step of
  the 8B model on an H200 took 4.64 ms, where it takes 4.44 without and 4.35 with a late release.

Other kernels (torch, cuBLAS) are unaffected: they start when the one before has ended, and a chained kernel
behind one of them waits for its end. Results do not depend on any of this. Source: CUDA C++ Programming
Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from .triton_jit import jit, tl

__all__ = [
    "are_chained",
    "chained",
    "has_chained_launches",
    "release_next",
    "unchained_launches",
    "wait_for_previous",
]

CAPABILITY = (9, 0)  # the first compute capability with it

_is_off: ContextVar[bool] = ContextVar("launches are not chained", default=False)


@jit
def wait_for_previous(CHAINED: tl.constexpr) -> None:
    """Waits until the kernel before has ended and its writes can be seen."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@jit
def release_next(CHAINED: tl.constexpr) -> None:
    """This program does not keep the next kernel from starting any more."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@cache  # torch takes 10 us to say it again, before each launch
def has_chained_launches(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched while the one before ends."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= CAPABILITY
    )


@contextmanager
def unchained_launches() -> Iterator[None]:
    """Kernels that are launched or captured in this context (and thread) start after the one before ended."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def are_chained(device: torch.device) -> bool:
    """Whether kernels on `device` are launched while the one before ends."""
    return not _is_off.get() and has_chained_launches(device)


def chained(device: torch.device, *, is_wanted: bool = True) -> dict[str, bool]:
    """The arguments of a launch on `device` for a kernel with a constant CHAINED: `kernel[grid](...,
    **chained(x.device))`.
    """
    if is_wanted and are_chained(device):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}
