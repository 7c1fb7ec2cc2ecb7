"""A transport's unfinished reads of sent payloads, and the terminal events that wait for them."""

from collections.abc import Callable

import torch

from ..memory.blocks import Payload
from ..transport import Dropped, Released
from .endpoint import Delivery


class PendingReads:
    """Unfinished reads of rooms' pages and of staging buffers.

    `recycle` takes back a buffer that was read.
    """

    def __init__(self, recycle: Callable[[torch.Tensor], None]) -> None:
        self._recycle = recycle
        self._pages: dict[tuple[str, int], list[Delivery]] = {}  # by room and epoch
        self._held: list[
            tuple[Released | Dropped, float]
        ] = []  # terminal events with the latest time of their release
        self._staging: list[tuple[Delivery, torch.Tensor]] = []

    def __repr__(self) -> str:
        return f"PendingReads(rooms={len(self._pages)}, staging={len(self._staging)}, held={len(self._held)})"

    @property
    def is_waiting(self) -> bool:
        """Whether `settle` has reads or events to check soon."""
        return bool(self._held or self._staging)

    def add(self, room: str, epoch: int, payload: Payload, delivery: Delivery) -> None:
        """Records a payload of a room that the transport reads until `delivery` is done."""
        if payload.staging is not None:
            self._staging.append((delivery, payload.staging))
        elif not delivery.done:
            self._pages.setdefault((room, epoch), []).append(delivery)

    def hold(self, event: Released | Dropped, until: float) -> None:
        """Holds a terminal event back while the room's pages are read, at most until `until` (monotonic
        seconds).
        """
        self._held.append((event, until))

    def forget(self, room: str, epoch: int) -> None:
        """Drops the held events of this room and its earlier attempts, because the owner no longer waits for
        them.
        """
        self._held = [(e, until) for e, until in self._held if e.room != room or e.epoch > epoch]

    def settle(self, now: float) -> list[Released | Dropped]:
        """Recycles the buffers whose reads are done. Returns the terminal events that are due at `now`."""
        busy: list[tuple[Delivery, torch.Tensor]] = []
        for delivery, staging in self._staging:
            if delivery.done:
                self._recycle(staging)
            else:
                busy.append((delivery, staging))
        self._staging = busy
        for key, deliveries in list(self._pages.items()):
            deliveries[:] = [delivery for delivery in deliveries if not delivery.done]
            if not deliveries:
                del self._pages[key]
        due: list[Released | Dropped] = []
        held: list[tuple[Released | Dropped, float]] = []
        for event, until in self._held:
            key = (event.room, event.epoch)
            if key in self._pages and now < until:
                held.append((event, until))
            else:
                self._pages.pop(key, None)
                due.append(event)
        self._held = held
        return due
