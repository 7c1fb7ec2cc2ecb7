"""The memory of a GPU, shared with other processes by CUDA IPC.

Slabs come from `cudaMalloc` and not from torch's allocator: a handle always exports a whole allocation, and
memory of expandable segments has none. Torch's own runtime library is called through ctypes.

The driver maps an allocation once per process, so `open` counts. Memory that another process exported stays
allocated while it is mapped here, even after that process has gone; therefore the owner closes it when its
peer is lost.

References: CUDA Runtime API, "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle".
"""

import ctypes
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ...cluster.process.log import fields as log_fields
from ...engine.kv.page_order import PageOrder
from ...kernels.move_rows import ROW_FIELDS, move_rows_triton
from ...kernels.move_spans import RUN_FIELDS, SPAN_FIELDS, SpanLauncher, move_spans_triton, num_chunks
from .device import HANDLE_BYTES, Spans, longest_of, run_digests, run_table
from .slab import SlabError

logger = logging.getLogger(__name__)

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
MIN_NUMBERS = 1 << 14  # of the smallest table: 128 MiB in pages of 2 MiB and their features
NUM_TABLES, MAX_SPARE_TABLES = 8, 12
MIN_TABLES = 4  # that prepared moves leave to others
GATHER_PROGRAMS = 2.0  # of a move, for each multiprocessor: it is bound by memory
SCATTER_PROGRAMS = 0.5  # bound by the link: the other half is left to the steps beside it


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaRuntime:
    """The calls of the CUDA runtime that torch has no Python names for."""

    def __init__(self) -> None:
        """Raises SlabError if the library cannot be loaded."""
        name = f"libcudart.so.{(torch.version.cuda or '0').partition('.')[0]}"
        try:
            self._library = ctypes.CDLL(name)  # the one that torch has loaded
        except OSError as error:
            raise SlabError(f"{name} cannot be loaded: {error}") from None
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaIpcOpenMemHandle.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            _Handle,
            ctypes.c_uint,
        ]

    def __repr__(self) -> str:
        return f"CudaRuntime({torch.version.cuda})"

    def malloc(self, size: int) -> int:
        """The address of `size` bytes on the current device. Raises SlabError."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value or 0

    def clear(self, address: int, size: int, stream: torch.cuda.Stream) -> None:
        """Fills the memory with zeros on `stream`, and returns when that is done. Raises SlabError."""
        target, queue = ctypes.c_void_p(address), ctypes.c_void_p(stream.cuda_stream)
        self._call("cudaMemsetAsync", target, ctypes.c_int(0), ctypes.c_size_t(size), queue)
        self._call("cudaStreamSynchronize", queue)

    def free(self, address: int) -> None:
        """Frees memory of `malloc`. Raises SlabError."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def export(self, address: int) -> bytes:
        """The handle of an allocation. Raises SlabError."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address at which the allocation is mapped. Raises SlabError."""
        pointer = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return pointer.value or 0

    def close(self, address: int) -> None:
        """Unmaps what `open` mapped. Raises SlabError."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # else torch would report this error at its next launch
            reason = self._library.cudaGetErrorString(code).decode()
            raise SlabError(f"{name}: {reason} (CUDA error {code})")


class _Shape(NamedTuple):
    """The sizes of a move's tables of numbers: spans, runs, and sums, in this order.

    Each begins at a multiple of 16 bytes, as the compiled kernel expects.
    """

    num_spans: int
    num_fields: int  # of a span
    num_runs: int
    num_programs: int  # of each run

    @property
    def runs_at(self) -> int:
        return self.num_spans * self.num_fields + self.num_spans * self.num_fields % 2

    @property
    def sums_at(self) -> int:
        return self.runs_at + self.num_runs * RUN_FIELDS

    @property
    def size(self) -> int:
        return self.sums_at + self.num_runs * self.num_programs


class _Table:
    """Pinned memory for the tables of one move, which the kernel reads and writes."""

    def __init__(self, num_numbers: int) -> None:
        self.num_numbers = num_numbers
        self.memory = torch.empty(num_numbers, dtype=torch.int64, pin_memory=True)
        self.numbers = self.memory.numpy()
        self.address = self.memory.data_ptr()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, shape: _Shape, runs: Sequence[Spans], chunks: int) -> None:
        """Writes spans and runs; `chunks`: of the longest span."""
        spans = self.numbers[: shape.num_spans * shape.num_fields].reshape(-1, shape.num_fields)
        if len(runs) == 1:
            spans[:] = runs[0]  # the usual case, for which `concatenate` takes three times as long
        else:
            np.concatenate(runs, out=spans)
        self.numbers[shape.runs_at : shape.sums_at] = run_table([len(run) for run in runs], chunks)

    def sums(self, shape: _Shape) -> Spans:
        """`[runs, programs]`, for the kernel to write."""
        return self.numbers[shape.sums_at : shape.size].reshape(shape.num_runs, shape.num_programs)

    def tensors(self, shape: _Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Spans, runs and sums."""
        return (
            self.memory[: shape.num_spans * shape.num_fields].view(-1, shape.num_fields),
            self.memory[shape.runs_at : shape.sums_at].view(-1, RUN_FIELDS),
            self.memory[shape.sums_at : shape.size].view(-1, shape.num_programs),
        )


