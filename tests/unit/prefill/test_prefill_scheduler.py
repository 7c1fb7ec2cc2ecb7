"""Laws of the prefill scheduler: every prompt token is computed exactly once, in order, within the budget."""

import itertools
import random

import pytest
from baton.cluster.protocol.request_rank import PRIORITY_S, rank
from baton.engine import prompt_logprobs
from baton.engine.kv.pool import PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.tiers.cache_tiers import Restore
from baton.engine.kv.window_pages import WindowPages
from baton.engine.request import Request
from baton.engine.request_windows import RequestWindows
from baton.engine.sampling.params import SamplingParams
from baton.prefill.queues import PrefillQueues, PrefillRoom, PrefillState
from baton.prefill.scheduler import PrefillScheduler
from baton.worker.first_token_plan import FirstTokenPlan
from baton.worker.prompt_pages import give_back_pages
from hypothesis import given
from hypothesis import strategies as st

PAGE = 4


def make(num_pages=64, chunk_size=8, max_batch=4):
    cache = PrefixCache(PageAllocator(num_pages + 1), PAGE)
    queues = PrefillQueues(max_queue=64)
    return PrefillScheduler(
        queues,
        cache,
        RequestWindows(cache, margin=1),
        page_size=PAGE,
        chunk_size=chunk_size,
        max_batch=max_batch,
        vocab_size=100,
    )


def add(scheduler, name, tokens, **sampling):
    request = Request(
        room=f"{name:032x}", epoch=0, prompt_ids=list(tokens), sampling=SamplingParams(**sampling)
    )
    room = PrefillRoom(request=request, arrived=0.0, deadline=None)
    scheduler.queues.add(room)
    return room


def run(scheduler, chunks):
    """What the worker does with chunks: compute them, hand over the prompts that end."""
    for chunk in chunks:
        chunk.room.request.num_computed = chunk.end
        if chunk.is_last:
            request = chunk.room.request
            scheduler.cache.insert(request.prompt_ids, request.pages)
            scheduler.cache.allocator.release(request.pages)
            scheduler.queues.remove(chunk.room)


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=8),
    chunk_size=st.sampled_from([0, 1, 5, 8, 64]),
    max_batch=st.integers(1, 4),
)
def test_each_token_after_the_cached_prefix_is_computed_once_in_order(prompts, chunk_size, max_batch):
    scheduler = make(chunk_size=chunk_size, max_batch=max_batch)
    rooms = [add(scheduler, i, prompt) for i, prompt in enumerate(prompts)]
    reached: dict[str, int] = {}
    for _ in range(1000):
        chunks, admitted = scheduler.next_chunks()
        if not chunks:
            break
        for room in admitted:
            reached[room.request.room] = room.cached_tokens
        assert len(chunks) <= max_batch
        if chunk_size:
            assert sum(chunk.num_tokens for chunk in chunks) <= chunk_size
        else:
            assert all(chunk.is_last for chunk in chunks)
        for chunk in chunks:
            assert chunk.start == reached[chunk.room.request.room] < chunk.end
            reached[chunk.room.request.room] = chunk.end
        run(scheduler, chunks)
        scheduler.cache.check_integrity()
    assert [reached[room.request.room] for room in rooms] == [len(prompt) for prompt in prompts]
    assert scheduler.cache.num_available == 64


