"""Chooses one token per row by Gumbel-max sampling among the tokens that top-k, top-p and min-p leave.

Nothing is sorted. A first pass takes the highest logit of each of many interleaved groups of tokens. As many
groups as a row needs candidates have one above the row's cut, so all tokens above the cut are candidates, and
there are few more than needed. Top-k and top-p each are a second cut: the highest one that leaves enough
tokens, or enough mass. Masses are compared as integers, because an integer sum does not depend on its order.
The noise is that of `noise`, bit for bit.

Legend: R rows, B requests with R/B consecutive rows each, V vocabulary, C candidates of a row, G groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .choose_token import gumbel_noise, least_scaled
from .noise import GAMMA, MIX_1, MIX_2, gumbel
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

# Probabilities relative to the likeliest token, in units of 2**-40: the sum over 2**20 tokens stays below
# 2**60.
MASS_ONE = float(1 << 40)
PLACES_EACH = 4  # places, and groups, for each candidate that is asked for
MIN_GROUPS = 1024  # for programs of several blocks of groups
BLOCK_GROUPS, MAX_TALL = 128, 16  # groups of a program, and tokens of each that it reads at once, at most
FEW = 256  # candidates of a row for which a program of few registers is enough
NO_LOGIT = -2139095041  # the ordered bits of -inf
NO_KEY, LAST_KEY, LAST_ID = -(1 << 63), (1 << 63) - 1, (1 << 32) - 1


class Ranking(NamedTuple):
    """How rows are drawn, each `[B]`: `seeds` and `top_k` (V: no limit) int64, `temperature` (above 0),
    `top_p` and `min_p` float64, and `is_ranked` bool: requests with top-k or top-p.
    """

    seeds: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    is_ranked: torch.Tensor


# --- the definition ---------------------------------------------------------------------------------------


def choose_ranked_reference(
    logits: torch.Tensor,
    positions: torch.Tensor,
    ranking: Ranking,
    tokens: torch.Tensor,
    is_bad: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition; arguments as in `choose_ranked`. It never waits for the device."""
    vocab_size, each = logits.shape[1], logits.shape[0] // max(ranking.seeds.shape[0], 1)
    if each > 1:
        ranking = Ranking(*(x.repeat_interleave(each, output_size=logits.shape[0]) for x in ranking))
    width, is_limited = min(width, vocab_size), ranking.top_k < vocab_size
    ids = ranked_ids(logits, width)
    values = logits.gather(1, ids)
    scaled = scaled_logits(values, values[:, 0], ranking.temperature)
    within = torch.arange(width, device=logits.device) < ranking.top_k[:, None]
    total = torch.where(
        is_limited,
        (masses(scaled) * within).sum(dim=1),
        masses(scaled_logits(logits, values[:, 0], ranking.temperature)).sum(dim=1),
    )
    kept, is_short = kept_candidates(scaled, ranking.top_k, total, ranking.top_p, ranking.min_p)
    scores = (gumbel(ranking.seeds, positions, ids) + scaled).masked_fill(~kept, -math.inf)
    chosen = ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    is_chosen = ranking.is_ranked & ~is_bad
    is_unseen = torch.where(is_limited, ranking.top_k > width, is_short) & is_chosen
    return torch.where(is_chosen, chosen, tokens), is_unseen


