"""Readiness where decode computes prompts itself: before the first prefill worker comes, and while every hand-off fails."""

import pytest
from baton.cluster.messages import DecodeTimeline, Finished, Reserved, TokenItem, Tokens
from baton.router.status import why_not_ready
from baton.tests.unit.test_canary import HALF_S, D, P, Yard


def alone():
    """A decode worker that has shown that it serves without prefill."""
    world = Yard().join(roles=["decode"], local_prefill=True)
    world.wait(0.1)
    order = world.asked()[0]
    world.dispatcher.on_message(b"d", Reserved(room=order.room, epoch=0, instance=D))
    for seq, token in enumerate((9, 8)):
        item = TokenItem(room=order.room, epoch=0, seq=seq, ids=[token])
        world.dispatcher.on_message(b"d", Tokens(instance=D, items=[item]))
    done = Finished(room=order.room, epoch=0, instance=D, reason="length", output_tokens=2, timeline=DecodeTimeline())
    world.dispatcher.on_message(b"d", done)
    assert world.is_ready
    return world


@pytest.mark.parametrize("outcome", ["passed", "failed", "silent"])
def test_the_first_prefill_worker_takes_nobody_out_of_service_until_its_pair_is_known_to_fail(outcome):
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


def test_decode_computes_prompts_itself_while_every_hand_off_fails():
    world = Yard().join(local_prefill=True)
    world.wait(0.1)
    world.fail(world.asked()[0])
    (entry,), _ = world.submit(2)
    assert entry.room.pair.is_local
    assert not world.is_ready
