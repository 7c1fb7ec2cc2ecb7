"""Rows in which a process has another release, another model, or another life than its peers assume."""

from collections import Counter

import httpx
import msgpack
from baton.cluster.protocol.codec import MAX_BATCH
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.rows import row
from baton.tests.faults.rows_network import BLOCKS, COLD, finished, placed_again, told
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload
from baton.tests.faults.zmtp_proxy import Way
from baton.tests.faults.zmtp_rules import change, hold, verb
from baton.tests.faults.zmtp_wire import Message

NOVELTY = {"type": "Migrate", "room": "a" * 32, "epoch": 0, "instance": "b" * 32}


class Newer:
    """A later release, by its messages: each has new fields, and shared frames hold an unknown message."""

    def __init__(self) -> None:
        self.num_beside: Counter[str] = Counter()  # such messages, by plane and direction

    def on(self, plane: str, way: Way) -> None:
        way.rule(
            lambda message: bool(message.types()),
            change(lambda message: [self._made(f"{plane} {way.name}", message)]),
        )

    def _made(self, where: str, message: Message) -> Message:
        richer = message.with_fields(priority=3, tenant={"name": "x"}, hints=[1, 2.5, None])
        found = msgpack.unpackb(richer.frames[0])
        if not isinstance(found, list) or len(found) >= MAX_BATCH:
            return richer
        self.num_beside[where] += 1
        found.insert(len(found) // 2, NOVELTY)
        return richer.with_frame(0, msgpack.packb(found))


@row(
    "F47",
    "a peer of the next version: a field more in every message, messages of an unknown type alone and "
    "between others, and an older one",
    "unknown fields are ignored, of unknown types each message alone is refused, the older protocol with its "
    "reason; all "
    "complete", proxied=True,
)  # fmt: skip
def f47(scene: Scene) -> str:
    asks = scene.known(workload(471, 12, prompt=(50, 700), max_tokens=16))
    newer = Newer()
    for plane, proxies in (("control", scene.cluster.control), ("KV", scene.cluster.kv)):
        for way in (way for proxy in proxies.values() for way in (proxy.up, proxy.down)):
            newer.on(plane, way)
            way.inject(Message((msgpack.packb(NOVELTY),)))
    calls = finished(scene, scene.traffic.start(*asks))
    assert not placed_again(calls), told(calls)
    way, said = scene.cluster.control["decode-0"].up, scene.cluster.nodes["router"].said
    way.clear()
    way.rule(verb("Hello"), change(lambda message: [message.with_fields(protocol=0)]))
    scene.victims.add("decode-0")
    scene.cluster.restart("decode-0")
    wait_until(lambda: "protocol 0 is not" in said(), 20, "the older one is refused")
    others = finished(scene, scene.traffic.start(*asks))
    assert not placed_again(others), told(others)
    way.clear()
    newer.on("control", way)
    scene.cluster.wait_whole(20)
    scene.rebase("decode-0")
    calls += others + finished(scene, scene.traffic.start(*asks))
    assert {"control up", "control down", "KV up"} <= newer.num_beside.keys(), newer.num_beside
    due = len(scene.cluster.workers) + newer.num_beside["control up"]

    def malformed() -> int:
        return scene.cluster.status()["router"]["events"].get("control_malformed", 0)

    wait_until(
        lambda: malformed() >= due, 5, lambda: f"the router refused {malformed()} unknown messages of {due}"
    )
    assert malformed() == due, f"the router refused {malformed()} unknown messages of {due}"
    return f"{told(calls)}; {sum(newer.num_beside.values())} unknown messages between others"


@row(
    "F48", "a prefill worker of another layout, a handshake of another model",
    "it gets no request, the handshake is refused; alone it makes the cluster not ready, with the reason",
    quick=True, flags={"prefill-1": {"page-size": "8"}, "router": {"local-prefill": "off"}}, proxied=True,
)  # fmt: skip
def f48(scene: Scene) -> str:
    asks = scene.known(workload(481, 12, prompt=(50, 300), max_tokens=12))
    calls = finished(scene, scene.traffic.start(*asks))
    assert scene.cluster.worker("prefill-1")["counters"].get("requests", 0) == 0, "nothing was sent to it"
    fingerprints = {
        name: scene.cluster.worker(name)["fingerprint"] for name in ("prefill-0", "prefill-1", "decode-0")
    }
    assert fingerprints["prefill-0"] == fingerprints["decode-0"] != fingerprints["prefill-1"]

    def another(message: Message) -> list[Message]:
        layout = message.fields()["layout"]
        return [message.with_fields(layout={**layout, "fingerprint": "another model"})]

    known = {scene.cluster.worker(name)["instance"] for name in ("decode-0", "decode-1")}
    is_hello = verb("KVHello")
    scene.cluster.restart(
        "decode-0"
    )  # a new worker greets; the other one may greet again when it was stalled
    scene.victims.add("decode-0")
    rule = scene.cluster.kv["prefill-0"].up.rule(
        lambda message: is_hello(message) and message.fields()["instance"] not in known, change(another)
    )
    scene.cluster.wait_whole(20)
    scene.rebase("decode-0")
    calls += finished(scene, scene.traffic.start(*asks))
    assert rule.num_done, "the layouts met at the handshake"
    scene.kill("prefill-0")
    wait_until(
        lambda: "equal fingerprints" in httpx.get(f"{scene.cluster.url}/ready").text, 5, "/ready says why not"
    )
    return f"{told(calls)}; a hello of another layout reached prefill {rule.num_done} times"


@row(
    "F53", "prefill is killed mid-transfer and back on its port at once, blocks of its former life arrive "
           "late",
    "they are refused; all complete, tokens equal", quick=True, **COLD,
)  # fmt: skip
def f53(scene: Scene) -> str:
    asks = scene.known(workload(531, 8, **BLOCKS))
    way = scene.cluster.kv["prefill-0"].down
    rule = way.rule(verb("Block"), hold)
    calls = scene.traffic.start(*asks)
    rule.wait(2)
    scene.kill("prefill-0")
    way._rules.clear()
    scene.cluster.start_node("prefill-0")
    scene.cluster.wait_whole(20)
    scene.rebase("prefill-0")
    renewed = scene.traffic.start(*asks)  # the new process is greeted
    late = way.release()
    finished(scene, calls + renewed)
    assert placed_again(calls), "somebody was on it"
    late += len(way.held)
    refused = scene.until_counted("decode", "stale_instance", "unknown_room", "stale_epoch", "unexpected")
    return f"{told(calls + renewed)}; {late} late blocks, {refused:g} refused"
