"""Rows in which a worker ends again and again, and is started again."""

import itertools
import os
import random
import signal
import time

from baton.decode.worker import DecodeWorker
from baton.deploy.up.supervise import ChildSpec, Supervisor
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import placed_again
from baton.tests.faults.rows_routers import Load
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload

WIDTH = 12


def die_in_service() -> None:
    """In a decode node: it registers, beats a few times and ends."""
    stats, beats = DecodeWorker.stats, itertools.count()

    def dying(self):
        if next(beats) == BEATS:
            os._exit(CRASHED)
        return stats(self)

    DecodeWorker.stats = dying


CRASHED = 3
BEATS = 2
LOOP_S = 20.0
LIVES = 4  # that are seen at least
PATIENCE_S = 40.0  # beyond that, where a process takes seconds to start
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # at least, between two of its lives


class NodeProcess:
    """A node of the cluster as the supervisor of `baton up` sees its children."""

    def __init__(self, scene: Scene, name: str, ends: list[float]) -> None:
        self._ends = ends  # when the supervisor saw them
        self._node = scene.cluster.nodes[name]
        self._num_exits = len(self._node.exits)
        scene.cluster.start_node(name)
        self.pid = self._node.pid

    def poll(self) -> int | None:
        return None if len(self._node.exits) == self._num_exits else self._node.exits[-1]

    def terminate(self) -> None:
        if self._node.is_up:
            os.kill(self._node.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self._node.is_up:
            os.kill(self._node.pid, signal.SIGKILL)

    def finish(self, patience_s: float = 0.0) -> str:
        self._ends.append(time.monotonic())
        return ""


@row(
    "F52", "a decode worker dies soon after it registers, in every life; the supervisor of `baton up` starts "
           "it again",
    "0 client errors in 20 s of load; its starts are backed off: after 0.5 s, and after twice as long each "
    "time",
)  # fmt: skip
def f52(scene: Scene) -> str:
    asks = scene.known(workload(152, 40, prompt=(30, 100), max_tokens=(8, 24)))
    name = "decode-0"
    scene.kill(name)
    node = scene.cluster.nodes[name]
    node.prepare = ["baton.tests.faults.rows_loops:die_in_service"]
    scene.promise = Promise(
        all_finish=True, spare_attempts=WIDTH * (len(PAUSES_S) + 1)
    )  # of each life's rooms
    starts: list[float] = []
    ends: list[float] = []

    def spawn(spec: ChildSpec) -> NodeProcess:
        starts.append(time.monotonic())
        return NodeProcess(scene, spec.name, ends)

    spec = ChildSpec(name=name, role="decode", argv=("decode",), env={}, cwd="/")
    supervisor = Supervisor([spec], spawn, rng=random.Random(0))
    load = Load(scene, asks, width=WIDTH)
    until = time.monotonic() + LOOP_S
    while (now := time.monotonic()) < until or (len(starts) < LIVES and now < until + PATIENCE_S):
        supervisor.step()
        time.sleep(0.02)
    calls = load.join()
    assert not supervisor.failure
    supervisor.stop()
    assert all(call.end == "finished" for call in calls), [call for call in calls if call.end != "finished"]
    assert len(starts) >= LIVES, f"it was started {len(starts)} times"
    pauses = [start - end for start, end in zip(starts[1:], ends, strict=False)]
    assert all(pause >= least for pause, least in zip(pauses, PAUSES_S, strict=False)), pauses
    assert node.exits[1:-1] == [CRASHED] * len(node.exits[1:-1]), node.exits
    scene.cluster.restart(name)
    scene.cluster.wait_whole(20)
    scene.rebase(name)
    told = ", ".join(f"{pause:.1f}" for pause in pauses)
    return f"{placed_again(calls)}; {len(starts)} starts, {told} s after an end"
