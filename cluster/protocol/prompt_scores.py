"""Splits the log probabilities of a prompt into PromptLogprobs messages of bounded size."""

from collections.abc import Iterator, Sequence

from .messages import PromptLogprobs, TokenLogprob

PER_MESSAGE = 512  # with 20 alternatives each, 160 KiB at most


def prompt_logprobs(
    room: str, epoch: int, instance: str, start: int, scores: Sequence[tuple[float, list[tuple[int, float]]]]
) -> Iterator[PromptLogprobs]:
    """Messages with the `scores` (log probability, alternatives) of prompt tokens `start`, `start` + 1,
    ..."""
    items = [TokenLogprob(logprob=value, top=top) for value, top in scores]
    for at in range(0, len(items), PER_MESSAGE):
        part = items[at : at + PER_MESSAGE]
        yield PromptLogprobs(room=room, epoch=epoch, instance=instance, start=start + at, items=part)
