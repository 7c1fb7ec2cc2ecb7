"""Rate limits of an API key's owner."""

import contextlib
import math

import pytest
from baton.cluster.security.api_keys import ApiKey
from baton.router.errors import ApiError
from baton.router.http.auth import caller_of
from baton.router.http.rate_limits import ANYONE, MINUTE_S, Caller, Gate, duration
from hypothesis import given
from hypothesis import strategies as st

STEPS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50)), max_size=80)


def refused(gate, caller, tokens=1, now=0.0):
    with pytest.raises(ApiError) as caught:
        gate.enter(caller, tokens, now)
    assert caught.value.status == 429
    return caught.value.retry_after_s


@given(STEPS, st.integers(1, 30))
def test_a_minute_has_at_most_twice_the_rate_and_the_long_run_the_rate(steps, rate):
    gate, caller, now, taken = Gate(), Caller(id="a", requests_per_minute=rate), 0.0, []
    for pause, _ in steps:
        now += pause
        with contextlib.suppress(ApiError):
            gate.enter(caller, 1, now)
            taken.append(now)
    assert len(taken) <= rate + math.floor(now / MINUTE_S * rate) + 1
    for start in taken:
        assert sum(start <= at < start + MINUTE_S for at in taken) <= 2 * rate + 1


def test_after_retry_after_the_request_is_taken():
    gate, caller = Gate(), Caller(id="a", requests_per_minute=6)
    for _ in range(6):
        gate.enter(caller, 1, 0.0)
    wait = refused(gate, caller)
    assert wait == 10
    refused(gate, caller, now=wait - 1.0)
    gate.enter(caller, 1, wait + 0.01)


def test_used_tokens_delay_later_requests():
    gate, caller = Gate(), Caller(id="a", tokens_per_minute=600)
    gate.enter(caller, 900, 0.0)  # larger than a minute's worth: passes while the bucket is full
    assert refused(gate, caller, now=1.0) == 30
    gate.enter(caller, 1, 31.0)


def test_a_request_that_is_refused_costs_nothing():
    gate, caller = Gate(), Caller(id="a", requests_per_minute=100, tokens_per_minute=60, max_requests=9)
    gate.enter(caller, 60, 0.0)
    for _ in range(200):
        refused(gate, caller, 10)
    assert gate.num_running(caller) == 1
    gate.enter(caller, 10, 2.0)


def test_the_concurrency_limit_counts_running_requests_per_key():
    gate, one, other = Gate(), Caller(id="a", max_requests=2), Caller(id="b", max_requests=2)
    gate.enter(one, 1, 0.0)
    gate.enter(one, 1, 0.0)
    refused(gate, one)
    gate.enter(other, 1, 0.0)
    gate.leave(one)
    gate.enter(one, 1, 0.0)
    assert (gate.num_running(one), gate.num_running(other)) == (2, 1)


def test_without_limits_nothing_is_refused_and_only_idle_entries_expire():
    gate = Gate()
    for i in range(5000):
        gate.enter(Caller(id=str(i)), 10**9, 0.0)
        if i:
            gate.leave(Caller(id=str(i)))
    assert gate.num_running(Caller(id="0")) == 1
    assert repr(gate).startswith("Gate(4096 callers")
    gate.enter(ANYONE, 10**9, 0.0)


def test_a_new_caller_is_counted_when_every_known_caller_is_active(monkeypatch):
    monkeypatch.setattr("baton.router.http.rate_limits.MAX_CALLERS", 1)
    gate, running, newcomer = Gate(), Caller(id="a"), Caller(id="b")
    gate.enter(running, 1, 0.0)
    gate.enter(newcomer, 1, 0.0)
    assert [gate.num_running(caller) for caller in (running, newcomer)] == [1, 1]
    gate.leave(newcomer)


def test_tokens_that_were_not_used_come_back_at_the_end():
    gate, caller = Gate(), Caller(id="a", tokens_per_minute=600)
    gate.enter(caller, 1000, 0.0)
    refused(gate, caller)
    gate.leave(caller, 900)
    gate.enter(caller, 100, 0.0)  # 500 are left
    assert headers(gate, caller, 0.0)["x-ratelimit-remaining-tokens"] == "400"


def test_no_more_comes_back_than_the_bucket_holds():
    gate, caller = Gate(), Caller(id="a", tokens_per_minute=600)
    gate.enter(caller, 600, 0.0)
    assert headers(gate, caller, 60.0)["x-ratelimit-remaining-tokens"] == "600"
    gate.leave(caller, 600)
    gate.enter(caller, 1, 60.0)
    assert headers(gate, caller, 60.0)["x-ratelimit-remaining-tokens"] == "599"


def test_a_limit_that_was_changed_meanwhile_is_not_undone():
    gate = Gate()
    gate.enter(Caller(id="a", tokens_per_minute=600), 500, 0.0)
    narrow = Caller(id="a", tokens_per_minute=60)
    gate.enter(narrow, 60, 0.0)
    gate.leave(Caller(id="a", tokens_per_minute=600), 400)
    assert headers(gate, narrow, 0.0)["x-ratelimit-remaining-tokens"] == "60"


def headers(gate, caller, now):
    return {name.decode(): value.decode() for name, value in gate.headers(caller, now)}


def test_headers_tell_limit_rest_and_the_time_until_all_is_back():
    gate = Gate()
    caller = Caller(id="a", requests_per_minute=60, tokens_per_minute=600)
    gate.enter(caller, 900, 0.0)
    assert headers(gate, caller, 0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m30s",
    }
    assert headers(gate, Caller(id="b", tokens_per_minute=6), 0.0).keys() == {
        f"x-ratelimit-{name}-tokens" for name in ("limit", "remaining", "reset")
    }
    assert gate.headers(ANYONE, 0.0) == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0ms"),
        (-1.0, "0ms"),
        (0.0121, "13ms"),
        (1.0, "1s"),
        (6.2, "7s"),
        (60.0, "1m0s"),
        (89.5, "1m30s"),
    ],
)
def test_durations_have_the_form_of_openais_headers(seconds, shown):
    assert duration(seconds) == shown


def test_each_of_several_routers_enforces_its_part():
    limits = {"requests_per_minute": 10, "tokens_per_minute": 1000, "max_requests": 1}
    key = ApiKey(id="0" * 8, name="alice", sha256="0" * 64, **limits)
    one = caller_of(key, 3)
    assert (one.requests_per_minute, one.tokens_per_minute, one.max_requests) == (4, 334, 1)
    unlimited = ApiKey(id="1" * 8, name="bob", sha256="0" * 64)
    assert not caller_of(unlimited, 3).has_rates
    gate = Gate()
    gate.enter(one, 1, 0.0)
    with pytest.raises(ApiError, match="limited to 1 requests at once at each of 3 routers"):
        gate.enter(one, 1, 0.0)
