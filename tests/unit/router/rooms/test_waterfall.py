"""The waterfall of a request: every part has its place on one time line."""

from baton.cluster.protocol.messages import (
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    PrefillTimeline,
    Reserved,
    TokenItem,
    Tokens,
)
from baton.tests.unit.router.scheduling.test_dispatcher import D, P
from baton.tests.unit.router.scheduling.test_history import say, submit, world_of

DECODED = DecodeTimeline(handoff_ms=40.0, draft_prefill_ms=10.0, queue_ms=30.0, decode_ms=100.0)


def parts_of(world, entry):
    [choice] = world.dispatcher.history.find(entry.room.room, entry.request.caller).choices
    return [(part.lane, part.name, part.attempt, part.start_ms, part.end_ms) for part in choice.waterfall]


def told(world, entry, *messages):
    one = {"room": entry.room.room, "epoch": entry.room.epoch}
    say(world, *(make(one) for make in messages))


def reserved(one):
    return Reserved(instance=D, **one)


def first(one):
    return FirstToken(instance=P, token=9, timeline=PrefillTimeline(queue_ms=50.0, prefill_ms=120.0), **one)


def tokens(one):
    return Tokens(instance=D, items=[TokenItem(seq=1, ids=[8, 7, 6], **one)])


def finished(one):
    return Finished(instance=D, reason="length", output_tokens=4, timeline=DECODED, **one)


def test_each_part_lies_where_it_took_place():
    world = world_of()
    [entry] = submit(world)
    told(world, entry, reserved, first, tokens, finished)  # after 100, 200, 300 and 400 ms
    assert parts_of(world, entry) == [
        ("router", "read and tokenize", 0, 0.0, 0.0),
        ("router", "queue", 0, 0.0, 0.0),
        ("prefill", "queue", 0, 30.0, 80.0),
        ("prefill", "prompt", 0, 80.0, 200.0),
        ("hand-off", "hand-off", 0, 200.0, 240.0),
        ("decode", "draft prefill", 0, 240.0, 250.0),
        ("decode", "tokens", 0, 300.0, 400.0),
    ]


def test_a_running_request_has_parts_without_an_end():
    world = world_of()
    [entry] = submit(world)
    told(world, entry, reserved)
    assert parts_of(world, entry)[-1] == ("prefill", "prompt", 0, 0.0, None)
    told(world, entry, first)
    assert parts_of(world, entry)[-1] == ("hand-off", "hand-off", 0, 200.0, None)
    told(world, entry, tokens)
    assert parts_of(world, entry)[-2:] == [
        ("hand-off", "hand-off", 0, 200.0, 300.0),
        ("decode", "tokens", 0, 300.0, None),
    ]


def test_a_second_attempt_begins_where_the_first_one_ended():
    world = world_of()
    [entry] = submit(world)

    def failed(one):
        return Failed(instance=D, kind="TransferError", message="x", retryable=True, **one)

    told(world, entry, reserved, failed)
    world.now += 0.5
    world.dispatcher.tick()
    told(world, entry, reserved, first, tokens, finished)
    parts = parts_of(world, entry)
    assert ("prefill", "prompt", 0, 0.0, 200.0) in parts
    [queued] = [part for part in parts if part[:3] == ("router", "queue", 1)]
    assert queued[3] == 200.0
    assert {part[2] for part in parts} == {0, 1}
    assert all(end is None or start <= end for *_, start, end in parts)


def test_a_prompt_that_decode_computes_is_on_decode_s_lane():
    world = world_of()
    [entry] = submit(world)
    note = entry.trace.attempts[-1]
    note.prefill = note.decode
    told(world, entry, reserved)
    assert parts_of(world, entry)[-1] == ("decode", "prompt", 0, 0.0, None)


def test_a_queued_request_waits_in_the_router():
    world = world_of(max_running=1)
    submit(world)
    [second] = submit(world)
    world.now += 0.2
    assert parts_of(world, second) == [
        ("router", "read and tokenize", 0, 0.0, 0.0),
        ("router", "queue", 0, 0.0, None),
    ]
