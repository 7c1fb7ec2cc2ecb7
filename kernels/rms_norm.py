"""Root-mean-square normalisation: y = x / sqrt(mean(x^2) + eps) * weight."""

import torch
import torch.nn.functional as F


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition: statistics in float32, rounded to the dtype of `x` before the weight is applied."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise `x` `[..., D]` over its last dimension; `weight` `[D]` of the same dtype.

    Raises ValueError when the widths or dtypes differ.
    """
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} {x.dtype}; "
            "both need the same last dimension and dtype"
        )
    return F.rms_norm(x, weight.shape, weight, eps)
