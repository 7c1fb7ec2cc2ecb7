"""The dispatcher when workers leave: the next attempt's pair, its waiting time, the number of attempts."""

import asyncio

import pytest
from baton.cluster.protocol.messages import (
    Failed,
    Finished,
    FirstToken,
    Gone,
    Goodbye,
    Heartbeat,
    Prefill,
    PrefillTimeline,
    Refused,
    Reserve,
    Reserved,
    TokenItem,
    Tokens,
    WorkerStats,
)
from baton.router.rooms.effects import Deliver, Ended, Failure, Timeouts
from baton.router.rooms.retries import BUDGET_FLOOR
from baton.router.workers.breaker import BREAKER_OPEN_S
from baton.router.workers.registry import UNREACHABLE_S
from baton.tests.unit.router.scheduling.test_dispatcher import World, begin, events
from baton.tests.unit.router.workers.test_registry import hello

P, D, P2, D2 = ("1" * 32, "2" * 32, "4" * 32, "5" * 32)
PAIR_S = Timeouts().pair_s


class Cluster(World):
    """A world with workers that come and go."""

    def add(self, *workers):
        """`workers` are (identity, instance, role), and a group if they have one."""
        for identity, instance, role, *group in workers:
            self.sent.setdefault(identity, [])
            self.lost.discard(identity)
            self.dispatcher.on_message(identity, hello(instance=instance, role=role, group="".join(group)))
            stats = WorkerStats(pages_total=100, pages_free=100)
            self.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))
        return self

    def kill(self, *workers):
        """(identity, instance) die, and the router notices."""
        registry = self.dispatcher.registry
        self.lost |= {identity for identity, _ in workers}
        self.dispatcher.lose([registry.get(instance) for _, instance in workers])

    def pass_time(self, seconds):
        self.now += seconds
        self.dispatcher.tick()

    def epochs(self, identity):
        return [message.epoch for message in self.of(identity, Reserve)]


def two_pairs(**settings):
    return Cluster(**settings).add((b"p", P, "prefill"), (b"d", D, "decode")), [
        (b"p2", P2, "prefill"),
        (b"d2", D2, "decode"),
    ]


def test_a_stream_resumes_on_another_decode_as_one_answer_for_the_client():
    world, others = two_pairs()
    (entry,), inbox = world.submit(16)
    begin(world, entry)
    world.add(*others)
    world.kill((b"d", D))
    (reserve,) = world.of(b"d2", Reserve)
    assert (reserve.epoch, reserve.prompt_ids, reserve.num_output) == (1, [5] * 16 + [9], 1)
    prefill = next(m for identity in (b"p", b"p2") for m in world.of(identity, Prefill) if m.epoch == 1)
    one = {"room": entry.room.room, "epoch": 1}
    world.dispatcher.on_message(b"d2", Reserved(instance=D2, **one))
    world.dispatcher.on_message(b"p", FirstToken(instance=prefill.instance, token=10, **one))
    world.dispatcher.on_message(b"d2", Tokens(instance=D2, items=[TokenItem(seq=1, ids=[11], **one)]))
    world.dispatcher.on_message(b"d2", Finished(instance=D2, reason="stop", output_tokens=2, **one))
    assert events(inbox) == [Deliver([9], []), Deliver([10], []), Deliver([11], []), Ended("stop")]
    assert (world.dispatcher.events["resumed"], entry.timeline(world.now).attempts) == (1, 2)


