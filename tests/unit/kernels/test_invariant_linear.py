"""Batch-invariant products never take the kernel of one row, which adds in another order."""

import pytest
import torch
from baton.kernels import invariant_linear, skinny_linear
from baton.kernels.skinny_linear import MIN_ROWS_TILE, SHARED_BYTES
from baton.kernels.triton_jit import planned_launches

HIDDEN, OUTPUTS = 256, 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_row_has_tiles_of_many(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: SHARED_BYTES)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    weight = torch.zeros(OUTPUTS, HIDDEN, dtype=dtype)
    with planned_launches() as found:
        for num_rows in (1, 2, 16, 33, 300):
            invariant_linear.invariant_linear(torch.zeros(num_rows, HIDDEN, dtype=dtype), weight)
            invariant_linear.invariant_logits(torch.zeros(num_rows, HIDDEN, dtype=dtype), weight)
    assert len(found) == 10
    assert min(launch.options["BLOCK_ROWS"] for launch in found) >= MIN_ROWS_TILE
