"""Rows in which a process dies."""

import signal
import time

from baton.tests.faults.bed import Scene
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.rows import row
from baton.tests.faults.traffic import workload


def reached(scene: Scene, calls: list, tokens: int) -> None:
    """Until some call has so many tokens."""
    wait_until(lambda: max(len(call.ids) for call in calls) >= tokens, 20, f"a stream with {tokens} tokens", pause=0.002)


def attempts_of(calls: list) -> str:
    again = sum(call.attempts > 1 for call in calls)
    return f"{len(calls)} of {len(calls)} complete, {again} of them placed again"


@row("F01", "a prefill worker is killed while requests queue there", "20 of 20 complete, tokens equal", quick=True)
def f01(scene: Scene) -> str:
    asks = scene.known(workload(101, 20, prompt=(200, 400), max_tokens=8))
    scene.promise = type(scene.promise)(all_finish=True)
    scene.cluster.signal("prefill-0", signal.SIGSTOP)  # so that they queue; a toy prefills too fast
    calls = scene.traffic.start(*asks)
    wait_until(lambda: scene.cluster.worker("prefill-0").get("placed", 0) >= 5, 10, "prompts queue at prefill-0", pause=0.01)
    scene.kill("prefill-0")
    scene.traffic.wait(calls)
    assert any(call.attempts > 1 for call in calls), "somebody queued there"
    return attempts_of(calls)


@row("F08", "a decode worker is killed at its 10th step", "every client sees its contiguous, equal tokens", quick=True)
def f08(scene: Scene) -> str:
    asks = scene.known(workload(108, 8, prompt=(30, 200), max_tokens=40))
    scene.promise = type(scene.promise)(all_finish=True)
    scene.arm("decode-0", "decode:step:10")
    began = time.monotonic()
    calls = scene.traffic.start(*asks)
    scene.cluster.wait_down("decode-0", 20)
    scene.traffic.wait(calls)
    assert any(call.attempts > 1 for call in calls), "somebody was on it"
    return f"{attempts_of(calls)}, {time.monotonic() - began:.1f} s"
