"""Host tensors that cross to a device together arrive as they were."""

import numpy as np
import pytest
import torch
from baton.engine.host_copy import ALIGNMENT, all_to_device, arrays_to_device, pack, unpacked

VALUES = (
    torch.tensor([1, -(1 << 60), 7]),
    torch.empty(0, dtype=torch.int64),
    torch.tensor([True, False, True]),
    torch.tensor([[0.1, float("inf")], [2.5, -3.0]], dtype=torch.float64),
    torch.arange(6).reshape(2, 3).t(),
    torch.tensor([5], dtype=torch.int32),
    torch.tensor([[0.5, 1.5, 2.5]], dtype=torch.float64).unbind(1)[
        1
    ],  # one element, with the stride of three
)


@pytest.mark.parametrize("count", range(len(VALUES) + 1))
def test_tensors_of_any_dtype_and_shape_survive_packing(count: int):
    values = VALUES[:count]
    packed = pack(values)
    for found, expected in zip(unpacked(packed, values), values, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
        assert (found.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0 or not found.numel()
    for found, expected in zip(all_to_device(values, torch.device("cpu")), values, strict=True):
        assert torch.equal(found, expected)


def test_arrays_of_any_shape_arrive_aligned_in_one_allocation():
    arrays = [
        np.arange(n, dtype=np.int64).reshape(shape) for n, shape in ((3, 3), (0, 0), (4, (2, 2)), (1, 1))
    ]
    found = arrays_to_device(arrays, torch.device("cpu"))
    for tensor, array in zip(found, arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert (tensor.data_ptr() - found[0].data_ptr()) % ALIGNMENT == 0
