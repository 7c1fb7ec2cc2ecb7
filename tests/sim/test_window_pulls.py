"""Models with windows: pages whose KV behind windows was given up are neither offered nor pulled."""

import pytest
from baton.cluster.protocol.messages import OfferPrefix
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.pull_pair import D, PullPair, name

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = 40, 20  # tokens of a prompt, and of what its next turn says behind the answer
NEW_TOKENS = 14


@pytest.fixture(scope="module")
def mistral(toy_checkpoint):
    return toy_checkpoint("mistral")


def two_turns(target, model, **settings):
    """A conversation whose second turn is to be pulled: the pair, and what that turn has said."""
    pair = PullPair(target, pages=200, max_context=200, no_draft=True, **settings)
    ids = random_ids(FIRST, seed=1)
    for number, room in enumerate(map(name, (1, 2))):
        pull = pair.pull(ids, tokens=(len(ids) - 1) // 4 * 4) if number else None
        pair.send(room, ids, max_new_tokens=NEW_TOKENS, pull=pull)
        pair.run(turns=3000)
        assert pair.tokens[room] == reference_greedy(model, ids, NEW_TOKENS)
        if not number:
            ids = ids + pair.tokens[room] + random_ids(SECOND, seed=2)
    return pair


def test_window_pages_are_computed_again_instead_of_pulled(mistral):
    model = reference_model(mistral)
    pair = two_turns(mistral, model, window_pages=100)
    assert pair.prefill.engine.windows.is_on
    assert pair.decode.engine.windows.is_on
    assert pair.counter("prefix_pulls") == pair.counter("pulled_tokens") == 0
    assert pair.counter("prefix_offers", D) == 0
    pair.assert_nothing_is_held()


def test_an_order_to_offer_window_pages_is_declined(mistral):
    """Also for a room that has found the prefix, with the windows of its end alone."""
    pair = two_turns(mistral, reference_model(mistral), window_pages=100)
    ids = random_ids(FIRST, seed=1)
    pair.send(name(3), ids + random_ids(SECOND, seed=3), max_new_tokens=NEW_TOKENS)
    room = pair.decode.queues.get(name(3), 0)
    assert room.have > 0
    assert pair.counter("offers_declined", D) == 1, "that of the second turn"
    for number, more in enumerate(({"room": name(3)}, {"prompt_ids": ids}), 2):
        transfer = f"{number:031x}e"
        pair.decode.offers.take(OfferPrefix(instance=D, transfer=transfer, tokens=room.have, **more))
        assert not pair.decode.offers.held_pages
        assert pair.counter("offers_declined", D) == number
    assert pair.counter("prefix_offers", D) == 0
    pair.run()
    pair.assert_nothing_is_held()


def test_prefixes_are_pulled_where_all_pages_are_kept(mistral):
    pair = PullPair(mistral, pages=200, max_context=200, no_draft=True, window_kv="keep")
    model, ids = reference_model(mistral), random_ids(FIRST, seed=1)
    for number, room in enumerate(map(name, (1, 2))):
        pair.send(room, ids, max_new_tokens=NEW_TOKENS, pull=pair.pull(ids) if number else None)
        pair.run(turns=3000)
        assert pair.tokens[room] == reference_greedy(model, ids, NEW_TOKENS)
        ids = ids + pair.tokens[room] + random_ids(SECOND, seed=2)
    assert pair.counter("pulled_tokens") > 0
    pair.assert_nothing_is_held()
