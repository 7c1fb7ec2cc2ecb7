"""The owner of each room of a worker: the router that opened it.

Only the owner gets the room's messages and can end it. A worker serves several routers with one batch and one
pool of pages. Its scheduler knows only rooms; `RoomOwners` records the owner of each incoming order and
addresses outgoing messages. The loss of a router ends only its own rooms. Room ids are random, so two routers
never use one id for different rooms.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from msgspec.structs import replace

from ..cluster.process.log import fields
from ..cluster.protocol.messages import (
    Cancel,
    ControlDown,
    ControlUp,
    Goodbye,
    Heartbeat,
    HeldPrefixes,
    Hello,
    OfferPrefix,
    Prefill,
    PromptEmbeds,
    Reserve,
    TokenItem,
    Tokens,
)

logger = logging.getLogger(__name__)

EVERY = -1  # in place of a router's number: all routers at the time of sending


@dataclass(frozen=True, kw_only=True)
class FromRouter:
    """A message with the number of the router that sent it."""

    router: int
    message: ControlDown


@dataclass(frozen=True, kw_only=True)
class ToRouter:
    """A message with the number of the router that receives it, or EVERY."""

    router: int
    message: ControlUp


@dataclass(frozen=True, kw_only=True)
class RouterLost:
    """Event: a router is gone or was replaced, so its `rooms` have no reader."""

    router: int
    reason: str
    rooms: frozenset[str] = frozenset()


class RoomOwners:
    """Room ids and their routers.

    Only the scheduler thread uses it, in the order of received events and sent messages.
    """

    def __init__(self) -> None:
        self.num_foreign = 0  # messages about another router's room, dropped
        self._owner: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"RoomOwners({len(self._owner)} rooms of {len(set(self._owner.values()))} routers)"

    def take(self, event: FromRouter | RouterLost) -> ControlDown | RouterLost | None:
        """The event for the worker.

        None for a message about another router's room, which is dropped and counted.
        """
        if isinstance(event, RouterLost):
            rooms = frozenset(room for room, owner in self._owner.items() if owner == event.router)
            for room in rooms:
                del self._owner[room]
            return RouterLost(router=event.router, reason=event.reason, rooms=rooms)
        message = event.message
        if isinstance(message, OfferPrefix):  # it opens no room
            if message.room is None or self._owner.get(message.room, event.router) == event.router:
                return message
            self._count_foreign(message.room)
            return None
        if not isinstance(message, (Reserve, Prefill, PromptEmbeds, Cancel)):
            return message
        if self._owner.setdefault(message.room, event.router) == event.router:
            return message
        self._count_foreign(message.room)
        return None

    def _count_foreign(self, room: str) -> None:
        """Counts a message about another router's room."""
        self.num_foreign += 1
        logger.warning("another router's room: message dropped", extra=fields(room=room))

    def address(self, message: ControlUp) -> list[ToRouter]:
        """The message with its receivers.

        A message about the worker goes to every router, a message about a room to its owner, or to none
        without an owner.
        """
        if isinstance(message, (Heartbeat, HeldPrefixes, Goodbye, Hello)):
            return [ToRouter(router=EVERY, message=message)]
        if isinstance(message, Tokens):
            return self._split(message)
        owner = self._owner.get(message.room)
        return [] if owner is None else [ToRouter(router=owner, message=message)]

    def retain(self, rooms: Collection[str]) -> None:
        """Forget every room but `rooms`. Call it when all events that were taken have been handled."""
        self._owner = {room: owner for room, owner in self._owner.items() if room in rooms}

    def _split(self, message: Tokens) -> list[ToRouter]:
        """One message for each router that owns items of `message`."""
        items: dict[int, list[TokenItem]] = {}
        for item in message.items:
            owner = self._owner.get(item.room)
            if owner is not None:
                items.setdefault(owner, []).append(item)
        return [ToRouter(router=owner, message=replace(message, items=own)) for owner, own in items.items()]
