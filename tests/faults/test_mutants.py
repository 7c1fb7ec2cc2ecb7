"""A row proves something: with its defence switched off it fails, for the reason that it is there for."""

from dataclasses import dataclass, replace

import pytest
from baton.tests.faults.rows import attempt, load
from baton.tests.faults.rows_damage import under_another_first_token as another_token
from baton.tests.faults.rows_network import under_swaps
from baton.tests.faults.rows_stalls import under_reuse
from baton.tests.faults.rows_strangers import keyed
from baton.tests.faults.testbed import Bed

HERE = "baton.tests.faults.mutants:"
NO_DIGEST = {"*": [f"{HERE}no_digest"]}
NO_CANCEL = {"prefill-0": [f"{HERE}no_cancel"]}
NO_BREAKER = {"router": [f"{HERE}no_breaker"], "decode": ["baton.tests.faults.rows_storms:steps_of_a_device"]}
NO_THIRD_CHANCE = {"router": [f"{HERE}no_third_chance"]}
NO_CHECKSUM = {"*": [f"{HERE}no_checksum"]}
NO_LIMIT = {"*": [f"{HERE}no_frame_limit"]}
NO_TRACKER = {"prefill-0": [f"{HERE}no_tracker"]}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A row without a defence: `says` is in what it fails with."""

    row: str
    says: str
    prepare: dict
    play: object = None


def without_enforcement(scene):
    return keyed(scene, [f"{HERE}zap_dies", f"{HERE}no_zap_enforcement"])


def without_reuse(scene):
    """The links are slow, and yet every block has its digest."""
    under_reuse(scene)
    wrong = scene.counted("decode", "digest_mismatches")
    assert wrong == 0, f"{wrong:g} wrong digests"


MUTANTS = {
    "no digest, another request's bytes": Mutant(
        row="F35b", says="I2: token", prepare=NO_DIGEST, play=under_swaps
    ),
    "memory is reused before it is sent": Mutant(
        row="F34", says="wrong digests", prepare=NO_TRACKER, play=without_reuse
    ),
    "no cancel after prefill": Mutant(row="F14", says="prefill's pages free", prepare=NO_CANCEL),
    "no checksum of messages": Mutant(row="F33c", says="I2: token", prepare=NO_CHECKSUM, play=another_token),
    "no frame limit": Mutant(row="F33q", says="MiB more", prepare=NO_LIMIT),
    "no breaker": Mutant(row="F50", says="ejected after", prepare=NO_BREAKER),
    "two deaths are proof": Mutant(row="F57", says="request_quarantined", prepare=NO_THIRD_CHANCE),
    "ZAP is not enforced": Mutant(row="F55", says="with nobody to ask", prepare={}, play=without_enforcement),
}
LEARNING = (
    under_swaps,
    without_reuse,
    another_token,
)  # with the defence it holds first, and shows what the tokens are
TRIES = 3  # a fault that needs a coincidence may not happen in a run; a defence that is there holds in all
QUICK = ("no frame limit",)  # the cheapest of those that `tests/sim/test_mutants.py` does not show, too


@pytest.fixture(scope="module")
def all_mutants_bed(tmp_path_factory):
    with Bed(tmp_path_factory.mktemp("mutants")) as made:
        yield made


@pytest.fixture
def bed(all_mutants_bed):
    all_mutants_bed.references.clear()  # a mutant may have shown wrong ones
    return all_mutants_bed


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MUTANTS]
)
def test_a_row_fails_without_its_defence(bed, name):
    mutant = MUTANTS[name]
    row = load()[mutant.row]
    if mutant.play in LEARNING:
        whole = attempt(bed, replace(row, play=mutant.play, settings={**row.settings, "prepare": {}}))
        assert not whole.problems, whole.problems
    broken = replace(row, play=mutant.play or row.play, settings={**row.settings, "prepare": mutant.prepare})
    problems = []
    for _ in range(TRIES):
        problems += attempt(bed, broken).problems
        if any(mutant.says in problem for problem in problems):
            return
    raise AssertionError(problems or "it holds")
