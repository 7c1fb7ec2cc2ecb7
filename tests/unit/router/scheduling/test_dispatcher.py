"""The dispatcher on a fake clock and a fake wire: order, bounds, and frames that wait for a connection."""

import asyncio
import logging

import pytest
from baton.cluster.errors import PeerLost
from baton.cluster.protocol.codec import control_down_decoder
from baton.cluster.protocol.messages import (
    Cancel,
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Goodbye,
    Heartbeat,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Sampling,
    TokenItem,
    Tokens,
    Welcome,
    WorkerStats,
)
from baton.cluster.telemetry.metrics import RouterMetrics
from baton.router.answers.answer import error_of
from baton.router.endpoints.status import metrics_of, status_of
from baton.router.errors import ApiError
from baton.router.rooms.effects import Deliver, Ended, Failure, Settled
from baton.router.scheduling import dispatcher
from baton.router.scheduling.admission_queue import OVERLOADED
from baton.router.scheduling.dispatcher import CLIENT_STALL_S, Dispatcher
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.router.workers.registry import UNREACHABLE_S, Registry
from baton.tests.unit.router.workers.test_registry import hello

P, D = "1" * 32, "2" * 32


class World:
    """A dispatcher, the frames that its workers got, and a clock that only tests move."""

    def __init__(self, **settings):
        self.now = 0.0
        self.sent = {b"p": [], b"d": []}
        self.refusing = set()  # identities whose queue is full
        self.lost = set()  # identities that are not connected
        self._decoder = control_down_decoder()
        registry = Registry("a" * 32, 1000.0)
        settings = {"max_queue": 8, "queue_timeout_s": 30.0} | settings
        self.dispatcher = Dispatcher(
            registry, self._transmit, lambda: self.now, RouterMetrics("m"), **settings
        )

    def join(self, roles=("prefill", "decode"), **decode):
        for identity, instance, role, more in ((b"p", P, "prefill", {}), (b"d", D, "decode", decode)):
            if role not in roles:
                continue
            message = hello(instance=instance, role=role, **more)
            stats = WorkerStats(pages_total=message.pages_total, pages_free=message.pages_total)
            self.dispatcher.on_message(identity, message)
            self.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))
        return self

    def _transmit(self, identity, frame):
        if identity in self.lost:
            raise PeerLost("gone")
        if identity in self.refusing:
            return False
        self.sent[identity].append(self._decoder.decode(frame))
        return True

    def submit(self, *max_new):
        inbox = Inbox(lambda: self.now)
        jobs = [
            Job(prompt_ids=[5] * 16, sampling=Sampling(max_new_tokens=n), arrived=0.0, tokenize_s=0.0)
            for n in max_new
        ]
        return self.dispatcher.submit(jobs, inbox), inbox

    def of(self, identity, kind):
        return [message for message in self.sent[identity] if isinstance(message, kind)]

    def finish(self, room):
        one = {"room": room, "epoch": 0}
        self.dispatcher.on_message(b"d", Reserved(instance=D, **one))
        self.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **one))
        self.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=1, ids=[8], **one)]))
        self.dispatcher.on_message(b"d", Finished(instance=D, reason="stop", output_tokens=2, **one))


def events(inbox):
    return [event for _, event in asyncio.run(inbox.take())]


def test_a_room_runs_from_submit_to_nothing_left():
    world = World().join()
    (entry,), inbox = world.submit(16)
    world.finish(entry.room.room)
    assert events(inbox) == [Deliver([9], []), Deliver([8], []), Ended("stop")]
    assert world.dispatcher.num_open == 0
    assert [worker.num_rooms for worker in world.dispatcher.registry] == [0, 0]
    assert 'baton_requests_total{model_name="m",outcome="ok"} 1.0' in _metrics(world)


def _metrics(world):
    return metrics_of(world.dispatcher).decode()


def test_waiting_rooms_are_placed_in_order_and_small_ones_never_overtake():
    world = World().join(pages_total=10)
    (first,), _ = world.submit(16 * 7)  # 8 pages
    (big,), _ = world.submit(16 * 4)  # 5 pages: waits
    (small,), _ = world.submit(16)  # 2 pages: would fit now
    assert [r.room for r in world.of(b"d", Reserve)] == [first.room.room]
    world.finish(first.room.room)
    assert [r.room for r in world.of(b"d", Reserve)] == [first.room.room, big.room.room, small.room.room]


