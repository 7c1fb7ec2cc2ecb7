"""Rows in which a process dies: by SIGKILL from outside, or at an exact instant by a fault point."""

import dataclasses
import itertools
import re
import secrets
import signal
import time

from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload

ALL_FINISH = Promise(all_finish=True)
UNCACHED = {"*": {"prefix-cache": "off"}}
CRASHED = 70
LONG = (700, 900)  # tokens: three or four blocks of KV
DAY_S = 86400
FROM_DEATH_S = 2.5  # what a death may add to a first token: detection, then the work again


def reached(calls: list[Call], tokens: int) -> None:
    """Until some call has so many tokens."""
    wait_until(
        lambda: max(len(call.ids) for call in calls) >= tokens,
        20,
        f"a stream of {tokens} tokens",
        pause=0.002,
    )


def placed_again(calls: list[Call]) -> str:
    again = sum(call.attempts > 1 for call in calls)
    return f"{sum(call.end == 'finished' for call in calls)} of {len(calls)} complete, {again} placed again"


def worst_ttft(calls: list[Call]) -> float:
    return max(call.ttft for call in calls)


def play_fault(
    scene: Scene, name: str, fault: str, asks: list[Ask], code: int = -signal.SIGKILL
) -> list[Call]:
    """Requests to a cluster with one armed node; all must finish, the node must have died of its fault."""
    scene.known(asks)
    scene.promise = ALL_FINISH
    scene.arm(name, fault)
    calls = scene.traffic.start(*asks)
    assert scene.cluster.wait_down(name, 20) == code, scene.cluster.nodes[name].exits
    return scene.traffic.wait(calls)


@row(
    "F01",
    "a prefill worker is killed while requests queue there",
    "20 of 20 complete, seen within 2 s",
    quick=True,
)
def f01(scene: Scene) -> str:
    asks = scene.known(workload(101, 20, prompt=(200, 400), max_tokens=8))
    scene.promise = Promise(
        all_finish=True, spare_attempts=len(asks)
    )  # each may have queued at the one that dies
    scene.cluster.signal("prefill-0", signal.SIGSTOP)  # so that they queue; a toy prefills too fast
    calls = scene.traffic.start(*asks)
    wait_until(
        lambda: scene.cluster.worker("prefill-0").get("placed", 0) >= 5,
        10,
        "prompts queue at prefill-0",
        pause=0.01,
    )
    pid = scene.cluster.nodes["prefill-0"].pid
    scene.kill("prefill-0")
    seen = scene.detected("prefill-0", pid)
    scene.traffic.wait(calls)
    assert any(call.attempts > 1 for call in calls), "somebody queued there"
    return f"{placed_again(calls)}, seen after {seen:.2f} s"


@row(
    "F02",
    "a prefill worker is killed in the middle of a prompt",
    "all complete, worst first token <= without fault + 2.5 s",
    flags=UNCACHED,
)
def f02(scene: Scene) -> str:
    asks = workload(102, 12, prompt=(300, 500), max_tokens=8)
    scene.known(asks)
    before = worst_ttft(scene.traffic.run(asks, width=len(asks)))
    calls = play_fault(scene, "prefill-0", "prefill:chunk:5", asks)
    assert any(call.attempts > 1 for call in calls), "somebody was there"
    after = worst_ttft(calls)
    assert after <= before + FROM_DEATH_S, (
        f"worst first token after {after:.2f} s, {before:.2f} s without the fault"
    )
    return f"{placed_again(calls)}, first token {before:.2f} -> {after:.2f} s"


@row(
    "F03",
    "a prefill worker is killed with half of a prompt's blocks sent",
    "all complete, nothing leaked on decode",
    quick=True,
    flags=UNCACHED,
)
def f03(scene: Scene) -> str:
    calls = play_fault(scene, "prefill-0", "sender:block:2", workload(103, 4, prompt=LONG, max_tokens=8))
    assert any(call.attempts > 1 for call in calls), "somebody pulled there"
    return f"{placed_again(calls)}, slowest first token {worst_ttft(calls):.2f} s"


@row(
    "F04",
    "prefill is killed when decode has every block, before it saw the Release",
    "no second attempt",
    quick=True,
    prefill=1,
)
def f04(scene: Scene) -> str:
    calls = play_fault(scene, "prefill-0", "sender:release:1", workload(104, 1, prompt=LONG, max_tokens=30))
    assert [call.attempts for call in calls] == [1]
    return "1 of 1 complete in one attempt"


