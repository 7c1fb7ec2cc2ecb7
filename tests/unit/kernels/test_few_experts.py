"""Which layers of experts share launches: a form that the kernels do not compute is never joined."""

import pytest
import torch
from baton.kernels.expert_mlp import ExpertForm
from baton.kernels.few_experts import (
    FewExperts,
    Matrices,
    can_join_experts,
    few_experts,
    should_join_experts,
)
from baton.kernels.fp8_experts import Fp8Matrices
from baton.kernels.fp8_scales import FP8
from baton.kernels.normed_linear import UnscaledRows
from baton.kernels.packed_experts import MXFP4, PackedMatrices
from baton.kernels.route_experts import Routing

HIDDEN, INNER = 64, 32
BIAS = torch.zeros(16, 2 * INNER)


def experts_of(
    *, count: int = 16, inner: int = INNER, shared: int = 0, is_packed: bool = False, is_fp8: bool = False,
    num_groups: int = 1, form: ExpertForm | None = None,
) -> FewExperts:  # fmt: skip
    """Experts without values; `shared`: the inner values of their shared MLP."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def matrices(out_size: int, in_size: int) -> Matrices:
        if is_fp8:
            values = empty(count, out_size, in_size, dtype=FP8)
            return Fp8Matrices(values, empty(count, out_size, dtype=torch.float32))
        if not is_packed:
            return empty(count, out_size, in_size)
        parts = -(-in_size // 128)
        words = empty(count, out_size, 32 * parts, dtype=torch.int16)
        return PackedMatrices(words, empty(count, parts, out_size, dtype=torch.int32), MXFP4)

    return FewExperts(
        Routing(top_k=4, is_normalised=True, num_groups=num_groups, kept_groups=num_groups),
        empty(count, HIDDEN),
        matrices(2 * inner, HIDDEN),
        matrices(HIDDEN, inner),
        shared_gate_up=empty(2 * shared, HIDDEN) if shared else None,
        shared_down=empty(HIDDEN, shared) if shared else None,
        form=form or ExpertForm(),
    )


@pytest.mark.parametrize(
    ("given", "is_joined"),
    [
        ({}, True),
        ({"is_packed": True}, True),
        ({"is_fp8": True}, True),
        ({"shared": 2 * INNER}, True),
        ({"form": ExpertForm(gate_up_bias=BIAS, limit=7.0, alpha=1.7)}, True),
        ({"count": 128}, True),
        ({"count": 129}, False),
        ({"num_groups": 2}, False),
        ({"shared": INNER + 8}, False),
        ({"shared": INNER, "is_packed": True}, False),
        ({"shared": INNER, "is_fp8": True}, False),
        ({"shared": INNER, "form": ExpertForm(limit=7.0)}, False),
        ({"shared": INNER, "form": ExpertForm(gate_up_bias=BIAS)}, False),
        ({"shared": INNER, "form": ExpertForm(down_bias=BIAS)}, False),
        ({"form": ExpertForm(first=8, total=32)}, False),
    ],
)
def test_only_known_forms_are_joined(given: dict[str, object], is_joined: bool):
    assert can_join_experts(experts_of(**given)) is is_joined


@pytest.mark.parametrize(
    ("inner", "is_packed", "most"),
    [(768, False, 4), (769, False, 3), (1024, False, 3), (1025, False, 2), (2880, False, 2), (2881, False, 1),
     (5760, False, 1), (5761, False, 0), (768, True, 2), (2880, True, 2), (2881, True, 1), (5761, True, 0)],
)  # fmt: skip
def test_rows_read_their_experts_apart_only_while_these_are_small(inner: int, is_packed: bool, most: int):
    experts = experts_of(inner=inner, is_packed=is_packed)
    assert [rows for rows in range(1, 6) if should_join_experts(experts, rows)] == list(range(1, most + 1))


def test_a_form_that_is_not_joined_is_refused():
    rows = UnscaledRows(torch.zeros(1, HIDDEN), torch.ones(1, 1), 1e-5)
    with pytest.raises(ValueError, match="some elsewhere, or shared ones of another size or form"):
        few_experts(rows, experts_of(form=ExpertForm(first=8, total=32)), torch.zeros(1, HIDDEN), None)
