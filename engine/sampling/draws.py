"""Gumbel-max sampling of rows whose parameters are tensors: steps 4 to 8 of `sampler`.

Legend as in `sampler`: R rows, V vocabulary, C candidates of a row. Probability masses are compared as
integers, because an integer sum does not depend on its order.
"""

import math
from dataclasses import dataclass

import torch

from ...kernels.noise import gumbel

# Probabilities relative to the likeliest token, in units of 2**-40: the sum over 2**20 tokens stays below
# 2**60.
_MASS_ONE = float(1 << 40)
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
            total = _mass(scaled_logits(logits, values[:, 0], draw.temperature)).sum(dim=1)
    kept, is_short = _kept(scaled, limit, total, draw)
    if total is not None and bool(is_short.any()):
        return _support(logits, draw, min(8 * width, vocab_size))
    return ids, scaled, kept


def _kept(
    scaled: torch.Tensor, limit: torch.Tensor, total: torch.Tensor | None, draw: Draw
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept candidates, bool `[R, C]`, and the rows that would keep more than C candidates, bool `[R]`.

    `scaled` is `[R, C]`. `limit` `[R]` is the top-k. `total` `[R]` is the mass left by top-k, by default that
    of the candidates.
    """
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    kept = rank < limit[:, None]
    mass = _mass(scaled) * kept
    upto = mass.cumsum(dim=1)
    wanted = draw.top_p * (upto[:, -1] if total is None else total).double()
    is_nucleus = (upto - mass).double() < wanted[:, None]
    kept = kept & (is_nucleus | (draw.top_p[:, None] >= 1) | (rank == 0))
    return kept & (scaled >= draw.min_p.log()[:, None]), upto[:, -1].double() < wanted


def draw_fixed(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_ranked` with fixed shapes and no host synchronisation: tokens `[R]` and unseen rows `[R]` bool.

    The token of an unseen row is undefined, because its support exceeds `draw.width`. `draw.top_k` is V for
    rows without a top-k. Raises AssertionError if `draw.top_k` is None.
    """
    assert draw.top_k is not None
    vocab_size, width = logits.shape[1], draw.width
    ids = ranked_ids(logits, width)
    values = logits.gather(1, ids)
    scaled = scaled_logits(values, values[:, 0], draw.temperature)
    is_limited = draw.top_k < vocab_size
    total = torch.where(
        is_limited,
        (_mass(scaled) * (torch.arange(width, device=logits.device) < draw.top_k[:, None])).sum(dim=1),
        _mass(scaled_logits(logits, values[:, 0], draw.temperature)).sum(dim=1),
    )
    kept, is_short = _kept(scaled, draw.top_k, total, draw)
    scores = (gumbel(draw.seeds, draw.positions, ids) + scaled).masked_fill(~kept, -math.inf)
    is_short = torch.where(is_limited, draw.top_k > width, is_short)
    return ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1), is_short


def scaled_logits(logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(l - highest) / T, float64, at most 0. The subtraction comes first, so the smallest T can only
    underflow.
    """
    return (logits.double() - highest.double()[:, None]) / temperature[:, None]


def _mass(scaled: torch.Tensor) -> torch.Tensor:
    """Probabilities relative to the likeliest token, int64 in units of 2**-40."""
    return (scaled.exp() * _MASS_ONE).to(torch.int64)


def ranked_ids(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Ids `[R, width]` of the highest logits, descending; ties by ascending id.

    A float top-k leaves the order of ties undefined. This top-k therefore runs over int64 keys: the float's
    bits as an ordered int32 in the upper half, the reversed id in the lower half.
    """
    # Adding 0.0 turns -0.0 into 0.0, which compares equal.
    bits = (logits.float() + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return ((ordered << 32) + (0xFFFFFFFF - ids)).topk(width, dim=1).indices
