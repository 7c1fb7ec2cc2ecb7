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
RESUMED_S = 3.0  # until streams go on when a stopped process does, beside the work of all others
FOUND_DEAD_S = 10.0  # until clients hear of the death of a worker that nobody can replace
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


# --- pauses of what nobody can replace ----------------------------------------------------------------------


ALONE = {"prefill": 1, "decode": 1}
SHORT_S, LONG_S = 5.0, 30.0
# The watchdog's limit is shorter than the pause.
WATCHED = {"*": {"watchdog-s": "3"}, "router": {"watchdog-s": "3"}}
NO_LOCAL = {"router": {"local-prefill": "off"}}


def paused(scene: Scene, names: list[str], seconds: float) -> tuple[list[Call], list[Call], dict]:
    """Stops these processes for so long, under streams and with requests that come meanwhile.

    Returns the streams, the later calls, and the document of /status from late in the pause.
    """
    # The rows share their requests, so that a run without faults is needed once.
    asks = scene.known(workload(601, 10, prompt=(50, 100), max_tokens=150))
    streams = scene.traffic.start(*asks[:4])
    wait_until(lambda: min(len(call.ids) for call in streams) >= 5, 20, "all streams run", pause=0.002)
    for name in names:
        scene.cluster.signal(name, signal.SIGSTOP)
    began = time.monotonic()
    later = scene.traffic.start(*asks[4:7])
    wait_until(lambda: time.monotonic() - began > seconds / 2, seconds, "half of the pause")
    later += scene.traffic.start(*asks[7:])
    wait_until(lambda: time.monotonic() - began > seconds - 0.5, seconds, "the pause")
    document = {} if "router" in names else scene.cluster.status()
    wait_until(lambda: time.monotonic() - began > seconds, seconds, "the end of the pause")
    for name in names:
        scene.cluster.signal(name, signal.SIGCONT)
    scene.promise = Promise(all_finish=True, deadline_s=seconds + 30)
    scene.traffic.wait(streams + later)
    scene.cluster.wait_whole(10)
    scene.traffic.wait(scene.traffic.start(*asks))
    gap = longest_gap(streams + later)
    assert seconds - 1 <= gap <= seconds + RESUMED_S, told(streams + later)
    return streams, later, document


def stalled(document: dict, role: str, seconds: float) -> dict:
    """The worker that /status says requests wait for."""
    (worker,) = document["router"]["stalled"]
    assert worker["role"] == role, worker
    assert seconds - 2.5 <= worker["silent_s"] <= seconds + 1, worker
    assert not document["router"]["is_ready"], "other routers may be better off"
    return worker


def decode_paused(scene: Scene, seconds: float) -> str:
    streams, later, document = paused(scene, ["decode-0"], seconds)
    assert document["router"]["queued"] + document["router"]["running"] >= 10, "all of them wait"
    worker = stalled(document, "decode", seconds)
    assert not placed_again(streams), "the streams stay where they are"
    return f"silent for {worker['silent_s']:.1f} s by /status; {told(streams + later)}"


@row(
    "F70", "the only decode worker is stopped for 5 s under streams, new requests come",
    "clients see a pause and no error, streams go on in their attempt; /status says so",
    quick=True, **ALONE, flags=WATCHED,
)  # fmt: skip
def f70(scene: Scene) -> str:
    return decode_paused(scene, SHORT_S)


@row(
    "F70l", "the only decode worker is stopped for 30 s under streams, new requests come",
    "clients see a pause and no error, streams go on in their attempt; /status says so", **ALONE,
)  # fmt: skip
def f70l(scene: Scene) -> str:
    return decode_paused(scene, LONG_S)


def prefill_paused(scene: Scene, seconds: float) -> str:
    streams, later, document = paused(scene, ["prefill-0"], seconds)
    stalled(document, "prefill", seconds)
    return told(streams + later)


