"""A stream survives its worker: the next attempt resumes at the last token, and the client sees no seam."""

import math

import hypothesis.strategies as st
from baton.cluster.protocol.messages import (
    Cancel,
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Prefill,
    PrefillTimeline,
    PromptLogprobs,
    Reserve,
    Reserved,
    RoutedExperts,
    Sampling,
    TokenItem,
    TokenLogprob,
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
)
from baton.router.rooms.room import Room, RoomPhase
from baton.tests.unit.router.rooms.test_room import (
    CANCEL_P,
    LOST,
    PAIR,
    ROOM,
    TIMEOUTS,
    TRANSFER,
    D,
    P,
    failed,
    finished,
    first,
    gone,
    placed,
    reserved,
    streaming,
    tokens,
)
from hypothesis import given
from msgspec.structs import replace

P2, D2 = "4" * 32, "5" * 32
PAIR2 = Pair(prefill=P2, decode=D2, prefill_endpoint="ipc:///p2")


def resumed(room=None, pair=PAIR2):
    """A room that streamed tokens 100 to 102, lost decode, was placed again; and its workers' orders."""
    room = room or streaming()
    room.on(tokens(1, [101, 102]), D, 0.3)
    assert room.worker_lost(D, 1.0) == [Freed(D, 0), CANCEL_P, Requeued(1.0, LOST)]
    assert room.phase is RoomPhase.QUEUED
    return room, [send.message for send in room.place(pair, 1.1)]


def test_prompt_outputs_already_sent_are_not_requested_again():
    asked = Sampling(max_new_tokens=9, min_new_tokens=5, prompt_logprobs=2, grammar="g")
    room = Room(ROOM, [5, 6, 7], asked, 0.0, TIMEOUTS)
    room.place(PAIR, 0.0)
    scores = [TokenLogprob(logprob=-1.0, top=[(5, -1.0)]), TokenLogprob(logprob=-2.0)]
    for start, part in (
        (1, scores[:1]),
        (2, scores[1:]),
        (1, scores[:1]),
    ):  # the last one again, which is dropped
        message = PromptLogprobs(room=ROOM, epoch=0, instance=P, start=start, items=part)
        assert room.on(message, P, 0.1) == []
    assert room.num_stale == 1
    room.on(reserved(), D, 0.1)
    assert room.on(first(), P, 0.2)[0] == Deliver([100], [], scores)
    assert room.on(tokens(1, [101]), D, 0.3)[0] == Deliver([101], [])
    room.worker_lost(D, 1.0)
    for told in room.place(PAIR2, 1.1):
        sampling = told.message.sampling
        assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.prompt_logprobs) == (7, 3, -1)
        assert sampling.grammar == "g", "the worker replays the output so far"


def test_experts_of_rows_are_told_once_over_all_attempts():
    """Rows are numbered; the continuation asks for those behind the tokens that were delivered."""

    def rows(epoch, start, numbers):
        ids = bytes(numbers)
        return RoutedExperts(room=ROOM, epoch=epoch, instance=P, start=start, count=len(numbers), ids=ids)

    room = Room(ROOM, [5, 6, 7], Sampling(max_new_tokens=9, routed_experts=1), 0.0, TIMEOUTS)
    assert [send.message.sampling.routed_experts for send in room.place(PAIR, 0.0)] == [1, 1]
    for message, sender in (
        (rows(0, 2, [2]), P),  # not the next one
        (rows(0, 1, [1]), D),  # of the wrong worker
        (rows(0, 1, [1]), P),
        (rows(0, 1, [1]), P),  # again
        (rows(0, 2, [2]), P),
    ):
        assert room.on(message, sender, 0.1) == []
    assert room.num_stale == 3
    room.on(reserved(), D, 0.1)
    assert room.on(first(), P, 0.2)[0] == Deliver([100], [], [], bytes([1, 2]))
    item = replace(tokens(1, [101, 102]), experts=bytes([3, 4]))
    assert room.on(item, D, 0.3)[0] == Deliver([101, 102], [], [], bytes([3, 4]))
    room.worker_lost(D, 1.0)
    assert [send.message.sampling.routed_experts for send in room.place(PAIR2, 1.1)] == [5, 5]
    room.on(reserved(1, D2), D2, 1.2)
    room.on(replace(rows(1, 5, [5]), instance=P2), P2, 1.2)
    assert room.on(again(), P2, 1.3)[0] == Deliver([103], [], [], bytes([5]))
    late = replace(tokens(0, [103, 104], 1), experts=bytes([9, 6]))
    assert room.on(late, D2, 1.4)[0] == Deliver([104], [], [], bytes([6])), "the first token was delivered"


