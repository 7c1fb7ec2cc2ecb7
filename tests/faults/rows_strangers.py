"""Rows in which somebody who is no node of the cluster speaks to its ports."""

import random
import socket
from contextlib import ExitStack
from dataclasses import replace

import msgpack
import psutil
from baton.cluster.security.keyring import read_key, split_key
from baton.deploy.keys.keys import remove
from baton.tests.cluster.keyed_peers import REFUSAL_S, Hosts, admit, curve, dealer, hello, say, stranger
from baton.tests.faults.cluster import FaultCluster, wait_until
from baton.tests.faults.mutants import ZAP_DIES_AT
from baton.tests.faults.rows import row
from baton.tests.faults.rows_network import finished, told
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import workload
from baton.tests.faults.zmtp_wire import Message
from baton.tests.sim.draws import flipped, hex_id

MIB = 1 << 20
MAX_GROWTH = 20 * MIB
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
PROPERTIES = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READY = Message((PROPERTIES,), is_command=True).wire()


def ports(cluster: FaultCluster) -> dict[str, str]:
    """Node -> the ZeroMQ endpoint that it listens on."""
    found = {"router": f"tcp://127.0.0.1:{cluster.control_ports['router']}"}
    return found | {
        n.name: f"tcp://127.0.0.1:{cluster.port(n.name)}" for n in cluster.workers if n.role == "prefill"
    }


def resident(cluster: FaultCluster) -> dict[str, int]:
    return {name: psutil.Process(cluster.nodes[name].pid).memory_info().rss for name in ports(cluster)}


def fuzzed(rng: random.Random, message: Message) -> list[bytes]:
    """A message as a peer of its own would send it, damaged."""
    fields = message.fields()
    for name in ("instance", "room", "router", "prefill_instance"):
        if name in fields:
            fields[name] = hex_id(rng)
    frames = [msgpack.packb(fields), *message.frames[1:]]
    i = rng.randrange(len(frames))
    data = bytearray(frames[i] or b"\0")
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            data[:] = flipped(data, rng)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        at = rng.randrange(len(data))
        data[at:at] = rng.randbytes(rng.choice([1, 9, 300, 20000]))
    elif kind == 3:
        data[:] = rng.randbytes(rng.randint(1, 300))
    else:
        frames += [rng.randbytes(rng.randrange(40)) for _ in range(rng.randint(1, 12))]
    frames[i] = bytes(data[: 60 << 10])
    return frames


