"""Chooses one token per row, greedily or by Gumbel-max sampling: sampling without top-k and top-p.

The vocabulary is cut into splits that run in parallel, in three passes: the highest logit of each split, the
token with the best score of each split of a sampled row, and the best of all splits. The noise is that of
`noise`, bit for bit.

A score is

    scaled + gumbel,    scaled = (logit - highest) / temperature,    gumbel = -log(exponential),
                        exponential = -log(u)

in float64, whose logarithms take most of the time. So the second pass estimates all tokens in float32 first.
The highest score is the shortest time of a race between exponential clocks,

    time = exponential * exp(-scaled),

which needs one logarithm and has small relative errors. Only tokens whose estimated time is so close to the
shortest that errors could hide the best of them are candidates. Nearly always there is one. A split with
more, about one in 8000, computes all its scores in float64. The third pass compares one token of each split
by its score in float64.

ERROR bounds the errors of log2(time), and of the difference between scaled * log2(e) and log2(min_p), at
least twice. In units of 2**-24, to first order, where one rounding is 1 unit:

    scaled * log2(e)   300 = 60 * 5: log2(e), temperature, their quotient, logit - highest, and the product,
                             of which HOPELESS leaves at most 60
    exponential         16 = 1 / 0.13 of u below 7/8, and 8 of the logarithm (4 units in the last place; CUDA
                             documents 1); above 7/8 below 6 in all, the rest of the series included
    time                 5 = 4 of the exponential function (2**-22, says PTX), and the product
    log2(time)         331 = 300 + (16 + 5) * log2(e)
    log2(min_p)        194 = 64 * 3: the logarithm (2), and its sum with ERROR; and 2 of min_p itself
    ERROR             1024

Legend: R rows, V vocabulary, S splits.
"""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .noise import GAMMA, MIX_1, MIX_2, gumbel
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

SPLIT = 2048  # logits per program
EXACT = 256  # scores that a program computes in float64 at once: one per thread, for few registers

ERROR = 2.0**-14  # of estimates, as derived above
# Tokens with a lower scaled * log2(e) are never chosen: they score below -60 / log2(e) + 36.74 < -4.8, and
# the row's highest, which no min-p cuts, at least -3.61.
HOPELESS = -60.0
# Other temperatures have no estimates. With these, nothing underflows that matters, and only the hopeless
# overflow.
COLDEST, HOTTEST = 2.0**-100, 2.0**100


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
def _noise_bits(
    seed: tl.tensor,
    position: tl.tensor,
    b_ids: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
) -> tl.tensor:
    """The 52 random bits of the tokens `b_ids` int64: u = (2 * bits + 1) * 2**-53."""
    state = _mixed(_mixed(seed + GAMMA, MIX_1, MIX_2) + position * GAMMA, MIX_1, MIX_2)
    return (_mixed(state + (b_ids + 1) * GAMMA, MIX_1, MIX_2) >> 12) & ((1 << 52) - 1)


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
    b_bits = _noise_bits(seed, position, b_ids, GAMMA, MIX_1, MIX_2)
    b_uniform = (b_bits * 2 + 1).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    return -tl.log(-tl.log(b_uniform))


@jit
def _exponential_estimate(b_bits: tl.tensor) -> tl.tensor:
    """-log(u) in float32 of the bits of `_noise_bits`, with a small relative error.

    Near u = 1 a rounded u has lost 1 - u, so there w = 1 - u is taken from the integers, and
    -log(1 - w) = w + w**2 / 2 + w**3 / 3 + ...
    """
    b_odd = b_bits * 2 + 1
    m_near_1 = b_bits >= 7 << 49  # u > 7/8
    b_x = tl.where(m_near_1, (1 << 53) - b_odd, b_odd).to(tl.float32) * 1.1102230246251565e-16  # 2**-53
    b_series = 1 / 6 + b_x * (1 / 7)
    b_series = 1 / 4 + b_x * (1 / 5 + b_x * b_series)
    b_series = 1.0 + b_x * (1 / 2 + b_x * (1 / 3 + b_x * b_series))
    return tl.where(m_near_1, b_x * b_series, -tl.log(b_x))


@jit
def _scaled_estimate(b_logits: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """scaled * log2(e) in float32."""
    return (b_logits - highest) * tl.div_rn(1.4426950408889634, temperature.to(tl.float32))


@jit
def least_scaled(p_min_p: tl.tensor, HAS_MIN_P: tl.constexpr) -> tl.tensor:
    """log(min_p) of one request: lower scaled logits are cut."""
    least = tl.full([], float("-inf"), tl.float64)
    if HAS_MIN_P:
        min_p = tl.load(p_min_p)
        least = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), least)
    return least


