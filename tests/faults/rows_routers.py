"""Rows with two routers in front of the same workers: a fault of one router does not reach the other."""

import signal
import threading
import time

from baton.tests.faults.cluster import in_time, wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_drain import DRAINED
from baton.tests.faults.rows_process import (
    ALL_FINISH,
    dropped_at,
    longest_pause,
    placed_again,
    serves_again,
    time_of_day,
)
from baton.tests.faults.rows_stalls import TIGHT
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload

LET_GO_S = 2.0  # a worker works no longer for a router that died


def ports(scene: Scene) -> list[int]:
    return [scene.cluster.port(node.name) for node in scene.cluster.routers]


def streams_at_both(scene: Scene, asks: list[Ask]) -> tuple[list[Call], list[Call]]:
    """The same requests at either router, all streaming."""
    here, there = (scene.traffic.start(*asks, port=port) for port in ports(scene))
    wait_until(lambda: all(call.ids for call in (*here, *there)), 20, "all streams run")
    return here, there


@row(
    "F11r", "one of two routers is killed under streams, then restarted",
    "its rooms are dropped <= 2 s; the other's streams are whole, in one attempt; its clients are served by "
    "the other",
    quick=True, routers=2,
)  # fmt: skip
def f11r(scene: Scene) -> str:
    asks = scene.known(workload(1110, 4, prompt=(30, 200), max_tokens=500))
    cut, kept = streams_at_both(scene, asks)
    killed = time_of_day(time.strftime("%H:%M:%S", time.localtime()) + f"{time.time() % 1:.3f}"[1:])
    scene.kill("router")
    for call in scene.traffic.wait(cut, 5):
        call.may_be_cut = True
    again = scene.traffic.start(*asks, port=ports(scene)[1])
    busy = ["decode-0", "decode-1"]
    wait_until(lambda: all(dropped_at(scene, name) for name in busy), 4, "decode workers drop its rooms")
    took = max(dropped_at(scene, name) - killed for name in busy)
    in_time(took, LET_GO_S, f"rooms dropped {took:.2f} s after the router's death")
    scene.traffic.wait([*kept, *again])
    assert all(call.end == "finished" and call.attempts == 1 for call in (*kept, *again)), (kept, again)
    back = serves_again(scene, asks[0], ["router"], 3)
    scene.cluster.wait_whole(5)
    pause = longest_pause(kept)
    return (
        f"{len(cut)} resets, rooms dropped after {took:.2f} s; at the other {len(kept)} of {len(kept)} "
        f"whole, longest pause {pause:.2f} s; {len(again)} of {len(again)} served there; back after "
        f"{back:.2f} s"
    )


@row(
    "F44", "SIGTERM to one of two routers under load",
    "its streams finish, it takes no new ones, exit 0; the other takes all and its streams are untouched",
    routers=2,
)  # fmt: skip
def f44(scene: Scene) -> str:
    asks = scene.known(workload(144, 6, prompt=(30, 200), max_tokens=400))
    leaving, staying = streams_at_both(scene, asks)
    scene.victims.add("router")
    scene.cluster.signal("router", signal.SIGTERM)
    wait_until(lambda: "router drains" in scene.cluster.nodes["router"].said(), 2, "the router drains")
    late = scene.traffic.wait(scene.traffic.start(*asks[:4]), 3)
    elsewhere = scene.traffic.start(*asks[:4], port=ports(scene)[1])
    for call in late:
        call.may_be_cut = not call.status  # nobody listens: not accepted
    assert all(call.status == 503 or (call.end == "cut" and not call.status) for call in late), late
    scene.traffic.wait([*leaving, *staying, *elsewhere])
    assert all(call.end == "finished" for call in (*leaving, *staying, *elsewhere)), (
        leaving,
        staying,
        elsewhere,
    )
    assert all(call.attempts == 1 for call in (*staying, *elsewhere)), (
        "the other's requests went on where they were"
    )
    assert scene.cluster.wait_down("router", 5) == DRAINED
    scene.cluster.heal()
    scene.rebase("router")
    return (
        f"{placed_again([*leaving, *staying, *elsewhere])}, {len(late)} late ones refused by the one, "
        "served by the other"
    )


@row(
    "F38r", "decode has pages for one or two requests, 80 come 24 at a time through two routers",
    "all complete or 429, no deadlock: what one router placed, the other learns by a heartbeat or a refusal",
    flags=TIGHT, routers=2,
)  # fmt: skip
def f38r(scene: Scene) -> str:
    asks = scene.known(workload(383, 20, prompt=(30, 400), max_tokens=(4, 24)))
    scene.promise = Promise(statuses=(429,), deadline_s=60)
    calls = Load(scene, asks, width=24, total=80).join()
    ok = sum(call.end == "finished" for call in calls)
    assert ok + sum(call.status == 429 for call in calls) == len(calls) == 80
    assert ok >= 72, f"{ok} of {len(calls)} complete"
    refused, retracted = (
        int(sum(scene.counted(role, name) for role in ("prefill", "decode")))
        for name in ("refused", "retractions")
    )
    # neither is a failure: a refusal costs a message, and a request whose pages were taken back goes on
    scene.promise = Promise(statuses=(429,), deadline_s=60, spare_attempts=refused + retracted)
    assert refused <= ok, f"{refused} refusals for {ok} requests"
    assert retracted <= ok, f"{retracted} retractions for {ok} requests"
    return (
        f"{ok} of {len(calls)} complete, {len(calls) - ok} told 429; workers refused {refused} times, took "
        f"the pages of {retracted} back"
    )