def test_room_whose_attempt_failed_keeps_its_place_before_younger_ones():
    world = World().join(max_running=1)
    (old,), _ = world.submit(16)
    (young,), _ = world.submit(16)
    room = old.room.room
    world.dispatcher.on_message(
        b"d", Failed(room=room, epoch=0, instance=D, kind="TransferTimeout", message="", retryable=True)
    )
    assert [(r.room, r.epoch) for r in world.of(b"d", Reserve)] == [(room, 0), (room, 1)]
    assert world.dispatcher.num_queued == 1
    assert young.room.epoch == -1


def test_request_with_several_choices_is_taken_whole_or_not_at_all():
    world = World(max_queue=2).join(max_running=1)
    with pytest.raises(ApiError) as caught:
        world.submit(16, 16, 16, 16)
    assert caught.value.status == 429
    assert world.dispatcher.num_queued == 0
    assert len(world.of(b"d", Cancel)) == 1
    world.dispatcher.on_message(b"d", Gone(room=world.of(b"d", Reserve)[0].room, epoch=0, instance=D))
    world.dispatcher.on_message(b"p", Gone(room=world.of(b"p", Prefill)[0].room, epoch=0, instance=P))
    assert world.dispatcher.num_open == 0


def test_frames_for_a_blocked_worker_wait_in_order():
    world = World().join()
    world.refusing = {b"d"}
    rooms = [world.submit(16)[0][0].room.room for _ in range(3)]
    world.dispatcher.tick()
    assert world.of(b"d", Reserve) == []
    world.refusing = set()
    world.dispatcher.tick()
    assert [r.room for r in world.of(b"d", Reserve)] == rooms


def test_a_reconnected_worker_gets_waiting_frames_or_is_lost():
    world = World().join()
    world.lost = {b"d"}
    _, inbox = world.submit(16)
    world.now += UNREACHABLE_S / 2
    world.dispatcher.tick()
    world.sent[b"d2"] = []
    world.dispatcher.on_message(b"d2", hello(instance=D, role="decode"))
    assert [type(message).__name__ for message in world.sent[b"d2"]] == ["Welcome", "Reserve"]
    world.lost = {b"d2"}
    world.submit(16)
    world.now += UNREACHABLE_S + 0.1
    world.dispatcher.tick()
    assert world.dispatcher.registry.get(D) is None
    assert [type(event) for event in events(inbox)] == [Failure]


def test_a_reader_that_stops_reading_is_cut_and_cancelled():
    world = World().join()
    (entry,), inbox = world.submit(100)
    world.dispatcher.on_message(b"d", Reserved(room=entry.room.room, epoch=0, instance=D))
    world.dispatcher.on_message(b"p", FirstToken(room=entry.room.room, epoch=0, instance=P, token=9))
    world.now += CLIENT_STALL_S - 1
    world.dispatcher.on_message(
        b"d", Tokens(instance=D, items=[TokenItem(room=entry.room.room, epoch=0, seq=1, ids=[8])])
    )
    world.dispatcher.tick()
    assert world.of(b"d", Cancel) == []
    world.now += 2
    world.dispatcher.tick()
    assert inbox.unread_for(world.now) > CLIENT_STALL_S
    assert [message.room for message in world.of(b"d", Cancel)] == [entry.room.room]
    assert 'outcome="cancelled"} 1.0' in _metrics(world)


def test_the_wait_is_bounded_also_after_refusals():
    world = World(queue_timeout_s=5.0).join(max_running=1)
    world.submit(16)
    _, inbox = world.submit(16)
    world.now = 4.9
    world.dispatcher.tick()
    assert world.dispatcher.num_queued == 1
    world.now = 5.1
    world.dispatcher.tick()
    (broken,) = events(inbox)
    assert broken.kind == "QueueTimeout"
    assert broken.retry_after_s == 17, "one got a pair within the last ten seconds or so, 5.1 s ago"
    assert int(error_of(broken).headers["retry-after"]) == 17


