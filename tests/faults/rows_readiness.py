"""Rows in which every process lives and sends heartbeats but cannot serve: readiness reports it."""

import time

import httpx
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import ALL_FINISH
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload
from prometheus_client.parser import text_string_to_metric_families

CANARY_S = 4.0
SETTINGS = {"proxied": True, "flags": {"router": {"canary-s": f"{CANARY_S:g}", "local-prefill": "off"}}}
TICKS_S = 0.5  # the router's, and the time that asking takes on busy cores


def ready(scene: Scene) -> httpx.Response:
    return httpx.get(f"{scene.cluster.url}/ready", timeout=5)


def until_ready(scene: Scene, status: int, within: float) -> float:
    """Seconds until /ready answers so."""
    return wait_until(
        lambda: ready(scene).status_code == status, within, lambda: f"{status}: {scene.cluster.status()}"
    )[1]


def states(scene: Scene) -> dict[str, str]:
    """Of the pairs, by their names."""
    names = {scene.cluster.worker(node.name)["instance"]: node.name for node in scene.cluster.workers}
    return {
        f"{names[p['prefill']]} {names[p['decode']]}": p["state"] for p in scene.cluster.status()["pairs"]
    }


@row(
    "ready", "no KV block reaches decode, then none of one prefill worker; all processes live, register and "
             "are heard",
    "not ready within --canary-s, with pair and reason; healed: ready again; one prefill worker cut off: "
    "ready, and clients are sent past it in one attempt",
    **SETTINGS,
)  # fmt: skip
def cut_off(scene: Scene) -> str:
    asks = scene.known(workload(991, 8, prompt=(100, 300), max_tokens=8))
    scene.promise = ALL_FINISH
    until_ready(scene, 200, 5)
    wait_until(
        lambda: set(states(scene).values()) == {"proven"},
        3 * CANARY_S,
        lambda: f"all pairs proven: {states(scene)}",
    )
    for proxy in scene.cluster.kv.values():
        proxy.freeze()
    lost = until_ready(scene, 503, CANARY_S + TICKS_S)
    told = ready(scene).json()["reason"]
    assert "no request has passed from prefill to decode" in told, told
    wait_until(lambda: "failing" in states(scene).values(), CANARY_S, "/status names a pair")
    bad = next(pair for pair in scene.cluster.status()["pairs"] if pair["state"] == "failing")
    assert bad["kind"], bad
    assert bad["reason"], bad
    shown = httpx.get(f"{scene.cluster.url}/metrics").text
    samples = [one for family in text_string_to_metric_families(shown) for one in family.samples]
    assert [one.value for one in samples if one.name == "baton_ready"] == [0]
    failing = [one.labels.items() for one in samples if one.name == "baton_failing_pairs"]
    wanted = {name: bad[name] for name in ("prefill", "decode", "kind")}.items()
    assert any(labels >= wanted for labels in failing), failing
    for proxy in scene.cluster.kv.values():
        proxy.thaw()
    healed = until_ready(scene, 200, CANARY_S + TICKS_S)
    wait_until(
        lambda: set(states(scene).values()) == {"proven"},
        4 * CANARY_S,
        lambda: f"all pairs healed: {states(scene)}",
    )
    scene.cluster.kv["prefill-0"].freeze()
    cut = {"prefill-0 decode-0": "failing", "prefill-0 decode-1": "failing"}
    wait_until(
        lambda: cut.items() <= states(scene).items(),
        3 * CANARY_S,
        lambda: f"both its pairs fail: {states(scene)}",
    )
    began, statuses = time.monotonic(), set()
    calls = scene.traffic.start(*asks)
    while time.monotonic() - began < CANARY_S:
        statuses.add(ready(scene).status_code)
        time.sleep(0.05)
    scene.traffic.wait(calls)
    assert statuses == {200}, "one pair that serves is enough"
    assert all(call.attempts == 1 for call in calls), [call.attempts for call in calls]
    scene.cluster.kv["prefill-0"].thaw()
    wait_until(
        lambda: set(states(scene).values()) == {"proven"},
        4 * CANARY_S,
        lambda: f"all pairs healed: {states(scene)}",
    )
    return (
        f"not ready after {lost:.1f} s ({bad['kind']}), ready {healed:.1f} s after it healed; one cut off: "
        f"ready, {len(calls)} of {len(calls)} complete in one attempt each"
    )
