"""The kernels of steps of few rows, in Triton's interpreter, equal their definitions."""

from collections.abc import Callable

import pytest
import torch
from baton.tests.kernels.few_row_cases import check_few_experts, check_latent_step, few_row_cases

CASES = list(few_row_cases())
CHECKS = [check for check, _ in CASES]
# one of each, and the experts in 4 bits or of gpt-oss in float32, whose cases have more arguments
QUICK = [CASES[CHECKS.index(check)] for check in dict.fromkeys(CHECKS)]
QUICK += [
    case
    for case in CASES
    if case[0] is check_few_experts and case[1][6:7] == (torch.float32,) and case[1][7:]
]


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


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        pytest.param(*case, id=case[0].__name__[6:])
        for case in CASES
        if case in QUICK or case[0] is check_latent_step
    ],
)
def test_memory_that_nobody_wrote_may_hold_anything(
    check: Callable[..., None],
    arguments: tuple[object, ...],
    interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
):
    """Infinities, times weights of 0 too: the interpreter fails where a kernel multiplies them."""
    empty = torch.empty

    def filled(*sizes: object, **options: object) -> torch.Tensor:
        made = empty(*sizes, **options)
        return made.fill_(torch.inf) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)
    check("cpu", *arguments)
