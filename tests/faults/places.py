"""The hosts of a cluster's nodes: all on loopback, or each node on a host of its own.

    Loopback   one host, ports that nobody else has
    Lan        a network namespace per node, each with a cable (veth) to a switch (bridge), and one for the
               clients, where the thread is that entered the Lan. Settings, ports and keys are those of
               several machines: the manifests' own configuration, addresses that others reach, a directory of
               keys per host that admits the other hosts

A Lan treats whole Ethernet frames of at most 1514 bytes: no card offers to send larger ones.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from baton.cluster.security.keyring import read_key
from baton.deploy.keys.keys import add, init
from baton.tests.faults.netns import do, enter, inside, make, name_host, path_of
from baton.tests.ports import HeldPorts

HOST, HOST_NAME = "FAULT_HOST", "FAULT_HOST_NAME"  # environment of a node that moves in
SETTINGS = Path(__file__).resolve().parents[2] / "deploy" / "packaging" / "kubernetes" / "base" / "baton.toml"
# as SETTINGS and the manifests have them
HTTP, CONTROL, KV, BULK, PREFIX, METRICS = 8000, 7100, 7200, 7201, 7300, 9100
NETWORK, CLIENT = "10.77.0", "client"
FRAME = 1514  # bytes of the largest Ethernet frame
QUEUE_MS = 400  # of a slow cable; what would wait longer is dropped


class Loopback:
    """One host for all. A context manager, as Lan is."""

    moves: tuple[str, ...] = ()  # functions "module:function" that a node calls first, in each of its lives

    def __init__(self) -> None:
        self._held: list[HeldPorts] = []

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """The nodes have no lives any more: others may have their ports."""
        while self._held:
            self._held.pop().release()

    def settle(self, names: list[str], directory: Path) -> dict[str, tuple[int, int]]:
        """(control port, HTTP port) of each router, (0, KV port) of each worker in `names`; decode's is that
        of prefixes.
        """
        routers = [name for name in names if name.startswith("router")]
        self._held.append(HeldPorts(len(routers) + len(names)))
        ports = self._held[-1].ports
        control = dict(zip(routers, ports, strict=False))
        return {
            name: (control.get(name, 0), port)
            for name, port in zip(names, ports[len(routers) :], strict=True)
        }

    def address(self, name: str) -> str:
        """Of a node's host, as others reach it."""
        return "127.0.0.1"

    def flags(self, name: str, control: list[str], ports: tuple[int, int]) -> dict[str, str]:
        """Where a node listens and whom it dials; `control`: the endpoints of the routers."""
        if name.startswith("router"):
            return {"control-bind": f"tcp://127.0.0.1:{ports[0]}", "port": str(ports[1])}
        bind = "kv-bind" if name.startswith("prefill") else "prefix-bind"
        return {"router": ",".join(control), bind: f"tcp://127.0.0.1:{ports[1]}"}

    def env(self, name: str) -> dict[str, str]:
        """Of a node, in all its lives."""
        return {}


