"""The tokens that a training step computes logits of, where a drafter shares the target's output projection.

Most of a step's arithmetic is then in a projection that is not trained. A softmax over the frequent tokens
and some random others teaches the same choice: a token that is never an answer needs to be pushed down
once, not in every step.

Legend: V vocabulary, N tokens of the loss.
"""

import torch

from ..engine.host_copy import to_device

FREQUENT_SHARE = 0.75  # of the tokens of a loss; the others are drawn anew for each batch


class LossVocabulary:
    """Draws `size` of V tokens for each batch: the most frequent of `counts` int64 `[V]`, and random
    others.
    """

    def __init__(self, counts: torch.Tensor, size: int, device: torch.device) -> None:
        order = torch.argsort(counts, descending=True, stable=True)
        kept = min(size, max(1, int(FREQUENT_SHARE * size)))
        self._frequent, self._others = order[:kept], order[kept:]
        self._drawn, self._device = size - kept, device

    def draw(self, seed: int) -> torch.Tensor:
        """The tokens for a batch, ascending, int64 `[N]`; the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        some = torch.randperm(len(self._others), generator=generator)[: self._drawn]
        ids = torch.cat((self._frequent, self._others[some])).sort().values
        return to_device(ids, self._device)


def places_in(ids: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `tokens` are in ascending `ids` int64 `[N]`, and bool whether they are there; else the place is
    some other one.
    """
    places = torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    return places, ids[places] == tokens
