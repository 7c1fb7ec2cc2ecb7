"""Which rooms get pages for their next step, which wait, and which give theirs up. No engine runs."""

import random
from types import SimpleNamespace

from baton.decode.page_growth import AHEAD_TOKENS, JOINED_STEPS, PageGrowth
from baton.decode.queues import HOLD_ALL, DecodeQueues, DecodeRoom, DecodeState, OutputClaim
from baton.engine.kv.pool import PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.request import Request
from baton.engine.request_windows import RequestWindows
from baton.engine.sampling.params import SamplingParams

PAGE, STEP, SPARE, CONTEXT = 4, 3, 2, 512
GROWS = OutputClaim(expected=2)


class World:
    """Rooms on a pool of `pages` pages, of which none is free at first."""

    def __init__(self, pages=200):
        self.cache = PrefixCache(PageAllocator(pages + 1), PAGE)
        shape = SimpleNamespace(spare_slots=SPARE, num_path=STEP)
        engine = SimpleNamespace(
            shape=shape,
            max_context=CONTEXT,
            page_size=PAGE,
            cache=self.cache,
            windows=RequestWindows(self.cache, margin=1),
        )
        self.queues, self.told, self.retracted = DecodeQueues(64), [], []
        decoder = SimpleNamespace(grow=self.told.extend)
        self.growth = PageGrowth(engine, self.queues, decoder, is_on=True, ahead_tokens=0)

    def room(
        self, *, claim=GROWS, state=DecodeState.RUNNING, prompt=8, most=30, output=0, unread=0, priority=0
    ):
        request = Request(
            room=f"{len(self.queues):032x}",
            epoch=0,
            prompt_ids=[1] * prompt,
            sampling=SamplingParams(max_new_tokens=most),
            output_ids=[1] * output,
        )
        request.pages = self.cache.alloc(self.growth.first_pages(request, claim))
        room = DecodeRoom(
            request=request,
            arrived=float(len(self.queues)),
            deadline=None,
            have=0,
            features=None,
            state=state,
            claim=claim,
            priority=priority,
            granted_pages=self.growth.granted_pages(request, claim),
            covered_output=self.growth.covered_output(request),
            num_unread=unread,
        )
        self.queues.add(room)
        return room

    def fill(self):
        """Nothing is free from here on."""
        self.cache.alloc(self.cache.num_available)

    def cover(self, **kind):
        return self.growth.cover(self.queues.of(DecodeState.RUNNING), self._retract, **kind)

    def _retract(self, room):
        self.retracted.append(room)
        if room.state is DecodeState.PULLING:
            room.state = DecodeState.CLOSING
        elif room.num_unread:
            room.state = DecodeState.SETTLING
        else:
            self.cache.allocator.release(room.request.pages)
            self.queues.remove(room)


