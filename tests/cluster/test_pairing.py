"""Real workers under the router's pairing policies: who gets what, as the timelines tell."""

import contextlib

import httpx
import pytest
from baton.tests.cluster.serving import complete, pages_held, random_ids, served_model, serving, sse_events, wait_until

PAGE = 16
SHORT = 8  # tokens that decode may compute itself


@pytest.fixture(scope="module")
def cluster(served_dir):
    with serving(served_dir, prefill=1, decode=2, kv_memory_mb=8, threads=1, local_prefill_max=SHORT) as running:
        yield running


def turn(cluster, ids, max_tokens=9):
    output, document = complete(cluster, ids, max_tokens=max_tokens)
    return output, document["timeline"]


@contextlib.contextmanager
def busy(cluster):
    """A stream of somebody else runs meanwhile, on the decode worker that an idle cluster prefers."""
    wait_until(lambda: not any(pages_held(cluster)[0].values()), 60, "every heartbeat says idle")
    body = {"model": served_model(cluster), "prompt": random_ids(20, 330), "max_tokens": 400, "ignore_eos": True}
    body["stream"] = True
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        next(sse_events(response))
        yield


def test_after_the_first_of_ten_turns_only_the_pages_of_new_tokens_are_handed_over(cluster):
    history = random_ids(100, 330, seed=1)
    output, first = turn(cluster, history)
    assert first["have_tokens"] == 0
    page_bytes, rest = divmod(first["handoff_bytes"], -(-len(history) // PAGE))
    assert (page_bytes > 0, rest) == (True, 0)
    for number in range(2, 11):
        known = (len(history) + len(output) - 1) // PAGE * PAGE  # whole pages; the newest token has no KV
        history = history + output + random_ids(25, 330, seed=number)
        with busy(cluster):  # the idle decode worker would be the obvious choice
            output, told = turn(cluster, history)
        assert told["decode_instance"] == first["decode_instance"], number
        assert told["have_tokens"] == known, number
        assert told["handoff_bytes"] == page_bytes * (-(-len(history) // PAGE) - known // PAGE), number
        assert told["handoff_bytes"] <= page_bytes * 4, "of a history of up to 23 pages"


def test_short_prompts_are_computed_on_decode_once_measured_times_say_that_it_is_cheaper(cluster):
    told = [turn(cluster, random_ids(SHORT, 330, seed=100 + i))[1] for i in range(8)]
    assert any(timeline["local_prefill"] for timeline in told)
    long = [turn(cluster, random_ids(SHORT + 1, 330, seed=200 + i))[1] for i in range(3)]
    assert not any(timeline["local_prefill"] for timeline in long)
