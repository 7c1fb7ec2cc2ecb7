"""The matrix of paths on CUDA graphs, all of it."""

import pytest
import torch
from baton.tests.parity.path_matrix import ALL, Cell, Matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    torch.backends.cuda.matmul.allow_tf32 = False
    return Matrix(tmp_path_factory.mktemp("matrix"), device="cuda")


@pytest.mark.parametrize("cell", ALL, ids=str)
def test_every_path_gives_the_same_tokens_hidden_states_and_kv(matrix: Matrix, cell: Cell):
    matrix.check(cell)
