"""Weights of 4 bits in 16-bit words, as the kernel of packed experts reads them.

A weight `[N, H]` is int16 `[N, 32*P]`. Its inputs are cut into parts of SPAN, and word (n, 32*p + j) holds
input SPAN*p + UNIT*i + j, in bits 4*i to 4*i + 3 or where other `Places` say. So each quarter of a tile of
words meets UNIT contiguous inputs, and a thread finds its words side by side, as a matrix instruction wants
them. Inputs are filled up to whole parts with zeros.

4-bit integers have int32 `scales` `[G, N]` for groups of 32, 64 or 128 inputs, as in `int4_values`. G is that
of the filled inputs.

Legend: N outputs, H inputs, P parts of the inputs, G groups of inputs.
"""

from __future__ import annotations

from functools import reduce
from typing import TypeAlias

import torch

from . import int4_values
from .triton_jit import jit, tl

UNIT = 32  # inputs of a quarter of a tile of words
SPAN = 4 * UNIT


# Where a word holds the value of each quarter: runs of bits of the value, and how far left of it they lie.
Places: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
NIBBLES: Places = tuple(((15, 4 * quarter),) for quarter in range(4))


def pack_words(values: torch.Tensor, places: Places = NIBBLES) -> torch.Tensor:
    """Integers 0 to 15 `[N, H]` -> int16 `[N, 32*P]`."""
    filled = torch.nn.functional.pad(values.to(torch.int32), (0, -values.shape[1] % SPAN))
    quarters = filled.view(values.shape[0], -1, 4, UNIT).unbind(2)
    moved = (
        (quarter & bits) << by for quarter, runs in zip(quarters, places, strict=True) for bits, by in runs
    )
    words = reduce(torch.bitwise_or, moved)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16).flatten(1)


def unpack_words(words: torch.Tensor, places: Places = NIBBLES) -> torch.Tensor:
    """The reverse of `pack_words`, with the filled inputs: uint8 `[N, SPAN*P]`."""
    units = words.view(words.shape[0], -1, UNIT)
    quarters = [reduce(torch.bitwise_or, (units >> by & bits for bits, by in runs)) for runs in places]
    return torch.stack(quarters, dim=2).to(torch.uint8).flatten(1)


def pack_groups(scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    """As `int4_values.pack_groups`, G then filled up."""
    words = int4_values.pack_groups(scales, zeros)
    fill = -words.shape[0] % (SPAN // group)
    return torch.nn.functional.pad(words, (0, 0, 0, fill)).contiguous()


def dequantise_words(
    words: torch.Tensor, scales: torch.Tensor, group: int, in_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """The values `[N, H]`, H = `in_size`, of a packed weight of integers, in `dtype`."""
    scale, zero = int4_values.unpack_groups(scales)
    spread_scale, spread_zero = (each.t().repeat_interleave(group, dim=1) for each in (scale, zero))
    values = (unpack_words(words).to(torch.float32) - spread_zero) * spread_scale
    return values[:, :in_size].to(dtype)


def unpacks_pairs(x: torch.Tensor, has_pairs: bool | None = None) -> bool:
    """Whether weights in 4 or 8 bits are unpacked by instructions for pairs of bfloat16, for inputs like `x`;
    `has_pairs` decides if given.
    """
    return x.dtype == torch.bfloat16 and (x.is_cuda if has_pairs is None else has_pairs)


@jit
def integer_quarters(
    b_words: tl.tensor,
    b_group0: tl.tensor,
    b_group1: tl.tensor,
    b_group2: tl.tensor,
    b_group3: tl.tensor,
    dtype: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
) -> tl.tensor:
    """The four quarters of int16 words `[OUT, UNIT]`, less their zero points, in `dtype`. `b_group0` and on:
    the words `[OUT]` of the groups of the quarters.

    HAS_PAIRS makes two bfloat16 with each instruction: 4 bits become the mantissa of a bfloat16 whose
    exponent counts in ones, from 128 to 255, and 128 more than the zero point is subtracted. All are exact.
    """
    if HAS_PAIRS:
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, one;
            mov.b32 one, 0x3f803f80;
            lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, t, one, $5;
            shr.u32 t, $4, 4;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $1, t, one, $7;
            shr.u32 t, $4, 8;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $2, t, one, $9;
            shr.u32 t, $4, 12;
            lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $3, t, one, $11;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [
                b_words,
                _minus_zero(b_group0)[:, None],
                _minus_zero(b_group1)[:, None],
                _minus_zero(b_group2)[:, None],
                _minus_zero(b_group3)[:, None],
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        b_wide = b_words.to(tl.int32)
        b_0 = ((b_wide & 15) - (b_group0 >> 16)[:, None]).to(tl.float32).to(dtype)
        b_1 = ((b_wide >> 4 & 15) - (b_group1 >> 16)[:, None]).to(tl.float32).to(dtype)
        b_2 = ((b_wide >> 8 & 15) - (b_group2 >> 16)[:, None]).to(tl.float32).to(dtype)
        b_3 = ((b_wide >> 12 & 15) - (b_group3 >> 16)[:, None]).to(tl.float32).to(dtype)
    return b_0, b_1, b_2, b_3


@jit
def _minus_zero(b_group: tl.tensor) -> tl.tensor:
    """Two bfloat16 in a word, each -(128 + zero point): its mantissa counts in ones."""
    return (b_group >> 16) * 65537 - 1023360256  # 0xC300C300 as a signed integer


@jit
def group_scale(b_group: tl.tensor) -> tl.tensor:
    """The float32 scales of words of groups."""
    return (b_group & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
