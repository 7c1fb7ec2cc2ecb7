"""Which kernel computes logits on a GPU."""

import pytest
import torch
from baton.kernels import skinny_linear
from baton.kernels.logits import MIN_VOCABULARY, float32_logits
from baton.kernels.triton_jit import planned_launches
from torch._subclasses.fake_tensor import FakeTensorMode


def test_logits_of_a_single_row_need_no_matrix_instruction(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    monkeypatch.setattr(skinny_linear, "shared_bytes", lambda device: skinny_linear.SHARED_BYTES)
    launches = []
    with FakeTensorMode():
        table = torch.empty(MIN_VOCABULARY, 64, dtype=torch.bfloat16, device="cuda")
        few, turned = table.new_empty(128, 64), table.new_empty(64, MIN_VOCABULARY).t()
        for num_rows, weight in ((1, table), (2, table), (1, few), (1, turned)):
            x = torch.empty(num_rows, 64, dtype=torch.bfloat16, device="cuda")
            with planned_launches() as found:
                logits = float32_logits(x, weight)
            assert (logits.shape, logits.dtype) == ((num_rows, len(weight)), torch.float32)
            launches.append([launch.variant[0] for launch in found])
    assert launches == [["_skinny_kernel"], [], [], []]
