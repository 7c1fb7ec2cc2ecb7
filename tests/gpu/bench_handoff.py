"""Times of hand-offs over `cuda_slab` between two processes, of the shape of an 8B model: run it as a module.

    python -m baton.tests.gpu.bench_handoff cuda:0 cuda:1
    python -m baton.tests.gpu.bench_handoff cuda:0 cuda:1 --features 12288 --trace 1024

One room at a time, as one client makes them, for several prompt lengths. Decode attaches while prefill
computes. A time runs from the end of the forward on prefill to the `Complete` on decode. The device sleeps in
the place of a forward; `--late` leaves out `launched`, so that prefill copies nothing before `advance`.
`--trace` shows what each process did during the median hand-off of that length.
"""

import argparse
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import zmq
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.cuda_device import CudaDevice
from baton.kvtransfer.transport import Complete, Dropped, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

PAGE_TOKENS, NUM_LAYERS = 16, 32
LENGTHS = (256, 1024, 2048, 8192)
TRANSPORTS = ("cuda_slab", "shm", "zmq_blocks")
P, D = "1" * 32, "2" * 32
SLEEP_CYCLES = 12_000_000  # some 7 ms

Trace = list[tuple[float, str, str]]  # monotonic seconds, process, what it did


def layout(width: int) -> Layout:
    """Pages of 2 MiB, and features of `width` elements per token."""
    features = {"feature_ids": [2, 16, 29], "feature_width": width} if width else {}
    return Layout(
        fingerprint="f", dtype="bfloat16", page_size=PAGE_TOKENS, num_layers=NUM_LAYERS, num_kv_heads=8,
        head_dim=128, block_bytes=4 << 20, **features,
    )  # fmt: skip


def planes(device: str, num_pages: int, width: int) -> Planes:
    def noise(page_bytes: int) -> torch.Tensor:
        return torch.randint(0, 255, (num_pages, page_bytes), dtype=torch.uint8, device=device)

    made = Planes(
        kv=noise(2 << 20),
        features=noise(PAGE_TOKENS * width * 2) if width else None,
        order=PageOrder(num_pages, device),
    )
    torch.cuda.synchronize()
    return made


def traced(trace: Trace, who: str, owner: object, name: str, label: Callable[..., str]) -> None:
    """Notes the begin and the end of each call of a method."""
    method = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        text = label(*args, **options)
        trace.append((time.monotonic(), who, f"{text} ("))
        try:
            return method(*args, **options)
        finally:
            trace.append((time.monotonic(), who, f") {text}"))

    setattr(owner, name, call)


def trace_end(trace: Trace, who: str, end: Any) -> None:
    """Notes frames in and out, moves and their ends."""
    traced(
        trace, who, end, "_receive_frames", lambda peer, frames: f"in {sum(f.nbytes for f in frames)} bytes"
    )
    traced(trace, who, end, "_transmit", lambda peer, header, payload: f"out {len(header)} bytes")
    device = end._device if who == "D" else end._device_slabs._device
    assert isinstance(device, CudaDevice)
    traced(trace, who, device, "move", lambda runs, pages, **_: f"move of {len(runs)} runs")
    traced(trace, who, device, "finished", lambda move: f"done {len(move.counts)} runs")


def prefill(pipe: Connection, device: str, endpoint: str, options: argparse.Namespace) -> None:
    torch.cuda.set_device(device)
    num_pages = max(options.lengths) // PAGE_TOKENS + 8
    here = planes(device, num_pages, options.features)
    sender = ZmqBlocksSender(
        endpoint, P, layout(options.features), here, context=zmq.Context(), transports=TRANSPORTS
    )
    trace: Trace = []
    if options.trace:
        trace_end(trace, "P", sender)
    pipe.send(sender.endpoint)
    while True:
        while not pipe.poll():
            sender.poll(0.0005)
        order = pipe.recv()
        if order is None:
            break
        room, num_tokens = order
        pages = tuple(torch.randperm(num_pages)[: num_tokens // PAGE_TOKENS].tolist())
        sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=pages))
        trace.clear()
        torch.cuda._sleep(SLEEP_CYCLES)  # the forward, during which decode attaches
        here.order.stamp(pages)
        forward = torch.cuda.Event()
        forward.record()
        until = time.monotonic() + 0.002
        while time.monotonic() < until:
            sender.poll(0.0005)
        if not options.late:
            sender.launched(room, 0, 0, num_tokens)
        while not forward.query():
            sender.poll(0)
        began = time.monotonic()
        sender.advance(room, 0, num_tokens, 7)
        while not any(isinstance(event, Released | Dropped) for event in sender.poll(0.5)):
            pass
        pipe.send((began, list(trace)))
    sender.close()


