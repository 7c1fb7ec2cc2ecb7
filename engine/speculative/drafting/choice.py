"""The drafter's choice of tokens, as operators of the torch library with all parameters in tensors.

A chain takes one token per row. A tree takes the `count` best tokens per row, each with a score. Legend: R
rows, Vd draft vocabulary.
"""

import math
from dataclasses import dataclass

import torch

from ....kernels.choose_token import choose_token
from ....kernels.noise import gumbel

torch.library.define(
    "baton::choose_drafts",
    "(Tensor logits, Tensor seeds, Tensor temperature, Tensor is_drawn, Tensor positions, Tensor target_ids) "
    "-> Tensor",
)
torch.library.define(
    "baton::rank_drafts",
    "(Tensor logits, Tensor seeds, Tensor temperature, Tensor is_drawn, Tensor positions, Tensor target_ids, "
    "int count) -> (Tensor, Tensor)",
)


@dataclass(frozen=True, kw_only=True)
class DraftSampling:
    """The sampling parameters of B requests: `seeds` int64, `temperature` float64, `is_drawn` bool, each
    `[B]`.
    """

    seeds: torch.Tensor
    temperature: torch.Tensor
    is_drawn: torch.Tensor

    def choose(self, logits: torch.Tensor, positions: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        """Returns the target ids `[R]` int64 of draft tokens, chosen as the target would with these logits.

        `logits` `[R, Vd]` float32, R/B rows of each request. `positions` `[R]` are those of the proposed
        tokens. `target_ids` int64 `[Vd]` maps draft tokens to target tokens. The noise equals the target's,
        so an accurate draft proposes the target's sample. Filters and penalties are applied by the target
        only.
        """
        chosen: torch.Tensor = torch.ops.baton.choose_drafts.default(
            logits, self.seeds, self.temperature, self.is_drawn, positions, target_ids
        )
        return chosen

    def rank(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        target_ids: torch.Tensor,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the target ids of the `count` likeliest draft tokens, int64, and their log probabilities,
        float32.

        Both are `[R, count]`, likeliest first; log probabilities are at most 0. Each request has the same
        number of rows in `logits` `[R, Vd]`. For drawn requests the logits include the target's noise, so the
        score estimates which token the target will sample.
        """
        rows = self.by_rows(logits.shape[0] // max(self.seeds.shape[0], 1))
        ids, scores = torch.ops.baton.rank_drafts.default(
            logits, rows.seeds, rows.temperature, rows.is_drawn, positions, target_ids, count
        )
        return ids, scores

    def by_rows(self, each: int) -> "DraftSampling":
        """The parameters of `each` rows per request, request by request: tensors `[B * each]`."""
        seeds, temperature, is_drawn = (
            x[:, None].expand(-1, each).reshape(-1) for x in (self.seeds, self.temperature, self.is_drawn)
        )
        return DraftSampling(seeds=seeds, temperature=temperature, is_drawn=is_drawn)


def draw(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """Gumbel-max over `logits` `[R, Vd]`: indices `[R]` int64."""
    return perturbed(logits, seeds, temperature, positions, target_ids).argmax(dim=1)


def perturbed(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """`logits` `[R, Vd]` divided by the temperature, plus the noise of the target's sampler; float64."""
    logits = logits.double()
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / temperature[:, None]
    return gumbel(seeds, positions, target_ids) + scaled


@torch.library.impl("baton::choose_drafts", "cpu")
def _choose_on_cpu(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    is_drawn: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """Makes noise for the drawn rows only. On a CPU noise costs as much as a layer, and most batches need
    none.
    """
    tokens = logits.argmax(dim=1)
    rows = is_drawn.nonzero().squeeze(1)
    if rows.numel():
        tokens[rows] = draw(logits[rows], seeds[rows], temperature[rows], positions[rows], target_ids)
    return target_ids[tokens]


def _choose_on_cuda(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    is_drawn: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """Has fixed shapes and no host synchronisation. A row without finite logits takes the first token."""
    tokens, _ = choose_token(logits, seeds, positions, temperature, None, is_drawn, target_ids)
    return tokens


torch.library.impl("baton::choose_drafts", "cuda", _choose_on_cuda)
torch.library.register_fake("baton::choose_drafts", _choose_on_cuda)


@torch.library.impl("baton::rank_drafts", "cpu")
def _rank_on_cpu(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    is_drawn: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes noise for the drawn rows only, as `_choose_on_cpu`."""
    rows = is_drawn.nonzero().squeeze(1)
    if rows.numel():
        drawn = perturbed(logits[rows], seeds[rows], temperature[rows], positions[rows], target_ids)
        logits = logits.index_copy(0, rows, drawn.float())
    return _likeliest(logits, target_ids, count)


def _rank_on_cuda(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    is_drawn: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = perturbed(logits, seeds, temperature, positions, target_ids).float()
    return _likeliest(torch.where(is_drawn[:, None], drawn, logits), target_ids, count)


torch.library.impl("baton::rank_drafts", "cuda", _rank_on_cuda)
torch.library.register_fake("baton::rank_drafts", _rank_on_cuda)


def _likeliest(
    logits: torch.Tensor, target_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target ids and log probabilities of the `count` highest logits; -inf replaces the NaN of padding."""
    values, ids = logits.topk(count, dim=1)
    scores = (values - logits.logsumexp(dim=1, keepdim=True)).clamp(max=0.0)
    return target_ids[ids], scores.masked_fill(scores.isnan(), -math.inf)
