"""What decode counts on for an answer: learned by key and endpoint, doubled after retractions."""

import pytest
from baton.cluster.protocol.expected_output import expected_left
from baton.router.scheduling.output_estimates import (
    BURST,
    FIRST_GUESS,
    LEAST_MARGIN,
    MARGIN_STEP,
    MAX_KEYS,
    MOST_MARGIN,
    OutputEstimates,
    claim_of,
)

CHAT, BATCH = ("alice", "chat"), ("bob", "completion")


def test_the_first_guess_gives_way_to_what_answers_had():
    estimates = OutputEstimates()
    assert estimates.expected(CHAT) == round(FIRST_GUESS * LEAST_MARGIN)
    for _ in range(200):
        estimates.ended(CHAT, 40)
    assert 36 <= estimates.expected(CHAT) < 50
    assert estimates.expected(BATCH) == round(FIRST_GUESS * LEAST_MARGIN), "another key is not concerned"


def test_a_change_of_the_load_is_learned_within_some_hundred_answers():
    estimates = OutputEstimates()
    for _ in range(300):
        estimates.ended(CHAT, 1000)
    for _ in range(300):
        estimates.ended(CHAT, 10)
    assert estimates.expected(CHAT) < 40


def test_retractions_raise_the_margin_up_to_a_bound_and_answers_lower_it():
    estimates = OutputEstimates()
    for _ in range(BURST):
        estimates.retracted()
    assert estimates.margin == LEAST_MARGIN * MARGIN_STEP, "they come of one wrong guess"
    for _ in range(8 * BURST):
        estimates.retracted()
    assert estimates.margin == MOST_MARGIN
    for _ in range(500):
        estimates.ended(CHAT, 100)
    assert estimates.margin == LEAST_MARGIN


def test_the_least_recently_used_keys_are_forgotten():
    estimates = OutputEstimates()
    for _ in range(100):
        estimates.ended(CHAT, 1)
    for number in range(MAX_KEYS):
        estimates.ended((str(number), "chat"), 1)
    assert estimates.expected(CHAT) == round(FIRST_GUESS * LEAST_MARGIN)


@pytest.mark.parametrize(
    ("expected", "produced", "remaining", "left"),
    [
        (0, 5, 90, 90),  # unknown: all of it
        (100, 0, 4096, 100),
        (100, 60, 4096, 40),
        (100, 90, 4096, 25),  # near the expectation, or beyond it, another quarter
        (100, 700, 4096, 25),
        (100, 0, 12, 12),  # never more than what is left
        (2, 7, 50, 1),  # never nothing
    ],
)
def test_a_running_request_counts_on_what_is_left_or_a_quarter(expected, produced, remaining, left):
    assert expected_left(expected, produced, remaining) == left


def test_each_retraction_doubles_the_grant_up_to_the_whole_output():
    claims = [claim_of(100, 60, 4000, retractions) for retractions in range(9)]
    assert claims[:3] == [(40, 0), (80, 80), (160, 160)]
    assert claims[8] == (4000, 4000)
    assert claim_of(0, 60, 4000, 3) == (0, 0), "an unknown output is held whole"
