"""Samples of a decode worker that drafts with MTP modules follow the target's law; wrong rules fail it."""

from pathlib import Path

import pytest
from baton.engine.speculative.step import fused_step
from baton.tests.parity.mtp_laws import write_kinds
from baton.tests.parity.test_sampled_law import (
    FEW,
    GROSS_AGAIN,
    MANY,
    QUICK,
    is_refuted,
    sample,
    threshold_of_99_percent,
    write_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    path = tmp_path_factory.mktemp("markov")
    target = write_target(path / "target")
    return {kind: (target, head) for kind, head in write_kinds(path, target).items()}


@pytest.mark.parametrize(
    "kind", ["chained", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("independent", "shared"))]
)
def test_sequences_of_a_decode_worker_have_the_targets_law(models, kind):
    assert not is_refuted(sample(models[kind], QUICK))


@pytest.mark.parametrize("rule", GROSS_AGAIN)
def test_a_wrong_rule_is_refuted_with_modules(models, monkeypatch, rule):
    monkeypatch.setattr(fused_step, "verify_drafts", rule)
    assert is_refuted(sample(models["chained"], FEW))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["chained", "independent", "shared"])
def test_a_million_sequences_have_the_targets_law(models, kind):
    assert not is_refuted(sample(models[kind], MANY))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_sequences_refute_a_threshold_of_99_percent(models, monkeypatch):
    monkeypatch.setattr(fused_step, "verify_drafts", threshold_of_99_percent)
    assert is_refuted(sample(models["chained"], MANY))
