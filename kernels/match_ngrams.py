"""Drafts by lookup: the tokens that followed the newest earlier occurrence of a request's last tokens.

A request's tokens lie in a ring: column p modulo W holds the token at position p, so the last W tokens are
known. Of all earlier positions, the one is taken whose tokens agree with the end of the text over the most
tokens, up to a maximum; of equally long agreements the newest. Drafts run from there to the end of the text.
Behind the end they repeat themselves, as a periodic text does. Legend: C rows of state, B requests, W tokens
of a ring, S drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import jit_varying, next_power_of_2, tl

MAX_BLOCK = 2048


class NgramSizes(NamedTuple):
    """Agreements of `shortest` to `longest` tokens count; `num_drafts` S are proposed."""

    shortest: int
    longest: int
    num_drafts: int


class NgramDrafts(NamedTuple):
    """`tokens` int64 `[B, S]`. `found` int64 `[B]`: S, or 0 for a request without an agreement, whose tokens
    then all equal its newest one."""

    tokens: torch.Tensor
    found: torch.Tensor


def match_ngrams_reference(
    rings: torch.Tensor, rows: torch.Tensor, lasts: torch.Tensor, sizes: NgramSizes
) -> NgramDrafts:
    """The definition and the CPU path; arguments as in `match_ngrams`. It never waits for the device."""
    width = rings.shape[1]
    known = rings.index_select(0, rows)
    columns = torch.arange(width, device=rings.device)
    positions = lasts[:, None] - torch.remainder(lasts[:, None] - columns, width)
    oldest = (lasts[:, None] + 1 - width).clamp(min=0)
    is_same = (positions >= oldest) & (positions < lasts[:, None])
    lengths = torch.zeros_like(positions)
    for back in range(sizes.longest):
        end = known.gather(1, torch.remainder(lasts[:, None] - back, width))
        is_same = is_same & (known.roll(back, dims=1) == end) & (positions - back >= oldest)
        lengths = lengths + is_same
    is_long = lengths >= sizes.shortest
    best = torch.where(is_long, lengths * width + positions - oldest + 1, 0).amax(dim=1, keepdim=True)
    has_match = (best > 0) & (rows[:, None] != 0)
    at = torch.where(has_match, torch.remainder(best - 1, width) + oldest, lasts[:, None])
    period = (lasts[:, None] - at).clamp(min=1)
    ahead = torch.arange(sizes.num_drafts, device=rings.device)
    source = torch.where(has_match, at + 1 + torch.remainder(ahead, period), lasts[:, None])
    tokens = known.gather(1, torch.remainder(source, width)).long()
    return NgramDrafts(tokens, has_match.squeeze(1).long() * sizes.num_drafts)


@jit_varying("p_rows", "p_lasts")
def _match_ngrams_kernel(
    p_rings: tl.tensor,
    p_rows: tl.tensor,
    p_lasts: tl.tensor,
    p_tokens: tl.tensor,
    p_found: tl.tensor,
    WIDTH: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAFT_BLOCK: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    row = tl.load(p_rows + i_request)
    last = tl.load(p_lasts + i_request)
    p_ring = p_rings + row * WIDTH
    oldest = tl.maximum(last + 1 - WIDTH, 0)
    b_best = tl.zeros((BLOCK,), dtype=tl.int64)
    num_earlier = tl.where(row != 0, last - oldest, 0)
    for start in range(0, num_earlier, BLOCK):
        b_position = oldest + start + tl.arange(0, BLOCK)
        m_same = b_position < last
        b_length = tl.zeros((BLOCK,), dtype=tl.int64)
        for back in tl.static_range(LONGEST):
            end = tl.load(p_ring + (last - back + WIDTH) % WIDTH)
            m_same = m_same & (b_position - back >= oldest)
            b_token = tl.load(p_ring + (b_position - back) % WIDTH, mask=m_same, other=-1)
            m_same = m_same & (b_token == end)
            b_length += m_same.to(tl.int64)
        b_rank = b_length * WIDTH + b_position - oldest + 1
        b_best = tl.maximum(b_best, tl.where(b_length >= SHORTEST, b_rank, 0))
    best = tl.max(b_best, axis=0)
    has_match = best > 0
    at = tl.where(has_match, (best - 1) % WIDTH + oldest, last)
    period = tl.maximum(last - at, 1)
    i_draft = tl.arange(0, DRAFT_BLOCK)
    m_draft = i_draft < NUM_DRAFTS
    b_source = tl.where(has_match, at + 1 + i_draft % period, last)
    b_token = tl.load(p_ring + b_source % WIDTH, mask=m_draft, other=0).to(tl.int64)
    tl.store(p_tokens + i_request * NUM_DRAFTS + i_draft, b_token, mask=m_draft)
    tl.store(p_found + i_request, tl.where(has_match, NUM_DRAFTS, 0).to(tl.int64))


def match_ngrams_triton(
    rings: torch.Tensor, rows: torch.Tensor, lasts: torch.Tensor, sizes: NgramSizes
) -> NgramDrafts:
    """Launch with the arguments of `match_ngrams`. Raises ValueError if shapes or dtypes do not fit."""
    _check(rings, rows, lasts, sizes)
    count, width = rows.shape[0], rings.shape[1]
    tokens = torch.empty((count, sizes.num_drafts), dtype=torch.int64, device=rings.device)
    found = torch.empty(count, dtype=torch.int64, device=rings.device)
    if count:
        _match_ngrams_kernel[(count,)](
            rings,
            rows.contiguous(),
            lasts.contiguous(),
            tokens,
            found,
            WIDTH=width,
            SHORTEST=sizes.shortest,
            LONGEST=sizes.longest,
            NUM_DRAFTS=sizes.num_drafts,
            BLOCK=min(next_power_of_2(width), MAX_BLOCK),
            DRAFT_BLOCK=next_power_of_2(sizes.num_drafts),
            num_warps=8,
        )
    return NgramDrafts(tokens, found)


def match_ngrams(
    rings: torch.Tensor, rows: torch.Tensor, lasts: torch.Tensor, sizes: NgramSizes
) -> NgramDrafts:
    """Drafts of B requests from their own tokens.

    `rings` int32 `[C, W]`: the last W tokens of each request, by position modulo W. `rows` int64 `[B]`: rows
    of `rings`; row 0 has no tokens and never matches. `lasts` int64 `[B]`: position of each request's newest
    token. Raises ValueError if shapes or dtypes do not fit.
    """
    if rings.is_cuda:
        return match_ngrams_triton(rings, rows, lasts, sizes)
    _check(rings, rows, lasts, sizes)
    return match_ngrams_reference(rings, rows, lasts, sizes)


def _check(rings: torch.Tensor, rows: torch.Tensor, lasts: torch.Tensor, sizes: NgramSizes) -> None:
    is_shaped = rings.dim() == 2 and rings.is_contiguous() and rows.dim() == 1 and rows.shape == lasts.shape
    dtypes = (rings.dtype, rows.dtype, lasts.dtype)
    if not is_shaped or dtypes != (torch.int32, torch.int64, torch.int64):
        raise ValueError(
            f"match_ngrams: rings {tuple(rings.shape)}, rows {tuple(rows.shape)} and lasts "
            f"{tuple(lasts.shape)} of {dtypes} must be dense int32 [C, W], int64 [B] and int64 [B]"
        )
    if not 1 <= sizes.shortest <= sizes.longest < rings.shape[1] or sizes.num_drafts < 1:
        raise ValueError(f"match_ngrams: {sizes} does not fit rings of {rings.shape[1]} tokens")
