"""Orders to change a worker's role: which are refused, and what the router sees of the others."""

import pytest
from baton.cluster.protocol.messages import CHANGING_ROLE, ChangeRole, Goodbye, Heartbeat, WorkerStats
from baton.router.api.role_bodies import role_order_of
from baton.router.errors import ApiError
from baton.router.workers.role_changes import HEARD_S, RETURN_S, RoleChanges
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World
from baton.tests.unit.router.workers.test_registry import hello

D2, NEW = "3" * 32, "4" * 32


def beat(world, identity, instance, **stats):
    known = WorkerStats(pages_total=100, pages_free=100, **stats)
    world.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=known))


def world_of(*, more=True):
    """Two decode workers and a prefill worker; without `more` one of each."""
    world = World().join(changes_role=True, pid=7, host="h")
    if more:
        world.sent[b"e"] = []
        world.dispatcher.on_message(b"e", hello(instance=D2, role="decode", changes_role=True))
        beat(world, b"e", D2)
    return world


def order(instance=D, role="prefill"):
    return ChangeRole(instance=instance, order="e" * 32, role=role, drain_ms=1000)


def states(world):
    return [move.state for move in world.dispatcher.role_changes.status(world.now)]


def tick(world, seconds=1.0):
    world.now += seconds
    world.dispatcher.tick()


@pytest.mark.parametrize(
    ("wanted", "more", "status", "said"),
    [
        (order("9" * 32), True, 404, "No worker"),
        (order(role="decode"), True, 409, "is a decode worker already"),
        (order(), False, 409, "is the only decode worker that serves"),
        (order(P, "decode"), True, 409, "older version"),
    ],
)
def test_an_order_that_would_leave_a_gap_is_refused(wanted, more, status, said):
    world = world_of(more=more)
    with pytest.raises(ApiError, match=said) as caught:
        world.dispatcher.change_role(wanted)
    assert caught.value.status == status
    assert not world.of(b"d", ChangeRole)
    assert states(world) == []


def test_a_change_is_followed_until_the_process_serves_in_its_new_role():
    world = world_of()
    world.dispatcher.change_role(order())
    assert world.of(b"d", ChangeRole) == [order()]
    with pytest.raises(ApiError, match="another worker changes its role"):
        world.dispatcher.change_role(order(D2))
    world.dispatcher.on_message(b"d", Goodbye(instance=D))
    beat(world, b"d", D, state=CHANGING_ROLE)
    worker = world.dispatcher.registry.get(D)
    assert (worker.state, worker.is_serving) == (CHANGING_ROLE, False)
    tick(world)
    assert states(world) == ["draining"]
    world.dispatcher.lose([worker])
    tick(world)
    assert states(world) == ["restarting"]
    world.sent[b"n"] = []
    world.dispatcher.on_message(b"n", hello(instance=NEW, role="prefill", pid=7, host="h", kv_endpoint="x"))
    tick(world)
    assert states(world) == ["restarting"], "it has registered and does not serve yet"
    beat(world, b"n", NEW)
    tick(world)
    assert states(world) == ["done"]
    assert not world.dispatcher.role_changes.is_busy


def test_a_worker_that_refuses_keeps_its_role_and_says_why():
    world = world_of()
    world.dispatcher.change_role(order())
    beat(world, b"d", D, role_fault="no model given")
    tick(world)
    [move] = world.dispatcher.role_changes.status(world.now)
    assert (move.state, move.fault) == ("refused", "no model given")
    assert world.dispatcher.registry.get(D).is_serving


@pytest.mark.parametrize(("has_left", "seconds"), [(False, HEARD_S), (True, RETURN_S)])
def test_a_change_that_does_not_end_is_given_up(has_left, seconds):
    world = world_of()
    world.dispatcher.change_role(order())
    if has_left:
        world.dispatcher.on_message(b"d", Goodbye(instance=D))
        world.dispatcher.lose([world.dispatcher.registry.get(D)])
    changes: RoleChanges = world.dispatcher.role_changes
    changes.turn(world.now + seconds - 1)
    assert changes.is_busy
    changes.turn(world.now + seconds + 1)
    assert [move.state for move in changes.status(0.0)] == ["lost"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b'{"instance":"%s","order":"%s","role":"router"}', "role"),
        (b'{"instance":"d1","order":"%s","role":"decode"}', "instance"),
        (b'{"instance":"%s","order":"%s","role":"decode","drain_s":-1}', "drain_s"),
    ],
)
def test_a_wrong_order_is_a_400_that_names_the_field(body, param):
    with pytest.raises(ApiError) as caught:
        role_order_of(body.replace(b"%s", D.encode()))
    assert caught.value.status == 400
    assert param is None or param in str(caught.value)
