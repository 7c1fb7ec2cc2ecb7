"""Shared by both processes of `baton bench transfer`: the measured transports, and the memory that is
moved."""

from dataclasses import dataclass

import torch
from msgspec import Struct

from ...cluster.net.transport_names import CUDA_SLAB, NIXL, SHM, ZMQ_BLOCKS, has_nixl
from ...cluster.protocol.messages import Layout
from ...cluster.security.ciphers import AES_128_GCM, CRC32C, CURVE
from ...engine.kv.page_order import PageOrder
from ...kvtransfer.transport import Planes

PAGE_BYTES = 1 << 20
PAGE_TOKENS = 16
GUARDS = ("plain", CRC32C, AES_128_GCM, CURVE)  # plain: no digest either
MEMCPY, TCP, UNIX, PEER_COPY = "memcpy", "tcp socket", "unix socket", "peer copy"
DEVICE_GUARD = "mix32"  # the digest of device memory


class Where(Struct, frozen=True):
    """The sending process's endpoints and keys, for the receiving process."""

    instance: str
    endpoints: dict[str, str]  # by `Way.source`
    tcp_port: int


ROOMS_IN_A_ROW = 4  # of the rate without the beginning and the end of a hand-off


class Done(Struct, frozen=True):
    """The answer to an order, with the sending process's CPU time in seconds.

    `ready_at`: monotonic time at which an offered room had all its tokens; 0.0 for other orders.
    """

    cpu_s: float
    ready_at: float = 0.0


@dataclass(frozen=True)
class Way:
    """A measured combination: transport, `link` (tcp or ipc) and `guard` (one of GUARDS, or DEVICE_GUARD)."""

    transport: str  # zmq_blocks, nixl, shm or cuda_slab
    link: str
    guard: str
    window: int
    num_rooms: int = 1  # rooms at a time

    @property
    def name(self) -> str:
        """The name in the report."""
        transport = f"zmq {self.link}" if self.transport == ZMQ_BLOCKS else self.transport
        rooms = f", {self.num_rooms} rooms" if self.num_rooms > 1 else ""
        return f"{transport}, {self.guard}, window {self.window}{rooms}"

    @property
    def is_keyed(self) -> bool:
        return self.guard in (AES_128_GCM, CURVE)

    @property
    def ciphers(self) -> tuple[str, ...]:
        """The cipher list that both transports are given."""
        return (self.guard if self.is_keyed else CRC32C,)

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport list that both ends are given."""
        return tuple(dict.fromkeys((self.transport, ZMQ_BLOCKS)))

    @property
    def source(self) -> str:
        """The name of the prefill endpoint that serves it.

        It does not depend on the window, which decode sets.
        """
        return f"{self.transport} {self.link} {self.guard}"


class SourceSetup(Struct, frozen=True):
    """The settings of both processes, sent as the first order."""

    num_pages: int
    block_bytes: int
    source: str  # device of prefill's pages
    target: str  # device of decode's pages
    folder: str  # for sockets
    keys: str  # prefill's

    @property
    def is_on_gpus(self) -> bool:
        """Whether both processes have their pages on a GPU."""
        return self.source.startswith("cuda") and self.target.startswith("cuda")


def ways(windows: list[int], *, is_on_gpus: bool) -> list[Way]:
    """All measured combinations, without the plain copies and sockets."""
    made = [
        Way(ZMQ_BLOCKS, link, guard, window)
        for link in ("tcp", "ipc")
        for guard in GUARDS
        for window in windows
    ]
    if has_nixl():
        made += [Way(NIXL, "tcp", CRC32C, window) for window in windows]
    made += [Way(SHM, "ipc", guard, window) for guard in ("plain", CRC32C) for window in windows]
    for window in windows if is_on_gpus else []:
        made += [Way(CUDA_SLAB, "ipc", DEVICE_GUARD, window, num_rooms) for num_rooms in (1, ROOMS_IN_A_ROW)]
    return made


def layout(block_bytes: int) -> Layout:
    """A layout with pages of `PAGE_BYTES` bytes and blocks of `block_bytes` bytes."""
    return Layout(
        fingerprint="bench",
        dtype="bfloat16",
        page_size=PAGE_TOKENS,
        num_layers=256,
        num_kv_heads=1,
        head_dim=64,
        block_bytes=block_bytes,
    )


def memory(num_pages: int, seed: int | None, device: str = "cpu") -> Planes:
    """Pages of touched memory, filled with random bytes, or with ones if `seed` is None."""
    if seed is None:
        kv = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8)
        kv.fill_(1)  # so that no page fault is measured
    else:
        generator = torch.Generator().manual_seed(seed)
        kv = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, generator=generator)
    return Planes(kv=kv.to(device), features=None, order=PageOrder(num_pages, device))


def no_digest(data: object, seed: int = 0) -> int:
    """Takes the place of crc32c for the guard `plain`."""
    return 0
