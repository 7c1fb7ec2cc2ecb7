"""Rows in which clients leave, do not read, ask what cannot be, or are too many."""

import itertools
import os
import random
import signal
import socket
import threading
import time

import psutil
from baton.cluster.process.failpoints import PAUSE_S
from baton.decode.local_prefill import LocalPrefill
from baton.prefill.worker import PrefillWorker
from baton.tests.faults.cluster import in_time, wait_until
from baton.tests.faults.history import Promise
from baton.tests.faults.rates import busy_pace, pace
from baton.tests.faults.rows import row
from baton.tests.faults.rows_process import LONG, UNCACHED, longest_pause, placed_again, play_fault, reached
from baton.tests.faults.testbed import Scene
from baton.tests.faults.traffic import Ask, Call, workload

HEARTBEAT_S = 1.0  # what /status says of a worker may be so old
CONTEXT = 2048


@row(
    "F07",
    "a prompt is too long, or its prefill aborts",
    "400 by both paths; no token of an incomplete KV cache",
    flags=UNCACHED,  # cached or pulled prompts would have no fourth chunk
)
def f07(scene: Scene) -> str:
    long = tuple([5] * CONTEXT)
    asks = [Ask(prompt=long, max_tokens=1, stream=stream) for stream in (True, False)]
    refused = scene.traffic.wait(scene.traffic.start(*asks))
    assert [call.status for call in refused] == [400, 400]
    assert all(str(CONTEXT) in call.error["message"] and not call.ids for call in refused)
    calls = play_fault(
        scene, "prefill-0", "prefill:chunk:4:abort", workload(107, 6, prompt=LONG, max_tokens=8), -6
    )
    scene.promise = Promise(statuses=(400,))  # these two were to be refused; the others have all finished
    assert all(call.end == "finished" for call in calls), calls
    return f"400 and 400; {placed_again(calls)}"


@row(
    "F13",
    "a client leaves in the middle of its prompt",
    "given back on both workers <= 200 ms; batch mates unaffected",
    quick=True,
    flags=UNCACHED,
)
def f13(scene: Scene) -> str:
    mates = scene.known(workload(113, 4, prompt=(30, 60), max_tokens=200))
    asks = workload(1130, 3, prompt=(1700, 1900), max_tokens=8)
    calls = scene.traffic.start(*mates)
    took = []
    for ask in asks:
        (call,) = scene.traffic.start(ask, leave_after=0.05)
        scene.traffic.wait([call])
        assert not call.ids, "it left before its first token"
        wait_until(
            lambda: num_open(scene) <= sum(not mate.ended for mate in calls),
            2,
            "Gone from both workers",
            pause=0.01,
        )
        took.append(time.monotonic() - call.ended)
    scene.traffic.wait(calls)
    assert all(mate.end == "finished" and mate.attempts == 1 for mate in calls)
    in_time(sorted(took)[1], 0.2, f"given back after {took} s")
    return f"gone after {', '.join(f'{1000 * t:.0f}' for t in took)} ms; 4 of 4 batch mates equal"


def num_open(scene: Scene) -> int:
    """Rooms of the router: one is open until both workers have said that nothing of it is left."""
    return scene.cluster.status()["router"]["open_rooms"]


@row(
    "F14",
    "a client leaves after prefill is done, before decode began",
    "prefill's pages free <= 1 s, while decode is deaf and mute",
    quick=True,
    prefill=1,
    decode=1,
)
def f14(scene: Scene) -> str:
    asks = scene.known(workload(114, 1, prompt=LONG, max_tokens=40))
    scene.arm("decode-0", "receiver:release:1:pause")
    (call,) = scene.traffic.start(*asks)
    reached([call], 1)
    time.sleep(0.3)  # decode's link sleeps now, else a second token would have come
    scene.traffic.cancel(call)
    left = time.monotonic()
    prefill = scene.cluster.nodes["prefill-0"].pid

    def is_free() -> bool:
        return not any(str(prefill) in name for name in scene.cluster.held())

    wait_until(is_free, 1.0 + HEARTBEAT_S, "prefill's pages free")
    freed = time.monotonic() - left
    wait_until(
        lambda: scene.cluster.worker("decode-0").get("state") == "stalled",
        3,
        "decode still sleeps: the router waits for it",
    )
    wait_until(
        lambda: scene.cluster.is_whole() and not scene.cluster.held(), PAUSE_S + 1, "decode's pages free, too"
    )
    slept = time.monotonic() - left
    assert call.end == "cancelled"
    assert len(call.ids) == 1, "prefill's token came; decode had not begun"
    return (
        f"prefill free after {freed:.2f} s, decode {slept:.2f} s (it slept for {PAUSE_S:g} s), heartbeat "
        "included"
    )


