"""Reads tensors of files into memory in several threads, with pinned staging on the way to a GPU.

A tensor is cut into pieces, and small ones that follow each other in a file are read together: the experts of
a model are tens of thousands of tensors. Each thread takes the next read in the order of the files. On a GPU
a thread reads into pinned memory while its previous read is still being copied. A piece of another dtype is
converted on the device that it is for.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

import torch

from ...kernels.fp8_scales import quantise_rows_fp8
from ..errors import CheckpointError
from .weight_cuts import Cut

logger = logging.getLogger(__name__)

MAX_THREADS = 8
PIECE_BYTES = 16 << 20
BYTES_PER_THREAD = 64 << 20  # a smaller load takes fewer threads
NUM_SLOTS = 2  # pinned buffers per thread: one is read while the other is copied
MAX_GAP = 64 << 10  # bytes between two pieces that a read passes over instead of ending
TELL_EVERY_S = 2.0
BAR_WIDTH = 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements of `dtype` at offset `first` of `path`, for `target`.

    With `scales` `[rows]`, `target` `[rows, width]` is e4m3, and each row is rounded with a scale of its own.
    With a `stride` in bytes the elements are runs of `run` bytes whose first bytes are `stride` apart. With
    `columns`, the elements are rows of `width`, of which the target gets these columns.
    """

    path: Path
    first: int
    dtype: torch.dtype
    target: torch.Tensor
    scales: torch.Tensor | None = None
    run: int = 0
    stride: int = 0
    columns: slice | None = None
    width: int = 0

    @property
    def num_bytes(self) -> int:
        count = self.target.numel() if self.columns is None else self.target.shape[0] * self.width
        return count * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of the byte behind the elements, which follow each other."""
        return self.first + self.num_bytes

    @property
    def is_plain(self) -> bool:
        """Whether the target has the very bytes of the file."""
        return self.target.dtype == self.dtype and self.target.is_contiguous()

    @property
    def is_staged(self) -> bool:
        """Whether the bytes of the file cannot be read to the target itself."""
        return self.target.device.type == "cuda" or not self.is_plain

    def take(self, stored: torch.Tensor) -> None:
        """Converts `stored`, flat and of `dtype`, on the device of the target."""
        if self.scales is None:
            self.target.copy_(stored.view(self.target.shape))
            return
        rounded, scales = quantise_rows_fp8(stored.view(self.target.shape[0], -1))
        self.target.copy_(rounded if self.columns is None else rounded[:, self.columns])
        self.scales.copy_(scales)


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """Times in seconds. Means over the threads: `read_s` in reads, `copy_s` in waits for copies and in
    conversions.
    """

    num_bytes: int
    num_threads: int
    total_s: float
    read_s: float
    copy_s: float

    def __str__(self) -> str:
        rate = self.num_bytes / max(self.total_s, 1e-9) / GIB
        return (
            f"{self.num_bytes / GIB:.2f} GiB in {self.total_s:.2f} s ({rate:.1f} GiB/s, {self.num_threads} "
            f"threads): read {self.read_s:.2f} s, copy {self.copy_s:.2f} s"
        )


def pieces_of(path: Path, first: int, dtype: torch.dtype, target: torch.Tensor) -> Iterator[Piece]:
    """The pieces of one tensor whose data of `dtype` begins at byte `first` of `path`."""
    flat, count = target.view(-1), PIECE_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), count):
        offset = first + start * dtype.itemsize
        yield Piece(path=path, first=offset, dtype=dtype, target=flat[start : start + count])


def pieces_of_rows(
    path: Path,
    first: int,
    dtype: torch.dtype,
    target: torch.Tensor,
    scales: torch.Tensor,
    cut: Cut | None = None,
) -> Iterator[Piece]:
    """As `pieces_of`, for an e4m3 `target` `[rows, width]` with `scales` `[rows]`: pieces are whole rows.

    With a `cut` the target is that part. A row is read and rounded whole, with one scale on all ranks.
    """
    width = target.shape[1] if cut is None or cut.dim == 0 else cut.full
    spans = ((0, target.shape[0]),) if cut is None or cut.dim else cut.spans
    columns = slice(cut.spans[0][0], cut.spans[0][0] + cut.size) if cut is not None and cut.dim else None
    row_bytes, at = width * dtype.itemsize, 0
    count = max(PIECE_BYTES // row_bytes, 1)
    for span, size in spans:
        for start in range(0, size, count):
            rows = slice(at + start, at + min(start + count, size))
            yield Piece(
                path=path,
                first=first + (span + start) * row_bytes,
                dtype=dtype,
                target=target[rows],
                scales=scales[rows],
                columns=columns,
                width=width,
            )
        at += size


def cut_pieces(path: Path, first: int, dtype: torch.dtype, target: torch.Tensor, cut: Cut) -> Iterator[Piece]:
    """The pieces of the part `cut` of one tensor, as `pieces_of`. The rest of `target` becomes zeros."""
    if cut.size < target.shape[cut.dim]:
        target.zero_()
    # bytes of an index, and of all indices, of the dimension
    index = math.prod(target.shape[cut.dim + 1 :]) * dtype.itemsize
    stride, at = cut.full * index, 0
    for span, size in cut.spans:
        if size:
            part = target.narrow(cut.dim, at, size).view(math.prod(target.shape[: cut.dim]), -1)
            yield from _strided(path, first + span * index, dtype, part, stride)
        at += size


def _strided(
    path: Path, first: int, dtype: torch.dtype, target: torch.Tensor, stride: int
) -> Iterator[Piece]:
    """The pieces of `target` `[rows, width]`, whose rows are `stride` bytes apart in the file."""
    run = target.shape[1] * dtype.itemsize
    if target.shape[0] == 1 or run > PIECE_BYTES:
        for i, row in enumerate(target):
            yield from pieces_of(path, first + i * stride, dtype, row)
        return
    count = PIECE_BYTES // run
    for start in range(0, target.shape[0], count):
        offset, rows = first + start * stride, target[start : start + count]
        yield Piece(path=path, first=offset, dtype=dtype, target=rows, run=run, stride=stride)


Read: TypeAlias = tuple[Piece, ...]
"""Pieces that are read together: one, or staged ones of one stretch of a file, at most PIECE_BYTES long."""


def reads_of(pieces: Iterable[Piece]) -> list[Read]:
    """All `pieces` in their order, those together that follow each other closely in a file."""
    reads: list[list[Piece]] = []
    for piece in pieces:
        if reads and _joins(reads[-1], piece):
            reads[-1].append(piece)
        else:
            reads.append([piece])
    return [tuple(read) for read in reads]


def _joins(read: Sequence[Piece], piece: Piece) -> bool:
    """Whether `piece` is read with the pieces of `read`, and can be seen as its dtype behind them."""
    first, last = read[0], read[-1]
    is_alike = (last.path, last.target.device) == (piece.path, piece.target.device)
    is_near = is_alike and 0 <= piece.first - last.end <= MAX_GAP
    is_one = all(each.is_staged and not each.stride for each in (last, piece))
    fits = piece.end - first.first <= PIECE_BYTES
    return is_near and is_one and fits and (piece.first - first.first) % piece.dtype.itemsize == 0


def read_pieces(pieces: Sequence[Piece]) -> ReadReport:
    """Fills the targets of all `pieces`, which are on one device. Logs the progress of a long load.

    Raises CheckpointError for a file that ends early or cannot be read.
    """
    started, num_bytes = time.monotonic(), sum(piece.num_bytes for piece in pieces)
    waiting: SimpleQueue[Read] = SimpleQueue()
    for read in reads_of(pieces):
        waiting.put(read)
    with ExitStack() as files:
        opened = {path: files.enter_context(path.open("rb")).fileno() for path in {p.path for p in pieces}}
        readers = [_Reader(waiting, opened) for _ in range(num_threads(num_bytes))]
        if num_bytes <= BYTES_PER_THREAD:
            readers[0].run()
        else:
            _run_all(readers, num_bytes)
    for reader in readers:
        if reader.fault is not None:
            raise reader.fault
    count = len(readers)
    return ReadReport(
        num_bytes=num_bytes,
        num_threads=count,
        total_s=time.monotonic() - started,
        read_s=sum(reader.read_s for reader in readers) / count,
        copy_s=sum(reader.copy_s for reader in readers) / count,
    )


def num_threads(num_bytes: int) -> int:
    """The threads that read so many bytes, however few cores there are: they wait for the disk."""
    return max(1, min(MAX_THREADS, num_bytes // BYTES_PER_THREAD))


def _run_all(readers: Sequence["_Reader"], num_bytes: int) -> None:
    threads = [threading.Thread(target=reader.run, name="weights", daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    began = told = time.monotonic()
    for thread in threads:
        while thread.is_alive():
            thread.join(TELL_EVERY_S / 4)
            now = time.monotonic()
            if now - told >= TELL_EVERY_S:
                told, done = now, sum(reader.done for reader in readers)
                logger.info("weights: %s", _progress(done, num_bytes, now - began))


def _progress(done: int, num_bytes: int, elapsed_s: float) -> str:
    """ "45 % [#########...........] of 131.4 GiB, 3.2 GiB/s, 23 s left"."""
    share, rate = done / num_bytes, done / max(elapsed_s, 1e-9)
    bar = "#" * round(share * BAR_WIDTH)
    whole, left = f"{num_bytes / GIB:.1f} GiB", f", {(num_bytes - done) / rate:.0f} s left" if done else ""
    return f"{int(100 * share)} % [{bar:.<{BAR_WIDTH}}] of {whole}, {rate / GIB:.1f} GiB/s{left}"


class _Slot:
    """A host buffer of one read. On a GPU it is pinned, and `event` follows the newest copy out of it."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        self.event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class _Reader:
    """One thread's work. `done` counts bytes; `fault` ends it and the others."""

    def __init__(self, waiting: "SimpleQueue[Read]", opened: dict[Path, int]) -> None:
        self._waiting = waiting
        self._opened = opened
        self._slots: list[_Slot] = []
        self.done = 0
        self.read_s = 0.0
        self.copy_s = 0.0
        self.fault: Exception | None = None

    def run(self) -> None:
        """Reads until nothing is left."""
        try:
            for turn, read in enumerate(iter(self._next, None)):
                assert read is not None
                if read[0].target.device.type == "cuda":
                    self._to_gpu(read, turn)
                else:
                    self._to_host(read)
                self.done += sum(piece.num_bytes for piece in read)
            started = time.monotonic()
            for slot in self._slots:
                slot.wait()
            self.copy_s += time.monotonic() - started
        except Exception as error:  # raised by the thread that waits
            self.fault = error
            while self._next() is not None:
                pass  # the other threads find nothing more to do

    def _next(self) -> Read | None:
        try:
            return self._waiting.get_nowait()
        except Empty:
            return None

    def _to_host(self, read: Read) -> None:
        target = read[0].target
        if not read[0].is_staged:
            self._read(read, target.view(torch.uint8).view(-1))
            return
        if not self._slots:
            self._slots.append(_Slot(target.device))
        staged = self._staged(read, self._slots[0])
        started = time.monotonic()
        for piece, stored in zip(read, staged, strict=True):
            piece.take(stored)
        self.copy_s += time.monotonic() - started

    def _to_gpu(self, read: Read, turn: int) -> None:
        device = read[0].target.device
        if not self._slots:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._slots = [_Slot(device) for _ in range(NUM_SLOTS)]
        slot = self._slots[turn % NUM_SLOTS]
        started = time.monotonic()
        slot.wait()
        self.copy_s += time.monotonic() - started
        staged = list(zip(read, self._staged(read, slot), strict=True))
        assert slot.event is not None
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            plain = [(piece.target.view(-1), stored) for piece, stored in staged if piece.is_plain]
            if plain:  # in one call: the interpreter's lock changes hands at each, which takes longer
                targets, sources = (list(side) for side in zip(*plain, strict=True))
                torch._foreach_copy_(targets, sources, non_blocking=True)
            for piece, stored in staged:
                if not piece.is_plain:
                    piece.take(stored.to(device, non_blocking=True))
            slot.event.record()

    def _staged(self, read: Read, slot: _Slot) -> list[torch.Tensor]:
        """The elements of each piece, flat, in the buffer of `slot`."""
        first = read[0].first
        whole = slot.buffer[: read[0].num_bytes if len(read) == 1 else read[-1].end - first]
        self._read(read, whole)
        starts = [piece.first - first for piece in read]
        return [
            whole[at : at + piece.num_bytes].view(piece.dtype) for at, piece in zip(starts, read, strict=True)
        ]

    def _read(self, read: Read, buffer: torch.Tensor) -> None:
        """Fills `buffer`, uint8 on the host, with the bytes of `read`, and with those between its pieces."""
        started, whole, piece = time.monotonic(), memoryview(buffer.numpy()), read[0]  # type: ignore[arg-type]
        run = piece.run or len(whole)
        for i in range(0, len(whole), run):
            self._read_run(piece, piece.first + i // run * piece.stride, whole[i : i + run])
        self.read_s += time.monotonic() - started

    def _read_run(self, piece: Piece, at: int, into: memoryview) -> None:
        while into:
            try:
                count = os.preadv(self._opened[piece.path], [into], at)
            except OSError as error:
                reason = error.strerror or error
                raise CheckpointError(f"{piece.path}: cannot be read ({reason}); fetch it again") from None
            if not count:
                raise CheckpointError(f"{piece.path}: not a complete safetensors file; fetch it again")
            at, into = at + count, into[count:]