class Lan(Loopback):
    """Hosts by name. Entered and left by one thread, which is at the clients' host meanwhile."""

    moves = ("baton.tests.faults.places:move_in",)

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self._hosts: dict[str, int] = {}  # name -> its namespace
        self._keys: dict[str, Path] = {}

    def __enter__(self) -> "Lan":
        with contextlib.ExitStack() as stack:
            self._switch = stack.enter_context(make())
            do(self._switch, "ip link add br0 type bridge", "ip link set br0 up")
            self._stack = stack.pop_all()
        self.add(CLIENT)
        self._stack.enter_context(inside(self._hosts[CLIENT]))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        return list(self._hosts)

    # --- hosts ----------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """A new host with its cable."""
        own = self._hosts[name] = self._stack.enter_context(make())
        port, size = self._port(name), f"gso_max_size {FRAME} gso_max_segs 1"
        do(
            self._switch, f"ip link add {port} type veth peer name eth0 netns {path_of(own)}",
            f"ip link set {port} master br0 {size} up",
        )  # fmt: skip
        do(
            own,
            "ip link set lo up",
            f"ip addr add {self.address(name)}/24 dev eth0",
            f"ip link set eth0 {size} up",
        )

    def inside(self, name: str) -> contextlib.AbstractContextManager[None]:
        """This thread is on that host meanwhile."""
        return inside(self._hosts[name])

    def settle(self, names: list[str], directory: Path) -> dict[str, tuple[int, int]]:
        for name in names:
            self.add(name)
        self._keys = make_keys(names, directory / "keys")
        return {
            n: (CONTROL, HTTP) if n.startswith("router") else (0, KV)
            for n in names
            if not n.startswith("decode")
        }

    def address(self, name: str) -> str:
        return f"{NETWORK}.{list(self._hosts).index(name) + 1}"

    def flags(self, name: str, control: list[str], ports: tuple[int, int]) -> dict[str, str]:
        own = {"config": str(SETTINGS), "keys": str(self._keys[name])}
        if name.startswith("router"):
            return own
        own["router"] = ",".join(control)
        if name.startswith("prefill"):
            return own | {"kv-advertise": f"tcp://{self.address(name)}:{KV}"}
        return own | {"prefix-advertise": f"tcp://{self.address(name)}:{PREFIX}"}

    def env(self, name: str) -> dict[str, str]:
        return {
            HOST: path_of(self._hosts[name]),
            HOST_NAME: name,
            "AUDIT_NETWORKS": f"{NETWORK}.0/24,0.0.0.0/32",
        }

    # --- what cables do -------------------------------------------------------------------------------------

    def lose(self, percent: int, names: Iterable[str] = (), *, spared: str = "") -> None:
        """Of the packets that come to these hosts (all, if none is named), so many are lost, by chance; those
        that come from the host `spared` arrive.
        """
        whose = f"ip saddr != {self.address(spared)} " if spared else ""
        rule = f"{whose}numgen random mod 100 < {percent} counter drop"
        for name in names or self.names:
            text = f"table netdev loss {{ chain arriving {{ type filter hook ingress device eth0 priority 0; {rule}; }}; }}"  # noqa: E501
            self.filter(name, text)

    def slow(self, mbit: float, names: Iterable[str] = ()) -> None:
        """Cables of these hosts (all, if none is named) carry so much, each way."""
        shape = f"root tbf rate {mbit}mbit burst 32kb latency {QUEUE_MS}ms"
        for name in names or self.names:
            do(self._switch, f"tc qdisc replace dev {self._port(name)} {shape}")
            do(self._hosts[name], f"tc qdisc replace dev eth0 {shape}")

    def filter(self, name: str, rules: str) -> None:
        """nftables rules of one host, beside those that it has."""
        do(self._hosts[name], "nft -f -", text=rules)

    def heal(self) -> None:
        """Neither rules nor slow cables any more."""
        for name, host in self._hosts.items():
            do(host, "nft flush ruleset")
            with contextlib.suppress(AssertionError):  # it was not slow
                do(host, "tc qdisc del dev eth0 root")
                do(self._switch, f"tc qdisc del dev {self._port(name)} root")

    def num_dropped(self, name: str) -> int:
        """Packets that the rules of a host dropped."""
        words = do(self._hosts[name], "nft list ruleset").split()
        return sum(int(words[i + 1]) for i, word in enumerate(words) if word == "packets")

    def num_received(self, name: str) -> int:
        """Bytes of frames that came to a host."""
        return int(do(self._hosts[name], "cat /sys/class/net/eth0/statistics/rx_bytes"))

    def _port(self, name: str) -> str:
        return f"port{list(self._hosts).index(name)}"


def move_in() -> None:
    """A node goes to its host, before it has threads or sockets."""
    namespace = os.open(os.environ[HOST], os.O_RDONLY)
    enter(namespace)
    os.close(namespace)
    name_host(os.environ[HOST_NAME])


def make_keys(names: list[str], directory: Path) -> dict[str, Path]:
    """Of each node, the directory of its host: its own secret key, and the public keys of all others."""
    places = {name: directory / name for name in names}
    for name, place in places.items():
        init(place, [name.partition("-")[0]], name)
    for place in places.values():
        for other, elsewhere in places.items():
            if elsewhere != place:
                role = other.partition("-")[0]
                add(place, read_key(elsewhere, role).public, role, other, 3600, time.time())
    return places
