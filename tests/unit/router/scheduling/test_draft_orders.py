"""Orders about draft weights reach the named worker, and consent to recording goes with its request only."""

import pytest
from baton.cluster.protocol.messages import (
    DraftHead,
    Failed,
    Heartbeat,
    Prefill,
    Reserve,
    Sampling,
    SwapDraft,
    WorkerStats,
)
from baton.cluster.security.api_keys import ApiKeys
from baton.deploy.keys.api_keys import add
from baton.router.api.draft_bodies import draft_order_of
from baton.router.errors import ApiError
from baton.router.http.auth import caller_of, must_operate
from baton.router.http.rate_limits import ANYONE, Caller
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_state import Job
from baton.tests.unit.cluster.protocol.test_skew import Fleet, instance_of
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World
from baton.tests.unit.virtual_time import Clock

ORDER = "e" * 32


def drafting(world):
    stats = WorkerStats(pages_total=100, pages_free=100, draft=DraftHead(path="/old", fingerprint="0" * 64))
    world.dispatcher.on_message(b"d", Heartbeat(instance=D, stats=stats))
    return world


def swap(instance=D):
    return SwapDraft(instance=instance, order=ORDER, action="swap", path="/new")


def test_an_order_goes_to_a_worker_that_reports_a_head_and_to_no_other():
    world = World().join()
    assert not world.dispatcher.swap_draft(swap()), "its heartbeats do not speak of a head"
    drafting(world)
    for instance in (P, "9" * 32):
        assert not world.dispatcher.swap_draft(swap(instance))
    assert world.dispatcher.swap_draft(swap())
    assert world.of(b"d", SwapDraft) == [swap()]
    assert world.of(b"p", SwapDraft) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b'{"instance":"%s","order":"%s","action":"stop"}', "action"),
        (b'{"instance":"d1","order":"%s","action":"swap","path":"/x"}', "instance"),
        (b'{"instance":"%s","order":"%s","action":"swap"}', "path"),
        (b'{"instance":"%s","order":"%s","action":"back","path":"/x"}', "path"),
        (b'{"instance":"%s","order":"%s","action":"back","more":1}', None),
    ],
)
def test_a_wrong_order_is_a_400_that_names_the_field(body, param):
    text = body.replace(b"%s", D.encode())
    with pytest.raises(ApiError) as caught:
        draft_order_of(text)
    assert caught.value.status == 400
    assert param is None or param in str(caught.value)


def test_only_operators_change_a_keyed_cluster():
    must_operate(ANYONE)
    must_operate(Caller(id="a" * 8, is_operator=True))
    for caller in (Caller(id="a" * 8), Caller(id="a" * 8, is_observer=True)):
        with pytest.raises(ApiError, match="operator's key"):
            must_operate(caller)


@pytest.mark.parametrize("salt", ["", "5a"])
@pytest.mark.parametrize("may_record", [False, True])
def test_consent_to_recording_goes_to_decode_at_every_attempt(may_record, salt):
    world = Fleet().add("p").add("d")
    caller = Caller(id="a" * 8, salt=salt) if salt else ANYONE
    job = Job(
        prompt_ids=[5] * 16, sampling=Sampling(), arrived=0.0, tokenize_s=0.0, caller=caller,
        may_record=may_record,
    )  # fmt: skip
    [entry] = world.dispatcher.submit([job], Inbox(lambda: world.now))
    lost = Failed(
        room=entry.room.room,
        epoch=0,
        instance=instance_of("d"),
        kind="OutOfPages",
        message="full",
        retryable=True,
    )
    world.dispatcher.on_message(b"d", lost)
    world.now += 5.0
    world.dispatcher.tick()
    orders = world.of(b"d", Reserve)
    assert [order.epoch for order in orders] == [0, 1]
    assert {(order.may_record, order.salt) for order in orders} == {(may_record, salt)}
    assert {order.salt for order in world.of(b"p", Prefill)} == {salt}


def test_the_router_s_own_requests_are_not_recorded():
    world = World(canary_s=1.0).join()
    for _ in range(30):
        world.now += 0.1
        world.dispatcher.tick()
    orders = world.of(b"d", Reserve)
    assert orders
    assert not any(order.may_record for order in orders)


def test_an_objection_to_recording_holds_for_the_whole_tenant(tmp_path):
    path = tmp_path / "keys.json"
    secrets = {
        name: add(path, {"name": name, "tenant": tenant, "no_recording": name == "b"})[0]
        for name, tenant in (("a", "t"), ("b", "t"), ("c", "u"), ("d", None))
    }
    clock = Clock(1_800_000_000.0)
    keys = ApiKeys(path, clock, clock)
    found = {name: caller_of(keys.find(secret)).may_record for name, secret in secrets.items()}
    assert found == {"a": False, "b": False, "c": True, "d": True}
