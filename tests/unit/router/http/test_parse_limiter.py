"""Requests being parsed: bounded in total and per caller, and refused before the work where possible."""

from contextlib import ExitStack

import pytest
from baton.router.errors import ApiError
from baton.router.http import parse_limiter
from baton.router.http.parse_limiter import ParseLimiter
from baton.router.http.rate_limits import ANYONE, Caller, Gate


def refusal(room, caller=ANYONE, num_bytes=1, now=0.0):
    with pytest.raises(ApiError) as caught, room.reading(caller, num_bytes, now):
        pytest.fail("it is read")
    assert caught.value.status == 429
    assert int(caught.value.headers["retry-after"]) >= 1
    return caught.value


def counts(room):
    return room.num_requests, room.num_bytes


@pytest.mark.parametrize(("requests", "num_bytes"), [(3, 100), (100, 30)])
def test_concurrent_parsing_is_bounded_in_requests_and_bytes(monkeypatch, requests, num_bytes):
    monkeypatch.setattr(parse_limiter, "MAX_READING", requests)
    monkeypatch.setattr(parse_limiter, "MAX_READING_BYTES", num_bytes)
    room = ParseLimiter(Gate())
    with ExitStack() as others:
        for _ in range(2):
            others.enter_context(room.reading(ANYONE, 10, 0.0))
        with room.reading(ANYONE, 10, 0.0):
            refusal(room)
            assert counts(room) == (3, 30)
        with room.reading(ANYONE, 10, 0.0):
            assert counts(room) == (3, 30)
    assert counts(room) == (0, 0)


def test_a_request_that_fails_during_parsing_is_released():
    gate = Gate()
    room, caller = ParseLimiter(gate), Caller(id="a", max_requests=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), room.reading(caller, 5, 0.0):
            raise ZeroDivisionError
    assert counts(room) == (0, 0)
    gate.enter(caller, 1, 0.0)


def test_parsing_and_running_requests_share_a_callers_concurrency_limit():
    gate = Gate()
    room, two, other = ParseLimiter(gate), Caller(id="a", max_requests=2), Caller(id="b", max_requests=2)
    gate.enter(two, 1, 0.0)
    with room.reading(two, 1, 0.0):
        refusal(room, two)
        with room.reading(other, 1, 0.0):
            assert counts(room) == (2, 2)
        gate.enter(two, 1, 0.0)  # the one that was being read
    refusal(room, two)
    gate.leave(two)
    with room.reading(two, 1, 0.0):
        assert counts(room) == (1, 1)


def test_an_exhausted_rate_refuses_before_parsing_and_parsing_is_free():
    gate = Gate()
    room, caller = ParseLimiter(gate), Caller(id="a", requests_per_minute=2, tokens_per_minute=60)
    for _ in range(10):
        with room.reading(caller, 1, 0.0):
            pass
    gate.enter(caller, 60, 0.0)
    assert "tokens per minute" in str(refusal(room, caller))
    gate.enter(caller, 1, 2.0)
    assert "requests per minute" in str(refusal(room, caller, now=4.0))


def test_a_caller_with_a_request_being_parsed_is_not_evicted():
    gate = Gate()
    room, first = ParseLimiter(gate), Caller(id="first", max_requests=1)
    with room.reading(first, 1, 0.0):
        for number in range(5000):
            with room.reading(Caller(id=str(number)), 1, 0.0):
                pass
        refusal(room, first)
