"""Canaries on a fake clock and a fake wire: targets, times, proof, and no effect on clients."""

import pytest
from baton.cluster.protocol.messages import (
    DecodeTimeline,
    Failed,
    Finished,
    FirstToken,
    Gone,
    Heartbeat,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    TokenItem,
    Tokens,
    WorkerStats,
)
from baton.router.endpoints.status import metrics_of, status_of, why_not_ready
from baton.router.workers.registry import UNREACHABLE_S
from baton.tests.unit.router.scheduling.test_dispatcher import World, events
from baton.tests.unit.router.workers.test_registry import hello

WINDOW_S = 8.0
HALF_S, QUARTER_S = WINDOW_S / 2 + 0.1, WINDOW_S / 4 + 0.1  # and a tick
P, D, P2 = "1" * 32, "2" * 32, "3" * 32


class Yard(World):
    """A world with canaries."""

    def __init__(self, **settings):
        super().__init__(**{"canary_s": WINDOW_S} | settings)

    def wait(self, seconds):
        """Time passes, tick by tick."""
        for _ in range(round(seconds * 10)):
            self.now = round(self.now + 0.1, 3)
            self.dispatcher.tick()

    @property
    def is_ready(self):
        return self.dispatcher.is_ready

    def asked(self):
        """The canaries that decode was given, oldest first."""
        return [order for order in self.of(b"d", Reserve) if order.salt.startswith("canary")]

    def answer(self, order, *, prefill=P):
        self.finish(order.room, prefill=prefill)

    def finish(self, room, *, prefill=P, timeline=None):
        timeline = timeline or DecodeTimeline(handoff_blocks=1)
        one = {"room": room, "epoch": 0}
        self.dispatcher.on_message(b"d", Reserved(instance=D, **one))
        self.dispatcher.on_message(b"p", FirstToken(instance=prefill, token=9, **one))
        self.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=1, ids=[8], **one)]))
        self.dispatcher.on_message(
            b"d", Finished(instance=D, reason="length", output_tokens=2, timeline=timeline, **one)
        )

    def fail(self, order, kind="TransferTimeout"):
        told = Failed(
            room=order.room, epoch=0, instance=D, kind=kind, message="tcp://10.0.0.2:1", retryable=True
        )
        self.dispatcher.on_message(b"d", told)
        for identity, instance in ((b"p", P), (b"d", D)):
            self.dispatcher.on_message(identity, Gone(room=order.room, epoch=0, instance=instance))

    def pair(self, prefill=P):
        [found] = [pair for pair in self.status().pairs if pair.prefill == prefill]
        return found

    def status(self):
        return status_of(self.dispatcher, "m", 0.0, self.now)

    def metric(self, line):
        return line in metrics_of(self.dispatcher).decode().splitlines()

    def placed(self):
        return {worker.instance: worker.num_rooms for worker in self.dispatcher.registry}


def proven(**decode):
    world = Yard().join(**decode)
    world.wait(0.1)
    world.answer(world.asked()[0])
    return world


def test_a_pair_is_ready_once_a_canary_has_passed_it_and_not_before():
    world = Yard().join()
    assert not world.is_ready
    world.wait(0.1)
    [order] = world.asked()
    assert (len(order.prompt_ids), order.sampling.max_new_tokens) == (4, 2)
    [prompt] = world.of(b"p", Prefill)
    assert prompt.salt == order.salt, "one tenant of its own: no prefix cache answers for prefill"
    assert "no request has passed" in why_not_ready(world.dispatcher, world.now)
    world.answer(order)
    assert world.is_ready
    assert why_not_ready(world.dispatcher, world.now) == ""
    assert set(world.placed().values()) == {0}
    assert world.metric('baton_ready{model_name="m"} 1.0')
    assert world.metric('baton_canaries_total{model_name="m",outcome="passed"} 1.0')


def test_an_idle_pair_gets_a_canary_per_half_window_and_stays_ready():
    world = proven()
    for at in range(1, 6):
        world.wait(HALF_S)
        assert len(world.asked()) == 1 + at
        world.answer(world.asked()[-1])
        assert world.is_ready
    assert world.pair().state == "proven"


def test_without_answers_a_pair_is_not_ready_after_one_window():
    world = proven()
    world.wait(WINDOW_S + 0.1)
    assert not world.is_ready, "the canary of half a window was not answered within half a window"
    pair = world.pair()
    assert (pair.state, pair.failures, pair.kind) == ("failing", 1, "DeadlineExceeded")
    assert "decode reserved nothing" in pair.reason
    assert world.status().router.why_not_ready.endswith(": DeadlineExceeded on 1 of 1 pairs")
    assert world.metric(
        f'baton_failing_pairs{{decode="{D}",kind="DeadlineExceeded",model_name="m",prefill="{P}"}} 1.0'
    )


