"""The pool of a model with windows: pages for layers without a window, window pages for those with one.

The device knows which window page belongs to a page (`table`). Attention of windowed layers maps pages and
slots through it, so page tables, batches and graphs know pages alone. A page without a window page reads as
the sink: no row looks there.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...kernels.fp8_scales import raw
from ...kernels.kv_store import kv_rows
from ...kernels.window_places import window_places, window_slots
from ..host_copy import arrays_to_device, to_device
from .page_order import PageOrder
from .pool import KVPool, StoreRows
from .window_layout import WindowedLayout


class WindowedPool(KVPool):
    """`num_pages` pages and, in the pool `part`, `num_window_pages` window pages; page 0 of each is a sink.

    `table` int64 `[num_pages]`, on the device: the window page of each page, 0 without one. Copies know
    window page i as page `num_pages` + i (`wire_page`); `order` has both kinds. Raises ValueError for an
    impossible size.
    """

    layout: WindowedLayout

    def __init__(
        self,
        num_pages: int,
        num_window_pages: int,
        layout: WindowedLayout,
        device: torch.device | str = "cpu",
        *,
        row_dtype: torch.dtype | None = None,
    ) -> None:
        order = PageOrder(num_pages + num_window_pages, device)
        super().__init__(num_pages, layout, device, row_dtype=row_dtype, order=order)
        self.part = KVPool(num_window_pages, layout.part, device, row_dtype=row_dtype)
        self.table = torch.zeros(num_pages, dtype=torch.int64, device=self.device)
        self._told = [0] * num_pages  # the table, as the host knows it

    @property
    def num_window_pages(self) -> int:
        """Window pages, the sink included."""
        return self.part.num_pages

    @property
    def num_lendable(self) -> int:
        return min(self.num_pages, self.num_window_pages) - 1

    def lend(self, count: int) -> None:
        """As `KVPool.lend`: page i has window page i."""
        super().lend(count)
        pages = torch.arange(1, 1 + count, dtype=torch.int64)
        self.table.zero_()
        self.table[1 : 1 + count] = to_device(pages, self.device)

    def memory_of(self, end: int) -> list[torch.Tensor]:
        """As `KVPool.memory_of`, and the window pages of the same numbers."""
        pages = [self.kv[1:end], self.part.kv[1:end]]
        return pages if self.layout.num_full else pages[1:]

    def layers_of(self, *, is_windowed: bool) -> Sequence[int]:
        return [layer for layer, place in enumerate(self.layout.places) if place[0] == is_windowed]

    @property
    def nbytes(self) -> int:
        """Bytes of both kinds of pages."""
        return self.kv.nbytes + self.part.kv.nbytes

    def wire_page(self, window_page: int) -> int:
        """The number by which copies know a window page."""
        return self.num_pages + window_page

    def map_pages(self, changed: Mapping[int, int]) -> None:
        """Gives pages other window pages (0: none), in device order behind the work launched so far."""
        for page, part in changed.items():
            self._told[page] = part
        host = np.array([[*changed], [*changed.values()]], dtype=np.int64)
        where, values = arrays_to_device([host], self.device)[0].unbind(0)
        self.table.index_copy_(0, where, values)

    def places(self, pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Window pages and window slots of `pages` int64 `[B, P]` and `slots` int64, in their shapes."""
        return window_places(self.table, pages, slots, self.page_size)

    def slots_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Window slots of `slots` int64, in their shape."""
        return window_slots(self.table, slots, self.page_size)

    def stamp(self, pages: Sequence[int]) -> None:
        """As `KVPool.stamp`, with the window pages that the pages have now."""
        self.order.stamp(self._with_parts(pages))

    def store_rows(self, slots: torch.Tensor) -> StoreRows:
        full, part, places = self.kv, self.part.kv, self.layout.places
        rows = {True: kv_rows(self.slots_of(slots), part)}
        if self.layout.num_full:
            rows[False] = kv_rows(slots, full)

        def of(layer: int) -> tuple[torch.Tensor, int, torch.Tensor]:
            is_windowed, number = places[layer]
            return (part if is_windowed else full), number, rows[is_windowed]

        return of

    def copy_page(self, source: int, target: int) -> None:
        """As `KVPool.copy_page`, with the window page, if both have one."""
        super().copy_page(source, target)
        pages, parts = raw(self.part.kv), (self._told[source], self._told[target])
        if all(parts):
            pages[parts[1]].copy_(pages[parts[0]])

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The planes of a layer in the kind of pages that has it."""
        is_windowed, number = self.layout.places[layer]
        return (self.part.kv if is_windowed else self.kv)[:, number].unbind(1)

    def note_use(self, reads: Sequence[int], writes: Sequence[int]) -> None:
        """As `KVPool.note_use`, of the window pages that the pages have now as well."""
        self.order.use(reads=self._with_parts(reads), writes=self._with_parts(writes))

    def _with_parts(self, pages: Sequence[int]) -> list[int]:
        parts = [self._told[page] for page in pages]
        return [*pages, *(self.wire_page(part) for part in parts if part)]

    def __repr__(self) -> str:
        return (
            f"<WindowedPool {self.num_pages} pages x {self.page_bytes} B, "
            f"{self.num_window_pages} window pages x {self.part.page_bytes} B, {self.num_layers} layers, "
            f"{self.device}>"
        )
