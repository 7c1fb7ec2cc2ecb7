"""The check, at start, that this device computes a row with the same bits in any number of rows.

Batch-invariant operations rely on a property of the device: the order in which an instruction adds the terms
of one output does not depend on the other outputs, nor on the size of the instruction. It holds on an H200
and on the CPUs tried. No standard demands it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch

from ..kernels.fp8_scales import fill_normal
from ..kernels.invariant_attention import Rows, invariant_attention
from ..kernels.row_ops import RowOps
from .errors import CheckpointError
from .kv.layouts import MHALayout
from .kv.pool import KVPool
from .models.interface import CausalLM, StoredForms
from .models.quant.fp8_projection import Fp8Projection
from .models.quant.int4_projection import Int4Projection

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # of rows [T, H]
NUM_ROWS = 300
# Around the borders of tiles: a decode step alone, small batches, verify steps, prefill chunks.
COUNTS = (1, 4, 16, 17, 40, 100)
# Of attention: new rows, context rows with them, and the size of a page.
NEW_ROWS, CONTEXT, PAGE_SIZE = 100, 600, 16


@torch.no_grad()
def check_invariance(model: CausalLM, ops: RowOps) -> None:
    """Computes rows of each product of `model`, and of its attention, in different numbers.

    Raises CheckpointError if the bits of a row differ, or if the model's attention has no batch-invariant
    form.
    """
    if type(model.kv_layout(PAGE_SIZE)) is not MHALayout:
        raise CheckpointError(
            f"deterministic on: {model.config.architecture} has no batch-invariant attention; use "
            "--deterministic off or another model"
        )
    generator = torch.Generator(model.device).manual_seed(0)
    for name, in_size, product in _products(model, ops):
        rows = torch.randn(NUM_ROWS, in_size, device=model.device, generator=generator)
        if not _is_product_invariant(rows.to(model.dtype), product):
            raise _refusal(model, f"a row of {name}")
    if not _is_attention_invariant(model, generator):
        raise _refusal(model, "a row of attention")


def _products(model: CausalLM, ops: RowOps) -> Iterator[tuple[str, int, Product]]:
    """(name, inputs, product) of the model's products of each shape, and of its MLPs of each kind."""
    seen: set[tuple[object, ...]] = set()
    for name, weight in model.tensors():
        is_logits = weight is model.lm_head
        key = (*weight.shape, is_logits)
        is_matrix = weight.dim() == 2 and weight.dtype == model.dtype and name.endswith(".weight")
        if not is_matrix or key in seen or (weight is model.embed_tokens and not is_logits):
            continue
        seen.add(key)
        product = partial(_logits if is_logits else _linear, ops, weight)
        yield f"{name} {list(weight.shape)}", weight.shape[1], product
    for name, stored in model.projections.made if isinstance(model, StoredForms) else ():
        if isinstance(stored, Fp8Projection | Int4Projection):
            key = (type(stored), *stored.weight.shape)
            if key not in seen:
                yield f"{name} {list(stored.weight.shape)}", stored.in_size, stored
            seen.add(key)
    for number, layer in enumerate(getattr(model, "layers", ())):
        key = (type(layer.mlp),)
        if key not in seen:
            yield f"the MLP of layer {number}", model.config.hidden_size, layer.mlp
        seen.add(key)


def _linear(ops: RowOps, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ops.linear(rows, weight, None)


def _logits(ops: RowOps, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return ops.logits(rows, weight)


def _is_product_invariant(rows: torch.Tensor, product: Product) -> bool:
    whole = product(rows)
    same = [torch.equal(product(rows[:count]), whole[:count]) for count in COUNTS]
    return all(same) and torch.equal(product(rows.flip(0)), whole.flip(0))


def _is_attention_invariant(model: CausalLM, generator: torch.Generator) -> bool:
    """Compares a prefill chunk with verify rows alone, and with decode rows of as many requests."""
    config, device = model.config, model.device
    num_pages = -(-CONTEXT // PAGE_SIZE)
    pool = KVPool(num_pages + 1, model.kv_layout(PAGE_SIZE), device, row_dtype=model.dtype)
    fill_normal(pool.kv, generator)
    table = torch.arange(1, num_pages + 1, device=device)[None]
    shape = (NEW_ROWS, config.num_heads, config.head_dim)
    q = torch.randn(shape, device=device, generator=generator).to(model.dtype)

    def attend(some: torch.Tensor, how: Rows) -> torch.Tensor:
        pages = table.expand(how.kv_lens.shape[0], -1).contiguous()
        return invariant_attention(some, pool.kv, 0, pages, how, pool.layout.scale)

    ends = torch.arange(CONTEXT - NEW_ROWS + 1, CONTEXT + 1, device=device)
    starts = torch.tensor([0, NEW_ROWS], device=device)
    whole = attend(q, Rows(ends[-1:], starts=starts, longest=NEW_ROWS))
    decoded = attend(q, Rows(ends, uniform=1))
    verified = attend(q[-4:], Rows(ends[-1:], uniform=4))
    return torch.equal(decoded, whole) and torch.equal(verified, whole[-4:])


def _refusal(model: CausalLM, what: str) -> CheckpointError:
    return CheckpointError(
        f"deterministic on: this {model.device.type} device rounds {what} in {model.dtype} differently among "
        "other rows, so tokens would depend on the batch; use --deterministic off or another device"
    )