def again(token=103, finish=""):
    return FirstToken(room=ROOM, epoch=1, instance=P2, token=token, finish=finish)


def test_the_next_attempt_has_the_tokens_so_far_as_its_prompt():
    room, told = resumed()
    assert [type(message) for message in told] == [Prefill, Reserve]
    for message in told:
        assert (message.prompt_ids, message.num_output, message.epoch) == ([5, 6, 7, 100, 101, 102], 3, 1)
        assert (message.sampling.max_new_tokens, message.sampling.seed) == (13, 3)
    assert (room.prompt_ids, room.num_prompt) == ([5, 6, 7], 3)


def test_the_stream_goes_on_where_it_was():
    room, _ = resumed()
    assert room.on(reserved(1, D2), D2, 1.2) == []
    assert room.on(again(), P2, 1.3) == [Deliver([103], []), Outcome(P2, 1, True), Freed(P2, 1)]
    assert room.on(tokens(1, [104, 105], 1), D2, 1.4) == [Deliver([104, 105], [])]
    assert Ended("stop") in room.on(finished(3, 1), D2, 1.5)
    assert room.output_ids == [100, 101, 102, 103, 104, 105]
    room.on(gone(P), P, 1.6)
    assert room.phase is RoomPhase.CLOSED


def test_late_messages_of_a_lost_decode_are_dropped_and_counted():
    room, _ = resumed()
    for message in (tokens(3, [103]), finished(4), tokens(1, [9], epoch=1)):
        assert room.on(message, D, 1.2) == []
    assert (room.num_stale, room.output_ids) == (3, [100, 101, 102])


def test_a_stream_survives_a_failed_hand_off_and_a_silent_decode_too():
    assert Requeued(0.5, TRANSFER) in streaming().on(failed(), D, 0.5)
    assert Requeued(9.0, Failure("Timeout", "a worker made no progress")) in streaming().tick(9.0)


def test_attempts_after_the_first_token_are_bounded_like_those_before():
    room, _ = resumed()
    room.on(reserved(1, D2), D2, 1.2)
    room.on(again(), P2, 1.3)
    assert Requeued(1.4, TRANSFER) in room.on(failed(D2, 1), D2, 1.4)
    room.place(PAIR, 1.5)
    assert TRANSFER in room.on(failed(D, 2), D, 1.6)


def test_a_stream_with_all_tokens_ends_without_another_attempt():
    room = Room(ROOM, [5], Sampling(max_new_tokens=2, stop_token_ids=[7]), 0.0, TIMEOUTS)
    room.place(PAIR, 0.0)
    for message, sender in ((reserved(), D), (first(), P), (tokens(1, [101]), D)):
        room.on(message, sender, 0.1)
    assert room.worker_lost(D, 0.2) == [Freed(D, 0), Ended("length"), CANCEL_P]


def test_a_prefill_that_finds_the_answer_complete_ends_it():
    room, _ = resumed()
    end = Finished(room=ROOM, epoch=1, instance=P2, reason="stop", output_tokens=0)
    cancel = SendOrder(D2, Cancel(room=ROOM, epoch=1, instance=D2))
    assert room.on(end, P2, 1.2) == [Ended("stop"), Freed(P2, 1), cancel]
    fresh = placed()
    assert fresh.on(Finished(room=ROOM, epoch=0, instance=P, reason="stop", output_tokens=0), P, 0.1) == []
    assert fresh.num_stale == 1


