"""The rooms of a tensor-parallel worker, joined from those of its ranks, without I/O.

A room is open on every rank, over pages of the same ids. It ends well when it did on all ranks. The first
rank on which it ends badly ends it everywhere: the others are told to release it, and the owner hears of the
end when none of them touches the pages any more. Both roles follow these rules; events differ.

  open on all ranks --Released | Complete--> open on fewer --the last--> Released | Complete
                    --Dropped | Lost, or a rank is lost--> others told to release --the last--> the failure
                    --release of the owner--> all told to release --the last--> Freed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...cluster.errors import LocalProtocolError
from ..protocol.rank_pairs import Shard, receivers_of
from ..protocol.receiver import joined
from ..transport import Attached, Complete, Dropped, Freed, Landed, Lost, Released, TransportEvent

Key = tuple[str, int]  # room, epoch


@dataclass(frozen=True)
class TellRelease:
    """Effect: rank `rank` shall release an attempt, and answer when it has."""

    rank: int
    room: str
    epoch: int
    reason: str


@dataclass(frozen=True)
class Tell:
    """Effect: the owner of the worker's rooms gets an event."""

    event: TransportEvent


JoinEffect = TellRelease | Tell


@dataclass
class JoinedRoom:
    """An attempt on all ranks of this worker."""

    room: str
    epoch: int
    open_on: set[int]  # ranks that may touch its pages
    told: set[int] = field(default_factory=set)  # ranks that were told to release it
    landed: dict[int, int] = field(default_factory=dict)  # tokens in place, by rank
    landed_everywhere: int = -1
    complete: dict[int, Complete] = field(default_factory=dict)
    failure: Dropped | Lost | None = None
    is_silent: bool = False  # the owner has released it, or a later attempt
    num_releases: int = 0  # of the owner, each of which gets a Freed

    def __repr__(self) -> str:
        state = "ending" if self.is_silent or self.failure else "open"
        return f"JoinedRoom({self.room[:8]}.{self.epoch} {state} on ranks {sorted(self.open_on)})"


