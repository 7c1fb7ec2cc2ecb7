"""`baton bench transfer`: the rate of KV blocks from one process into another one's pages.

Each transport is measured once per round, so that all see the same machine. A second process holds the
source. A transport's time is that of a hand-off behind a forward: decode has attached before the blocks are
ready, and the clock runs from then to the last byte. Pages are 1 MiB of touched memory, on the host or on a
GPU. "of memcpy", "of socket" and "of peer copy" are medians of the ratios within a round. The first
compares with a copy in this process. The second compares with a plain socket of the same kind (tcp, or unix
for ipc) that sends the same bytes. Both work in host memory. The third compares with one copy of all bytes
between the two GPUs. A way with several rooms has them all ready at once; its rate is that of hand-offs in a
row, where the beginning and the end of one cost nothing.
"""

import argparse
import json
import os
import platform
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
import zmq

from ...cluster.distribution import install_command
from ...cluster.errors import TransferError
from ...cluster.net.transport_names import CUDA_SLAB, NIXL, SHM, TRANSPORTS, has_nixl
from ...cluster.process.progress import JobProgress
from ...cluster.protocol.kv_messages import BLOCK_BYTES, block_bytes_of
from ...cluster.security.keyring import Peer, load_keyring, make_key, write_key, write_peers
from ...kvtransfer.memory.malloc_tuning import keep_blocks
from ...kvtransfer.transport import Complete, Lost, PullRequest
from ...kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver
from ..arguments import at_least
from .parts import (
    MEMCPY,
    PAGE_BYTES,
    PAGE_TOKENS,
    PEER_COPY,
    TCP,
    UNIX,
    Done,
    SourceSetup,
    Way,
    Where,
    layout,
    memory,
    no_digest,
    ways,
)

PROG = "baton bench transfer"
CONNECT_S, CONNECT_PAUSE_S = 20.0, 0.2  # of a pair that uses NIXL
BLOCK_KIB, DEVICE_BLOCK_KIB = BLOCK_BYTES >> 10, block_bytes_of(128 << 10) >> 10
MAX_BLOCK_KIB = 64 << 10  # upper bound of a layout's block size
A = TypeVar("A", Where, Done)


