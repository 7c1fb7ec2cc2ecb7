"""An answer resumed at any of its tokens goes on unchanged, at both workers, whatever the sampling."""

import pytest
from baton.cluster.protocol.messages import Finished, Prefill, Reserve, Sampling
from baton.tests.sim.worker_pair import ENDPOINT, D, P, Pair, name

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
PROMPT = [7, 30, 31, 7, 32, 33, 7]
WAYS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.98},
    "frequency and presence": {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
    "all penalties": {"temperature": 0.7, "seed": 6, "frequency_penalty": 1.5, "repetition_penalty": 1.4},
}


@pytest.fixture(scope="module")
def pair(toy_checkpoint):
    return Pair(toy_checkpoint("llama", num_hidden_layers=2), pages=96)


def answer(pair, room, prompt_ids, num_output=0, **sampling):
    """The tokens of a room whose last `num_output` prompt ids are output."""
    common = {
        "room": room,
        "epoch": 0,
        "prompt_ids": prompt_ids,
        "num_output": num_output,
        "sampling": Sampling(**{"ignore_eos": True, "max_new_tokens": NUM_TOKENS - num_output, **sampling}),
        "deadline_ms": 0,
    }
    reserve = Reserve(instance=D, prefill_endpoint=ENDPOINT, prefill_instance=P, **common)
    pair.decode.handle(reserve, pair.clock.now)
    pair.prefill.handle(Prefill(instance=P, **common), pair.clock.now)
    pair.run()
    return pair.tokens.get(room, [])


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_resumed_at_any_token_is_the_same_answer(pair, way):
    start = 100 * list(WAYS).index(way)
    whole = answer(pair, name(start), PROMPT, **WAYS[way])
    assert len(whole) == NUM_TOKENS
    for cut in range(1, NUM_TOKENS):
        rest = answer(pair, name(start + cut), PROMPT + whole[:cut], cut, **WAYS[way])
        assert whole[:cut] + rest == whole, f"taken up at {cut}"


def test_penalties_need_to_know_which_tokens_are_output(pair):
    way = WAYS["frequency and presence"]
    whole = answer(pair, name(900), PROMPT, **way)
    taken_for_prompt = [
        whole[:cut]
        + answer(pair, name(900 + cut), PROMPT + whole[:cut], 0, **way | {"max_new_tokens": NUM_TOKENS - cut})
        for cut in range(1, NUM_TOKENS)
    ]
    assert any(tokens != whole for tokens in taken_for_prompt), "else the test above would show nothing"


def test_resuming_a_complete_answer_computes_nothing(pair):
    stop = 40
    steps = pair.prefill.stats().counters["steps"]
    common = {
        "room": name(990),
        "epoch": 1,
        "prompt_ids": [*PROMPT, 50, stop],
        "num_output": 2,
        "deadline_ms": 0,
    }
    pair.prefill.handle(
        Prefill(instance=P, sampling=Sampling(stop_token_ids=[stop]), **common), pair.clock.now
    )
    pair.run(until=lambda: name(990) in pair.ends)
    end = pair.ends[name(990)]
    assert (type(end), end.reason, end.output_tokens) == (Finished, "stop", 0)
    assert pair.prefill.stats().counters["steps"] == steps
    pair.assert_nothing_is_held()


def test_a_stop_token_at_the_end_of_the_clients_own_prompt_ends_nothing(pair):
    assert (
        len(answer(pair, name(995), [*PROMPT, 40], temperature=0.0, stop_token_ids=[40], ignore_eos=True)) > 0
    )
