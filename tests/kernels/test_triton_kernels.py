"""Every kernel, in Triton's interpreter, equals its definition, on odd shapes and both dtypes."""

from collections.abc import Callable

import pytest
from baton.tests.kernels.attention_cases import attention_cases, tree_cases
from baton.tests.kernels.cases import pool_cases, rows_cases
from baton.tests.kernels.choice_cases import choice_cases
from baton.tests.kernels.expert_cases import expert_cases
from baton.tests.kernels.latent_cases import latent_cases
from baton.tests.kernels.quant_cases import quant_cases
from baton.tests.kernels.quant_expert_cases import quant_expert_cases

QUICK = [*attention_cases(is_whole=False), *quant_expert_cases(is_whole=False)]
CASES = [
    pytest.param(*case, id=case[0].__name__[6:], marks=[] if case in QUICK else pytest.mark.slow)
    for case in (*attention_cases(), *quant_expert_cases())
] + [
    pytest.param(*case, id=case[0].__name__[6:])
    for case in (
        *rows_cases(),
        *pool_cases(),
        *tree_cases(),
        *choice_cases(),
        *expert_cases(),
        *quant_cases(),
        *latent_cases(),
    )
]


@pytest.mark.parametrize(("check", "arguments"), CASES)
def test_kernel_equals_its_definition(
    check: Callable[..., None], arguments: tuple[object, ...], interpreter: None
):
    check("cpu", *arguments)