@row("F05", "an error in prefill's sender alone", "the worker leaves with 70, all complete", flags=UNCACHED)
def f05(scene: Scene) -> str:
    calls = play_fault(
        scene, "prefill-0", "sender:block:2:raise", workload(105, 6, prompt=LONG, max_tokens=8), CRASHED
    )
    assert any(call.attempts > 1 for call in calls), "somebody pulled there"
    return placed_again(calls)


@row(
    "F06",
    "decode is killed before its first token, its Release not sent",
    "all complete; prefill computes no whole page again",
    quick=True,
    prefill=1,
)
def f06(scene: Scene) -> str:
    asks = workload(106, 4, prompt=(300, 500), max_tokens=12)
    scene.known(asks)
    before = computed(scene)
    scene.cluster.restart("prefill-0")  # its cache knows the prompts
    scene.victims.add("prefill-0")
    calls = play_fault(scene, "decode-0", "receiver:release:1", asks)
    again = [call for call in calls if call.attempts > 1]
    assert again, "somebody was there"
    extra = computed(scene) - sum(len(ask.prompt) for ask in asks)
    allowed = sum(16 + call.attempts for call in again)  # the last page is never shared
    assert extra <= allowed, (
        f"{extra} prompt tokens computed again, at most {allowed} lie outside whole pages"
    )
    return f"{placed_again(calls)}, {extra} of {before} prompt tokens computed again"


def computed(scene: Scene) -> int:
    """Prompt tokens that live prefill workers have computed."""
    return int(scene.counted("prefill", "prompt_tokens"))


@row(
    "F08",
    "decode is killed at its 10th step under 8 streams",
    "every client sees its contiguous, equal tokens",
    quick=True,
)
def f08(scene: Scene) -> str:
    calls = play_fault(scene, "decode-0", "decode:step:10", workload(108, 8, prompt=(30, 200), max_tokens=40))
    assert any(call.attempts > 1 for call in calls), "somebody was on it"
    return f"{placed_again(calls)}, longest gap in a stream {longest_pause(calls):.2f} s"


def longest_pause(calls: list[Call]) -> float:
    """Seconds between two arrivals of a stream, the most of all."""
    return max(
        after - before for call in calls for (before, _), (after, _) in itertools.pairwise(call.arrivals)
    )


@row(
    "F57",
    "decode is killed under 8 streams, and a second later the prefill worker that one of them went on to",
    "every client sees its contiguous, equal tokens; one of them after two deaths",
    flags=UNCACHED,
)
def f57(scene: Scene) -> str:
    asks = scene.known(workload(157, 8, prompt=(300, 500), max_tokens=400))
    scene.promise = ALL_FINISH
    calls = scene.traffic.start(*asks)
    wait_until(lambda: min(len(call.ids) for call in calls) >= 5, 20, "all streams run", pause=0.002)
    prefills = ("prefill-0", "prefill-1")
    for name in prefills:
        scene.cluster.signal(name, signal.SIGSTOP)  # as if each had a long prompt before theirs
    scene.kill("decode-0")
    (again, *_), _ = wait_until(
        lambda: [name for name in prefills if scene.cluster.worker(name).get("placed", 0)],
        1.5,
        "a stream goes on to a prefill worker",
    )
    scene.kill(again)
    for name in prefills:
        scene.cluster.signal(name, signal.SIGCONT)
    scene.traffic.wait(calls)
    assert all(call.end == "finished" for call in calls), calls
    assert any(call.attempts > 2 for call in calls), "both died with somebody"
    return f"{placed_again(calls)}, longest gap in a stream {longest_pause(calls):.2f} s"


@row(
    "F09",
    "every decode worker is killed",
    "503 with Retry-After <= 2 s; streams end with an error frame; serves <= 10 s after restart",
)
def f09(scene: Scene) -> str:
    asks = scene.known(workload(109, 12, prompt=(30, 200), max_tokens=400))
    calls = scene.traffic.start(*asks)
    reached(calls, 10)
    pid = scene.cluster.nodes["decode-1"].pid
    scene.kill("decode-0", "decode-1")
    scene.detected("decode-1", pid)
    probes = scene.traffic.wait(scene.traffic.start(*asks[:2]), 5)
    assert [probe.status for probe in probes] == [503, 503]
    took = max(probe.ended - probe.started for probe in probes)
    assert took <= 2.0, f"503 after {took:.2f} s"
    scene.traffic.wait(calls, 15)
    assert all(call.end == "error" and call.ids for call in calls), [call.end for call in calls]
    back = serves_again(scene, asks[0], ["decode-0", "decode-1"], 10)
    return f"503 after {took:.2f} s, {len(calls)} error frames, serves {back:.1f} s after the restart"


