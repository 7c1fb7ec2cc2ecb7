"""Rows in which one worker fails everything, or all workers come back at once."""

import os
import re
import subprocess
import sys
import time

import psutil
from baton.decode.worker import DecodeWorker
from baton.tests.faults.cluster import ENVIRONMENT, wait_until
from baton.tests.faults.rates import busy_pace
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import ALL_FINISH
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload

EJECTED_AFTER = 5  # failures
PROBE_S = 10.0  # between two attempts that try an ejected worker
WIDTH = 12
STEP_S = 0.03


FAILS_AT = "FAILS_AT"  # environment: every room fails once this file is there


def fail_always() -> None:
    """In a decode node: once FAILS_AT is there, every room fails as soon as its pages are here."""
    whole = DecodeWorker._on_complete

    def broken(self, event, now):
        room = self.queues.get(event.room, event.epoch)
        if room is None or not os.path.exists(os.environ[FAILS_AT]):
            whole(self, event, now)
        else:
            self._fail(room, "InternalError", "nothing works here", retryable=True)

    DecodeWorker._on_complete = broken


def steps_of_a_device() -> None:
    """In a decode node: a step takes STEP_S, and the cores are free meanwhile. Else a pace would be that of
    this machine's cores, which on a shared host differ by half from second to second."""
    step_batch = DecodeWorker._step_batch

    def steady(self):
        began = time.monotonic()
        did_step = step_batch(self)
        if did_step:
            time.sleep(max(0.0, began + STEP_S - time.monotonic()))
        return did_step

    DecodeWorker._step_batch = steady


def repeated(calls: list[Call]) -> int:
    """Attempts that failed."""
    return sum(call.attempts - 1 for call in calls)


def goodput(scene: Scene, asks: list[Ask]) -> tuple[float, list[Call]]:
    """Tokens a second, all requests complete."""
    calls = scene.traffic.run(asks, width=WIDTH)
    assert all(call.end == "finished" for call in calls), [call for call in calls if call.end != "finished"]
    return busy_pace(calls), calls


@row(
    "F50", "one of two decode workers fails every request",
    "ejected after <= 5 failures; then one attempt in 10 s goes there; all complete in <= 1.2 attempts each, "
    "at >= 95 % of "
    "the pace of one worker alone", flags={"router": {"decode-policy": "round-robin"}},
    prepare={"decode": ["baton.tests.faults.rows_storms:steps_of_a_device"]},
)  # fmt: skip
def f50(scene: Scene) -> str:
    asks = scene.known(workload(150, 30, prompt=(30, 100), max_tokens=(30, 60)))
    short = scene.known(workload(151, 60, prompt=(30, 100), max_tokens=6))
    scene.promise = ALL_FINISH
    paces: dict[str, list[float]] = {"alone": [], "beside": []}  # in turn; the best of each counts
    calls: list[Call] = []
    for turn in range(2):
        scene.kill("decode-0")
        wait_until(scene.cluster.is_whole, 5, "its death was seen")
        paces["alone"].append(goodput(scene, asks * 3)[0])
        file = scene.bed.new_directory() / "fails"
        scene.cluster.restart(
            "decode-0", prepare=["baton.tests.faults.rows_storms:fail_always"], env={FAILS_AT: str(file)}
        )
        scene.cluster.wait_whole(20)
        scene.rebase("decode-0")
        serves(scene, "decode-0", asks)
        file.touch()
        began = time.monotonic()
        one_by_one = scene.traffic.run(short, width=1)
        early, probes = repeated(one_by_one), 1 + int((time.monotonic() - began) / PROBE_S)
        assert 3 <= early <= EJECTED_AFTER + probes, f"ejected after {early} failures"
        pace, crowd = goodput(scene, asks * 3)
        paces["beside"].append(pace)
        late, probes = repeated(crowd), 1 + int((time.monotonic() - began) / PROBE_S)
        assert late <= probes, f"{late} attempts failed there, in turn {turn}"
        calls += one_by_one + crowd
    assert repeated(calls) <= 0.2 * len(calls), f"{repeated(calls)} attempts more for {len(calls)} requests"
    alone, beside = max(paces["alone"]), max(paces["beside"])
    assert beside >= 0.95 * alone, f"{beside:.0f} tokens/s beside it, {alone:.0f} without"
    return (
        f"ejected after {early} failures, then {late}; {repeated(calls)} attempts more for {len(calls)} "
        f"requests; {beside:.0f} tokens/s, {alone:.0f} of one worker alone"
    )


def serves(scene: Scene, name: str, asks: list[Ask]) -> None:
    """Until a worker that came back has finished something for clients."""

    def has_finished() -> bool:
        scene.traffic.run(asks[:8], width=8)
        return scene.cluster.worker(name).get("counters", {}).get("finished", 0) >= 4

    wait_until(has_finished, 30, f"{name} serves", pause=0.2)


NUM_WORKERS = 100
READY_S = 3.0


def registered_at(scene: Scene, since: int) -> list[float]:
    """Times of day in seconds at which workers registered, from the router's log after character `since`."""
    lines = scene.cluster.nodes["router"].said()[since:].splitlines()
    found = [re.match(r"(\d+):(\d+):([\d.]+) .*worker registered", line) for line in lines]
    return [int(m[1]) * 3600 + int(m[2]) * 60 + float(m[3]) for m in found if m]


@row(
    "F54", "the router is killed and restarted with 100 workers more on it",
    "all workers are back, and it serves, <= 3 s after its start; until then it takes less than one core",
    prefill=1, decode=1,
)  # fmt: skip
def f54(scene: Scene) -> str:
    asks = scene.known(workload(154, 4, prompt=(16, 60), max_tokens=12))
    control = scene.cluster.nodes["router"].flags["control-bind"]
    crowd = subprocess.Popen(
        [sys.executable, "-m", "baton.tests.faults.crowd", control, str(NUM_WORKERS)],
        stdin=subprocess.PIPE, cwd="/", env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    try:
        wait_until(
            lambda: num_known(scene) == NUM_WORKERS + 2,
            20,
            lambda: f"all workers known, {num_known(scene)} are",
        )
        said = len(scene.cluster.nodes["router"].said())
        scene.kill("router")
        scene.cluster.start_node("router")
        began = time.monotonic()
        router = psutil.Process(scene.cluster.nodes["router"].pid)
        told = lambda: f"all are back, {num_known(scene)} are"  # noqa: E731
        wait_until(lambda: num_known(scene) == NUM_WORKERS + 2, READY_S, told, pause=0.1)
        back = time.monotonic() - began
        (call,) = scene.traffic.wait(scene.traffic.start(asks[0]))
        served = time.monotonic() - began
        times = router.cpu_times()
        cores = (times.user + times.system) / served
    finally:
        crowd.stdin.close()
        crowd.wait(10)
    assert call.end == "finished"
    assert served <= READY_S, f"a request was served {served:.2f} s after the start"
    assert cores < 1.0, f"{cores:.2f} cores"
    at = registered_at(scene, said)
    spread = max(at) - min(at)
    scene.cluster.wait_whole(10)
    scene.rebase("router")
    return (
        f"all back after {back:.2f} s, served after {served:.2f} s, {cores:.2f} cores; they came over "
        f"{spread:.2f} s"
    )


def num_known(scene: Scene) -> int:
    return len(scene.cluster.status().get("workers", []))
