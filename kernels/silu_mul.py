"""The gate of a GLU MLP (Shazeer, "GLU variants improve transformer", 2020): y = silu(gate) * up, or, in
Gemma, y = gelu(gate) * up with gelu approximated by tanh.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import cdiv, jit, rows_of, tl

BLOCK = 1024


def silu_mul_reference(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """The definition and the CPU path: silu or gelu is rounded to the dtype before the product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)) * up


@jit
def activated(b_gate: tl.tensor, IS_GELU: tl.constexpr) -> tl.tensor:
    """silu of float32 `b_gate`, or gelu by tanh."""
    b_scaled = b_gate
    if IS_GELU:
        # 0.5 x (1 + tanh(u)) is x / (1 + exp(-2u))
        b_scaled = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    # exp of a positive number overflows to inf, and x / inf is the right 0
    return b_gate / (1.0 + tl.exp(-b_scaled))


@jit
def _silu_mul_kernel(
    p_x: tl.tensor,
    p_y: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < width
    o_x = (i_row // inner) * outer_stride + (i_row % inner) * inner_stride
    b_gate = tl.load(p_x + o_x + i_column, mask=m_column, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + o_x + width + i_column, mask=m_column, other=0.0).to(tl.float32)
    release_next(CHAINED)
    b_silu = activated(b_gate, IS_GELU).to(p_y.dtype.element_ty).to(tl.float32)
    tl.store(p_y + i_row * width + i_column, (b_silu * b_up).to(p_y.dtype.element_ty), mask=m_column)


def silu_mul_triton(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """Launch on `gate_up` `[..., 2*I]` (gate first); returns `[..., I]`.

    Raises ValueError if the last dimension is odd.
    """
    _check(gate_up)
    width = gate_up.shape[-1] // 2
    y = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel() == 0:
        return y
    rows = rows_of(gate_up)
    _silu_mul_kernel[(rows.num_rows, cdiv(width, BLOCK))](
        rows.x,
        y,
        width,
        rows.inner,
        rows.outer_stride,
        rows.inner_stride,
        IS_GELU=is_gelu,
        BLOCK=BLOCK,
        **chained(gate_up.device),
        num_warps=4,
    )
    return y


def _check(gate_up: torch.Tensor) -> None:
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"silu_mul: the last dimension {gate_up.shape[-1]} is odd; gate and up must be equally wide"
        )


def silu_mul(gate_up: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
    """silu(gate) * up, or gelu(gate) * up: `gate_up` `[..., 2*I]` (gate first) -> `[..., I]`.

    Raises ValueError if the last dimension is odd.
    """
    if gate_up.is_cuda:
        return silu_mul_triton(gate_up, is_gelu)
    _check(gate_up)
    return silu_mul_reference(gate_up, is_gelu)
