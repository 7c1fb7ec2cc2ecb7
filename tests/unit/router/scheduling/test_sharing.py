"""Choices of a request go to the decode worker that gets the prompt of the first one, and share it there."""

import pytest
from baton.cluster.protocol.messages import Failed, Prefill, Refused, Reserve, Sampling
from baton.router.rooms.attempt import UNSHARED
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.router.scheduling.sharing import MAX_UNSHARED, shared_pages
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World

SIZE = 16  # tokens of a page of these workers, and of a prompt here


def world_of(**decode):
    return World().join(**{"shares_prompts": True, "pages_total": 100, **decode})


def unshare(world, order):
    message = Failed(
        room=order.room, epoch=order.epoch, instance=D, kind=UNSHARED, message="", retryable=True
    )
    world.dispatcher.on_message(b"d", message)


def test_all_choices_but_the_first_share_its_prompt():
    world = world_of()
    entries, _ = world.submit(4, 4, 4)
    orders = world.of(b"d", Reserve)
    assert [(order.shares, order.prefill_instance) for order in orders] == [
        (None, P),
        (entries[0].room.room, None),
        (entries[0].room.room, None),
    ]
    assert [order.room for order in world.of(b"p", Prefill)] == [entries[0].room.room]
    assert world.dispatcher.events["shared_prompt"] == 2
    assert world.dispatcher.events["local_prefill"] == 0


def test_a_worker_that_does_not_know_of_it_gets_every_choice_alone():
    world = world_of(shares_prompts=False)
    world.submit(4, 4)
    assert [order.shares for order in world.of(b"d", Reserve)] == [None, None]
    assert len(world.of(b"p", Prefill)) == 2


def test_choices_of_different_requests_share_nothing():
    world = world_of()
    world.submit(4)
    world.submit(4)
    assert [order.shares for order in world.of(b"d", Reserve)] == [None, None]


@pytest.mark.parametrize(("num_prompt", "pages"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_page_of_the_last_prompt_token_is_not_shared(num_prompt, pages):
    assert shared_pages(num_prompt, SIZE) == pages


def test_shared_pages_are_booked_once():
    booked = {}
    for shares in (False, True):
        world = world_of(shares_prompts=shares)
        sampling = Sampling(max_new_tokens=4)
        jobs = [Job(prompt_ids=[5] * 49, sampling=sampling, arrived=0.0, tokenize_s=0.0) for _ in range(3)]
        world.dispatcher.submit(jobs, Inbox(lambda: 0.0))
        booked[shares] = world.dispatcher.registry.get(D).placed_pages
    assert booked[False] - booked[True] == 2 * shared_pages(49, SIZE)


def test_a_choice_whose_prompt_was_lost_is_placed_again_at_no_cost():
    world = world_of()
    entries, _ = world.submit(4, 4)
    unshare(world, world.of(b"d", Reserve)[1])
    again = world.of(b"d", Reserve)[2]
    assert (again.room, again.epoch, again.shares) == (entries[1].room.room, 1, entries[0].room.room)
    assert entries[1].room.num_unshared == 1
    assert world.dispatcher.events["unshared"] == 1
    assert world.dispatcher.events["requeued"] == 0


def test_a_choice_that_lost_its_prompt_too_often_is_placed_alone():
    world = world_of()
    entries, _ = world.submit(4, 4)
    for i in range(MAX_UNSHARED):
        order = world.of(b"d", Reserve)[-1]
        assert (order.room, order.epoch) == (entries[1].room.room, i)
        unshare(world, order)
    last = world.of(b"d", Reserve)[-1]
    assert (last.epoch, last.shares, last.prefill_instance) == (MAX_UNSHARED, None, P)


def test_another_choice_leads_where_the_first_one_is_refused():
    world = world_of()
    entries, _ = world.submit(4, 4, 4)
    first, second, third = world.of(b"d", Reserve)
    refused = Refused(room=first.room, epoch=0, instance=D, reason="full", retry_after_ms=250)
    world.dispatcher.on_message(b"d", refused)
    world.dispatcher.registry.get(D).foreign_pages = 0
    unshare(world, second)
    unshare(world, third)
    orders = world.of(b"d", Reserve)[3:]
    assert [(order.room, order.shares) for order in orders] == [
        (entries[1].room.room, None),
        (entries[2].room.room, entries[1].room.room),
    ]


def test_a_full_worker_leaves_a_choice_waiting():
    world = world_of(max_running=2)
    entries, _ = world.submit(4, 4, 4)
    assert len(world.of(b"d", Reserve)) == 2
    assert world.dispatcher.num_queued == 1
    assert entries[2].room.epoch == -1