def test_displaced_and_refused_requests_both_get_a_retry_after():
    world = World(max_queue=1).join(max_running=1)
    world.submit(16)
    world.now = 4.0
    _, displaced = world.submit(16)
    urgent = Job(prompt_ids=[5] * 16, sampling=Sampling(), arrived=4.0, tokenize_s=0.0, priority=-1)
    world.dispatcher.submit([urgent], Inbox(lambda: world.now))
    with pytest.raises(ApiError) as caught:
        world.submit(16)
    (broken,) = events(displaced)
    assert broken.kind == OVERLOADED
    assert caught.value.retry_after_s == broken.retry_after_s == error_of(broken).retry_after_s == 30


def test_without_a_measured_rate_retry_after_is_one_second():
    for kind in (OVERLOADED, "QueueTimeout", "GrammarsOverdue"):
        assert error_of(Failure(kind, "x")).headers == {"retry-after": "1"}


def test_without_a_pair_no_request_leaves_the_queue():
    world = World()
    with pytest.raises(ApiError) as caught:
        world.submit(16)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert repr(world.dispatcher) == "Dispatcher(open, queued=0, running=0, Registry(prefill=0, decode=0))"


def test_messages_of_unknown_workers_are_counted_and_change_nothing():
    world = World().join()
    (entry,), _ = world.submit(16)
    world.dispatcher.on_message(b"x", Reserved(room=entry.room.room, epoch=0, instance="9" * 32))
    assert world.dispatcher.events["unknown_worker"] == 1


# --- workers that gave the router up, or that it gave up ----------------------------------------------------


def begin(world, entry, epoch=0):
    """Reserved and token 1: the client's answer has begun."""
    one = {"room": entry.room.room, "epoch": epoch}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    world.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **one))


def test_a_worker_that_dropped_its_rooms_loses_them_and_frees_its_pages():
    world = World().join()
    (begun,), begun_inbox = world.submit(16)
    begin(world, begun)
    (fresh,), _ = world.submit(16)
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", generation=1))
    assert [type(event) for event in events(begun_inbox)] == [Deliver]
    rooms = {(begun.room.room, 1), (fresh.room.room, 1)}
    assert {(r.room, r.epoch) for r in world.of(b"d", Reserve)[2:]} == rooms  # both are tried again
    worker = world.dispatcher.registry.get(D)
    assert set(worker.ledger) == rooms
    kinds = [type(message) for message in world.sent[b"d"]]
    assert kinds.index(Welcome, 1) < len(kinds) - 1  # before the new Reserve
    assert world.dispatcher.events["worker_dropped_rooms"] == 1


def test_a_hello_of_an_older_generation_is_ignored():
    world = World().join()
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", generation=2))
    (entry,), _ = world.submit(16)
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", generation=2))
    world.dispatcher.on_message(b"x", hello(instance=D, role="decode", generation=1))
    assert entry.room.is_at_workers
    assert world.dispatcher.registry.get(D).identity == b"d"
    assert world.dispatcher.events["stale_hello"] == 1


def test_frames_waiting_for_a_worker_that_dropped_its_rooms_are_not_sent():
    world = World().join()
    world.refusing = {b"d"}
    (entry,), _ = world.submit(16)
    world.refusing = set()
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", generation=1))
    assert [r.epoch for r in world.of(b"d", Reserve)] == [1]
    assert entry.room.epoch == 1


@pytest.mark.parametrize("generation", [0, 1])
def test_a_returning_worker_gets_cancels_for_finished_rooms(generation):
    world = World().join()
    (entry,), _ = world.submit(16)
    world.lost = {b"d"}
    world.dispatcher.lose([world.dispatcher.registry.get(D)])
    world.lost = set()
    assert world.of(b"d", Cancel) == []
    for _ in range(2):
        world.dispatcher.on_message(b"d", hello(instance=D, role="decode", generation=generation))
    told = [message.room for message in world.of(b"d", Cancel)]
    assert told == (
        [entry.room.room] if generation == 0 else []
    )  # the next generation has dropped them itself


# --- requests of several choices ----------------------------------------------------------------------------


