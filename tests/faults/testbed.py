"""The testbed of fault rows: a toy model, a fresh cluster for each row, and the checks after every row.

with bed.scene() as scene      a whole, idle cluster of 2 prefill and 2 decode workers; `flags`, `prefill=1`
                               and the like make another one
scene.verdict()                after the row: every promise of history.py, and
    I4   5 s after the last request nothing is held anywhere: pages, rooms, file descriptors, shared memory
    I6   the router has grown by no more than ROUTER_GROWTH since it was fresh
    I8   no process but the victims ended
    S1   no node did what the audit hook of tests/audit forbids
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from baton.tests.cluster.router_fakes import save_tokenizer
from baton.tests.faults.cluster import FaultCluster, Forker, wait_until
from baton.tests.faults.history import Promise, violations
from baton.tests.faults.places import Lan, Loopback
from baton.tests.faults.traffic import Ask, Call, Traffic
from baton.tests.parity.toy_models import write_toy_checkpoint

GIVEN_BACK_S = 5.0
ROUTER_GROWTH = 32 << 20  # bytes, first use of libraries included; rows have at most 300 streams of 64 KiB
SPARE_FDS = 24  # links between workers come and go with their peers and stay for a while when idle
SHAPE = {
    "vocab_size": 330, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip  # 4 KiB of KV per token: a prompt of 700 tokens is three blocks


class Scene:
    """One row's run on a cluster: its traffic, its victims, and what is measured before and after."""

    def __init__(self, bed: "Bed", cluster: FaultCluster) -> None:
        self.bed, self.cluster = bed, cluster
        self.traffic = Traffic(cluster.port("router"), cluster.model, cluster.place.address("router"))
        self.promise = Promise()
        self.victims: set[str] = set()
        self.notes: list[str] = []
        self._exits = {node.name: len(node.exits) for node in cluster.nodes.values()}
        self._fds = self._num_fds()
        self._rss: dict[str, int] = {}
        self._shm = set(os.listdir("/dev/shm"))

    # --- what rows do ---------------------------------------------------------------------------------------

    def known(self, asks: list[Ask]) -> list[Ask]:
        """The same requests, after a run without faults has shown what their tokens are."""
        return self.bed.learn(self, asks)

    def kill(self, *names: str) -> None:
        self.victims.update(names)
        self.cluster.kill(*names)

    def arm(self, name: str, fault: str, **more) -> None:
        """Restart a node with a fault; it is a victim from then on."""
        self.victims.add(name)
        self.cluster.restart(name, fault=fault, **more)
        self.cluster.wait_whole(40)
        self.rebase(name)

    def rebase(self, *names: str) -> None:
        """The nodes were started anew: their file descriptors are counted from here."""
        self._fds |= {name: count for name, count in self._num_fds().items() if name in names}
        self._rss |= {name: rss for name, rss in self._router_rss().items() if name in names}

    def detected(self, name: str, pid: int, within: float = 2.0) -> float:
        """Seconds until the router no longer counts the process among its serving workers (I7)."""
        _, took = wait_until(lambda: not self.cluster.is_known(name, pid), within, f"I7: {name} found dead")
        return took

    def counted(self, role: str, *names: str) -> float:
        """Sum of these counters over the live workers of a role, none of them older than this call."""
        self.cluster.heard_anew()
        return self._sum(role, names)

    def until_counted(self, role: str, *names: str, least: float = 1) -> float:
        """The sum, once it is at least so much."""
        told = f"{role} counts {least:g} of {'+'.join(names)}"
        wait_until(lambda: self._sum(role, names) >= least, 10, told)
        return self._sum(role, names)

    @property
    def lan(self) -> Lan:
        """The hosts, of a row that has them."""
        assert isinstance(self.cluster.place, Lan)
        return self.cluster.place

    # --- afterwards -----------------------------------------------------------------------------------------

    def verdict(self) -> list[str]:
        """Every broken promise."""
        calls = self.traffic.wait(self.traffic.history)
        found = violations(calls, self.bed.references, self.promise)
        return found + self._held() + self._grown() + self._exited() + self.cluster.audit_lines

    def close(self) -> None:
        self.traffic.close()

    def _sum(self, role: str, names: tuple[str, ...]) -> float:
        workers = [w for w in self.cluster.status().get("workers", []) if w["role"] == role]
        return sum(w["counters"].get(name, 0) for w in workers for name in names)

    def _held(self) -> list[str]:
        """I4, within 5 s of now."""
        deadline = time.monotonic() + GIVEN_BACK_S
        while (held := self.cluster.held()) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = [f"I4: held {GIVEN_BACK_S:g} s after the last request: {held}"] if held else []
        fds = self._num_fds()
        for name, count in fds.items():
            before = self._fds.get(name, count)
            if count > before + SPARE_FDS:
                found.append(f"I4: {name} has {count} file descriptors, {before} before")
        left = {name for name in set(os.listdir("/dev/shm")) - self._shm if "baton" in name}
        return found + ([f"I4: left in /dev/shm: {sorted(left)}"] if left else [])

    def _grown(self) -> list[str]:
        grown = {name: rss - self._rss.get(name, rss) for name, rss in self._router_rss().items()}
        return [f"I6: {name} grew by {size >> 20} MB" for name, size in grown.items() if size > ROUTER_GROWTH]

    def _router_rss(self) -> dict[str, int]:
        up = [node for node in self.cluster.routers if node.is_up]
        return {node.name: psutil.Process(node.pid).memory_info().rss for node in up}

    def _exited(self) -> list[str]:
        found = []
        for node in self.cluster.nodes.values():
            new = node.exits[self._exits[node.name] :]
            if new and node.name not in self.victims:
                found.append(f"I8: {node.name} ended with {new}\n{node.said()[-1500:]}")
        return found

    def _num_fds(self) -> dict[str, int]:
        nodes = [node for node in self.cluster.nodes.values() if node.is_up]
        return {node.name: psutil.Process(node.pid).num_fds() for node in nodes}


