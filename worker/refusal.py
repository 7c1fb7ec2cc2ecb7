"""The reasons of a worker for refusing a request: for ever, or for now."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.sampling.params import SamplingParams, validate_params


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refusal with its reason.

    `retry_after_ms`: milliseconds until a retry makes sense; 0: this worker can never take the request.
    """

    reason: str
    retry_after_ms: int


def refuse_forever(
    prompt_ids: Sequence[int], sampling: SamplingParams, *, vocab_size: int, size_fault: str
) -> Refusal | None:
    """The refusal of a request that no worker of this kind can take; None if it can be taken.

    `size_fault`: the role's reason why the request is too large, "" otherwise.
    """
    if not prompt_ids or max(prompt_ids) >= vocab_size:
        reason = f"a prompt needs at least one token, all below the vocabulary size {vocab_size}"
        return Refusal(reason=reason, retry_after_ms=0)
    if size_fault:
        return Refusal(reason=size_fault, retry_after_ms=0)
    try:
        validate_params(sampling, vocab_size)
    except ValueError as error:
        return Refusal(reason=str(error), retry_after_ms=0)
    return None


def refuse_for_now(*, is_draining: bool, full: str, retry_after_ms: int) -> Refusal | None:
    """The refusal of a worker that drains or is full, else None.

    `full`: the reason, "" while there is room.
    """
    reason = "draining" if is_draining else full
    return Refusal(reason=reason, retry_after_ms=retry_after_ms) if reason else None
