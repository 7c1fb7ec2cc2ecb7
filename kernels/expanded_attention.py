"""Attention over latents that were expanded to the keys and values of each head: for many new rows.

With many new rows, one product that makes keys and values of every context row costs less than absorbed
attention, whose scores and sums are as wide as the latents; see `is_expansion_cheaper`. Prior pages are
expanded like new ones.

Legend: T new rows, N heads, R rank of the latents, P width of the rotated key, F and V widths of a head's key
and value that are made of the latent, S context rows of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .paged_tile import LOG2_E, MIN_DOT
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl


class HeadSizes(NamedTuple):
    """F, P, V and R."""

    key: int
    rope: int
    value: int
    rank: int


def is_expansion_cheaper(q_lens: Sequence[int], kv_lens: Sequence[int], sizes: HeadSizes) -> bool:
    """Whether expanded attention of these rows needs fewer multiplications than absorbed attention.

    Per head: a score and its part of a sum take F+P+V of them expanded and 2R+P absorbed, and to expand a
    context row takes R(F+V). DeepSeek-V3 breaks even at 171 new rows of a request.
    """
    pairs = sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in zip(q_lens, kv_lens, strict=True))
    expanded = pairs * (sizes.key + sizes.rope + sizes.value)
    expanded += sum(kv_lens) * sizes.rank * (sizes.key + sizes.value)
    return expanded < pairs * (2 * sizes.rank + sizes.rope)


def expanded_attention_reference(
    q: torch.Tensor,
    expanded: torch.Tensor,
    turned: torch.Tensor,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """The definition and the CPU path: requests one by one."""
    starts, firsts, lens = q_starts.tolist(), kv_starts.tolist(), kv_lens.tolist()
    key_size = q.shape[-1] - turned.shape[-1]
    for request, length in enumerate(lens):
        own, rows = (
            slice(starts[request], starts[request + 1]),
            slice(firsts[request], firsts[request] + length),
        )
        num_rows = own.stop - own.start
        made = expanded[rows]
        rotated = turned[rows][:, None].expand(-1, made.shape[1], -1)
        keys = torch.cat((made[..., :key_size], rotated), -1)
        columns = torch.arange(length, device=q.device)
        visible = columns <= torch.arange(length - num_rows, length, device=q.device)[:, None]
        found = F.scaled_dot_product_attention(
            q[own].transpose(0, 1),
            keys.transpose(0, 1),
            made[..., key_size:].transpose(0, 1),
            visible,
            scale=scale,
        )
        out[own] = found.transpose(0, 1)


@jit_varying("p_starts", "p_kv_starts", "p_kv_lens")
def _expanded_kernel(
    p_q: tl.tensor,
    p_expanded: tl.tensor,
    p_turned: tl.tensor,
    p_starts: tl.tensor,
    p_kv_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_out: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    expanded_stride: tl.tensor,
    turned_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    scale: tl.tensor,
    KEY: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
) -> None:
    # program (tile of rows, head, request)
    i_head = tl.program_id(1)
    first_row = tl.load(p_starts + tl.program_id(2)).to(tl.int64)
    num_rows = (tl.load(p_starts + tl.program_id(2) + 1) - first_row).to(tl.int32)
    kv_len = tl.load(p_kv_lens + tl.program_id(2)).to(tl.int32)
    first_column = tl.load(p_kv_starts + tl.program_id(2)).to(tl.int64)
    context = kv_len - num_rows
    start = tl.program_id(0) * BLOCK_ROWS
    if start >= num_rows:
        return
    i_query = start + tl.arange(0, BLOCK_ROWS)
    i_key = tl.arange(0, BLOCK_KEY)
    i_rope = tl.arange(0, BLOCK_ROPE)
    i_value = tl.arange(0, BLOCK_VALUE)
    m_row = i_query < num_rows
    p_row = p_q + (first_row + i_query)[:, None] * q_row_stride + i_head * q_head_stride
    b_q = tl.load(p_row + i_key[None, :], mask=m_row[:, None] & (i_key < KEY)[None, :], other=0.0)
    m_rope = i_rope < ROPE
    b_turned = tl.load(p_row + KEY + i_rope[None, :], mask=m_row[:, None] & m_rope[None, :], other=0.0)
    b_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), dtype=tl.float32)
    end = tl.minimum(context + start + BLOCK_ROWS, kv_len)
    p_head = p_expanded + i_head * (KEY + VALUE)
    for first in range(0, end, BLOCK_COLUMNS):
        i_column = first + tl.arange(0, BLOCK_COLUMNS)
        m_column = i_column < end
        o_made = (first_column + i_column) * expanded_stride
        m_key = (i_key < KEY)[:, None] & m_column[None, :]
        b_key = tl.load(p_head + o_made[None, :] + i_key[:, None], mask=m_key, other=0.0)
        o_turned = (first_column + i_column) * turned_stride
        m_turned = m_rope[:, None] & m_column[None, :]
        b_rope = tl.load(p_turned + o_turned[None, :] + i_rope[:, None], mask=m_turned, other=0.0)
        m_value = m_column[:, None] & (i_value < VALUE)[None, :]
        b_value = tl.load(p_head + KEY + o_made[:, None] + i_value[None, :], mask=m_value, other=0.0)
        # ieee matters for float32 only, which would be truncated to tf32
        b_scores = tl.dot(b_q, b_key, input_precision="ieee")
        b_scores = tl.dot(b_turned, b_rope, b_scores, input_precision="ieee") * scale
        m_seen = (i_column - context)[None, :] <= i_query[:, None]
        b_scores = tl.where(m_seen & m_column[None, :], b_scores, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1))  # column 0 is seen by every row
        b_weights = tl.exp2(b_scores - b_new_max[:, None])
        b_rescale = tl.exp2(b_max - b_new_max)
        b_sum = b_sum * b_rescale + tl.sum(b_weights, axis=1)
        b_rounded = b_weights.to(b_value.dtype)
        b_out = tl.dot(b_rounded, b_value, b_out * b_rescale[:, None], input_precision="ieee")
        b_max = b_new_max
    p_result = p_out + (first_row + i_query)[:, None] * out_row_stride + i_head * out_head_stride
    b_out = (b_out / b_sum[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_result + i_value[None, :], b_out, mask=m_row[:, None] & (i_value < VALUE)[None, :])


def expanded_attention_triton(
    q: torch.Tensor,
    expanded: torch.Tensor,
    turned: torch.Tensor,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Launch; arguments as in `expanded_attention`."""
    _check(q, expanded, turned, out)
    rope, value = turned.shape[1], out.shape[2]
    key = q.shape[2] - rope
    is_float32 = q.dtype == torch.float32
    rows = min(max(next_power_of_2(longest), MIN_DOT), 16 if is_float32 else 128)
    _expanded_kernel[(cdiv(longest, rows), q.shape[1], kv_lens.shape[0])](
        q,
        expanded,
        turned,
        q_starts,
        kv_starts,
        kv_lens,
        out,
        q.stride(0),
        q.stride(1),
        expanded.stride(0),
        turned.stride(0),
        out.stride(0),
        out.stride(1),
        scale * LOG2_E,
        KEY=key,
        ROPE=rope,
        VALUE=value,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=16 if is_float32 else 64,
        BLOCK_KEY=max(next_power_of_2(key), MIN_DOT),
        BLOCK_ROPE=max(next_power_of_2(rope), MIN_DOT),
        BLOCK_VALUE=max(next_power_of_2(value), MIN_DOT),
        num_warps=8 if rows == 128 else 4,
        num_stages=1 if is_float32 else 3,
    )


