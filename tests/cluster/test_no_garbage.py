"""The objects of a request are freed with their last reference, so that the garbage collector has no work."""

import httpx
import pytest
from baton.router.http.exchange import Exchange
from baton.router.rooms.room import Room
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import ClientRequest, Entry
from baton.tests.cluster.router_fakes import ANSWER, MODEL, RunningRouter, Script, until, without_collector

KINDS = (Entry, Exchange, Inbox, ClientRequest, Room)
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 200}


@pytest.fixture
def url(tmp_path, model_dir):
    running = RunningRouter(tmp_path, model_dir=model_dir)
    running.pair(Script(running.tokenizer.encode(ANSWER)))
    yield running.url
    running.close()


@pytest.mark.parametrize(
    ("more", "status"),
    [({}, 200), ({"stream": True}, 200), ({"n": 3}, 200), ({"stop": "is"}, 200), ({"max_tokens": -1}, 400)],
    ids=["whole", "stream", "choices", "stopped", "refused"],
)
def test_a_request_that_is_over_leaves_nothing_to_the_garbage_collector(url, more, status):
    def ask():
        assert httpx.post(f"{url}/v1/completions", json=BODY | more, timeout=60).status_code == status

    ask()  # what a first request leaves is there for good
    with without_collector(*KINDS) as uncollected:
        ask()
        until(lambda: uncollected() == [], "all of it is freed")
