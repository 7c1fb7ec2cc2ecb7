"""Selects the hidden row of the last accepted token of each request; the next draft starts from it."""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

MAX_BLOCK = 2048


def select_last_rows_reference(hidden: torch.Tensor, accept_len: torch.Tensor) -> torch.Tensor:
    """The definition and the CPU path: row accept_len - 1 of each request, zeros where accept_len is 0."""
    num_requests, width = accept_len.shape[0], hidden.shape[1]
    rows_each = hidden.shape[0] // max(num_requests, 1)
    rows = torch.arange(num_requests, device=hidden.device) * rows_each + (accept_len - 1).clamp(min=0)
    return hidden.index_select(0, rows).view(num_requests, width).masked_fill(accept_len[:, None] == 0, 0)


@jit_varying("rows_each", "p_accept_len")
def _select_last_rows_kernel(
    p_hidden: tl.tensor,
    p_accept_len: tl.tensor,
    p_out: tl.tensor,
    rows_each: tl.tensor,
    width: tl.tensor,
    hidden_stride: tl.tensor,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_request = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < width
    accept_len = tl.load(p_accept_len + i_request).to(tl.int64)
    i_row = i_request * rows_each + accept_len - 1
    b_row = tl.load(p_hidden + i_row * hidden_stride + i_column, mask=m_column & (accept_len > 0), other=0.0)
    release_next(CHAINED)
    tl.store(p_out + i_request * width + i_column, b_row, mask=m_column)


def select_last_rows_triton(hidden: torch.Tensor, accept_len: torch.Tensor) -> torch.Tensor:
    """Launch on `hidden` `[B*Q, H]` (rows dense) and `accept_len` int `[B]` in 0..Q; returns `[B, H]`.

    Raises ValueError if the number of rows is no multiple of B.
    """
    _check(hidden, accept_len)
    num_requests, width = accept_len.shape[0], hidden.shape[1]
    out = torch.empty(num_requests, width, dtype=hidden.dtype, device=hidden.device)
    if out.numel() == 0:
        return out
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    block = min(next_power_of_2(width), MAX_BLOCK)
    _select_last_rows_kernel[(num_requests, cdiv(width, block))](
        hidden,
        accept_len.contiguous(),
        out,
        hidden.shape[0] // num_requests,
        width,
        hidden.stride(0),
        BLOCK=block,
        **chained(hidden.device),
        num_warps=4,
    )
    return out


def _check(hidden: torch.Tensor, accept_len: torch.Tensor) -> None:
    num_requests = accept_len.shape[0]
    if hidden.dim() != 2 or (hidden.shape[0] % num_requests if num_requests else hidden.shape[0]):
        raise ValueError(
            f"select_last_rows: hidden {tuple(hidden.shape)} is not [B*Q, H] for B = {num_requests} requests"
        )


def select_last_rows(hidden: torch.Tensor, accept_len: torch.Tensor) -> torch.Tensor:
    """Row accept_len - 1 of each request: `hidden` `[B*Q, H]`, `accept_len` int `[B]` in 0..Q -> `[B, H]`.

    Accept length 0 marks an idle row of a padded batch and gives zeros. The result owns its memory. Raises
    ValueError if the number of rows is no multiple of B.
    """
    if hidden.is_cuda:
        return select_last_rows_triton(hidden, accept_len)
    _check(hidden, accept_len)
    return select_last_rows_reference(hidden, accept_len)
