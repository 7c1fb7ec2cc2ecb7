"""Cross entropy of rows of logits with a target distribution or a token, and its gradient in place.

A training step computes logits in parts, and each part's gradient with it, so that no logits are kept. Two
passes: `loss_rows` reads the logits, and `loss_gradient` replaces them by their gradient once the weight of
each row is known.

Legend: R rows, C distributions (row r has distribution r % C), V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

MAX_BLOCK = 4096


class LossRows(NamedTuple):
    """For each row, `[R]`: the loss, the logarithm of the normaliser (both float32), and the best token
    (int64).
    """

    loss: torch.Tensor
    norm: torch.Tensor
    best: torch.Tensor


def loss_rows(logits: torch.Tensor, target: torch.Tensor) -> LossRows:
    """The losses of `logits` `[R, V]`. `target` holds distributions `[C, V]`, or tokens int64 `[R]`."""
    _check(logits, target)
    return _rows_triton(logits, target) if logits.is_cuda else _rows_reference(logits, target)


def loss_gradient(
    logits: torch.Tensor, target: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor
) -> None:
    """Replaces `logits` `[R, V]` by the gradient of the sum over rows of `weights` `[R]` times the loss.

    `norm` is that of `loss_rows`.
    """
    _check(logits, target)
    (_gradient_triton if logits.is_cuda else _gradient_reference)(logits, target, norm, weights)


def _check(logits: torch.Tensor, target: torch.Tensor) -> None:
    rows, width = logits.shape
    fits = (
        target.shape == (rows,)
        if target.dim() == 1
        else (target.shape[1] == width and rows % max(1, target.shape[0]) == 0)
    )
    if not fits or not logits.is_contiguous() or not target.is_contiguous():
        raise ValueError(
            f"output_loss: targets {list(target.shape)} do not fit dense logits {list(logits.shape)}"
        )


def _dense(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The target distribution of every row, float32 `[R, V]`."""
    if target.dim() == 1:
        return torch.nn.functional.one_hot(target, logits.shape[1]).float()
    return target.float().repeat(len(logits) // len(target), 1)


def _rows_reference(logits: torch.Tensor, target: torch.Tensor) -> LossRows:
    wide = logits.float()
    norm = wide.logsumexp(-1)
    return LossRows(norm - (_dense(logits, target) * wide).sum(-1), norm, wide.argmax(-1))


def _gradient_reference(
    logits: torch.Tensor, target: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor
) -> None:
    shares = (logits.float() - norm[:, None]).exp()
    logits.copy_((shares - _dense(logits, target)) * weights[:, None])


@jit_varying("num_targets")
def _loss_rows_kernel(
    p_logits: tl.tensor,
    p_target: tl.tensor,
    p_loss: tl.tensor,
    p_norm: tl.tensor,
    p_best: tl.tensor,
    num_targets: tl.tensor,
    width: tl.tensor,
    IS_DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_row * width
    p_wanted = p_target + (i_row % num_targets) * width
    top = -float("inf")
    total = 0.0
    wanted = 0.0
    best = 0
    for start in range(0, width, BLOCK):
        i_column = start + tl.arange(0, BLOCK)
        m_column = i_column < width
        x = tl.load(p_row + i_column, mask=m_column, other=-float("inf")).to(tl.float32)
        if IS_DENSE:
            share = tl.load(p_wanted + i_column, mask=m_column, other=0.0).to(tl.float32)
            wanted += tl.sum(share * tl.where(m_column, x, 0.0), 0)
        block_top = tl.max(x, 0)
        best = tl.where(block_top > top, start + tl.argmax(x, 0), best)
        higher = tl.maximum(top, block_top)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    norm = top + tl.log(total)
    if not IS_DENSE:
        wanted = tl.load(p_row + tl.load(p_target + i_row)).to(tl.float32)
    tl.store(p_loss + i_row, norm - wanted)
    tl.store(p_norm + i_row, norm)
    tl.store(p_best + i_row, best)


@jit_varying("num_targets")
def _loss_gradient_kernel(
    p_logits: tl.tensor,
    p_target: tl.tensor,
    p_norm: tl.tensor,
    p_weight: tl.tensor,
    num_targets: tl.tensor,
    width: tl.tensor,
    IS_DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < width
    p_row = p_logits + i_row * width + i_column
    norm = tl.load(p_norm + i_row)
    weight = tl.load(p_weight + i_row)
    x = tl.load(p_row, mask=m_column, other=0.0).to(tl.float32)
    if IS_DENSE:
        p_wanted = p_target + (i_row % num_targets) * width + i_column
        share = tl.load(p_wanted, mask=m_column, other=0.0).to(tl.float32)
    else:
        share = tl.where(i_column == tl.load(p_target + i_row), 1.0, 0.0)
    tl.store(p_row, ((tl.exp(x - norm) - share) * weight).to(p_logits.dtype.element_ty), mask=m_column)


def _rows_triton(logits: torch.Tensor, target: torch.Tensor) -> LossRows:
    rows, width = logits.shape
    loss, norm = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _loss_rows_kernel[(rows,)](
            logits, target, loss, norm, best, target.shape[0], width, IS_DENSE=target.dim() == 2,
            BLOCK=min(next_power_of_2(width), MAX_BLOCK), num_warps=8,
        )  # fmt: skip
    return LossRows(loss, norm, best)


def _gradient_triton(
    logits: torch.Tensor, target: torch.Tensor, norm: torch.Tensor, weights: torch.Tensor
) -> None:
    rows, width = logits.shape
    if rows:
        block = min(next_power_of_2(width), MAX_BLOCK)
        _loss_gradient_kernel[(rows, cdiv(width, block))](
            logits, target, norm, weights.contiguous(), target.shape[0], width,
            IS_DENSE=target.dim() == 2, BLOCK=block, num_warps=8,
        )  # fmt: skip
