"""Paged memory of an engine: the KV pool, the feature plane beside it, and the owners of each page.

A pool is page-major: one page is one contiguous byte range over all layers, so a transport moves it as a
unit. Slot = page * page_size + offset. Page 0 is never handed out, because padding rows are written to its
slot 0.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from ...kernels.fp8_scales import FP8, raw
from ...kernels.kv_store import kv_rows
from .layouts import PageLayout
from .page_order import PageOrder, PageOrderPart

# layer -> (memory, the layer's number there, rows of `kv_rows`)
StoreRows: TypeAlias = Callable[[int], tuple[torch.Tensor, int, torch.Tensor]]


class PoolExhausted(RuntimeError):
    """A pool has fewer free pages than requested; the message has both numbers."""


class KVPool:
    """The KV of all layers, `kv` `[num_pages, *layout.page_shape]`, on `device`.

    The memory starts as zeros, because attention multiplies padded pages by 0, and 0 * NaN is NaN. `order`
    tells when copies may touch a page; by default the pool makes one. `faults` int32 `[1]` becomes 1 when a
    kernel on a device was launched with another batch than its plan's. `row_dtype`: the dtype of new keys and
    values and of features, by default the layout's; needed if that is e4m3. Raises ValueError for an
    impossible size.
    """

    def __init__(
        self,
        num_pages: int,
        layout: PageLayout,
        device: torch.device | str = "cpu",
        *,
        row_dtype: torch.dtype | None = None,
        order: PageOrder | None = None,
    ) -> None:
        _check_sizes(num_pages=num_pages, page_size=layout.page_size)
        self.num_pages = num_pages
        self.num_lent = 0
        self.layout = layout
        self.row_dtype = layout.dtype if row_dtype is None else row_dtype
        if self.row_dtype == FP8:
            raise ValueError(f"a pool of {FP8} needs the dtype of its rows")
        self.device = torch.device(device)
        self.kv = _zeros((num_pages, *layout.page_shape), layout.dtype, self.device)
        self.order = PageOrder(num_pages, self.device) if order is None else order
        self.faults = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.page_size

    @property
    def num_layers(self) -> int:
        """Layers of a page."""
        return self.layout.num_layers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every element."""
        return self.layout.dtype

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The planes of one layer, strided views `[num_pages, page_size, ...]`; for an MHA layout K and V."""
        return self.kv[:, layer].unbind(1)

    @property
    def num_lendable(self) -> int:
        """Pages that `lend` can give memory for all layers."""
        return self.num_pages - 1

    def lend(self, count: int) -> None:
        """Gives the first `count` pages behind the sink memory for all layers, before the engine serves.

        0 takes it back. `num_lent` keeps the count.
        """
        assert 0 <= count <= self.num_lendable, (count, self)
        self.num_lent = count

    def memory_of(self, end: int) -> list[torch.Tensor]:
        """The memory of pages [1, end) that were lent, page by page."""
        return [self.kv[1:end]]

    def layers_of(self, *, is_windowed: bool) -> Sequence[int]:
        """The layers that attend with a window, or without one, to pages of their own; all if none have."""
        return range(self.num_layers)

    def landing_rows(self, pages: Sequence[int], width: int) -> torch.Tensor:
        """Uninitialised rows `[len(pages), page_size, width]` of the rows' dtype, bound to `pages`.

        A copy may write a row when it may write its page. The pages are stamped again, because kernels of the
        memory's previous tensor may still run.
        """
        rows = torch.empty((len(pages), self.page_size, width), dtype=self.row_dtype, device=self.device)
        self.order.stamp(pages)
        return rows

    def copy_page(self, source: int, target: int) -> None:
        """Copies all layers of page `source` into page `target`, behind the work launched so far."""
        if self.order.is_checked:
            self.note_use([source], [target])
        pages = raw(self.kv)
        pages[target].copy_(pages[source])

    def stamp(self, pages: Sequence[int]) -> None:
        """Make later copies of `pages` wait for all work launched so far."""
        self.order.stamp(pages)

    def note_use(self, reads: Sequence[int], writes: Sequence[int]) -> None:
        """Debug runs: records launched work that reads and writes these pages, to order page copies."""
        self.order.use(reads=reads, writes=writes)

    def store_rows(self, slots: torch.Tensor) -> StoreRows:
        """Where each layer stores the keys and values of rows with `slots` int64 `[T]`.

        A graph that records the call follows `slots` at each replay.
        """
        rows = kv_rows(slots, self.kv)
        return lambda layer: (self.kv, layer, rows)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and planes."""
        return self.layout.page_bytes

    @property
    def page_rows(self) -> int:
        """Rows of a page in the unit of `kv_rows`."""
        return math.prod(self.kv.shape[1:4])

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's memory."""
        return self.kv.nbytes

    @property
    def num_slots(self) -> int:
        """Slots of the pool, page 0 included."""
        return self.num_pages * self.page_size

    def byte_view(self) -> torch.Tensor:
        """The pool's own memory as uint8 `[num_pages, page_bytes]`."""
        return self.kv.flatten().view(torch.uint8).view(self.num_pages, self.page_bytes)

    def __repr__(self) -> str:
        return (
            f"<KVPool {self.num_pages} pages x {self.page_bytes} B, {self.num_layers} layers, {self.device}>"
        )


