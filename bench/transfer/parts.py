"""Shared by both processes of `baton bench transfer`: the measured transports, and the memory that is moved."""

from dataclasses import dataclass

import torch
from msgspec import Struct

from ...cluster.protocol.messages import Layout
from ...cluster.security.ciphers import AES_128_GCM, CRC32C, CURVE
from ...engine.kv.page_order import PageOrder
from ...kvtransfer.transport import Planes

PAGE_BYTES = 1 << 20
PAGE_TOKENS = 16
GUARDS = ("plain", CRC32C, AES_128_GCM, CURVE)  # plain: not even a digest
MEMCPY, TCP, UNIX = "memcpy", "tcp socket", "unix socket"


class Where(Struct, frozen=True):
    """What the receiving process must know of the sending one."""

    instance: str
    endpoints: dict[str, str]  # by `Way.source`
    tcp_port: int


class Done(Struct, frozen=True):
    """An order was carried out, with this much CPU time of the sending process."""

    cpu_s: float


@dataclass(frozen=True)
class Way:
    """A transport as it is measured: `link` is tcp or ipc, `guard` one of GUARDS."""

    transport: str  # zmq_blocks or shm
    link: str
    guard: str
    window: int

    @property
    def name(self) -> str:
        """As the table shows it."""
        transport = "shm" if self.transport == "shm" else f"zmq {self.link}"
        return f"{transport}, {self.guard}, window {self.window}"

    @property
    def is_keyed(self) -> bool:
        return self.guard in (AES_128_GCM, CURVE)

    @property
    def ciphers(self) -> tuple[str, ...]:
        """As both transports take them."""
        return (self.guard if self.is_keyed else CRC32C,)

    @property
    def source(self) -> str:
        """The endpoint of prefill that serves it; the window is decode's affair."""
        return f"{self.transport} {self.link} {self.guard}"


class SourceSetup(Struct, frozen=True):
    """What both processes measure with; the first order."""

    num_pages: int
    block_bytes: int
    source: str  # device of prefill's pages
    target: str  # of decode's
    folder: str  # for sockets
    keys: str  # prefill's


def ways(windows: list[int]) -> list[Way]:
    """All that are measured beside the sockets and memcpy."""
    made = [
        Way("zmq_blocks", link, guard, window)
        for link in ("tcp", "ipc")
        for guard in GUARDS
        for window in windows
    ]
    return made + [Way("shm", "ipc", guard, window) for guard in ("plain", CRC32C) for window in windows]


def layout(block_bytes: int) -> Layout:
    """A layout of pages of `PAGE_BYTES` bytes each."""
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
    """Pages that exist: random bytes, or ones without a seed."""
    if seed is None:
        kv = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8)
        kv.fill_(1)  # so that no page fault is measured
    else:
        generator = torch.Generator().manual_seed(seed)
        kv = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, generator=generator)
    return Planes(kv=kv.to(device), features=None, order=PageOrder(num_pages, device))


def no_digest(data: object, seed: int = 0) -> int:
    """In place of crc32c where the way is plain."""
    return 0
