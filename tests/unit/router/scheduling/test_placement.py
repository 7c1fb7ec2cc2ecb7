"""The router's estimate of prefix caches decides where a prompt is computed, with one worker of each role."""

from baton.cluster.protocol.messages import Reserved
from baton.router.scheduling.placement import PairingPolicy
from baton.router.scheduling.prefixes import SeenPrompt
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World

PROMPT = SeenPrompt([5] * 16)


def beliefs(world):
    placer = world.dispatcher._placer
    indices = {P: placer._on_prefill, D: placer._on_decode}
    return {worker: index.num_held(worker, PROMPT.pages(16)) for worker, index in indices.items()}


def test_with_local_prefill_decodes_report_corrects_both_known_caches():
    world = World(policy=PairingPolicy(local_prefill_max=64)).join()
    (first,), _ = world.submit(16)
    world.finish(first.room.room)
    assert beliefs(world) == {P: 1, D: 1}
    (second,), _ = world.submit(16)
    world.dispatcher.on_message(b"d", Reserved(instance=D, room=second.room.room, epoch=0, have=0))
    assert beliefs(world) == {P: 1, D: 0}, "decode has evicted it"


def test_without_a_choice_nothing_is_recorded():
    world = World().join()
    (entry,), _ = world.submit(16)
    world.finish(entry.room.room)
    assert beliefs(world) == {P: 0, D: 0}
