"""The matrix of paths on tapes.

`make test` runs cells of eight engines that have every two values of any two fields, and every combination of
models, shape and path; `make test-full` runs all.
"""

import pytest
from baton.tests.parity.path_matrix import AHEAD, ALL, QUICK, Cell, Matrix, combined_in, quick_ahead

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


def test_the_quick_cells_combine_every_two_values_of_any_two_fields():
    assert set().union(*map(combined_in, QUICK)) == set().union(*map(combined_in, ALL))


CHOSEN = {*QUICK, *quick_ahead()}


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=() if cell in CHOSEN else pytest.mark.slow)
        for cell in ALL + AHEAD
    ],
)
def test_every_path_gives_the_same_tokens_hidden_states_and_kv(matrix: Matrix, cell: Cell):
    matrix.check(cell)
