"""Copies between the pages of an engine and host slots, with their digests.

A page's bytes in a slot are those of all planes, one behind the other: the KV, and the feature plane on
prefill or the draft's KV on decode. Copies come behind the work that may still use their pages
(`page_order`). All methods are for the threads that copy, and block.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from crc32c import crc32c

from ..page_order import PageOrder
from .host_slab import Bytes, HostSlab
from .jobs import PageMove


def digest_of(key: bytes, data: Bytes) -> int:
    """The digest of a page's bytes under its key, computed by the host."""
    return int(crc32c(data.data, crc32c(key)))


class PageCopies:
    """Copies of `planes`, uint8 `[num_pages, bytes]` each in the host's memory, into and out of `slab`.

    `order`: of the first plane. All planes are written by the same work.
    """

    def __init__(self, planes: Sequence[torch.Tensor], slab: HostSlab, order: PageOrder) -> None:
        assert sum(plane.shape[1] for plane in planes) == slab.page_bytes, (planes, slab)
        self.slab = slab
        self._planes = list(planes)
        self._order = order
        self._parts = list(pairwise(accumulate((plane.shape[1] for plane in planes), initial=0)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._planes)} planes on {self._planes[0].device}>"

    def save(self, moves: Sequence[PageMove]) -> list[int]:
        """Copies pages into slots. Returns their digests."""
        for move in moves:
            self._wait(move.page, is_write=False)
            slot = self.slab.page(move.slot)
            for plane, (start, end) in zip(self._planes, self._parts, strict=True):
                np.copyto(slot[start:end], plane[move.page].numpy())
        return self._digests(moves)

    def load(self, moves: Sequence[PageMove]) -> list[int]:
        """Copies slots into pages. Returns the digests of what was copied."""
        for move in moves:
            self._wait(move.page, is_write=True)
            slot = self.slab.page(move.slot)
            for plane, (start, end) in zip(self._planes, self._parts, strict=True):
                np.copyto(plane[move.page].numpy(), slot[start:end])
        return self._digests(moves)

    def digest(self, move: PageMove) -> int:
        """The digest of the page that lies in the slot of `move` now."""
        return digest_of(move.key, self.slab.page(move.slot))

    def _wait(self, page: int, *, is_write: bool) -> None:
        self._order.wait([page])
        self._order.touch(page, is_write=is_write)

    def _digests(self, moves: Sequence[PageMove]) -> list[int]:
        return [digest_of(move.key, self.slab.page(move.slot)) for move in moves]