def serves_again(scene: Scene, ask: Ask, names: list[str], within: float) -> float:
    """Start the nodes; seconds until a request is answered."""
    began = time.monotonic()
    for name in names:
        scene.cluster.start_node(name)

    def is_answered() -> bool:
        call = scene.traffic.start(Ask(prompt=ask.prompt, sampling=ask.sampling, max_tokens=4))[0]
        scene.traffic.wait([call], within)
        call.may_be_cut = "router" in names  # its socket may not be open yet
        return call.end == "finished"

    _, took = wait_until(is_answered, within, "a request is answered again", pause=0.2)
    scene.rebase(*names)  # from now on: a process that starts has next to nothing open
    return max(took, time.monotonic() - began)


@row(
    "F10",
    "every prefill worker is killed",
    "running streams unaffected; new requests complete on decode alone",
)
def f10(scene: Scene) -> str:
    asks = scene.known(workload(110, 8, prompt=(30, 200), max_tokens=200))
    calls = scene.traffic.start(*asks)
    wait_until(lambda: min(len(call.ids) for call in calls) >= 5, 20, "all streams run")
    pid = scene.cluster.nodes["prefill-1"].pid
    scene.kill("prefill-0", "prefill-1")
    scene.detected("prefill-1", pid)
    late = scene.traffic.start(*(dataclasses.replace(ask, max_tokens=8) for ask in asks[:4]))
    scene.traffic.wait(calls)
    assert all(call.end == "finished" and call.attempts == 1 for call in calls), [call.end for call in calls]
    scene.traffic.wait(late, 10)
    took = max(call.ended - call.started for call in late)
    assert all(call.end == "finished" for call in late), late
    assert took <= 2.0, f"answered after {took:.2f} s"
    back = serves_again(scene, asks[0], ["prefill-0", "prefill-1"], 10)
    return f"8 of 8 streams, 4 of 4 new ones within {took:.2f} s, {back:.1f} s after the restart as before"


AGGREGATED = {"prefill": 0, "flags": {"decode": {"aggregated": "on", "local-prefill-tokens": "32"}}}


@row(
    "F58",
    "one of two aggregated decode workers is killed in the middle of a prompt; there is no prefill worker",
    "all complete, tokens equal",
    quick=True,
    **AGGREGATED,
)
def f58(scene: Scene) -> str:
    calls = play_fault(
        scene, "decode-0", "decode:chunk:9", workload(158, 12, prompt=(300, 500), max_tokens=8)
    )
    assert any(call.attempts > 1 for call in calls), "somebody was there"
    return f"{placed_again(calls)}, slowest first token {worst_ttft(calls):.2f} s"


@row(
    "F59",
    "two aggregated decode workers are killed under streams, the second when the first is back; there is no "
    "prefill worker",
    "all complete, tokens equal",
    **AGGREGATED,
)
def f59(scene: Scene) -> str:
    asks = scene.known(workload(159, 12, prompt=(200, 700), max_tokens=200))
    scene.promise = Promise(all_finish=True, spare_attempts=2 * len(asks))
    calls = scene.traffic.start(*asks)
    reached(calls, 5)
    for name in ("decode-0", "decode-1"):
        pid = scene.cluster.nodes[name].pid
        scene.kill(name)
        scene.detected(name, pid)
        scene.cluster.start_node(name)
        scene.cluster.wait_whole(10)
        scene.rebase(name)
    scene.traffic.wait(calls)
    assert any(call.attempts > 1 for call in calls), "somebody was there"
    return placed_again(calls)


