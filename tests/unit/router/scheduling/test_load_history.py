"""The history of the load: what it shows, and that a day of it takes the memory of a quarter of an hour."""

import gc
import sys
import types

import msgspec
from baton.cluster.protocol.messages import ResourceUsage, RoomCounts
from baton.router.scheduling.flow import MOST_KEPT, Flow
from baton.router.scheduling.load_history import (
    EVERY_S,
    MAX_WORKERS,
    POINTS,
    ROUTER_SERIES,
    WORKER_SERIES,
    LoadHistory,
)
from baton.router.workers.registry import Registry
from baton.tests.unit.router.workers.test_registry import ROUTER, beat, hello

EMPTY = Flow().take()


class Charted:
    """A history on a clock that the test moves, over a registry."""

    def __init__(self):
        self.now = 1000.0
        self.registry = Registry(ROUTER, 3.0)
        self.history = LoadHistory(lambda: self.now)
        self.flow = Flow()

    def join(self, name, role="decode"):
        message = hello(instance=name, role=role)
        self.registry.hello(name.encode(), message, self.now)
        return self.registry.get(name)

    def point(self, seconds=EVERY_S, **load):
        self.now += seconds
        assert self.history.is_due
        self.history.sample(
            **{"running": 0, "queued": 0} | load, flow=self.flow.take(), workers=self.registry
        )


def test_a_point_has_rates_quantiles_and_unknowns():
    charted = Charted()
    charted.flow.tokens(7)
    charted.flow.tokens(33)
    for ttft in (0.2, 0.1, 0.4):
        charted.flow.first_token(ttft, 100)
    charted.flow.gap(0.005)
    for outcome in ("ok", "failed", "cancelled"):
        charted.flow.ended(outcome)
    charted.point(running=3, queued=2)
    charted.point()
    view = charted.history.view()
    assert view.router == {
        "running": [3, 0],
        "queued": [2, 0],
        "output_tokens_per_s": [20, 0],
        "prompt_tokens_per_s": [150, 0],
        "ended": [3, 0],
        "failed": [1, 0],
        "ttft_p50_us": [200_000, None],
        "ttft_p95_us": [400_000, None],
        "gap_p50_us": [5000, None],
    }
    assert (view.last - view.first, view.workers) == (1, [])


def test_a_worker_s_point_has_fill_rates_accept_length_and_no_canaries():
    charted = Charted()
    worker = charted.join("1" * 32)
    usage = ResourceUsage(cpu_cores=1.5, num_cores=2, gpu_busy=0.8, gpu_memory_bytes=30, gpu_memory_total=40)
    shown = {"pages_free": 25, "running": 3, "canaries": RoomCounts(running=1), "usage": usage}
    beat(charted.registry, worker, charted.now, counters={"tokens": 100.0, "handoff_bytes": 0.0}, **shown)
    charted.point()
    counters = {"tokens": 300.0, "handoff_bytes": 4096.0}
    beat(charted.registry, worker, charted.now, accept_length=2.31, counters=counters, **shown)
    charted.point()
    [told] = charted.history.view().workers
    assert (told.instance, told.role) == ("1" * 32, "decode")
    assert {name: values[-1] for name, values in told.series.items()} == {
        "pages_permille": 750,
        "requests": 2,
        "tokens_per_s": 100,
        "handoff_kib_per_s": 2,
        "accept_length_percent": 231,
        "cpu_permille": 750,
        "gpu_permille": 800,
        "gpu_memory_permille": 750,
    }
    assert told.series["tokens_per_s"][0] is None, "one heartbeat gives no rate"


def test_only_newer_points_are_sent_on_request_and_a_pause_is_unknown():
    charted = Charted()
    for running in range(5):
        charted.point(running=running)
    seen = charted.history.view()
    charted.point(seconds=3 * EVERY_S, running=9)  # the process was stopped meanwhile
    assert charted.history.view(seen.last).router["running"] == [None, None, 9]
    assert charted.history.view(seen.last + 3).router["running"] == []
    assert charted.history.view(2**31 - 1).router["running"] == []
    charted.point(seconds=10 * POINTS * EVERY_S, running=1)
    assert charted.history.view().router["running"] == [None] * (POINTS - 1) + [1]


def test_a_worker_that_left_stays_for_the_span_and_gives_way_to_new_ones():
    charted = Charted()
    first = charted.join("0" * 32)
    beat(charted.registry, first, charted.now)
    charted.point()
    charted.registry.remove(first.instance)
    charted.point()
    charted.point()
    assert [worker.series["requests"] for worker in charted.history.view().workers] == [[0, None, None]]
    for number in range(MAX_WORKERS):
        beat(charted.registry, charted.join(f"{number + 1:032x}"), charted.now)
    charted.point()
    kept = {worker.instance for worker in charted.history.view().workers}
    assert len(kept) == MAX_WORKERS
    assert first.instance not in kept
    beat(charted.registry, charted.join("f" * 32), charted.now)
    charted.point()
    assert "f" * 32 not in {worker.instance for worker in charted.history.view().workers}, "no place"


def deep_size(root):
    """Bytes of an object and of everything that it alone refers to."""
    seen, todo, total = set(), [root], 0
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, (type, types.ModuleType, types.FunctionType, str)):
            seen.add(id(one))
            total += sys.getsizeof(one)
            todo += gc.get_referents(one)
    return total


def test_a_day_of_load_takes_the_memory_of_a_quarter_of_an_hour():
    charted, sizes = Charted(), []
    per_hour = int(3600 / EVERY_S)
    for tick in range(24 * per_hour):
        if tick % 150 == 0:  # every five minutes another worker takes the place of the one before
            for worker in list(charted.registry):
                charted.registry.remove(worker.instance)
            worker = charted.join(f"{tick:032x}")
            beat(charted.registry, worker, charted.now)
        charted.flow.first_token(0.1, 10)
        charted.flow.tokens(5)
        charted.flow.ended("ok")
        charted.point(running=2)
        if tick in (per_hour - 1, 24 * per_hour - 1):
            sizes.append((charted.history.num_bytes, deep_size(charted.history)))
    assert sizes[0] == sizes[1]
    num_workers = 3  # this one, and two that left less than 15 minutes ago
    assert sizes[0][0] == 4 * POINTS * (len(ROUTER_SERIES) + num_workers * len(WORKER_SERIES))
    assert len(msgspec.json.encode(charted.history.view())) < 100_000


def test_a_burst_between_two_points_keeps_a_bounded_number_of_times():
    flow = Flow()
    for _ in range(10 * MOST_KEPT):
        flow.first_token(0.1, 1)
        flow.gap(0.1)
    totals = flow.take()
    assert (len(totals.ttfts), len(totals.gaps), totals.prompt_tokens) == (
        MOST_KEPT,
        MOST_KEPT,
        10 * MOST_KEPT,
    )
    assert flow.take() == EMPTY
