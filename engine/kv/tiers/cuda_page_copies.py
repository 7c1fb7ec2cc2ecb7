"""Copies between the pages of a GPU and host slots, by its copy engines, with digests that the GPU computes.

Both threads that copy have a stream of their own, beside that of the forwards.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..page_order import PageOrder
from .device_digests import DeviceDigests
from .host_slab import HostSlab
from .jobs import PageMove
from .page_copies import PageCopies


class CudaPageCopies(PageCopies):
    """As `PageCopies`, for planes of a GPU. Raises ValueError for pages that it cannot digest."""

    def __init__(self, planes: Sequence[torch.Tensor], slab: HostSlab, order: PageOrder) -> None:
        super().__init__(planes, slab, order)
        slots = torch.from_numpy(slab.slots)
        # made once: as many views for each copy would hold it up by a millisecond
        self._there = [plane.unbind(0) for plane in planes]
        self._here = [slots[:, start:end].unbind(0) for start, end in self._parts]
        self._saves = _Lane(planes)
        self._loads = _Lane(planes, priority=-1)  # a request waits for it

    def save(self, moves: Sequence[PageMove]) -> list[int]:
        """As `PageCopies.save`. The digests are those of the pages before they were copied."""
        there, here = self._both(moves)
        with self._copying(self._saves, moves):
            self._saves.digests.begin([move.page for move in moves])
            # one call: each return to Python may wait for the interpreter's lock
            torch._foreach_copy_(here, there, non_blocking=True)
        return self._saves.digests.read([move.key for move in moves])

    def load(self, moves: Sequence[PageMove]) -> list[int]:
        """As `PageCopies.load`. The digests are those of the pages after they were copied."""
        there, here = self._both(moves)
        with self._copying(self._loads, moves):
            torch._foreach_copy_(there, here, non_blocking=True)
            self._loads.digests.begin([move.page for move in moves])
        return self._loads.digests.read([move.key for move in moves])

    def digest(self, move: PageMove) -> int:
        """The expected digest: a damaged page is found when it comes into the pool."""
        return move.digest

    def _both(self, moves: Sequence[PageMove]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parts of all pages in the planes, and in the slots."""
        there = [plane[move.page] for plane in self._there for move in moves]
        return there, [part[move.slot] for part in self._here for move in moves]

    @contextmanager
    def _copying(self, lane: "_Lane", moves: Sequence[PageMove]) -> Iterator[None]:
        """The stream of `lane` behind all work on the pages. At the end no copy is under way, after an error
        too: the caller gives the pages to others.
        """
        try:
            with torch.cuda.device(lane.stream.device), torch.cuda.stream(lane.stream):
                self._order.wait([move.page for move in moves], lane.stream)
                yield
        finally:
            lane.stream.synchronize()


class _Lane:
    """The stream of a thread that copies, and the digests on it."""

    def __init__(self, planes: Sequence[torch.Tensor], priority: int = 0) -> None:
        self.digests = DeviceDigests(planes)
        self.stream = torch.cuda.Stream(planes[0].device, priority=priority)  # type: ignore[no-untyped-call]