@dataclass
class CudaMove:
    """A move under way on a GPU; see `Move`."""

    owner: "CudaDevice"
    table: _Table
    sums: Spans  # `[runs, programs]`, in the table
    is_held: bool
    digests: list[int] | None = None

    def poll(self) -> list[int] | None:
        if self.digests is None and self.table.event.query():  # type: ignore[no-untyped-call]
            self.digests = self.owner.finished(self)
        return self.digests

    def wait(self) -> list[int]:
        if self.digests is None:
            self.table.event.synchronize()
            self.digests = self.owner.finished(self)
        return self.digests


@dataclass
class CudaPrepared:
    """A move on a GPU that can start at once; see `Prepared`."""

    owner: "CudaDevice"
    table: _Table
    shape: _Shape

    def start(self, pages: Iterable[int]) -> CudaMove:
        return self.owner.start(self, pages)

    def discard(self) -> None:
        self.owner.give_back(self.table)


@dataclass
class _Opened:
    """Memory of another process."""

    address: int
    num_opens: int


class CudaDevice:
    """The GPU `device`; see `Device`. `order` belongs to the pages that moves read or write."""

    def __init__(self, device: torch.device, order: PageOrder) -> None:
        """Compiles the kernel. Raises SlabError if the runtime library cannot be loaded."""
        self._runtime = CudaRuntime()
        self._device, self._order = device, order
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._num_processors = torch.cuda.get_device_properties(self._index).multi_processor_count
        # a move is short, and a forward's kernels would delay it by as much as they take
        self._stream, self._early_stream = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._tables = [
            _Table(MIN_NUMBERS) for _ in range(NUM_TABLES)
        ]  # pinning memory later would stop kernels
        self._opened: dict[bytes, _Opened] = {}
        self._launcher: SpanLauncher | None = None  # None: Triton's own dispatch
        self._compile()

    def __repr__(self) -> str:
        return f"CudaDevice({self._device}, opened={len(self._opened)})"

    def allocate(self, size: int) -> int:
        """As `Device.allocate`."""
        with torch.cuda.device(self._device):
            address = self._runtime.malloc(size)
            try:
                # not on the default stream, where it would wait for the forward under way
                self._runtime.clear(address, size, self._stream)
            except SlabError:
                self._runtime.free(address)
                raise
        return address

    def export(self, address: int) -> bytes:
        """As `Device.export`."""
        with torch.cuda.device(self._device):
            return self._runtime.export(address)

    def free(self, address: int) -> None:
        """As `Device.free`."""
        self._synchronize()
        with torch.cuda.device(self._device):
            self._runtime.free(address)

    def open(self, handle: bytes, size: int) -> int:
        """As `Device.open`. The driver maps the whole allocation; its size is prefill's word."""
        known = self._opened.get(handle)
        if known is None:
            if len(handle) != HANDLE_BYTES:
                raise SlabError(f"a handle of {len(handle)} bytes, not {HANDLE_BYTES}")
            with torch.cuda.device(self._device):
                known = self._opened[handle] = _Opened(self._runtime.open(handle), 0)
        known.num_opens += 1
        return known.address

    def close(self, handle: bytes) -> None:
        """As `Device.close`."""
        known = self._opened[handle]
        known.num_opens -= 1
        if known.num_opens == 0:
            del self._opened[handle]
            self._synchronize()
            with torch.cuda.device(self._device):
                self._runtime.close(known.address)

    def move(
        self,
        runs: Sequence[Spans],
        pages: Iterable[int],
        *,
        is_write: bool,
        is_early: bool = False,
        longest: int | None = None,
    ) -> CudaMove:
        """As `Device.move`."""
        chunks = num_chunks(longest_of(runs) if longest is None else longest)
        shape = self._shape(runs, chunks, is_write=is_write)
        table = self._take(shape.size)
        table.write(shape, runs, chunks)
        return self.start(CudaPrepared(self, table, shape), pages, is_early=is_early)

    def prepare(self, run: Spans, *, longest: int) -> CudaPrepared | None:
        """As `Device.prepare`."""
        if len(self._tables) <= MIN_TABLES:
            return None
        chunks = num_chunks(longest)
        shape = self._shape([run], chunks, is_write=True)
        table = self._free_table(shape.size)
        if table is None:
            return None
        table.write(shape, [run], chunks)
        return CudaPrepared(self, table, shape)

    def start(self, prepared: CudaPrepared, pages: Iterable[int], *, is_early: bool = False) -> CudaMove:
        """Starts a prepared move, on the stream of early moves if it `is_early`."""
        table, shape = prepared.table, prepared.shape
        stream = self._early_stream if is_early else self._stream
        is_held = self._order.wait(pages, stream)
        if torch.cuda.current_device() == self._index:  # to enter it again takes longer than the launch
            self._launch(table, shape, stream)
        else:
            with torch.cuda.device(self._index):
                self._launch(table, shape, stream)
        table.event.record(stream)
        return CudaMove(self, table, table.sums(shape), is_held)

    def finished(self, move: CudaMove) -> list[int]:
        """The digests of a finished move, whose table is free again."""
        digests = run_digests(move.sums)
        self.give_back(move.table)
        return digests

    def give_back(self, table: _Table) -> None:
        """Takes a table that no move uses any more."""
        if len(self._tables) < MAX_SPARE_TABLES:
            self._tables.append(table)

    def _shape(self, runs: Sequence[Spans], chunks: int, *, is_write: bool) -> _Shape:
        """The tables of a move whose longest span has `chunks` chunks."""
        num_spans = sum(len(run) for run in runs)
        num_programs = self._num_programs(len(runs), num_spans * chunks, is_write=is_write)
        return _Shape(num_spans, runs[0].shape[1], len(runs), num_programs)

    def _num_programs(self, num_runs: int, num_turns: int, *, is_write: bool) -> int:
        """The programs of each run of a move of `num_turns` chunks."""
        num_all = math.ceil(self._num_processors * (SCATTER_PROGRAMS if is_write else GATHER_PROGRAMS))
        return max(1, min(num_turns, math.ceil(num_all / num_runs)))

    def _synchronize(self) -> None:
        for stream in (self._stream, self._early_stream):
            stream.synchronize()

    def _free_table(self, num_numbers: int) -> _Table | None:
        for number, table in enumerate(self._tables):
            if table.num_numbers >= num_numbers:
                return self._tables.pop(number)
        return None

    def _take(self, num_numbers: int) -> _Table:
        if (table := self._free_table(num_numbers)) is not None:
            return table
        size = MIN_NUMBERS
        while size < num_numbers:
            size *= 2
        return _Table(size)

    def _launch(self, table: _Table, shape: _Shape, stream: torch.cuda.Stream) -> object:
        """Launches on the current device. Returns the compiled kernel where Triton's dispatch launched it."""
        if self._launcher is not None and shape.num_fields == SPAN_FIELDS:
            addresses = (table.address + 8 * at for at in (0, shape.runs_at, shape.sums_at))
            self._launcher.launch(
                *addresses,
                num_runs=shape.num_runs,
                num_programs=shape.num_programs,
                stream=stream.cuda_stream,
            )
            return None
        launch = move_rows_triton if shape.num_fields == ROW_FIELDS else move_spans_triton
        with torch.cuda.stream(stream):
            return launch(*table.tensors(shape))

    def _compile(self) -> None:
        """Moves one span, so that no hand-off waits for the compiler, and makes later launches shorter."""
        with torch.cuda.device(self._device):
            pair = torch.arange(2 * HANDLE_BYTES, dtype=torch.int32, device=self._device).view(2, -1)
            torch.cuda.current_stream().synchronize()
            row = np.array([[pair[0].data_ptr(), pair[1].data_ptr(), pair.shape[1], 0]], dtype=np.int64)
            shape = _Shape(1, SPAN_FIELDS, 1, 1)
            table = self._take(shape.size)
            table.write(shape, [row], 1)
            compiled = self._launch(table, shape, self._stream)
            table.event.record(self._stream)
            expected = CudaMove(self, table, table.sums(shape), is_held=False).wait()
            pair[1].zero_()
            torch.cuda.current_stream().synchronize()
            try:
                self._launcher = SpanLauncher(compiled)
                if self.move([row], [], is_write=True).wait() == expected and torch.equal(*pair):
                    return
                reason = "the kernel copied other bytes"
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # of another Triton
                reason = f"{type(error).__name__}: {error}"
            logger.info("launches go through Triton's dispatch", extra=log_fields(reason=reason))
            self._launcher = None
