"""Which layers leave the rotation of queries and keys, and their norms, to attention."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from baton.engine.models.layers import QKNorm, SelfAttention
from baton.engine.models.quant.kv_scales import KVScales
from baton.kernels.attention_form import PLAIN_FORM, AttentionForm
from baton.kernels.rotate_store import HeadNorms
from baton.kernels.row_ops import FASTEST
from baton.kernels.triton_jit import planned_launches
from baton.tests.unit.engine.warmup.test_variants import as_on_a_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

assert as_on_a_gpu

HEADS, KV_HEADS, DIM, HIDDEN, NUM_ROWS = 4, 2, 16, 64, 40  # more rows than steps of a layer are joined for
INVARIANT = replace(FASTEST, is_invariant=True)
HEAD_NORM, WHOLE_NORM = QKNorm(eps=1e-5, is_whole=False), QKNorm(eps=1e-5, is_whole=True)


class PlainAttend:
    """Attention that tells how it was called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        self.seen.append("rotated rows")
        return q


class RotatingAttend(PlainAttend):
    def rotate_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        self.seen.append("heads" if norms is None else "heads before norms")
        return heads[:, :HEADS]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "heads"),
        ({"qk_norm": HEAD_NORM}, "heads before norms"),
        ({"ops": INVARIANT}, "heads"),
        ({"qk_norm": HEAD_NORM, "ops": INVARIANT}, "rotated rows"),
        ({"qk_norm": WHOLE_NORM}, "rotated rows"),
        ({"turns": False}, "rotated rows"),
        ({"kv_scales": KVScales(KV_HEADS, "cpu")}, "rotated rows"),
    ],
    ids=["plain", "norms", "invariant", "invariant norms", "whole norms", "no rotation", "scales"],
)
def test_attention_rotates_where_the_layer_lets_it(
    as_on_a_gpu: None, settings: Mapping[str, object], expected: str
):
    found = []
    for attend in (RotatingAttend(), PlainAttend()):
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), planned_launches():
            layer = SelfAttention(
                HIDDEN,
                HIDDEN,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=DIM,
                dtype=torch.bfloat16,
                device="cpu",
                **{"ops": FASTEST, **settings},
            )
            table = torch.zeros(NUM_ROWS, DIM, dtype=torch.bfloat16)
            layer.attended(torch.zeros(NUM_ROWS, HIDDEN, dtype=torch.bfloat16), table, table, 0, attend)
        found += attend.seen
    assert found == [expected, "rotated rows"]
