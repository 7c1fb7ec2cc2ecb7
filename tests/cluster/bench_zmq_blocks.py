"""Throughput of the KV hand-off between two threads of this host: `python tests/cluster/bench_zmq_blocks.py [MiB]`."""

import secrets
import sys
import tempfile
import threading
import time

import torch
import zmq
from baton.cluster.messages import Layout
from baton.kvtransfer.transport import Complete, Offer, Planes, PullRequest
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

ROUNDS = 5


def bench_layout(page_kib: int) -> Layout:
    """A layout whose kv pages have `page_kib` KiB."""
    return Layout(fingerprint="bench", dtype="bfloat16", page_size=16, num_layers=page_kib // 4, num_kv_heads=1, head_dim=64)


def measure(endpoint: str, layout: Layout, num_pages: int) -> tuple[float, float]:
    """Best and median GB/s of ROUNDS hand-offs of `num_pages` pages."""
    page_bytes = layout.num_layers * 2 * 16 * 64 * 2
    planes = [Planes(kv=torch.randint(0, 255, (num_pages, page_bytes), dtype=torch.uint8), features=None) for _ in "pd"]
    instances = [secrets.token_hex(16) for _ in "pd"]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = ZmqBlocksSender(endpoint, instances[0], layout, planes[0], context=context)
    receiver = ZmqBlocksReceiver(instances[1], layout, planes[1], context=context)
    stopping = threading.Event()
    rooms = [secrets.token_hex(16) for _ in range(ROUNDS)]
    pages = tuple(range(num_pages))

    def serve() -> None:
        for room in rooms:
            sender.offer(Offer(room=room, epoch=0, num_tokens=num_pages * 16, pages=pages))
            sender.advance(room, 0, num_pages * 16, 1)
        while not stopping.is_set():
            sender.poll(0.05)
        sender.close()

    thread = threading.Thread(target=serve)
    thread.start()
    rates = []
    for room in rooms:
        receiver.pull(
            PullRequest(
                room=room, epoch=0, num_tokens=num_pages * 16, have=0, pages=pages, features=None,
                endpoint=sender.endpoint, peer_instance=instances[0],
            )
        )
        start = time.perf_counter()
        while not any(isinstance(event, Complete) for event in receiver.poll(1.0)):
            pass
        rates.append(num_pages * page_bytes / (time.perf_counter() - start) / 1e9)
    assert torch.equal(planes[0].kv, planes[1].kv)
    stopping.set()
    thread.join()
    receiver.close()
    context.term()
    return max(rates), sorted(rates)[ROUNDS // 2]


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with tempfile.TemporaryDirectory() as folder:
        for name, endpoint in (("tcp", "tcp://127.0.0.1:0"), ("ipc", f"ipc://{folder}/kv")):
            for page_kib in (368, 2048):
                best, median = measure(endpoint, bench_layout(page_kib), mib * 1024 // page_kib)
                print(f"{name} pages of {page_kib} KiB: {best:.2f} GB/s best, {median:.2f} median of {ROUNDS}")


if __name__ == "__main__":
    main()
