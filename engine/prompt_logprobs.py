"""Log probabilities of a prompt's own tokens, each given the tokens before it.

Row i of a prompt's forward scores token i + 1. The last row therefore scores nothing, and the first token has
no score.
"""

from collections.abc import Sequence

import torch

from .request import Request

MAX_SCORED_LOGITS = 1 << 24  # of one forward: 64 MiB of float32

Score = tuple[
    float, list[tuple[int, float]]
]  # log probability of the token, and the likeliest (id, log probability)


def num_scored(request: Request, start: int, end: int) -> int:
    """Number of scored rows in [start, end). They are the first rows of the range."""
    if request.sampling.prompt_logprobs < 0:
        return 0
    return min(end, request.num_prompt - 1) - start


def most_scored(request: Request, vocab_size: int, before: Sequence[tuple[Request, int, int]]) -> int | None:
    """Maximum rows of `request` in a forward behind the ranges `before`, bounded by the memory of scored
    logits.

    At least 1. None means no limit.
    """
    if request.sampling.prompt_logprobs < 0:
        return None
    return max(1, MAX_SCORED_LOGITS // vocab_size - sum(num_scored(*part) for part in before))


def scores_of(ranges: Sequence[tuple[Request, int, int]], logits: torch.Tensor) -> list[list[Score]]:
    """The scores of each range, given the `logits` `[R, V]` of all scored rows in order."""
    found: list[list[Score]] = []
    row = 0
    for request, start, end in ranges:
        count = num_scored(request, start, end)
        found.append(_scores(request, start, logits[row : row + count]))
        row += count
    assert row == logits.shape[0], (row, logits.shape)
    return found


def _scores(request: Request, start: int, logits: torch.Tensor) -> list[Score]:
    count, num_top = logits.shape[0], request.sampling.prompt_logprobs
    if not count:
        return []
    raw = torch.log_softmax(logits.float(), dim=1)
    tokens = torch.tensor(request.prompt_ids[start + 1 : start + 1 + count], device=logits.device)
    chosen = raw.gather(1, tokens[:, None]).squeeze(1).tolist()
    values, ids = raw.topk(min(num_top, raw.shape[1]), dim=1)
    best = zip(ids.tolist(), values.tolist(), strict=True)
    return [(value, list(zip(*pair, strict=True))) for value, pair in zip(chosen, best, strict=True)]
