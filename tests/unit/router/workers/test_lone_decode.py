"""Decode workers without a prefill worker are noticed, unless that is meant."""

import logging
from dataclasses import replace

import pytest
from baton.router.workers.lone_decode import LONE_DECODE_S, LoneDecode, lacks_prefill
from baton.tests.unit.router.workers.test_eligibility import worker

P, D = worker("a", "prefill"), worker("d", "decode")
AGGREGATED = replace(worker("e", "decode"), is_aggregated=True)
STARTING = worker("b", "prefill", is_serving=False)


@pytest.mark.parametrize(
    ("workers", "lacks"),
    [
        ([D], True),
        ([D, STARTING], True),
        ([P, D], False),
        ([AGGREGATED], False),
        ([AGGREGATED, D], False),
        ([P], False),
        ([], False),
    ],
)
def test_decode_lacks_prefill_where_no_worker_is_meant_to_compute_prompts(workers, lacks):
    assert lacks_prefill(workers) == lacks


def test_it_is_said_once_each_time_that_it_lasts(caplog):
    caplog.set_level(logging.INFO)
    watch = LoneDecode()

    def said(workers, now):
        caplog.clear()
        watch.look(workers, now)
        return [(record.levelname, record.message) for record in caplog.records]

    warned = [("WARNING", "no prefill worker serves: decode workers compute prompts, or requests wait")]
    assert said([D], 100.0) == []
    assert said([D], 100.0 + LONE_DECODE_S - 0.1) == []
    assert said([P, D], 110.0) == [], "it started a little later"
    assert said([D], 111.0) == []
    assert said([D], 111.0 + LONE_DECODE_S) == warned
    assert said([D], 200.0) == []
    assert said([P, D], 201.0) == [("INFO", "a prefill worker serves again")]
    assert said([D], 300.0) == []
    assert said([D], 400.0) == warned
