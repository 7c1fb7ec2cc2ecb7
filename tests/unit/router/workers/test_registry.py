"""The registry and its ledger of pages."""

import hypothesis.strategies as st
import pytest
from baton.cluster.protocol.messages import (
    PROTOCOL_MAJOR,
    Failed,
    Hello,
    Refused,
    Rejected,
    Welcome,
    WorkerStats,
)
from baton.router.rooms.attempt import RETRACTED
from baton.router.workers.eligibility import Need, able_pairs, live_pairs
from baton.router.workers.registry import UNREACHABLE_S, Load, Registry
from hypothesis import given

ROUTER = "a" * 32


def hello(instance="1" * 32, role="decode", **more):
    fields = {
        "protocol": PROTOCOL_MAJOR,
        "fingerprint": "f",
        "model": "m",
        "kv_endpoint": "ipc:///x" if role == "prefill" else "",
        "pages_total": 100,
        "page_size": 16,
        "max_context": 1024,
        "max_running": 8,
    }
    return Hello(role=role, instance=instance, **(fields | more))


def beat(registry, worker, now=0.0, **stats):
    fields = {"pages_total": worker.hello.pages_total, "pages_free": worker.hello.pages_total}
    assert registry.heartbeat(worker.identity, worker.instance, WorkerStats(**(fields | stats)), now)


def registered(**more):
    registry = Registry(ROUTER, 3.0)
    message = hello(**more)
    assert isinstance(registry.hello(b"id", message, 0.0), Welcome)
    return registry, registry.get(message.instance)


def test_welcome_names_router_and_instance():
    answer = Registry(ROUTER, 3.0).hello(b"id", hello(), 0.0)
    assert (answer.router, answer.instance) == (ROUTER, "1" * 32)


def test_wrong_hello_is_rejected_with_a_reason_and_not_kept():
    registry = Registry(ROUTER, 3.0)
    for message in (
        hello(protocol=PROTOCOL_MAJOR + 1),
        hello(role="prefill", kv_endpoint=""),
        hello(pages_total=0),
    ):
        answer = registry.hello(b"id", message, 0.0)
        assert isinstance(answer, Rejected)
        assert answer.reason
    assert len(registry) == 0


def test_worker_serves_from_its_first_heartbeat_on():
    registry, worker = registered()
    assert (worker.state, worker.is_serving) == ("starting", False)
    beat(registry, worker)
    assert worker.is_serving
    beat(registry, worker, state="draining")
    assert not worker.is_serving


def test_repeated_hello_keeps_rooms_and_takes_the_new_connection():
    registry, worker = registered()
    registry.reserve(worker.instance, "room", 0, Load(5, 80))
    worker.unreachable_since = 1.0
    registry.hello(b"new", hello(), 2.0)
    assert registry.get(worker.instance) is worker
    assert (worker.identity, worker.num_rooms, worker.unreachable_since) == (b"new", 1, None)


def test_hello_does_not_stand_in_for_heartbeats():
    registry, worker = registered()
    beat(registry, worker, now=1.0)
    registry.hello(b"id", hello(), 3.9)
    assert registry.overdue(4.0) == []
    assert registry.overdue(4.1) == [worker]


def test_silence_does_not_count_while_the_router_itself_is_behind():
    registry, worker = registered()
    beat(registry, worker, now=1.0)
    registry.excuse(1.0, is_behind=False)
    for tick in range(1, 50):
        registry.excuse(1.0 + tick / 10, is_behind=True)
        assert registry.overdue(1.0 + tick / 10) == []
    registry.excuse(20.0, is_behind=True)
    assert registry.overdue(20.0) == [worker], "an excuse has an end"
    beat(registry, worker, now=20.0)
    registry.excuse(20.1, is_behind=False)
    registry.excuse(23.2, is_behind=True)
    assert registry.overdue(23.2) == [], "and is given anew"


def test_unreachable_worker_is_overdue_sooner_and_a_heartbeat_clears_it():
    registry, worker = registered()
    beat(registry, worker, now=1.0)
    worker.unreachable_since = 1.0
    assert registry.overdue(1.0 + UNREACHABLE_S + 0.1) == [worker]
    beat(registry, worker, now=1.5)
    assert registry.overdue(1.0 + UNREACHABLE_S + 0.1) == []


def test_a_heartbeat_of_an_unknown_worker_is_recognised():
    assert not Registry(ROUTER, 3.0).heartbeat(b"id", "2" * 32, WorkerStats(), 0.0)


def test_pages_for_counts_unverified_tokens_and_rounds_up():
    _, worker = registered(spec_tokens=4)
    assert [worker.pages_for(n) for n in (1, 12, 13, 28, 29)] == [1, 1, 2, 2, 3]


def test_pages_of_unknown_users_are_not_offered():
    registry, worker = registered()
    registry.reserve(worker.instance, "room", 0, Load(10, 160))
    beat(registry, worker, pages_free=60)  # 40 used, 10 of them ours
    assert worker.free_pages == 60
    registry.release(worker.instance, "room", 0)
    assert worker.free_pages == 70
    beat(registry, worker, pages_free=100)
    assert worker.free_pages == 100


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.integers(0, 40)), max_size=40))
def test_ledger_is_what_was_reserved_and_not_released(steps):
    registry, worker = registered()
    model = {}
    for room, epoch, pages in steps:
        if pages < 10:
            registry.release(worker.instance, str(room), epoch)
            model.pop((str(room), epoch), None)
        else:
            registry.reserve(worker.instance, str(room), epoch, Load(pages, pages))
            model[str(room), epoch] = pages
        assert worker.placed_pages == sum(model.values())
        assert worker.num_rooms == len(model)
        assert worker.free_pages == max(0, 100 - sum(model.values()))
    assert "Worker(decode 11111111 starting" in repr(worker)


