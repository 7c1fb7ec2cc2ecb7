"""What rank 0 of a tensor-parallel worker tells the other ranks of its hand-offs, and what they answer.

All ranks are processes of one worker, on one host and of one release, so nothing here is versioned.
"""

from typing import TypeAlias

import msgspec

from ...cluster.protocol.messages import Layout
from ..transport import Complete, Dropped, Landed, Lost, Offer, Released


class BeginRank(msgspec.Struct, frozen=True, tag=True):
    """The first command: open the rank's end; answered with `RankReady`. `layout`: of all ranks."""

    layout: Layout


class OfferPart(msgspec.Struct, frozen=True, tag=True):
    """Prefill: open the rank's part of a room."""

    offer: Offer


class AdvancePart(msgspec.Struct, frozen=True, tag=True):
    """Prefill: tokens [0, `tokens_ready`) are final on all ranks, as `KVTransport.advance`."""

    room: str
    epoch: int
    tokens_ready: int
    first_token: int | None
    ready_at: float | None


class PullPart(msgspec.Struct, frozen=True, tag=True):
    """Decode: pull the rank's KV heads of a room, as `PullRequest`. `endpoint`: that of prefill's rank 0."""

    room: str
    epoch: int
    num_tokens: int
    have: int
    pages: tuple[int, ...]
    endpoint: str
    peer_instance: str


class ReleasePart(msgspec.Struct, frozen=True, tag=True):
    """End the rank's part of a room now; answered with `PartGone`."""

    room: str
    epoch: int
    reason: str


Command: TypeAlias = BeginRank | OfferPart | AdvancePart | PullPart | ReleasePart


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank serves hand-offs. `endpoint`: prefill's address for decode's ranks, else ""."""

    rank: int
    endpoint: str


class PartReleased(msgspec.Struct, frozen=True, tag=True):
    """Decode holds all that it pulls from this rank."""

    event: Released


class PartDropped(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of an offer has ended badly."""

    event: Dropped


class PartLanded(msgspec.Struct, frozen=True, tag=True):
    """Tokens are in place on this rank."""

    event: Landed


class PartComplete(msgspec.Struct, frozen=True, tag=True):
    """All tokens are in place on this rank."""

    event: Complete


class PartLost(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of a pull has ended badly."""

    event: Lost


class PartGone(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReleasePart`: the rank does not touch the pages of the attempt any more."""

    room: str
    epoch: int


class RankCounters(msgspec.Struct, frozen=True, tag=True):
    """The rank's totals of transfers, by name."""

    totals: dict[str, float]


Report: TypeAlias = (
    RankReady | PartReleased | PartDropped | PartLanded | PartComplete | PartLost | PartGone | RankCounters
)
PartEvent: TypeAlias = Released | Dropped | Landed | Complete | Lost

_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """The bytes of a message."""
    return msgspec.msgpack.encode(message)


def decode_command(data: bytes) -> Command:
    """The command in `data`. Raises msgspec.DecodeError for anything else."""
    return _COMMANDS.decode(data)


def decode_report(data: bytes) -> Report:
    """The report in `data`. Raises msgspec.DecodeError for anything else."""
    return _REPORTS.decode(data)


def report_of(event: PartEvent) -> Report:
    """What a rank tells rank 0 of an event of its transport."""
    match event:
        case Released():
            return PartReleased(event)
        case Dropped():
            return PartDropped(event)
        case Landed():
            return PartLanded(event)
        case Complete():
            return PartComplete(event)
        case Lost():
            return PartLost(event)
