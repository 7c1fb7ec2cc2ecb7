"""Rows in which a process stops, hangs or has no room, and lives."""

import signal
import time

from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_network import COLD, MIGRATED_S, finished, longest_gap, placed_again, told
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Call, workload

DETECTED_S = 2.0
POLL_S = 0.3  # of /status on a busy machine, and of the instant of the fault itself
WATCHDOG_S = 4


@row(
    "F19", "a prefill worker is stopped, later goes on",
    "found within 2 s, its work moved; its late messages change nothing", quick=True,
)  # fmt: skip
def f19(scene: Scene) -> str:
    asks = scene.known(workload(191, 16, prompt=(200, 400), max_tokens=16))
    pid = scene.cluster.nodes["prefill-0"].pid
    scene.cluster.signal("prefill-0", signal.SIGSTOP)
    calls = scene.traffic.start(*asks)
    took = scene.detected("prefill-0", pid, within=DETECTED_S + POLL_S)
    finished(scene, calls)
    assert placed_again(calls), "somebody was on it"
    scene.cluster.signal("prefill-0", signal.SIGCONT)
    calls += finished(scene, scene.traffic.start(*asks))
    scene.cluster.wait_whole(10)
    calls += finished(scene, scene.traffic.start(*asks))
    return f"found in {took:.1f} s, {told(calls)}"


@row(
    "F20", "prefill's loop hangs while its I/O thread answers",
    "found within 2 s, its work moved, ended by its watchdog", quick=True,
    flags={"*": {"watchdog-s": str(WATCHDOG_S)}},
)  # fmt: skip
def f20(scene: Scene) -> str:
    asks = scene.known(workload(201, 12, prompt=(100, 300), max_tokens=16))
    scene.arm("prefill-0", "prefill:chunk:1:hang")
    pid = scene.cluster.nodes["prefill-0"].pid
    began = time.monotonic()
    calls = scene.traffic.start(*asks)
    took = scene.detected("prefill-0", pid, within=DETECTED_S + POLL_S)
    finished(scene, calls)
    assert placed_again(calls), "somebody was on it"
    code = scene.cluster.wait_down("prefill-0", WATCHDOG_S + 11)
    ended = time.monotonic() - began
    assert code != 0, "a supervisor starts it again only after a failure"
    assert "File " in scene.cluster.nodes["prefill-0"].said(), "its stacks are in the log"
    scene.cluster.restart("prefill-0")
    scene.cluster.wait_whole(20)
    scene.rebase("prefill-0")
    calls += finished(scene, scene.traffic.start(*asks))
    return f"found in {took:.1f} s, ended after {ended:.1f} s with {code}, {told(calls)}"


@row(
    "F22", "a decode worker is stopped for 10 s, mid-stream",
    "streams go on elsewhere within 3 s; no token comes twice when it wakes",
)  # fmt: skip
def f22(scene: Scene) -> str:
    asks = scene.known(workload(221, 8, prompt=(50, 100), max_tokens=500))
    pid = scene.cluster.nodes["decode-0"].pid
    calls = scene.traffic.start(*asks)
    wait_until(lambda: max(len(call.ids) for call in calls) >= 20, 20, "a stream runs", pause=0.002)
    scene.cluster.signal("decode-0", signal.SIGSTOP)
    began = time.monotonic()
    took = scene.detected("decode-0", pid, within=DETECTED_S + POLL_S)
    finished(scene, calls)
    assert placed_again(calls), "somebody was on it"
    assert longest_gap(calls) <= MIGRATED_S, told(calls)
    wait_until(lambda: time.monotonic() - began > 10, 11, "10 s")
    streams = scene.traffic.start(*asks)
    scene.cluster.signal("decode-0", signal.SIGCONT)
    calls += finished(scene, streams)
    scene.cluster.wait_whole(10)
    return f"found in {took:.1f} s, {told(calls)}"


ROUNDS = (
    4  # where prefill has to share its cores it may be slower than the links, and nothing waits to be sent
)


def under_reuse(scene: Scene) -> list[Call]:
    """Calls over links so slow, with so many blocks under way, that some wait in ZeroMQ and are read late."""
    asks = scene.known(workload(341, 12, prompt=(1900, 1900), max_tokens=8))
    for proxy in scene.cluster.kv.values():
        proxy.down.bytes_per_s = 10e6
    return finished(scene, scene.traffic.start(*asks))


# Pages that were given back are given out in the other order: the second time blocks are no runs, and are
# staged to be sent. A window of 8 fits into what the kernel and the proxy hold.
STAGED = {
    **COLD,
    "flags": {"prefill": {"prefix-cache": "off"}, "decode": {"prefix-cache": "off", "pull-window": "32"}},
}


@row(
    "F34", "prefill writes over a block's memory before it is sent", "the digest tells, tokens equal",
    **STAGED, prepare={"prefill-0": ["baton.tests.faults.mutants:no_tracker"]},
)  # fmt: skip
def f34(scene: Scene) -> str:
    calls: list[Call] = []
    for _ in range(ROUNDS):
        calls += under_reuse(scene)
        if wrong := scene.counted("decode", "digest_mismatches"):
            break
    assert wrong, "a block was written over on its way"
    return f"{wrong:g} wrong digests, {told(calls)}"


def crowd(scene: Scene, asks: list, width: int) -> str:
    scene.promise = Promise(statuses=(429,), deadline_s=60)
    began = time.monotonic()
    calls = scene.traffic.run(asks, width=width)
    ok = sum(call.end == "finished" for call in calls)
    assert ok + sum(call.status == 429 for call in calls) == len(calls)
    assert ok >= len(calls) * 0.9, f"{ok} of {len(calls)} complete"
    return f"{ok} of {len(calls)} complete, {len(calls) - ok} told 429, in {time.monotonic() - began:.1f} s"


TIGHT = {"decode": {"pages": "40"}, "prefill": {"pages": "120"}}


@row(
    "F38", "decode has pages for one or two requests, 1000 come 64 at a time",
    "all complete or 429, no deadlock",
    flags=TIGHT,
)  # fmt: skip
def f38(scene: Scene) -> str:
    return crowd(scene, scene.known(workload(381, 100, prompt=(30, 400), max_tokens=(4, 20))) * 10, 64)


@row(
    "F38q", "decode has pages for one or two requests, 80 come 24 at a time",
    "all complete or 429, no deadlock",
    quick=True, flags=TIGHT,
)  # fmt: skip
def f38q(scene: Scene) -> str:
    return crowd(scene, scene.known(workload(382, 20, prompt=(30, 400), max_tokens=(4, 24))) * 4, 24)
