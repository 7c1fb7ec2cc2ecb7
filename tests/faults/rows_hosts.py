"""Rows on several hosts: a network namespace per node, keys, the manifests' settings, TCP over cables."""

import contextlib
import io
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from baton.deploy.cli import plan
from baton.tests.faults.history import GRACE_S, RETRYABLE, Promise
from baton.tests.faults.places import CLIENT
from baton.tests.faults.rows import row
from baton.tests.faults.rows_network import finished, placed_again, told
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload
from baton.tests.meta.kubernetes.pods import ENDS, PORTS, Pods, allowed
from baton.tests.meta.kubernetes.policies import shipped

COLD = {"decode": {"prefix-cache": "off"}}  # decode pulls what it had before, too
LOSS, HEAVY_LOSS = 5, 30  # percent
MBIT = 80
LINK = MBIT * 1e6 / 8  # bytes per second
FRAMES_SHARE = 0.8  # of a link that must carry KV
HURRY_S = 4.0
PLAN_WITHIN = 25  # percent
PLANS = 3


def dropped(scene: Scene) -> int:
    return sum(scene.lan.num_dropped(name) for name in scene.lan.names)


def all_over_tcp(scene: Scene) -> None:
    """No KV came another way than over the cables."""
    assert scene.counted("decode", "shm_blocks") == 0, "hosts share no memory"
    assert all(w["host"] in scene.lan.names for w in scene.cluster.status()["workers"])


def handed_over(calls: list[Call]) -> int:
    """Bytes of KV that calls needed."""
    return sum(call.timeline.get("handoff_bytes", 0) for call in calls)


@row(
    "F27", f"{LOSS} % of the packets that come to any host are lost, clients' included",
    "all complete, tokens equal", hosts=True, flags=COLD,
)  # fmt: skip
def f27(scene: Scene) -> str:
    asks = scene.known(workload(271, 40, prompt=(100, 900), max_tokens=24))
    scene.lan.lose(LOSS)
    calls = scene.traffic.run(asks, width=8)
    finished(scene, calls)
    all_over_tcp(scene)
    lost = dropped(scene)
    assert lost > 100, f"{lost} packets were lost"
    return f"{told(calls)}; {lost} packets lost, {handed_over(calls) >> 20} MiB of KV"


@row(
    "F27h", f"{HEAVY_LOSS} % of the packets between router and workers are lost for 10 s",
    "every request completes or has an error within its deadline; whole again <= 10 s after it", hosts=True,
    flags={**COLD, "router": {"request-timeout-s": "20"}},
)  # fmt: skip
def f27h(scene: Scene) -> str:
    asks = scene.known(workload(272, 24, prompt=(100, 900), max_tokens=24))
    nodes = list(scene.cluster.nodes)
    # two workers that were only silent look like two that died: 500 request_quarantined
    scene.promise = Promise(deadline_s=21, spare_attempts=3 * len(asks), statuses=(*RETRYABLE, 500, 504))
    scene.lan.lose(HEAVY_LOSS, nodes, spared=CLIENT)  # whose request could be half a minute under way
    began = time.monotonic()
    calls = scene.traffic.run(asks, width=8)
    while time.monotonic() - began < 10:
        calls += scene.traffic.run(asks[:8], width=8)
    lost = dropped(scene)
    scene.lan.heal()
    scene.cluster.wait_whole(10)
    again = scene.traffic.run(asks, width=8)
    assert all(call.end == "finished" for call in again), "whole again, it serves"
    num = sum(call.end == "finished" for call in calls)
    return (
        f"{num} of {len(calls)} complete, the rest with errors; {lost} packets lost; {told(again)} afterwards"
    )


@row(
    "S34", "each host filters packets as the network policies say",
    "all complete; whatever the policies allow connects, and everything else times out", hosts=True,
    flags=COLD,
)  # fmt: skip
def s34(scene: Scene) -> str:
    cluster, policies = scene.cluster, shipped()
    scene.kill(*cluster.nodes)  # connections from before the rules would be strange to them
    with contextlib.closing(Pods(scene.lan, policies)) as pods:
        for name in cluster.nodes:
            cluster.start_node(name)
        cluster.wait_whole(40)
        scene.rebase(*cluster.nodes)
        calls = finished(
            scene, scene.traffic.run(scene.known(workload(341, 24, prompt=(100, 900), max_tokens=24)))
        )
        assert not placed_again(calls), told(calls)
        all_over_tcp(scene)
        pods.listen()
        connected = pods.connected(allowed(policies))
    assert connected == allowed(policies), connected ^ allowed(policies)
    num = len(ENDS) * (len(ENDS) - 1) * len(PORTS)
    return (
        f"{told(calls)}; {len(connected)} of {num} pairs and ports connect, {num - len(connected)} time out"
    )


@row(
    "F28", f"every host's cable carries {MBIT} Mbit/s, and requests need more than that",
    "all complete, KV takes >= 80 % of the cable, with deadlines that of requests in time; who is late is "
    "told in time",
    hosts=True, prefill=1, decode=1, flags=COLD,
)  # fmt: skip
def f28(scene: Scene) -> str:
    asks = scene.known(workload(281, 24, prompt=(600, 900), max_tokens=4))
    scene.lan.slow(MBIT)
    began = time.monotonic()
    calls = finished(scene, scene.traffic.run(asks, width=16))
    share = handed_over(calls) / (time.monotonic() - began) / LINK
    scene.promise = Promise()
    all_over_tcp(scene)
    assert FRAMES_SHARE <= share <= 1, f"KV took {share:.0%} of the cable; {told(calls)}"
    return f"{told(calls)}; KV took {share:.0%} of the cable; {under_deadlines(scene, asks)}"