def test_choices_waiting_for_their_siblings_count_as_no_queue():
    world = World(queue_timeout_s=5.0).join(max_running=1)
    entries, inbox = world.submit(16, 16, 16)
    for entry in entries:
        world.now += 4.0  # 12 s in all, and the request is at the workers all the time
        world.dispatcher.tick()
        world.finish(entry.room.room)
    assert [event for event in events(inbox) if isinstance(event, (Ended, Failure))] == [Ended("stop")] * 3


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_request_without_its_pages_outlasts_the_queue_timeout(has_begun):
    world = World(queue_timeout_s=5.0).join(max_running=1)
    (entry,), inbox = world.submit(16)
    one = {"room": entry.room.room, "epoch": 0}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    if has_begun:
        world.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **one))
    full = WorkerStats(pages_total=world.dispatcher.registry.get(D).hello.pages_total, pages_free=0)
    world.dispatcher.on_message(
        b"d", Failed(instance=D, kind="Retracted", message="full", retryable=True, **one)
    )
    again = {"room": entry.room.room, "epoch": 1}
    world.dispatcher.on_message(b"d", Refused(instance=D, reason="full", retry_after_ms=250, **again))
    world.dispatcher.on_message(b"d", Heartbeat(instance=D, stats=full))
    world.now = 9.0
    world.dispatcher.tick()
    assert entry.room.num_retractions == 1
    assert entry.room.is_live
    assert world.dispatcher.num_queued == 1
    if has_begun:
        assert [type(event) for event in events(inbox)] == [Deliver]


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_pages_that_were_lost_behind_a_refusal_count(is_overtaken):
    """Also those of which the router hears after decode has nothing of the request any more."""
    world = World().join()
    (entry,), _ = world.submit(16)
    one = {"room": entry.room.room, "epoch": 0}
    world.dispatcher.on_message(b"p", Refused(instance=P, reason="full", retry_after_ms=250, **one))
    lost = Failed(instance=D, kind="Retracted", message="full", retryable=True, **one)
    if is_overtaken:
        world.dispatcher.on_message(b"d", Gone(instance=D, **one))
    for _ in range(2):
        world.dispatcher.on_message(b"d", lost)
    assert entry.room.num_retractions == 1
    world.now += 1.0
    stats = WorkerStats(pages_total=1000, pages_free=1000)
    for identity, instance in ((b"p", P), (b"d", D)):
        world.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))
    world.dispatcher.tick()
    order = world.of(b"d", Reserve)[-1]
    assert (order.epoch, order.granted_output) == (1, order.expected_output)


def test_a_request_that_no_order_could_continue_holds_its_whole_output(monkeypatch):
    world = World().join()
    world.submit(16)
    monkeypatch.setattr(dispatcher, "MAX_PROMPT_TOKENS", 31)
    world.submit(16)
    assert [order.expected_output for order in world.of(b"d", Reserve)] == [16, 0]


def test_choices_still_queued_behind_siblings_time_out_with_one_warning(caplog):
    world = World(queue_timeout_s=5.0).join(max_running=1)
    (first, *_), inbox = world.submit(16, 16, 16)
    world.now = 9.0
    world.dispatcher.registry.drain(world.dispatcher.registry.get(D))
    world.finish(first.room.room)
    world.now = 13.0
    world.dispatcher.tick()
    assert world.dispatcher.num_queued == 2
    world.now = 14.1
    with caplog.at_level(logging.WARNING):
        world.dispatcher.tick()
    assert [event.kind for event in events(inbox) if isinstance(event, Failure)] == ["QueueTimeout"] * 2
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == ["failed"]


def test_a_request_counts_once_whatever_its_choices_and_with_their_tokens():
    world = World().join()
    entries, _ = world.submit(16, 16, 16)
    for entry in entries[:2]:
        world.finish(entry.room.room)
    assert 'baton_requests_total{model_name="m",outcome="ok"} 0.0' in _metrics(world)
    world.finish(entries[2].room.room)
    text = _metrics(world)
    assert 'baton_requests_total{model_name="m",outcome="ok"} 1.0' in text
    assert 'baton_output_tokens_total{model_name="m"} 6.0' in text
    assert 'baton_request_seconds_count{model_name="m",priority="normal",route="chat"} 1.0' in text