@jit
def _scores(
    b_logits: tl.tensor,
    b_ids: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
) -> tl.tensor:
    """The scores of tokens of one row, float64; -inf of those whose scaled logits are below `least`."""
    b_scaled = (b_logits.to(tl.float64) - highest.to(tl.float64)) / temperature
    b_score = gumbel_noise(seed, position, b_ids, GAMMA, MIX_1, MIX_2) + b_scaled
    return tl.where(b_scaled >= least, b_score, float("-inf"))


@jit
def _candidates(
    b_logits: tl.tensor,
    b_ids: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    p_min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    ERROR: tl.constexpr,
    HOPELESS: tl.constexpr,
) -> tl.tensor:
    """Which tokens may have the best score of the split; none if the row's best is certainly elsewhere."""
    b_scaled = _scaled_estimate(b_logits, highest, temperature)
    m_possible = b_scaled >= HOPELESS
    m_certain = m_possible  # not cut by min-p
    if HAS_MIN_P:
        # below 2**-64 it cuts hopeless tokens only
        least = tl.log2(tl.maximum(tl.load(p_min_p), 5.421010862427522e-20).to(tl.float32))
        m_possible = m_possible & (b_scaled >= least - ERROR)
        m_certain = m_certain & (b_scaled >= least + ERROR)
    b_bits = _noise_bits(seed, position, b_ids, GAMMA, MIX_1, MIX_2)
    b_time = _exponential_estimate(b_bits) * tl.exp2(-b_scaled)
    shortest = tl.min(tl.where(m_certain, b_time, float("inf")), axis=0)
    # the errors of two times make a factor of at most 2**(2 * ERROR) < 1 + 2 * ERROR
    return m_possible & (b_time <= shortest * (1 + 2 * ERROR))


@jit
def _best_token(
    p_logits: tl.tensor,
    p_token_ids: tl.tensor,
    i_first: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    p_min_p: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tensor:
    """The first of the tokens of a split with the best score; `vocab_size` if all scores are -inf."""
    least = least_scaled(p_min_p, HAS_MIN_P)
    b_best = tl.full([EXACT], float("-inf"), tl.float64)
    b_token = tl.full([EXACT], 0, tl.int32) + vocab_size
    for i_next in range(i_first, i_first + SPLIT, EXACT):
        i_token = i_next + tl.arange(0, EXACT)
        m_token = i_token < vocab_size
        b_logits = tl.load(p_logits + i_token, mask=m_token, other=float("-inf"))
        b_ids = tl.load(p_token_ids + i_token, mask=m_token, other=0) if HAS_IDS else i_token.to(tl.int64)
        b_score = _scores(b_logits, b_ids, highest, temperature, least, seed, position, GAMMA, MIX_1, MIX_2)
        m_better = b_score > b_best
        b_best, b_token = tl.where(m_better, b_score, b_best), tl.where(m_better, i_token, b_token)
    return tl.min(tl.where(b_best == tl.max(b_best, axis=0), b_token, vocab_size), axis=0)


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
    EXACT: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    ERROR: tl.constexpr,
    HOPELESS: tl.constexpr,
    COLDEST: tl.constexpr,
    HOTTEST: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, split); overwrites the split's likeliest token with that of the best score if the row is
    # drawn, unless the row's best is certainly elsewhere
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_knob = i_row // rows_each
    if tl.load(p_is_drawn + i_knob) == 0:
        return
    i_split = tl.arange(0, BLOCK_SPLITS)
    m_split = i_split < num_splits
    b_highest = tl.load(p_highest + i_row * num_splits + i_split, mask=m_split, other=float("-inf"))
    i_first, i_local = tl.program_id(1) * SPLIT, tl.arange(0, SPLIT)
    i_token = i_first + i_local
    m_token = i_token < vocab_size
    p_logits += i_row * row_stride
    b_logits = tl.load(p_logits + i_token, mask=m_token, other=float("-inf"))
    b_ids = tl.load(p_token_ids + i_token, mask=m_token, other=0) if HAS_IDS else i_token.to(tl.int64)
    temperature = tl.load(p_temperature + i_knob * temperature_stride)
    seed = tl.load(p_seeds + i_knob * seed_stride)
    position = tl.load(p_positions + i_row * position_stride)
    p_min_p += i_knob * min_p_stride
    highest = tl.max(b_highest, axis=0)
    is_bad = (highest == float("inf")) | (highest == float("-inf"))  # the choice there is meaningless
    highest = tl.where(is_bad, 0.0, highest)
    is_estimated = (temperature >= COLDEST) & (temperature <= HOTTEST)
    m_best = _candidates(
        b_logits, b_ids, highest, tl.where(is_estimated, temperature, 1.0), p_min_p, seed, position,
        GAMMA, MIX_1, MIX_2, HAS_MIN_P, ERROR, HOPELESS,
    )  # fmt: skip
    # SPLIT + place for each candidate: below 2 * SPLIT if there is one at most, whose place it then tells
    places = tl.sum(tl.where(m_best, SPLIT + i_local, 0), axis=0)
    token = tl.where(places > 0, i_first + places - SPLIT, vocab_size)
    if (places >= 2 * SPLIT) | (not is_estimated):
        token = _best_token(
            p_logits, p_token_ids, i_first, vocab_size, highest, temperature, p_min_p, seed, position,
            GAMMA, MIX_1, MIX_2, HAS_IDS, HAS_MIN_P, SPLIT, EXACT,
        )  # fmt: skip
    release_next(CHAINED)
    tl.store(p_likeliest + i_row * num_splits + tl.program_id(1), token, mask=token < vocab_size)