class RoomJoin:
    """All rooms of a worker with `num_ranks` ranks and `num_heads` KV heads."""

    def __init__(self, num_ranks: int, num_heads: int) -> None:
        self.num_ranks = num_ranks
        self.lost_ranks: dict[int, str] = {}
        self._num_heads = num_heads
        self._rooms: dict[Key, JoinedRoom] = {}

    def __repr__(self) -> str:
        return f"RoomJoin(ranks={self.num_ranks}, rooms={len(self._rooms)}, lost={sorted(self.lost_ranks)})"

    @property
    def num_rooms(self) -> int:
        """Attempts whose pages some rank may touch."""
        return len(self._rooms)

    def open(self, room: str, epoch: int) -> None:
        """The owner opens an attempt on all ranks.

        Raises LocalProtocolError if it is open, or a rank was lost.
        """
        if self.lost_ranks:
            raise LocalProtocolError(f"rank {min(self.lost_ranks)} of this worker was lost")
        if (room, epoch) in self._rooms:
            raise LocalProtocolError(f"room {room} is open at epoch {epoch}")
        self._rooms[room, epoch] = JoinedRoom(room, epoch, set(range(self.num_ranks)))

    def refused(self, room: str, epoch: int) -> None:
        """Rank 0's transport refused to open the attempt, and no other rank has heard of it."""
        del self._rooms[room, epoch]

    def release(self, room: str, epoch: int, reason: str) -> list[JoinEffect]:
        """The owner ends an attempt, open or not, and earlier ones of the room.

        The only event that follows is a Freed for the attempt.
        """
        effects: list[JoinEffect] = []
        if (room, epoch) not in self._rooms:
            ranks = set(range(self.num_ranks)) - self.lost_ranks.keys()
            self._rooms[room, epoch] = JoinedRoom(room, epoch, ranks)
        for known in [one for one in self._rooms.values() if one.room == room and one.epoch <= epoch]:
            known.is_silent = True
            known.num_releases += known.epoch == epoch
            effects += self._end(known, reason)
        return effects

    def happened(self, rank: int, event: TransportEvent) -> list[JoinEffect]:
        """An event of a rank's transport."""
        known = self._rooms.get((event.room, event.epoch))
        if known is None or rank not in known.open_on:
            return []
        match event:
            case Attached():
                return self._attached(known, event.num_ranks)
            case Landed():
                return self._landed(known, rank, event.tokens)
            case Complete():
                return self._completed(known, rank, event)
            case Released():
                return self._left(known, rank)
            case Dropped() | Lost():
                return self._failed(known, rank, replace(event, reason=f"rank {rank}: {event.reason}"))
            case Freed():
                raise AssertionError("a rank has a transport of its own")

    def gone(self, rank: int, room: str, epoch: int) -> list[JoinEffect]:
        """A rank has released an attempt as it was told."""
        known = self._rooms.get((room, epoch))
        return [] if known is None or rank not in known.told else self._left(known, rank)

    def rank_lost(self, rank: int, reason: str, *, is_decode: bool) -> list[JoinEffect]:
        """The process of a rank has died: it touches no pages any more, and its part of each room is gone."""
        self.lost_ranks[rank] = reason
        effects: list[JoinEffect] = []
        for known in list(self._rooms.values()):
            if rank not in known.open_on:
                continue
            failure: Dropped | Lost = Dropped(room=known.room, epoch=known.epoch, reason=reason)
            if is_decode:
                failure = Lost(room=known.room, epoch=known.epoch, kind="PeerLost", reason=reason)
            effects += self._failed(known, rank, failure)
        return effects

    def _attached(self, known: JoinedRoom, num_receivers: int) -> list[JoinEffect]:
        """Decode has `num_receivers` ranks. Ranks here from which none of them pulls are done."""
        idle = [
            rank
            for rank in sorted(known.open_on - known.told)
            if not receivers_of(self._num_heads, Shard(rank, self.num_ranks), num_receivers)
        ]
        return self._tell_release(known, idle, "decode pulls its KV heads from other ranks")

    def _landed(self, known: JoinedRoom, rank: int, tokens: int) -> list[JoinEffect]:
        known.landed[rank] = tokens
        if known.failure or known.is_silent or len(known.landed) < self.num_ranks:
            return []
        everywhere = min(known.landed.values())
        if everywhere <= known.landed_everywhere:
            return []
        known.landed_everywhere = everywhere
        return [Tell(Landed(room=known.room, epoch=known.epoch, tokens=everywhere))]

    def _completed(self, known: JoinedRoom, rank: int, event: Complete) -> list[JoinEffect]:
        known.complete[rank] = event
        if {one.first_token for one in known.complete.values()} != {event.first_token}:
            reason = "ranks got different first tokens"
            failure = Lost(room=known.room, epoch=known.epoch, kind="RemoteProtocolError", reason=reason)
            return self._failed(known, rank, failure)
        return self._left(known, rank)

    def _failed(self, known: JoinedRoom, rank: int, failure: Dropped | Lost) -> list[JoinEffect]:
        known.failure = known.failure or failure
        known.open_on.discard(rank)
        effects = self._end(known, failure.reason)
        return effects if known.open_on else [*effects, *self._over(known)]

    def _left(self, known: JoinedRoom, rank: int) -> list[JoinEffect]:
        known.open_on.discard(rank)
        return [] if known.open_on else self._over(known)

    def _end(self, known: JoinedRoom, reason: str) -> list[JoinEffect]:
        """Tells the ranks that still have the attempt to release it."""
        return self._tell_release(known, sorted(known.open_on - known.told), reason)

    def _tell_release(self, known: JoinedRoom, ranks: Sequence[int], reason: str) -> list[JoinEffect]:
        known.told.update(ranks)
        return [TellRelease(rank, known.room, known.epoch, reason) for rank in ranks]

    def _over(self, known: JoinedRoom) -> list[JoinEffect]:
        """No rank touches the pages any more."""
        if self._rooms.pop((known.room, known.epoch), None) is None:
            return []
        if known.is_silent:
            return [Tell(Freed(room=known.room, epoch=known.epoch)) for _ in range(known.num_releases)]
        if known.failure is not None:
            return [Tell(known.failure)]
        if known.complete:
            return [Tell(joined([known.complete[rank] for rank in sorted(known.complete)]))]
        return [Tell(Released(room=known.room, epoch=known.epoch))]