@row(
    "F15",
    "200 clients leave in the middle of their streams",
    "no page held after 2 s; the others' streams equal, in one attempt, at >= 95 % of their pace beside "
    "clients that stay",
    prepare={"decode": ["baton.tests.faults.rows_storms:steps_of_a_device"]},
)
def f15(scene: Scene) -> str:
    asks = scene.known(workload(115, 40, prompt=(30, 200), max_tokens=24))
    others = scene.known(workload(1150, 4, prompt=(30, 100), max_tokens=400))
    scene.promise = Promise(statuses=(429,))
    paces: dict[bool, list[float]] = {
        False: [],
        True: [],
    }  # in turn, since what else runs changes; the best counts
    for leaves, count in ((False, 80), (True, 100)) * 2:
        steady = scene.traffic.start(*others)
        wait_until(lambda steady=steady: all(call.ids for call in steady), 10, "the steady streams run")
        began = time.monotonic()
        crowd = arrivals(scene, [asks[i % len(asks)] for i in range(count)], leaves=leaves)
        paces[leaves].append(pace(steady, began, began + PACE_S))
        scene.traffic.cancel(*(call for call in steady if not call.ended))
        left = time.monotonic()
        assert all(call.attempts in (0, 1) for call in steady)
        assert sum(call.end == "cancelled" for call in crowd) >= (count // 2 if leaves else 0), "they left"
        wait_until(lambda: not scene.cluster.held(), 2.0 + HEARTBEAT_S, "every page free")
    took = time.monotonic() - left
    stayed, gone = max(paces[False]), max(paces[True])
    assert gone >= 0.95 * stayed, (
        f"{gone:.0f} tokens/s beside clients that leave, {stayed:.0f} beside those that stay"
    )
    return (
        f"free after {took:.2f} s (heartbeat included); the others: {gone:.0f} tokens/s, {stayed:.0f} beside "
        f"clients that stay, longest gap {longest_pause(steady):.2f} s"
    )


ARRIVALS_PER_S = 10.0  # below what the cluster serves
PACE_S = 7.0  # of both crowds, so that the streams that are compared are equally long


def arrivals(scene: Scene, asks: list[Ask], *, leaves: bool) -> list[Call]:
    """Clients at a fixed rate; each stays, or leaves at a token before its last. Returns at their end."""
    rng = random.Random(115)
    pause = threading.Event()
    calls: list[Call] = []
    began = time.monotonic()
    for i, ask in enumerate(asks):
        pause.wait(max(0.0, began + i / ARRIVALS_PER_S - time.monotonic()))
        at = rng.randrange(1, ask.max_tokens) if leaves else None
        calls += scene.traffic.start(ask, leave_at=at)
    return scene.traffic.wait(calls)


def leave_in_groups(scene: Scene, asks: list[Ask], rng: random.Random, *, width: int) -> list[Call]:
    """Clients that leave before anything, at a random moment, or at a random token; `width` at a time."""
    calls: list[Call] = []
    running: list[Call] = []
    for ask in asks:
        while len(running) >= width:
            running = [call for call in running if not call.ended]
            time.sleep(0.001)
        way = rng.random()
        moment = (
            {"leave_after": rng.uniform(0, 0.25)}
            if way < 0.6
            else {"leave_at": rng.randint(1, ask.max_tokens)}
        )
        running += scene.traffic.start(ask, **({} if way > 0.95 else moment))
        calls.append(running[-1])
    return scene.traffic.wait(calls)


def play_cancels(scene: Scene, count: int) -> str:
    asks = scene.known(workload(1, 60, prompt=(16, 500), max_tokens=(4, 40)))
    rng = random.Random(count)
    began = time.monotonic()
    calls = leave_in_groups(scene, [rng.choice(asks) for _ in range(count)], rng, width=24)
    seconds = time.monotonic() - began
    ends = {end: sum(call.end == end for call in calls) for end in ("cancelled", "finished", "error")}
    assert ends["cancelled"] >= count // 4, f"too few left: {ends}"
    wait_until(lambda: not scene.cluster.held(), 5, lambda: f"nothing held: {scene.cluster.held()}")
    final = scene.traffic.run(asks[:8])
    assert all(call.end == "finished" for call in final), "and it serves on"
    return f"{count} clients in {seconds:.0f} s: {ends}"


@row("cancels", "10000 clients leave at random moments", "nothing is held 5 s later; no descriptor leaks")
def cancels(scene: Scene) -> str:
    scene.promise = Promise(statuses=(429,))
    return play_cancels(scene, 10000)


@row(
    "cancel500",
    "500 clients leave at random moments",
    "nothing is held 5 s later; no descriptor leaks",
    quick=True,
)
def cancel500(scene: Scene) -> str:
    return play_cancels(scene, 500)


@row(
    "F16",
    "a client does not read for 6 s while its stream is fast",
    "router grows <= 8 MB; the others' tokens equal, 99 % of their gaps <= 1.2 x and 20 ms of those beside "
    "one that reads",
)
def f16(scene: Scene) -> str:
    silent = Ask(prompt=(9,) * 20, max_tokens=2000)
    scene.known([silent])
    others = scene.known(workload(116, 4, prompt=(30, 100), max_tokens=300))
    (reading,) = scene.traffic.start(silent)
    beside = scene.traffic.wait(scene.traffic.start(*others))
    scene.traffic.cancel(reading)
    wait_until(lambda: not scene.cluster.held(), 5, "the twin that reads is gone")
    router = psutil.Process(scene.cluster.nodes["router"].pid)
    before = router.memory_info().rss
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", scene.cluster.port("router")))
        body = silent.body(scene.cluster.model).replace(
            b'"return_token_ids"', b'"logprobs": 5, "return_token_ids"'
        )
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        calls = scene.traffic.start(*others)
        until = time.monotonic() + 6.0
        peak = 0
        while time.monotonic() < until or not all(call.ended for call in calls):
            peak = max(peak, router.memory_info().rss - before)
            time.sleep(0.1)
        scene.traffic.wait(calls)
        assert peak <= 8 << 20, f"the router grew by {peak >> 20} MB"
        data = read_to_the_end(sock)
    assert data.count(b'"token_ids"') > 500, "when it reads, all of its tokens are there"
    assert data.rstrip(b"0\r\n").endswith(b"data: [DONE]"), data[-200:]
    normal, after = usual_gap(beside), usual_gap(calls)
    gaps = f"99 % of the others' gaps <= {1000 * after:.0f} ms, {1000 * normal:.0f} ms beside a reader"
    assert after <= 1.2 * normal + 0.02, gaps
    return f"router +{peak / 2**20:.1f} MB, {gaps}"


def usual_gap(calls: list[Call]) -> float:
    """Seconds within which 99 of 100 tokens follow their predecessors."""
    gaps = sorted(b[0] - a[0] for call in calls for a, b in itertools.pairwise(call.arrivals))
    return gaps[int(len(gaps) * 0.99)]


def read_to_the_end(sock: socket.socket) -> bytes:
    sock.settimeout(20)
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = sock.recv(1 << 16)
        assert part, "cut"
        data += part
    return data


POISON = (77,) * 5  # the beginning of a prompt


@row(
    "F49",
    "a prompt crashes every worker that computes it",
    "three workers die of it, then 500 for it alone",
)
def f49(scene: Scene) -> str:
    asks = scene.known(workload(149, 12, prompt=(30, 100), max_tokens=30))
    scene.promise = Promise(statuses=(500,))
    names = [node.name for node in scene.cluster.workers]
    for name in names:
        scene.victims.add(name)
        scene.cluster.restart(name, prepare=["baton.tests.faults.rows_clients:fear_poison"])
        scene.cluster.nodes[name].keeps_alive = True
    scene.cluster.wait_whole(20)
    scene.rebase(*names)
    starts = sum(node.num_starts for node in scene.cluster.workers)
    scene.traffic.run(asks * 8)  # the retry budget is a share of all requests
    calls = scene.traffic.start(*asks)
    (poisoned,) = scene.traffic.start(Ask(prompt=(*POISON, *range(3, 200)), max_tokens=8))
    scene.traffic.wait([*calls, poisoned])
    assert poisoned.status == 500, poisoned
    assert poisoned.error["code"] == "request_quarantined"
    assert all(call.end == "finished" for call in calls), calls
    scene.cluster.wait_whole(10)
    deaths = sum(node.num_starts for node in scene.cluster.workers) - starts
    assert deaths <= 3, f"{deaths} workers died"
    took = poisoned.ended - poisoned.started
    return f"{deaths} deaths, 500 {poisoned.error['code']} after {took:.1f} s; {placed_again(calls)}"


def fear_poison() -> None:
    """In a worker: a prompt that begins with POISON kills it, be it computed by prefill or by decode."""
    on_prefill, on_decode = PrefillWorker._launch, LocalPrefill._launch

    def look_at(rooms):
        if any(tuple(room.request.prompt_ids[: len(POISON)]) == POISON for room in rooms):
            os.kill(os.getpid(), signal.SIGKILL)

    def die_on_prefill(self, chunks):
        look_at(chunk.room for chunk in chunks)
        return on_prefill(self, chunks)

    def die_on_decode(self, rooms, *, has_streams):
        look_at(rooms)
        return on_decode(self, rooms, has_streams=has_streams)

    PrefillWorker._launch, LocalPrefill._launch = die_on_prefill, die_on_decode


@row(
    "F51",
    "five times as many requests as the cluster serves",
    "429 with Retry-After for the rest; admitted ones complete; goodput >= 90 % of the peak, first tokens <= "
    "3 x",
    flags={**UNCACHED, "router": {"max-queue": "32"}},
    prepare={"decode": ["baton.tests.faults.rows_storms:steps_of_a_device"]},
)
def f51(scene: Scene) -> str:
    asks = scene.known(workload(151, 40, prompt=(100, 300), max_tokens=64))
    scene.promise = Promise(statuses=(429,))
    per_second, base = served_at_most(scene, asks)
    calls = open_loop(scene, asks, 5 * per_second, OVERLOAD_S)
    _, behind = served_at_most(scene, asks)
    peak = min(busy_pace(base), busy_pace(behind))  # what else the machine does is not the cluster's doing
    served, refused = ([c for c in calls if c.end == end] for end in ("finished", "error"))
    assert len(served) + len(refused) == len(calls)
    assert len(refused) > len(calls) // 3, "that was no overload"
    assert all(c.status == 429 for c in refused), refused
    goodput = busy_pace(calls)
    ttft, ttft_base = p99(served), p99(base)
    assert goodput >= 0.9 * peak, f"{goodput:.0f} tokens/s, {peak:.0f} at the peak"
    assert ttft <= 3 * ttft_base, f"99 % of first tokens within {ttft:.2f} s, {ttft_base:.2f} s at the peak"
    return (
        f"{len(served)} served at {goodput:.0f} tokens/s (peak {peak:.0f}/s), {len(refused)} x 429, "
        f"p99 first token {ttft:.2f} s (peak {ttft_base:.2f} s)"
    )


OVERLOAD_S = 8.0


def p99(calls: list[Call]) -> float:
    """The first tokens' 99th percentile, in seconds."""
    ttfts = sorted(call.ttft for call in calls)
    return ttfts[int(len(ttfts) * 0.99)]


def served_at_most(scene: Scene, asks: list[Ask]) -> tuple[float, list[Call]]:
    """Requests a second when the cluster is busy and nobody waits in vain, and those requests."""
    many = [asks[i % len(asks)] for i in range(240)]
    began = time.monotonic()
    calls = scene.traffic.run(many, width=48)
    return len(many) / (time.monotonic() - began), calls


def open_loop(scene: Scene, asks: list[Ask], rate: float, seconds: float) -> list[Call]:
    """Requests at a fixed rate, however the cluster fares."""
    calls: list[Call] = []
    done = threading.Event()
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        due = int((time.monotonic() - began) * rate) - len(calls)
        calls += scene.traffic.start(*(asks[(len(calls) + i) % len(asks)] for i in range(due)))
        done.wait(0.005)
    return scene.traffic.wait(calls)
