"""Many hand-offs over `cuda_slab` with cancels and kills: no wrong byte, no page and no device byte is left.

    python -m baton.tests.gpu.soak_handoff --rooms 10000 --kills 50 --pairs 10 --from cuda:0 --to cuda:1
    python -m baton.tests.gpu.soak_handoff --rooms 400 --kills 6 --from cpu --to cpu

A prefill and a decode process run under this one, which kills either of them at random moments and starts its
successor. `--pairs` of them work side by side, because a process with CUDA starts slowly. Decode knows
prefill's pages and compares what landed. Half of the prompts end behind a forward of some milliseconds, so
that their last blocks go unasked. On the CPU, shared memory of the host stands for that of a device. Each
line of progress tells what was reached so far; with `--limit`, no hand-off begins after that time. The exit
code is 0 if every law held, and all hand-offs and kills were made.
"""

import argparse
import logging
import multiprocessing
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import zmq
from baton.cluster.net.transport_names import TRANSPORTS
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.transport import Complete, Dropped, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

LAYOUT = Layout(
    fingerprint="f", dtype="bfloat16", page_size=16, num_layers=24, num_kv_heads=1, head_dim=64,
    block_bytes=64 << 10,
)  # pages of 96 KiB, so that blocks cut them  # fmt: skip
PAGE_BYTES, NUM_PAGES, SLOT_BYTES = 96 << 10, 512, 512 << 10
MAX_PAGES, BATCH, LEASE_S = 40, 16, 2.0
CANCEL_SHARE = 0.15
SLEEP_CYCLES, MAX_FORWARD_S = 1_000_000, 0.004  # half a millisecond of the device; what follows on the host
PROGRESS_S = 10.0

Order = tuple[str, int, tuple[int, ...], float]  # room, tokens, prefill's pages, seconds to its cancel or 0


def content(device: str) -> torch.Tensor:
    noise = torch.Generator().manual_seed(11)
    pages = torch.randint(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, generator=noise)
    return pages.to(device)


def stand_in(device: str) -> HostDevice | None:
    return HostDevice(PageOrder(NUM_PAGES), polls=2) if device == "cpu" else None


def prepare(device: str) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)


