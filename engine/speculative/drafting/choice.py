"""The choices of a drafter, as operations of the torch library with every parameter in tensors.

A chain takes one token per row, a tree the `count` best with a score each. Legend: R rows, Vd draft
vocabulary.
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
    """How drafts are chosen for B requests: `seeds` int64, `temperature` float64, `is_drawn` bool, `[B]`
    each."""

    seeds: torch.Tensor
    temperature: torch.Tensor
    is_drawn: torch.Tensor

    def choose(self, logits: torch.Tensor, positions: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        """Indices `[B]` int64 into the draft vocabulary: what the target would choose with these logits.

        `logits` `[B, Vd]` float32, `positions` `[B]` of the tokens proposed, `target_ids` int64 `[Vd]`: the
        target token of each draft token. The noise is the target's, so a good draft makes the target's
        choice. Filters and penalties are left to the target.
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
        """The `count` likeliest indices into the draft vocabulary, likeliest first, int64, and their log
        probabilities, float32 and at most 0; each `[R, count]`.

        As `choose`, each request with equally many rows of `logits` `[R, Vd]`. Where tokens
        are drawn, the probabilities are those of the logits with the target's noise added: which token the
        target will choose, as far as the draft can tell.
        """
        num_requests = self.seeds.shape[0]
        each = logits.shape[0] // max(num_requests, 1)
        parts = (self.seeds, self.temperature, self.is_drawn)
        spread = [x[:, None].expand(num_requests, each).reshape(-1) for x in parts]
        ids, scores = torch.ops.baton.rank_drafts.default(logits, *spread, positions, target_ids, count)
        return ids, scores


def draw(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """Gumbel-max over all of `logits` `[R, Vd]`: indices `[R]`."""
    return perturbed(logits, seeds, temperature, positions, target_ids).argmax(dim=1)


def perturbed(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """`logits` `[R, Vd]` divided by the temperature, with the noise that the target's sampler uses;
    float64."""
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
    """Noise is made for the drawn rows only: here it costs as much as a layer, and most batches need none."""
    tokens = logits.argmax(dim=1)
    rows = is_drawn.nonzero().squeeze(1)
    if rows.numel():
        tokens[rows] = draw(logits[rows], seeds[rows], temperature[rows], positions[rows], target_ids)
    return tokens


@torch.library.impl("baton::choose_drafts", "cuda")
def _choose_on_cuda(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    is_drawn: torch.Tensor,
    positions: torch.Tensor,
    target_ids: torch.Tensor,
) -> torch.Tensor:
    """Of fixed shape and without a look at the host. A row that is not finite, as those of padding may be,
    gives 0."""
    tokens, _ = choose_token(logits, seeds, positions, temperature, None, is_drawn, target_ids)
    return tokens


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
    """As `_choose_on_cpu`, noise for the drawn rows only."""
    rows = is_drawn.nonzero().squeeze(1)
    if rows.numel():
        drawn = perturbed(logits[rows], seeds[rows], temperature[rows], positions[rows], target_ids)
        logits = logits.index_copy(0, rows, drawn.float())
    return _likeliest(logits, count)


@torch.library.impl("baton::rank_drafts", "cuda")
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
    return _likeliest(torch.where(is_drawn[:, None], drawn, logits), count)


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and log probabilities of the `count` highest; -inf for what is not a number, as in the rows of
    padding."""
    values, ids = logits.topk(count, dim=1)
    scores = (values - logits.logsumexp(dim=1, keepdim=True)).clamp(max=0.0)
    return ids, scores.masked_fill(scores.isnan(), -math.inf)
