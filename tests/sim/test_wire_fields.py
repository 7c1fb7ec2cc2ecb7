"""A message with a field that its role would never send is refused, whichever field is wrong."""

import pytest
from baton.cluster.errors import RemoteProtocolError
from baton.cluster.protocol.codec import (
    control_down_decoder,
    control_up_decoder,
    kv_down_decoder,
    kv_up_decoder,
)
from baton.cluster.protocol.messages import ControlDown, ControlUp, KVDown, KVUp
from baton.tests.sim.wire_fields import damaged, intact
from baton.tests.sim.worker_pair import ENDPOINT, D, P, Pair, name
from baton.tests.unit.router.scheduling.test_dispatcher import D as ROUTER_D
from baton.tests.unit.router.scheduling.test_dispatcher import World
from hypothesis import HealthCheck, given, settings

ROOM = name(1)
unhurried = settings(suppress_health_check=list(HealthCheck))
KNOWN = {"room": ROOM, "epoch": 0, "instance": D, "block": 0}
PLANES = [
    (control_up_decoder, ControlUp), (control_down_decoder, ControlDown), (kv_up_decoder, KVUp),
    (kv_down_decoder, KVDown),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(toy_checkpoint):
    made = Pair(toy_checkpoint("llama"))
    yield made
    made.run()
    made.assert_nothing_is_held()


@pytest.mark.parametrize(("decoder", "union"), PLANES)
def test_s5_an_intact_message_of_every_kind_is_accepted(decoder, union):
    for frame in intact(union, KNOWN):
        decoder().decode(frame)


@unhurried
@given(damaged(ControlUp, KNOWN | {"instance": ROUTER_D}))
def test_s5_s7_a_worker_s_damaged_message_does_not_disturb_the_router(frame):
    world = World().join()
    (entry,), _ = world.submit(16)
    try:
        message = control_up_decoder().decode(frame)
    except RemoteProtocolError:
        message = None
    if message is not None:
        world.dispatcher.on_message(b"d", message)
        world.dispatcher.tick()
    world.dispatcher.client_left(entry)
    world.join()  # the worker's next heartbeat is as it should be
    (other,), _ = world.submit(16)
    world.finish(other.room.room)
    assert not other.room.is_live


@unhurried
@given(damaged(ControlDown, KNOWN))
def test_s5_s7_a_router_s_damaged_message_does_not_disturb_a_worker(pair, frame):
    try:
        message = control_down_decoder().decode(frame)
    except RemoteProtocolError:
        return
    for worker in (pair.prefill, pair.decode):
        worker.handle(message, pair.clock.now)
    for link in pair.links.values():
        link.to_router.clear()
    for worker in (pair.prefill, pair.decode):
        worker.step()
        worker.drop_rooms(worker.queues.names(), "the next example")
    pair.links[P].perform()
    pair.links[D].perform()


@unhurried
@given(frame=damaged(KVUp, KNOWN))
def test_s5_s7_a_decode_peer_s_damaged_message_does_not_disturb_prefill(pair, frame):
    served(pair, lambda: pair.links[P].transport._receive_frames("stranger", [memoryview(frame)]))


@unhurried
@given(frame=damaged(KVDown, KNOWN | {"instance": P}))
def test_s5_s7_a_prefill_peer_s_damaged_message_does_not_disturb_decode(pair, frame):
    served(
        pair,
        lambda: pair.links[D].transport._receive_frames(ENDPOINT, [memoryview(frame), memoryview(bytes(64))]),
    )
    served(pair, lambda: pair.links[D].transport._receive_frames(ENDPOINT, [memoryview(frame)]))


def served(pair, attack):
    """The attack happens while a room is open at both ends, and then the room ends."""
    pair.send(ROOM, [5, 6, 7, 8, 9], max_new_tokens=3)
    pair.turn()
    attack()
    pair.cancel(ROOM)
    pair.run()
    for books in (pair.tokens, pair.ends, pair.gone):
        books.clear()