def hand_over(
    receiver: ZmqBlocksReceiver, pipe: Connection, endpoint: str, num_tokens: int, trace: Trace, width: int
) -> tuple[float, float, Trace]:
    """Seconds behind the forward, seconds by the receiver, and what happened."""
    room, num_pages = secrets.token_hex(16), num_tokens // PAGE_TOKENS
    pages = tuple(torch.randperm(num_pages + 8)[:num_pages].tolist())
    features = (
        torch.zeros(num_pages, PAGE_TOKENS * width * 2, dtype=torch.uint8, device="cuda") if width else None
    )
    torch.cuda.synchronize()
    pipe.send((room, num_tokens))
    trace.clear()
    receiver.pull(
        PullRequest(
            room=room, epoch=0, num_tokens=num_tokens, have=0, pages=pages, features=features,
            endpoint=endpoint, peer_instance=P,
        )
    )  # fmt: skip
    done = None
    while done is None:
        for event in receiver.poll(0.5):
            if isinstance(event, Lost):
                raise SystemExit(f"lost: {event}")
            if isinstance(event, Complete):
                done = event
    ended = time.monotonic()
    assert done.num_device_blocks == done.num_blocks, done
    while not pipe.poll():
        receiver.poll(0.001)
    began, theirs = pipe.recv()
    events = sorted([*theirs, *trace, (ended, "D", "Complete")])
    return ended - began, done.seconds, [(at - began, who, what) for at, who, what in events]


def show(trace: Trace) -> None:
    for at, who, what in trace:
        if at >= 0:
            print(f"  {at * 1000:8.3f} ms  {'' if who == 'P' else ' ' * 34}{who} {what}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", nargs="?", default="cuda:0")
    parser.add_argument("target", nargs="?", default="cuda:1")
    parser.add_argument("--features", type=int, default=0, help="feature elements per token, 12288 of EAGLE3")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--trace", type=int, default=0, metavar="LENGTH")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    endpoint = f"ipc:///tmp/baton-handoff-{os.getpid()}"
    process = context.Process(target=prefill, args=(there, options.source, endpoint, options), daemon=True)
    process.start()
    torch.cuda.set_device(options.target)
    num_pages = max(options.lengths) // PAGE_TOKENS + 8
    mine = planes(options.target, num_pages, 0)
    receiver = ZmqBlocksReceiver(
        D, layout(options.features), mine, context=zmq.Context(), transports=TRANSPORTS
    )
    trace: Trace = []
    if options.trace:
        trace_end(trace, "D", receiver)
    assert here.poll(90)
    endpoint = here.recv()
    token_bytes = (128 << 10) + 2 * options.features
    for num_tokens in options.lengths:
        found = [
            hand_over(receiver, here, endpoint, num_tokens, trace, options.features)
            for _ in range(options.rounds + 3)
        ][3:]
        found.sort(key=lambda one: one[0])
        times, heard = [one[0] * 1000 for one in found], statistics.median(one[1] for one in found)
        median, p90 = statistics.median(times), times[int(len(times) * 0.9)]
        rate = num_tokens * token_bytes / median / 1e6
        print(
            f"{options.source} to {options.target}, {num_tokens} tokens: median {median:.3f} ms, best "
            f"{times[0]:.3f}, p90 {p90:.3f}, {rate:.0f} GB/s; {heard * 1000:.3f} ms from the announcement",
            flush=True,
        )
        if num_tokens == options.trace:
            show(found[len(found) // 2][2])
    receiver.close()
    here.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
