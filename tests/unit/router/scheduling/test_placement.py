"""The router's estimate of prefix caches decides where a prompt is computed, with one worker of each role."""

import pytest
from baton.cluster.protocol.messages import (
    DecodeTimeline,
    Finished,
    FirstToken,
    Prefill,
    PrefillTimeline,
    Reserve,
    Reserved,
    TokenItem,
    Tokens,
)
from baton.router.scheduling.placement import PairingPolicy
from baton.router.scheduling.prefixes import SeenPrompt
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World

PROMPT = SeenPrompt([5] * 16)


def beliefs(world):
    views = {name: world.dispatcher.registry.get(name).prefixes for name in (P, D)}
    return {name: view.num_held(PROMPT.names(view.scheme)) for name, view in views.items()}


def test_with_local_prefill_decodes_report_corrects_both_known_caches():
    world = World(policy=PairingPolicy(local_prefill_max=64)).join()
    (first,), _ = world.submit(16)
    world.finish(first.room.room)
    assert beliefs(world) == {P: 1, D: 1}
    (second,), _ = world.submit(16)
    world.dispatcher.on_message(b"d", Reserved(instance=D, room=second.room.room, epoch=0, have=0))
    assert beliefs(world) == {P: 1, D: 0}, "decode has evicted it"


@pytest.mark.parametrize("limit", [0, 64])
def test_without_a_choice_nothing_is_recorded(limit):
    """Help for prefill is no such choice: no prompt is hashed while prefill is idle."""
    world = World(policy=PairingPolicy(local_prefill_queued_max=limit)).join(local_prefill=True)
    (entry,), _ = world.submit(16)
    world.finish(entry.room.room)
    assert beliefs(world) == {P: 0, D: 0}
    assert entry.prompt._names == {}


def mixed(is_aggregated=True, shares_prompts=False, **settings):
    """A prefill worker, a decode worker that computes prompts, and a router that knows what both cost."""
    world = World(**settings)
    world.join(local_prefill=True, aggregated=is_aggregated, shares_prompts=shares_prompts)
    costs = world.dispatcher._placer._cost_model_of(world.dispatcher.registry.get(D))
    for tokens in (16, 256, 1024):
        costs.prefilled(PrefillTimeline(prefill_ms=tokens, prompt_tokens=tokens), is_local=False)
        costs.handed_over(tokens, DecodeTimeline(handoff_ms=20.0))
    return world


def begin(world, order):
    """The first token of a request arrives."""
    one = {"room": order.room, "epoch": order.epoch}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    if order.prefill_instance:
        world.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **one))
    else:
        tokens = Tokens(instance=D, items=[TokenItem(seq=0, ids=[8], **one)])
        world.dispatcher.on_message(b"d", tokens)


def places(world, count):
    """Submits `count` requests of 16 prompt tokens; the letters of the workers that compute them."""
    found = []
    for _ in range(count):
        known = len(world.of(b"p", Prefill))
        world.submit(16)
        found.append("p" if len(world.of(b"p", Prefill)) > known else "d")
    return "".join(found)


def test_an_aggregated_worker_alone_gets_requests_at_once():
    for is_allowed in (True, False):
        world = World()
        world.dispatcher.registry._local_prefill = is_allowed
        world.join(roles=["decode"], aggregated=True)
        assert world.dispatcher.is_ready
        (entry,), _ = world.submit(16)
        assert [order.prefill_instance for order in world.of(b"d", Reserve)] == [None]
        assert world.dispatcher.registry.get(D).num_tokens == 16
        assert entry.prompt._names == {}, "with no choice there is nothing to hash for"


def test_a_mixed_cluster_computes_a_prompt_where_all_requests_wait_least():
    world = mixed()
    assert places(world, 2) == "dd", "16 ms on decode, and 32 ms behind the first one, 36 ms over prefill"
    for order in world.of(b"d", Reserve):
        begin(world, order)
    assert places(world, 1) == "p", "two streams wait: 48 ms on decode"
    assert places(world, 1) == "d", "behind 16 tokens: 52 ms over prefill"
    assert world.dispatcher.registry.get(D).num_tokens == 16
    assert world.dispatcher.registry.get(P).num_tokens == 16


def test_a_prompt_that_waits_for_prefill_delays_nobody_on_decode():
    world = mixed(is_aggregated=False, policy=PairingPolicy(local_prefill_queued_max=64))
    assert places(world, 1) == "p", "prefill is idle"
    assert places(world, 1) == "d", "16 ms on decode, and behind the first one 52 ms over prefill"
    first, second = world.of(b"d", Reserve)
    begin(world, second)
    begin(world, first)
    registry = world.dispatcher.registry
    assert [registry.get(name).num_running for name in (P, D)] == [0, 2]
    assert places(world, 2) == "pd", "prefill is idle; then 48 ms on decode, where two streams wait"
    for order in (first, second):
        end = Finished(instance=D, reason="stop", output_tokens=1, room=order.room, epoch=order.epoch)
        world.dispatcher.on_message(b"d", end)
    assert registry.get(D).num_running == 0
    assert places(world, 1) == "p", "a prompt waits on decode already: nobody knows what begins until then"
    begin(world, world.of(b"d", Reserve)[3])
    assert places(world, 1) == "d", "32 ms on decode"


def test_choices_behind_a_shared_prompt_keep_no_prompt_from_decode():
    policy = PairingPolicy(local_prefill_queued_max=64)
    world = mixed(is_aggregated=False, shares_prompts=True, policy=policy)
    world.submit(16, 16)
    leader, sharer = world.of(b"d", Reserve)
    assert (leader.prefill_instance, sharer.shares) == (P, leader.room)
    assert world.dispatcher.registry.get(D).num_tokens > 0, "of the choice, behind the shared pages"
    assert places(world, 1) == "d"


def test_a_prompt_beyond_the_limit_waits_for_prefill():
    world = mixed(is_aggregated=False, policy=PairingPolicy(local_prefill_queued_max=15))
    assert places(world, 3) == "ppp"


def test_without_a_limit_decode_computes_no_prompt():
    world = mixed(is_aggregated=False)
    assert places(world, 3) == "ppp"


def test_a_mixed_cluster_asks_prefill_until_it_knows_the_costs():
    world = World().join(local_prefill=True, aggregated=True)
    assert places(world, 2) == "pp"


def test_prompt_tokens_leave_the_ledger_with_the_first_output():
    world = mixed()
    (entry,), _ = world.submit(16)
    one, worker = {"room": entry.room.room, "epoch": 0}, world.dispatcher.registry.get(D)
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    assert (worker.num_tokens, worker.num_rooms) == (16, 1)
    world.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=0, ids=[8], **one)]))
    assert (worker.num_tokens, worker.num_rooms, worker.placed_pages > 0) == (0, 1, True)
    world.dispatcher.on_message(b"d", Finished(instance=D, reason="stop", output_tokens=1, **one))
    assert (worker.num_rooms, worker.placed_pages) == (0, 0)


def test_a_lost_prefill_worker_leaves_its_requests_to_the_aggregated_one():
    world = World().join(local_prefill=True, aggregated=True)
    (entry,), _ = world.submit(16)
    world.dispatcher.lose([world.dispatcher.registry.get(P)])
    orders = world.of(b"d", Reserve)
    assert [(order.epoch, order.prefill_instance) for order in orders] == [(0, P), (1, None)]
    assert entry.room.pair.is_local
