"""Who renders what: chats behind a slow or dying one lose nothing, and only the one at fault fails."""

import pytest
from baton.router.sandbox.pool_scheduler import (
    COSTLY_S,
    HURRIED_S,
    LATEST_S,
    MAX_AHEAD,
    MAX_AHEAD_BYTES,
    MAX_ASIDE,
    SLOW_S,
    START_S,
    Answered,
    End,
    Failed,
    Fork,
    Lanes,
    Rendering,
    Send,
    SetAside,
)


def started(*renderings):
    """Lanes whose short worker, 1, lives since 0.0 and has these chats."""
    lanes = Lanes()
    done = [effect for rendering in renderings for effect in lanes.submit(rendering, 0.0)]
    assert done == [Fork(1), *(Send(1, rendering) for rendering in renderings)]
    lanes.ready(1, 0.0)
    return lanes


def chats(count, **more):
    return [Rendering(b"{}", **more) for _ in range(count)]


def test_answers_belong_to_chats_in_their_order():
    first, second = chats(2)
    lanes = started(first, second)
    assert lanes.answered(1, 0.01) == [Answered(first)]
    assert lanes.answered(1, 0.02) == [Answered(second)]
    assert lanes.num_open == 0
    assert lanes.submit(first, 9.0) == [Send(1, first)], "the worker stays"


def test_long_chats_and_short_ones_do_not_wait_for_each_other():
    lanes = started(*chats(1))
    (long,) = chats(1, is_long=True)
    assert lanes.submit(long, 0.0) == [Fork(2), Send(2, long)]


def test_a_worker_gets_no_more_ahead_than_bounds_say():
    many = chats(MAX_AHEAD + 1)
    lanes = Lanes()
    sent = [effect for chat in many for effect in lanes.submit(chat, 0.0)]
    assert len(sent) == 1 + MAX_AHEAD
    assert lanes.answered(1, 0.1) == [Answered(many[0]), Send(1, many[-1])]
    wide = [Rendering(b"x" * MAX_AHEAD_BYTES) for _ in range(2)]
    lanes = Lanes()
    assert lanes.submit(wide[0], 0.0) == [Fork(1), Send(1, wide[0])], "one goes however large"
    assert lanes.submit(wide[1], 0.0) == []


def test_those_behind_a_slow_chat_go_to_another_worker():
    slow, *behind = chats(3)
    lanes = started(slow, *behind)
    assert lanes.tick(SLOW_S * 0.9) == []
    assert lanes.tick(SLOW_S) == [SetAside(1), Fork(2), Send(2, behind[0]), Send(2, behind[1])]
    assert lanes.answered(1, 0.5) == [Answered(slow), End(1, is_idle=False)], "it is not asked again"


def test_a_worker_that_is_not_yet_there_is_not_slow():
    lanes = Lanes()
    (chat,) = chats(1)
    lanes.submit(chat, 0.0)
    assert lanes.tick(START_S - 0.1) == []
    assert lanes.tick(START_S) == [End(1, is_idle=False), Fork(2), Send(2, chat)]


@pytest.mark.parametrize(("died", "is_costly"), [(COSTLY_S, True), (0.05, False)])
def test_the_first_chat_of_a_dead_worker_is_blamed(died, is_costly):
    first, second = chats(2)
    lanes = started(first, second)
    done = lanes.ended(1, died)
    if is_costly:
        assert done == [Failed(first, is_costly=True), Fork(2), Send(2, second)]
        return
    assert done == [Fork(2), Send(2, first), Send(2, second)], "once more"
    lanes.ready(2, died)
    assert lanes.ended(2, 0.2) == [Failed(first, is_costly=False), Fork(3), Send(3, second)]


def test_who_leaves_with_an_answer_is_not_blamed_on_the_next():
    first, second = chats(2)
    lanes = started(first, second)
    done = lanes.answered(1, 0.1, is_last=True)
    assert done == [Answered(first), End(1, is_idle=True), Fork(2), Send(2, second)]
    assert second.num_deaths == 0
    assert lanes.ended(1, 0.2) == []


def test_many_slow_chats_cut_the_oldest_and_never_one_that_is_young():
    lanes, key = Lanes(), 0
    for now in (0.0, 1.1 * SLOW_S, 2.2 * SLOW_S):
        lanes.tick(now)
        for is_long in (False, True):
            lanes.submit(Rendering(b"{}", is_long), now)
            lanes.ready(key := key + 1, now)
    assert key == MAX_ASIDE + 2
    assert lanes.tick(3.3 * SLOW_S) == [], "all are young"
    done = lanes.tick(HURRIED_S)
    assert [type(effect) for effect in done] == [Failed, End, SetAside] * 2
    assert [effect.key for effect in done if isinstance(effect, End)] == [1, 2]
    assert all(effect.is_costly for effect in done if isinstance(effect, Failed))


def test_a_worker_that_the_kernel_does_not_end_is_cut():
    (chat,) = chats(1)
    lanes = started(chat)
    lanes.tick(SLOW_S)
    assert lanes.tick(LATEST_S - 0.01) == []
    assert lanes.tick(LATEST_S) == [Failed(chat, is_costly=True), End(1, is_idle=False)]
    assert lanes.num_open == 0


def test_nobody_renders_for_a_client_that_left():
    lanes = started(*chats(MAX_AHEAD))
    (left,) = chats(1)
    assert lanes.submit(left, 0.0) == []
    left.is_dropped = True
    for _ in range(MAX_AHEAD):
        assert all(effect != Send(1, left) for effect in lanes.answered(1, 0.05))
    assert lanes.num_open == 0