def under_deadlines(scene: Scene, asks: list[Ask]) -> str:
    """What becomes of twice as many requests as the cable can carry in the time that their clients have."""
    hurried = [replace(ask, headers=(("x-baton-timeout-ms", str(int(HURRY_S * 1000))),)) for ask in asks]
    began = time.monotonic()
    calls = scene.traffic.wait(scene.traffic.start(*hurried))
    took = max(call.ended for call in calls) - began
    assert took <= HURRY_S + GRACE_S, f"a client waited {took:.1f} s"
    in_time = [call for call in calls if call.end == "finished"]
    share = handed_over(in_time) / took / LINK
    assert share >= FRAMES_SHARE, f"the KV of requests in time took {share:.0%} of the cable; {told(calls)}"
    return (
        f"with {HURRY_S:g} s each {len(in_time)} of {len(calls)} in time, their KV {share:.0%} of the cable"
    )


@row(
    "plan", f"every host's cable carries {MBIT} Mbit/s, and prompts are longer than those that told `baton "
            "plan` so",
    f"it predicts their hand-off within {PLAN_WITHIN} %, by the median of {PLANS}; over a free cable it says "
    "how well",
    hosts=True, prefill=1, decode=1, flags={"prefill": {"chunk-size": "256"}},
)  # fmt: skip
def plan80(scene: Scene) -> str:
    free = [mispredicted(scene) for _ in range(PLANS)]
    scene.lan.slow(MBIT)
    slow = [mispredicted(scene) for _ in range(PLANS)]
    assert abs(statistics.median(slow)) <= PLAN_WITHIN, f"off by {slow} %"
    return f"off by {signed(slow)} % at {MBIT} Mbit/s, by {signed(free)} % over a free cable"


def mispredicted(scene: Scene) -> int:
    """By how many percent `baton plan` is off."""
    said = io.StringIO()
    flags = [
        f"--url={scene.cluster.url}",
        f"--model={scene.bed.model}",
        "--dtype=float32",
        "--chunk=256",
        "--prompt=1500",
    ]
    with contextlib.redirect_stdout(said):
        assert plan.main(flags) == 0
    found = re.search(r"\(([+-][0-9]+)%, median", said.getvalue())
    assert found is not None, said.getvalue()
    return int(found.group(1))


def signed(percents: list[int]) -> str:
    return ", ".join(f"{percent:+d}" for percent in percents)


@row(
    "doctor", f"a cable of {MBIT} Mbit/s, then none, between two hosts; a prefill worker of another layout "
              "on a third",
    "`baton doctor` names each, and the bandwidth between the two", hosts=True,
    flags={"prefill-1": {"page-size": "8"}},
)  # fmt: skip
def doctor(scene: Scene) -> str:
    endpoint = f"tcp://{scene.lan.address('prefill-0')}:7999"
    with run_on(scene, "prefill-0", f"--serve-pull={endpoint}", "--trusted-network") as serving:
        serving.stdout.readline()
        whole = findings(scene, "decode-0", f"--pull={endpoint}", f"--url={scene.cluster.url}")
        scene.lan.slow(MBIT, ["prefill-0"])
        slow = findings(scene, "decode-0", f"--pull={endpoint}")
        scene.lan.filter(
            "prefill-0", "table inet cut { chain i { type filter hook input priority 0; policy drop; }; }"
        )
        cut = findings(scene, "decode-0", f"--pull={endpoint}")
        serving.terminate()
    scene.lan.heal()
    scene.cluster.wait_whole(10)
    links = [found["link"] for found in (whole, slow, cut)]
    assert [level for level, _ in links] == ["ok", "fail", "fail"], links
    rate = re.search(r": ([0-9.]+) MB/s", slow["link"][1])
    assert rate is not None, slow
    assert FRAMES_SHARE * LINK <= float(rate.group(1)) * 1e6 <= LINK, slow
    assert "cannot be reached" in cut["link"][1] or "does not answer" in cut["link"][1], cut
    assert whole["pairing"][0] == "fail", whole
    assert "prefill with fingerprint" in whole["pairing"][1], whole
    return "; ".join([*(text.partition(": ")[2] or text for _, text in links), whole["pairing"][1]])


@contextlib.contextmanager
def run_on(scene: Scene, host: str, *flags: str) -> Iterator[subprocess.Popen]:
    """`baton doctor` as a process on a host."""
    with scene.lan.inside(host):
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", "doctor", *flags], cwd="/", stdout=subprocess.PIPE, text=True
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def findings(scene: Scene, host: str, *flags: str) -> dict[str, tuple[str, str]]:
    """Check -> (level, text) of what the doctor says there; of the findings of a check the worst."""
    with run_on(scene, host, "--json", "--device=cpu", f"--least={LINK * 1.1 / 1e9}", *flags) as process:
        found = json.loads(process.stdout.read())
    return {f["check"]: (f["level"], f["text"]) for f in sorted(found, key=lambda f: f["level"] == "fail")}