def test_suspects_of_a_death_are_placed_one_at_a_time():
    world, others = two_pairs()
    entries = [world.submit(16)[0][0] for _ in range(3)]
    world.add(*others)
    world.kill((b"p", P))
    (tried,) = world.of(b"p2", Prefill)
    (fresh,), _ = world.submit(16)
    assert [m.room for m in world.of(b"p2", Prefill)] == [tried.room, fresh.room.room], (
        "it never was with a dead worker"
    )
    one = {"room": tried.room, "epoch": 1}
    identity, decode = next(
        (i, d) for i, d in ((b"d", D), (b"d2", D2)) if any(m.epoch == 1 for m in world.of(i, Reserve))
    )
    world.dispatcher.on_message(identity, Reserved(instance=decode, **one))
    world.dispatcher.on_message(b"p2", FirstToken(instance=P2, token=9, **one))
    assert len(world.of(b"p2", Prefill)) == 2, "decode may still die of it"
    world.dispatcher.on_message(identity, Tokens(instance=decode, items=[TokenItem(seq=1, ids=[10], **one)]))
    assert [m.epoch for m in world.of(b"p2", Prefill)] == [1, 0, 1], "the next one's turn"
    world.kill((b"p2", P2))
    last = world.of(b"p2", Prefill)[-1].room
    assert [entry.room.room for entry in entries if entry.room.deaths.must_be_alone] == [last], "alone"


def test_a_stream_without_a_pair_waits_and_resumes_when_one_comes_back():
    world, others = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.kill((b"d", D))
    world.pass_time(PAIR_S - 0.1)
    assert world.dispatcher.num_queued == 1
    world.add(*others)
    assert world.epochs(b"d2") == [1]
    world.pass_time(PAIR_S)
    assert entry.room.is_live


def full_pair_after_an_outage():
    """A stream that had no pair waits for a decode worker that came back and has no place for it."""
    world, _ = two_pairs()
    (entry,), inbox = world.submit(64)
    begin(world, entry)
    world.kill((b"d", D))
    world.pass_time(PAIR_S - 0.1)
    world.sent.setdefault(b"d2", [])
    world.dispatcher.on_message(b"d2", hello(instance=D2, role="decode"))
    stats = WorkerStats(pages_total=100, pages_free=1)
    world.dispatcher.on_message(b"d2", Heartbeat(instance=D2, stats=stats))
    world.pass_time(0.01)
    assert (entry.room.phase.value, entry.pairless_since) == ("queued", None), "a pair could hold it one day"
    return world, entry, inbox


def test_a_second_outage_gives_a_stream_as_long_as_the_first():
    world, entry, _ = full_pair_after_an_outage()
    world.kill((b"d2", D2))
    world.pass_time(PAIR_S - 0.1)
    assert entry.room.is_live
    world.pass_time(0.2)
    assert not entry.room.is_live


def test_a_stream_placed_between_two_outages_waits_its_whole_time_again():
    world, others = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.kill((b"d", D))
    world.pass_time(PAIR_S - 0.1)
    world.add(others[1])
    world.now += 0.2  # and no tick
    world.kill((b"d2", D2))
    assert entry.room.is_live


def test_after_an_outage_no_room_overtakes_one_that_waits_for_a_full_pair():
    world, entry, _ = full_pair_after_an_outage()
    (small,), _ = world.submit(1)
    stats = WorkerStats(pages_total=100, pages_free=2)
    world.dispatcher.on_message(b"d2", Heartbeat(instance=D2, stats=stats))
    assert rooms_at(world, b"d2") == [], "two pages are enough for the small one only"
    world.dispatcher.on_message(
        b"d2", Heartbeat(instance=D2, stats=WorkerStats(pages_total=100, pages_free=100))
    )
    assert rooms_at(world, b"d2") == [entry.room.room, small.room.room]


def test_a_stream_without_a_pair_ends_with_an_error_when_none_comes_back():
    world, _ = two_pairs()
    (entry,), inbox = world.submit(16)
    begin(world, entry)
    world.kill((b"d", D))
    world.pass_time(PAIR_S + 0.1)
    assert not entry.room.is_live
    assert events(inbox) == [Deliver([9], []), Failure("PeerLost", "no pair is left to go on with")]


def test_a_request_that_has_no_token_yet_does_not_wait_for_a_pair():
    world, _ = two_pairs()
    (entry,), inbox = world.submit(16)
    world.kill((b"d", D))
    assert not entry.room.is_live
    assert [event.kind for event in events(inbox)] == ["NoWorkers"]