class FeaturePlane:
    """Aux features beside a KV pool, under its page ids: `[num_pages, page_size, width]`, initialised with
    zeros.

    Raises ValueError for an impossible size.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_sizes(num_pages=num_pages, page_size=page_size)
        if width < 1:
            raise ValueError(f"feature plane of width {width}: the width must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.width = width
        self.dtype = dtype
        self.device = torch.device(device)
        self.features = _zeros((num_pages, page_size, width), dtype, self.device)
        self.rows = self.features.view(num_pages * page_size, width)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_size * self.width * self.features.element_size()

    def store(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Write `features` `[T, width]` into `slots` int64 `[T]`. Rows of slot 0 are padding and may collide.

        Raises ValueError for another width or dtype, which the receiver would misread.
        """
        wanted = (slots.shape[0], self.width)
        if tuple(features.shape) != wanted or features.dtype != self.dtype:
            raise ValueError(
                f"features {list(features.shape)} {features.dtype} for a plane that takes {list(wanted)} "
                f"{self.dtype}"
            )
        self.rows.index_copy_(0, slots, features)

    def byte_view(self) -> torch.Tensor:
        """The plane's own memory as uint8 `[num_pages, page_bytes]`."""
        return self.features.view(self.num_pages, -1).view(torch.uint8)

    def __repr__(self) -> str:
        return (
            f"<FeaturePlane {self.num_pages} pages x {self.page_bytes} B, width {self.width}, {self.device}>"
        )


class PageAllocator:
    """Counts the owners of every page. The single owner of a page may write it; a shared page is read-only.

    With an `order`, pages are stamped when an owner leaves: copies into them wait for the work that was
    launched for it, and not for what is launched after that. Misuse (one release too many, page 0 passed in)
    is a programming error and asserts.
    """

    def __init__(self, num_pages: int, order: PageOrder | PageOrderPart | None = None) -> None:
        _check_sizes(num_pages=num_pages, page_size=1)
        self.num_pages = num_pages
        self._order = order
        self._refs = [0] * num_pages
        # A stack: the page released last is allocated first, while it is still in a CPU cache.
        self._free = list(range(num_pages - 1, 0, -1))
        self._observer: Callable[[int, int, int], None] | None = None

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    @property
    def num_total(self) -> int:
        """Pages that can be allocated: all but page 0."""
        return self.num_pages - 1

    @property
    def num_used(self) -> int:
        """Pages with an owner."""
        return self.num_total - self.num_free

    def refs(self, page: int) -> int:
        """The number of owners of `page`."""
        return self._refs[page]

    def watch(self, observer: Callable[[int, int, int], None]) -> None:
        """Call `observer(page, refs, change)` after every `retain` (+1) and `release` (-1) of a page.

        Only one observer.
        """
        assert self._observer is None, "an allocator has one prefix cache"
        self._observer = observer

    def alloc(self, n: int) -> list[int]:
        """`n` pages with one owner each; all or none. Raises PoolExhausted."""
        assert n >= 0, n
        if n > len(self._free):
            raise PoolExhausted(f"{n} pages asked for, {len(self._free)} of {self.num_total} free")
        pages = self._free[len(self._free) - n :][::-1]
        del self._free[len(self._free) - n :]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to each of `pages`, which must have one already."""
        refs, observer = self._refs, self._observer
        for page in pages:
            assert refs[page] > 0, f"page {page} is free and cannot be shared"
            refs[page] += 1
            if observer is not None:
                observer(page, refs[page], 1)

    def release(self, pages: Iterable[int], *, is_used: bool = True) -> None:
        """Remove an owner from each of `pages`. A page without owners is free again.

        `is_used`: work that was launched for this owner may use them.
        """
        refs, observer = self._refs, self._observer
        if is_used and self._order is not None:
            pages = list(pages)
            self._order.stamp(pages)
        for page in pages:
            assert refs[page] > 0, f"page {page} released more often than owned"
            refs[page] -= 1
            if refs[page] == 0:
                self._free.append(page)
            if observer is not None:
                observer(page, refs[page], -1)

    def check_integrity(self) -> None:
        """Assert conservation: each page but 0 is either free once without an owner, or owned."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert self._refs[0] == 0, "page 0 was handed out"
        assert 0 not in free, "page 0 was freed"
        for page in range(1, self.num_pages):
            assert self._refs[page] >= 0, f"page {page} has {self._refs[page]} owners"
            is_free = page in free
            assert is_free == (self._refs[page] == 0), (
                f"page {page}: {self._refs[page]} owners, free {is_free}"
            )

    def __repr__(self) -> str:
        return f"<PageAllocator {self.num_free} free of {self.num_total}>"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory on the CPU until written: the kernel maps new pages, where torch.zeros would
    fill them.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def _check_sizes(*, num_pages: int, page_size: int) -> None:
    if num_pages < 2:
        raise ValueError(
            f"a pool of {num_pages} pages has none to give: page 0 is the padding sink, use at least 2"
        )
    if page_size < 1:
        raise ValueError(f"page_size {page_size}: a page holds at least 1 token")