@row(
    "F71", "the only prefill worker is stopped for 5 s, and decode may not compute prompts",
    "streams go on, new requests wait and get no error; /status says so",
    quick=True, **ALONE, flags={**WATCHED, "router": {"watchdog-s": "3", "local-prefill": "off"}},
)  # fmt: skip
def f71(scene: Scene) -> str:
    return prefill_paused(scene, SHORT_S)


@row(
    "F71l", "the only prefill worker is stopped for 30 s, and decode may not compute prompts",
    "streams go on, new requests wait and get no error; /status says so", **ALONE, flags=NO_LOCAL,
)  # fmt: skip
def f71l(scene: Scene) -> str:
    return prefill_paused(scene, LONG_S)


def router_paused(scene: Scene, seconds: float) -> str:
    streams, later, _ = paused(scene, ["router"], seconds)
    assert not scene.cluster.status()["router"]["events"].get("worker_lost")
    return told(streams + later)


@row(
    "F72", "the router is stopped for 5 s, longer than its watchdog's limit",
    "it lives, no worker counts as lost, all complete", quick=True, **ALONE, flags=WATCHED,
)  # fmt: skip
def f72(scene: Scene) -> str:
    return router_paused(scene, SHORT_S)


@row(
    "F72l", "the router is stopped for 30 s, longer than its watchdog's limit",
    "it lives, no worker counts as lost, all complete", **ALONE,
)  # fmt: skip
def f72l(scene: Scene) -> str:
    return router_paused(scene, LONG_S)


def all_paused(scene: Scene, seconds: float) -> str:
    streams, later, _ = paused(scene, ["decode-0", "prefill-0", "router"], seconds)
    assert not placed_again(streams), "nobody was lost"
    assert not scene.cluster.status()["router"]["events"].get("worker_lost")
    return told(streams + later)


@row(
    "F73", "every process of a host is stopped for 5 s, longer than all limits of watchdogs and leases",
    "nobody is lost or ends, every stream goes on in its attempt",
    quick=True, **ALONE,
    flags={**WATCHED, "prefill": {"lease-s": "2"}, "decode": {"lease-s": "2"}},
)  # fmt: skip
def f73(scene: Scene) -> str:
    return all_paused(scene, SHORT_S)


@row(
    "F73l", "every process of a host is stopped for 30 s, longer than all limits of watchdogs and leases",
    "nobody is lost or ends, every stream goes on in its attempt", **ALONE,
)  # fmt: skip
def f73l(scene: Scene) -> str:
    return all_paused(scene, LONG_S)


@row(
    "F74", "the only decode worker is stopped, and killed while requests wait for it",
    "clients hear of the death within 10 s: streams by an error frame, new ones by 503", quick=True, **ALONE,
)  # fmt: skip
def f74(scene: Scene) -> str:
    asks = scene.known(workload(641, 6, prompt=(50, 100), max_tokens=300))
    scene.promise = Promise(statuses=(503,))
    calls = scene.traffic.start(*asks[:4])
    wait_until(lambda: min(len(call.ids) for call in calls) >= 5, 20, "all streams run", pause=0.002)
    scene.cluster.signal("decode-0", signal.SIGSTOP)
    wait_until(lambda: scene.cluster.worker("decode-0").get("state") == "stalled", 4, "a stalled worker")
    calls += scene.traffic.start(*asks[4:])
    wait_until(lambda: scene.cluster.status()["router"]["queued"] == 2, 4, "both wait")
    scene.kill("decode-0")
    began = time.monotonic()
    scene.traffic.wait(calls)
    took = time.monotonic() - began
    assert took <= FOUND_DEAD_S, f"the last client heard of it after {took:.1f} s"
    assert {call.status for call in calls[4:]} == {503}, calls[4:]
    scene.cluster.restart("decode-0")
    scene.cluster.wait_whole(20)
    scene.rebase("decode-0")
    return f"new requests and streams have their errors {took:.1f} s after the death"


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
