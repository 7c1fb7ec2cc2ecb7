"""A prefill and a decode worker's link in a process of its own, forked from one that has imported torch.

Both know every byte beforehand, so that decode can tell whether what landed is right. `kind` is the kind of
slab: for "cuda_slab", shared memory of the host stands for that of a device. `fault` is "site:nth": there the
process kills itself with SIGKILL, as between any two instructions.
"""

import ctypes
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import torch
import zmq
from baton.cluster.net.transport_names import CUDA_SLAB, NIXL, SHM, TRANSPORTS, ZMQ_BLOCKS
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.page_order import PageOrder
from baton.kvtransfer.memory.host_device import HostDevice
from baton.kvtransfer.transport import Complete, Lost, Offer, Planes, PullRequest
from baton.kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender

LAYOUT = Layout(
    fingerprint="f",
    dtype="bfloat16",
    page_size=16,
    num_layers=24,
    num_kv_heads=1,
    head_dim=64,
    block_bytes=64 << 10,
)  # pages of 96 KiB, a room of 16 pages has 24 blocks
NUM_PAGES, PAGE_BYTES = 16, 96 << 10
NUM_ROOMS = 160  # a pair that asks for a slab again after ASK_AGAIN_S takes some 60 until then
SLOT_BYTES = 256 << 10  # runs of four blocks, so a room has six
CLONE_NEWNET = 0x40000000
UCX = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
}  # as between hosts without RDMA, and on no other network


def content() -> torch.Tensor:
    return torch.randint(
        0, 256, (NUM_PAGES, PAGE_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(5)
    )


def room_name(index: int) -> str:
    return f"{index:032x}"


def _dying(fault: str) -> Callable[[str], None]:
    """Counts how often each site is reached."""
    name, _, nth = fault.rpartition(":")
    counts: dict[str, int] = {}

    def reach(site: str) -> None:
        counts[site] = counts.get(site, 0) + 1
        if site == name and counts[site] == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)

    return reach


def _flipping(sender: ZmqBlocksSender, fault: str) -> Callable[[str], None]:
    """For faults "flip:nth:times": changes a byte of slabs for NIXL when the nth block and those after it are
    in their slots.
    """
    _, nth, times = fault.split(":")
    counts = [0]

    def reach(site: str) -> None:
        counts[0] += site == "sender:block"
        if site == "sender:block" and int(nth) <= counts[0] < int(nth) + int(times):
            for lane in sender._nixl._lanes.values():
                for slot in lane.slots._held.values():
                    lane.slab.slot(slot.index)[11] ^= 1

    return reach


def _limited(max_file: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file, max_file))


def _elsewhere() -> None:
    """Into a network namespace of its own, as a container has."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def _transports(kind: str) -> tuple[str, ...]:
    """Without a local one beside nixl, a pair of one host uses it too."""
    return (NIXL, ZMQ_BLOCKS) if kind == NIXL else TRANSPORTS[TRANSPORTS.index(kind) :]


def _device(kind: str) -> HostDevice | None:
    return HostDevice(PageOrder(NUM_PAGES), polls=2) if kind == CUDA_SLAB else None


def prefill(
    pipe: Connection,
    endpoint: str,
    kind: str,
    fault: str = "",
    max_file: int = 0,
    lease_s: float = 60.0,
    slab_bytes: int = 64 << 20,
    settings: Mapping[str, str] = UCX,
) -> None:
    """Offers its rooms, all ready, until the pipe closes. `settings`: of the environment."""
    os.environ.update(settings)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if max_file:
        _limited(max_file)
    planes = Planes(kv=content(), features=None)
    instance = f"{os.getpid():032x}"
    sender = ZmqBlocksSender(
        endpoint,
        instance,
        LAYOUT,
        planes,
        context=zmq.Context(),
        transports=_transports(kind),
        device=_device(kind),
        lease_s=lease_s,
        slab_bytes=slab_bytes,
    )
    sender.reach = _flipping(sender, fault) if fault.startswith("flip") else _dying(fault)
    for index in range(NUM_ROOMS):
        sender.offer(
            Offer(room=room_name(index), epoch=0, num_tokens=NUM_PAGES * 16, pages=tuple(range(NUM_PAGES)))
        )
        sender.advance(room_name(index), 0, NUM_PAGES * 16, 7)
    pipe.send(instance)
    while True:
        while not pipe.poll():
            sender.poll(0.05)
        if pipe.recv() is None:
            break
        pipe.send(sender.counters)
    sender.close()


def decode(
    pipe: Connection,
    endpoint: str,
    kind: str,
    fault: str = "",
    is_elsewhere: bool = False,
    settings: Mapping[str, str] = UCX,
) -> None:
    """Pulls the rooms that the pipe names as (prefill instance, first, last); reports how each ended."""
    os.environ.update(settings)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if is_elsewhere:
        _elsewhere()
    kv, right = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8), content()
    receiver = ZmqBlocksReceiver(
        f"{os.getpid():032x}", LAYOUT, Planes(kv=kv, features=None), context=zmq.Context(),
        transports=_transports(kind), device=_device(kind), slot_bytes=SLOT_BYTES, window=4,
    )  # fmt: skip
    receiver.reach = _dying(fault)
    pipe.send("ready")
    while True:
        while not pipe.poll():
            receiver.poll(0.05)
        order = pipe.recv()
        if order is None:
            break
        instance, first, last = order
        for index in range(first, last):
            kv.zero_()
            receiver.pull(
                PullRequest(
                    room=room_name(index), epoch=0, num_tokens=NUM_PAGES * 16, have=0,
                    pages=tuple(range(NUM_PAGES)),
                    features=None, endpoint=endpoint, peer_instance=instance,
                )
            )  # fmt: skip
            end, ended = time.monotonic() + 30.0, None
            while ended is None and time.monotonic() < end:
                ended = next((e for e in receiver.poll(0.05) if isinstance(e, Complete | Lost)), None)
            if isinstance(ended, Complete):
                num_blocks = {
                    CUDA_SLAB: ended.num_device_blocks,
                    SHM: ended.num_shm_blocks,
                    NIXL: ended.num_nixl_blocks,
                }.get(kind, 0)
                pipe.send(("complete", bool(torch.equal(kv, right)), num_blocks))
            else:
                pipe.send(("lost", getattr(ended, "kind", "silence"), 0))
    receiver.close()
