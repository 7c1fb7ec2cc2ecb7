"""The rooms of a prefill server: who waits, who is being computed, whose pages wait for their reader."""

from dataclasses import dataclass
from enum import Enum

from ..cluster.telemetry.trace_context import NOWHERE, TraceContext
from ..engine.request import Request
from ..kvtransfer.room_table import RoomTable


class RoomState(Enum):
    """Where a room stands; it leaves by exactly one road, `PrefillQueues.remove`."""

    QUEUED = "queued"  # no pages yet; owner: the scheduler
    RUNNING = "running"  # pages held, the prompt is being computed chunk by chunk; owner: the scheduler
    HANDED = "handed"  # computed; the pages are pinned for the reader; owner: the transport and its lease
    CLOSING = "closing"  # given up; the pages are pinned until the transport says that nothing reads them


@dataclass(kw_only=True)
class Room:
    """One room on prefill. Times are monotonic seconds."""

    request: Request
    arrived: float
    deadline: float | None
    state: RoomState = RoomState.QUEUED
    started: float = 0.0
    finished: float = 0.0  # token 1 was sampled
    cached_tokens: int = 0
    chunks: int = 0

    trace: TraceContext = NOWHERE  # of the router's span, where the request is traced
    gone_epoch: int = -1  # of the Cancel that waits for this attempt's pages; -1: none does
    is_tainted: bool = False  # its KV must not be reused

    @property
    def key(self) -> tuple[str, int]:
        """(room, epoch)"""
        return self.request.room, self.request.epoch


class PrefillQueues(RoomTable[Room]):
    """The rooms of a prefill server; at most `max_queue` wait."""

    def __init__(self, max_queue: int) -> None:
        super().__init__()
        self.max_queue = max_queue

    @property
    def is_full(self) -> bool:
        return self.count(RoomState.QUEUED) >= self.max_queue