def test_a_room_is_short_exactly_where_its_next_step_needs_more_pages():
    rng = random.Random(3)
    for _ in range(300):
        world = World()
        claim = rng.choice((HOLD_ALL, GROWS, OutputClaim(expected=9, granted=9)))
        most = rng.randint(1, 40)
        room = world.room(claim=claim, prompt=rng.randint(1, CONTEXT - most), most=most)
        for _ in range(60):
            room.num_unread = rng.randint(0, 1)
            request, size = room.request, len(room.request.pages)
            output = min(most, request.num_output + (room.num_unread + 1) * STEP)
            needed = -(-min(CONTEXT, request.num_prompt + output + SPARE) // PAGE)
            assert world.cover() == [room]
            assert len(request.pages) == max(size, needed)
            assert [start for _, start in world.told] == [size] * (needed > size)
            world.told.clear()
            if request.num_remaining <= STEP:
                break
            request.output_ids += [1] * rng.randint(1, STEP)


def test_a_full_pool_takes_pages_from_a_prompt_on_its_way():
    world = World()
    old, new = world.room(output=6), world.room(state=DecodeState.PULLING)
    world.fill()
    assert world.cover() == [], "the transport may still write to the pages"
    assert world.retracted == [new]
    world.cache.allocator.release(new.request.pages)
    world.queues.remove(new)
    assert world.cover() == [old]
    assert world.retracted == [new]


def test_rooms_that_may_keep_their_pages_cost_the_short_room_its_own():
    world = World()
    short = world.room(output=6)
    world.room(claim=HOLD_ALL, state=DecodeState.PULLING)
    world.room(claim=OutputClaim(expected=4, granted=4), state=DecodeState.WARMING)
    world.fill()
    assert world.cover() == []
    assert world.retracted == [short], "it does not wait for rooms that never give pages up"


def test_a_room_whose_last_step_is_under_way_is_waited_for():
    world = World()
    world.room(output=6)
    ending = world.room(output=9, most=10, unread=1)
    world.fill()
    batch = [room for room in world.queues if room is not ending]
    assert world.growth.cover(batch, world._retract) == []
    assert world.retracted == []


def test_the_least_urgent_class_gives_up_first_and_then_the_newest_room():
    world = World()
    batch = world.room(claim=OutputClaim(expected=2), priority=5)
    short, newest = world.room(output=6), world.room()
    world.fill()
    assert set(map(id, world.cover())) == {id(short), id(newest)}
    assert world.retracted == [batch]


def test_a_draining_worker_retracts_only_where_nobody_runs():
    world = World()
    running, short = world.room(), world.room(output=6)
    world.fill()
    assert world.cover(is_draining=True) == [running]
    assert world.retracted == []
    running.request.output_ids += [1] * 6
    assert world.cover(is_draining=True) == [running]
    assert world.retracted == [short]


def test_promises_are_what_is_expected_beyond_the_pages_held():
    world = World()
    room = world.room(claim=OutputClaim(expected=20))
    assert world.growth.num_promised == -(-(8 + 20 + SPARE) // PAGE) - len(room.request.pages)
    world.room(claim=HOLD_ALL)
    world.room(claim=OutputClaim(expected=20, granted=20))
    before = world.growth.num_promised
    room.request.output_ids += [1] * 25
    assert world.growth.num_promised == before + 2, "five more are counted on, when all came"
    room.state = DecodeState.SETTLING
    assert world.growth.num_promised < before


def grown(world: World) -> set[str]:
    """The rooms of the last order to the device."""
    found = {request.room for request, _ in world.told}
    world.told.clear()
    return found


def test_rooms_that_need_pages_soon_take_them_with_one_that_is_short():
    world = World()
    world.growth.ahead_tokens = 8
    rooms = [world.room(most=200) for _ in range(3)]
    needs = [world.growth.covered_output(room.request) - STEP for room in rooms]  # output at the last step
    for room, behind in zip(rooms, (1, 0, -JOINED_STEPS * STEP), strict=True):
        room.request.output_ids = [1] * int(needs[0] + behind)
    assert world.cover() == rooms
    assert grown(world) == {rooms[0].request.room, rooms[1].request.room}
    held = [len(room.request.pages) for room in rooms]
    assert world.cover() == rooms
    assert not grown(world)
    assert [len(room.request.pages) for room in rooms] == held


def test_pages_that_others_may_need_are_not_taken_early():
    for num_left, is_joined in ((40, True), (12, False)):
        world = World()
        world.growth.ahead_tokens = 8
        now, soon = world.room(claim=GROWS), world.room(claim=GROWS)
        for room, behind in ((now, 1), (soon, 0)):
            room.request.output_ids = [1] * int(room.covered_output - STEP + behind)
        world.cache.alloc(world.cache.num_available - world.growth.num_promised - num_left)
        before = len(soon.request.pages)
        assert world.cover() == [now, soon]
        assert (len(soon.request.pages) > before) == is_joined
        assert not world.retracted


def test_the_device_is_told_of_pages_every_few_steps_and_not_in_each_one():
    rng = random.Random(5)
    world = World(pages=4000)
    world.growth.ahead_tokens = AHEAD_TOKENS
    for _ in range(40):
        room = world.room(prompt=rng.randint(4, 30), most=400)
        room.request.output_ids = [1] * rng.randint(0, AHEAD_TOKENS)
    num_orders = 0
    for _ in range(50):
        assert len(world.cover()) == 40
        num_orders += bool(grown(world))
        for room in world.queues:
            room.request.output_ids = [1] * (len(room.request.output_ids) + rng.randint(1, STEP))
    assert num_orders <= 50 // JOINED_STEPS + 2


def test_a_room_that_was_just_retracted_takes_no_pages_with_the_others():
    world = World()
    world.growth.ahead_tokens = 8
    now, victim = world.room(), world.room(prompt=200)
    for room, behind in ((now, 1), (victim, 0)):
        room.request.output_ids = [1] * int(room.covered_output - STEP + behind)
    world.fill()
    assert world.cover() == [now]
    assert world.retracted == [victim]
    assert world.cache.num_available > 40, "enough for rooms that need pages soon"
    assert grown(world) == {now.request.room}
