"""Log probabilities of a chosen token and of the likeliest ones, for the rows that ask for them.

Rows that do not ask cost nothing, so a graph that can report them may serve requests that do not want them.
The likeliest tokens are looked for among few candidates, see `choose_ranked`.

Legend: R rows, V vocabulary, K tokens that are reported beside the chosen one.
"""

from __future__ import annotations

import math

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .choose_ranked import (
    LAST_ID,
    LAST_KEY,
    NO_KEY,
    find_candidates,
    keys_of,
    logits_of,
    ranked_ids,
    row_stride,
)
from .triton_jit import jit_varying, next_power_of_2, tl

WIDTH = 32  # candidates, if no row asks for more
BLOCK = 4096  # logits that a program sums at once


def top_logprobs_reference(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition; arguments as in `top_logprobs`. It never waits for the device."""
    raw = torch.log_softmax(logits.float(), dim=1)
    ids = ranked_ids(logits, num_top)
    values = torch.cat((raw.gather(1, chosen[:, None]), raw.gather(1, ids)), dim=1)
    is_idle = (wanted < 0)[:, None]
    return values.masked_fill(is_idle, math.nan), ids.masked_fill(is_idle, -1)


@jit_varying("num_top", "p_chosen", "p_wanted", "chosen_stride", "wanted_stride")
def _logprobs_kernel(
    p_logits: tl.tensor,
    p_chosen: tl.tensor,
    p_wanted: tl.tensor,
    p_highest: tl.tensor,
    p_ids: tl.tensor,
    p_count: tl.tensor,
    p_values: tl.tensor,
    p_top_ids: tl.tensor,
    num_top: tl.tensor,
    chosen_stride: tl.tensor,
    wanted_stride: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    NO_KEY: tl.constexpr,
    LAST_KEY: tl.constexpr,
    LAST_ID: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row): the sum of all probabilities, then the best candidates one by one
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    o_values, o_ids = i_row * (num_top + 1), i_row * num_top
    if tl.load(p_wanted + i_row * wanted_stride) < 0:
        tl.store(p_values + o_values, float("nan"))
        for k in range(num_top):
            tl.store(p_values + o_values + 1 + k, float("nan"))
            tl.store(p_top_ids + o_ids + k, tl.full([], -1, tl.int64))
        return
    highest = tl.load(p_highest + i_row)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_first in range(0, vocab_size, BLOCK):
        i_token = i_first + tl.arange(0, BLOCK)
        b_logits = tl.load(
            p_logits + i_row * row_stride + i_token, mask=i_token < vocab_size, other=float("-inf")
        )
        b_sum += tl.exp(b_logits - highest)
    log_sum = highest + tl.log(tl.sum(b_sum, axis=0))
    chosen = tl.load(p_chosen + i_row * chosen_stride)
    tl.store(p_values + o_values, tl.load(p_logits + i_row * row_stride + chosen) - log_sum)
    i_place = tl.arange(0, CAPACITY)
    count = tl.load(p_count + i_row)
    m_place = i_place < count
    b_ids = tl.load(p_ids + i_row * CAPACITY + i_place, mask=m_place, other=0).to(tl.int64)
    b_logits = tl.load(p_logits + i_row * row_stride + b_ids, mask=m_place, other=0.0)
    b_keys = tl.where(m_place, keys_of(b_logits, b_ids, LAST_ID), NO_KEY)
    is_whole = (count <= CAPACITY) & (count >= num_top)
    last = tl.full([], LAST_KEY, tl.int64)
    for k in range(num_top):
        best = tl.max(tl.where(b_keys < last, b_keys, NO_KEY), axis=0)
        if not is_whole:  # many equal tokens, or few that are possible: all are looked at
            b_best = tl.full([BLOCK], NO_KEY, tl.int64)
            for i_first in range(0, vocab_size, BLOCK):
                i_token = i_first + tl.arange(0, BLOCK)
                m_token = i_token < vocab_size
                b_part = tl.load(p_logits + i_row * row_stride + i_token, mask=m_token, other=0.0)
                b_part_keys = keys_of(b_part, i_token.to(tl.int64), LAST_ID)
                b_best = tl.maximum(b_best, tl.where(m_token & (b_part_keys < last), b_part_keys, NO_KEY))
            best = tl.max(b_best, axis=0)
        tl.store(p_values + o_values + 1 + k, logits_of((best >> 32).to(tl.int32)) - log_sum)
        tl.store(p_top_ids + o_ids + k, LAST_ID - (best & LAST_ID))
        last = best
    release_next(CHAINED)


def top_logprobs_triton(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch; arguments as in `top_logprobs`. Raises ValueError if shapes or dtypes do not fit."""
    _check(logits, chosen, wanted)
    (num_rows, vocab_size), device = logits.shape, logits.device
    values = torch.empty((num_rows, 1 + num_top), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    if num_rows == 0:
        return values, ids
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    is_wanted, is_bad = wanted >= 0, torch.zeros(num_rows, dtype=torch.bool, device=device)
    top_k = torch.full((1,), max(num_top, 1), dtype=torch.int64, device=device).expand(num_rows)
    warm = torch.ones(1, dtype=torch.float64, device=device).expand(num_rows)
    width = max(WIDTH, next_power_of_2(num_top))
    found = find_candidates(logits, is_wanted, is_bad, top_k, warm, width)
    _logprobs_kernel[(num_rows,)](
        logits, chosen, wanted, found.highest, found.ids, found.num_found, values, ids,
        num_top, chosen.stride(0), wanted.stride(0), vocab_size, row_stride(logits),
        NO_KEY=NO_KEY, LAST_KEY=LAST_KEY, LAST_ID=LAST_ID, CAPACITY=found.ids.shape[1], BLOCK=BLOCK,
        **chained(device), num_warps=8,
    )  # fmt: skip
    return values, ids


def _check(logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor) -> None:
    rows = [(x.dtype, x.shape) for x in (chosen, wanted)]
    if logits.dtype != torch.float32 or rows != [(torch.int64, logits.shape[:1])] * 2:
        raise ValueError(
            f"top_logprobs: logits {tuple(logits.shape)} {logits.dtype}, chosen and wanted {rows}; expected "
            "float32 [R, V] and int64, each [R]"
        )


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities float32 `[R, 1+K]` and ids int64 `[R, K]`, likeliest first, of `logits` float32
    `[R, V]`.

    Column 0 is the token `chosen` int64 `[R]`; the others are the `num_top` likeliest tokens, K. Rows with a
    negative number in `wanted` int64 `[R]` hold NaN and -1. Raises ValueError if shapes or dtypes do not fit.
    """
    if logits.is_cuda:
        return top_logprobs_triton(logits, chosen, wanted, num_top)
    _check(logits, chosen, wanted)
    return top_logprobs_reference(logits, chosen, wanted, num_top)
