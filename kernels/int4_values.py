"""Values of 4-bit integers with scales and zero points by group: the packed form that the kernels read.

A weight `[N, H]` is uint8 `[N, H/2]`. Its inputs are cut into units of U, and byte (n, p*U + j) holds input
2*p*U + j in its low half and input (2*p + 1)*U + j in its high half. So both halves of a tile of bytes meet
contiguous inputs. `scales` float16 and `zeros` uint8 are `[H/G, N]` for groups of G inputs, U divides G, and
a value is (stored - zero) * scale.

Legend: N outputs, H inputs, G inputs of a group, U inputs of a unit.
"""

from __future__ import annotations

import torch

from .triton_jit import jit, tl

MAX_UNIT, MIN_UNIT = 128, 16


def unit_of(in_size: int, group: int) -> int:
    """U for `in_size` inputs in groups of `group`.

    Raises ValueError if the inputs are no multiple of the group, or of 2 * MIN_UNIT.
    """
    unit = min(group, MAX_UNIT)
    while unit > MIN_UNIT and in_size % (2 * unit):
        unit //= 2
    if in_size % group or in_size % (2 * unit):
        raise ValueError(
            f"{in_size} inputs: a multiple of the group size {group} and of {2 * unit} is needed"
        )
    return unit


def pack_int4(values: torch.Tensor, unit: int) -> torch.Tensor:
    """Integers 0 to 15 `[N, H]` -> uint8 `[N, H/2]`."""
    halves = values.to(torch.uint8).reshape(values.shape[0], -1, 2, unit)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).view(values.shape[0], -1)


def unpack_int4(weight: torch.Tensor, unit: int) -> torch.Tensor:
    """The reverse of `pack_int4`, uint8 `[N, H]`."""
    halves = weight.view(weight.shape[0], -1, unit)
    return torch.stack((halves & 15, halves >> 4), dim=2).view(weight.shape[0], -1)


def dequantise_int4(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The values `[N, H]` of a packed `weight`, in `dtype`."""
    in_size = 2 * weight.shape[1]
    group = in_size // scales.shape[0]
    values = unpack_int4(weight, unit_of(in_size, group)).to(torch.float32)
    zero, scale = (each.t().to(torch.float32).repeat_interleave(group, dim=1) for each in (zeros, scales))
    return ((values - zero) * scale).to(dtype)


def check_int4(op: str, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> int:
    """The number of inputs of a group. Raises ValueError unless the parts of a weight fit together."""
    dtypes = (weight.dtype, scales.dtype, zeros.dtype)
    fits = scales.shape == zeros.shape and scales.shape[1] == weight.shape[0] and scales.shape[0] > 0
    if (
        not fits
        or dtypes != (torch.uint8, torch.float16, torch.uint8)
        or 2 * weight.shape[1] % scales.shape[0]
    ):
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)}, scales {tuple(scales.shape)}, zeros "
            f"{tuple(zeros.shape)} of "
            f"{dtypes}; expected uint8 [N, H/2], float16 and uint8 [H/G, N]"
        )
    if not (weight.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous()):
        raise ValueError(f"{op}: weight, scales and zeros must be contiguous")
    return 2 * weight.shape[1] // scales.shape[0]


@jit
def halves_tile(b_packed: tl.tensor, dtype: tl.constexpr, HAS_PAIRS: tl.constexpr) -> tl.tensor:
    """(low, high) halves of bytes, each in `dtype`; with HAS_PAIRS 128 more, in bfloat16.

    HAS_PAIRS makes two values with each instruction: a byte becomes the mantissa of a bfloat16 whose exponent
    counts in ones, from 128 to 255.
    """
    if HAS_PAIRS:
        b_low, b_high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 $0, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
            shr.u32 a, a, 4;
            shr.u32 b, b, 4;
            lop3.b32 $2, a, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, b, 0x000f000f, 0x43004300, 0xea;
            }
            """,
            "=r,=r,=r,=r,r",
            [b_packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        b_low = (b_packed & 15).to(tl.float32).to(dtype)
        b_high = (b_packed >> 4).to(tl.float32).to(dtype)
    return b_low, b_high
