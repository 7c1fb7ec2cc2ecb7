"""Rows in which a role is killed under load again and again; the survivors report what they still hold."""

import random
import time

from baton.kvtransfer.protocol.session import LEASE_S
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_clients import HEARTBEAT_S
from baton.tests.faults.rows_process import UNCACHED
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload

KILLS = 5
CLIENTS = 16
HANG_S = 20.0  # of a client; its request takes a second


def killed_under_load(scene: Scene, name: str) -> str:
    """Kills `name` at random moments of a load, of whose clients every second leaves at once."""
    asks = scene.known(workload(1400, CLIENTS, prompt=(100, 900), max_tokens=(10, 80)))
    rng = random.Random(1400)
    longest_held, longest_call, calls = 0.0, 0.0, []
    for _ in range(KILLS):
        some = scene.traffic.start(*asks)
        time.sleep(rng.uniform(0.0, 0.6))  # the moment is the test's choice: prompts, hand-offs or streams
        scene.kill(name)
        killed = time.monotonic()
        if name == "router":
            scene.traffic.wait(some, HANG_S)
            for call in some:
                call.may_be_cut = True
            scene.cluster.start_node(name)
        else:
            scene.traffic.cancel(*(call for call in some[::2] if not call.ended))
            scene.traffic.wait(some, HANG_S)
        longest_call = max(longest_call, *(call.ended - call.started for call in some))
        began = max(killed, *(call.ended for call in some))
        longest_held = max(longest_held, held_for(scene, began))
        if name != "router":
            scene.cluster.start_node(name)
        scene.cluster.wait_whole(20)
        scene.rebase(name)
        calls += some
    ends = {end: sum(call.end == end for call in calls) for end in sorted({call.end for call in calls})}
    return (
        f"{KILLS} kills, ends {ends}, the longest {longest_call:.1f} s; all free after {longest_held:.2f} s"
    )


def held_for(scene: Scene, since: float) -> float:
    """Seconds from `since` until every survivor that there is says that it holds nothing."""

    def is_free() -> bool:
        return scene.cluster.is_whole() and not scene.cluster.held()

    wait_until(is_free, LEASE_S + HEARTBEAT_S, lambda: f"nothing held: {scene.cluster.held()}")
    return time.monotonic() - since


@row(
    "kill-P", f"a prefill worker is killed under load, {KILLS} times",
    "no page or room held 5 s later, no client hangs",
    flags=UNCACHED,
)  # fmt: skip
def kill_p(scene: Scene) -> str:
    scene.promise = Promise(spare_attempts=KILLS * CLIENTS)
    return killed_under_load(scene, "prefill-0")


@row(
    "kill-D", f"a decode worker is killed under load, {KILLS} times",
    "no page or room held 5 s later, no client hangs",
    flags=UNCACHED,
)  # fmt: skip
def kill_d(scene: Scene) -> str:
    scene.promise = Promise(spare_attempts=KILLS * CLIENTS)
    return killed_under_load(scene, "decode-0")


@row(
    "kill-R", f"the router is killed under load, {KILLS} times",
    "no page or room held 5 s later, no client hangs",
    flags=UNCACHED,
)  # fmt: skip
def kill_r(scene: Scene) -> str:
    return killed_under_load(scene, "router")
