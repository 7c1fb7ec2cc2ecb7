"""When a worker moves to the other role, and that a load which shifts finds the split that suits it."""

import itertools

import pytest
from baton.cluster.protocol.messages import (
    ChangeRole,
    FirstToken,
    Heartbeat,
    Prefill,
    Reserved,
    WorkerStats,
)
from baton.router.scheduling.role_scaler import (
    HIGH_S,
    HOLD_S,
    LOOK_S,
    LOW_S,
    REST_S,
    BusyShares,
    Candidate,
    Move,
    Queues,
    QueueTimes,
    RoleScaler,
)
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World
from baton.tests.unit.router.workers.test_registry import hello


def workers(prefill, decode, load=0.1):
    return [
        Candidate(instance=f"{role[0]}{i}", role=role, load=load + i / 100)
        for role, count in (("prefill", prefill), ("decode", decode))
        for i in range(count)
    ]


LONG_PROMPTS = Queues(prompt_s=HIGH_S + 1, place_s=0.0, streaming_share=1.0)
LONG_STREAMS = Queues(prompt_s=0.0, place_s=HIGH_S + 1, streaming_share=1.0)
EVEN = Queues(prompt_s=LOW_S, place_s=LOW_S, streaming_share=1.0)


def moves_of(scaler, queues, crew, seconds, start=0.0, *, is_busy=False):
    """The moves, with their times, while nothing changes for so long."""
    found, now = [], start
    while now <= start + seconds:
        if move := scaler.look(now, queues, crew, is_busy=is_busy):
            found.append((now - start, move))
        now += LOOK_S
    return found


def test_a_role_that_waits_gets_the_least_loaded_worker_of_the_other():
    found = moves_of(RoleScaler(), LONG_PROMPTS, workers(1, 3), HOLD_S + 1)
    assert found == [(HOLD_S, Move(instance="d0", role="prefill"))]
    found = moves_of(RoleScaler(), LONG_STREAMS, workers(2, 1), HOLD_S + 1)
    assert found == [(HOLD_S, Move(instance="p0", role="decode"))]


def test_a_wait_for_places_that_prompts_hold_is_prefill_s_delay():
    queues = Queues(prompt_s=0.0, place_s=HIGH_S + 1, streaming_share=0.2)
    [(_, move)] = moves_of(RoleScaler(), queues, workers(2, 2), HOLD_S)
    assert move.role == "prefill"


@pytest.mark.parametrize(
    ("queues", "crew"),
    [
        (EVEN, workers(2, 2)),
        (Queues(prompt_s=9.0, place_s=9.0, streaming_share=0.9), workers(2, 2)),  # both wait
        (Queues(prompt_s=9.0, place_s=LOW_S, streaming_share=0.9), workers(2, 2)),  # nearly so
        (LONG_PROMPTS, workers(3, 1)),  # the last of its role
        (LONG_STREAMS, workers(1, 3)),
        (LONG_PROMPTS, workers(1, 2, load=0.6)),  # one alone could not bear it
    ],
)
def test_nothing_moves_where_a_role_would_lack_what_it_gives(queues, crew):
    assert moves_of(RoleScaler(), queues, crew, 300.0) == []


def test_a_peak_that_is_over_soon_moves_nothing():
    scaler = RoleScaler()
    for start in range(0, 100, 8):
        assert moves_of(scaler, LONG_PROMPTS, workers(2, 2), HOLD_S - LOOK_S, float(start)) == []
        assert moves_of(scaler, EVEN, workers(2, 2), 2.0, start + HOLD_S) == []


def test_one_worker_moves_at_a_time_and_rests_follow():
    assert moves_of(RoleScaler(), LONG_PROMPTS, workers(1, 5), 100.0, is_busy=True) == []
    found = moves_of(RoleScaler(), LONG_PROMPTS, workers(1, 5), 100.0)
    gaps = [later - sooner for (sooner, _), (later, _) in itertools.pairwise(found)]
    assert len(found) > 2
    assert min(gaps) >= REST_S


def test_moves_back_and_forth_become_rare():
    scaler, now, at = RoleScaler(), 0.0, []
    for i in range(6):  # the load shifts as soon as a worker has moved
        queues, move = LONG_PROMPTS if i % 2 else LONG_STREAMS, None
        while move is None:
            now += LOOK_S
            move = scaler.look(now, queues, workers(3, 3), is_busy=False)
        at.append(now)
    gaps = [later - sooner for sooner, later in itertools.pairwise(at)]
    assert gaps == [REST_S, REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S]


def test_the_mean_queue_time_follows_and_is_forgotten():
    times = QueueTimes()
    for i in range(50):
        times.add(3.0, 100.0 + i / 5)
    assert times.at(110.0) == pytest.approx(3.0, rel=0.05)
    assert times.at(130.0) == 0.0


def test_prompts_of_one_forward_count_once_in_the_load_of_their_worker():
    busy = BusyShares()
    for i in range(40):
        for _ in range(3):  # three prompts in each forward of half a second, one a second
            busy.add("p0", 0.5, 100.0 + i)
    assert busy.at("p0", 139.0) == pytest.approx(0.5, abs=0.06)
    assert busy.at("p1", 139.0) == 0.0
    assert busy.at("p0", 200.0) == 0.0


NAMES = {P: b"p", "5" * 32: b"q", D: b"d", "3" * 32: b"e"}


