"""The workers that a scaler of roles may move."""

from baton.cluster.protocol.messages import WorkerStats
from baton.router.scheduling.role_moves import RoleMoves
from baton.router.scheduling.waiting_list import WaitingList
from baton.router.workers.registry import Registry
from baton.tests.unit.router.workers.test_registry import hello

REFUSING = WorkerStats(role_fault="a worker of several ranks keeps its role")


def candidates(*workers):
    """Places of the `workers`, fields of a Hello and a heartbeat, that may move."""
    registry = Registry("a" * 32, 1000.0)
    for number, (fields, stats) in enumerate(workers):
        message = hello(instance=str(number) * 32, **({"changes_role": True} | fields))
        registry.hello(bytes([number]), message, 0.0)
        registry.heartbeat(bytes([number]), message.instance, stats, 0.0)
    moves = RoleMoves(registry, WaitingList(), {}, None)
    return [int(each.instance[0]) for each in moves.candidates(0.0)]


def test_workers_that_cannot_change_are_passed_over():
    decode, well = {"role": "decode"}, WorkerStats()
    assert candidates((decode, well), (decode, well)) == [0, 1]
    assert candidates((decode | {"changes_role": False}, well), (decode, well)) == [1]
    assert candidates((decode | {"aggregated": True}, well), (decode, well)) == [1]
    assert candidates((decode | {"group": "0" * 32}, well), (decode, well)) == [1], "others end with it"
    assert candidates((decode, REFUSING), (decode, well)) == [1], "it would be asked again and again"