def test_a_failed_canary_names_pair_and_reason_and_a_passing_one_heals_it():
    world = proven()
    world.wait(HALF_S)
    world.fail(world.asked()[-1])
    assert not world.is_ready
    assert (world.pair().kind, world.pair().reason) == ("TransferTimeout", "tcp://10.0.0.2:1")
    told = why_not_ready(world.dispatcher, world.now)
    assert told.endswith(": TransferTimeout on 1 of 1 pairs")
    assert not any(word in told for word in ("10.0.0.2", P[:8], D[:8])), "anybody may ask /ready"
    world.wait(QUARTER_S)
    assert len(world.asked()) == 3, "a failing pair is asked twice as often"
    world.answer(world.asked()[-1])
    assert world.is_ready
    assert world.pair().failures == 0
    assert set(world.placed().values()) == {0}


def test_successful_client_requests_replace_canaries():
    world = proven()
    for _ in range(20):
        world.wait(1.0)
        (entry,), _ = world.submit(2)
        world.now += 0.1
        world.finish(entry.room.room)
    assert len(world.asked()) == 1
    assert world.is_ready


@pytest.mark.parametrize(
    "timeline", [DecodeTimeline(), DecodeTimeline(handoff_blocks=1, queue_ms=1000.0, decode_ms=9000.0)]
)
def test_the_end_of_a_stream_shows_no_more_than_when_its_blocks_came(timeline):
    world = proven()
    entry = streaming(world)
    world.now += WINDOW_S + 1.0
    told = Finished(
        room=entry.room.room, epoch=0, instance=D, reason="length", output_tokens=2, timeline=timeline
    )
    world.dispatcher.on_message(b"d", told)
    assert entry.room.phase.value == "closed"
    assert not world.is_ready


def test_a_clients_failed_hand_off_makes_a_canary_due_and_decides_nothing():
    world = proven()
    (entry,), _ = world.submit(2)
    failed = Failed(
        room=entry.room.room, epoch=0, instance=D, kind="DigestMismatch", message="m", retryable=True
    )
    world.dispatcher.on_message(b"d", failed)
    assert world.is_ready
    world.dispatcher.cancel(entry)
    for identity, instance in ((b"p", P), (b"d", D)):
        world.dispatcher.on_message(identity, Gone(room=entry.room.room, epoch=1, instance=instance))
    world.wait(0.1)
    assert len(world.asked()) == 2


def test_a_canary_delays_no_request():
    world = Yard().join(max_running=2)
    world.wait(0.1)
    world.answer(world.asked()[0])
    (entry,), _ = world.submit(2)
    world.wait(2 * WINDOW_S)
    assert len(world.asked()) == 1, "it would take the last place"
    world.finish(entry.room.room)
    world.submit(2, 2, 2)
    assert world.dispatcher.num_queued
    world.wait(WINDOW_S)
    assert len(world.asked()) == 1, "somebody waits"


def streaming(world, max_new=100):
    """A client's request whose stream goes on."""
    (entry,), _ = world.submit(max_new)
    one = {"room": entry.room.room, "epoch": 0}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    world.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **one))
    world.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=1, ids=[8], **one)]))
    return entry


def test_a_stream_proves_its_pair_once_with_decodes_first_token():
    world = Yard().join()
    world.wait(0.1)
    assert not world.is_ready
    streaming(world)
    assert world.is_ready
    world.wait(WINDOW_S + HALF_S)
    assert not world.is_ready, "canaries have got no answer since, and what goes on shows no hand-off"


def test_a_full_pair_stays_ready_for_some_windows_unless_a_hand_off_fails():
    world = Yard().join(max_running=2)
    world.wait(0.1)
    world.answer(world.asked()[0])
    streaming(world), streaming(world)
    world.wait(4 * WINDOW_S)
    assert world.is_ready
    assert len(world.asked()) == 1
    world.wait(4 * WINDOW_S)
    assert not world.is_ready, "not for ever"

    world = Yard().join(max_running=2)
    world.wait(0.1)
    world.answer(world.asked()[0])
    streaming(world)
    world.wait(0.1)
    (entry,), _ = world.submit(2)
    failed = Failed(
        room=entry.room.room, epoch=0, instance=D, kind="TransferTimeout", message="m", retryable=True
    )
    world.dispatcher.on_message(b"d", failed)
    world.wait(WINDOW_S + 0.2)
    assert not world.is_ready


def test_a_busy_prefill_worker_is_left_alone():
    world = proven()
    world.submit(2)
    world.wait(3 * WINDOW_S)
    assert len(world.asked()) == 1


def test_a_canary_is_in_no_count_and_no_history():
    world = proven()
    assert world.metric('baton_requests_total{model_name="m",outcome="ok"} 0.0')
    assert world.metric('baton_output_tokens_total{model_name="m"} 0.0')
    status = world.status().router
    assert (status.open_rooms, status.queued, status.running) == (0, 0, 0)
    assert not any(status.events.values())
    assert repr(world.dispatcher.history) == "History(0 open, 0 ended)"


