"""Output of earlier attempts: prompt for the engine, output for penalties and for the end of the request."""

from baton.engine.request import Request
from baton.engine.sampler import sampling_rows
from baton.engine.sampling_params import SamplingParams


def request_of(num_prior_output, **sampling):
    return Request(
        room="a" * 32,
        epoch=1,
        prompt_ids=[5, 6, 7, 8],
        sampling=SamplingParams(**{"frequency_penalty": 1.0, "max_new_tokens": 4, **sampling}),
        num_prior_output=num_prior_output,
    )


def test_penalised_rows_split_prompt_and_output_at_the_same_positions():
    request = request_of(2)
    request.append([9], ())
    rows = sampling_rows(request, [10])
    assert [(row.prompt_ids, row.output_ids, row.drafts) for row in rows] == [
        ([5, 6], [7, 8, 9], []),
        ([5, 6], [7, 8, 9], [10]),
    ]
    assert [row.position for row in rows] == [5, 6]


def test_without_prior_output_or_penalties_no_list_is_copied():
    for request in (request_of(0), request_of(2, frequency_penalty=0.0)):
        (row,) = sampling_rows(request)
        assert row.prompt_ids is request.prompt_ids
        assert row.output_ids is request.output_ids


def test_a_number_beyond_the_prompt_makes_all_of_it_output():
    assert request_of(9).asked_and_chosen == ([], [5, 6, 7, 8])


def test_lengths_count_the_prior_output_as_prompt():
    request = request_of(2)
    assert (request.num_prompt, request.num_output, request.num_remaining, request.num_tokens) == (4, 0, 4, 4)


def test_only_prior_output_can_have_ended_the_request():
    assert request_of(1).ends_with_prompt((8,))
    assert request_of(1, stop_token_ids=(8,)).ends_with_prompt(())
    assert not request_of(0).ends_with_prompt((8,))
    assert not request_of(1, ignore_eos=True).ends_with_prompt((8,))
    assert not request_of(3).ends_with_prompt((7,))