class TransferBench:
    """The receiving process, with the sending process as its child. A context manager."""

    def __init__(
        self, num_pages: int, block_bytes: int = 1 << 20, source: str = "cpu", target: str = "cpu"
    ) -> None:
        self.child_cpu_s = 0.0  # CPU seconds of all orders so far
        self._num_pages, self._block_bytes, self._devices = num_pages, block_bytes, (source, target)
        self._planes, self._spare = memory(num_pages, None, target), memory(num_pages, seed=2)
        self._host = self._planes if target == "cpu" else memory(num_pages, None)
        self._on_source: torch.Tensor | None = None
        self._stack = ExitStack()
        self._receivers: dict[Way, ZmqBlocksReceiver] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def __enter__(self) -> "TransferBench":
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        _make_keys(self._folder)
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        self._child = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, *safe, "-m", "baton.bench.transfer.source"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self._stack.callback(self._child.kill)
        source, target = self._devices
        if target != "cpu":
            torch.cuda.set_device(target)  # as a worker's process has it
        keys = str(self._folder / "prefill")
        setup = SourceSetup(self._num_pages, self._block_bytes, source, target, str(self._folder), keys)
        self.is_on_gpus = setup.is_on_gpus
        self._order(setup)
        self._where = self._receive(Where)
        tcp = self._stack.enter_context(socket.create_connection(("127.0.0.1", self._where.tcp_port)))
        unix = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.connect(f"{self._folder}/raw")
        self._raw = {"tcp": tcp, "unix": unix}
        return self

    def __exit__(self, *_: object) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(10)
        self._stack.close()

    @property
    def num_bytes(self) -> int:
        """Bytes moved by each measurement."""
        return self._num_pages * PAGE_BYTES

    def copy(self) -> float:
        """Copies all blocks within this process. Returns seconds."""
        source, target = self._spare.kv.numpy(), self._host.kv.numpy()
        began = time.perf_counter()
        for page in range(self._num_pages):
            np.copyto(target[page], source[page])
        return time.perf_counter() - began

    def peer_copy(self) -> float:
        """Copies all bytes from the one GPU to the other by one order to the driver. Returns seconds."""
        source, target = self._devices
        if self._on_source is None:
            self._on_source = torch.zeros(self.num_bytes, dtype=torch.uint8, device=source)
        for device in self._devices:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        self._planes.kv.view(-1).copy_(self._on_source)
        torch.cuda.synchronize(target)
        return time.perf_counter() - began

    def socket(self, kind: str) -> float:
        """Receives all blocks through a plain socket. Returns seconds."""
        target = self._host.kv.numpy()
        self._order({"raw": kind})
        began = time.perf_counter()
        for page in range(self._num_pages):
            view, at = target[page].data, 0
            while at < PAGE_BYTES:
                at += self._raw[kind].recv_into(view[at:])
        seconds = time.perf_counter() - began
        self.child_cpu_s += self._receive(Done).cpu_s
        return seconds

    def pull(self, way: Way) -> float:
        """Pulls a room with all blocks. Returns seconds from the end of its forward to its last byte.

        The first pull of a way that takes time to connect is repeated until its blocks take that way.
        """
        is_new, end = way not in self._receivers, time.monotonic() + CONNECT_S
        while True:
            seconds, num_others = self._pull(way)
            if not num_others:
                return seconds
            if not (is_new and way.transport == NIXL and time.monotonic() < end):
                raise TransferError(f"{way.name}: {num_others} blocks came another way; the log says why")
            time.sleep(CONNECT_PAUSE_S)

    def _pull(self, way: Way) -> tuple[float, int]:
        """Seconds per room with all blocks, and the number of blocks that took another way."""
        receiver = self._receivers.get(way) or self._open(way)
        rooms = [secrets.token_hex(16) for _ in range(way.num_rooms)]
        self._order({"offer": way.source, "rooms": rooms})
        for room in rooms:
            receiver.pull(
                PullRequest(
                    room=room,
                    epoch=0,
                    num_tokens=self._num_pages * PAGE_TOKENS,
                    have=0,
                    pages=tuple(range(self._num_pages)),
                    features=None,
                    endpoint=self._where.endpoints[way.source],
                    peer_instance=self._where.instance,
                )
            )
        num_left, num_others = len(rooms), 0
        while num_left:
            for event in receiver.poll(1.0):
                if isinstance(event, Lost):
                    raise TransferError(f"{way.name}: {event.reason}")
                if isinstance(event, Complete):
                    num_left -= 1
                    num_others += event.num_blocks - _num_as_wanted(way, event)
        ended_at = time.monotonic()
        receiver.poll(0.0)  # what decode says about the last blocks
        done = self._receive(Done)
        self.child_cpu_s += done.cpu_s
        return (ended_at - done.ready_at) / len(rooms), num_others

    def _open(self, way: Way) -> ZmqBlocksReceiver:
        receiver = ZmqBlocksReceiver(
            secrets.token_hex(16),
            layout(self._block_bytes),
            self._planes,
            context=self._context,
            keyring=load_keyring(str(self._folder / "decode"), "decode") if way.is_keyed else None,
            ciphers=way.ciphers,
            window=way.window,
            transports=way.transports,
        )
        if way.guard == "plain":
            receiver.use_crc(no_digest)
        self._receivers[way] = receiver
        return receiver

    def _order(self, order: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._child.stdin.flush()

    def _receive(self, kind: type[A]) -> A:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise TransferError("the sending process ended; its lines above say why")
        return msgspec.json.decode(line, type=kind)


@dataclass
class Found:
    """The samples of one transport over all rounds."""

    rates: list[float] = field(default_factory=list)  # GB/s
    cpu: list[float] = field(default_factory=list)  # seconds of both processes per GB


def measure(
    bench: TransferBench, num_rounds: int, windows: list[int], transports: Sequence[str] = TRANSPORTS
) -> dict[str, Found]:
    """Measures every one of `transports` in each round, after an uncounted round that opens the links."""
    found: dict[str, Found] = {}
    gigabytes = bench.num_bytes / 1e9
    tries: list[tuple[str, Callable[[], float]]] = [
        (MEMCPY, bench.copy),
        (TCP, partial(bench.socket, "tcp")),
        (UNIX, partial(bench.socket, "unix")),
    ]
    if bench.is_on_gpus:
        tries.append((PEER_COPY, bench.peer_copy))
    made = [way for way in ways(windows, is_on_gpus=bench.is_on_gpus) if way.transport in transports]
    tries += [(way.name, partial(bench.pull, way)) for way in made]
    progress = JobProgress()
    progress.begin("measuring")
    for number in range(num_rounds + 1):
        for at, (name, attempt) in enumerate(tries):
            share = (number + at / len(tries)) / (num_rounds + 1)
            progress.show(share, f"round {number} of {num_rounds}: {name}")
            cpu_s = -time.process_time() - bench.child_cpu_s
            seconds = attempt()
            cpu_s += time.process_time() + bench.child_cpu_s
            if number:
                entry = found.setdefault(name, Found())
                entry.rates.append(gigabytes / seconds)
                entry.cpu.append(cpu_s / gigabytes)
    progress.close()
    return found


def summary(found: dict[str, Found]) -> list[dict[str, object]]:
    """One row of figures per transport."""
    rows: list[dict[str, object]] = []
    for name, way in found.items():
        is_tcp = "tcp" in name or name.startswith(NIXL)
        reference = found[TCP if is_tcp else UNIX]
        rows.append(
            {
                "way": name,
                "best": max(way.rates),
                "median": statistics.median(way.rates),
                "of_memcpy": _ratio(way, found[MEMCPY]),
                "of_socket": _ratio(way, reference) if name.startswith(("zmq", NIXL)) else None,
                "of_peer_copy": _ratio(way, found[PEER_COPY]) if PEER_COPY in found else None,
                "cpu_s_per_gb": statistics.median(way.cpu),
                "rates": way.rates,
            }
        )
    return rows


def as_table(rows: Sequence[dict[str, object]], machine: str) -> str:
    """The report for the terminal, as markdown."""
    head = ["way", "GB/s best", "median", "of memcpy", "of socket", "CPU s/GB, both"]
    is_on_gpus = any(row["of_peer_copy"] is not None for row in rows)
    head += ["of peer copy"] if is_on_gpus else []
    lines = [machine, "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        of_socket = f"{row['of_socket']:.2f}" if row["of_socket"] is not None else ""
        cells = (
            f"{row['best']:.2f} | {row['median']:.2f} | {row['of_memcpy']:.2f} | {of_socket} | "
            f"{row['cpu_s_per_gb']:.2f}"
        )
        cells += f" | {row['of_peer_copy']:.2f}" if is_on_gpus else ""
        lines.append(f"| {row['way']} | {cells} |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """One line about the measured machine."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{cores} cores of {_processor()}, {platform.system()} {platform.release().split('-')[0]}, load "
        f"{load:.1f} before"
    )


def device(name: str) -> str:
    """An argparse type: a device of this machine. Any other text is a usage error."""
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    if name not in names:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no device of this machine, which has {', '.join(names)}"
        )
    return name


def block_kib(text: str) -> int:
    """An argparse type: a valid block size of a layout, in KiB. Any other text is a usage error."""
    size = at_least(4)(text)
    if size > MAX_BLOCK_KIB:
        raise argparse.ArgumentTypeError(f"{size} is above {MAX_BLOCK_KIB}")
    return size


def chosen_block_bytes(options: argparse.Namespace) -> int:
    """The bytes of a block, by default those that suit both devices."""
    are_gpus = "cpu" not in (options.source, options.target)
    return int(options.block_kib or (DEVICE_BLOCK_KIB if are_gpus else BLOCK_KIB)) << 10


def main(argv: Sequence[str]) -> int:
    """Runs `baton bench transfer` and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--mib", type=at_least(8), default=128, help="bytes moved by each measurement (default 128)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=7, help="measurements of each way (default 7)")
    parser.add_argument(
        "--windows", type=at_least(1), nargs="+", default=[4, 8], help="blocks in flight (default 4 8)"
    )
    parser.add_argument(
        "--block-kib",
        type=block_kib,
        help=f"size of a block (default {BLOCK_KIB}; {DEVICE_BLOCK_KIB} where both sides are GPUs, as "
        "workers have it for 128 KiB a token)",
    )
    where_from, where_to = (
        "device of the source, such as cuda:0 (default cpu)",
        "of the destination (default cpu)",
    )
    parser.add_argument(
        "--from", dest="source", type=device, default="cpu", metavar="DEVICE", help=where_from
    )
    parser.add_argument("--to", dest="target", type=device, default="cpu", metavar="DEVICE", help=where_to)
    parser.add_argument(
        "--only", nargs="+", choices=TRANSPORTS, default=TRANSPORTS, help="transports (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args(list(argv))
    if list(options.only) == [NIXL] and not has_nixl():
        sys.stderr.write(f"{PROG}: {NIXL} is not installed: {install_command('nixl')}\n")
        return 2
    torch.set_num_threads(1)
    keep_blocks()  # as workers do
    where, block_bytes = machine(), chosen_block_bytes(options)
    try:
        with TransferBench(options.mib, block_bytes, options.source, options.target) as bench:
            found = measure(bench, options.rounds, list(dict.fromkeys(options.windows)), options.only)
    except TransferError as error:
        sys.stderr.write(f"{PROG}: {error}\n")
        return 1
    rows = summary(found)
    if options.json:
        document = {
            "machine": where,
            "mib": options.mib,
            "block_kib": block_bytes >> 10,
            "rounds": options.rounds,
            "ways": rows,
        }
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        sys.stdout.write(as_table(rows, where))
    return 0


def _num_as_wanted(way: Way, done: Complete) -> int:
    """The blocks that took the way's transport."""
    counts = {SHM: done.num_shm_blocks, NIXL: done.num_nixl_blocks, CUDA_SLAB: done.num_device_blocks}
    return counts.get(way.transport, done.num_blocks)


def _ratio(way: Found, reference: Found) -> float:
    return statistics.median(a / b for a, b in zip(way.rates, reference.rates, strict=True))


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else "an unknown processor"


def _make_keys(folder: Path) -> None:
    """Writes a key pair for each side and admits it on the other."""
    keys = {role: make_key(role, "bench") for role in ("prefill", "decode")}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        (folder / role).mkdir(mode=0o700)
        write_key(folder / role, keys[role])
        write_peers(folder / role, [Peer(role=other, name="bench", public=keys[other].public)])
