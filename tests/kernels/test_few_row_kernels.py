import pytest
from baton.tests.kernels.few_row_cases import few_row_cases


@pytest.mark.parametrize(
    ("check", "arguments"), [pytest.param(*c, id=c[0].__name__) for c in few_row_cases()]
)
def test_k(check, arguments, interpreter):
    check("cpu", *arguments)