def test_rooms_do_not_move_to_a_worker_that_is_lost_at_the_same_time():
    world, others = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.add(*others)
    world.kill((b"d", D), (b"d2", D2))
    assert world.epochs(b"d2") == []
    assert (entry.room.epoch, entry.room.deaths.died_with) == (0, {D})


def test_an_unreachable_worker_is_tried_last_and_costs_the_request_nothing():
    world, others = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.add(others[1])
    world.lost = {b"d2"}
    world.kill((b"d", D))
    assert entry.room.epoch == 1, "the only decode worker there is"
    world.add((b"d3", "6" * 32, "decode"))
    world.pass_time(UNREACHABLE_S + 0.1)
    assert world.epochs(b"d3") == [2]
    assert (entry.room.is_live, entry.room.deaths.died_with) == (True, {D})


D3, P3, P4, D4 = ("6" * 32, "7" * 32, "8" * 32, "9" * 32)
ALONE_S = Timeouts().alone_s


def after_two_deaths():
    """A request that two decode workers died with, and an innocent one that runs on (P or P2, D3)."""
    world, others = two_pairs()
    (entry,), inbox = world.submit(16)
    world.add(*others)
    world.kill((b"d", D))
    world.now += 1.0
    world.add((b"d3", D3, "decode"))
    (innocent,), _ = world.submit(16)
    assert [message.room for message in world.of(b"d2", Reserve)] == [entry.room.room]
    assert [message.room for message in world.of(b"d3", Reserve)] == [innocent.room.room]
    world.kill((b"d2", D2))
    assert entry.room.deaths.died_with == {D, D2}
    return world, entry, inbox, innocent


def rooms_at(world, identity):
    return [message.room for message in world.of(identity, Reserve)]


def test_after_two_deaths_a_request_waits_for_a_pair_of_its_own():
    world, entry, _, innocent = after_two_deaths()
    world.pass_time(ALONE_S / 2)
    assert rooms_at(world, b"d3") == [innocent.room.room], "not with another"
    world.add((b"p4", P4, "prefill"), (b"d4", D4, "decode"))
    assert entry.room.alone_on == (P4, D4)


def test_without_an_idle_pair_it_goes_to_the_emptiest_in_bounded_time():
    world, entry, _, innocent = after_two_deaths()
    world.pass_time(ALONE_S + 0.1)
    assert rooms_at(world, b"d3") == [innocent.room.room, entry.room.room]


def test_of_busy_pairs_it_takes_the_one_with_the_fewest_rooms():
    world, entry, _, _ = after_two_deaths()
    world.submit(16)
    assert len(rooms_at(world, b"d3")) == 2
    world.sent.setdefault(b"d4", [])
    world.dispatcher.on_message(b"d4", hello(instance=D4, role="decode"))
    stats = WorkerStats(
        pages_total=100, pages_free=10, running=1
    )  # one room of another router: fuller, and emptier
    world.dispatcher.on_message(b"d4", Heartbeat(instance=D4, stats=stats))
    world.pass_time(ALONE_S + 0.1)
    assert rooms_at(world, b"d4") == [entry.room.room]


def test_a_request_returns_to_a_silent_worker_only_when_that_answered():
    world, _ = two_pairs()
    (entry,), _ = world.submit(16)
    fail(world, entry, kind="PeerLost")
    assert world.epochs(b"d") == [0], "P may be dead, and there is no other"
    world.dispatcher.on_message(b"p", Gone(room=entry.room.room, epoch=0, instance=P))
    assert world.epochs(b"d") == [0, 1]
    fail(world, entry, kind="PeerLost")
    world.pass_time(Timeouts().suspect_s - 0.1)
    assert world.epochs(b"d") == [0, 1]
    world.pass_time(0.2)
    assert world.epochs(b"d") == [0, 1, 2], "it did not answer, and is not lost"


