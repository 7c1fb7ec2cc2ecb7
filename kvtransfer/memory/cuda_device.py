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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...cluster.process.log import fields as log_fields
from ...engine.kv.page_order import PageOrder
from ...kernels.move_rows import ROW_FIELDS, move_rows_triton
from ...kernels.move_spans import SPAN_FIELDS, SpanLauncher, move_spans_triton, num_chunks
from .device import HANDLE_BYTES, Spans, longest_of, run_digests
from .slab import SlabError

logger = logging.getLogger(__name__)

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
MIN_NUMBERS = 1 << 14  # of the smallest table: 128 MiB in pages of 2 MiB and their features
NUM_TABLES, MAX_SPARE_TABLES = 4, 8


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


class _Table:
    """Pinned memory for the spans and sums of one move, which the kernel reads and writes."""

    def __init__(self, num_numbers: int) -> None:
        self.num_numbers = num_numbers
        self.memory = torch.empty(num_numbers, dtype=torch.int64, pin_memory=True)
        self.numbers = self.memory.numpy()
        self.address = self.memory.data_ptr()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass
class CudaMove:
    """A move under way on a GPU; see `Move`."""

    owner: "CudaDevice"
    table: _Table
    counts: Sequence[int]  # spans of each run
    num_chunks: int
    is_held: bool
    digests: list[int] | None = None
    num_fields: int = SPAN_FIELDS  # numbers of a span

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
        num_rows, num_fields = sum(len(run) for run in runs), runs[0].shape[1]
        num_sums = num_chunks(longest_of(runs) if longest is None else longest)
        begin, end = num_rows * num_fields, num_rows * (num_fields + num_sums)
        table = self._take(end)
        np.concatenate(runs, out=table.numbers[:begin].reshape(num_rows, num_fields))
        stream = self._early_stream if is_early else self._stream
        is_held = self._order.wait(pages, stream)
        if self._launcher is None or num_fields != SPAN_FIELDS:
            self._dispatch(table, num_rows, num_sums, stream, num_fields)
        else:
            with torch.cuda.device(self._device):
                spans, sums = table.address, table.address + 8 * begin
                self._launcher.launch(spans, num_rows, sums, num_sums, stream.cuda_stream)
        table.event.record(stream)
        return CudaMove(self, table, [len(run) for run in runs], num_sums, is_held, num_fields=num_fields)

    def finished(self, move: CudaMove) -> list[int]:
        """The digests of a finished move, whose table is free again."""
        num_rows = sum(move.counts)
        begin, end = num_rows * move.num_fields, num_rows * (move.num_fields + move.num_chunks)
        digests = run_digests(
            move.table.numbers[begin:end], [count * move.num_chunks for count in move.counts]
        )
        if len(self._tables) < MAX_SPARE_TABLES:
            self._tables.append(move.table)
        return digests

    def _synchronize(self) -> None:
        for stream in (self._stream, self._early_stream):
            stream.synchronize()

    def _take(self, num_numbers: int) -> _Table:
        for number, table in enumerate(self._tables):
            if table.num_numbers >= num_numbers:
                return self._tables.pop(number)
        size = MIN_NUMBERS
        while size < num_numbers:
            size *= 2
        return _Table(size)

    def _dispatch(
        self,
        table: _Table,
        num_rows: int,
        num_sums: int,
        stream: torch.cuda.Stream,
        num_fields: int = SPAN_FIELDS,
    ) -> object:
        """Launches by Triton's own dispatch, which returns the compiled kernel."""
        begin, end = num_rows * num_fields, num_rows * (num_fields + num_sums)
        spans = table.memory[:begin].view(num_rows, num_fields)
        sums = table.memory[begin:end].view(num_rows, num_sums)
        launch = move_rows_triton if num_fields == ROW_FIELDS else move_spans_triton
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            return launch(spans, sums)

    def _compile(self) -> None:
        """Moves one span, so that no hand-off waits for the compiler, and makes later launches shorter."""
        with torch.cuda.device(self._device):
            pair = torch.arange(2 * HANDLE_BYTES, dtype=torch.int32, device=self._device).view(2, -1)
            torch.cuda.current_stream().synchronize()
            row = np.array([[pair[0].data_ptr(), pair[1].data_ptr(), pair.shape[1], 0]], dtype=np.int64)
            table = self._take(row.size + 1)
            table.numbers[: row.size] = row.reshape(-1)
            compiled = self._dispatch(table, 1, 1, self._stream)
            table.event.record(self._stream)
            expected = CudaMove(self, table, [1], 1, is_held=False).wait()
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
