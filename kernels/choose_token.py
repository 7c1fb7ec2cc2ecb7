"""Chooses one token per row, greedily or by Gumbel-max sampling: sampling without top-k and top-p.

The vocabulary is cut into splits that run in parallel, in three passes: the highest logit of each split, the
best score of each split of a sampled row, and the best of all splits. The noise is that of `noise`, bit for
bit.

Legend: R rows, V vocabulary, S splits.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .noise import GAMMA, MIX_1, MIX_2, gumbel
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

# Logits per program, and noise values computed at once per row.
SPLIT = 2048


def choose_token_reference(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition; arguments as in `choose_token`. It never waits for the device."""
    each = logits.shape[0] // max(seeds.shape[0], 1)
    min_p = torch.zeros_like(temperature) if min_p is None else min_p
    token_ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
    if each > 1:
        per_request = (seeds, temperature, min_p, is_drawn)
        seeds, temperature, min_p, is_drawn = (
            values.repeat_interleave(each, output_size=logits.shape[0]) for values in per_request
        )
    highest, likeliest = logits.max(dim=1)  # a NaN in the row becomes the highest
    scaled = (logits.double() - highest.double()[:, None]) / temperature[:, None]
    scores = gumbel(seeds, positions, token_ids) + scaled
    # log 0 is -inf: a row without min_p loses nothing.
    scores = scores.masked_fill(scaled < min_p.log()[:, None], float("-inf"))
    is_bad = ~torch.isfinite(highest)
    chosen = torch.where(is_drawn, scores.argmax(dim=1), likeliest).masked_fill(is_bad, 0)
    return token_ids[chosen], is_bad


@jit
def _mixed(b_bits: tl.tensor, MIX_1: tl.constexpr, MIX_2: tl.constexpr) -> tl.tensor:
    """The finaliser of splitmix64. `>>` on signed integers copies the sign bit; the masks undo that."""
    b_bits = b_bits ^ ((b_bits >> 30) & ((1 << 34) - 1))
    b_bits = b_bits * MIX_1
    b_bits = b_bits ^ ((b_bits >> 27) & ((1 << 37) - 1))
    b_bits = b_bits * MIX_2
    return b_bits ^ ((b_bits >> 31) & ((1 << 33) - 1))


@jit
def gumbel_noise(
    seed: tl.tensor,
    position: tl.tensor,
    b_ids: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
) -> tl.tensor:
    """`noise.gumbel` of the tokens `b_ids` int64."""
    state = _mixed(_mixed(seed + GAMMA, MIX_1, MIX_2) + position * GAMMA, MIX_1, MIX_2)
    b_bits = (_mixed(state + (b_ids + 1) * GAMMA, MIX_1, MIX_2) >> 12) & ((1 << 52) - 1)
    b_uniform = (b_bits * 2 + 1).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    return -tl.log(-tl.log(b_uniform))


@jit_varying("vocab_size", "num_splits", "row_stride")
def _highest_kernel(
    p_logits: tl.tensor,
    p_highest: tl.tensor,
    p_likeliest: tl.tensor,
    vocab_size: tl.tensor,
    num_splits: tl.tensor,
    row_stride: tl.tensor,
    SPLIT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, split); NaN counts as +inf: neither is finite
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_token = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    m_token = i_token < vocab_size
    b_logits = tl.load(p_logits + i_row * row_stride + i_token, mask=m_token, other=float("-inf"))
    b_logits = tl.where(b_logits == b_logits, b_logits, float("inf"))
    highest = tl.max(b_logits, axis=0)
    release_next(CHAINED)
    o_out = i_row * num_splits + tl.program_id(1)
    tl.store(p_highest + o_out, highest)
    tl.store(
        p_likeliest + o_out, tl.min(tl.where((b_logits == highest) & m_token, i_token, vocab_size), axis=0)
    )