def _check(q: torch.Tensor, expanded: torch.Tensor, turned: torch.Tensor, out: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q, expanded, turned, out)]
    fits = q.dim() == expanded.dim() == out.dim() == 3 and turned.dim() == 2 and q.shape[:2] == out.shape[:2]
    if not fits or expanded.shape[1:] != (q.shape[1], q.shape[2] - turned.shape[1] + out.shape[2]):
        raise ValueError(
            f"expanded_attention: q, expanded, turned, out of shapes {shapes}; expected [T, N, F+P], "
            "[S, N, F+V], [S, P], [T, N, V]"
        )
    if not expanded.is_contiguous() or {x.stride(-1) for x in (q, turned, out)} != {1}:
        raise ValueError("expanded_attention: expanded keys and values must be contiguous, rows dense")


def expanded_attention(
    q: torch.Tensor,
    expanded: torch.Tensor,
    turned: torch.Tensor,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of rows `q` `[T, N, F+P]` into `out` `[T, N, V]`.

    `expanded` `[S, N, F+V]` holds keys and values, `turned` `[S, P]` the rotated keys. Rows `q_starts[i]` to
    `q_starts[i+1]`, at most `longest`, are the last of request i, whose `kv_lens[i]` context rows begin at
    row `kv_starts[i]`. Integers are int64 `[B+1]`, `[B+1]` and `[B]`. Other rows of `out` are not written.
    Raises ValueError if shapes do not fit.
    """
    if q.is_cuda:
        expanded_attention_triton(q, expanded, turned, q_starts, kv_starts, kv_lens, longest, scale, out)
        return
    _check(q, expanded, turned, out)
    expanded_attention_reference(q, expanded, turned, q_starts, kv_starts, kv_lens, scale, out)
