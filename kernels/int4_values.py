"""Values of 4-bit integers with scales and zero points by group: the packed form that the kernels read.

A weight `[N, H]` is int32 `[N, H/8]`. Its inputs are cut into units of U. Word (U/32)*t + i of a unit holds
eight of its inputs: bits 4*(j + 4*e) and the three above are input 32*i + 8*j + 2*t + e. So thread t of the
four that share a row of a matrix instruction finds its operands in contiguous words, and the two operands
of a register are 16 bits apart.

`groups` int32 `[H/G, N]` holds, for each group of G inputs, a scale in float16 in the low half and the zero
point above it. A value is (stored - zero) * scale.

Legend: N outputs, H inputs, G inputs of a group, U inputs of a unit, t threads, i and j parts of a unit, e
halves of a register.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

UNITS = (128, 64, 32)
VALUES_A_WORD = 8


def unit_of(in_size: int, group: int) -> int:
    """U for `in_size` inputs in groups of `group`.

    Raises ValueError if the inputs are no multiple of the group, or the group of no unit.
    """
    unit = next((unit for unit in UNITS if group % unit == 0), 0)
    if not unit or in_size % group:
        raise ValueError(
            f"{in_size} inputs in groups of {group}: whole groups of a multiple of {UNITS[-1]} are needed"
        )
    return unit


def pack_int4(values: torch.Tensor, unit: int) -> torch.Tensor:
    """Integers 0 to 15 `[N, H]` -> int32 `[N, H/8]`."""
    # N, units, i, j's high bit and low bit, t, e: the low bit of j is the half of a byte
    parts = values.to(torch.uint8).reshape(values.shape[0], -1, unit // 32, 2, 2, 4, 2)
    halves = parts[:, :, :, :, 0] | parts[:, :, :, :, 1] << 4
    return halves.permute(0, 1, 4, 2, 5, 3).reshape(values.shape[0], -1).view(torch.int32)


def unpack_int4(weight: torch.Tensor, unit: int) -> torch.Tensor:
    """The reverse of `pack_int4`, uint8 `[N, H]`."""
    halves = weight.view(torch.uint8).view(weight.shape[0], -1, 4, unit // 32, 2, 2)  # N, units, t, i, e, j
    parts = torch.stack((halves & 15, halves >> 4), dim=6)
    return parts.permute(0, 1, 3, 5, 6, 2, 4).flatten(1)


def pack_groups(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales in float16 and zero points 0 to 16, both `[H/G, N]` -> int32 `[H/G, N]`."""
    return zeros.to(torch.int32) << 16 | scales.view(torch.int16).to(torch.int32) & 0xFFFF


def unpack_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of `pack_groups`: scales and zero points, both float32."""
    low = torch.where(groups & 0x8000 != 0, groups & 0xFFFF | -0x10000, groups & 0xFFFF)
    return low.to(torch.int16).view(torch.float16).to(torch.float32), (groups >> 16).to(torch.float32)


def dequantise_int4(weight: torch.Tensor, groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values `[N, H]` of a packed `weight`, in `dtype`."""
    in_size = VALUES_A_WORD * weight.shape[1]
    unit = unit_of(in_size, in_size // groups.shape[0])
    values = unpack_int4(weight, unit).view(weight.shape[0], groups.shape[0], -1).to(torch.float32)
    scale, zero = (each.t()[:, :, None] for each in unpack_groups(groups))
    return values.sub_(zero).mul_(scale).to(dtype).flatten(1)


def check_int4(op: str, weight: torch.Tensor, groups: torch.Tensor) -> int:
    """The number of inputs of a group. Raises ValueError unless the parts of a weight fit together."""
    fits = weight.dim() == groups.dim() == 2 and groups.shape[1] == weight.shape[0] and groups.shape[0] > 0
    in_size = VALUES_A_WORD * weight.shape[-1]
    if not fits or (weight.dtype, groups.dtype) != (torch.int32,) * 2 or in_size % groups.shape[0]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} {weight.dtype}, groups {tuple(groups.shape)} "
            f"{groups.dtype}; expected int32 [N, H/8] and int32 [H/G, N]"
        )
    if not (weight.is_contiguous() and groups.is_contiguous()):
        raise ValueError(f"{op}: weight and groups must be contiguous")
    return in_size // groups.shape[0]


class Int4Weight(NamedTuple):
    """A weight int32 `[N, H/8]` with its `groups` int32 `[H/G, N]`, and bias `[N]` or None."""

    words: torch.Tensor
    groups: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def unit(self) -> int:
        """Inputs of a unit."""
        in_size = VALUES_A_WORD * self.words.shape[1]
        return unit_of(in_size, in_size // self.groups.shape[0])

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """The values `[N, H]`."""
        return dequantise_int4(self.words, self.groups, dtype)
