"""Every kernel, in Triton's interpreter, equals its definition, on odd shapes and both dtypes."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from baton.tests.kernels.attention_cases import attention_cases, tree_cases
from baton.tests.kernels.cases import pool_cases, rows_cases
from baton.tests.kernels.choice_cases import choice_cases
from baton.tests.kernels.expert_cases import expert_cases
from baton.tests.kernels.latent_cases import latent_cases
from baton.tests.kernels.quant_cases import quant_cases
from baton.tests.kernels.quant_expert_cases import quant_expert_cases

QUICK = [*attention_cases(is_whole=False), *quant_expert_cases(is_whole=False)]
OTHERS = [
    *rows_cases(),
    *pool_cases(),
    *tree_cases(),
    *choice_cases(),
    *expert_cases(),
    *quant_cases(),
    *latent_cases(),
]


def by_dtype(case: tuple[Callable[..., None], tuple[object, ...]]) -> tuple[str, torch.dtype | None]:
    """The case without its dtype, and the dtype."""
    check, arguments = case
    dtypes = [each for each in arguments if isinstance(each, torch.dtype)]
    rest = [each for each in arguments if not isinstance(each, torch.dtype)]
    return f"{check.__name__} {rest}", dtypes[0] if dtypes else None


def quick_others() -> Iterator[bool]:
    """For each of OTHERS whether `make test` runs it: of a case in both dtypes one, by turns."""
    known = [by_dtype(case) for case in OTHERS]
    counts = Counter(rest for rest, dtype in known if dtype is not None)
    turns = {rest: (torch.float32, torch.bfloat16)[number % 2] for number, rest in enumerate(counts)}
    for rest, dtype in known:
        yield counts[rest] < 2 or dtype == turns[rest]


CASES = [
    pytest.param(*case, id=case[0].__name__[6:], marks=[] if case in QUICK else pytest.mark.slow)
    for case in (*attention_cases(), *quant_expert_cases())
] + [
    pytest.param(*case, id=case[0].__name__[6:], marks=() if is_quick else pytest.mark.slow)
    for case, is_quick in zip(OTHERS, quick_others(), strict=True)
]


@pytest.mark.parametrize(("check", "arguments"), CASES)
def test_kernel_equals_its_definition(
    check: Callable[..., None], arguments: tuple[object, ...], interpreter: None
):
    check("cpu", *arguments)
