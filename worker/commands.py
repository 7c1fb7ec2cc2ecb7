"""Commands from a scheduler to its link thread, and the events that come back.

Messages for a router travel like commands. Control messages and transport events travel like events.
"""

from dataclasses import dataclass

from ..cluster.protocol.messages import ControlDown
from ..kvtransfer.transport import Offer, PullRequest, TransportEvent
from .room_owners import FromRouter, RouterLost


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Command: tokens [0, tokens_ready) of an offer are final; `first_token` closes the offer.

    `ready_at`: monotonic time at which they were known to be final; None: when the command is performed.
    """

    room: str
    epoch: int
    tokens_ready: int
    first_token: int | None = None
    ready_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Underway:
    """Command: the forward that writes tokens [`start`, `tokens`) of an offer was launched."""

    room: str
    epoch: int
    start: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Command: give a room up. `DropDone` answers it."""

    room: str
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class DropDone:
    """Event: the answer to Drop.

    Nothing writes to the room's pages any more. A read in flight fails its digest.
    """

    room: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Nudge:
    """Event: another thread of the worker has something for the scheduler's next turn."""


@dataclass(frozen=True, kw_only=True)
class LinkFailed:
    """Event: the link thread died of `error`; the worker cannot go on."""

    error: Exception


Command = Offer | PullRequest | Underway | Advance | Drop
LinkEvent = ControlDown | TransportEvent | DropDone | RouterLost | LinkFailed | Nudge
Sourced = (
    FromRouter | TransportEvent | DropDone | RouterLost | LinkFailed | Nudge
)  # before the room's owner is noted