def test_no_room_is_placed_beside_one_that_must_be_alone():
    world, entry, _, _ = after_two_deaths()
    world.add((b"p4", P4, "prefill"), (b"d4", D4, "decode"))
    others = [world.submit(16)[0][0] for _ in range(4)]
    assert all(other.room.is_at_workers for other in others), "other workers serve them"
    assert rooms_at(world, b"d4") == [entry.room.room]
    assert len(world.of(b"p4", Prefill)) == 1
    one = {"room": entry.room.room, "epoch": 2}
    world.dispatcher.on_message(b"d4", Reserved(instance=D4, **one))
    world.dispatcher.on_message(b"p4", FirstToken(instance=P4, token=9, **one))
    assert entry.room.alone_on == (P4, D4), "decode may still die of it"
    world.dispatcher.on_message(b"d4", Tokens(instance=D4, items=[TokenItem(seq=1, ids=[8], **one)]))
    for _ in range(4):
        world.submit(16)
    assert len(rooms_at(world, b"d4")) > 1


def test_a_third_death_ends_the_request_and_is_held_against_no_other():
    world, entry, inbox, innocent = after_two_deaths()
    world.pass_time(ALONE_S + 0.1)
    assert D3 in entry.room.alone_on
    world.kill((b"d3", D3))
    assert [event.kind for event in events(inbox)] == ["Quarantined"]
    assert world.dispatcher.events["quarantined"] == 1
    assert not innocent.room.deaths


D5 = "a" * 32
RANKS = {D4: b"d4", D5: b"d5"}  # of one worker, which end together


def after_two_deaths_beside_ranks():
    """As `after_two_deaths`, with an innocent request that runs on one of two ranks: also its instance."""
    world, others = two_pairs()
    (entry,), inbox = world.submit(16)
    world.add(*others)
    world.kill((b"d", D))
    world.now += 1.0
    world.add(*((identity, rank, "decode", D4) for rank, identity in RANKS.items()))
    (innocent,), _ = world.submit(16)
    world.kill((b"d2", D2))
    assert entry.room.deaths.died_with == {D, D2}
    return world, entry, inbox, innocent, innocent.room.pair.decode


def test_a_rank_beside_a_busy_one_is_no_place_to_be_alone():
    world, entry, _, _, busy = after_two_deaths_beside_ranks()
    (idle,) = RANKS.keys() - {busy}
    world.pass_time(ALONE_S / 2)
    assert rooms_at(world, RANKS[idle]) == [], "it would end with the busy one"
    world.pass_time(ALONE_S)
    assert rooms_at(world, RANKS[idle]) == [entry.room.room], "in bounded time"
    for _ in range(4):
        world.submit(16)
    assert len(rooms_at(world, b"d4") + rooms_at(world, b"d5")) == 2, "nothing is placed beside it"


@pytest.mark.parametrize("is_first", [True, False], ids=["its rank first", "its rank last"])
def test_the_end_of_all_ranks_counts_against_the_request_alone_on_one(is_first):
    world, entry, inbox, innocent, busy = after_two_deaths_beside_ranks()
    world.pass_time(ALONE_S + 0.1)
    own = entry.room.alone_on[1]
    assert {own, busy} == set(RANKS)
    for rank in (own, busy) if is_first else (busy, own):
        world.kill((RANKS[rank], rank))
    assert [event.kind for event in events(inbox)] == ["Quarantined"]
    assert not innocent.room.deaths


def fail(world, entry, identity=b"d", instance=D, kind="BadLogits", retryable=True):
    message = {
        "room": entry.room.room,
        "epoch": entry.room.epoch,
        "kind": kind,
        "message": "",
        "retryable": retryable,
    }
    world.dispatcher.on_message(identity, Failed(instance=instance, **message))


def test_the_retry_budget_is_shared_and_exceeding_it_has_its_own_error():
    world, _ = two_pairs(max_queue=100)
    kinds = []
    for _ in range(BUDGET_FLOOR + 3):
        (entry,), inbox = world.submit(16)
        fail(world, entry)
        if not entry.room.is_live:
            kinds += [event.kind for event in events(inbox)]
        world.dispatcher.cancel(entry)
        for worker in list(world.dispatcher.registry):
            worker.forget_rooms()
    assert kinds == ["BadLogits"] * 3
    assert (world.dispatcher.events["retry_denied"], world.dispatcher.events["requeued"]) == (3, BUDGET_FLOOR)