def test_usage_is_summed_and_cached_tokens_count_only_the_clients_prompt():
    room = placed()
    room.on(reserved(), D, 0.1)
    spent = PrefillTimeline(prefill_ms=2.0, cached_tokens=2)
    room.on(FirstToken(room=ROOM, epoch=0, instance=P, token=100, timeline=spent), P, 0.2)
    room.on(failed(P), P, 0.5)
    room.place(PAIR2, 0.6)
    room.on(Gone(room=ROOM, epoch=0, instance=D, timeline=DecodeTimeline(verify_steps=3)), D, 0.6)
    room.on(reserved(1, D2), D2, 0.7)
    spent = PrefillTimeline(prefill_ms=3.0, cached_tokens=4)
    room.on(FirstToken(room=ROOM, epoch=1, instance=P2, token=101, timeline=spent), P2, 0.8)
    end = Finished(
        room=ROOM,
        epoch=1,
        instance=D2,
        reason="stop",
        output_tokens=1,
        timeline=DecodeTimeline(verify_steps=4),
    )
    assert Ended("stop") in room.on(end, D2, 0.9)
    assert (room.prefill_timeline.prefill_ms, room.cached_tokens, room.decode_timeline.verify_steps) == (
        5.0,
        2,
        7,
    )


P3, D3 = "6" * 32, "7" * 32
PAIR3 = Pair(prefill=P3, decode=D3, prefill_endpoint="ipc:///p3")
QUARANTINED = Failure("Quarantined", "3 workers were lost while they served it")


def test_two_deaths_may_be_chance_and_cost_a_stream_nothing():
    room, _ = resumed()
    assert room.deaths.died_with == {D}
    assert Requeued(1.2, LOST) in room.worker_lost(P2, 1.2)
    assert room.deaths.must_be_alone
    room.place(PAIR3, 1.3)
    room.on(Reserved(room=ROOM, epoch=2, instance=D3), D3, 1.4)
    room.on(FirstToken(room=ROOM, epoch=2, instance=P3, token=103), P3, 1.4)
    end = Finished(room=ROOM, epoch=2, instance=D3, reason="stop", output_tokens=2)
    room.on(tokens(1, [104], epoch=2), D3, 1.5)
    assert Ended("stop") in room.on(end, D3, 1.6)
    assert room.output_ids == [100, 101, 102, 103, 104]


def test_a_third_death_is_proof_and_ends_the_request():
    room, _ = resumed()
    room.worker_lost(P2, 1.2)
    room.place(PAIR3, 1.3)
    assert QUARANTINED in room.worker_lost(D3, 1.4)


def test_a_room_is_alone_from_its_second_death_to_a_token_of_decode():
    room, _ = resumed()
    assert (bool(room.deaths), room.alone_on) == (True, ()), "one death"
    room.worker_lost(P2, 1.2)
    assert room.alone_on == (), "it waits"
    room.place(PAIR3, 1.3)
    assert room.alone_on == (P3, D3)
    room.on(Reserved(room=ROOM, epoch=2, instance=D3), D3, 1.4)
    room.on(FirstToken(room=ROOM, epoch=2, instance=P3, token=103), P3, 1.4)
    assert room.alone_on == (P3, D3), "decode may still die of it"
    room.on(tokens(1, [104], epoch=2), D3, 1.5)
    assert room.alone_on == ()


def test_workers_that_live_or_never_had_the_request_do_not_quarantine_it():
    room, _ = resumed()
    assert Requeued(1.2, LOST) in room.worker_lost(D2, 1.2, unreachable_since=1.1)
    room.place(PAIR, 1.3)
    assert LOST in room.worker_lost(P, 1.4, is_dead=False)
    assert room.deaths.died_with == {D}


def silent(pair, epoch):
    """Decode's word that prefill does not answer."""
    return Failed(
        room=ROOM, epoch=epoch, instance=pair.decode, kind="PeerLost", message="silent", retryable=True
    )


def test_a_request_waits_for_the_death_of_workers_found_silent():
    room = placed()
    effects = room.on(silent(PAIR, 0), D, 1.0)
    assert Requeued(1.0, Failure("PeerLost", "silent")) in effects, "the first one is tried again at once"
    room.place(PAIR2, 1.0)
    room.worker_lost(P, 1.8)
    assert room.deaths.died_with == {P}, "of the attempt before"
    effects = room.on(silent(PAIR2, 1), D2, 2.0)
    assert Requeued(2.0 + room.timeouts.suspect_s, Failure("PeerLost", "silent")) in effects, (
        "it may have killed another"
    )
    room.worker_lost(P2, 2.8)
    assert (room.is_live, room.deaths.must_be_alone) == (True, True)
    room.place(PAIR3, 4.0)
    assert QUARANTINED in room.worker_lost(P3, 4.8)


