"""Rows in which a process is asked to leave, under load."""

import signal
import time

from baton.tests.faults.cluster import in_time, wait_until
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import ALL_FINISH, UNCACHED, placed_again, reached
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload

DRAINED = 0


def ask_to_leave(scene: Scene, name: str) -> float:
    """SIGTERM; seconds until the router places nothing there any more."""
    scene.victims.add(name)
    pid = scene.cluster.nodes[name].pid
    began = time.monotonic()
    scene.cluster.signal(name, signal.SIGTERM)
    wait_until(lambda: not scene.cluster.is_known(name, pid), 2, f"{name} out of rotation", pause=0.005)
    return time.monotonic() - began


@row(
    "F42",
    "SIGTERM to prefill under load",
    "out of rotation at once; stays until its blocks are pulled; 0 failed, exit 0",
    quick=True,
    flags=UNCACHED,
)
def f42(scene: Scene) -> str:
    asks = scene.known(workload(142, 12, prompt=(400, 600), max_tokens=8))
    scene.promise = ALL_FINISH
    calls = scene.traffic.start(*asks)

    def are_placed() -> bool:
        """All calls came, and some are at prefill-0: later ones for it come late and are placed again."""
        num_came = scene.cluster.status()["router"]["open_rooms"] + sum(bool(call.ended) for call in calls)
        return num_came >= len(calls) and scene.cluster.worker("prefill-0").get("placed", 0) >= 3

    wait_until(are_placed, 10, "prompts at prefill-0", pause=0.01)
    out = ask_to_leave(scene, "prefill-0")
    late = scene.traffic.start(*asks[:4])
    assert scene.cluster.wait_down("prefill-0", 20) == DRAINED
    scene.traffic.wait([*calls, *late])
    again = [
        call.attempts for call in calls if call.attempts > 1
    ]  # those whose Prefill met the Goodbye on its way
    assert max(again, default=2) == 2, again
    assert len(again) <= len(calls) // 2, "its own prompts were finished there"
    in_time(out, 0.5, f"out of rotation after {out:.2f} s")
    return f"out of rotation after {1000 * out:.0f} ms, {placed_again([*calls, *late])}"


@row("F43", "SIGTERM to decode under load", "streams finish or go on elsewhere: 0 failed, exit 0", quick=True)
def f43(scene: Scene) -> str:
    asks = scene.known(workload(143, 8, prompt=(30, 200), max_tokens=100))
    scene.promise = ALL_FINISH
    calls = scene.traffic.start(*asks)
    reached(calls, 5)
    out = ask_to_leave(scene, "decode-0")
    assert scene.cluster.wait_down("decode-0", 35) == DRAINED
    scene.traffic.wait(calls)
    return f"out of rotation after {1000 * out:.0f} ms, {placed_again(calls)}"


@row(
    "F45",
    "a second SIGTERM to the router, or the end of its grace",
    "every client gets an error frame, then the process leaves",
    flags={"router": {"drain-timeout-s": "2"}},
)
def f45(scene: Scene) -> str:
    asks = scene.known(workload(145, 4, prompt=(30, 100), max_tokens=1200))
    took = []
    for is_second in (True, False):
        calls = scene.traffic.start(*asks)
        wait_until(lambda calls=calls: all(call.ids for call in calls), 20, "all streams run")
        scene.victims.add("router")
        scene.cluster.signal("router", signal.SIGTERM)
        if is_second:
            wait_until(
                lambda: "router drains" in scene.cluster.nodes["router"].said(), 2, "the router drains"
            )
            scene.cluster.signal("router", signal.SIGTERM)
        began = time.monotonic()
        scene.traffic.wait(calls, 10)
        assert all(call.end in ("error", "finished") for call in calls), calls
        assert any(call.end == "error" and call.ids for call in calls), calls
        assert scene.cluster.wait_down("router", 5) == DRAINED
        took.append(time.monotonic() - began)
        scene.cluster.heal()
        scene.rebase("router")
    return (
        f"error frames, gone {took[0]:.1f} s after the second signal; {took[1]:.1f} s after the first one "
        "alone"
    )
