"""Every row of the fault table holds; the quick ones are in `make test-cluster`."""

import pytest
from baton.tests.faults.rows import attempt, load
from baton.tests.faults.testbed import Bed

TRIES = 3  # of a row that is late, on a machine that other tests share; `make faults` plays each once
ROWS = [
    pytest.param(row, id=f"{name} {row.fault}", marks=[] if row.is_quick else [pytest.mark.slow])
    for name, row in load().items()
]


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    with Bed(tmp_path_factory.mktemp("faults")) as made:
        yield made


@pytest.mark.parametrize("row", ROWS)
def test_a_fault_stays_within_the_losses_that_its_row_allows(bed, row):
    for _ in range(TRIES):
        outcome = attempt(bed, row)
        if outcome.skipped:
            pytest.skip(outcome.skipped)
        if not outcome.is_late:
            break
    assert not outcome.problems, "\n".join(outcome.problems)
