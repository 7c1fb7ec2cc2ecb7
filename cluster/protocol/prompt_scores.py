"""Splits what is told of the tokens of a prompt into messages of bounded size: log probabilities, experts."""

from collections.abc import Iterator, Sequence

from .messages import PromptLogprobs, RoutedExperts, TokenLogprob

PER_MESSAGE = 512  # with 20 alternatives each, 160 KiB at most
EXPERT_BYTES = 1 << 17  # of a message, or one row


def prompt_logprobs(
    room: str, epoch: int, instance: str, start: int, scores: Sequence[tuple[float, list[tuple[int, float]]]]
) -> Iterator[PromptLogprobs]:
    """Messages with the `scores` (log probability, alternatives) of prompt tokens `start`, `start` + 1,
    ..."""
    items = [TokenLogprob(logprob=value, top=top) for value, top in scores]
    for at in range(0, len(items), PER_MESSAGE):
        part = items[at : at + PER_MESSAGE]
        yield PromptLogprobs(room=room, epoch=epoch, instance=instance, start=start + at, items=part)


def routed_experts(
    room: str, epoch: int, instance: str, start: int, ids: bytes, row_bytes: int
) -> Iterator[RoutedExperts]:
    """Messages with the experts `ids` of prompt rows `start`, `start` + 1, ..., of `row_bytes` bytes each."""
    each = max(1, EXPERT_BYTES // row_bytes)
    for at in range(0, len(ids) // row_bytes, each):
        part = ids[at * row_bytes : (at + each) * row_bytes]
        count = len(part) // row_bytes
        yield RoutedExperts(
            room=room, epoch=epoch, instance=instance, start=start + at, count=count, ids=part
        )
