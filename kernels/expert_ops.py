"""Quantised experts as operations of the torch library, which a full graph records as one each; see `ops`.

A tape then keeps no dequantised weight, and a CPU reads which experts were chosen.
"""

from __future__ import annotations

import torch

from .expert_mlp import PLAIN_EXPERTS, ExpertForm
from .fp8_experts import Fp8Matrices, fp8_experts
from .packed_experts import PackedMatrices, packed_experts

torch.library.define(
    "baton::fp8_experts",
    "(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scales, Tensor down, "
    "Tensor down_scales, bool is_invariant, int first, int total) -> Tensor",
)
torch.library.define(
    "baton::packed_experts",
    "(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scales, int gate_up_group, "
    "Tensor down, Tensor down_scales, int down_group, bool is_invariant, Tensor? gate_up_bias, "
    "Tensor? down_bias, float limit, float alpha, int first, int total) -> Tensor",
)


def _fp8_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    is_invariant: bool,
    first: int,
    total: int,
) -> torch.Tensor:
    matrices = Fp8Matrices(gate_up, gate_up_scales), Fp8Matrices(down, down_scales)
    form = ExpertForm(first=first, total=total)
    return fp8_experts(x, ids, weights, *matrices, is_invariant, form)


def _packed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_group: int,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_group: int,
    is_invariant: bool,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float,
    alpha: float,
    first: int,
    total: int,
) -> torch.Tensor:
    matrices = (
        PackedMatrices(gate_up, gate_up_scales, gate_up_group),
        PackedMatrices(down, down_scales, down_group),
    )
    form = ExpertForm(gate_up_bias, down_bias, limit, alpha, first, total)
    return packed_experts(x, ids, weights, *matrices, is_invariant, form)


for _name, _form in (("baton::fp8_experts", _fp8_experts), ("baton::packed_experts", _packed_experts)):
    torch.library.impl(_name, ("cpu", "cuda"), _form)
    torch.library.register_fake(_name, _form)


def recorded_fp8_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Fp8Matrices,
    down: Fp8Matrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`fp8_experts.fp8_experts` as one operation; of `form` where the experts are."""
    out: torch.Tensor = torch.ops.baton.fp8_experts.default(
        x, ids, weights, *gate_up, *down, is_invariant, form.first, form.total
    )
    return out


def recorded_packed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`packed_experts.packed_experts` as one operation."""
    out: torch.Tensor = torch.ops.baton.packed_experts.default(
        x, ids, weights, *gate_up, *down, is_invariant, *form
    )
    return out