def kept_candidates(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    total: torch.Tensor | None,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept candidates, bool `[R, C]`, and the rows that would keep more than C candidates, bool `[R]`.

    `scaled` float64 `[R, C]` falls. `total` int64 `[R]` is the mass left by top-k, by default that of the
    candidates. The others are `[R]`.
    """
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    kept = rank < top_k[:, None]
    mass = masses(scaled) * kept
    upto = mass.cumsum(dim=1)
    wanted = top_p * (upto[:, -1] if total is None else total).double()
    is_nucleus = (upto - mass).double() < wanted[:, None]
    kept = kept & (is_nucleus | (top_p[:, None] >= 1) | (rank == 0))
    return kept & (scaled >= min_p.log()[:, None]), upto[:, -1].double() < wanted


def scaled_logits(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(l - highest) / T, float64, at most 0. The subtraction comes first, so the smallest T can only
    underflow.
    """
    return (logits.double() - highest.double()[:, None]) / temperature[:, None]


def masses(scaled: torch.Tensor) -> torch.Tensor:
    """Probabilities relative to the likeliest token, int64 in units of 2**-40."""
    return (scaled.exp() * MASS_ONE).to(torch.int64)


def ranked_ids(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Ids `[R, width]` of the highest logits, descending; ties by ascending id.

    A float top-k leaves the order of ties undefined. This top-k therefore runs over int64 keys: the float's
    bits as an ordered int32 in the upper half, the reversed id in the lower half.
    """
    # Adding 0.0 turns -0.0 into 0.0, which compares equal.
    bits = (logits.float() + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((ordered << 32) + (LAST_ID - ids)).topk(width, dim=1).indices


# --- the kernels ------------------------------------------------------------------------------------------


@jit
def _ordered(b_logits: tl.tensor) -> tl.tensor:
    """The bits of logits as int32 in the order of the logits; both zeros are equal."""
    b_bits = tl.where(b_logits == 0.0, 0.0, b_logits).to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@jit
def logits_of(b_ordered: tl.tensor) -> tl.tensor:
    """The logits of which `_ordered` has the bits."""
    b_bits = tl.where(b_ordered < 0, b_ordered ^ 0x7FFFFFFF, b_ordered)
    return b_bits.to(tl.float32, bitcast=True)


@jit
def _mean(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Rounded up, without an overflow."""
    return (low | high) - ((low ^ high) >> 1)


@jit
def keys_of(b_logits: tl.tensor, b_ids: tl.tensor, LAST_ID: tl.constexpr) -> tl.tensor:
    """int64 numbers in the order of the logits, of equal ones in the falling order of `b_ids` int64."""
    return (_ordered(b_logits).to(tl.int64) << 32) + (LAST_ID - b_ids)


@jit
def _is_idle(
    p_is_ranked: tl.tensor, p_is_bad: tl.tensor, i_row: tl.tensor, rows_each: tl.tensor
) -> tl.tensor:
    """Whether the row is not ranked here."""
    return (tl.load(p_is_ranked + i_row // rows_each) == 0) | (tl.load(p_is_bad + i_row) != 0)


@jit_varying("rows_each")
def _group_highest_kernel(
    p_logits: tl.tensor,
    p_is_ranked: tl.tensor,
    p_is_bad: tl.tensor,
    p_groups: tl.tensor,
    p_count: tl.tensor,
    p_total: tl.tensor,
    rows_each: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    GROUPS: tl.constexpr,
    NO_LOGIT: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, block of groups); group g holds the tokens g, g + GROUPS, ...: neighbours in the
    # vocabulary, which are often likely together, are in groups of their own
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    if _is_idle(p_is_ranked, p_is_bad, i_row, rows_each):
        return
    i_group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_highest = tl.full([BLOCK], NO_LOGIT, tl.int32)
    for i_first in range(0, vocab_size, TALL * GROUPS):
        i_token = i_first + tl.arange(0, TALL)[:, None] * GROUPS + i_group[None, :]
        b_logits = tl.load(
            p_logits + i_row * row_stride + i_token, mask=i_token < vocab_size, other=float("-inf")
        )
        b_highest = tl.maximum(b_highest, tl.max(_ordered(b_logits), axis=0))
    release_next(CHAINED)
    tl.store(p_groups + i_row * GROUPS + i_group, b_highest)
    if tl.program_id(1) == 0:
        tl.store(p_count + i_row, 0)
        tl.store(p_total + i_row, tl.zeros([], tl.int64))


@jit_varying("rows_each", "top_k_stride", "p_top_k")
def _cut_kernel(
    p_groups: tl.tensor,
    p_is_ranked: tl.tensor,
    p_is_bad: tl.tensor,
    p_top_k: tl.tensor,
    p_cut: tl.tensor,
    p_highest: tl.tensor,
    rows_each: tl.tensor,
    top_k_stride: tl.tensor,
    width: tl.tensor,
    GROUPS: tl.constexpr,
    NO_LOGIT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row): the highest cut that as many groups reach as the row needs candidates
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    if _is_idle(p_is_ranked, p_is_bad, i_row, rows_each):
        return
    b_groups = tl.load(p_groups + i_row * GROUPS + tl.arange(0, GROUPS))
    needed = tl.minimum(tl.load(p_top_k + i_row // rows_each * top_k_stride), width).to(tl.int32)
    highest = tl.max(b_groups, axis=0)
    low, high = tl.maximum(tl.min(b_groups, axis=0), NO_LOGIT + 1), highest  # no candidate is -inf
    while low < high:
        middle = _mean(low, high)
        count = tl.sum((b_groups >= middle).to(tl.int32), axis=0)
        low = tl.where(count >= needed, middle, low)
        high = tl.where(count == needed, middle, tl.where(count > needed, high, middle - 1))
    release_next(CHAINED)
    tl.store(p_cut + i_row, low)
    tl.store(p_highest + i_row, logits_of(highest))


@jit_varying("rows_each", "top_k_stride", "temperature_stride", "p_top_k", "p_temperature")
def _candidates_kernel(
    p_logits: tl.tensor,
    p_is_ranked: tl.tensor,
    p_is_bad: tl.tensor,
    p_top_k: tl.tensor,
    p_temperature: tl.tensor,
    p_groups: tl.tensor,
    p_cut: tl.tensor,
    p_highest: tl.tensor,
    p_ids: tl.tensor,
    p_count: tl.tensor,
    p_total: tl.tensor,
    rows_each: tl.tensor,
    top_k_stride: tl.tensor,
    temperature_stride: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    MASS_ONE: tl.constexpr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TALL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, block of groups): lists the candidates, in no order, and sums the mass of all tokens
    # without a top-k; with one, only the groups that reach the cut are read again
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    if _is_idle(p_is_ranked, p_is_bad, i_row, rows_each):
        return
    i_knob = i_row // rows_each
    i_group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    cut = tl.load(p_cut + i_row)
    m_group = tl.load(p_groups + i_row * GROUPS + i_group) >= cut
    is_free = tl.load(p_top_k + i_knob * top_k_stride) >= vocab_size
    if (tl.max(m_group.to(tl.int32), axis=0) == 0) & (not is_free):
        return
    highest = tl.load(p_highest + i_row).to(tl.float64)
    temperature = tl.load(p_temperature + i_knob * temperature_stride)
    mass = tl.zeros([], tl.int64)
    for i_first in range(0, vocab_size, TALL * GROUPS):
        i_token = i_first + tl.arange(0, TALL)[:, None] * GROUPS + i_group[None, :]
        m_token = tl.reshape((i_token < vocab_size) & (m_group[None, :] | is_free), [TALL * BLOCK])
        i_token = tl.reshape(i_token, [TALL * BLOCK])
        b_logits = tl.load(p_logits + i_row * row_stride + i_token, mask=m_token, other=float("-inf"))
        m_found = m_token & (_ordered(b_logits) >= cut)
        count = tl.sum(m_found.to(tl.int32), axis=0)
        if count > 0:
            first = tl.atomic_add(p_count + i_row, count)
            i_place = first + tl.cumsum(m_found.to(tl.int32), axis=0) - 1
            tl.store(p_ids + i_row * CAPACITY + i_place, i_token, mask=m_found & (i_place < CAPACITY))
        if is_free:
            b_scaled = (b_logits.to(tl.float64) - highest) / temperature
            mass += tl.sum((tl.exp(b_scaled) * MASS_ONE).to(tl.int64), axis=0)
    if is_free:
        tl.atomic_add(p_total + i_row, mass)
    release_next(CHAINED)


@jit
def _last_kept(
    b_keys: tl.tensor, b_worth: tl.tensor, needed: tl.tensor, NO_KEY: tl.constexpr, LAST_KEY: tl.constexpr
) -> tl.tensor:
    """The highest key for which it and those above are worth `needed` float64, of the keys above NO_KEY; the
    lowest possible one if all are worth less.
    """
    low, high = tl.full([], NO_KEY + 1, tl.int64), tl.max(b_keys, axis=0)
    while low < high:
        middle = _mean(low, high)
        b_above = b_keys >= middle
        is_enough = tl.sum(tl.where(b_above, b_worth, 0), axis=0).to(tl.float64) >= needed
        # the next key on the side of the answer, so that no step is lost where no keys are; ~ turns the order
        b_side = tl.where(is_enough, b_keys, ~b_keys)
        nearest = tl.min(tl.where(b_above == is_enough, b_side, LAST_KEY), axis=0)
        low = tl.where(is_enough, nearest, low)
        high = tl.where(is_enough, high, ~nearest)
    return low


@jit_varying(
    "rows_each", "seed_stride", "position_stride", "temperature_stride", "top_k_stride", "top_p_stride",
    "min_p_stride", "p_seeds", "p_positions", "p_temperature", "p_top_k", "p_top_p", "p_min_p",
)  # fmt: skip
def _draw_kernel(
    p_logits: tl.tensor,
    p_is_ranked: tl.tensor,
    p_is_bad: tl.tensor,
    p_seeds: tl.tensor,
    p_positions: tl.tensor,
    p_temperature: tl.tensor,
    p_top_k: tl.tensor,
    p_top_p: tl.tensor,
    p_min_p: tl.tensor,
    p_highest: tl.tensor,
    p_ids: tl.tensor,
    p_count: tl.tensor,
    p_total: tl.tensor,
    p_tokens: tl.tensor,
    p_is_unseen: tl.tensor,
    rows_each: tl.tensor,
    seed_stride: tl.tensor,
    position_stride: tl.tensor,
    temperature_stride: tl.tensor,
    top_k_stride: tl.tensor,
    top_p_stride: tl.tensor,
    min_p_stride: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    MASS_ONE: tl.constexpr,
    NO_KEY: tl.constexpr,
    LAST_KEY: tl.constexpr,
    LAST_ID: tl.constexpr,
    ABOVE: tl.constexpr,
    PLACES: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row): cuts the candidates by top-k, top-p and min-p, and takes the best score of the rest; rows
    # with more candidates than ABOVE that have one of PLACES, or with any number where these are all
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    if _is_idle(p_is_ranked, p_is_bad, i_row, rows_each):
        tl.store(p_is_unseen + i_row, tl.zeros([], tl.int8))
        return
    count = tl.load(p_count + i_row)
    if (count <= ABOVE) | ((count > PLACES) & (PLACES < CAPACITY)):
        return
    i_knob = i_row // rows_each
    i_place = tl.arange(0, PLACES)
    m_place = i_place < count
    b_ids = tl.load(p_ids + i_row * CAPACITY + i_place, mask=m_place, other=0).to(tl.int64)
    b_logits = tl.load(p_logits + i_row * row_stride + b_ids, mask=m_place, other=0.0)
    b_keys = tl.where(m_place, keys_of(b_logits, b_ids, LAST_ID), NO_KEY)
    top_k = tl.load(p_top_k + i_knob * top_k_stride)
    top_p = tl.load(p_top_p + i_knob * top_p_stride)
    is_limited = top_k < vocab_size
    cut = tl.full([], NO_KEY + 1, tl.int64)
    if is_limited:
        cut = _last_kept(b_keys, m_place.to(tl.int64), top_k.to(tl.float64), NO_KEY, LAST_KEY)
    highest = tl.load(p_highest + i_row).to(tl.float64)
    b_scaled = (b_logits.to(tl.float64) - highest) / tl.load(p_temperature + i_knob * temperature_stride)
    b_scaled = tl.where(m_place, b_scaled, float("-inf"))
    is_unseen = (count > CAPACITY) | (is_limited & (top_k > width))
    if top_p < 1.0:
        b_mass = tl.where(b_keys >= cut, (tl.exp(b_scaled) * MASS_ONE).to(tl.int64), 0)
        held = tl.sum(b_mass, axis=0)
        wanted = top_p * tl.where(is_limited, held, tl.load(p_total + i_row)).to(tl.float64)
        is_unseen = is_unseen | (held.to(tl.float64) < wanted)
        cut = tl.maximum(cut, _last_kept(b_keys, b_mass, wanted, NO_KEY, LAST_KEY))
    least = least_scaled(p_min_p + i_knob * min_p_stride, True)
    m_kept = m_place & (b_keys >= cut) & (b_scaled >= least)
    seed = tl.load(p_seeds + i_knob * seed_stride)
    position = tl.load(p_positions + i_row * position_stride)
    b_score = gumbel_noise(seed, position, b_ids, GAMMA, MIX_1, MIX_2) + b_scaled
    b_score = tl.where(m_kept, b_score, float("-inf"))
    best = tl.max(tl.where(m_kept & (b_score == tl.max(b_score, axis=0)), b_keys, NO_KEY), axis=0)
    release_next(CHAINED)
    is_known = (best != NO_KEY) & (count <= CAPACITY)  # which candidates have a place is not known beyond it
    tl.store(p_tokens + i_row, LAST_ID - (best & LAST_ID), mask=is_known)
    tl.store(p_is_unseen + i_row, is_unseen.to(tl.int8))


class Candidates(NamedTuple):
    """The candidates of rows, in no order: `ids` int32 `[R, C]`, of which the first `num_found` int32 `[R]`
    are written, C at most. `highest` float32 `[R]` is the highest logit. `total` int64 `[R]` is the mass of
    all tokens, for rows without a top-k.
    """

    highest: torch.Tensor
    ids: torch.Tensor
    num_found: torch.Tensor
    total: torch.Tensor


def find_candidates(
    logits: torch.Tensor,
    is_ranked: torch.Tensor,
    is_bad: torch.Tensor,
    top_k: torch.Tensor,
    temperature: torch.Tensor,
    width: int,
) -> Candidates:
    """Launch: the `width` likeliest tokens of each row, or as many as its top-k, and few others.

    `logits`: float32 `[R, V]`, rows dense. Each `[B]`: `is_ranked` bool, `top_k` int64 (V: no limit) and
    `temperature` float64. Nothing is written for requests that are not ranked, nor for rows in `is_bad` bool
    `[R]`. Where many tokens are equal, `num_found` may exceed C.
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    width = min(width, vocab_size)
    capacity = PLACES_EACH * next_power_of_2(width)
    groups = max(MIN_GROUPS, capacity)
    tall = min(MAX_TALL, next_power_of_2(cdiv(vocab_size, groups)))
    found, ids = (
        torch.empty((num_rows, places), dtype=torch.int32, device=device) for places in (groups, capacity)
    )
    cut, count = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    highest = torch.empty(num_rows, dtype=torch.float32, device=device)
    total = torch.empty(num_rows, dtype=torch.int64, device=device)
    active = is_ranked.contiguous().view(torch.uint8), is_bad.contiguous().view(torch.uint8)
    each, sizes, chain = num_rows // is_ranked.shape[0], (vocab_size, row_stride(logits)), chained(device)
    grid = (num_rows, groups // BLOCK_GROUPS)
    _group_highest_kernel[grid](
        logits, *active, found, count, total, each, *sizes,
        GROUPS=groups, NO_LOGIT=NO_LOGIT, TALL=tall, BLOCK=BLOCK_GROUPS, **chain, num_warps=4,
    )  # fmt: skip
    _cut_kernel[(num_rows,)](
        found, *active, top_k, cut, highest, each, top_k.stride(0), width,
        GROUPS=groups, NO_LOGIT=NO_LOGIT, **chain, num_warps=8,
    )  # fmt: skip
    _candidates_kernel[grid](
        logits, *active, top_k, temperature, found, cut, highest, ids, count, total,
        each, top_k.stride(0), temperature.stride(0), *sizes,
        MASS_ONE=MASS_ONE, GROUPS=groups, CAPACITY=capacity, TALL=tall, BLOCK=BLOCK_GROUPS,
        **chain, num_warps=8,
    )  # fmt: skip
    return Candidates(highest, ids, count, total)


def row_stride(logits: torch.Tensor) -> int:
    """The stride of the rows, as it is for several of them: one row alone may have any."""
    return logits.stride(0) if logits.shape[0] > 1 else logits.shape[1]


def choose_ranked_triton(
    logits: torch.Tensor,
    positions: torch.Tensor,
    ranking: Ranking,
    tokens: torch.Tensor,
    is_bad: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on `logits` float32 `[R, V]` (rows dense); arguments as in `choose_ranked`, `tokens` are
    changed.

    Raises ValueError if shapes or dtypes do not fit.
    """
    _check(logits, positions, ranking, tokens, is_bad)
    (num_rows, vocab_size), device = logits.shape, logits.device
    is_unseen = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return tokens, is_unseen
    logits, width = logits if logits.stride(1) == 1 else logits.contiguous(), min(width, vocab_size)
    seeds, temperature, top_k, top_p, min_p, is_ranked = ranking
    found = find_candidates(logits, is_ranked, is_bad, top_k, temperature, width)
    capacity = found.ids.shape[1]
    few = min(FEW, capacity)
    forms = [(-1, few, 4)] + ([(few, capacity, 16)] if few < capacity else [])
    for above, places, warps in forms:
        _draw_kernel[(num_rows,)](
            logits, is_ranked.contiguous().view(torch.uint8), is_bad.contiguous().view(torch.uint8),
            seeds, positions, temperature, top_k, top_p, min_p,
            found.highest, found.ids, found.num_found, found.total, tokens, is_unseen.view(torch.uint8),
            num_rows // seeds.shape[0], seeds.stride(0), positions.stride(0), temperature.stride(0),
            top_k.stride(0), top_p.stride(0), min_p.stride(0), width, vocab_size, row_stride(logits),
            GAMMA=GAMMA, MIX_1=MIX_1, MIX_2=MIX_2, MASS_ONE=MASS_ONE,
            NO_KEY=NO_KEY, LAST_KEY=LAST_KEY, LAST_ID=LAST_ID,
            ABOVE=above, PLACES=places, CAPACITY=capacity, **chained(device), num_warps=warps,
        )  # fmt: skip
    return tokens, is_unseen


def _check(
    logits: torch.Tensor,
    positions: torch.Tensor,
    ranking: Ranking,
    tokens: torch.Tensor,
    is_bad: torch.Tensor,
) -> None:
    count, num_rows = ranking.seeds.shape[0], logits.shape[0]
    is_shaped = logits.dim() == 2 and logits.dtype == torch.float32 and logits.shape[1] > 0
    rows = ((positions, torch.int64), (tokens, torch.int64), (is_bad, torch.bool))
    dtypes = (torch.int64, torch.float64, torch.int64, torch.float64, torch.float64, torch.bool)
    is_placed = all(x.shape == (num_rows,) and x.dtype == dtype for x, dtype in rows)
    fits = all(x.shape == (count,) and x.dtype == dtype for x, dtype in zip(ranking, dtypes, strict=True))
    is_even = num_rows % count == 0 if count else num_rows == 0
    if not (is_shaped and is_placed and fits and is_even and tokens.is_contiguous()):
        raise ValueError(
            f"choose_ranked: logits {tuple(logits.shape)} {logits.dtype}, positions, tokens and is_bad "
            f"{[(tuple(x.shape), x.dtype) for x, _ in rows]}, seeds, temperature, top_k, top_p, min_p and "
            f"is_ranked {[(tuple(x.shape), x.dtype) for x in ranking]}; expected float32 [R, V], int64, "
            "int64 (dense) and bool, each [R], and int64, float64, int64, float64, float64, bool, each [B] "
            "with R a multiple of B"
        )


def choose_ranked(
    logits: torch.Tensor,
    positions: torch.Tensor,
    ranking: Ranking,
    tokens: torch.Tensor,
    is_bad: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tokens` int64 `[R]`, with the drawn ones for rows of ranked requests, and bool `[R]`: rows among them
    whose support may be wider than the candidates; their token is undefined.

    `logits`: float32 `[R, V]`. `positions`: int64 `[R]`. `is_bad`: bool `[R]`, rows whose token stays. At
    least the `width` likeliest tokens are candidates, unless many equal ones leave a row unseen. Raises
    ValueError if shapes or dtypes do not fit.
    """
    if logits.is_cuda:
        return choose_ranked_triton(logits, positions, ranking, tokens, is_bad, width)
    _check(logits, positions, ranking, tokens, is_bad)
    return choose_ranked_reference(logits, positions, ranking, tokens, is_bad, width)
