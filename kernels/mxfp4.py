"""4-bit floating-point values with a shared exponent (MXFP4): decoded to a float dtype, or packed.

A block of 32 values along the inner dimension has one scale, a power of two. A checkpoint has two neighbours
in a byte, the first in its low half. Packed for kernels, a weight `[N, H]` has the words of `packed_words`,
`[N, 32*P]`, and int32 scales `[P, N]`: byte i of a word is the scale of quarter i plus SCALE_OFFSET. The bits
of a value lie in its word (PLACES) so that one shift moves those of three quarters to where a bfloat16 has
sign, exponent and mantissa.

Source: Open Compute Project, "Microscaling formats (MX) specification", 2023 (e2m1, scales e8m0). Legend: G
blocks of a row, N outputs, H = 32*G inputs, P = ceil(G / 4) parts of the inputs.
"""

from __future__ import annotations

import torch

from .packed_words import Places, pack_words, unpack_words
from .triton_jit import jit, tl

BLOCK = 32  # values that share a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
# Kernels make values that are smaller by 2^64, in bfloat16, by a factor with this exponent. Their sums are
# shifted back.
SCALE_OFFSET = 62
MAX_SCALE = 254 - SCALE_OFFSET  # the largest stored scale that has such a factor: 2^65
# Mantissa and exponent are the three low bits of a value, sign the highest.
PLACES: Places = (((7, 6), (8, 12)), ((7, 3), (8, 9)), ((7, 0), (8, 6)), ((3, 10), (12, 11)))


def decode_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`blocks` uint8 `[..., G, 16]` and `scales` uint8 `[..., G]` -> `[..., G*32]` in `dtype`.

    Raises ValueError if the shapes or dtypes do not fit.
    """
    _check(blocks, scales)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return _scaled(halves, scales.to(torch.int32) - EXPONENT_BIAS, dtype).flatten(-2)


def _scaled(halves: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of `halves` `[..., G, 32]`, 0 to 15, times two to the power of `exponents` `[..., G]`."""
    table = torch.tensor(VALUES, dtype=dtype, device=halves.device)
    return torch.ldexp(table[halves.to(torch.int32)], exponents[..., None]).to(dtype)


def _check(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    fits = blocks.shape[:-1] == scales.shape and blocks.shape[-1] == BLOCK // 2
    if not fits or blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"decode_mxfp4: blocks {tuple(blocks.shape)} {blocks.dtype} and scales {tuple(scales.shape)} "
            f"{scales.dtype}; expected uint8 [..., G, {BLOCK // 2}] and [..., G]"
        )


def pack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix as a checkpoint has it, `[N, G, 16]` and `[N, G]` -> packed for kernels: int16 `[N, 32*P]`
    and int32 `[P, N]`. Scales are at most MAX_SCALE.
    """
    _check(blocks, scales)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    filled = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4), value=EXPONENT_BIAS)
    quarters = (filled + SCALE_OFFSET).view(torch.int32)
    return pack_words(halves, PLACES), quarters.t().contiguous()


def unpack_mxfp4(words: torch.Tensor, scales: torch.Tensor, in_size: int, dtype: torch.dtype) -> torch.Tensor:
    """The values `[N, H]`, H = `in_size`, of a packed matrix with `scales` `[P, N]`."""
    stored = scales.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    exponents = stored.to(torch.int32) - SCALE_OFFSET - EXPONENT_BIAS
    halves = unpack_words(words, PLACES).view(words.shape[0], -1, BLOCK)
    return _scaled(halves, exponents, dtype).flatten(1)[:, :in_size]


@jit
def mxfp4_quarters(
    b_words: tl.tensor, b_scales: tl.tensor, dtype: tl.constexpr, HAS_PAIRS: tl.constexpr
) -> tl.tensor:
    """The four quarters of int16 words `[OUT, UNIT]` with packed scales `[OUT]`, in `dtype`.

    HAS_PAIRS makes two bfloat16 with each instruction, smaller by 2^64: sign, exponent and mantissa of 4 bits
    become the highest and three middle bits of a bfloat16, which is then 2^-126 times the value, and one
    product by a power of two does the rest.
    """
    if HAS_PAIRS:
        b_f0, b_f1, b_f2, b_f3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t;
            prmt.b32 t, $4, 0, 0x0404;
            shr.u32 $0, t, 1;
            prmt.b32 t, $4, 0, 0x1414;
            shr.u32 $1, t, 1;
            prmt.b32 t, $4, 0, 0x2424;
            shr.u32 $2, t, 1;
            prmt.b32 t, $4, 0, 0x3434;
            shr.u32 $3, t, 1;
            }
            """,
            "=&r,=&r,=&r,=&r,r",
            [b_scales],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        # a factor is one register for both values of a pair: the second of each two is not read
        b_0, b_1, b_2, b_3 = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u, s;
            mov.b32 s, 0x80008000;
            and.b32 t, $4, 0x81c081c0;
            fma.rn.bf16x2 $0, t, $5, s;
            shl.b32 t, $4, 3;
            and.b32 t, t, 0x81c081c0;
            fma.rn.bf16x2 $1, t, $7, s;
            shl.b32 t, $4, 6;
            and.b32 t, t, 0x81c081c0;
            fma.rn.bf16x2 $2, t, $9, s;
            shr.u32 t, $4, 4;
            and.b32 t, t, 0x00c000c0;
            shr.u32 u, $4, 5;
            lop3.b32 t, u, 0x01000100, t, 0xea;
            shl.b32 u, $4, 1;
            lop3.b32 t, u, s, t, 0xea;
            fma.rn.bf16x2 $3, t, $11, s;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [b_words, b_f0[:, None], b_f1[:, None], b_f2[:, None], b_f3[:, None]],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        b_wide = b_words.to(tl.int32)
        b_0 = _value(b_wide >> 6 & 7 | b_wide >> 12 & 8, b_scales).to(dtype)
        b_1 = _value(b_wide >> 3 & 7 | b_wide >> 9 & 8, b_scales >> 8).to(dtype)
        b_2 = _value(b_wide & 7 | b_wide >> 6 & 8, b_scales >> 16).to(dtype)
        b_3 = _value(b_wide >> 10 & 3 | b_wide >> 11 & 12, b_scales >> 24).to(dtype)
    return b_0, b_1, b_2, b_3


@jit
def _value(b_bits: tl.tensor, b_scale: tl.tensor) -> tl.tensor:
    """Float32 values of the low 4 bits of `b_bits`, with the packed scales in the low bytes of `b_scale`."""
    b_mantissa = (b_bits & 1).to(tl.float32)
    b_exponent = (b_bits >> 1 & 3).to(tl.float32)
    b_normal = (1.0 + 0.5 * b_mantissa) * tl.exp2(b_exponent - 1.0)
    b_value = tl.where(b_exponent == 0.0, 0.5 * b_mantissa, b_normal)
    b_value = tl.where((b_bits & 8) != 0, -b_value, b_value)
    return b_value * tl.exp2((b_scale & 255).to(tl.float32) - 189.0)[:, None]  # EXPONENT_BIAS + SCALE_OFFSET