def prefill(pipe: Connection, device: str, endpoint: str) -> None:
    """Offers the rooms of each order; the order "report" is answered by (open rooms, slabs)."""
    prepare(device)
    planes = Planes(kv=content(device), features=None, order=PageOrder(NUM_PAGES, device))
    instance = secrets.token_hex(16)
    sender = ZmqBlocksSender(
        endpoint, instance, LAYOUT, planes, context=zmq.Context(), transports=TRANSPORTS,
        lease_s=LEASE_S, device=stand_in(device),
    )  # fmt: skip
    pipe.send(instance)
    rng, cancels = random.Random(instance), list[tuple[float, str]]()
    forwards: list[tuple[float, str, int]] = []  # end, room, tokens
    opened: set[str] = set()
    while True:
        if pipe.poll():
            order = pipe.recv()
            if order is None:
                break
            if order == "report":
                pipe.send((len(opened), sender.counters["device_slabs"], slab_bytes_of(sender)))
                continue
            for room, num_tokens, pages, cancel_s in order:
                sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=pages))
                sender.advance(room, 0, num_tokens // 2)
                opened.add(room)
                if rng.random() < 0.5:
                    launch(planes, pages)
                    sender.launched(room, 0, num_tokens // 2, num_tokens)
                    forwards.append((time.monotonic() + rng.random() * MAX_FORWARD_S, room, num_tokens))
                else:
                    sender.advance(room, 0, num_tokens, 7)
                if cancel_s:
                    cancels.append((time.monotonic() + cancel_s, room))
        for forward in [due for due in forwards if time.monotonic() >= due[0]]:
            forwards.remove(forward)
            sender.advance(forward[1], 0, forward[2], 7)
        for at, room in [due for due in cancels if time.monotonic() >= due[0]]:
            cancels.remove((at, room))
            sender.release(room, 0, "cancel")
            opened.discard(room)
        for event in sender.poll(0.001):
            assert isinstance(event, Released | Dropped)
            opened.discard(event.room)
    sender.close()


def slab_bytes_of(sender: ZmqBlocksSender) -> int:
    """The device memory that prefill holds for slabs, those that decode may still have mapped too."""
    slabs = sender._device_slabs
    assert slabs is not None
    return sum(slab.size for slab in (*(lane.slab for lane in slabs._lanes.values()), *slabs._ended))


def launch(planes: Planes, pages: tuple[int, ...]) -> None:
    """Keeps the device busy in the place of a forward that writes `pages`."""
    if planes.kv.is_cuda and planes.order is not None:
        torch.cuda._sleep(SLEEP_CYCLES)
        planes.order.stamp(pages)


def decode(pipe: Connection, device: str, endpoint: str) -> None:
    """Pulls the rooms of each order (prefill's instance, rooms); answers with the count of each outcome."""
    prepare(device)
    right, kv = content(device), torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8, device=device)
    planes = Planes(kv=kv, features=None, order=PageOrder(NUM_PAGES, device))
    receiver = ZmqBlocksReceiver(
        secrets.token_hex(16), LAYOUT, planes, context=zmq.Context(), transports=TRANSPORTS,
        lease_s=LEASE_S, device=stand_in(device), slot_bytes=SLOT_BYTES,
    )  # fmt: skip
    free = list(range(NUM_PAGES))
    if device != "cpu":
        torch.cuda.synchronize()
    pipe.send("ready")
    while True:
        while not pipe.poll():
            receiver.poll(0.001)
        order = pipe.recv()
        if order is None:
            break
        if order == "report":
            counters = receiver.counters
            report = (receiver.session.num_rooms, NUM_PAGES - len(free), counters["digest_mismatches"])
            pipe.send((*report, counters["device_bytes"]))
            continue
        instance, rooms = order
        outcomes = dict.fromkeys(("complete", "on device", "cancelled", "lost", "wrong"), 0)
        targets: dict[str, tuple[list[int], tuple[int, ...]]] = {}
        cancels: list[tuple[float, str]] = []
        waiting = list(rooms)
        while waiting or targets:
            while waiting and len(waiting[0][2]) <= len(free) and len(targets) < 8:
                room, num_tokens, pages, cancel_s = waiting.pop(0)
                taken = [free.pop() for _ in pages]
                kv[taken] = 0
                if device != "cpu":
                    torch.cuda.synchronize()
                targets[room] = taken, pages
                if cancel_s:
                    cancels.append((time.monotonic() + cancel_s, room))
                receiver.pull(
                    PullRequest(
                        room=room, epoch=0, num_tokens=num_tokens, have=0, pages=tuple(taken),
                        features=None, endpoint=endpoint, peer_instance=instance,
                    )
                )  # fmt: skip
            for at, room in [due for due in cancels if time.monotonic() >= due[0]]:
                cancels.remove((at, room))
                if room in targets:
                    receiver.release(room, 0, "cancel")
                    free += targets.pop(room)[0]
                    outcomes["cancelled"] += 1
            for event in receiver.poll(0.001):
                if not isinstance(event, Complete | Lost):
                    continue
                taken, pages = targets.pop(event.room)
                if isinstance(event, Complete):
                    outcomes["complete"] += 1
                    outcomes["on device"] += event.num_device_blocks == event.num_blocks
                    outcomes["wrong"] += not torch.equal(kv[taken], right[list(pages)])
                else:
                    outcomes["lost"] += 1
                free += taken
        pipe.send(outcomes)
    receiver.close()


class Worker:
    """One of the two processes, and its successors."""

    def __init__(self, role: object, device: str, endpoint: str) -> None:
        # its server has imported torch, and has not touched the device
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([ZmqBlocksSender.__module__])
        self._arguments = (role, device, endpoint)
        self.start()

    def start(self) -> None:
        role, device, endpoint = self._arguments
        self.pipe, theirs = self._context.Pipe()
        self.process = self._context.Process(target=role, args=(theirs, device, endpoint), daemon=True)
        self.process.start()
        theirs.close()
        self.hello = self.hear()

    def hear(self) -> object:
        """The next answer. Raises EOFError if the process was killed."""
        if not self.pipe.poll(120):
            raise SystemExit("a worker is silent for two minutes")
        return self.pipe.recv()

    def kill_after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        return timer

    def restart(self) -> None:
        self.process.join()
        self.pipe.close()
        self.start()

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join(30)


def rooms_of(rng: random.Random) -> list[Order]:
    rooms = []
    for _ in range(BATCH):
        pages = tuple(rng.randrange(NUM_PAGES) for _ in range(rng.randint(1, MAX_PAGES)))
        tokens = 16 * len(pages) - rng.randrange(16)
        rooms.append((secrets.token_hex(16), tokens, pages, rng.random() * 0.02))
    return rooms


@dataclass
class Found:
    """The outcomes of one pair, and the laws that it broke."""

    totals: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def soak_pair(
    found: Found, num_rooms: int, num_kills: int, source: str, target: str, seed: int, until: float
) -> None:
    """Hand-offs between one pair of processes, until the monotonic time `until`."""
    rng = random.Random(seed)
    endpoint = f"ipc://{tempfile.mkdtemp()}/kv"
    workers = [Worker(prefill, source, endpoint), Worker(decode, target, endpoint)]
    num_batches = -(-num_rooms // BATCH)
    kills = set(rng.sample(range(num_batches), min(num_kills, num_batches)))
    for number in range(num_batches):
        if time.monotonic() > until:
            found.totals["batches not made"] += num_batches - number
            break
        rooms = rooms_of(rng)
        fates = [rng.choice(("prefill", "decode")) if rng.random() < CANCEL_SHARE else "" for _ in rooms]
        mine, theirs = (
            [(*room[:3], room[3] if fate == who else 0.0) for room, fate in zip(rooms, fates, strict=True)]
            for who in ("prefill", "decode")
        )
        timer = victim = None
        if number in kills:
            victim = rng.choice(workers)
            timer = victim.kill_after(rng.random() * 0.03)
        try:
            workers[0].pipe.send(mine)
            workers[1].pipe.send((workers[0].hello, theirs))
            found.totals.update(workers[1].hear())  # type: ignore[arg-type]
        except (EOFError, OSError):
            found.totals["decode killed"] += 1
        if timer is not None and victim is not None:
            timer.join()
            victim.restart()
            found.totals["kills"] += 1
    time.sleep(2 * LEASE_S + 1.0)
    workers[0].pipe.send("report")
    open_rooms, num_slabs, _ = workers[0].hear()  # type: ignore[misc]
    workers[1].pipe.send("report")
    pulling, pages, mismatches, device_bytes = workers[1].hear()  # type: ignore[misc]
    workers[1].stop()
    time.sleep(LEASE_S)
    workers[0].pipe.send("report")
    _, _, slab_bytes = workers[0].hear()  # type: ignore[misc]
    workers[0].stop()
    found.totals.update({"refused digests": int(mismatches), "device bytes of the last": int(device_bytes)})
    laws = {
        f"{found.totals['wrong']} hand-offs landed wrong bytes": found.totals["wrong"] == 0,
        f"{open_rooms} rooms are open on prefill": open_rooms == 0,
        f"{pulling} rooms are open on decode": pulling == 0,
        f"{pages} pages are held on decode": pages == 0,
        f"{num_slabs} slabs on prefill, one is used": num_slabs <= 1,
        f"{slab_bytes} bytes of slabs are held for nobody": slab_bytes == 0,
        f"{found.totals['batches not made']} batches of {BATCH} were not made in time": (
            found.totals["batches not made"] == 0
        ),
        "few hand-offs took device memory": found.totals["on device"] > 0.8 * found.totals["complete"],
    }
    found.faults += [text for text, is_kept in laws.items() if not is_kept]


def soak(
    num_rooms: int, num_kills: int, num_pairs: int, source: str, target: str, seed: int, limit_s: float
) -> list[str]:
    """The faults that were found. Each pair does its share of the rooms and kills."""
    began = time.monotonic()
    shares = [
        (-(-num_rooms // num_pairs), num_kills // num_pairs + (pair < num_kills % num_pairs))
        for pair in range(num_pairs)
    ]
    found = [Found() for _ in shares]
    with ThreadPoolExecutor(num_pairs) as pool:
        running = {
            pool.submit(soak_pair, one, *share, source, target, seed + pair, began + limit_s)
            for pair, (one, share) in enumerate(zip(found, shares, strict=True))
        }
        left_over: set[Future[None]] = set(running)
        while left_over:
            left_over = wait(left_over, PROGRESS_S).not_done
            print(f"{time.monotonic() - began:.0f} s: {reached(found)}", flush=True)
        for one in running:
            one.result()
    print(f"hand-offs {source} to {target}, {num_pairs} pairs, {time.monotonic() - began:.0f} s")
    return [f"pair {pair}: {fault}" for pair, one in enumerate(found) for fault in one.faults]


def reached(found: Sequence[Found]) -> dict[str, int]:
    """The outcomes of all pairs so far."""
    totals: Counter[str] = Counter()
    for one in found:
        totals.update(dict(one.totals))
    return dict(totals)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rooms", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--from", dest="source", default="cuda:0")
    parser.add_argument("--to", dest="target", default="cuda:1")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of processes, side by side")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which none begins")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    shares = options.rooms, options.kills, options.pairs
    faults = soak(*shares, options.source, options.target, options.seed, options.limit)
    for fault in faults:
        print(f"BROKEN: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
