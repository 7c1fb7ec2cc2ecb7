"""A fault that one of two GPUs meets at the start takes the same graphs from both, and no token changes.

The fault is one of rank 0. On a GPU a forward that cannot be recorded has not run yet, so it is voted on.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from baton.tests.gpu.rank_checks import check_plant, in_own_process
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.test_aggregated import LAYERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FAULTS = ("capture fails once", "capture fails", "fails inside a forward", "differs")


@pytest.mark.parametrize("plant", FAULTS)
def test_both_gpus_drop_what_one_cannot_capture_or_finds_wrong(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, plant: str
):
    target = toy_checkpoint("llama", num_hidden_layers=4)
    head = write_head(tmp_path, head_config(2, LAYERS), head_tensors())
    in_own_process(check_plant, target, head, plant)
