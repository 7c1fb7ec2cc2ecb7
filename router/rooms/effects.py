"""What a room asks of its surroundings, and the small records that it is made with.

Effects are made several per message of a worker, so they are of the kind of struct that is quickest to make.
"""

from dataclasses import dataclass

from msgspec import Struct

from ...cluster.messages import Cancel, Prefill, Reserve, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Longest time without progress per state, in seconds."""

    reserve_s: float = 10.0  # decode's answer to Reserve, which it gives between two steps
    first_token_s: float = (
        300.0  # a prompt may wait behind others on prefill, whose liveness the heartbeat shows
    )
    token_s: float = 60.0
    gone_s: float = (
        30.0  # a worker that lives answers a Cancel, which is repeated; else its own lease frees the room
    )
    suspect_s: float = (
        2.0  # until a silent worker is known to live or to be dead; its heartbeats stop counting before
    )
    accounts_s: float = 0.3  # decode's last word on what a stopped room cost
    word_s: float = 1.0  # prefill's own word on why it gave a hand-off up, when decode has told that it did
    alone_s: float = 2.0  # for a pair with nothing else on it, where the next death would be proof
    pair_s: float = 5.0  # for a pair to come back, while a stream that has begun has none left


class Pair(Struct, frozen=True, kw_only=True, gc=False):
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


class Send(Struct, frozen=True, gc=False):
    """A message for a worker."""

    instance: str
    message: Reserve | Prefill | Cancel


class Deliver(Struct, frozen=True, gc=False):
    """New output tokens for the client, in order; with the first ones what was asked of the prompt's."""

    ids: list[int]
    logprobs: list[TokenLogprob]
    prompt: list[TokenLogprob] = []  # of its tokens from the second on


class Ended(Struct, frozen=True, gc=False):
    """The request is complete; "stop" or "length"."""

    reason: str


class Settled(Struct, frozen=True, gc=False):
    """What a stopped request cost is known now, or will never be."""


class Failure(Struct, frozen=True, gc=False):
    """The request failed for good."""

    kind: str
    message: str
    retry_after_s: int = 0  # until another try is worth while; 0: nobody knows


class Freed(Struct, frozen=True, gc=False):
    """A worker holds nothing of an attempt any more."""

    instance: str
    epoch: int


class Outcome(Struct, frozen=True, gc=False):
    """A worker has done its part of an attempt, or failed it by its own fault. A refusal is no fault."""

    instance: str
    epoch: int
    is_good: bool


class Requeued(Struct, frozen=True, gc=False):
    """The room wants another pair, not before `not_before` (monotonic seconds).

    `failure` is what failed the attempt, and what the client hears if nobody pays for another; None after a refusal,
    which costs no attempt.
    """

    not_before: float
    failure: Failure | None = None


class Closed(Struct, frozen=True, gc=False):
    """Forget the room."""


Effect = Send | Deliver | Ended | Settled | Failure | Freed | Outcome | Requeued | Closed
