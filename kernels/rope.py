"""Rotary position embedding, neox pairing: dimension d is rotated with dimension d + D/2.

Legend: T tokens, N heads, D head dimension.
"""

import torch


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The definition, on half-wide unsigned `cos`, `sin` `[T, D/2]`: `x` `[T, N, D]` -> `[T, N, D]`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[T, N, D]` by `cos` `[T, D]` and `signed_sin` `[T, D]`, whose first half is negated.

    With the sign in the table the half rotation is a plain roll: three ops instead of seven.
    Raises ValueError when the tables do not fit the rows.
    """
    if cos.shape != (x.shape[0], x.shape[2]) or signed_sin.shape != cos.shape:
        raise ValueError(
            f"apply_rope: tables {tuple(cos.shape)} and {tuple(signed_sin.shape)} do not fit x {tuple(x.shape)}; "
            "expected [T, D]"
        )
    return torch.addcmul(x * cos.unsqueeze(1), x.roll(x.shape[-1] // 2, dims=-1), signed_sin.unsqueeze(1))
