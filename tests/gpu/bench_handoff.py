"""Times of hand-offs over `cuda_slab` between two processes, of the shape of an 8B model: run it as a module.

    python -m baton.tests.gpu.bench_handoff cuda:0 cuda:1

One room at a time, as one client makes them, for several prompt lengths. A last table shows where the time of
a hand-off goes: from the pull to the first run in a slot, from there to the last byte in its page.
"""

import multiprocessing
import os
import secrets
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch
import zmq
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.transport import Complete, Dropped, Lost, Offer, Planes, PullRequest, Released
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

LAYOUT = Layout(
    fingerprint="f", dtype="bfloat16", page_size=16, num_layers=32, num_kv_heads=8, head_dim=128,
    block_bytes=4 << 20,
)  # pages of 2 MiB  # fmt: skip
NUM_PAGES = 600
LENGTHS = (256, 1024, 2048, 8192)
ROUNDS = 30
TRANSPORTS = ("cuda_slab", "shm", "zmq_blocks")


def planes(device: str) -> Planes:
    kv = torch.randint(0, 255, (NUM_PAGES, 2 << 20), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    return Planes(kv=kv, features=None, order=PageOrder(NUM_PAGES, device))


def prefill(pipe: Connection, device: str, endpoint: str) -> None:
    sender = ZmqBlocksSender(
        endpoint, "1" * 32, LAYOUT, planes(device), context=zmq.Context(), transports=TRANSPORTS
    )
    pipe.send(sender.endpoint)
    while True:
        while not pipe.poll():
            sender.poll(0.0005)
        order = pipe.recv()
        if order is None:
            break
        room, num_tokens = order
        pages = tuple(torch.randperm(NUM_PAGES)[: num_tokens // 16].tolist())
        sender.offer(Offer(room=room, epoch=0, num_tokens=num_tokens, pages=pages))
        sender.advance(room, 0, num_tokens, 7)
        while not any(isinstance(event, Released | Dropped) for event in sender.poll(0.5)):
            pass
    sender.close()


def hand_over(receiver: ZmqBlocksReceiver, pipe: Connection, endpoint: str, num_tokens: int) -> Complete:
    room = secrets.token_hex(16)
    pipe.send((room, num_tokens))
    pages = tuple(torch.randperm(NUM_PAGES)[: num_tokens // 16].tolist())
    time.sleep(0.003)  # prefill waits in its poll for the Attach, as in a worker
    receiver.pull(
        PullRequest(
            room=room, epoch=0, num_tokens=num_tokens, have=0, pages=pages, features=None,
            endpoint=endpoint, peer_instance="1" * 32,
        )
    )  # fmt: skip
    while True:
        for event in receiver.poll(0.5):
            if isinstance(event, Lost):
                raise SystemExit(f"lost: {event}")
            if isinstance(event, Complete):
                return event


def main(source: str, target: str) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    endpoint = f"ipc:///tmp/baton-handoff-{os.getpid()}"
    process = context.Process(target=prefill, args=(there, source, endpoint), daemon=True)
    process.start()
    receiver = ZmqBlocksReceiver(
        "2" * 32, LAYOUT, planes(target), context=zmq.Context(), transports=TRANSPORTS
    )
    assert here.poll(90)
    endpoint = here.recv()
    for num_tokens in LENGTHS:
        times = []
        for number in range(ROUNDS + 3):
            done = hand_over(receiver, here, endpoint, num_tokens)
            assert done.num_device_blocks == done.num_blocks, done
            if number >= 3:
                times.append(done.seconds * 1000)
        times.sort()
        rate = num_tokens * (128 << 10) / statistics.median(times) / 1e6
        print(
            f"{source} to {target}, {num_tokens} tokens: median {statistics.median(times):.3f} ms, "
            f"best {times[0]:.3f}, p90 {times[int(len(times) * 0.9)]:.3f}, {rate:.0f} GB/s",
            flush=True,
        )
    receiver.close()
    here.send(None)
    process.join(10)


if __name__ == "__main__":
    main(*sys.argv[1:3])
