"""Launches of a kernel while the one before it still runs (programmatic dependent launch).

A chain of short kernels spends much of its time between them: a kernel is launched when the last program of
the one before has ended. With `launch_pdl` its programs are set up meanwhile, and wait. Every such kernel
begins with `after_previous` and touches no memory before it, so it sees all that earlier kernels wrote.
"""

from __future__ import annotations

import torch

from .triton_jit import jit, tl

MIN_CAPABILITY = 9


@jit
def after_previous() -> None:
    """Lets the next kernel be set up, and waits until the one before has ended."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_properties(device).major >= MIN_CAPABILITY
