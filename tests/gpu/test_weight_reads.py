"""Many small tensors reach a GPU through few reads, in their own dtype or in another."""

from pathlib import Path

import pytest
import torch
from baton.engine.models.safetensors_file import SafetensorsFile
from baton.engine.models.weight_reader import pieces_of, read_pieces, reads_of
from baton.kernels.fp8_scales import FP8
from safetensors.torch import save_file

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NUM_TENSORS = 5000


def test_small_tensors_land_in_their_places(tmp_path: Path):
    """Two stored dtypes of three are those of the targets; values and scales of experts take turns so."""
    path, stored = tmp_path / "model.safetensors", (FP8, torch.float32, torch.bfloat16)
    targets = {FP8: FP8, torch.float32: torch.float32, torch.bfloat16: torch.float32}
    wanted = {f"{i:04}": torch.randn(4 * (1 + i * 37 % 900)).to(stored[i % 3]) for i in range(NUM_TENSORS)}
    save_file(wanted, path)
    made, pieces = {}, []
    for each in SafetensorsFile.read(path).tensors:
        assert each.dtype is not None
        made[each.name] = torch.empty(each.shape, dtype=targets[each.dtype], device="cuda")
        pieces += pieces_of(path, each.first, each.dtype, made[each.name])
    assert len(reads_of(pieces)) < 10
    read_pieces(pieces)
    torch.cuda.synchronize()
    for name, tensor in wanted.items():
        found = made[name].cpu()
        assert torch.equal(found.float(), tensor.float()), name
