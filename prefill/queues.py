"""The rooms of a prefill worker: queued, computed, or handed over and pinned for their reader."""

from dataclasses import dataclass
from enum import Enum

from ..worker.room import WorkerRoom
from ..worker.room_table import RoomTable


class PrefillState(Enum):
    """The state of a room. Every room leaves through `PrefillQueues.remove`."""

    QUEUED = "queued"  # no pages yet; owner: the scheduler
    RUNNING = "running"  # pages held, the prompt is being computed chunk by chunk; owner: the scheduler
    HANDED = "handed"  # computed; the pages are pinned for the reader; owner: the transport and its lease
    CLOSING = "closing"  # given up; the pages stay pinned until the transport reports their last read


@dataclass(kw_only=True)
class PrefillRoom(WorkerRoom):
    """One attempt on prefill. Times are monotonic seconds."""

    state: PrefillState = PrefillState.QUEUED
    started: float = 0.0
    finished: float = 0.0  # token 1 was sampled
    cached_tokens: int = 0
    chunks: int = 0
    is_looked_up: bool = False  # in the tiers below the pool
    num_known: int | None = None  # tokens of its prefix in the cache, when it was first looked for
    keeps_pages: bool = False  # its pages go to no other request

    @property
    def is_over(self) -> bool:
        """Whether the room was given up and only its pages wait for the transport."""
        return self.state is PrefillState.CLOSING

    @property
    def can_expire(self) -> bool:
        """Until token 1: a deadline no longer ends a room that was handed over."""
        return self.state in (PrefillState.QUEUED, PrefillState.RUNNING)


class PrefillQueues(RoomTable[PrefillRoom]):
    """The rooms of a prefill worker; at most `max_queue` wait."""

    def __init__(self, max_queue: int) -> None:
        super().__init__()
        self.max_queue = max_queue

    @property
    def is_full(self) -> bool:
        """Whether no further prompt may wait."""
        return self.count(PrefillState.QUEUED) >= self.max_queue
