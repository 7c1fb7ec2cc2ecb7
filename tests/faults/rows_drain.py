"""Rows in which a process is asked to leave, under load."""

import signal
import threading
import time

from baton.tests.faults.bed import Scene
from baton.tests.faults.cluster import wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import ALL_FINISH, UNCACHED, placed_again, reached
from baton.tests.faults.traffic import Ask, Call, workload

DRAINED = 0


def ask_to_leave(scene: Scene, name: str) -> float:
    """SIGTERM; seconds until the router places nothing there any more."""
    scene.victims.add(name)
    pid = scene.cluster.nodes[name].pid
    began = time.monotonic()
    scene.cluster.signal(name, signal.SIGTERM)
    wait_until(lambda: not scene.cluster.is_known(name, pid), 2, f"{name} out of rotation", pause=0.005)
    return time.monotonic() - began


@row(
    "F42", "SIGTERM to prefill under load",
    "out of rotation at once; stays until its blocks are pulled; 0 failed, exit 0", quick=True, flags=UNCACHED,
)
def f42(scene: Scene) -> str:
    asks = scene.known(workload(142, 12, prompt=(400, 600), max_tokens=8))
    scene.promise = ALL_FINISH
    calls = scene.traffic.start(*asks)

    def are_placed() -> bool:
        """All of them came, and some are with prefill-0: what comes to it now comes late, and is placed again."""
        num_came = scene.cluster.status()["router"]["open_rooms"] + sum(bool(call.ended) for call in calls)
        return num_came >= len(calls) and scene.cluster.worker("prefill-0").get("placed", 0) >= 3

    wait_until(are_placed, 10, "prompts at prefill-0", pause=0.01)
    out = ask_to_leave(scene, "prefill-0")
    late = scene.traffic.start(*asks[:4])
    assert scene.cluster.wait_down("prefill-0", 20) == DRAINED
    scene.traffic.wait([*calls, *late])
    again = [call.attempts for call in calls if call.attempts > 1]  # those whose Prefill met the Goodbye on its way
    assert max(again, default=2) == 2, again
    assert len(again) <= len(calls) // 2, "its own prompts were finished there"
    assert out <= 0.5, f"out of rotation after {out:.2f} s"
    return f"out of rotation after {1000 * out:.0f} ms, {placed_again([*calls, *late])}"


@row("F43", "SIGTERM to decode under load", "streams finish or go on elsewhere: 0 failed, exit 0", quick=True)
def f43(scene: Scene) -> str:
    asks = scene.known(workload(143, 8, prompt=(30, 200), max_tokens=100))
    scene.promise = ALL_FINISH
    calls = scene.traffic.start(*asks)
    reached(calls, 5)
    out = ask_to_leave(scene, "decode-0")
    assert scene.cluster.wait_down("decode-0", 35) == DRAINED
    scene.traffic.wait(calls)
    return f"out of rotation after {1000 * out:.0f} ms, {placed_again(calls)}"


@row("F44", "SIGTERM to the router under load", "running streams finish, new requests are refused at once, exit 0")
def f44(scene: Scene) -> str:
    asks = scene.known(workload(144, 10, prompt=(30, 200), max_tokens=150))
    calls = scene.traffic.start(*asks)
    wait_until(lambda: all(call.ids for call in calls), 20, "all streams run")
    scene.victims.add("router")
    scene.cluster.signal("router", signal.SIGTERM)
    time.sleep(0.1)
    late = scene.traffic.wait(scene.traffic.start(*asks[:4]), 3)
    for call in late:
        call.may_be_cut = not call.status  # nobody listens: not accepted
    assert all(call.status == 503 or call.end == "cut" for call in late), late
    scene.traffic.wait(calls)
    assert all(call.end == "finished" for call in calls), calls
    assert scene.cluster.wait_down("router", 5) == DRAINED
    scene.cluster.heal()
    return f"{placed_again(calls)}, {len(late)} late ones refused"


@row(
    "F45", "a second SIGTERM to the router, or the end of its grace",
    "every client gets an error frame, then the process leaves", flags={"router": {"drain-timeout-s": "2"}},
)
def f45(scene: Scene) -> str:
    asks = scene.known(workload(145, 4, prompt=(30, 100), max_tokens=1200))
    took = []
    for is_second in (True, False):
        calls = scene.traffic.start(*asks)
        wait_until(lambda calls=calls: all(call.ids for call in calls), 20, "all streams run")
        scene.victims.add("router")
        scene.cluster.signal("router", signal.SIGTERM)
        if is_second:
            wait_until(lambda: "router drains" in scene.cluster.nodes["router"].said(), 2, "the router drains")
            scene.cluster.signal("router", signal.SIGTERM)
        began = time.monotonic()
        scene.traffic.wait(calls, 10)
        assert all(call.end in ("error", "finished") for call in calls), calls
        assert any(call.end == "error" and call.ids for call in calls), calls
        assert scene.cluster.wait_down("router", 5) == DRAINED
        took.append(time.monotonic() - began)
        scene.cluster.heal()
        scene.rebase("router")
    return f"error frames, gone {took[0]:.1f} s after the second signal; {took[1]:.1f} s after the first one alone"


@row("F46", "every node is restarted in turn under load", "0 errors and 0 wrong tokens in >= 500 accepted requests")
def f46(scene: Scene) -> str:
    asks = scene.known(workload(146, 50, prompt=(30, 200), max_tokens=(8, 24)))
    scene.promise = Promise(all_finish=True)
    load = Load(scene, asks, width=8)
    names = list(scene.cluster.nodes)
    scene.victims.update(names)
    for name in [*names[1:], names[0]]:
        before = load.num_done
        wait_until(lambda before=before: load.num_done >= before + 60, 60, "requests pass")
        scene.cluster.signal(name, signal.SIGTERM)
        assert scene.cluster.wait_down(name, 40) == DRAINED, name
        scene.cluster.start_node(name)
        scene.cluster.wait_whole(30)
        scene.rebase(name)
    wait_until(lambda: load.num_done >= 500, 60, "500 requests")
    calls = load.stop()
    assert all(call.end == "finished" for call in calls), [call for call in calls if call.end != "finished"]
    return f"{len(calls)} of {len(calls)} accepted requests complete, {load.num_refused} refused while the router was away"


class Load:
    """A steady load in the background; a client asks again when it was refused before anything was accepted."""

    def __init__(self, scene: Scene, asks: list[Ask], width: int) -> None:
        self._scene, self._asks = scene, asks
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.done: list[Call] = []
        self.num_refused = 0
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(width)]
        for thread in self._threads:
            thread.start()

    @property
    def num_done(self) -> int:
        return len(self.done)

    def stop(self) -> list[Call]:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        return self.done

    def _run(self, at: int) -> None:
        traffic = self._scene.traffic
        while not self._stop.is_set():
            (call,) = traffic.start(self._asks[at % len(self._asks)])
            traffic.wait([call])
            at += 7
            with self._lock:
                if call.status == 503 or (call.end == "cut" and not call.status):
                    self.num_refused += 1
                    traffic.history.remove(call)  # never accepted
                else:
                    self.done.append(call)
            if call.end != "finished":
                self._stop.wait(0.1)