@jit_varying(
    "vocab_size", "num_splits", "row_stride", "rows_each",
    "seed_stride", "position_stride", "temperature_stride", "min_p_stride",
    "p_seeds", "p_positions", "p_temperature", "p_min_p", "p_is_drawn",
)  # fmt: skip
def _scores_kernel(
    p_logits: tl.tensor,
    p_highest: tl.tensor,
    p_likeliest: tl.tensor,
    p_score: tl.tensor,
    p_seeds: tl.tensor,
    p_positions: tl.tensor,
    p_temperature: tl.tensor,
    p_min_p: tl.tensor,
    p_is_drawn: tl.tensor,
    p_token_ids: tl.tensor,
    vocab_size: tl.tensor,
    num_splits: tl.tensor,
    row_stride: tl.tensor,
    rows_each: tl.tensor,
    seed_stride: tl.tensor,
    position_stride: tl.tensor,
    temperature_stride: tl.tensor,
    min_p_stride: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, split); overwrites the split's likeliest token with its best score if the row is drawn
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_knob = i_row // rows_each
    if tl.load(p_is_drawn + i_knob) == 0:
        return
    i_split = tl.arange(0, BLOCK_SPLITS)
    m_split = i_split < num_splits
    b_highest = tl.load(p_highest + i_row * num_splits + i_split, mask=m_split, other=float("-inf"))
    highest = tl.max(b_highest, axis=0)
    is_bad = (highest == float("inf")) | (highest == float("-inf"))  # the choice there is meaningless
    highest = tl.where(is_bad, 0.0, highest).to(tl.float64)
    i_token = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    m_token = i_token < vocab_size
    b_logits = tl.load(p_logits + i_row * row_stride + i_token, mask=m_token, other=0.0).to(tl.float64)
    b_scaled = (b_logits - highest) / tl.load(p_temperature + i_knob * temperature_stride)
    position = tl.load(p_positions + i_row * position_stride)
    seed = tl.load(p_seeds + i_knob * seed_stride)
    b_ids = tl.load(p_token_ids + i_token, mask=m_token, other=0) if HAS_IDS else i_token.to(tl.int64)
    b_score = gumbel_noise(seed, position, b_ids, GAMMA, MIX_1, MIX_2) + b_scaled
    if HAS_MIN_P:
        min_p = tl.load(p_min_p + i_knob * min_p_stride)
        lowest = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))
        m_token = m_token & (b_scaled >= lowest)
    b_score = tl.where(m_token, b_score, float("-inf"))
    best = tl.max(b_score, axis=0)
    release_next(CHAINED)
    o_out = i_row * num_splits + tl.program_id(1)
    tl.store(p_score + o_out, best)
    tl.store(p_likeliest + o_out, tl.min(tl.where((b_score == best) & m_token, i_token, vocab_size), axis=0))