def test_a_refused_canary_decides_nothing():
    world = proven()
    world.wait(HALF_S)
    order = world.asked()[-1]
    told = Refused(room=order.room, epoch=0, instance=D, reason="full", retry_after_ms=50)
    world.dispatcher.on_message(b"d", told)
    assert world.is_ready
    assert world.metric('baton_canaries_total{model_name="m",outcome="undecided"} 1.0')
    world.dispatcher.on_message(b"p", Gone(room=order.room, epoch=0, instance=P))
    assert world.dispatcher.health_probes.outcomes == {"passed": 1, "undecided": 1}
    assert set(world.placed().values()) == {0}


def test_a_canary_that_is_late_behind_a_client_decides_nothing():
    world = proven()
    world.wait(HALF_S)
    world.submit(2)
    world.wait(HALF_S)
    assert world.pair().failures == 0
    assert world.dispatcher.health_probes.outcomes["undecided"] == 1


def test_clients_are_sent_past_a_failing_pair_where_another_serves():
    world = Yard().join()
    world.sent[b"p2"] = []
    message = hello(instance=P2, role="prefill")
    world.dispatcher.on_message(b"p2", message)
    world.dispatcher.on_message(b"p2", Heartbeat(instance=P2, stats=WorkerStats(pages_total=8, pages_free=8)))
    world.wait(0.2)
    first, second = sorted(world.asked(), key=lambda order: order.prefill_instance)
    world.fail(first)
    world.answer(second, prefill=P2)
    assert world.is_ready, "one pair is enough"
    assert [pair.state for pair in world.status().pairs] == ["failing", "proven"]
    for _ in range(4):
        (entry,), _ = world.submit(2)
        assert entry.room.pair.prefill == P2
        world.finish(entry.room.room, prefill=P2)


def test_without_another_way_a_failing_pair_is_tried_by_clients_too():
    world = Yard().join()
    world.wait(0.1)
    world.fail(world.asked()[0])
    (entry,), inbox = world.submit(2)
    assert entry.room.pair.prefill == P
    world.now += 1.0
    world.finish(entry.room.room)
    assert world.is_ready, "it passed"
    assert events(inbox)


def test_a_lost_worker_takes_its_canary_and_its_pair_along():
    world = proven()
    world.wait(HALF_S)
    world.lost.add(b"d")
    world.dispatcher.probe()
    world.wait(UNREACHABLE_S + 0.2)
    assert not world.is_ready
    assert why_not_ready(world.dispatcher, world.now) == "no decode worker is ready"
    assert world.status().pairs == []
    world.dispatcher.on_message(b"p", Gone(room=world.asked()[-1].room, epoch=0, instance=P))
    assert world.placed() == {P: 0}


def test_without_a_window_registered_is_ready_and_nothing_is_sent():
    world = Yard(canary_s=0.0).join()
    world.wait(10)
    assert world.is_ready
    assert not world.asked()
    assert world.status().pairs == []


def test_a_router_that_drains_sends_none():
    world = proven()
    world.dispatcher.is_draining = True
    world.wait(2 * WINDOW_S)
    assert len(world.asked()) == 1


def test_many_pairs_share_the_pace_of_a_few():
    world = Yard()
    for i in range(12):
        role, identity = ("prefill", b"p") if i % 2 else ("decode", b"d")
        message = hello(instance=f"{i:032x}", role=role)
        world.dispatcher.on_message(identity, message)
        stats = WorkerStats(pages_total=message.pages_total, pages_free=message.pages_total)
        world.dispatcher.on_message(identity, Heartbeat(instance=message.instance, stats=stats))
    answered = set()
    num_before = 0
    for second in range(40):
        for _ in range(10):
            world.wait(0.1)
            for order in [order for order in world.asked() if order.room not in answered]:
                answered.add(order.room)
                one = {"room": order.room, "epoch": 0}
                world.dispatcher.on_message(b"d", Reserved(instance=order.instance, **one))
                world.dispatcher.on_message(b"p", FirstToken(instance=order.prefill_instance, token=9, **one))
                ended = Finished(
                    instance=order.instance, reason="length", output_tokens=2,
                    timeline=DecodeTimeline(handoff_blocks=1), **one,
                )  # fmt: skip
                tokens = Tokens(instance=order.instance, items=[TokenItem(seq=1, ids=[8], **one)])
                world.dispatcher.on_message(b"d", tokens)
                world.dispatcher.on_message(b"d", ended)
        if second == 19:
            num_before = len(answered)
    assert {pair.state for pair in world.status().pairs} <= {"proven", "stale"}
    assert len(world.status().pairs) == 36
    assert len(answered) - num_before <= 20 * 16 / (WINDOW_S / 4) + 1
    assert world.is_ready