def test_a_dead_worker_with_more_rooms_than_the_budget_fails_none():
    world = Cluster(max_queue=100).join(max_running=64, pages_total=1000)
    entries = [world.submit(1)[0][0] for _ in range(BUDGET_FLOOR + 5)]
    assert all(entry.room.is_at_workers for entry in entries)
    world.add((b"d2", D2, "decode"))
    world.kill((b"d", D))
    assert all(entry.room.is_live for entry in entries)
    assert world.dispatcher.events["retry_denied"] == 0


def test_rooms_handed_back_by_a_leaving_worker_go_on_at_no_cost():
    world, others = two_pairs()
    (entry,), inbox = world.submit(16)
    begin(world, entry)
    world.dispatcher.on_message(b"d", Goodbye(instance=D))
    world.add(*others)
    for _ in range(5):
        fail(world, entry, kind="Draining")
    assert world.epochs(b"d2") == [1]
    assert (entry.room.is_live, entry.room.failed_on) == (True, set())
    assert events(inbox) == [Deliver([9], [])]


def test_refusals_cost_nothing_of_the_budget_and_open_no_breaker():
    world, _ = two_pairs()
    (entry,), _ = world.submit(16)
    for epoch in range(2 * BUDGET_FLOOR):
        refused = {"room": entry.room.room, "epoch": epoch, "reason": "full", "retry_after_ms": 1}
        world.dispatcher.on_message(b"d", Refused(instance=D, **refused))
        world.pass_time(0.01)
        assert entry.room.epoch == epoch, "it waits for the worker's next heartbeat"
        world.dispatcher.on_message(
            b"d", Heartbeat(instance=D, stats=WorkerStats(pages_total=100, pages_free=100))
        )
    assert entry.room.epoch == 2 * BUDGET_FLOOR
    assert not world.dispatcher.registry.get(D).breaker.is_avoided(world.now)


def test_a_worker_that_fails_three_rooms_is_avoided_until_a_probe_passes():
    world, others = two_pairs()
    for _ in range(3):
        (entry,), _ = world.submit(16)
        fail(world, entry, retryable=False)
    assert world.dispatcher.events["breaker_opened"] == 1
    (alone,), _ = world.submit(16)
    assert alone.room.pair.decode == D, "there is no other"
    fail(world, alone, retryable=False)
    world.add(others[1])
    placed = [world.submit(16)[0][0].room.pair.decode for _ in range(3)]
    assert placed == [D2] * 3
    world.now += BREAKER_OPEN_S + 0.1
    (probe,), _ = world.submit(16)
    assert probe.room.pair.decode == D
    assert world.submit(16)[0][0].room.pair.decode == D2, "one room at a time"
    begin(world, probe)
    world.dispatcher.on_message(
        b"d", Finished(room=probe.room.room, epoch=0, instance=D, reason="stop", output_tokens=1)
    )
    assert world.submit(16)[0][0].room.pair.decode == D


def test_a_client_leaving_while_its_stream_waits_for_a_pair_leaks_nothing():
    world, _ = two_pairs()
    (entry,), inbox = world.submit(16)
    begin(world, entry)
    world.kill((b"d", D))
    world.dispatcher.client_left(entry)
    world.pass_time(Timeouts().gone_s + 0.1)
    assert (world.dispatcher.num_open, world.dispatcher.num_queued) == (0, 0)
    assert [type(event) for _, event in asyncio.run(inbox.take())] == [Deliver]


def test_after_a_lost_connection_a_worker_is_identified_before_any_send():
    world, _ = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.lost = {b"d"}
    world.dispatcher.probe()
    assert world.dispatcher.registry.doubtful(world.now) == {D}
    world.pass_time(UNREACHABLE_S + 0.1)
    assert [worker.instance for worker in world.dispatcher.registry] == [P]


