"""The matrix of paths on CUDA graphs, its cells of the oracle pair: a file of their own, so that they have a process."""

import pytest
import torch
from baton.tests.parity.path_matrix import ALL, Cell, Matrix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CELLS = [cell for cell in ALL if cell.pair == "oracle"]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_path_gives_the_same_tokens_hidden_states_and_kv(matrix: Matrix, cell: Cell):
    matrix.check(cell)
