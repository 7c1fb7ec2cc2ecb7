"""What a room asks of its surroundings, and the small records that it is made with."""

from dataclasses import dataclass, field

from ..cluster.messages import Cancel, Prefill, Reserve, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Longest time without progress per state, in seconds."""

    reserve_s: float = 10.0  # decode's answer to Reserve, which it gives between two steps
    first_token_s: float = 300.0  # a prompt may wait behind others on prefill, whose liveness the heartbeat shows
    token_s: float = 60.0
    gone_s: float = 30.0  # a worker that lives answers a Cancel, which is repeated; else its own lease frees the room
    suspect_s: float = 2.0  # until a silent worker is known to live or to be dead; its heartbeats stop counting before
    accounts_s: float = 0.3  # decode's last word on what a stopped room cost
    pair_s: float = 5.0  # for a pair to come back, while a stream that has begun has none left


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The workers of one attempt. Where `prefill` is `decode`, that worker computes the prompt itself."""

    prefill: str  # instance
    decode: str  # instance
    prefill_endpoint: str

    @property
    def is_local(self) -> bool:
        return self.prefill == self.decode

    @property
    def instances(self) -> tuple[str, ...]:
        return (self.decode,) if self.is_local else (self.prefill, self.decode)


@dataclass(frozen=True)
class Send:
    """A message for a worker."""

    instance: str
    message: Reserve | Prefill | Cancel


@dataclass(frozen=True)
class Deliver:
    """New output tokens for the client, in order; with the first ones what was asked of the prompt's."""

    ids: list[int]
    logprobs: list[TokenLogprob]
    prompt: list[TokenLogprob] = field(default_factory=list)  # of its tokens from the second on


@dataclass(frozen=True)
class Ended:
    """The request is complete; "stop" or "length"."""

    reason: str


@dataclass(frozen=True)
class Settled:
    """What a stopped request cost is known now, or will never be."""


@dataclass(frozen=True)
class Broken:
    """The request failed for good."""

    kind: str
    message: str


@dataclass(frozen=True)
class Freed:
    """A worker holds nothing of an attempt any more."""

    instance: str
    epoch: int


@dataclass(frozen=True)
class Judged:
    """A worker has done its part of an attempt, or failed it by its own fault. A refusal is no fault."""

    instance: str
    epoch: int
    is_good: bool


@dataclass(frozen=True)
class Requeued:
    """The room wants another pair, not before `not_before` (monotonic seconds).

    `failure` is what failed the attempt, and what the client hears if nobody pays for another; None after a refusal,
    which costs no attempt.
    """

    not_before: float
    failure: Broken | None = None


@dataclass(frozen=True)
class Closed:
    """Forget the room."""


Effect = Send | Deliver | Ended | Settled | Broken | Freed | Judged | Requeued | Closed
