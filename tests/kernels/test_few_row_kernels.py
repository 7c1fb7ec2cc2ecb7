"""The kernels of steps of few rows, in Triton's interpreter, equal their definitions."""

from collections.abc import Callable

import pytest
from baton.tests.kernels.few_row_cases import few_row_cases

CASES = list(few_row_cases())
CHECKS = [check for check, _ in CASES]
QUICK = [CASES[CHECKS.index(check)] for check in dict.fromkeys(CHECKS)]  # one of each


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        pytest.param(*case, id=case[0].__name__[6:], marks=[] if case in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_kernel_equals_its_definition(
    check: Callable[..., None], arguments: tuple[object, ...], interpreter: None
):
    check("cpu", *arguments)
