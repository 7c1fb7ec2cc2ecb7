"""The result of one decode step."""

from dataclasses import dataclass, field

from ...sampling.logprobs import ScoredToken


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The results of one step per request, in batch order.

    `tokens` are the committed tokens, already appended to the requests. `logprobs` has one entry per token;
    it is empty for a request without logprobs. `experts` are those of the rows behind which the tokens were
    chosen, as `ExpertShape` says; b"" for a request that does not ask. `accept_lens` counts accepted tokens,
    and `drafted` the offered drafts (all nodes but the root of a tree); both ignore an end of the request
    inside the block. `is_bad`: the logits were not finite, so the caller must fail the request.
    """

    tokens: list[list[int]]
    logprobs: list[list[ScoredToken]]
    accept_lens: list[int]
    drafted: list[int]
    is_bad: list[bool]
    path: str
    experts: list[bytes] = field(default_factory=list)  # empty: nobody asks
