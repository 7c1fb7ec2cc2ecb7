"""Which rooms make way for a more urgent one, and when none do. No engine runs."""

import itertools
import random

import pytest
from baton.decode.page_growth import is_beyond_grant
from baton.decode.preemption import Preemption
from baton.decode.queues import HOLD_ALL, DecodeRoom, DecodeState, OutputClaim
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.tests.unit.decode.test_page_growth import GROWS, World
from baton.worker.retractions import Reason

PLACES = 4


class Full(World):
    """Every place of the batch may be held; a room that wants one waits."""

    def __init__(self, pages=200, places=PLACES):
        super().__init__(pages)
        self.queues.max_running = places
        self.numbers = itertools.count(900)
        self.preemption = Preemption(self.growth._engine, self.queues, self.growth)

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


def test_the_most_urgent_room_is_next_and_then_the_oldest():
    world = Full()
    low, first, second, high = (world.asks(priority=p) for p in (1, 0, 0, -1))
    assert world.preemption.waiting == [high, first, second, low]


@pytest.mark.parametrize("seed", range(20))
def test_those_that_make_way_are_always_enough(seed):
    rng = random.Random(seed)
    world = Full(places=rng.randint(2, 10))
    for _ in range(world.queues.max_running):
        claim = rng.choice((GROWS, HOLD_ALL, OutputClaim(expected=4, granted=rng.choice((0, 4)))))
        world.room(priority=rng.randint(-1, 2), claim=claim, prompt=rng.randint(1, 20))
    world.cache.alloc(rng.randint(0, world.cache.num_available))
    urgent = world.asks(priority=rng.randint(-2, 1), prompt=rng.randint(1, 30))
    way = world.way(urgent)
    if way is None:
        return
    assert all(room.priority > urgent.priority for room in way.victims)
    for room in way.victims:
        world._retract(room)
    assert world.queues.num_held < world.queues.max_running
    urgent.request.pages = world.cache.alloc(world.growth.first_pages(urgent.request, urgent.claim))
    assert world.growth.covers(urgent)
    if way.victims:  # without the last of them it would not do
        assert len(way.victims) == len(set(map(id, way.victims)))
