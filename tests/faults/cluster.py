"""A cluster of real processes: each node can be killed, stopped, armed with faults and started again.

nodes      router, prefill-0.., decode-0.. and with routers=2 router-1, which every worker serves as well;
           each has flags, environment and a log of its own
endpoints  those of the place, loopback tcp if none is given, the same after every restart:
           `cluster.port(name)` is a router's HTTP port or a prefill worker's KV port,
           `cluster.control_ports[name]` where workers register at a router
flags      those of "prefill" or "decode" go to every worker of that role, of "*" to all workers
prepare    by name, role or "*": functions that a node calls before its first main, as `nursery` says
proxies    with proxied=True a ZMTP proxy stands before the router for each worker and before each prefill
           worker's KV port: `cluster.control["decode-0"]`, `cluster.kv["prefill-0"]`; "up" is towards the
           router or prefill; before each decode worker's port for prefixes: `cluster.prefixes["decode-0"]`
audit      every node runs under the hook of tests/audit; `audit_lines` is what it found
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from baton.tests.audit.watch import violations
from baton.tests.faults.places import Loopback
from baton.tests.faults.zmtp_proxy import Proxies, Proxy

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONUNBUFFERED": "1",
}
KEPT = ("PATH", "HOME", "PYTHONPATH", "TMPDIR", "LANG")


@dataclass(eq=False)
class Node:
    """One role's process through all its lives; `pid` is 0 while it is down."""

    name: str
    role: str
    flags: dict[str, str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)  # of all its lives
    moves: tuple[str, ...] = ()  # what it calls first in all its lives
    armed: dict[str, str] = field(default_factory=dict)  # of this life only, as `prepare`
    prepare: list[str] = field(default_factory=list)
    pid: int = 0
    exits: list[int] = field(default_factory=list)
    num_starts: int = 0
    keeps_alive: bool = False  # start it again when it ends, as a supervisor does

    @property
    def is_up(self) -> bool:
        return self.pid != 0

    @property
    def argv(self) -> list[str]:
        return [f"--{name}={value}" for name, value in self.flags.items()]

    def said(self) -> str:
        """What it logged in all its lives."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Forker:
    """The nursery as seen from the tests: starts nodes and notices their ends."""

    def __init__(self) -> None:
        env = {name: os.environ[name] for name in KEPT if name in os.environ} | ENVIRONMENT
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        self._process = subprocess.Popen(
            [sys.executable, *safe, "-m", "baton.tests.faults.fork_server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=env,
            start_new_session=True,
        )  # fmt: skip
        self._nodes: dict[str, Node] = {}
        self._changed = threading.Condition()
        assert "ready" in json.loads(self._process.stdout.readline())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, node: Node, key: str) -> None:
        """Returns when the node has a pid."""
        node.num_starts += 1
        with self._changed:
            self._nodes[key] = node
            self._send(node, key)
            assert self._changed.wait_for(lambda: node.is_up, 10), f"{node.name} did not start"

    def wait_down(self, node: Node, timeout: float) -> int:
        """The exit code, negative for a signal."""
        with self._changed:
            assert self._changed.wait_for(lambda: not node.is_up, timeout), (
                f"{node.name} did not end in {timeout} s"
            )
        return node.exits[-1]

    def close(self) -> None:
        """Kills what still lives."""
        self._process.stdin.close()
        self._process.wait(10)
        self._reader.join(5)
        self._process.stdout.close()

    def _send(self, node: Node, key: str) -> None:
        base = {name: os.environ[name] for name in KEPT if name in os.environ} | ENVIRONMENT
        order = {
            "name": key, "role": node.role, "argv": node.argv, "env": base | node.env | node.armed,
            "log": str(node.log),
            "prepare": [*node.moves, *node.prepare],
        }  # fmt: skip
        self._process.stdin.write(json.dumps({"start": order}) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                node = self._nodes[message["name"]]
                if "code" in message:
                    node.exits.append(message["code"])
                    node.pid = 0
                    if node.keeps_alive:
                        node.num_starts += 1
                        self._send(node, message["name"])
                else:
                    node.pid = message["pid"]
                self._changed.notify_all()


class FaultCluster:
    """Router, prefill and decode workers as processes of their own."""

    def __init__(
        self, forker: Forker, model: Path, directory: Path,
        *, routers=1, prefill=2, decode=2, flags=None, env=None, prepare=None, proxied=False, place=None,
    ) -> None:  # fmt: skip
        directory.mkdir(parents=True, exist_ok=True)
        self._forker, self._directory = forker, directory
        self._report = directory / "audit"
        self.model = model.name
        assert routers == 1 or not proxied, "a proxy stands before one router"
        front = ["router", *(f"router-{i}" for i in range(1, routers))]
        names = [*front, *(f"prefill-{i}" for i in range(prefill)), *(f"decode-{i}" for i in range(decode))]
        self.place: Loopback = place or Loopback()
        ports = self.place.settle(names, directory)
        self.control_ports = {name: ports[name][0] for name in front}
        self._ports = {name: port for name, (_, port) in ports.items()}
        self._proxies = Proxies().__enter__() if proxied else None
        # a new client per question costs more than the answer; connections are not kept, as routers end
        self._client = httpx.Client(
            timeout=5, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.control: dict[str, Proxy] = {}
        self.kv: dict[str, Proxy] = {}
        self.prefixes: dict[str, Proxy] = {}
        self.nodes = {name: self._node(name, model, flags or {}, env or {}) for name in names}
        for node in self.nodes.values():
            node.prepare = [f for key in ("*", node.role, node.name) for f in (prepare or {}).get(key, ())]

    @property
    def url(self) -> str:
        return f"http://{self.place.address('router')}:{self.port('router')}"

    @property
    def routers(self) -> list[Node]:
        return [self.nodes[name] for name in self.control_ports]

    @property
    def workers(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.role != "router"]

    @property
    def audit_lines(self) -> list[str]:
        """What a node did that no serving node may do."""
        return [
            f"S1: {found['event']} {found['arguments']} at {found['stack']}"
            for found in violations(self._report)
        ]

    def port(self, name: str) -> int:
        """A router's HTTP port, or the KV port of a prefill worker."""
        return self._ports[name]

    # --- processes ------------------------------------------------------------------------------------------

    def start(self) -> "FaultCluster":
        for name in self.nodes:
            self.start_node(name)
        self.wait_whole(60)
        return self

    def stop(self) -> None:
        """Ends every node; idempotent."""
        for node in self.nodes.values():
            node.keeps_alive = False
        for node in self.nodes.values():
            self.signal(node.name, signal.SIGCONT)
            self.signal(node.name, signal.SIGKILL)
        for node in self.nodes.values():
            self._forker.wait_down(node, 10)
        self.place.release()
        self._client.close()
        if self._proxies is not None:
            self._proxies, proxies = None, self._proxies
            proxies.__exit__()

    def start_node(self, name: str) -> None:
        """Starts a node that is down."""
        node = self.nodes[name]
        assert not node.is_up, f"{name} is up"
        self._forker.start(node, f"{self._directory}/{name}")

    def signal(self, name: str, signum: int) -> None:
        """To the node, if it is up."""
        pid = self.nodes[name].pid
        if pid:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                return

    def kill(self, *names: str) -> None:
        """SIGKILL, and wait until they are gone."""
        for name in names:
            self.signal(name, signal.SIGKILL)
        for name in names:
            self.wait_down(name, 10)

    def wait_down(self, name: str, timeout: float) -> int:
        """The exit code of a node that ends by itself."""
        return self._forker.wait_down(self.nodes[name], timeout)

    def restart(self, name: str, *, fault: str = "", env=None, prepare=(), graceful: bool = False) -> None:
        """End and start a node; `fault` arms it as BATON_FAULT says, until its next restart."""
        node = self.nodes[name]
        if node.is_up:
            self.signal(name, signal.SIGTERM if graceful else signal.SIGKILL)
            self.wait_down(name, 40)
        armed = {"BATON_FAULT": fault, "BATON_ALLOW_FAULTS": "1"} if fault else {}
        node.armed, node.prepare = {**(env or {}), **armed}, list(prepare)
        self.start_node(name)

    def heal(self) -> None:
        """Every node up and unarmed, and known to the router."""
        for node in self.nodes.values():
            self.signal(node.name, signal.SIGCONT)
            node.keeps_alive = False
            if not node.is_up:
                node.armed, node.prepare = {}, []
                self.start_node(node.name)
            elif node.armed or node.prepare:
                self.restart(node.name)
        self.wait_whole(60)

    # --- what it says ---------------------------------------------------------------------------------------

    def status(self, router: str = "router") -> dict:
        """The document of /status; {} while the router does not answer."""
        try:
            return self._client.get(f"http://{self.place.address(router)}:{self.port(router)}/status").json()
        except httpx.HTTPError:
            return {}

    def all_status(self) -> dict[str, dict]:
        """/status of every router that is up."""
        return {node.name: self.status(node.name) for node in self.routers if node.is_up}

    def heard_anew(self, timeout: float = 10.0) -> None:
        """Waits for the second heartbeat of every worker, so that /status is no older than this call.

        The first may have been under way already.
        """
        asked = time.monotonic()
        came: dict[str, list[float]] = {}

        def is_new() -> bool:
            now = time.monotonic()
            workers = self.status().get("workers", [])
            for worker in workers:
                at, times = now - worker["heartbeat_age_s"], came.setdefault(worker["instance"], [asked])
                if at > times[-1] + 0.05:  # the same heartbeat seen twice has nearly the same time
                    times.append(at)
            return bool(workers) and all(len(came[worker["instance"]]) > 2 for worker in workers)

        wait_until(is_new, timeout, "two heartbeats of every worker")

    def worker(self, name: str) -> dict:
        """A node's entry of /status; {} when the router does not know it."""
        pid = self.nodes[name].pid
        return next((w for w in self.status().get("workers", []) if w["pid"] == pid), {})

    def is_known(self, name: str, pid: int) -> bool:
        """Whether some router counts the process `pid` among its serving workers."""
        workers = [
            worker for document in self.all_status().values() for worker in document.get("workers", [])
        ]
        return any(w["pid"] == pid and w["state"] == "serving" for w in workers)

    def is_whole(self) -> bool:
        """Whether every router that is up serves with exactly the workers that are up, and some router is."""
        pids = {node.pid for node in self.workers if node.is_up}
        documents = [document.get("workers", []) for document in self.all_status().values()]
        return bool(documents) and all(
            {w["pid"] for w in workers} == pids and all(w["state"] == "serving" for w in workers)
            for workers in documents
        )

    def wait_whole(self, timeout: float) -> None:
        wait_until(
            self.is_whole, timeout, lambda: f"a whole cluster: {self.all_status()}\n{self.last_lines()}"
        )

    def held(self) -> dict[str, int]:
        """What is in use anywhere, by name; empty when everything has been given back."""
        documents = self.all_status()
        if not documents or not all(documents.values()):
            return {"a router is down": 1}
        found = {}
        for name, document in documents.items():
            found[f"rooms of {name}"] = document["router"]["open_rooms"]
            found[f"queued at {name}"] = document["router"]["queued"]
            for w in document["workers"]:
                worker = f"{w['role']} {w['pid']}"
                found[f"{worker} pages, says {name}"] = w["pages_total"] - w["pages_free"]
                found[f"{worker} rooms, says {name}"] = w["running"] + w["queued"] + w["transferring"]
                found[f"{worker} placed by {name}"] = w["placed"]
        return {name: count for name, count in found.items() if count}

    def last_lines(self, count: int = 12) -> str:
        """Of each node's log, without the lines of requests that went well."""
        dull = (" completed ", " done seconds=", " registered ")
        lines = [
            (n, [line for line in n.said().splitlines() if not any(words in line for words in dull)])
            for n in self.nodes.values()
        ]
        return "\n".join(f"[{node.name}] {line}" for node, said in lines for line in said[-count:])

    def _node(self, name: str, model: Path, flags: dict, env: dict) -> Node:
        role = name.partition("-")[0]
        control = [f"tcp://{self.place.address(front)}:{port}" for front, port in self.control_ports.items()]
        ports = (self.control_ports.get(name, 0), self._ports.get(name, 0))
        own = {"model": str(model), **self.place.flags(name, control, ports)}
        if role == "router":
            own |= {"canary-s": "0"}
        else:
            own |= {"device": "cpu", "dtype": "float32", "threads": "1", "kv-memory-mb": "48"}
        if role == "prefill":
            own |= {"chunk-size": "64"}
        if self._proxies is not None:
            own |= self._proxy(name, role, control[0])
        given = {
            **({} if role == "router" else flags.get("*", {})),
            **flags.get(role, {}),
            **flags.get(name, {}),
        }
        env = {**env, **self.place.env(name), "AUDIT_REPORT": str(self._report)}
        return Node(name, role, own | given, self._directory / f"{name}.txt", env=env, moves=self.place.moves)

    def _proxy(self, name: str, role: str, control: str) -> dict[str, str]:
        """The flags that lead a worker and those who call it through proxies."""
        if role == "router":
            return {}
        self.control[name] = self._proxies.add("tcp://127.0.0.1:0", control)
        own = {
            "router": self.control[name].endpoint,
            "transports": "zmq_blocks",
        }  # shared memory passes a proxy by
        behind = self._proxies.add("tcp://127.0.0.1:0", f"tcp://127.0.0.1:{self._ports[name]}")
        (self.kv if role == "prefill" else self.prefixes)[name] = behind
        own["kv-advertise" if role == "prefill" else "prefix-advertise"] = behind.endpoint
        return own


class Late(AssertionError):
    """A bound of time was passed: by the cluster, or because the machine had other work just then."""


def in_time(took: float, bound: float, told: str) -> None:
    if took > bound:
        raise Late(told)


def wait_until(predicate, timeout, what, pause=0.02):
    """Polls until real processes reach a state; returns (value, seconds). `what` is a text or a function."""
    began = time.monotonic()
    while True:
        value = predicate()
        if value:
            return value, time.monotonic() - began
        if time.monotonic() - began > timeout:
            raise Late(f"{what() if callable(what) else what}: not within {timeout} s")
        time.sleep(pause)
