"""The rooms of a prefill worker: queued, computed, or handed over and pinned for their reader."""

from dataclasses import dataclass
from enum import Enum

from ..cluster.protocol.messages import PrefixPull
from ..worker.room import WorkerRoom
from ..worker.room_table import RoomTable


class PrefillState(Enum):
    """The state of a room. Every room leaves through `PrefillQueues.remove`."""

    QUEUED = "queued"  # no pages yet; owner: the scheduler
    RUNNING = "running"  # pages held, the prompt is being computed chunk by chunk; owner: the scheduler
    HANDED = "handed"  # computed; the pages are pinned for the reader; owner: the transport and its lease
    CLOSING = "closing"  # given up; the pages stay pinned until the transport reports their last read


@dataclass(kw_only=True, eq=False)
class RunningPull:
    """A pull that the transport works on. Times are monotonic seconds, counts are tokens.

    `room`: the one that waits for it; None: it has ended. `pages`: those that blocks land in.
    """

    order: PrefixPull
    room: "PrefillRoom | None"
    first: int
    pages: list[int]
    began: float
    until: float
    landed: int
    is_dropped: bool = False  # the transport was told to let go


@dataclass(kw_only=True)
class PrefillRoom(WorkerRoom):
    """One attempt on prefill. Times are monotonic seconds."""

    state: PrefillState = PrefillState.QUEUED
    started: float = 0.0
    finished: float = 0.0  # token 1 was sampled
    cached_tokens: int = 0
    chunks: int = 0
    is_looked_up: bool = False  # in the tiers below the pool, and for what a decode worker has
    num_known: int | None = None  # tokens of its prefix in the cache, when it was first looked for
    keeps_pages: bool = False  # its pages go to no other request
    pull: PrefixPull | None = None  # where a part of the prompt may be pulled from; None: nowhere any more
    running_pull: RunningPull | None = None  # the pull that it waits for
    takes_bare: bool = False  # decode reads no features of the prompt
    num_whole: int | None = None  # pages before the first bare one of its prompt; None: none is bare
    pulled_tokens: int = 0  # of the cached ones
    pull_s: float = 0.0  # wait for pulls
    pull_end: str = ""  # as in PrefillTimeline

    @property
    def bare_limit(self) -> int:
        """Tokens of the prompt within which bare pages may be used, the decode worker permitting."""
        if self.takes_bare:
            return self.request.num_prompt
        return self.pull.tokens if self.pull is not None and self.pull.is_reader else 0

    @property
    def bare_tokens(self) -> int:
        """Leading tokens of the prompt whose pages are not all whole."""
        return 0 if self.num_whole is None else self.cached_tokens

    @property
    def is_waiting(self) -> bool:
        """Whether a part of its prompt is on its way, from a lower tier or from a decode worker."""
        return self.restore is not None or self.running_pull is not None

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
