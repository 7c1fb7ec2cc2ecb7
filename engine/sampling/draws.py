"""Gumbel-max sampling of rows whose parameters are tensors: steps 4 to 8 of `sampler`.

Legend as in `sampler`: R rows, V vocabulary, C candidates of a row.
"""

import math
from dataclasses import dataclass

import torch

from ...kernels.choose_ranked import kept_candidates, masses, ranked_ids, scaled_logits
from ...kernels.noise import gumbel

# Rows are sampled in chunks of at most this many logits, which bounds the float64 temporaries to 32 MiB each.
CHUNK_LOGITS = 1 << 22
# Nucleus rows look at this many candidates first; only flatter distributions pay for more.
NUCLEUS_WIDTH = 1024


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Rows that are sampled together, with their parameters; all tensors are `[rows of the draw]`.

    `width` candidates are ranked; 0 if no row has top-k or top-p. `top_k` None: the rows have top-p only.
    """

    rows: torch.Tensor
    temperature: torch.Tensor  # float64
    seeds: torch.Tensor
    positions: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float64
    width: int


def draw_free(logits: torch.Tensor, draw: Draw, vocabulary: torch.Tensor) -> torch.Tensor:
    """Tokens `[R]` of rows without top-k and top-p."""
    scaled = scaled_logits(logits, logits.amax(dim=1), draw.temperature)
    scores = gumbel(draw.seeds, draw.positions, vocabulary) + scaled
    # log 0 is -inf: a row without min_p loses nothing.
    scores.masked_fill_(scaled < draw.min_p.log()[:, None], -math.inf)
    return scores.argmax(dim=1)


def draw_ranked(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Tokens `[R]` of rows with top-k or top-p, from the fewest candidates that hold each row's support."""
    ids, scaled, kept = _support(logits, draw, draw.width)
    scores = (gumbel(draw.seeds, draw.positions, ids) + scaled).masked_fill_(~kept, -math.inf)
    return ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


def _support(logits: torch.Tensor, draw: Draw, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidate ids, likeliest first, their scaled logits, and the mask of kept candidates; each `[R, C]`.

    C is `width`, enlarged until it holds every row's nucleus.
    """
    vocab_size = logits.shape[1]
    ids = ranked_ids(logits, width)
    values = logits.gather(1, ids)
    scaled = scaled_logits(values, values[:, 0], draw.temperature)
    limit, total = draw.top_k, None
    if limit is None:
        limit = torch.full_like(draw.rows, vocab_size)
        if width < vocab_size:  # the mass of all tokens counts, not only of candidates
            total = masses(scaled_logits(logits, values[:, 0], draw.temperature)).sum(dim=1)
    kept, is_short = kept_candidates(scaled, limit, total, draw.top_p, draw.min_p)
    if total is not None and bool(is_short.any()):
        return _support(logits, draw, min(8 * width, vocab_size))
    return ids, scaled, kept
