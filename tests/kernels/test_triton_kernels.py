"""Every kernel, in Triton's interpreter, equals its definition, on odd shapes and both dtypes."""

from collections.abc import Callable

import pytest
from baton.tests.kernels.attention_cases import attention_cases, tree_cases
from baton.tests.kernels.cases import pool_cases, rows_cases
from baton.tests.kernels.choice_cases import choice_cases

CASES = [*rows_cases(), *pool_cases(), *attention_cases(), *tree_cases(), *choice_cases()]


@pytest.mark.parametrize(("check", "arguments"), CASES, ids=[check.__name__[6:] for check, _ in CASES])
def test_kernel_equals_its_definition(
    check: Callable[..., None], arguments: tuple[object, ...], interpreter: None
):
    check("cpu", *arguments)