def test_a_worker_that_ends_its_drain_is_no_death_for_its_requests():
    world, others = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    world.dispatcher.on_message(b"d", Goodbye(instance=D))
    world.add(*others)
    world.kill((b"d", D))
    assert (world.epochs(b"d2"), entry.room.deaths.died_with) == ([1], set())


def with_local(**settings):
    world = Cluster(**settings)
    world.add((b"p", P, "prefill"))
    world.sent[b"d"] = []
    world.dispatcher.on_message(b"d", hello(instance=D, role="decode", local_prefill=True))
    world.dispatcher.on_message(
        b"d", Heartbeat(instance=D, stats=WorkerStats(pages_total=100, pages_free=100))
    )
    return world


def test_without_prefill_workers_decode_computes_prompt_and_all_tokens():
    world = with_local()
    (first,), _ = world.submit(16)
    world.kill((b"p", P))
    one = {"room": first.room.room, "epoch": 1}
    reserve = world.of(b"d", Reserve)[1]
    assert (reserve.prefill_instance, reserve.prefill_endpoint, reserve.epoch) == (None, "", 1)
    world.dispatcher.on_message(
        b"d", FirstToken(instance=D, token=7, **one)
    )  # says nothing that Tokens do not
    world.dispatcher.on_message(b"d", Reserved(instance=D, have=8, **one))
    world.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=0, ids=[9], **one)]))
    world.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=1, ids=[8], **one)]))
    assert first.room.phase.value == "streaming"
    prefill = PrefillTimeline(prefill_ms=5.0)
    world.dispatcher.on_message(
        b"d", Finished(instance=D, reason="stop", output_tokens=2, prefill=prefill, **one)
    )
    timeline = first.timeline(world.now)
    assert (first.room.output_ids, first.room.cached_tokens) == ([9, 8], 8)
    assert (timeline.local_prefill, timeline.prefill_ms, timeline.prefill_instance) == (True, 5.0, D)
    assert world.dispatcher.events["local_prefill"] == 1
    assert world.dispatcher.num_open == 1, "the Cancel of the first attempt is out"
    world.dispatcher.on_message(b"d", Gone(room=first.room.room, epoch=0, instance=D))
    assert world.dispatcher.num_open == 0
    assert world.dispatcher.registry.get(D).num_rooms == 0
    world.add((b"p", P, "prefill"))
    world.submit(16)
    assert len(world.of(b"p", Prefill)) == 2, "a prefill worker that is back gets the next prompt"


def test_a_stream_whose_hand_off_fails_goes_on_with_the_prompt_on_decode():
    world = with_local()
    (entry,), inbox = world.submit(16)
    begin(world, entry)
    fail(world, entry, kind="TransferTimeout")
    again = world.of(b"d", Reserve)[1]
    assert (again.prefill_instance, again.num_output) == (None, 1)
    one = {"room": entry.room.room, "epoch": 1}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **one))
    world.dispatcher.on_message(b"d", Tokens(instance=D, items=[TokenItem(seq=0, ids=[10, 11], **one)]))
    assert events(inbox) == [Deliver([9], []), Deliver([10, 11], [])]
    world.kill((b"d", D))
    assert entry.room.phase.value == "queued"


def test_a_stream_without_a_pair_delays_no_other_request():
    world, _ = two_pairs()
    (entry,), _ = world.submit(16)
    begin(world, entry)
    for identity, instance, role in ((b"p3", "6" * 32, "prefill"), (b"d2", D2, "decode")):
        world.sent.setdefault(identity, [])
        other = hello(instance=instance, role=role, fingerprint="another")
        world.dispatcher.on_message(identity, other)
        stats = WorkerStats(pages_total=100, pages_free=100)
        world.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))
    world.kill((b"d", D))
    world.pass_time(0.1)
    (second,), _ = world.submit(16)
    assert entry.room.phase.value == "queued"
    assert [message.room for message in world.of(b"d2", Reserve)] == [second.room.room]
