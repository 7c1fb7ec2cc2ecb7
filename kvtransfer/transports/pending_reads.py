"""Reads that a transport has under way after a send, and the terminal events that wait for them."""

from collections.abc import Callable

import torch

from ..memory.blocks import Payload
from ..transport import Dropped, Released
from .endpoint import Delivery


class PendingReads:
    """Reads of a room's own pages, and of staging buffers, that are under way."""

    def __init__(self, recycle: Callable[[torch.Tensor], None]) -> None:
        self._recycle = recycle
        self._pages: dict[tuple[str, int], list[Delivery]] = {}  # by room and epoch
        self._held: list[
            tuple[Released | Dropped, float]
        ] = []  # waits until those are done, or the time has come
        self._staging: list[tuple[Delivery, torch.Tensor]] = []

    def __repr__(self) -> str:
        return f"PendingReads(rooms={len(self._pages)}, staging={len(self._staging)}, held={len(self._held)})"

    @property
    def is_waiting(self) -> bool:
        """Whether `settle` has something to look at soon."""
        return bool(self._held or self._staging)

    def add(self, room: str, epoch: int, payload: Payload, delivery: Delivery) -> None:
        """A payload of a room was handed to the transport."""
        if payload.staging is not None:
            self._staging.append((delivery, payload.staging))
        elif not delivery.done:
            self._pages.setdefault((room, epoch), []).append(delivery)

    def hold(self, event: Released | Dropped, until: float) -> None:
        """Keeps the end of a room back while its pages are read, at the longest until then."""
        self._held.append((event, until))

    def forget(self, room: str, epoch: int) -> None:
        """Drops the held events of this room and its earlier attempts: the owner waits for them no more."""
        self._held = [(e, until) for e, until in self._held if e.room != room or e.epoch > epoch]

    def settle(self, now: float) -> list[Released | Dropped]:
        """Gives back the buffers whose reads are done; returns the terminal events that are due."""
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
