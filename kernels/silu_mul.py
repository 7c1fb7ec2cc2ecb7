"""The gate of a SwiGLU MLP: y = silu(gate) * up, both halves of one projection."""

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` `[..., 2*I]` (gate first) -> `[..., I]`. Raises ValueError when the last dimension is odd."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: the last dimension {gate_up.shape[-1]} is odd; gate and up must be equally wide")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