def test_a_request_of_which_one_choice_failed_has_failed():
    world = World().join()
    entries, _ = world.submit(16, 16)
    world.finish(entries[0].room.room)
    failed = {"epoch": 0, "instance": D, "kind": "TransferTimeout", "message": "", "retryable": False}
    world.dispatcher.on_message(b"d", Failed(room=entries[1].room.room, **failed))
    assert 'outcome="failed"} 1.0' in _metrics(world)
    assert 'outcome="ok"} 0.0' in _metrics(world)


def test_a_full_queue_counts_one_rejected_request():
    world = World(max_queue=1).join(max_running=1)
    with pytest.raises(ApiError):
        world.submit(16, 16, 16)
    assert 'outcome="rejected"} 1.0' in _metrics(world)
    assert 'outcome="cancelled"} 0.0' in _metrics(world)


def test_a_stopped_choice_counts_the_tokens_that_decode_reports():
    world = World().join()
    (entry,), inbox = world.submit(16)
    begin(world, entry)
    world.dispatcher.stopped(entry)
    assert 'outcome="ok"} 0.0' in _metrics(world)
    account = DecodeTimeline(drafted_tokens=6, accepted_tokens=4, verify_steps=2)
    world.dispatcher.on_message(b"d", Gone(room=entry.room.room, epoch=0, instance=D, timeline=account))
    assert events(inbox)[-1] == Settled()
    text = _metrics(world)
    assert 'outcome="ok"} 1.0' in text
    assert 'baton_accepted_tokens_total{model_name="m"} 4.0' in text


def test_a_request_that_times_out_ends_with_that_error_at_its_workers_too():
    world = World(request_timeout_s=20.0).join()
    (entry,), inbox = world.submit(16)
    assert world.of(b"d", Reserve)[0].deadline_ms == world.of(b"p", Prefill)[0].deadline_ms == 20_000
    begin(world, entry)
    world.now = 19.9
    world.dispatcher.tick()
    assert world.of(b"d", Cancel) == []
    world.now = 20.1
    world.dispatcher.tick()
    assert events(inbox)[-1].kind == "DeadlineExceeded"
    assert len(world.of(b"d", Cancel)) == len(world.of(b"p", Cancel)) == 1
    assert 'outcome="timeout"} 1.0' in _metrics(world)


def test_messages_dropped_by_the_control_socket_are_in_the_metrics():
    world = World(drops=lambda: {"control_malformed": 3, "control_oversized": 0})
    assert 'baton_router_events_total{event="control_malformed",model_name="m"} 3.0' in _metrics(world)
    assert 'event="control_oversized",model_name="m"} 0.0' in _metrics(world)
    assert status_of(world.dispatcher, "m", 0.0, 0.0).router.events["control_malformed"] == 3


def test_times_and_lengths_of_a_request_count_under_its_route_and_priority():
    world = World().join()
    sampling = Sampling(max_new_tokens=2)
    job = Job(
        prompt_ids=[5] * 20, sampling=sampling, arrived=0.0, tokenize_s=0.0, route="responses", priority=3
    )
    (entry,) = world.dispatcher.submit([job], Inbox(lambda: world.now))
    world.now = 1.0
    world.finish(entry.room.room)
    text, labels = _metrics(world), 'model_name="m",priority="low",route="responses"'
    assert f"baton_request_seconds_count{{{labels}}} 1.0" in text
    assert f"baton_inter_token_seconds_count{{{labels}}} 1.0" in text
    assert f"baton_request_prompt_tokens_sum{{{labels}}} 20.0" in text
    assert f"baton_request_output_tokens_sum{{{labels}}} 2.0" in text


@pytest.mark.parametrize("has_first", [True, False])
def test_a_drained_prefill_worker_is_no_loss_to_streams_that_have_begun(has_first):
    world = World().join()
    (entry,), inbox = world.submit(16)
    one = {"room": entry.room.room, "epoch": 0}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    if has_first:
        world.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **one))
    world.dispatcher.on_message(b"p", Goodbye(instance=P))
    world.dispatcher.lose([world.dispatcher.registry.get(P)])
    assert world.dispatcher.events["worker_lost"] == (not has_first)
    if has_first:
        world.dispatcher.on_message(b"d", Finished(instance=D, reason="stop", output_tokens=1, **one))
        assert [type(event) for event in events(inbox)] == [Deliver, Ended]
