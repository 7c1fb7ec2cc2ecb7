"""The effects that a room returns for the dispatcher to perform, and its small records.

Effects are msgspec structs because several are made per message and these are the cheapest to make.
"""

from dataclasses import dataclass

from msgspec import Struct

from ...cluster.protocol.messages import Cancel, OfferPrefix, Prefill, PrefixPull, Reserve, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Longest time without progress per state, in seconds."""

    reserve_s: float = 10.0  # for decode's answer to Reserve, sent between two steps
    first_token_s: float = 300.0  # a prompt may queue on prefill; the heartbeat shows that prefill lives
    token_s: float = 60.0
    gone_s: float = (
        30.0  # for the answer to a repeated Cancel; after that the worker's own lease frees the room
    )
    suspect_s: float = 2.0  # until a silent worker is known to be alive or dead
    accounts_s: float = 0.3  # for decode's account of a stopped room
    word_s: float = 1.0  # for prefill's own reason after decode reported that prefill gave the hand-off up
    alone_s: float = 2.0  # for an idle pair, for a room whose next death may be proof
    pair_s: float = 5.0  # for a pair to return, for a stream that has begun


PULL, COMPUTE = "pull", "compute"


class Pair(Struct, frozen=True, kw_only=True, gc=False):
    """The workers of one attempt. Where `prefill` equals `decode`, that worker computes the prompt itself."""

    prefill: str  # instance of the prefill worker
    decode: str  # instance of the decode worker
    prefill_endpoint: str
    shares: str = ""  # the room on decode whose prompt it shares
    prefix: str = (
        ""  # PULL, or COMPUTE where prefill computes what a decode worker holds; "": nothing to pull
    )
    pull: PrefixPull | None = None  # where prefill gets the beginning of the prompt
    wants_features: bool = True  # decode reads features of the prompt

    @property
    def is_local(self) -> bool:
        return self.prefill == self.decode

    @property
    def instances(self) -> tuple[str, ...]:
        return (self.decode,) if self.is_local else (self.prefill, self.decode)


class SendOrder(Struct, frozen=True, gc=False):
    """Sends a message to a worker."""

    instance: str
    message: Reserve | Prefill | OfferPrefix | Cancel


class Deliver(Struct, frozen=True, gc=False):
    """Gives new output tokens to the client, in order.

    The first delivery also has the prompt's log-probabilities.
    """

    ids: list[int]
    logprobs: list[TokenLogprob]
    prompt: list[TokenLogprob] = []  # log-probabilities from the prompt's second token on
    experts: bytes = b""  # of the rows that are new since the last delivery, in order, if the request asks


class Ended(Struct, frozen=True, gc=False):
    """The request is complete; `reason` is "stop" or "length"."""

    reason: str


class Settled(Struct, frozen=True, gc=False):
    """The cost of a stopped request is final, known or not."""


class Failure(Struct, frozen=True, gc=False):
    """The request failed for good."""

    kind: str
    message: str
    retry_after_s: int = 0  # until another try is worthwhile; 0: unknown


class Freed(Struct, frozen=True, gc=False):
    """A worker no longer holds anything of an attempt."""

    instance: str
    epoch: int


class Outcome(Struct, frozen=True, gc=False):
    """A worker has done its part of an attempt, or failed it by its own fault. A refusal is no fault."""

    instance: str
    epoch: int
    is_good: bool


class Requeued(Struct, frozen=True, gc=False):
    """The room waits for another pair, from `not_before` (monotonic seconds) on.

    `failure` is the reason of the failed attempt, which the client gets when the retry budget denies another
    one. It is None after a refusal, which costs no attempt. `is_retracted`: a worker gave its pages to
    another room, `is_preempted`: to one of a more urgent class. `is_unshared`: the room whose prompt it
    should share has none.
    """

    not_before: float
    failure: Failure | None = None
    is_retracted: bool = False
    is_preempted: bool = False
    is_unshared: bool = False


class Closed(Struct, frozen=True, gc=False):
    """The room is over and can be forgotten."""


Effect = SendOrder | Deliver | Ended | Settled | Failure | Freed | Outcome | Requeued | Closed
