"""A request's committed tokens and its end."""

import pytest
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams

EOS = (2,)


def make_request(prompt=(5, 6, 7), **sampling):
    return Request(room="a" * 32, epoch=0, prompt_ids=list(prompt), sampling=SamplingParams(**sampling))


def test_tokens_after_the_one_that_ends_are_not_committed():
    request = make_request(max_new_tokens=10)
    assert request.append([8, 2, 9], EOS) == 2
    assert request.output_ids == [8, 2]
    assert request.finish_reason == "stop"


def test_length_is_counted_over_all_commits():
    request = make_request(max_new_tokens=3)
    assert request.append([8, 9], EOS) == 2
    assert (request.is_finished, request.num_remaining) == (False, 1)
    assert request.append([10, 11], EOS) == 1
    assert (request.finish_reason, request.output_ids, request.num_remaining) == ("length", [8, 9, 10], 0)


def test_a_stop_in_the_last_place_is_a_stop():
    request = make_request(max_new_tokens=2)
    assert request.append([8, 2], EOS) == 2
    assert request.finish_reason == "stop"


def test_ignore_eos_ignores_eos_but_not_the_requests_own_stop_tokens():
    request = make_request(max_new_tokens=9, ignore_eos=True, stop_token_ids=(4,))
    assert request.append([2, 2, 4, 2], EOS) == 3
    assert request.finish_reason == "stop"


def test_an_ended_request_takes_no_more_tokens():
    request = make_request(max_new_tokens=1)
    request.append([8], EOS)
    with pytest.raises(AssertionError, match="ended already: length"):
        request.append([9], EOS)


def test_lengths_follow_from_prompt_and_output():
    request = make_request(max_new_tokens=9)
    assert (request.num_prompt, request.num_tokens) == (3, 3)
    with pytest.raises(AssertionError, match="no output"):
        _ = request.bonus_token
    request.append([8, 9], EOS)
    assert (request.num_tokens, request.bonus_token) == (5, 9)
    assert request.all_ids == [5, 6, 7, 8, 9]


def test_committing_nothing_changes_nothing():
    request = make_request()
    assert request.append([], EOS) == 0
    assert not request.is_finished


def test_repr_states_the_condition():
    request = make_request(max_new_tokens=1)
    request.append([8], EOS)
    assert repr(request) == "<Request aaaaaaaa/0 0/4 computed, 1 output, 0 pages, length>"
