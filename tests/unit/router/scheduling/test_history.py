"""/requests lists each attempt with its times and its end, of the caller's requests, in bounded memory."""

import json

import msgspec
from baton.cluster.protocol.messages import (
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Heartbeat,
    PrefillTimeline,
    Refused,
    Reserved,
    TokenItem,
    Tokens,
    WorkerStats,
)
from baton.router.http.rate_limits import ANYONE, Caller
from baton.router.scheduling.history import KEPT
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job, Tag
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, Sampling, World

DECODED = DecodeTimeline(
    handoff_ms=4.0, handoff_bytes=4096, handoff_blocks=2, verify_steps=2, accepted_tokens=1
)


def world_of(max_running=32, **settings):
    world = World(**settings).join(max_running=max_running)
    world.now = 100.0
    return world


def submit(world, caller=ANYONE, reply_id="", num_choices=1):
    sampling = Sampling(max_new_tokens=4)
    job = Job(prompt_ids=[5] * 16, sampling=sampling, arrived=world.now, tokenize_s=0.0, caller=caller)
    return world.dispatcher.submit([job] * num_choices, Inbox(lambda: world.now), Tag(reply_id=reply_id))


def say(world, *messages):
    """Each a tenth of a second after the other."""
    for message in messages:
        world.now += 0.1
        world.dispatcher.on_message(b"p" if message.instance == P else b"d", message)


def serve(world, entry):
    one = {"room": entry.room.room, "epoch": entry.room.epoch}
    say(
        world,
        Reserved(instance=D, **one),
        FirstToken(instance=P, token=9, timeline=PrefillTimeline(prefill_ms=2.0, cached_tokens=8), **one),
        Tokens(instance=D, items=[TokenItem(seq=1, ids=[8, 7, 6], **one)]),
        Finished(instance=D, reason="length", output_tokens=4, timeline=DECODED, **one),
    )


def only_row(world, caller=ANYONE):
    [row] = world.dispatcher.history.recent(caller, KEPT).requests
    return row


def attempts_of(world, name, caller=ANYONE):
    [choice] = world.dispatcher.history.find(name, caller).choices
    return choice.timeline.attempt_log


def test_a_request_is_in_the_history_during_and_after_its_run():
    world = world_of()
    [entry] = submit(world, reply_id="chatcmpl-1")
    assert (only_row(world).state, only_row(world).outcome) == ("prefilling", None)
    serve(world, entry)
    row = only_row(world)
    assert (row.state, row.outcome, row.id) == ("ended", "ok", entry.room.room[:8])
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens, row.attempts, row.choices) == (
        16,
        8,
        4,
        1,
        1,
    )
    assert (row.ttft_ms, row.handoff_bytes, row.accept_length) == (200.0, 4096, 1.5)
    assert (row.prefill, row.decode) == (P[:8], D[:8])
    [attempt] = attempts_of(world, "chatcmpl-1")
    assert (attempt.epoch, attempt.outcome, attempt.reason, attempt.tokens) == (0, "ok", "", 4)
    moments = [
        attempt.placed_ms,
        attempt.reserved_ms,
        attempt.prefilled_ms,
        attempt.first_token_ms,
        attempt.ended_ms,
    ]
    assert moments == [0.0, 100.0, 200.0, 200.0, 400.0]


def test_a_refused_or_failed_attempt_is_listed_with_its_reason():
    world = world_of()
    [entry] = submit(world)
    room = entry.room.room
    say(world, Refused(room=room, epoch=0, instance=D, reason="full", retry_after_ms=1))
    world.now += 1
    say(world, Heartbeat(instance=D, stats=WorkerStats(pages_total=64, pages_free=64)))  # it has room again
    world.dispatcher.tick()
    say(world, Failed(room=room, epoch=1, instance=P, kind="BadLogits", message="on host-7", retryable=True))
    world.now += 1
    world.dispatcher.tick()
    serve(world, entry)
    ends = [(a.epoch, a.outcome, a.reason, a.ended_ms is not None) for a in attempts_of(world, room[:8])]
    assert ends == [(0, "refused", "Refused", True), (1, "failed", "BadLogits", True), (2, "ok", "", True)]
    assert only_row(world).attempts == 3


def test_a_client_that_left_has_cancelled_its_attempt():
    world = world_of()
    [entry] = submit(world)
    world.now += 0.5
    world.dispatcher.client_left(entry)
    assert only_row(world).state == "ended"
    for instance in (P, D):
        say(
            world,
            Gone(
                room=entry.room.room, epoch=0, instance=instance, timeline=DECODED if instance == D else None
            ),
        )
    [attempt] = attempts_of(world, entry.room.room)
    assert (attempt.outcome, attempt.ended_ms) == ("cancelled", 500.0)
    assert (only_row(world).outcome, only_row(world).handoff_bytes) == ("cancelled", 4096)


