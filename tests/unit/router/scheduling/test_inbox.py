"""The events that wait for a slow client are bounded in bytes, not in tokens alone."""

import asyncio

from baton.cluster.protocol.messages import TokenLogprob
from baton.router.rooms.effects import Deliver, Ended
from baton.router.scheduling.inbox import MAX_UNREAD, Inbox


def filled(count, num_top):
    """An inbox with `count` tokens, each with so many alternatives; -1: without a log-probability."""
    inbox = Inbox(lambda: 0.0)
    logprobs = [TokenLogprob(logprob=-1.0, top=[(i, -1.0) for i in range(num_top)])] if num_top >= 0 else []
    for _ in range(count):
        inbox.put(0, Deliver(ids=[5], logprobs=logprobs))
    return inbox


def test_plain_tokens_count_one():
    assert not filled(MAX_UNREAD, -1).is_full
    assert filled(MAX_UNREAD + 1, -1).is_full


def test_log_probabilities_fill_an_inbox_sooner():
    assert filled(MAX_UNREAD // 40, 20).is_full
    assert not filled(MAX_UNREAD // 50, 20).is_full


def test_a_reader_of_whole_answers_gets_all_events_with_the_end_in_order():
    events = [Deliver([1], []), Deliver([2, 3], []), Ended("stop")]

    async def read():
        inbox = Inbox(lambda: 0.0, is_patient=True)
        reader = asyncio.ensure_future(inbox.take())
        for event in events:
            await asyncio.sleep(0)
            assert inbox.unread_since is None, "who waits for the end does not read slowly"
            inbox.put(0, event)
        return [event for _, event in await reader]

    assert asyncio.run(read()) == events