def claim(endpoint: str, size: int, num_bytes: int) -> socket.socket:
    """Greets without a key and sends `num_bytes` of a frame that announces `size`, until it is cut off."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    try:
        connection.sendall(GREETING + READY)
        heard = b""
        while b"Socket-Type" not in heard and (data := connection.recv(4096)):
            heard += data
        connection.sendall(b"\x02" + size.to_bytes(8, "big"))
        for _ in range(num_bytes >> 16):
            connection.sendall(bytes(1 << 16))
    except OSError:
        pass
    return connection


def flood(scene: Scene, num_frames: int, asks: list) -> str:
    """Damaged copies of real messages and giant frames against every port under traffic."""
    proxies = [*scene.cluster.control.values(), *scene.cluster.kv.values()]
    samples: list[Message] = []
    for proxy in proxies:
        for way in (proxy.up, proxy.down):
            way.watch(
                lambda message: (
                    len(message.frames) == 1 and len(samples) < 500 and bool(samples.append(message))
                )
            )
    finished(scene, scene.traffic.start(*asks))
    before, rng = resident(scene.cluster), random.Random(33)
    calls = scene.traffic.start(*asks)
    with ExitStack() as stack:
        dealers = [stack.enter_context(dealer(endpoint)) for endpoint in ports(scene.cluster).values()]
        for one in dealers:
            one.sndtimeo = 2000
        num_sent = 0
        while num_sent < num_frames:
            for one in dealers:
                one.send_multipart(fuzzed(rng, rng.choice(samples)))
                num_sent += 1
        for endpoint in ports(scene.cluster).values():
            for size in (1 << 33, 1 << 40, 40 * MIB):
                stack.enter_context(claim(endpoint, size, 32 * MIB))
        after = resident(scene.cluster)
    finished(scene, calls)
    growth = {name: (after[name] - before[name]) / MIB for name in before}
    assert all(grown * MIB <= MAX_GROWTH for grown in growth.values()), f"MiB more: {growth}"
    scene.cluster.wait_whole(10)
    calls += finished(scene, scene.traffic.start(*asks))
    most = max(growth.values())
    return (
        f"{num_sent} damaged messages, {len(samples)} kinds of them; at most {most:.1f} MiB more; "
        f"{told(calls)}"
    )


@row(
    "F33b", "10000 damaged messages and frames of 8 GiB from strangers, to every port",
    "no process ends, at most 20 MiB more anywhere, all complete", proxied=True,
)  # fmt: skip
def f33b(scene: Scene) -> str:
    return flood(scene, 10_000, scene.known(workload(332, 24, prompt=(50, 600), max_tokens=24)))


@row(
    "F33q", "1200 damaged messages and frames of 8 GiB from strangers, to every port",
    "no process ends, at most 20 MiB more anywhere, all complete", quick=True, proxied=True,
)  # fmt: skip
def f33q(scene: Scene) -> str:
    return flood(scene, 1200, scene.known(workload(333, 8, prompt=(50, 600), max_tokens=16)))


def is_admitted(endpoint: str, keys: object, message: object) -> bool:
    with dealer(split_key(endpoint)[0], keys) as one:
        return say(one, message, seconds=REFUSAL_S)


@row(
    "F55", "strangers' keys, a revoked key, and the death of the thread that admits peers",
    "who is not listed is refused, also without that thread; living links and streams go on, an alarm is "
    "raised",
    prefill=1, decode=1,
)  # fmt: skip
def f55(scene: Scene) -> str:
    return keyed(scene, ["baton.tests.faults.mutants:zap_dies"])


def keyed(scene: Scene, prepare: list[str]) -> str:
    """F55 on a cluster with keys whose router and prefill worker were prepared so."""
    place = scene.bed.new_directory()
    hosts, trigger = Hosts(place), place / "zap-dies"
    flags = {
        "router": {"keys": hosts.router},
        "prefill": {"keys": hosts.prefill},
        "decode": {"keys": hosts.decode},
    }
    both = {"router": prepare, "prefill": prepare}
    with scene.bed.scene(
        prefill=1, decode=1, flags=flags, env={ZAP_DIES_AT: str(trigger)}, prepare=both
    ) as own:
        asks = own.known(workload(551, 6, prompt=(50, 700), max_tokens=240))
        control, kv = ports(own.cluster).values()
        other = hosts.new("decode", "d1")
        admit(other, hosts.router, "router")
        admit(hosts.router, other, "decode")
        message = hello("decode")
        assert is_admitted(control, curve(other, "decode", hosts.router), message), "a listed key"
        remove(hosts.router, read_key(other, "decode").public)
        assert not is_admitted(control, curve(other, "decode", hosts.router), message), "a revoked key"
        for port, server in ((control, hosts.router), (kv, hosts.prefill)):
            assert not is_admitted(port, stranger(server), message), "a stranger's key"
            assert not is_admitted(port, None, message), "no key"
        calls = own.traffic.start(*asks)
        wait_until(lambda: max(len(call.ids) for call in calls) >= 5, 20, "streams run", pause=0.002)
        trigger.touch()
        admit(hosts.router, other, "decode")
        for port, server in ((control, hosts.router), (kv, hosts.prefill)):
            assert not is_admitted(port, stranger(server), message), "a stranger, with nobody to ask"
        assert not is_admitted(control, curve(other, "decode", hosts.router), message), (
            "a listed key, with nobody to ask"
        )
        finished(own, calls)
        calls += finished(own, own.traffic.start(*(replace(ask, max_tokens=16) for ask in asks)))
        nodes = [own.cluster.nodes[name] for name in ("router", "prefill-0")]
        wait_until(lambda: all("authentication died" in node.said() for node in nodes), 5, "alarms")
        alarms = own.cluster.status()["router"]["events"]["authentication_failures"]
        assert alarms == 1
        problems = own.verdict()
        assert not problems, problems
    return f"strangers heard: 0; {told(calls)}"
