"""Which rooms make way for a more urgent one, and when none do. No engine runs."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from baton.decode.admission import Admission
from baton.decode.page_growth import is_beyond_grant
from baton.decode.preemption import Preemption
from baton.decode.queues import HOLD_ALL, DecodeRoom, DecodeState, OutputClaim
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.tests.unit.decode.test_page_growth import GROWS, World
from baton.worker.prompt_pages import take_longer_prefix, take_pages
from baton.worker.retractions import Reason

PLACES = 4
STAGED = 100  # bytes for features


class Full(World):
    """Every place of the batch may be held; a room that wants one waits."""

    def __init__(self, pages=200, places=PLACES):
        super().__init__(pages)
        self.queues.max_running = places
        self.numbers = itertools.count(900)
        engine = self.growth._engine
        self.windows = engine.windows
        engine.feature_width, engine.drafter = 1, SimpleNamespace(feature_width=1)
        engine.pool = SimpleNamespace(nbytes=1 << 30, row_dtype=torch.uint8)
        self.admission = Admission(engine, self.queues, self.growth, None)
        self.preemption = Preemption(engine, self.queues, self.growth, self.admission.has_staging)

    def asks(self, *, priority=0, claim=GROWS, prompt=8, most=30):
        """A room that was not admitted."""
        request = Request(
            room=f"{next(self.numbers):032x}",
            epoch=0,
            prompt_ids=[1] * prompt,
            sampling=SamplingParams(max_new_tokens=most),
        )
        room = DecodeRoom(
            request=request, arrived=100.0 + len(self.queues), deadline=None, priority=priority, claim=claim
        )
        self.queues.add(room)
        return room

    def sharer(self, *, of=1, **kind):
        """A room whose prompt of token `of` is cached, and shared with others that begin alike."""
        room = self.room(**kind)
        request = room.request
        request.prompt_ids = [of] * request.num_prompt
        take_longer_prefix(self.cache, self.windows, request, 0)
        self.cache.insert(request.prompt_ids, request.pages)
        return room

    def admits(self, room):
        """Whether the room finds its pages and its place."""
        request, growth = room.request, self.growth
        num_pages = growth.first_pages(request, room.claim)
        take_pages(self.cache, self.windows, request, num_pages, is_computed=False)
        return self.queues.num_held < self.queues.max_running and growth.covers(room)

    def way(self, room):
        return self.preemption.way_for(room)


def test_the_newest_room_of_the_least_urgent_class_makes_way():
    world = Full()
    world.room(priority=1)
    world.room()
    old, new = world.room(priority=2), world.room(priority=2)
    way = world.way(world.asks())
    assert (way.victims, way.reason) == ([new], Reason.URGENT_PLACE)
    assert old not in way.victims


def test_nobody_makes_way_for_a_room_that_is_no_more_urgent():
    world = Full()
    for _ in range(PLACES):
        world.room()
    assert world.way(world.asks()) is None
    assert world.way(world.asks(priority=1)) is None
    assert world.way(world.asks(priority=-1)) is not None


def test_as_many_make_way_as_the_pages_take_and_none_if_all_would_not_do():
    world = Full(places=64)
    rooms = [world.room(priority=1, prompt=12) for _ in range(5)]
    each = len(rooms[0].request.pages)
    world.fill()
    large = world.asks(prompt=8 * each)
    need = world.growth.first_pages(large.request, large.claim)
    way = world.way(large)
    assert way.reason is Reason.URGENT_PAGES
    assert len(way.victims) == -(-need // each) == len(set(map(id, way.victims)))
    assert way.victims[0] is rooms[-1]
    for room in rooms[1:]:
        room.priority = 0
    assert world.way(large) is None, "one room has too few"


def test_shared_pages_that_stay_are_not_counted_on():
    world = Full(places=64)
    kept = world.sharer(prompt=32)
    rooms = [world.sharer(prompt=32, priority=1) for _ in range(5)]
    own = len(set(rooms[0].request.pages) - set(kept.request.pages))
    assert own < len(rooms[0].request.pages)
    world.fill()
    urgent = world.asks()
    for prompt in (2, 10, 18):
        urgent.request.prompt_ids = [9] * prompt
        need = world.growth.first_pages(urgent.request, urgent.claim) + world.growth.promised(urgent)
        assert world.way(urgent).victims == rooms[::-1][: -(-need // own)]
    urgent.request.prompt_ids = [9] * 60
    assert world.way(urgent) is None, "all of them would not do"


def test_a_cached_prefix_of_the_urgent_room_is_nothing_that_it_lacks():
    world = Full(places=64)
    for _ in range(3):
        world.sharer(prompt=40, priority=1)
    world.cache.alloc(world.cache.num_available - 6)
    urgent = world.asks(prompt=41)
    assert world.growth.first_pages(urgent.request, urgent.claim) > 6
    assert world.way(urgent) is None
    assert world.admits(urgent)


def test_a_room_within_its_grant_makes_no_way():
    world = Full()
    granted = world.room(priority=2, claim=OutputClaim(expected=8, granted=8))
    whole = world.room(priority=2, claim=HOLD_ALL)
    world.room(), world.room()
    assert not is_beyond_grant(granted)
    assert not is_beyond_grant(whole)
    urgent = world.asks(priority=-1)
    assert all(room.priority == 0 for room in world.way(urgent).victims)
    granted.request.pages += world.cache.alloc(1)
    assert world.way(urgent).victims == [granted]


def test_a_room_waits_for_what_comes_back_before_it_takes_more():
    world = Full()
    ending, *_ = [world.room(priority=1) for _ in range(PLACES)]
    ending.state = DecodeState.SETTLING
    way = world.way(world.asks())
    assert way.victims == [], "a place comes back"
    world.queues.remove(ending)
    assert world.way(world.asks()) is None, "it has room, so what it lacks is nothing that others hold"


def test_nobody_makes_way_for_a_room_whose_features_do_not_fit():
    world = Full()
    rooms = [world.room(priority=1) for _ in range(PLACES)]
    urgent = world.asks()
    assert world.way(urgent).victims == [rooms[-1]]
    world.growth._engine.pool.nbytes = 4 * STAGED
    rooms[0].features = torch.zeros(STAGED - 7, dtype=torch.uint8)  # 8 tokens, 2 pages: a byte too much
    assert world.way(urgent) is None
    urgent.is_local = True
    assert world.way(urgent).victims == [rooms[-1]], "it has no features"
    urgent.is_local = False
    rooms[-1].features, rooms[0].features = rooms[0].features, None
    assert world.way(urgent).victims == [rooms[-1]], "they leave with the room"


def test_a_room_waits_for_features_only_if_they_leave():
    world = Full()
    world.growth._engine.pool.nbytes = 4 * STAGED
    other = world.room(priority=1)
    other.features = torch.zeros(STAGED, dtype=torch.uint8)
    ending = world.room(priority=1)
    ending.state = DecodeState.CLOSING
    urgent = world.asks()
    assert world.way(urgent) is None, "that another room ends is no help"
    other.state, ending.state = DecodeState.CLOSING, DecodeState.RUNNING
    assert world.way(urgent).victims == []


def test_the_most_urgent_room_is_next_and_then_the_oldest():
    world = Full()
    low, first, second, high = (world.asks(priority=p) for p in (1, 0, 0, -1))
    assert world.preemption.waiting == [high, first, second, low]


def test_of_rooms_that_came_at_once_one_is_next():
    world = Full()
    rooms = [world.asks() for _ in range(3)]
    for room in rooms:
        room.arrived = 100.0
    able = [room for room in rooms if world.admission._not_now(room, False) is None]
    assert able == world.preemption.waiting[:1]


@pytest.mark.parametrize("seed", range(60))
def test_those_that_make_way_are_always_enough(seed):
    rng = random.Random(seed)
    world = Full(pages=120, places=rng.randint(2, 10))
    for _ in range(world.queues.max_running):
        claim = rng.choice((GROWS, HOLD_ALL, OutputClaim(expected=4, granted=rng.choice((0, 4)))))
        kind = {"priority": rng.randint(-1, 2), "claim": claim, "prompt": rng.randint(1, 40)}
        world.room(**kind) if rng.random() < 0.3 else world.sharer(of=rng.randint(1, 2), **kind)
    world.cache.alloc(rng.randint(0, world.cache.num_available))
    urgent = world.asks(priority=rng.randint(-2, 1), prompt=rng.randint(1, 30))
    way = world.way(urgent)
    world.cache.check_integrity()
    if way is None:
        return
    assert all(room.priority > urgent.priority for room in way.victims)
    assert len(way.victims) == len(set(map(id, way.victims))) > 0
    for room in way.victims:
        world._retract(room)
    assert world.admits(urgent)
