"""Products with 4-bit weights on a CPU, in bfloat16, by torch's kernel for them.

It reads a weight in a packing of its own, uint8 `[N, H/2]`, with `groups` bfloat16 `[H/G, N, 2]`: a scale,
and what a stored 8 stands for. A value is (stored - 8) * scale + that. On two cores one row takes a fifth of
its time with a bfloat16 weight, and less than a hundredth of the time of dequantising one.

Source: the operations behind torch's own 4-bit weights (`_weight_int4pack_mm_for_cpu`, since torch 2.6).
Legend as in `int4_values`.
"""

from __future__ import annotations

import torch

from .int4_values import UNITS

STORED = torch.uint8  # the dtype of such a weight
OUTPUTS = 16  # of a block of the packing
EVEN = 8  # the stored value without an offset


def can_pack(device: torch.device, dtype: torch.dtype, out_size: int, group: int) -> bool:
    """Whether the kernel multiplies x of `dtype` on `device` with `out_size` outputs in groups of `group`."""
    return device.type == "cpu" and dtype == torch.bfloat16 and out_size % OUTPUTS == 0 and group in UNITS


def pack_for_cpu(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers 0 to 15 `[N, H]` with scales and zero points `[H/G, N]` -> (weight, groups)."""
    weight: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default(
        values.to(torch.int32).contiguous(), 1
    )
    wide = scales.to(torch.float32)
    groups = torch.stack((wide, (EVEN - zeros.to(torch.float32)) * wide), dim=2)
    return weight, groups.to(torch.bfloat16).contiguous()


def int4_cpu_linear(
    x: torch.Tensor, weight: torch.Tensor, groups: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b: `x` bfloat16 `[T, H]`, a weight of `pack_for_cpu`, `bias` None or `[N]` -> `[T, N]`.

    Raises ValueError if shapes or dtypes do not fit.
    """
    in_size = 2 * weight.shape[1]
    if x.dim() != 2 or x.shape[1] != in_size or x.dtype != torch.bfloat16 or groups.shape[1] != len(weight):
        raise ValueError(
            f"int4_cpu_linear: x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)}, groups "
            f"{tuple(groups.shape)}; expected bfloat16 [T, H], [N, H/2], [H/G, N, 2]"
        )
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
        x.contiguous(), weight, in_size // len(groups), groups
    )
    return y if bias is None else y + bias


def unpack_from_cpu(weight: torch.Tensor, groups: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values `[N, H]` of a weight of `pack_for_cpu`, in `dtype`: the packing can only be multiplied."""
    rows = torch.eye(2 * weight.shape[1], dtype=torch.bfloat16)
    return int4_cpu_linear(rows, weight, groups).t().contiguous().to(dtype)
