"""The rooms of a decode worker: prompt on its way or computed here, draft prefill, decode batch."""

import math
from dataclasses import dataclass
from enum import Enum

import torch

from ..cluster.protocol.messages import DecodeTimeline, OfferPrefix, PrefillTimeline, Reserve
from ..worker.room import WorkerRoom
from ..worker.room_table import RoomTable


class DecodeState(Enum):
    """The state of a room. Every room leaves through `DecodeQueues.remove`."""

    ADMITTING = "admitting"  # holds nothing until less urgent rooms have made way; owner: the scheduler
    RESTORING = "restoring"  # pages are reserved, a prefix comes back from a lower tier; owner: the scheduler
    PREFILLING = "prefilling"  # pages are reserved and the prompt is computed here; owner: the scheduler
    SHARING = "sharing"  # pages are reserved, those of the prompt are another room's; owner: that room
    PULLING = "pulling"  # pages are reserved and blocks land in them; owner: the transport and its lease
    WARMING = "warming"  # everything landed, the draft prefill is not done; owner: the scheduler
    RUNNING = "running"  # in the decode batch; owner: the scheduler
    CLOSING = "closing"  # given up while pulling; the pages wait until the transport no longer writes them
    SETTLING = "settling"  # ended; the pages wait until the steps launched with the room were read


@dataclass(frozen=True, kw_only=True)
class OutputClaim:
    """Output tokens of an attempt: those to count on (0: all), and those whose pages it holds at once."""

    expected: int = 0
    granted: int = 0


HOLD_ALL = OutputClaim()


@dataclass(kw_only=True)
class DecodeRoom(WorkerRoom):
    """One attempt on decode. Times are monotonic seconds, row counts are prompt tokens.

    `features` `[pages pulled, page_size, K*H]`: the staging area of the aux features of the pulled pages;
    None once the draft prefill has consumed them, and where no drafter runs.
    """

    have: int = 0
    features: torch.Tensor | None = None
    state: DecodeState = DecodeState.ADMITTING
    landed: int = 0  # prompt tokens whose KV and features are in place
    warmed: int = 0  # draft rows that are in the draft pool
    sent: int = 1  # output tokens that the router knows, prefill's included
    is_local: bool = False  # the prompt is computed here, or shared
    leader: tuple[str, int] | None = None  # the key of the room whose prompt pages it shares
    order: Reserve | None = None  # to be pulled, once it is admitted and its prefix is restored
    offer: OfferPrefix | None = None  # of its prefix to prefill, once that is in place
    head_number: int = 0  # of the drafter's weights at its start, see `HeadSwap`
    may_record: bool = False  # its tokens may be recorded for training
    claim: OutputClaim = HOLD_ALL
    granted_pages: int = 0  # of its pages, those that no other room takes
    covered_output: float = math.inf  # output tokens that its pages hold; infinite: all that it may have
    landed_at: float = 0.0
    started_at: float = 0.0
    handoff_s: float = 0.0
    handoff_bytes: int = 0
    handoff_blocks: int = 0
    handoff_shm_blocks: int = 0
    handoff_device_blocks: int = 0
    handoff_nixl_blocks: int = 0
    draft_prefill_s: float = 0.0
    prefill_started: float = 0.0  # of a prompt that is computed here, like the next two
    prefill_ended: float = 0.0
    chunks: int = 0
    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    num_unread: int = 0  # steps that were launched with the room and not read

    @property
    def is_settled(self) -> bool:
        """Whether no launched step can still write to its pages."""
        return self.num_unread == 0

    @property
    def computes_prompt(self) -> bool:
        """Whether its prompt is computed here, from the parts before the last pages on."""
        return self.is_local and self.leader is None and self.state is DecodeState.PREFILLING

    @property
    def is_over(self) -> bool:
        """Whether the room has ended and only its pages wait for their last writer."""
        return self.state in (DecodeState.CLOSING, DecodeState.SETTLING)

    @property
    def can_expire(self) -> bool:
        """Until its end."""
        return not self.is_over

    def prefill_timeline(self) -> PrefillTimeline:
        """Times and counts of a prompt that was computed here."""
        return PrefillTimeline(
            queue_ms=max(0.0, self.prefill_started - self.arrived) * 1000,
            prefill_ms=(self.prefill_ended - self.prefill_started) * 1000,
            prompt_tokens=self.request.num_prompt,
            cached_tokens=self.have,
            chunks=self.chunks,
            work_ms=self.work_s * 1000,
        )

    def timeline(self, now: float) -> DecodeTimeline:
        """Times and counts of decode for the room until `now`."""
        return DecodeTimeline(
            handoff_ms=self.handoff_s * 1000,
            handoff_bytes=self.handoff_bytes,
            handoff_blocks=self.handoff_blocks,
            handoff_shm_blocks=self.handoff_shm_blocks,
            handoff_device_blocks=self.handoff_device_blocks,
            handoff_nixl_blocks=self.handoff_nixl_blocks,
            have_tokens=self.have,
            draft_prefill_ms=self.draft_prefill_s * 1000,
            queue_ms=max(0.0, self.started_at - self.landed_at) * 1000,
            decode_ms=max(0.0, now - self.started_at) * 1000 if self.started_at else 0.0,
            verify_steps=self.verify_steps,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
        )


def claim_order(room: DecodeRoom) -> tuple[int, float, tuple[str, int]]:
    """Sorts rooms by their claims: the urgent class first, then the older one. No two rooms are equal."""
    return room.priority, room.arrived, room.key


class DecodeQueues(RoomTable[DecodeRoom]):
    """The rooms of a decode worker; at most `max_running` of them."""

    def __init__(self, max_running: int) -> None:
        super().__init__()
        self.max_running = max_running

    @property
    def num_held(self) -> int:
        """Places of the batch that rooms hold."""
        return len(self) - self.count(DecodeState.ADMITTING)

    @property
    def is_full(self) -> bool:
        """Whether no further room fits.

        A room holds its place in the batch from its admission to its end, so a landed room never waits for
        one.
        """
        return self.num_held >= self.max_running