def test_a_stopped_requests_cost_is_known_after_its_last_workers_answer():
    world = world_of()
    [entry] = submit(world, reply_id="chatcmpl-2")
    one = {"room": entry.room.room, "epoch": 0}
    say(world, Reserved(instance=D, **one), FirstToken(instance=P, token=9, **one))
    world.dispatcher.stopped(entry)
    assert (only_row(world).outcome, only_row(world).handoff_bytes) == (None, None)
    say(world, Gone(instance=D, timeline=DECODED, **one), Gone(instance=P, **one))
    assert (only_row(world).outcome, only_row(world).handoff_bytes) == ("ok", 4096)
    assert attempts_of(world, "chatcmpl-2")[0].outcome == "ok"


def test_a_request_that_times_out_in_the_queue_has_no_attempt():
    world = world_of(max_running=1, queue_timeout_s=5.0)
    submit(world, reply_id="chatcmpl-before")
    submit(world, reply_id="chatcmpl-behind")
    assert [row.state for row in world.dispatcher.history.recent(ANYONE, KEPT).requests] == [
        "queued",
        "prefilling",
    ]
    world.now += 6.0
    world.dispatcher.tick()
    waited = world.dispatcher.history.recent(ANYONE, KEPT).requests[-1]
    assert (waited.outcome, waited.attempts, waited.queue_ms) == ("rejected", 0, 6000.0)
    assert attempts_of(world, "chatcmpl-behind") == []


def test_choices_are_one_request_with_a_history_each():
    world = world_of()
    entries = submit(world, reply_id="chatcmpl-3", num_choices=2)
    for entry in entries:
        serve(world, entry)
    view = world.dispatcher.history.find("chatcmpl-3", ANYONE)
    assert [choice.room for choice in view.choices] == [entry.room.room for entry in entries]
    assert (only_row(world).choices, only_row(world).output_tokens, only_row(world).handoff_bytes) == (
        2,
        8,
        8192,
    )


def test_a_caller_sees_its_own_requests_and_an_operator_all():
    world = world_of()
    alice, bob = Caller(id="a" * 8, name="alice"), Caller(id="b" * 8, name="bob")
    for caller, reply_id in ((alice, "chatcmpl-a"), (bob, "chatcmpl-b")):
        serve(world, submit(world, caller, reply_id)[0])
    history = world.dispatcher.history
    assert [len(history.recent(who, KEPT).requests) for who in (alice, bob, ANYONE)] == [1, 1, 2]
    assert len(history.recent(Caller(id="c" * 8, is_operator=True), KEPT).requests) == 2
    assert history.find("chatcmpl-a", alice) is not None
    assert history.find("chatcmpl-a", bob) is None
    assert history.find(history.find("chatcmpl-b", bob).choices[0].room[:8], alice) is None
    [running] = submit(world, bob, "chatcmpl-c")
    assert [len(history.recent(who, KEPT).requests) for who in (alice, bob, ANYONE)] == [1, 2, 3]
    assert history.find("chatcmpl-c", bob) is not None
    assert [history.find(name, alice) for name in ("chatcmpl-c", running.room.room)] == [None, None]


def test_a_name_finds_by_whole_ids_or_8_digits_and_nothing_by_less():
    world = world_of()
    [entry] = submit(world, reply_id="chatcmpl-4")
    history, room = world.dispatcher.history, entry.room.room
    assert [history.find(name, ANYONE) is not None for name in (room, room[:8], "chatcmpl-4")] == [True] * 3
    assert [history.find(name, ANYONE) for name in ("", room[:7], "chatcmpl", room + "0", "z" * 8)] == [
        None
    ] * 5


def test_the_history_is_bounded_and_holds_no_prompt():
    world = world_of()
    for number in range(KEPT + 3):
        serve(world, submit(world, reply_id=f"cmpl-{number:03}")[0])
    history = world.dispatcher.history
    assert len(history.recent(ANYONE, 10 * KEPT).requests) == KEPT
    assert history.find("cmpl-002", ANYONE) is None
    assert history.find(f"cmpl-{KEPT + 2}", ANYONE) is not None
    assert repr(history) == f"History(0 open, {KEPT} ended)"
    rows = [row.id for row in history.recent(ANYONE, 2).requests]
    assert rows == [history.find(f"cmpl-{KEPT + last}", ANYONE).choices[0].room[:8] for last in (2, 1)]
    text = json.dumps(msgspec.to_builtins(history.find("cmpl-009", ANYONE)))
    assert "[5, 5" not in text
    assert "9, 8, 7" not in text