@jit_varying("num_splits", "rows_each", "p_is_drawn")
def _pick_kernel(
    p_highest: tl.tensor,
    p_likeliest: tl.tensor,
    p_score: tl.tensor,
    p_is_drawn: tl.tensor,
    p_token_ids: tl.tensor,
    p_tokens: tl.tensor,
    p_is_bad: tl.tensor,
    num_splits: tl.tensor,
    rows_each: tl.tensor,
    HAS_IDS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_split = tl.arange(0, BLOCK_SPLITS)
    m_split = i_split < num_splits
    o_split = i_row * num_splits + i_split
    b_highest = tl.load(p_highest + o_split, mask=m_split, other=float("-inf"))
    highest = tl.max(b_highest, axis=0)
    is_bad = (highest == float("inf")) | (highest == float("-inf"))
    b_score = b_highest.to(tl.float64)
    if tl.load(p_is_drawn + i_row // rows_each) != 0:
        b_score = tl.load(p_score + o_split, mask=m_split, other=float("-inf"))
    best = tl.max(b_score, axis=0)
    split = tl.min(tl.where((b_score == best) & m_split, i_split, num_splits - 1), axis=0)
    release_next(CHAINED)
    token = tl.load(p_likeliest + i_row * num_splits + split, mask=~is_bad, other=0).to(tl.int64)
    if HAS_IDS:
        token = tl.load(p_token_ids + token)
    tl.store(p_tokens + i_row, token)
    tl.store(p_is_bad + i_row, is_bad.to(tl.int8))


def choose_token_triton(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on `logits` float32 `[R, V]` (rows dense); the other arguments as in `choose_token`.

    Raises ValueError if shapes or dtypes do not fit.
    """
    _check(logits, positions, (seeds, temperature, min_p, is_drawn), token_ids)
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_bad = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return tokens, is_bad
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_splits = cdiv(vocab_size, SPLIT)
    highest, likeliest, score = (
        torch.empty((num_rows, num_splits), dtype=dtype, device=logits.device)
        for dtype in (torch.float32, torch.int32, torch.float64)
    )
    drawn, grid, blocks = (
        is_drawn.contiguous().view(torch.uint8),
        (num_rows, num_splits),
        next_power_of_2(num_splits),
    )
    found = (highest, likeliest)
    sizes, each = (vocab_size, num_splits, logits.stride(0)), (num_splits, num_rows // seeds.shape[0])
    _highest_kernel[grid](logits, *found, *sizes, SPLIT=SPLIT, **chained(logits.device), num_warps=4)
    _scores_kernel[grid](
        logits,
        *found,
        score,
        seeds,
        positions,
        temperature,
        temperature if min_p is None else min_p,
        drawn,
        likeliest if token_ids is None else token_ids,
        *sizes,
        num_rows // seeds.shape[0],
        seeds.stride(0),
        positions.stride(0),
        temperature.stride(0),
        0 if min_p is None else min_p.stride(0),
        GAMMA=GAMMA,
        MIX_1=MIX_1,
        MIX_2=MIX_2,
        HAS_IDS=token_ids is not None,
        HAS_MIN_P=min_p is not None,
        SPLIT=SPLIT,
        BLOCK_SPLITS=blocks,
        **chained(logits.device),
        num_warps=8,
    )
    _pick_kernel[(num_rows,)](
        *found,
        score,
        drawn,
        tokens if token_ids is None else token_ids,
        tokens,
        is_bad.view(torch.uint8),
        *each,
        HAS_IDS=token_ids is not None,
        BLOCK_SPLITS=blocks,
        **chained(logits.device),
        num_warps=1,
    )
    return tokens, is_bad


def _check(
    logits: torch.Tensor,
    positions: torch.Tensor,
    per_request: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    token_ids: torch.Tensor | None,
) -> None:
    is_shaped = logits.dim() == 2 and logits.dtype == torch.float32 and logits.shape[1] > 0
    is_placed = positions.shape == logits.shape[:1] and positions.dtype == torch.int64
    is_listed = token_ids is None or (
        token_ids.dtype == torch.int64 and token_ids.shape == logits.shape[1:] and token_ids.is_contiguous()
    )
    count, dtypes = per_request[0].shape[0], (torch.int64, torch.float64, torch.float64, torch.bool)
    wanted = [(x, dtype) for x, dtype in zip(per_request, dtypes, strict=True) if x is not None]
    fits = all(x.shape == (count,) and x.dtype == dtype for x, dtype in wanted)
    is_even = logits.shape[0] % count == 0 if count else logits.shape[0] == 0
    if not (is_shaped and is_placed and is_listed and fits and is_even):
        raise ValueError(
            f"choose_token: logits {tuple(logits.shape)} {logits.dtype}, positions {tuple(positions.shape)}, "
            f"token_ids {None if token_ids is None else tuple(token_ids.shape)} "
            f"and seeds, temperature, min_p, is_drawn {[(tuple(x.shape), x.dtype) for x, _ in wanted]}; "
            "expected float32 [R, V], int64 [R], int64 [V], and int64, "
            "float64, float64, bool, each [B] with R a multiple of B"
        )


def choose_token(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor | None,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen token of each row, int64 `[R]`, and whether its logits are not finite, bool `[R]`.

    Logits are not finite if they hold NaN or +inf, or nothing above -inf; the first entry is then chosen.

    `logits`: float32 `[R, V]`. `positions`: int64 `[R]`. Per request, each `[B]` for R/B consecutive rows:
    `seeds` int64, `temperature` float64 above 0, `min_p` float64 (None: off), `is_drawn` bool. Rows that are
    not drawn take the highest logit, the first among equals. `token_ids` int64 `[V]`: the token of each
    entry, whose noise it uses; None: its own index. Raises ValueError if shapes or dtypes do not fit.
    """
    if logits.is_cuda:
        return choose_token_triton(logits, seeds, positions, temperature, min_p, is_drawn, token_ids)
    _check(logits, positions, (seeds, temperature, min_p, is_drawn), token_ids)
    return choose_token_reference(logits, seeds, positions, temperature, min_p, is_drawn, token_ids)
