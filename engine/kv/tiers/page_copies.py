"""Copies between the pages of an engine and host slots, with their digests.

A page's bytes in a slot are those of all planes, one behind the other: the KV, and the feature plane on
prefill or the draft's KV on decode. Copies of a GPU run on a stream of their own, behind the work that may
still use their pages: a page is stamped when it is allocated, and when it turns idle. All methods but `stamp`
are for the threads that copy, and block.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from crc32c import crc32c

from ..page_order import PageOrder
from .host_slab import Bytes, HostSlab
from .jobs import PageMove

MOST_THREADS = 8  # so many digest a load about as fast as a GPU's link copies it
CORES_PER_THREAD = 2  # the other cores of the host compute


def digest_of(key: bytes, data: Bytes) -> int:
    """The digest of a page's bytes under its key."""
    return int(crc32c(data.data, crc32c(key)))


class PageCopies:
    """Copies of `planes`, uint8 `[num_pages, bytes]` each, into and out of `slab`.

    `order`: of the first plane. All planes are written by the same stream.
    """

    def __init__(self, planes: Sequence[torch.Tensor], slab: HostSlab, order: PageOrder) -> None:
        assert sum(plane.shape[1] for plane in planes) == slab.page_bytes, (planes, slab)
        self.slab = slab
        self._planes = list(planes)
        self._order = order
        self._device = planes[0].device
        ends = np.cumsum([0] + [plane.shape[1] for plane in planes]).tolist()
        self._parts = list(pairwise(ends))
        self._streams = [
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for _ in range(2 * self._is_cuda)
        ]
        num_threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // CORES_PER_THREAD))
        self._pool = ThreadPoolExecutor(num_threads, "tier digest") if num_threads > 1 else None

    def __repr__(self) -> str:
        return f"<PageCopies of {len(self._planes)} planes on {self._device}>"

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def stamp(self, pages: Sequence[int]) -> None:
        """These pages turned idle: copies come behind all work launched so far. For the scheduler thread."""
        self._order.stamp(pages)

    def save(self, moves: Sequence[PageMove]) -> list[int]:
        """Copies pages into slots. Returns their digests."""
        if self._is_cuda:
            self._copy_cuda(moves, self._streams[0], is_save=True)
        else:
            for move in moves:
                self._wait(move.page, is_write=False)
                slot = self.slab.page(move.slot)
                for plane, (start, end) in zip(self._planes, self._parts, strict=True):
                    np.copyto(slot[start:end], plane[move.page].numpy())
        return self._digests(moves)

    def load(self, moves: Sequence[PageMove]) -> list[int]:
        """Copies slots into pages. Returns the digests of what was copied."""
        if self._is_cuda:
            # digested meanwhile: a slot that is read here is not written
            return self._copy_cuda(
                moves, self._streams[1], is_save=False, meanwhile=lambda: self._digests(moves)
            )
        for move in moves:
            self._wait(move.page, is_write=True)
            slot = self.slab.page(move.slot)
            for plane, (start, end) in zip(self._planes, self._parts, strict=True):
                np.copyto(plane[move.page].numpy(), slot[start:end])
        return self._digests(moves)

    def digest(self, key: bytes, slot: int) -> int:
        """The digest of the page in a slot."""
        return digest_of(key, self.slab.page(slot))

    def _wait(self, page: int, *, is_write: bool) -> None:
        self._order.wait([page])
        self._order.touch(page, is_write=is_write)

    def _digests(self, moves: Sequence[PageMove]) -> list[int]:
        if self._pool is None or len(moves) < 2:
            return [self.digest(move.key, move.slot) for move in moves]
        return list(self._pool.map(lambda move: self.digest(move.key, move.slot), moves))

    def _copy_cuda(
        self,
        moves: Sequence[PageMove],
        stream: torch.cuda.Stream,
        *,
        is_save: bool,
        meanwhile: Callable[[], list[int]] = list,
    ) -> list[int]:
        """Copies on `stream`; returns what `meanwhile` returns, when all copies are done.

        After an error too, no copy is under way: the caller gives the pages to others.
        """
        slots = torch.from_numpy(self.slab.slots)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                self._order.wait([move.page for move in moves], stream)
                pages = [plane[move.page] for move in moves for plane in self._planes]
                places = [slots[move.slot, start:end] for move in moves for start, end in self._parts]
                # one call: each return to Python may wait for the interpreter's lock
                torch._foreach_copy_(*((places, pages) if is_save else (pages, places)), non_blocking=True)
            return meanwhile()
        finally:
            stream.synchronize()
