"""The matrix of paths, with graphs of a device."""

import pytest
import torch
from baton.tests.parity.path_matrix import Matrix


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    torch.backends.cuda.matmul.allow_tf32 = False
    return Matrix(tmp_path_factory.mktemp("matrix"), device="cuda")
