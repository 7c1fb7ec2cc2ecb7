"""What one decode step gave its requests."""

from dataclasses import dataclass

from ...sampling.logprobs import TokenLogprob


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step gave each request, in the order of the batch.

    `tokens` committed this step (already appended to the request). `logprobs`, per token, is empty for a
    request that asks for none. `accept_lens` counts what verify accepted, `drafted` how many drafts were
    offered (of a tree all nodes but the root): both before an end inside the block cut it. `is_bad`: the
    model's logits were not finite; fail the request.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob]]
    accept_lens: list[int]
    drafted: list[int]
    is_bad: list[bool]
    path: str