def test_tokens_before_a_prompt_are_those_left_of_begun_and_of_older_ones():
    scheduler = make(num_pages=12, chunk_size=8)
    rooms = [add(scheduler, number, range(100 * number, 100 * number + 20)) for number in range(4)]
    for number, room in enumerate(rooms):
        room.arrived = float(number)
    chunks, _ = scheduler.next_chunks()
    run(scheduler, chunks)
    assert [scheduler.tokens_before(room) for room in rooms[1:]] == [12, 32, 52]
    rooms[2].restore = Restore(first_key=b"", pages=[], stored=[], patience=9.0)
    assert scheduler.tokens_before(rooms[3]) == 32, "it waits for pages and not for a forward"


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    budget=st.integers(1, 24),
    later=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), max_size=8),
)
def test_every_forward_is_full_while_prompts_wait_and_the_oldest_gets_half(sizes, budget, later):
    scheduler = make(num_pages=512, chunk_size=budget, max_batch=64)
    rooms = [add(scheduler, i, range(1000 * i, 1000 * i + n)) for i, n in enumerate(sizes)]
    arrivals = sorted(later)
    for step in range(1000):
        while arrivals and arrivals[0][0] <= step:
            n = len(rooms)
            rooms.append(add(scheduler, n, range(1000 * n, 1000 * n + arrivals.pop(0)[1])))
        left = {room.request.room: remaining(room) for room in scheduler.queues}
        chunks, _ = scheduler.next_chunks()
        if not chunks:
            assert not left
            break
        taken = {chunk.room.request.room: chunk.num_tokens for chunk in chunks}
        assert len(taken) == len(chunks), "a prompt is in a forward once"
        assert sum(taken.values()) == min(budget, sum(left.values()))
        oldest, wanted = next(iter(left.items()))
        assert taken[oldest] >= min(wanted, -(-budget // 2))
        begun = [room for room in scheduler.queues.of(PrefillState.RUNNING) if not done(room, chunks)]
        assert len(begun) <= 1, "a prompt is begun when the one before it ends"
        run(scheduler, chunks)


def remaining(room):
    return room.request.num_prompt - room.request.num_computed


def done(room, chunks):
    return any(chunk.room is room and chunk.is_last for chunk in chunks)


@pytest.mark.parametrize("chunk_size", [0, 16])
def test_a_stream_of_short_prompts_delays_a_long_one_at_most_twofold(chunk_size):
    scheduler = make(num_pages=256, chunk_size=chunk_size, max_batch=64)
    longs = [add(scheduler, i, range(1000 * i, 1000 * i + 96)) for i in range(2)]
    for step in range(2 * 2 * 96 // 16 + 1):
        for i in range(4):
            number = 10 + 4 * step + i
            add(scheduler, number, range(1000 * number, 1000 * number + 7))
        run(scheduler, scheduler.next_chunks()[0])
    assert [remaining(room) for room in longs] == [0, 0]


def test_a_prompt_that_ends_in_half_of_a_forward_overtakes_longer_ones():
    scheduler = make(num_pages=256, chunk_size=16)
    first, second = add(scheduler, 1, range(100)), add(scheduler, 2, range(1000, 1100))
    run(scheduler, scheduler.next_chunks()[0])
    short, wide = add(scheduler, 3, range(2000, 2005)), add(scheduler, 4, range(3000, 3009))
    chunks, admitted = scheduler.next_chunks()
    assert [(chunk.room, chunk.num_tokens) for chunk in chunks] == [(first, 11), (short, 5)]
    assert admitted == [short]
    assert [second.state, wide.state] == [PrefillState.QUEUED] * 2, "their pages stay free"


def test_a_short_prompt_never_takes_the_pages_of_one_it_overtakes():
    scheduler = make(num_pages=60, chunk_size=8)
    first = add(scheduler, 1, range(80))  # 20 pages
    run(scheduler, scheduler.next_chunks()[0])
    add(scheduler, 2, range(1000, 1156))  # 39 of the 40 pages that are left
    shorts = [add(scheduler, i, range(1000 * i, 1000 * i + 2)) for i in (3, 4)]  # a page each
    chunks, admitted = scheduler.next_chunks()
    assert [chunk.room for chunk in chunks] == [first, shorts[0]]
    assert admitted == shorts[:1]
    assert scheduler.cache.num_available == 39


def test_the_tokens_of_a_forward_bound_it_and_not_the_number_of_prompts():
    scheduler = make(num_pages=256, chunk_size=64, max_batch=64)
    rooms = [add(scheduler, i, range(1000 * i, 1000 * i + 3)) for i in range(30)]
    chunks, _ = scheduler.next_chunks()
    assert [chunk.room for chunk in chunks[:21]] == rooms[:21]
    assert sum(chunk.num_tokens for chunk in chunks) == 64


def test_a_prompt_without_pages_waits_and_the_ones_behind_it_wait_too():
    scheduler = make(num_pages=3, chunk_size=64)
    first, second, third = (
        add(scheduler, 1, range(8)),
        add(scheduler, 2, range(10, 20)),
        add(scheduler, 3, [99]),
    )
    chunks, admitted = scheduler.next_chunks()
    assert admitted == [first]
    assert [second.state, third.state] == [PrefillState.QUEUED, PrefillState.QUEUED]
    run(scheduler, chunks)
    _, admitted = scheduler.next_chunks()
    assert admitted == [second], "first come, first served, once the pages are back"


def test_a_running_prompt_goes_before_a_new_one():
    scheduler = make(chunk_size=8)
    first = add(scheduler, 1, range(20))
    chunks, _ = scheduler.next_chunks()
    run(scheduler, chunks)
    second = add(scheduler, 2, range(50, 55))
    chunks, _ = scheduler.next_chunks()
    assert [(chunk.room, chunk.start, chunk.end) for chunk in chunks] == [(first, 8, 16)]
    run(scheduler, chunks)
    chunks, _ = scheduler.next_chunks()
    assert [(chunk.room, chunk.start, chunk.end) for chunk in chunks] == [(first, 16, 20), (second, 0, 4)]


def test_a_repeated_prompt_leaves_only_what_is_not_in_whole_cached_pages():
    scheduler = make(chunk_size=64)
    add(scheduler, 1, range(12))
    run(scheduler, scheduler.next_chunks()[0])
    again = add(scheduler, 2, range(12))
    chunks, _ = scheduler.next_chunks()
    assert again.cached_tokens == 8, "the last token must be computed, so the last page is too"
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(8, 12)]


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_nothing_to_do_is_an_empty_batch(chunk_size):
    assert make(chunk_size=chunk_size).next_chunks() == ([], [])


@pytest.mark.parametrize("chunk_size", [0, 32])
def test_rows_scored_in_one_forward_are_bounded_over_all_prompts(chunk_size, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "MAX_SCORED_LOGITS", 600)  # six rows of this vocabulary
    scheduler = make(chunk_size=chunk_size)
    for i in range(3):
        add(scheduler, i, range(10 * i, 10 * i + 10), prompt_logprobs=0)
    add(scheduler, 3, range(50, 60))
    most = 0
    while len(scheduler.queues):
        chunks, _ = scheduler.next_chunks()
        scored = [prompt_logprobs.num_scored(c.room.request, c.start, c.end) for c in chunks]
        most = max(most, sum(scored))
        assert sum(scored) <= 6 + sum(count == 1 for count in scored), "each prompt goes on by a row at least"
        run(scheduler, chunks)
    assert most >= 6


# --- classes ------------------------------------------------------------------------------------------------


def ask(scheduler, name, num_tokens, priority=0, arrived=0.0, **more):
    room = add(scheduler, name, range(1000 * name, 1000 * name + num_tokens), **more)
    room.priority, room.arrived = priority, arrived
    return room


def test_urgent_prompts_go_before_the_next_part_of_less_urgent_ones():
    scheduler = make(num_pages=256, chunk_size=8)
    low = ask(scheduler, 1, 60, priority=1)
    run(scheduler, scheduler.next_chunks()[0])
    urgent, short_low = ask(scheduler, 2, 20, arrived=1.0), ask(scheduler, 3, 2, priority=1, arrived=1.0)
    for tokens in (8, 8):
        chunks, _ = scheduler.next_chunks()
        assert [(chunk.room, chunk.num_tokens) for chunk in chunks] == [(urgent, tokens)]
        run(scheduler, chunks)
    chunks, _ = scheduler.next_chunks()
    assert [chunk.room for chunk in chunks] == [urgent, low, short_low], "what it leaves over goes on"


def test_a_less_urgent_prompt_goes_first_once_it_has_waited_for_its_class():
    scheduler = make(num_pages=256, chunk_size=8)
    low = ask(scheduler, 1, 60, priority=1)
    ask(scheduler, 2, 60, arrived=PRIORITY_S + 1)
    assert scheduler.next_chunks()[0][0].room is low


def test_begun_prompts_of_a_class_go_before_older_ones_that_were_not_ready():
    scheduler = make(num_pages=256, chunk_size=8)
    late = ask(scheduler, 1, 30)
    late.restore = object()
    begun = ask(scheduler, 2, 30, arrived=1.0)
    run(scheduler, scheduler.next_chunks()[0])
    late.restore = None
    assert scheduler.next_chunks()[0][0].room is begun


def test_pages_are_taken_from_the_newest_prompts_of_the_least_urgent_class():
    scheduler = make(num_pages=24, chunk_size=4, max_batch=8)
    rooms = [ask(scheduler, i, 24, priority=p, arrived=i) for i, p in enumerate((1, 2, 2, 1))]  # 6 pages each
    for room in rooms:
        assert scheduler._has_pages(room, [])
        room.request.num_computed = 4
    urgent = ask(scheduler, 9, 40, arrived=9.0)  # 10 pages
    assert scheduler.take_back() == [rooms[2], rooms[1]]
    rooms[2].keeps_pages = True
    assert scheduler.take_back() == [rooms[1], rooms[3]]
    rooms[1].state = PrefillState.CLOSING
    assert scheduler.take_back() == [rooms[3]], "what comes back is counted on"
    for room in rooms:
        room.priority = 0
    assert scheduler.take_back() == []
    urgent.priority = -1
    assert scheduler.take_back() == [rooms[3]]
    huge = ask(scheduler, 10, 96, priority=-2, arrived=10.0)
    assert huge
    assert scheduler.take_back() == [], "all of them would not do"


def begin(scheduler, name, tokens, priority=0, arrived=0.0):
    """A prompt that has its pages, of which all whole ones but the last are computed and cached."""
    room = add(scheduler, name, tokens)
    room.priority, room.arrived = priority, arrived
    assert scheduler._has_pages(room, [])
    request = room.request
    request.num_computed = (request.num_prompt - 1) // PAGE * PAGE
    scheduler.cache.insert(request.prompt_ids[: request.num_computed], request.pages)
    return room


def shared(name, num_pages, own=2):
    """A prompt of `num_pages` pages that others share and `own` pages of its own."""
    return [*range(num_pages * PAGE), *range(1000 * name, 1000 * name + own * PAGE)]


def test_an_urgent_prompt_that_fits_with_its_prefix_takes_nothing():
    scheduler = make(num_pages=40)
    for i in (1, 2, 3):
        begin(scheduler, i, shared(i, 30), priority=1, arrived=i)
    assert scheduler.cache.num_available == 4
    urgent = add(scheduler, 9, shared(9, 30, own=1))
    assert scheduler.take_back() == []
    assert scheduler._has_pages(urgent, [])


@pytest.mark.parametrize("own", [5, 6, 8, 9, 10, 11])
def test_prompts_that_give_shared_pages_up_are_enough_or_none(own):
    scheduler = make(num_pages=40)
    rooms = [begin(scheduler, i, shared(i, 30), priority=1, arrived=i) for i in (1, 2, 3)]
    urgent = add(scheduler, 9, range(9000, 9000 + own * PAGE))  # 4 are free, each prompt has 2 of its own
    taken = scheduler.take_back()
    assert taken == rooms[::-1][: -(-(own - 4) // 2)]
    for room in taken:
        scheduler.cache.allocator.release(room.request.pages)
        scheduler.queues.remove(room)
    assert scheduler._has_pages(urgent, [])


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_prompts_give_up_what_an_urgent_one_lacks_or_nothing(seed, has_windows):
    rng = random.Random(seed)
    windows = WindowPages(PageAllocator(31), 61, window=9, page_size=PAGE) if has_windows else None
    cache = PrefixCache(PageAllocator(61), PAGE, windows=windows)
    scheduler = PrefillScheduler(
        PrefillQueues(64),
        cache,
        windows=RequestWindows(cache, margin=1),
        page_size=PAGE,
        chunk_size=8,
        max_batch=4,
        vocab_size=100,
    )
    texts = [[rng.randint(0, 1)] * rng.randint(8, 30) for _ in range(3)]
    for number in range(1, 12):
        tokens = rng.choice(texts)[: rng.randint(1, 30)] + [number + 1] * rng.randint(1, 30)
        room = add(scheduler, number, tokens)
        room.priority, room.arrived = rng.randint(0, 2), float(number)
        if not scheduler._has_pages(room, []):
            scheduler.queues.remove(room)
            continue
        request = room.request
        while remaining(room) > 8 and rng.random() < 0.8:
            start, end = request.num_computed, request.num_computed + 8
            scheduler.windows.cover(request, start, end)
            request.num_computed = end
            cache.insert(request.prompt_ids[:end], request.pages)
            scheduler.windows.retire_prompt(request, end)
    urgent = add(scheduler, 99, rng.choice(texts) + [99] * rng.randint(1, 60))
    urgent.priority, urgent.arrived = -1, 99.0
    taken, request = scheduler.take_back(), urgent.request
    assert (request.pages, request.windows, request.num_computed) == ([], [], 0)
    cache.check_integrity()
    could_begin = scheduler._has_pages(urgent, [])
    if could_begin:
        assert not taken
    for room in taken:
        give_back_pages(cache, scheduler.windows, room.request)
        scheduler.queues.remove(room)
    assert not taken or scheduler._has_pages(urgent, []), "those that gave up were enough"


def test_no_prompt_gives_pages_up_that_an_urgent_one_keeps():
    scheduler = make(num_pages=40)
    for i in (1, 2, 3):
        begin(scheduler, i, shared(i, 30), priority=i > 1, arrived=i)
    add(scheduler, 9, range(9000, 9000 + 9 * PAGE))  # 8 would be free
    assert scheduler.take_back() == []


def test_a_full_queue_turns_the_newest_of_the_least_urgent_class_away():
    scheduler = make()
    rooms = [ask(scheduler, i, 8, priority=p, arrived=i) for i, p in enumerate((1, 2, 2, 1))]
    assert scheduler.turned_away(0, since=5.0) is rooms[2]
    assert scheduler.turned_away(1, since=5.0) is rooms[2]
    assert scheduler.turned_away(2, since=5.0) is None


def test_a_steady_flow_of_urgent_prompts_keeps_nobody_out_of_a_full_queue():
    """A router offers its orders by rank, again and again, and has those back that were turned away."""
    scheduler, num_turned_away, numbers = make(chunk_size=8, max_batch=1), 0, itertools.count(1)
    scheduler.queues.max_queue = 4
    orders = [(1, 0.0)]  # class and arrival
    for second in range(6 * int(PRIORITY_S)):
        now = float(second)
        orders += [(0, now)] * 3
        for priority, since in sorted(orders, key=lambda each: rank(each[1], each[0])):
            if scheduler.queues.is_full:
                victim = scheduler.turned_away(priority, since)
                if victim is None:
                    continue
                scheduler.queues.remove(victim)
                orders.append((victim.priority, victim.arrived - victim.waited))
                num_turned_away += 1
            room = ask(scheduler, next(numbers), 8, priority=priority, arrived=now)
            room.waited = now - since
            orders.remove((priority, since))
        chunks, _ = scheduler.next_chunks(now)
        run(scheduler, chunks)
        if any(chunk.room.priority == 1 for chunk in chunks):
            break
    urgent_before = 3 * (int(PRIORITY_S) + 1)  # one in a second is computed
    assert PRIORITY_S <= now <= urgent_before + 1
    assert num_turned_away > 0


def test_a_prompt_that_was_placed_before_keeps_its_place_in_its_class():
    scheduler = make(chunk_size=8)
    ask(scheduler, 1, 30, arrived=5.0)
    again = ask(scheduler, 2, 30, arrived=6.0)
    again.waited = 3.0
    assert scheduler.next_chunks(7.0)[0][0].room is again


@given(
    drawn=st.lists(
        st.tuples(st.integers(1, 40), st.integers(-1, 2), st.floats(0, 30)), min_size=1, max_size=10
    ),
    chunk_size=st.sampled_from([0, 5, 8, 64]),
    slo_s=st.sampled_from([0.0, 0.5, 5.0]),
    num_pages=st.sampled_from([12, 40, 100]),
)
def test_every_prompt_of_every_class_is_computed_once_in_order(drawn, chunk_size, slo_s, num_pages):
    plan = FirstTokenPlan(slo_s) if slo_s else None
    for tokens in (10, 20, 30) if plan else ():
        plan.pace.saw(tokens, 0.05 + tokens / 100)
    scheduler = make(num_pages=num_pages, chunk_size=chunk_size, max_batch=3)
    scheduler.plan = plan
    rooms = [ask(scheduler, i + 1, n, priority=p, arrived=at) for i, (n, p, at) in enumerate(drawn)]
    reached, now = dict.fromkeys(range(len(rooms)), 0), 30.0
    for _ in range(2000):
        chunks, _ = scheduler.next_chunks(now)
        if not chunks:
            break
        now += 0.2
        assert len(chunks) <= 3
        assert len({chunk.room.key for chunk in chunks}) == len(chunks)
        if chunk_size:
            assert sum(chunk.num_tokens for chunk in chunks) <= chunk_size
        for chunk in chunks:
            number = rooms.index(chunk.room)
            assert chunk.start == reached[number] < chunk.end
            reached[number] = chunk.end
        run(scheduler, chunks)
        scheduler.cache.check_integrity()
    assert list(reached.values()) == [n for n, _, _ in drawn], "nobody starves"
    assert scheduler.cache.num_available == num_pages


def test_the_objective_counts_what_is_cached_of_a_prompt():
    scheduler = make(num_pages=200, chunk_size=16)
    scheduler.plan = FirstTokenPlan(1.0)
    for tokens in (4, 8, 16):
        scheduler.plan.pace.saw(tokens, tokens / 16)
    ask(scheduler, 1, 200, arrived=0.0)
    while scheduler.queues.count(PrefillState.QUEUED) or scheduler.queues.count(PrefillState.RUNNING):
        run(scheduler, scheduler.next_chunks(0.0)[0])
    again, other = ask(scheduler, 1, 203, arrived=50.0), ask(scheduler, 2, 12, arrived=50.0)
    chunks, _ = scheduler.next_chunks(50.0)
    assert [(chunk.room, chunk.num_tokens) for chunk in chunks] == [(again, 3), (other, 1)]
    run(scheduler, chunks)
    assert scheduler.next_chunks(50.2)[0][0].room is other
