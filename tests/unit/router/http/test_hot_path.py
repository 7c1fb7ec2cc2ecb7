"""Work that the router skips on the hot path has no effect on its answers."""

import asyncio

import hypothesis.strategies as st
from baton.router.http.request_head import fault_of, fields_of
from baton.router.rooms.effects import Deliver, Ended
from baton.router.scheduling.inbox import MANY, Inbox
from baton.router.workers.registry import Ledger, Load
from baton.tests.unit.router.rooms.test_room import TIMEOUTS, first, placed, reserved, tokens
from baton.tests.unit.router.rooms.test_room import D as DECODE
from baton.tests.unit.router.rooms.test_room import P as PREFILL
from hypothesis import given

STREAMS = st.lists(st.floats(min_value=0.0, max_value=1.5 * TIMEOUTS.token_s), max_size=6)


@given(
    before=STREAMS,
    behind=STREAMS,
    look_after=st.floats(min_value=0.0, max_value=2 * TIMEOUTS.token_s),
    deadline=st.none() | st.just(4.0),
)
def test_a_quiet_stream_costs_nothing_at_a_tick_until_tokens_come(before, behind, look_after, deadline):
    room, now = placed(deadline=deadline), 0.0
    assert room.quiet_until == 0.0
    room.on(reserved(), DECODE, now)
    room.on(first(), PREFILL, now)
    quiet_until = room.quiet_until
    for seq, gap in enumerate([*before, *behind], 1):
        now += gap
        room.on(tokens(seq, [7]), DECODE, now)
        if seq == len(before):
            quiet_until = room.quiet_until
    now += look_after
    assert quiet_until > 0.0
    assert room.tick(now) == [] or now >= quiet_until


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=20))
def test_a_ledger_s_sums_are_those_of_its_attempts(steps):
    ledger, expected = Ledger(), {}
    for room, size, is_there in steps:
        if is_there:
            ledger[room, 0] = expected[room, 0] = Load(pages=size, tokens=10 * size)
        else:
            ledger.drop((room, 0))
            expected.pop((room, 0), None)
        assert set(ledger) == set(expected)
        assert ledger.pages == sum(load.pages for load in expected.values())
        assert ledger.tokens == sum(load.tokens for load in expected.values())


def woken_by(*events):
    """What a patient reader has when it is woken, and whether it counted as one that does not read before."""

    async def read():
        inbox = Inbox(lambda: 0.0, is_patient=True)
        reader = asyncio.ensure_future(inbox.take())
        for number, event in enumerate(events, 1):
            await asyncio.sleep(0)
            assert not reader.done()
            assert inbox.unread_since is None
            inbox.put(0, event)
            assert (inbox.unread_since is not None) == (number == len(events))
        return [event for _, event in await reader]

    return asyncio.run(read())


def test_a_patient_reader_is_woken_at_the_end_with_all_events_before_it():
    events = [Deliver([1], []), Deliver([2, 3], []), Ended("stop")]
    assert woken_by(*events) == events


def test_a_patient_reader_s_work_comes_in_parts_of_many_tokens():
    events = [Deliver([1], []), Deliver([2] * (MANY - 2), []), Deliver([3], [])]
    assert woken_by(*events) == events


def test_a_repeated_header_keeps_both_values_and_two_hosts_are_an_error():
    fields = fields_of([(b"host", b"a"), (b"accept", b"x"), (b"accept", b"y")])
    assert fields[b"accept"] == [b"x", b"y"]
    assert fault_of(fields, "1.1", 10) is None
    assert fault_of(fields_of([(b"host", b"a"), (b"host", b"b")]), "1.1", 10).status == 400
    assert fault_of(fields_of([(b"host", b"a"), (b"content-length", b"11")]), "1.1", 10).status == 413