@row(
    "F11",
    "the router is killed under streams, then restarted",
    "clients see a reset; workers drop their rooms <= 2 s; new requests served <= 3 s after the restart",
)
def f11(scene: Scene) -> str:
    asks = scene.known(workload(111, 8, prompt=(30, 200), max_tokens=800))
    calls = scene.traffic.start(*asks)
    reached(calls, 5)
    killed = time.time()
    killed = time_of_day(time.strftime("%H:%M:%S", time.localtime(killed)) + f"{killed % 1:.3f}"[1:])
    scene.kill("router")
    for call in scene.traffic.wait(calls, 5):
        call.may_be_cut = True
    busy = ["decode-0", "decode-1"]
    wait_until(lambda: all(dropped_at(scene, name) for name in busy), 4, "decode workers drop their rooms")
    dropped = max((dropped_at(scene, name) - killed) % DAY_S for name in busy)
    assert dropped <= 2.0, f"rooms dropped {dropped:.2f} s after the router's death"
    back = serves_again(scene, asks[0], ["router"], 3)
    scene.cluster.wait_whole(3)
    return f"{len(calls)} resets, rooms dropped after {dropped:.2f} s, serves {back:.2f} s after the restart"


def dropped_at(scene: Scene, name: str) -> float | None:
    """The time of day at which a worker logged that it dropped its rooms."""
    lines = [
        line
        for line in scene.cluster.nodes[name].said().splitlines()
        if "rooms of a lost router are dropped" in line
    ]
    return time_of_day(lines[-1]) if lines else None


def time_of_day(line: str) -> float:
    """Seconds since midnight of the first time in `line`."""
    hour, minute, second = re.search(r"(\d\d):(\d\d):(\d\d\.\d{3})", line).groups()
    return int(hour) * 3600 + int(minute) * 60 + float(second)


@row(
    "F12",
    "the router is killed; its client asks again with the same Idempotency-Key, twice at once",
    "the same text as before the death, from one run more",
)
def f12(scene: Scene) -> str:
    key = secrets.token_hex(8)  # and no seed: it follows from the key
    ask = Ask(
        prompt=tuple(range(3, 60)),
        max_tokens=300,
        sampling=(("temperature", 1.5),),
        headers=(("idempotency-key", key),),
    )
    (cut,) = scene.traffic.start(ask)
    reached([cut], 20)
    scene.kill("router")
    scene.traffic.wait([cut], 5)
    cut.may_be_cut = True
    scene.cluster.start_node("router")
    scene.cluster.wait_whole(10)
    scene.rebase("router")
    before = num_runs(scene)
    again = scene.traffic.wait(scene.traffic.start(ask, ask))
    assert [call.end for call in again] == ["finished", "finished"], again
    scene.bed.references[ask.key] = again[0].ids  # the verdict compares the other two with it
    runs = num_runs(scene) - before
    assert runs == 1, f"{runs} runs for one key"
    assert 20 <= len(cut.ids) < 300
    return f"{len(cut.ids)} tokens before the death are the first of 300, {runs} run for two requests"


def num_runs(scene: Scene) -> int:
    """Requests that live prefill workers have begun."""
    return int(scene.counted("prefill", "requests"))


@row(
    "sites", "a worker is killed, aborted or raises at every fault point in turn", "all complete each time",
    flags=UNCACHED,  # all are asked again and again
)  # fmt: skip
def sites(scene: Scene) -> str:
    asks = scene.known(workload(199, 10, prompt=(300, 800), max_tokens=20))
    scene.promise = Promise(
        all_finish=True, spare_attempts=10 * len(SITES)
    )  # each time the budget is a new router's
    scene.victims.add("router")
    for at, action in SITES:
        name = "prefill-0" if at.startswith(("prefill", "sender")) else "decode-0"
        scene.arm(name, f"{at}:{action}")
        calls = scene.traffic.wait(scene.traffic.start(*asks))
        assert scene.cluster.wait_down(name, 10) != 0
        assert all(call.end == "finished" for call in calls), (at, action, calls)
        scene.cluster.heal()
        scene.cluster.restart("router")  # its retry budget and its breakers remember
        scene.cluster.wait_whole(20)
        scene.rebase(name, "router")
    return f"{len(SITES)} deaths, {len(asks)} of {len(asks)} complete each time"


SITES = (
    ("prefill:chunk:3", "abort"), ("prefill:first:2", "kill"), ("sender:block:1", "abort"),
    ("sender:release:2", "raise"),
    ("receiver:block:2", "kill"), ("receiver:block:3", "raise"), ("receiver:release:2", "abort"),
    ("decode:reserve:2", "kill"), ("decode:reserve:3", "raise"), ("decode:step:3", "abort"), ("decode:step:4",
    "raise"),
)  # fmt: skip