def world_of(scaler=None):
    """Two workers of each role; a decode worker has one place."""
    world = World(scaler=scaler)
    for instance, identity in NAMES.items():
        role = "prefill" if identity in (b"p", b"q") else "decode"
        world.sent[identity] = []
        more = {"changes_role": True, "max_running": 1, "pages_total": 100}
        world.dispatcher.on_message(identity, hello(instance=instance, role=role, **more))
        stats = WorkerStats(pages_total=100, pages_free=100)
        world.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))
    return world


def orders_of(world, seconds):
    """The orders to change a role while the clock runs on and every worker beats."""
    for _ in range(int(seconds / 0.25)):
        world.now += 0.25
        for worker in world.dispatcher.registry:
            worker.last_seen = world.now
        world.dispatcher.tick()
    return [order for identity in NAMES.values() for order in world.of(identity, ChangeRole)]


def stream(world, order):
    """The room of a prefill order has its first token."""
    decode, one = world.dispatcher._entries[order.room].room.pair.decode, {"room": order.room, "epoch": 0}
    world.dispatcher.on_message(NAMES[decode], Reserved(instance=decode, **one))
    world.dispatcher.on_message(NAMES[order.instance], FirstToken(instance=order.instance, token=9, **one))


def fill(world):
    """Both decode workers stream, and a request waits."""
    for _ in range(3):
        world.submit(4)
    for order in [*world.of(b"p", Prefill), *world.of(b"q", Prefill)]:
        stream(world, order)


def test_the_router_moves_a_worker_when_streams_fill_decode():
    world = world_of(RoleScaler())
    fill(world)
    found = orders_of(world, HIGH_S + HOLD_S + 2)
    assert [order.role for order in found] == ["decode"]
    assert world.dispatcher.events["role_moved"] == 1
    assert orders_of(world, 8.0) == found, "one at a time"


def test_the_router_moves_nothing_by_itself_without_the_setting():
    world = world_of()
    fill(world)
    assert orders_of(world, 20.0) == []


class Fluid:
    """A cluster of six workers as flows: `clients` ask again as soon as they have their answer.

    A prefill worker computes `prompts` requests a second in this phase, a decode worker has `PLACES` and
    takes `stream_s` for an answer. A worker that changes its role is away for `AWAY_S`.
    """

    AWAY_S, STEP_S, PLACES, CLIENTS = 10.0, 0.1, 16, 120

    def __init__(self, num_prefill, scaler=None):
        self.roles = ["prefill"] * num_prefill + ["decode"] * (6 - num_prefill)
        self.scaler, self.now = scaler, 0.0
        self.away = {}
        self.waiting, self.prompting, self.streaming, self.done = float(self.CLIENTS), 0.0, 0.0, 0.0
        self.waited = 0.0

    def count(self, role):
        return sum(r == role and i not in self.away for i, r in enumerate(self.roles))

    def run(self, seconds, prompts, stream_s):
        """The answers per second over the last third of the time."""
        end, before, third = self.now + seconds, None, self.now + seconds * 2 / 3
        while self.now < end:
            self.now += self.STEP_S
            self.away = {i: until for i, until in self.away.items() if until > self.now}
            places = self.PLACES * self.count("decode")
            placed = max(0.0, min(self.waiting, places - self.prompting - self.streaming))
            self.waiting, self.prompting = self.waiting - placed, self.prompting + placed
            rate = prompts * self.count("prefill")
            ready = min(self.prompting, rate * self.STEP_S)
            ended = self.streaming * self.STEP_S / stream_s
            self.prompting, self.streaming = self.prompting - ready, self.streaming + ready - ended
            self.waiting, self.done = self.waiting + ended, self.done + ended
            self.waited = self.waited + self.STEP_S if self.waiting > 0.5 else 0.0
            if before is None and self.now >= third:
                before = self.done
            self.look(rate, places)
        return (self.done - before) / (seconds / 3)

    def look(self, rate, places):
        if self.scaler is None:
            return
        placed = self.prompting + self.streaming
        queues = Queues(
            prompt_s=max(0.0, self.prompting / rate - 0.5) if rate else 99.0,
            place_s=self.waited,
            streaming_share=self.streaming / placed if placed else 1.0,
        )
        load = self.streaming / places if places else 1.0
        crew = [
            Candidate(instance=str(i), role=role, load=load if role == "decode" else 0.1)
            for i, role in enumerate(self.roles)
            if i not in self.away
        ]
        move = self.scaler.look(self.now, queues, crew, is_busy=bool(self.away))
        if move is not None:
            self.roles[int(move.instance)] = move.role
            self.away[int(move.instance)] = self.now + self.AWAY_S


LONG_PROMPT_PHASE, LONG_ANSWER_PHASE = (0.8, 2.0), (12.0, 12.0)


def test_a_load_that_shifts_keeps_within_15_percent_of_the_best_split():
    phases = [LONG_PROMPT_PHASE, LONG_ANSWER_PHASE, LONG_PROMPT_PHASE]
    best = [max(Fluid(count).run(600.0, *phase) for count in range(1, 6)) for phase in phases]
    moving = Fluid(3, RoleScaler())
    found = [moving.run(600.0, *phase) for phase in phases]
    assert all(rate >= 0.85 * most for rate, most in zip(found, best, strict=True)), (found, best)
    fixed = [Fluid(3).run(600.0, *phase) for phase in phases]
    assert any(rate < 0.85 * most for rate, most in zip(fixed, best, strict=True)), "a fixed split is worse"
