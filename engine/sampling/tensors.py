"""Sampling parameters as device tensors, one slot per request.

Legend: S slots, R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ...kernels.noise import seed_tensor
from ..host_copy import all_to_device
from .draws import Draw
from .params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters, each `[S]`.

    `seeds` and `top_k` (V: no limit) are int64. `temperature`, `top_p` and `min_p` are float64. `is_drawn` is
    bool; False takes the likeliest token.
    """

    seeds: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    is_drawn: torch.Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingTensors":
        """One slot for each of `params`."""
        drawn = [not p.is_argmax for p in params]
        reals = [[p.temperature if d else 1.0, p.top_p, p.min_p] for p, d in zip(params, drawn, strict=True)]
        limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        host = (
            seed_tensor([p.seed for p in params]),
            *torch.tensor(reals, dtype=torch.float64).reshape(-1, 3).unbind(1),
            torch.tensor(limits, dtype=torch.int64),
            torch.tensor(drawn, dtype=torch.bool),
        )
        seeds, temperature, top_p, min_p, top_k, is_drawn = all_to_device(host, torch.device(device))
        return cls(
            seeds=seeds,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            is_drawn=is_drawn,
        )

    def repeated(self, num_rows: int) -> "SamplingTensors":
        """Repeats each slot for its share of `num_rows` consecutive rows."""
        each = num_rows // max(self.seeds.shape[0], 1)
        if each <= 1:
            return self
        return SamplingTensors(
            **{f.name: getattr(self, f.name)[:, None].expand(-1, each).reshape(-1) for f in fields(self)}
        )

    def draw(self, rows: torch.Tensor, positions: torch.Tensor, width: int, *, has_top_k: bool) -> Draw:
        """The parameters of `rows`, for a common draw. `positions` has one entry per slot. Legend of
        `Draw`.
        """
        return Draw(
            rows=rows,
            temperature=self.temperature[rows],
            seeds=self.seeds[rows],
            positions=positions[rows],
            top_k=self.top_k[rows] if has_top_k else None,
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            width=width,
        )
