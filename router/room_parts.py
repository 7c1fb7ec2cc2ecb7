"""What a room is made of: its phases, the workers that may hold something of it, and its moments."""

from dataclasses import dataclass
from enum import Enum

from ..cluster.messages import Failed, Finished, FirstToken, Gone, Refused, Reserved, TokenItem

RoomEvent = Reserved | Refused | FirstToken | TokenItem | Finished | Failed | Gone


class Phase(Enum):
    """Where a room stands; see the table in `rooms`."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass
class Hold:
    """A worker that may hold something of an attempt."""

    instance: str
    epoch: int
    cancelled_at: float | None = None


@dataclass
class Stamps:
    """When things happened to a room, in monotonic seconds; None: not yet."""

    created: float
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