def test_a_backlog_has_the_prompts_that_have_not_begun():
    registry, worker = registered()
    for room, load in {
        "a": Load(pages=1, tokens=40, prompts=1),
        "b": Load(pages=1, tokens=20, prompts=1),
        "c": Load(pages=1, tokens=8),  # behind the prompt of another
    }.items():
        registry.reserve(worker.instance, room, 0, load)
    assert worker.backlog == (2, 68)
    registry.begun(worker.instance, "a", 0)
    registry.begun(worker.instance, "a", 0)
    assert worker.backlog == (1, 28)
    registry.release(worker.instance, "a", 0)
    registry.release(worker.instance, "b", 0)
    assert worker.backlog == (0, 8)
    registry.reserve(worker.instance, "d", 0, Load(pages=1, tokens=5, prompts=1))
    worker.forget_rooms()
    assert worker.backlog == (0, 0)


def test_the_pace_of_heartbeats_follows_the_patience_within_bounds():
    paces = [
        Registry(ROUTER, timeout).hello(b"id", hello(), 0.0).heartbeat_ms for timeout in (0.3, 1.2, 3.0, 60.0)
    ]
    assert paces == [100, 200, 500, 1000]


def test_workers_that_failed_lately_or_cannot_be_reached_are_doubtful():
    registry, worker = registered()
    registry.hello(b"other", hello(instance="2" * 32), 0.0)
    assert registry.doubtful(0.0) == set()
    verdicts = [registry.judge(worker.instance, f"room{i}", 0, False, float(i)) for i in range(3)]
    assert verdicts == [False, False, True]
    assert registry.doubtful(3.0) == {worker.instance}
    registry.get("2" * 32).unreachable_since = 3.0
    assert registry.doubtful(3.0) == {worker.instance, "2" * 32}
    assert registry.judge("3" * 32, "room", 0, False, 3.0) is False, "a worker that is gone"


def test_a_doubtful_workers_single_place_is_freed_with_its_ledger():
    registry, worker = registered()
    for i in range(3):
        registry.judge(worker.instance, f"room{i}", 0, False, 0.0)
    registry.reserve(worker.instance, "probe", 0, Load(1, 16))
    assert worker.breaker.probe == ("probe", 0)
    registry.release(worker.instance, "probe", 0)
    assert worker.breaker.probe is None
    registry.reserve(worker.instance, "probe", 1, Load(1, 16))
    worker.forget_rooms()
    assert worker.breaker.probe is None


def test_decode_takes_prompts_when_it_can_and_the_router_allows_it():
    for can, may in ((True, True), (True, False), (False, True)):
        registry = Registry(ROUTER, 3.0, local_prefill=may)
        registry.hello(b"id", hello(role="decode", local_prefill=can), 0.0)
        (worker,) = registry
        assert worker.takes_prompts == (can and may)


def test_rooms_placed_by_another_router_count_against_a_workers_places():
    registry, worker = registered(max_running=2)
    beat(registry, worker, running=1, transferring=1)
    need = Need(prompt=16, max_new=16)
    prefill = registry.hello(b"p", hello(instance="2" * 32, role="prefill"), 0.0)
    beat(registry, registry.get(prefill.instance))
    assert not able_pairs(live_pairs(registry), need), "both places are taken"
    beat(registry, worker, running=1)
    assert [decode for _, decode in able_pairs(live_pairs(registry), need)] == [worker]
    registry.reserve(worker.instance, "own", 0, Load(2, 32))
    beat(registry, worker, running=2)
    assert not able_pairs(live_pairs(registry), need), "one is ours, one is not"


ABOUT = {"room": "f" * 32, "epoch": 0}


@pytest.mark.parametrize(
    "message",
    [
        Refused(**ABOUT, instance="1" * 32, reason="full", retry_after_ms=250),
        Failed(**ABOUT, instance="1" * 32, kind=RETRACTED, message="its pages", retryable=True),
    ],
    ids=["refused", "retracted"],
)
def test_a_worker_fuller_than_booked_gets_nothing_before_its_next_beat(message):
    registry, worker = registered()
    beat(registry, worker)
    beat(registry, registry.get(registry.hello(b"p", hello(instance="2" * 32, role="prefill"), 0.0).instance))
    need = Need(prompt=16, max_new=16)
    assert able_pairs(live_pairs(registry), need)
    worker.hear(Failed(**ABOUT, instance=worker.instance, kind="TransferError", message="", retryable=True))
    assert able_pairs(live_pairs(registry), need)
    worker.hear(message)
    assert not able_pairs(live_pairs(registry), need)
    beat(registry, worker)
    assert able_pairs(live_pairs(registry), need)


def test_workers_with_different_full_hashes_stop_pairing_with_a_log_line(caplog):
    registry = Registry(ROUTER, 3.0)
    for instance, role in (("1" * 32, "prefill"), ("2" * 32, "decode")):
        registry.hello(instance[:1].encode(), hello(instance=instance, role=role), 0.0)
    p, d = registry.get("1" * 32), registry.get("2" * 32)
    beat(registry, p, weights_hash="a" * 64)
    beat(registry, d)
    assert len(live_pairs(registry)) == 1
    assert not caplog.records
    beat(registry, d, weights_hash="b" * 64)
    assert live_pairs(registry) == []
    (record,) = caplog.records
    assert "other weights" in record.getMessage()
    beat(registry, d, weights_hash="b" * 64)
    assert len(caplog.records) == 1, "said once"
    beat(registry, d, weights_hash="a" * 64)
    assert len(live_pairs(registry)) == 1