@jit_varying(
    "num_splits", "row_stride", "rows_each",
    "seed_stride", "position_stride", "temperature_stride", "min_p_stride",
    "p_logits", "p_seeds", "p_positions", "p_temperature", "p_min_p", "p_is_drawn",
)  # fmt: skip
def _pick_kernel(
    p_logits: tl.tensor,
    p_highest: tl.tensor,
    p_likeliest: tl.tensor,
    p_seeds: tl.tensor,
    p_positions: tl.tensor,
    p_temperature: tl.tensor,
    p_min_p: tl.tensor,
    p_is_drawn: tl.tensor,
    p_token_ids: tl.tensor,
    p_tokens: tl.tensor,
    p_is_bad: tl.tensor,
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
    BLOCK_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row): compares one token of each split, by score if the row is drawn, else by logit
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_knob = i_row // rows_each
    i_split = tl.arange(0, BLOCK_SPLITS)
    m_split = i_split < num_splits
    o_split = i_row * num_splits + i_split
    b_highest = tl.load(p_highest + o_split, mask=m_split, other=float("-inf"))
    highest = tl.max(b_highest, axis=0)
    is_bad = (highest == float("inf")) | (highest == float("-inf"))
    b_score = b_highest.to(tl.float64)
    if (tl.load(p_is_drawn + i_knob) != 0) & (not is_bad):
        b_token = tl.load(p_likeliest + o_split, mask=m_split, other=0).to(tl.int64)
        b_logits = tl.load(p_logits + i_row * row_stride + b_token, mask=m_split, other=float("-inf"))
        b_score = _scores(
            b_logits,
            tl.load(p_token_ids + b_token) if HAS_IDS else b_token,
            highest,
            tl.load(p_temperature + i_knob * temperature_stride),
            least_scaled(p_min_p + i_knob * min_p_stride, HAS_MIN_P),
            tl.load(p_seeds + i_knob * seed_stride),
            tl.load(p_positions + i_row * position_stride),
            GAMMA, MIX_1, MIX_2,
        )  # fmt: skip
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
    highest, likeliest = (
        torch.empty((num_rows, num_splits), dtype=dtype, device=logits.device)
        for dtype in (torch.float32, torch.int32)
    )
    drawn, grid, blocks = (
        is_drawn.contiguous().view(torch.uint8),
        (num_rows, num_splits),
        next_power_of_2(num_splits),
    )
    found, stride, chain = (highest, likeliest), logits.stride(0), chained(logits.device)
    knobs = seeds, positions, temperature, temperature if min_p is None else min_p, drawn
    strides = *(knob.stride(0) for knob in knobs[:3]), 0 if min_p is None else min_p.stride(0)
    ids, each = tokens if token_ids is None else token_ids, num_rows // seeds.shape[0]
    forms = {
        "GAMMA": GAMMA, "MIX_1": MIX_1, "MIX_2": MIX_2,
        "HAS_IDS": token_ids is not None, "HAS_MIN_P": min_p is not None, "BLOCK_SPLITS": blocks,
    }  # fmt: skip
    _highest_kernel[grid](logits, *found, vocab_size, num_splits, stride, SPLIT=SPLIT, **chain, num_warps=4)
    _scores_kernel[grid](
        logits, *found, *knobs, ids, vocab_size, num_splits, stride, each, *strides,
        **forms, SPLIT=SPLIT, EXACT=EXACT, ERROR=ERROR, HOPELESS=HOPELESS, COLDEST=COLDEST, HOTTEST=HOTTEST,
        **chain, num_warps=8,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        logits, *found, *knobs, ids, tokens, is_bad.view(torch.uint8), num_splits, stride, each, *strides,
        **forms, **chain, num_warps=1,
    )  # fmt: skip
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
    `seeds` int64, `temperature` float64 above 0, `min_p` float64 up to 1 (None: off), `is_drawn` bool. Rows
    that are not drawn take the highest logit, the first among equals. `token_ids` int64 `[V]`: the token of
    each entry, whose noise it uses; None: its own index. Raises ValueError if shapes or dtypes do not fit.
    """
    if logits.is_cuda:
        return choose_token_triton(logits, seeds, positions, temperature, min_p, is_drawn, token_ids)
    _check(logits, positions, (seeds, temperature, min_p, is_drawn), token_ids)
    return choose_token_reference(logits, seeds, positions, temperature, min_p, is_drawn, token_ids)