def found_silent_thrice():
    """A room that two workers died with, and whose third prefill worker its decode finds silent."""
    room, _ = resumed()
    room.worker_lost(P2, 1.2)
    room.place(PAIR3, 1.3)
    assert Requeued(math.inf, Failure("PeerLost", "silent")) in room.on(silent(PAIR3, 2), D3, 2.0)
    room.tick(3.0)
    assert room.is_live
    return room


def test_the_last_failure_is_quarantine_if_the_silent_worker_is_dead():
    assert QUARANTINED in found_silent_thrice().worker_lost(P3, 3.1)


def test_the_last_failure_is_the_peers_report_if_the_silent_worker_lives():
    answered, unknown = found_silent_thrice(), found_silent_thrice()
    answered.on(gone(P3, 2), P3, 3.0)
    assert Failure("PeerLost", "silent") in answered.tick(3.1)
    assert Failure("PeerLost", "silent") in unknown.tick(2.0 + unknown.timeouts.suspect_s)


def test_a_silent_worker_that_answers_or_lacks_the_request_is_no_death():
    room = placed()
    room.on(silent(PAIR, 0), D, 1.0)
    room.on(gone(P), P, 1.1)
    room.place(PAIR2, 1.2)
    room.worker_lost(P, 1.8)
    room.on(silent(PAIR2, 1), D2, 2.0)
    room.worker_lost(P2, 2.8, unreachable_since=1.1)
    assert room.deaths.died_with == set()
    assert room.phase is RoomPhase.QUEUED


def test_a_stop_string_found_while_a_room_waits_for_a_pair_ends_it():
    room = streaming()
    room.worker_lost(D, 1.0)
    assert room.stop(1.1) == [Settled()]
    assert room.on(gone(P), P, 1.2) == [Freed(P, 0), Closed()]


# --- any faults at any moment -------------------------------------------------------------------------------

ANSWER = list(range(200, 212))
WORKERS = [("1" * 31 + str(i), "2" * 31 + str(i)) for i in range(8)]


def heard(room, attempt, fault):
    """Lets an attempt run for `fault` steps of its script; the effects."""
    prefill, decode = WORKERS[attempt]
    rest = ANSWER[room.num_output :]
    one = {"room": ROOM, "epoch": room.epoch}
    script = [
        (Reserved(instance=decode, **one), decode),
        (FirstToken(instance=prefill, token=rest[0], **one), prefill),
        *((TokenItem(seq=seq, ids=rest[seq : seq + 2], **one), decode) for seq in range(1, len(rest), 2)),
        (Finished(instance=decode, reason="length", output_tokens=len(rest), **one), decode),
    ]
    return [effect for message, sender in script[:fault] for effect in room.on(message, sender, 0.1)]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["prefill", "decode", "failed", "dropped"])), max_size=7
    )
)
def test_under_any_failures_the_client_gets_one_complete_answer(faults):
    room = Room(ROOM, [5, 6, 7], Sampling(max_new_tokens=len(ANSWER)), 0.0, TIMEOUTS, max_attempts=99)
    effects = []
    for attempt, (steps, fault) in enumerate([*faults, (99, "")]):
        if room.phase is not RoomPhase.QUEUED:
            break
        prefill, decode = WORKERS[attempt]
        effects += room.place(Pair(prefill=prefill, decode=decode, prefill_endpoint="ipc:///p"), 0.1)
        effects += heard(room, attempt, steps)
        room.check_integrity()
        if room.is_live and fault == "failed":
            effects += room.on(failed(decode, room.epoch), decode, 0.2)
        elif room.is_live:
            effects += room.worker_lost(prefill if fault == "prefill" else decode, 0.2, is_dead=False)
        room.check_integrity()
        if room.is_at_workers:  # prefill was lost after its part was done
            effects += room.on(failed(decode, room.epoch), decode, 0.3)
    assert [token for effect in effects if isinstance(effect, Deliver) for token in effect.ids] == ANSWER
    assert [effect for effect in effects if isinstance(effect, (Ended, Failure))] == [Ended("length")]
