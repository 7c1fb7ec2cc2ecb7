"""The parts of draft models with trainable weights, whose names are those of a checkpoint.

Shape legend: B samples, L rows, N query heads, G key/value heads, D head dimension, H hidden size, I inner
size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.models.dense_layer import LayerSizes


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32, in the dtype of its input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # autocast would compute it with copies in float32
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Projections(nn.Module):
    """The four projections of an attention layer, over inputs of `width`, with or without head norms."""

    def __init__(
        self, sizes: LayerSizes, width: int, *, bias: bool, output_bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, sizes.hidden_size, bias=output_bias)
        self.q_norm = Norm(self.head_dim, sizes.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = Norm(self.head_dim, sizes.rms_norm_eps) if qk_norm else nn.Identity()

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`x` `[B, L, width]`, rotary tables `[L, D]` or `[B, 1, L, D]` -> `[B, N, L, D]`."""
        return rotate(self.q_norm(_heads(self.q_proj(x), self.head_dim)), cos, sin)

    def keys(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """As `queries`, `[B, G, L, D]`."""
        return rotate(self.k_norm(_heads(self.k_proj(x), self.head_dim)), cos, sin)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[B, L, width]` -> `[B, G, L, D]`."""
        return _heads(self.v_proj(x), self.head_dim)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[B, N, L, D]` -> `[B, L, H]`."""
        out: torch.Tensor = self.o_proj(x.transpose(1, 2).flatten(-2))
        return out


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LayerSizes, *, bias: bool) -> None:
        super().__init__()
        inner, width = sizes.intermediate_size, sizes.hidden_size
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def _heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[B, L, N*D]` -> `[B, N, L, D]`."""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` `[B, N, L, D]`, tables `[L, D]`; the first half of `sin` is negated already."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat((high, low), -1) * sin).to(x.dtype)
