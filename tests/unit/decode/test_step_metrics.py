"""Step counters of a decode worker: verifies are steps with drafts, plain steps are not."""

import logging

import pytest
from baton.decode.accept_monitor import WINDOW
from baton.decode.queues import DecodeRoom
from baton.decode.step_metrics import StepMetrics
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.step.result import StepResult


def room(number: int = 1) -> DecodeRoom:
    request = Request(room=f"{number:032x}", epoch=0, prompt_ids=[1], sampling=SamplingParams())
    return DecodeRoom(request=request, arrived=0.0, deadline=None, have=0, features=None)


def step(*rows: tuple[int, int]) -> StepResult:
    """A step with a row (tokens committed, tokens drafted) for each room."""
    return StepResult(
        tokens=[[7] * committed for committed, _ in rows],
        logprobs=[[] for _ in rows],
        accept_lens=[committed for committed, _ in rows],
        drafted=[drafted for _, drafted in rows],
        is_bad=[False for _ in rows],
        path="test",
    )


def test_steps_without_drafts_leave_the_accept_length_alone() -> None:
    metrics, rooms = StepMetrics(), [room(1), room(2)]
    metrics.step(rooms, step((1, 0), (1, 0)), 0.0)
    assert metrics.accepts.accept_length is None, "no step had drafts"
    metrics.step(rooms, step((4, 3), (1, 0)), 0.1)
    assert metrics.accepts.accept_length == 4.0
    metrics.step(rooms, step((2, 3), (1, 0)), 0.2)
    assert metrics.accepts.accept_length == 3.0
    counted = [metrics.counters[name] for name in ("steps", "tokens", "verify_steps", "drafted_tokens")]
    assert counted == [3, 10, 2, 6]
    assert metrics.counters["accepted_tokens"] == 4
    assert [(known.verify_steps, known.drafted, known.accepted) for known in rooms] == [(2, 6, 4), (0, 0, 0)]


def test_a_row_with_bad_logits_is_no_verify() -> None:
    metrics, bad = StepMetrics(), room()
    metrics.step([bad], step((0, 3)), 0.0)
    assert (metrics.accepts.accept_length, metrics.counters["verify_steps"], bad.verify_steps) == (None, 0, 0)


@pytest.mark.parametrize(("drafted", "num_warnings"), [(0, 0), (3, 1)])
def test_a_warning_follows_only_drafts_that_are_not_accepted(
    drafted: int, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, known = StepMetrics(), room()
    with caplog.at_level(logging.WARNING, "baton"):
        for i in range(2 * WINDOW):
            metrics.step([known], step((1, drafted)), i * 0.01)
    assert (
        len([entry for entry in caplog.records if "drafts are not accepted" in entry.message]) == num_warnings
    )
