"""A checkpoint with quantised experts generates the tokens that transformers generates with their values."""

from collections.abc import Callable
from pathlib import Path

import pytest
from baton.tests.parity.quant_toys import EXPERTS, SHAPE, write_quantised
from baton.tests.parity.test_quantised import assert_same_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = (("deepseek_v3", "block"), ("mixtral", "tensor"), ("qwen3_moe", "awq"))
CASES = [
    *QUICK,
    ("qwen3_moe", "block"),
    ("qwen2_moe", "channel"),
    ("glm4_moe", "gptq"),
    ("mixtral", "gptq_v2"),
    ("deepseek_v3", "channel"),
    ("deepseek_v3", "awq"),
]


@pytest.mark.parametrize(
    ("family", "form"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_each_form_equals_transformers_with_its_values(
    toy_checkpoint: Callable[..., Path], tmp_path: Path, family: str, form: str
):
    values = write_quantised(toy_checkpoint(family, **SHAPE | EXPERTS[family]), tmp_path / form, form)
    assert_same_tokens(tmp_path / form, values, seed=5)