@row(
    "F46", "every node is restarted in turn under load, two routers among them",
    "0 errors, 0 refusals and 0 wrong tokens in >= 500 requests", routers=2,
)  # fmt: skip
def f46(scene: Scene) -> str:
    asks = scene.known(workload(146, 50, prompt=(30, 200), max_tokens=(8, 24)))
    scene.promise = ALL_FINISH
    load = Load(scene, asks, width=8)
    names = list(scene.cluster.nodes)
    scene.victims.update(names)
    for name in reversed(names):
        before = load.num_done
        wait_until(lambda before=before: load.num_done >= before + 60, 60, "requests pass")
        scene.cluster.signal(name, signal.SIGTERM)
        assert scene.cluster.wait_down(name, 40) == DRAINED, name
        scene.cluster.start_node(name)
        scene.cluster.wait_whole(30)
        scene.rebase(name)
    wait_until(lambda: load.num_done >= 500, 60, "500 requests")
    calls = load.join()
    assert all(call.end == "finished" for call in calls), [call for call in calls if call.end != "finished"]
    return (
        f"{len(calls)} of {len(calls)} complete through {len(names)} restarts, {load.num_moved} moved to "
        "the other router"
    )


@row(
    "F46v", "workers of another layout and fingerprint take the place of all others under load, one by one, "
            "and back again",
    "0 errors, 0 refusals and 0 wrong tokens in >= 500 requests; no pair of both kinds", routers=2,
    flags={"router": {"local-prefill": "off"}},
)  # fmt: skip
def f46v(scene: Scene) -> str:
    asks = scene.known(workload(1461, 40, prompt=(30, 200), max_tokens=(8, 60)))
    scene.promise = ALL_FINISH
    load = Load(scene, asks, width=8)
    workers = ["prefill-1", "decode-1", "prefill-0", "decode-0"]
    scene.victims.update(workers)
    seen = set()
    for size, names in (("8", workers), ("16", workers[::-1])):  # there, and back
        for name in names:
            before = load.num_done
            wait_until(lambda before=before: load.num_done >= before + 40, 60, "requests pass")
            scene.cluster.nodes[name].flags["page-size"] = size
            scene.cluster.restart(name, graceful=True)
            scene.cluster.wait_whole(30)
            scene.rebase(name)
            seen |= {worker["fingerprint"] for worker in scene.cluster.status()["workers"]}
    wait_until(lambda: load.num_done >= 500, 60, "500 requests")
    calls = load.join()
    assert len(seen) == 2, "both kinds were there"
    assert all(call.end == "finished" for call in calls), [call for call in calls if call.end != "finished"]
    again = sum(call.attempts > 1 for call in calls)
    return (
        f"{len(calls)} of {len(calls)} complete through {2 * len(workers)} restarts, {again} in a second "
        "attempt"
    )


class Load:
    """A steady load in the background. Clients know all routers; one that is refused before anything was
    accepted, since a router is away, asks the next at once.
    """

    def __init__(self, scene: Scene, asks: list[Ask], width: int, total: int = 1 << 30) -> None:
        self._scene, self._asks, self._ports = scene, asks, ports(scene)
        self._left = total
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.done: list[Call] = []
        self.num_moved = 0
        self._is_endless = total == 1 << 30
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(width)]
        for thread in self._threads:
            thread.start()

    @property
    def num_done(self) -> int:
        return len(self.done)

    def join(self) -> list[Call]:
        """What became of all requests, once the total has come or, without one, from now on none is begun."""
        if self._is_endless:
            self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "clients still wait"
        return self.done

    def _run(self, at: int) -> None:
        while not self._stop.is_set() and self._is_due():
            call = self._ask(self._asks[at % len(self._asks)], at)
            at += 7
            with self._lock:
                self.done.append(call)

    def _is_due(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _ask(self, ask: Ask, at: int) -> Call:
        """At one router, else at the other."""
        traffic = self._scene.traffic
        for i in range(len(self._ports)):
            (call,) = traffic.start(ask, port=self._ports[(at + i) % len(self._ports)])
            traffic.wait([call])
            is_away = call.status == 503 or (call.end == "cut" and not call.status)
            if not is_away or i == len(self._ports) - 1:
                break
            with self._lock:
                traffic.history.remove(call)  # never accepted
                self.num_moved += 1
        return call
