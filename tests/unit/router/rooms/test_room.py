"""The life of a request: any order of events ends in exactly one terminal event and holds nothing."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from baton.cluster.protocol.messages import (
    Cancel,
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Sampling,
    TokenItem,
)
from baton.router.rooms.effects import (
    Closed,
    Deliver,
    Ended,
    Failure,
    Freed,
    Outcome,
    Pair,
    Requeued,
    SendOrder,
    Settled,
    Timeouts,
)
from baton.router.rooms.room import Room, RoomPhase
from hypothesis import given

ROOM, P, D, OTHER = "a" * 32, "1" * 32, "2" * 32, "3" * 32
PAIR = Pair(prefill=P, decode=D, prefill_endpoint="ipc:///p")
TIMEOUTS = Timeouts(reserve_s=1.0, first_token_s=5.0, token_s=2.0, gone_s=0.5, accounts_s=0.3)


def new_room(**more):
    return Room(ROOM, [5, 6, 7], Sampling(max_new_tokens=16, seed=3), 0.0, TIMEOUTS, **more)


def placed(**more):
    room = new_room(**more)
    room.place(PAIR, 0.0)
    return room


def reserved(epoch=0, instance=D):
    return Reserved(room=ROOM, epoch=epoch, instance=instance)


def first(epoch=0, token=100, finish=""):
    return FirstToken(room=ROOM, epoch=epoch, instance=P, token=token, finish=finish)


def tokens(seq, ids, epoch=0):
    return TokenItem(room=ROOM, epoch=epoch, seq=seq, ids=ids)


def finished(total, epoch=0):
    return Finished(
        room=ROOM, epoch=epoch, instance=D, reason="stop", output_tokens=total, timeline=DecodeTimeline()
    )


def refused(retry_after_ms, instance=D, epoch=0):
    return Refused(room=ROOM, epoch=epoch, instance=instance, reason="full", retry_after_ms=retry_after_ms)


def failed(instance=D, epoch=0, retryable=True):
    return Failed(
        room=ROOM, epoch=epoch, instance=instance, kind="TransferTimeout", message="x", retryable=retryable
    )


def gone(instance, epoch=0):
    return Gone(room=ROOM, epoch=epoch, instance=instance)


TRANSFER = Failure("TransferTimeout", "x")
LOST = Failure("PeerLost", "a worker was lost")
CANCEL_P, CANCEL_D = (
    SendOrder(P, Cancel(room=ROOM, epoch=0, instance=P)),
    SendOrder(D, Cancel(room=ROOM, epoch=0, instance=D)),
)


def streaming():
    room = placed()
    room.on(reserved(), D, 0.1)
    room.on(first(), P, 0.2)
    assert room.phase is RoomPhase.STREAMING
    return room


def test_place_sends_reserve_and_prefill_together():
    prefill, reserve = new_room().place(PAIR, 0.0)
    assert (reserve.instance, type(reserve.message)) == (D, Reserve)
    assert (prefill.instance, type(prefill.message)) == (P, Prefill)
    assert reserve.message.prefill_instance == P
    assert reserve.message.prefill_endpoint == "ipc:///p"
    assert reserve.message.epoch == prefill.message.epoch == 0


def test_first_token_waits_for_reserved_and_then_goes_out():
    room = placed()
    assert room.on(first(), P, 0.1) == []
    assert room.on(reserved(), D, 0.2) == [Deliver([100], []), Outcome(P, 0, True), Freed(P, 0)]


def test_whole_life_in_order():
    room = streaming()
    assert room.on(tokens(1, [101, 102]), D, 0.3) == [Deliver([101, 102], [])]
    effects = room.on(finished(3), D, 0.4)
    assert effects == [Ended("stop"), Outcome(D, 0, True), Freed(P, 0), Freed(D, 0), Closed()]
    assert (room.phase, room.instances) == (RoomPhase.CLOSED, set())


@given(st.permutations(range(5)))
def test_tokens_are_contiguous_in_whatever_order_the_workers_are_heard(order):
    events = [
        (reserved(), D),
        (first(), P),
        (tokens(1, [101]), D),
        (tokens(2, [102, 103]), D),
        (finished(4), D),
    ]
    room = placed()
    effects = [effect for i in order for effect in room.on(*events[i], 0.1)]
    ids = [token for effect in effects if isinstance(effect, Deliver) for token in effect.ids]
    assert ids == [100, 101, 102, 103]
    assert [effect for effect in effects if isinstance(effect, (Ended, Failure))] == [Ended("stop")]
    assert room.phase is RoomPhase.CLOSED


def test_repeated_and_overlapping_tokens_are_delivered_once():
    room = streaming()
    room.on(tokens(1, [101, 102]), D, 0.3)
    assert room.on(tokens(1, [101, 102]), D, 0.3) == []
    assert room.on(tokens(2, [102, 103]), D, 0.3) == [Deliver([103], [])]
    assert room.num_stale == 1


def test_first_token_with_finish_ends_and_cancels_both():
    room = placed()
    room.on(reserved(), D, 0.1)
    effects = room.on(first(finish="length"), P, 0.2)
    assert effects == [
        Deliver([100], []),
        Outcome(P, 0, True),
        Freed(P, 0),
        Ended("length"),
        CANCEL_P,
        CANCEL_D,
    ]
    assert room.on(gone(P), P, 0.3) == [Freed(P, 0)]
    assert room.on(gone(D), D, 0.3) == [Freed(D, 0), Closed()]


def test_refusal_with_retry_goes_back_to_the_queue_and_cancels_prefill():
    room = placed()
    assert room.on(refused(250), D, 1.0) == [Freed(D, 0), CANCEL_P, Requeued(1.25)]
    assert room.phase is RoomPhase.QUEUED
    assert room.place(PAIR, 2.0)[0].message.epoch == 1


def test_refusals_do_not_use_up_the_retry():
    room = placed()
    for epoch in range(5):
        assert Requeued(1.01) in room.on(refused(10, epoch=epoch), D, 1.0)
        room.place(PAIR, 1.0)
    assert Requeued(1.0, TRANSFER) in room.on(failed(epoch=5), D, 1.0)
    assert Requeued(1.5) in placed(max_attempts=1).on(refused(500), D, 1.0)


def test_refusal_for_ever_ends_the_request():
    effects = placed().on(refused(0), D, 1.0)
    assert effects == [Freed(D, 0), Failure("Refused", "full"), CANCEL_P]


def test_a_failure_before_a_token_is_retried_for_three_epochs_in_all():
    room = placed()
    blamed = [Outcome(P, 0, False), Outcome(D, 0, False)]
    assert room.on(failed(P), P, 0.5) == [*blamed, Freed(P, 0), CANCEL_D, Requeued(0.5, TRANSFER)]
    assert room.failed_on == {P, D}
    room.place(PAIR, 0.6)
    assert Requeued(0.7, TRANSFER) in room.on(failed(D, epoch=1), D, 0.7)
    room.place(PAIR, 0.8)
    cancel = SendOrder(P, Cancel(room=ROOM, epoch=2, instance=P))
    assert room.on(failed(D, epoch=2), D, 0.9)[2:] == [Freed(D, 2), TRANSFER, cancel]


def test_failure_that_is_not_retryable_is_final():
    assert TRANSFER in placed().on(failed(retryable=False), D, 0.5)
    assert TRANSFER in streaming().on(failed(retryable=False), D, 0.5)


@pytest.mark.parametrize(
    ("kind", "sender", "at_fault"),
    [
        ("TransferTimeout", D, {P, D}),
        ("PeerLost", D, {P}),
        ("PeerLost", P, {D}),
        ("BadLogits", D, {D}),
        ("DeadlineExceeded", D, set()),
        ("BadGrammar", D, set()),
        ("GrammarsOverdue", D, set()),
        ("BadEmbeds", P, set()),
        ("BadEmbeds", D, set()),
    ],
)
def test_a_failure_counts_against_the_worker_that_it_names(kind, sender, at_fault):
    message = Failed(room=ROOM, epoch=0, instance=sender, kind=kind, message="x", retryable=True)
    room = placed()
    effects = room.on(message, sender, 0.5)
    assert {
        effect.instance for effect in effects if isinstance(effect, Outcome) and not effect.is_good
    } == at_fault
    assert room.failed_on == at_fault | (
        {D} if kind == "GrammarsOverdue" else set()
    )  # which another worker may do


def test_a_refusal_counts_against_no_worker():
    assert not any(isinstance(effect, Outcome) for effect in placed().on(refused(250), D, 1.0))


@pytest.mark.parametrize(
    ("message", "sender"),
    [
        (reserved(epoch=1), D),
        (reserved(), P),
        (first(epoch=1), P),
        (first(), D),
        (tokens(1, [1]), P),
        (tokens(1, [1], epoch=3), D),
        (finished(1), OTHER),
        (failed(epoch=4), D),
        (refused(1, instance=OTHER), OTHER),
    ],
)
def test_stale_epoch_or_wrong_worker_is_dropped_and_counted(message, sender):
    room = placed()
    assert room.on(message, sender, 0.1) == []
    assert (room.num_stale, room.phase) == (1, RoomPhase.PREFILLING)


def test_messages_of_an_old_attempt_do_not_touch_the_new_one():
    room = placed()
    room.on(failed(P), P, 0.5)
    room.place(PAIR, 0.6)
    assert room.on(tokens(0, [1], epoch=0), D, 0.7) == []
    assert room.on(gone(D), D, 0.7) == [Freed(D, 0)]
    assert room.instances == {P, D}
    assert room.phase is RoomPhase.PREFILLING


def test_cancel_is_idempotent_and_waits_for_both_gone():
    room = streaming()
    assert room.cancel(1.0) == [CANCEL_P, CANCEL_D]
    assert room.cancel(1.0) == []
    assert room.on(tokens(1, [101]), D, 1.0) == []
    room.on(gone(D), D, 1.1)
    assert room.on(gone(D), D, 1.1) == []
    assert room.on(gone(P), P, 1.1) == [Freed(P, 0), Closed()]


def test_a_stopped_room_takes_decodes_account_from_its_gone():
    room = streaming()
    assert room.stop(1.0) == [CANCEL_P, CANCEL_D]
    assert room.is_settling
    account = DecodeTimeline(verify_steps=4, accepted_tokens=6)
    assert room.on(gone(P), P, 1.1) == [Freed(P, 0)]
    assert room.on(Gone(room=ROOM, epoch=0, instance=D, timeline=account), D, 1.1) == [
        Freed(D, 0),
        Settled(),
        Closed(),
    ]
    assert room.decode_timeline == account
    assert not room.is_settling


def test_the_account_of_a_stopped_room_is_awaited_for_a_moment_only():
    room = streaming()
    room.stop(1.0)
    assert Settled() not in room.tick(1.29)
    assert room.tick(1.31) == [Settled()]
    assert room.on(Gone(room=ROOM, epoch=0, instance=D, timeline=DecodeTimeline()), D, 1.4) == [Freed(D, 0)]


def test_a_stopped_room_does_not_wait_for_a_lost_or_finished_decode():
    room = streaming()
    room.stop(1.0)
    assert room.worker_lost(D, 1.1) == [Freed(D, 0), Settled()]
    room = streaming()
    room.on(finished(1), D, 0.4)
    assert room.stop(1.0) == []
    assert not room.is_settling


def with_deadline(deadline):
    room = new_room(deadline=deadline)
    return room, room.place(PAIR, 1.0)


def test_the_remaining_time_travels_to_both_workers():
    assert [send.message.deadline_ms for send in with_deadline(3.5)[1]] == [2500, 2500]
    assert [send.message.deadline_ms for send in with_deadline(None)[1]] == [0, 0]
    assert [send.message.deadline_ms for send in with_deadline(0.9)[1]] == [1, 1]  # 0 would mean none


def test_a_deadline_ends_a_room_in_every_state():
    waiting, (running, _) = new_room(deadline=1.5), with_deadline(1.5)
    for room in (waiting, running):
        assert not any(isinstance(effect, Failure) for effect in room.tick(1.4))
        assert Failure("DeadlineExceeded", "the deadline passed") in room.tick(1.6)


def test_a_deadline_reported_by_a_worker_is_not_retried():
    room, _ = with_deadline(9.0)
    message = Failed(room=ROOM, epoch=0, instance=D, kind="DeadlineExceeded", message="late", retryable=True)
    assert Failure("DeadlineExceeded", "late") in room.on(message, D, 1.1)


def test_a_cancel_is_repeated_less_and_less_often_until_its_gone():
    room = streaming()
    room.timeouts = replace(TIMEOUTS, gone_s=30.0)
    room.cancel(1.0)
    assert room.tick(1.24) == []
    assert room.tick(1.26) == [CANCEL_P, CANCEL_D]
    room.on(gone(P), P, 1.3)
    times = [1.3 + 0.01 * i for i in range(1000)]
    assert [round(now, 2) for now in times if CANCEL_D in room.tick(now)] == [1.75, 2.75, 4.75, 8.75]


def test_gone_that_never_comes_is_bounded():
    room = streaming()
    room.cancel(1.0)
    room.tick(1.4)
    assert room.tick(1.6) == [Freed(P, 0), Freed(D, 0), Closed()]


def test_gone_of_an_older_attempt_frees_nothing_of_the_newer_one():
    room = placed()
    room.on(failed(P), P, 0.5)
    room.place(PAIR, 0.6)
    room.cancel(1.0)
    room.on(gone(D), D, 1.1)
    assert room.instances == {P, D}
    assert room.on(gone(D, 1), D, 1.2) == [Freed(D, 1)]


def test_loss_of_prefill_matters_only_until_its_token():
    assert Requeued(1.0, LOST) in placed().worker_lost(P, 1.0)
    room = streaming()
    assert room.worker_lost(P, 1.0) == [Freed(P, 0)]
    assert room.on(tokens(1, [101]), D, 1.1) == [Deliver([101], [])]


@pytest.mark.parametrize(("prepare", "limit"), [(placed, 1.0), (streaming, 2.2)])
def test_no_progress_is_bounded_in_every_state(prepare, limit):
    room = prepare()
    assert room.tick(limit - 0.01) == []
    assert room.tick(limit + 0.01)
    assert room.phase in (RoomPhase.QUEUED, RoomPhase.CLOSING)


def test_progress_renews_the_patience():
    room = placed()
    room.on(reserved(), D, 0.9)
    assert room.tick(5.8) == []
    assert Requeued(6.0, Failure("Timeout", "a worker made no progress")) in room.tick(6.0)


events = st.one_of(
    st.builds(lambda e: (reserved(e), D), st.integers(0, 2)),
    st.builds(lambda e, f: (first(e, finish=f), P), st.integers(0, 2), st.sampled_from(["", "stop"])),
    st.builds(
        lambda e, s, n: (tokens(s, [7] * n, e), D), st.integers(0, 2), st.integers(0, 9), st.integers(1, 3)
    ),
    st.builds(lambda e, n: (finished(n, e), D), st.integers(0, 2), st.integers(0, 9)),
    st.builds(
        lambda e, i, r: (failed(i, e, r), i), st.integers(0, 2), st.sampled_from([P, D]), st.booleans()
    ),
    st.builds(
        lambda e, i, r: (refused(r, i, e), i),
        st.integers(0, 2),
        st.sampled_from([P, D]),
        st.sampled_from([0, 9]),
    ),
    st.sampled_from([(gone(P), P), (gone(D), D), "cancel", "stop", "lose P", "lose D", "tick", "place"]),
)


def step(room, event, now):
    if event == "cancel":
        return room.cancel(now)
    if event == "stop":
        return room.stop(now)
    if event == "tick":
        return room.tick(now)
    if event == "place":
        return room.place(PAIR, now) if room.phase is RoomPhase.QUEUED else []
    if isinstance(event, str):
        return room.worker_lost(P if event[-1] == "P" else D, now)
    return room.on(*event, now)


@given(st.lists(events, max_size=30))
def test_any_history_delivers_in_order_ends_once_and_frees_what_it_held(history):
    room = new_room()
    now, effects = 0.0, []
    for event in ["place", *history, "cancel"]:
        now += 0.2
        effects += step(room, event, now)
        room.check_integrity()
    for _ in range(3):
        now += 1.0
        effects += room.tick(now)
    assert sum(len(effect.ids) for effect in effects if isinstance(effect, Deliver)) == room.num_output
    ends = [effect for effect in effects if isinstance(effect, (Ended, Failure, Settled))]
    assert len(ends) <= 1
    if ends:  # nothing is delivered after the end
        after = effects[effects.index(ends[0]) + 1 :]
        assert not any(isinstance(effect, (Deliver, Requeued)) for effect in after)
    assert effects.count(Closed()) == 1
    assert effects[-1] == Closed()
    assert room.phase is RoomPhase.CLOSED
    placed_on = {
        (s.instance, s.message.epoch)
        for s in effects
        if isinstance(s, SendOrder) and not isinstance(s.message, Cancel)
    }
    assert placed_on == {(freed.instance, freed.epoch) for freed in effects if isinstance(freed, Freed)}


GAPS = st.lists(st.floats(min_value=0.0, max_value=1.5 * TIMEOUTS.token_s), max_size=6)


@given(
    before=GAPS,
    behind=GAPS,
    look_after=st.floats(min_value=0.0, max_value=2 * TIMEOUTS.token_s),
    deadline=st.none() | st.just(4.0),
)
def test_a_tick_before_quiet_until_would_do_nothing(before, behind, look_after, deadline):
    room, now = placed(deadline=deadline), 0.0
    assert room.quiet_until == 0.0
    room.on(reserved(), D, now)
    room.on(first(), P, now)
    quiet_until = room.quiet_until
    for seq, gap in enumerate([*before, *behind], 1):
        now += gap
        room.on(tokens(seq, [7]), D, now)
        if seq == len(before):
            quiet_until = room.quiet_until
    now += look_after
    assert quiet_until > 0.0
    assert room.tick(now) == [] or now >= quiet_until
