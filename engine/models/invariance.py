"""The check, at start, that this device computes a row with the same bits in any number of rows.

Batch-invariant operations rely on a property of the device: the order in which an instruction adds the terms
of one output does not depend on the other outputs. It holds for all devices known. No standard demands it.
"""

import torch

from ...kernels.row_ops import RowOps
from ..errors import CheckpointError
from .interface import CausalLM

NUM_ROWS = 300
# Around the borders of tiles: a decode step alone, small batches, verify steps, prefill chunks.
COUNTS = (1, 4, 16, 17, 40, 100)


@torch.no_grad()
def check_invariance(model: CausalLM, ops: RowOps) -> None:
    """Computes rows of each product of `model` in different numbers and at different places.

    Raises CheckpointError if the bits of a row differ.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    seen: set[tuple[object, ...]] = set()
    for name, weight in model.tensors():
        is_logits = weight is model.lm_head
        key = (*weight.shape, is_logits)
        if weight.dim() != 2 or key in seen or (weight is model.embed_tokens and not is_logits):
            continue
        seen.add(key)
        rows = torch.randn(NUM_ROWS, weight.shape[1], device=model.device, generator=generator)
        _check(name, rows.to(model.dtype), weight, ops, is_logits=is_logits)


def _check(name: str, rows: torch.Tensor, weight: torch.Tensor, ops: RowOps, *, is_logits: bool) -> None:
    def product(some: torch.Tensor) -> torch.Tensor:
        return ops.logits(some, weight) if is_logits else ops.linear(some, weight, None)

    whole = product(rows)
    same = [torch.equal(product(rows[:count]), whole[:count]) for count in COUNTS]
    if not all((*same, torch.equal(product(rows.flip(0)), whole.flip(0)))):
        raise CheckpointError(
            f"deterministic on: {rows.device.type} rounds a row of {name} {list(weight.shape)} in "
            f"{rows.dtype} differently among other rows, so tokens would depend on the batch; start with "
            "--deterministic off, with --dtype float32, or on another device"
        )