class Bed:
    """Everything that rows share. A context manager: at its end no process is left."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num = 0
        self.references: dict[tuple, list[int]] = {}
        self.forker = Forker()
        self.model = directory / "toy"
        write_toy_checkpoint(self.model, "llama", seed=7, **SHAPE)
        save_tokenizer(self.model)

    def __enter__(self) -> "Bed":
        return self

    def __exit__(self, *_: object) -> None:
        self.forker.close()

    def new_directory(self) -> Path:
        """An empty place of a row's own."""
        self._num += 1
        made = self._directory / f"place-{self._num}"
        made.mkdir()
        return made

    @contextmanager
    def scene(self, *, hosts: bool = False, **settings) -> Iterator[Scene]:
        """A cluster at rest, ended behind the scene; `settings` as FaultCluster takes them. With `hosts` each
        node is on a host of its own, and this thread on that of the clients.
        """
        with Lan() if hosts else Loopback() as place, self._scene(place=place, **settings) as scene:
            yield scene

    @contextmanager
    def _scene(self, **settings) -> Iterator[Scene]:
        self._num += 1
        cluster = FaultCluster(self.forker, self.model, self._directory / f"cluster-{self._num}", **settings)
        scene = Scene(self, cluster)
        try:
            cluster.start()
            scene.rebase(*cluster.nodes)
            yield scene
        except Exception as error:
            error.__notes__ = [cluster.last_lines(8)]  # add_note is not in Python 3.10
            raise
        finally:
            scene.close()
            cluster.stop()

    def learn(self, scene: Scene, asks: list[Ask]) -> list[Ask]:
        """Runs what no run without faults has shown yet; equal prompts once, at the greatest length."""
        longest: dict[tuple, Ask] = {}
        for ask in asks:
            if ask.max_tokens > len(self.references.get(ask.key, ())):
                longest[ask.key] = max(ask, longest.get(ask.key, ask), key=lambda a: a.max_tokens)
        calls: list[Call] = scene.traffic.run(list(longest.values()))
        for call in calls:
            assert call.terminals == ["finished"], f"the run without faults failed: {call} {call.error}"
            assert len(call.ids) == call.ask.max_tokens
            self.references[call.ask.key] = call.ids
        return asks
