"""Readiness where decode computes prompts: before the first prefill, and while every hand-off fails."""

import pytest
from baton.cluster.protocol.messages import DecodeTimeline, Finished, Reserved, TokenItem, Tokens
from baton.router.endpoints.status import why_not_ready
from baton.router.workers.registry import UNREACHABLE_S
from baton.tests.unit.router.workers.test_health_probe import HALF_S, WINDOW_S, D, P, Yard, proven


def alone():
    """A decode worker that has shown that it serves without prefill."""
    world = Yard().join(roles=["decode"], local_prefill=True)
    world.wait(0.1)
    answer_alone(world, world.asked()[0])
    assert world.is_ready
    return world


def answer_alone(world, order):
    world.dispatcher.on_message(b"d", Reserved(room=order.room, epoch=0, instance=D))
    for seq, token in enumerate((9, 8)):
        item = TokenItem(room=order.room, epoch=0, seq=seq, ids=[token])
        world.dispatcher.on_message(b"d", Tokens(instance=D, items=[item]))
    done = Finished(
        room=order.room, epoch=0, instance=D, reason="length", output_tokens=2, timeline=DecodeTimeline()
    )
    world.dispatcher.on_message(b"d", done)


def pair_that_loses_prefill():
    world = proven(local_prefill=True)
    lose_prefill(world)
    return world


def lose_prefill(world):
    world.lost.add(b"p")
    world.dispatcher.probe()
    world.wait(UNREACHABLE_S + 0.2)


@pytest.mark.parametrize("outcome", ["passed", "failed", "silent"])
def test_the_first_prefill_keeps_decode_ready_until_their_pair_fails(outcome):
    world = alone().join(roles=["prefill"])
    world.wait(0.2)
    assert [pair.state for pair in world.status().pairs] == ["new"]
    assert world.is_ready
    assert why_not_ready(world.dispatcher, world.now) == ""
    order = world.asked()[-1]
    assert order.prefill_instance == P, "it is asked at once"
    if outcome == "passed":
        world.answer(order)
        assert world.pair().state == "proven"
    elif outcome == "failed":
        world.fail(order)
    else:
        world.wait(HALF_S)
    assert world.is_ready is (outcome == "passed")


@pytest.mark.parametrize("outcome", ["passed", "failed", "silent"])
def test_after_the_last_prefill_decode_stays_ready_until_it_fails_alone(
    outcome,
):
    world = pair_that_loses_prefill()
    assert [(pair.prefill, pair.state) for pair in world.status().pairs] == [(D, "new")]
    assert world.is_ready
    assert why_not_ready(world.dispatcher, world.now) == ""
    order = world.asked()[-1]
    assert order.prefill_instance is None, "it is asked at once"
    if outcome == "passed":
        answer_alone(world, order)
        assert world.pair(D).state == "proven"
    elif outcome == "failed":
        world.fail(order)
    else:
        world.wait(WINDOW_S)
    assert world.is_ready is (outcome == "passed")


def test_a_decode_whose_pair_failed_is_ready_alone_only_once_proven():
    world = proven(local_prefill=True)
    world.wait(HALF_S)
    world.fail(world.asked()[-1])
    assert not world.is_ready
    lose_prefill(world)
    assert not world.is_ready
    answer_alone(world, world.asked()[-1])
    assert world.is_ready


def test_decode_computes_prompts_itself_while_every_hand_off_fails():
    world = Yard().join(local_prefill=True)
    world.wait(0.1)
    world.fail(world.asked()[0])
    (entry,), _ = world.submit(2)
    assert entry.room.pair.is_local
    assert not world.is_ready
