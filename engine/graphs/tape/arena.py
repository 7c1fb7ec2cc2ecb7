"""Memory that tapes share and reuse once no tensor refers to it, as in a device's graph pool.

A tape in an arena keeps addresses instead of tensors. The intermediate results of all graphs therefore share
a few blocks, and a user that needs a result for longer must hold its tensor, as on a device. With `poison`, a
freed block is filled with NaN (-1 for integers), so a missing reference produces wrong numbers. The results
of break bodies come from a device's ordinary allocator; with `poison` they get a separate arena.
"""

import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..modes import Args, DispatchMode, Kwargs, Operation, storage_of, storages_of
from ..pytree import map_items

ALIGNMENT = 64
POISON = 0xFF  # four of these are a NaN in float32, two in bfloat16 and float16

Bytes: TypeAlias = npt.NDArray[np.uint8]


class ArenaBlock(NamedTuple):
    """Bytes [start, start + size) of one chunk."""

    chunk: int
    start: int
    size: int

    @property
    def end(self) -> int:
        """The first byte behind the block."""
        return self.start + self.size


class Arena:
    """Blocks in chunks of `chunk_bytes` bytes.

    Adds a chunk when no free block is large enough; never shrinks.
    """

    def __init__(self, chunk_bytes: int = 1 << 22, *, poison: bool = False) -> None:
        self._chunk_bytes = chunk_bytes
        self._poison = poison
        self._chunks: list[Bytes] = []
        self._spans: list[tuple[int, int]] = []  # first address of each chunk, and the first behind it
        self._free: list[ArenaBlock] = []  # in order, neighbours joined
        # What a tape binds again and again: the same memory with the same shape.
        self._views: weakref.WeakValueDictionary[object, torch.Tensor] = weakref.WeakValueDictionary()
        self._num_used = 0
        # Finalizers may fill it at any moment. It is emptied only where the lists are consistent.
        self._released: deque[ArenaBlock] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @property
    def num_used(self) -> int:
        """Bytes that tensors refer to."""
        self.sweep()
        return self._num_used

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape, strides and dtype in its own block, which is freed with the tensor's
        storage.
        """
        num_bytes = _extent(tensor) * tensor.element_size()
        block = self._take(max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT)
        raw = self._chunks[block.chunk][block.start : block.end]
        # Only the storage refers to this array, so the array is deleted with the storage and frees the block.
        finalizer = weakref.finalize(raw, self._released.append, block)
        finalizer.atexit = False
        return _shaped(raw, tensor)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in the arena."""
        return self.empty_like(tensor).copy_(tensor)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in the arena."""
        return self._chunk_of(tensor) is not None

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without a reference that keeps it.

        Tensors outside the arena are returned unchanged.
        """
        chunk = self._chunk_of(tensor)
        if chunk is None:
            return tensor
        address = tensor.data_ptr()
        key = address, tensor.shape, tensor.stride(), tensor.dtype
        view = self._views.get(key)
        if view is None:
            start = address - self._spans[chunk][0]
            num_bytes = _extent(tensor) * tensor.element_size()
            view = _shaped(self._chunks[chunk][start : start + num_bytes], tensor)
            self._views[key] = view
        return view

    def sweep(self) -> None:
        """Take back the blocks of all deleted tensors."""
        if not self._released:
            return
        while self._released:
            block = self._released.popleft()
            if self._poison:
                self._chunks[block.chunk][block.start : block.end] = POISON
            self._num_used -= block.size
            self._free.append(block)
        self._free = _joined(self._free)

    def check_integrity(self) -> None:
        """Assert that free blocks lie inside the chunks without overlap, and that used and free bytes add up
        to the whole.
        """
        self.sweep()
        for block, following in zip(self._free, self._free[1:], strict=False):
            assert (block.chunk, block.end) < (following.chunk, following.start), (block, following)
        assert all(0 <= b.start < b.end <= self._chunks[b.chunk].nbytes for b in self._free), self._free
        assert self._num_used + sum(block.size for block in self._free) == self.num_bytes, self

    def _take(self, size: int) -> ArenaBlock:
        """The first bytes of the smallest free block that is large enough."""
        self.sweep()
        number, smallest = -1, 0
        for place, (_, _, available) in enumerate(self._free):
            if available >= size and (number < 0 or available < smallest):
                number, smallest = place, available
                if available == size:
                    break
        if number < 0:
            self._add_chunk(max(size, self._chunk_bytes))
            number = len(self._free) - 1
        found = self._free.pop(number)
        if found.size > size:
            self._free.insert(number, ArenaBlock(found.chunk, found.start + size, found.size - size))
        self._num_used += size
        return ArenaBlock(found.chunk, found.start, size)

    def _add_chunk(self, num_bytes: int) -> None:
        chunk = _aligned_zeros(num_bytes)
        self._free.append(ArenaBlock(len(self._chunks), 0, num_bytes))
        self._chunks.append(chunk)
        self._spans.append((chunk.ctypes.data, chunk.ctypes.data + num_bytes))

    def _chunk_of(self, tensor: torch.Tensor) -> int | None:
        """The number of the chunk in which the tensor's storage begins; None for memory of others."""
        if not self._spans:
            return None
        address = storage_of(tensor)
        for number, (first, end) in enumerate(self._spans):
            if first <= address < end:
                return number
        return None

    def __repr__(self) -> str:
        return f"<Arena {self.num_used} of {self.num_bytes} B in {len(self._chunks)} chunks>"


class ArenaMemory:
    """A tape's memory in an arena, shared by all tapes of the backend.

    `poison` is for tests and debugging.
    """

    def __init__(self, chunk_bytes: int = 1 << 22, *, poison: bool = False) -> None:
        self.pool = Arena(chunk_bytes, poison=poison)
        self.ordinary = Arena(chunk_bytes, poison=True) if poison else None

    def place(self, fresh: torch.Tensor) -> torch.Tensor:
        return self.pool.place(fresh)

    def bind(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = self.pool.unowned(tensor)
        return tensor if self.ordinary is None else self.ordinary.unowned(tensor)

    def counts(self, bound: torch.Tensor) -> bool:
        return False

    def eager_region(self) -> AbstractContextManager[object]:
        return nullcontext() if self.ordinary is None else _PlaceFresh(self.ordinary)

    @property
    def num_bytes(self) -> int:
        return self.pool.num_bytes


class _PlaceFresh(DispatchMode):
    """Moves every new result into an arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena

    def dispatch(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        return self._moved(func(*args, **kwargs), storages_of(args, kwargs))

    def _moved(self, result: object, known: set[int]) -> object:
        if isinstance(result, torch.Tensor):
            return result if storage_of(result) in known else self._arena.place(result)
        return map_items(result, lambda item: self._moved(item, known))


def _extent(tensor: torch.Tensor) -> int:
    """Elements between the first and the last element that the strides reach, both included."""
    if tensor.is_contiguous():
        return tensor.numel()
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _shaped(raw: Bytes, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of `raw`, whose number is a multiple of an element, as a tensor like `like`."""
    return torch.from_numpy(raw).view(like.dtype).as_strided(like.shape, like.stride(), 0)


def _joined(blocks: list[ArenaBlock]) -> list[ArenaBlock]:
    joined: list[ArenaBlock] = []
    for block in sorted(blocks):
        last = joined[-1] if joined else None
        if last is not None and last.chunk == block.chunk and last.end == block.start:
            joined[-1] = ArenaBlock(last.chunk, last.start, last.size + block.size)
        else:
            joined.append(block)
    return joined


def _aligned_zeros(num_bytes: int) -> Bytes:
    raw = np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]
