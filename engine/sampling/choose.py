"""Chooses a token for each row of logits, as one operator of the torch library with all parameters in
tensors.

Two forms give the same tokens. The exact form reads its parameters on the host and samples only the rows that
need it. The fixed form has fixed shapes and no host synchronisation, so a device graph can hold it. It ranks
NUCLEUS_WIDTH candidates and reports rows of wider support. A CPU always takes the exact form. Legend: S
slots, R rows, V vocabulary.
"""

import torch

from ...kernels.choose_ranked import Ranking, choose_ranked
from ...kernels.choose_token import choose_token
from .draws import CHUNK_LOGITS, NUCLEUS_WIDTH, draw_free, draw_ranked
from .tensors import SamplingTensors

torch.library.define(
    "baton::choose_tokens",
    "(Tensor logits, Tensor positions, Tensor seeds, Tensor temperature, Tensor top_k, Tensor top_p, Tensor "
    "min_p, Tensor is_drawn, bool is_ranked, bool is_exact) -> (Tensor, Tensor, Tensor)",
)


def choose_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    tensors: SamplingTensors,
    *,
    is_ranked: bool,
    is_exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens `[R]` int64, bad rows `[R]` bool, and unseen rows `[R]` bool.

    Bad rows have logits that are not finite; their token is 0. Unseen rows have a support wider than the
    candidates of the fixed form; their token is undefined.

    `logits` is `[R, V]` float32 and `positions` `[R]` int64 are those of the chosen tokens. `tensors` `[S]`
    has one slot for R/S consecutive rows. `is_ranked`: some request `needs_ranking`; otherwise top-k and
    top-p are ignored. `is_exact` forces the exact form.
    """
    tokens, bad, short = torch.ops.baton.choose_tokens.default(
        logits,
        positions,
        tensors.seeds,
        tensors.temperature,
        tensors.top_k,
        tensors.top_p,
        tensors.min_p,
        tensors.is_drawn,
        is_ranked,
        is_exact,
    )
    return tokens, bad, short


def _choose(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    is_drawn: torch.Tensor,
    is_ranked: bool,
    is_exact: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensors = SamplingTensors(
        seeds=seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, is_drawn=is_drawn
    )
    if is_exact or not logits.is_cuda:
        return choose_exact(logits, positions, tensors, is_ranked=is_ranked)
    return choose_fixed(logits, positions, tensors, is_ranked=is_ranked)


torch.library.impl("baton::choose_tokens", ("cpu", "cuda"), _choose)
torch.library.register_fake("baton::choose_tokens", _choose)


def choose_exact(
    logits: torch.Tensor, positions: torch.Tensor, tensors: SamplingTensors, *, is_ranked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The exact form of `choose_tokens`.

    Samples three groups of rows: without ranking, with top-k, and with a nucleus. The host waits for the
    device.
    """
    vocab_size = logits.shape[1]
    tensors = tensors.repeated(logits.shape[0])
    highest, tokens = logits.max(dim=1)  # max returns a NaN if the row has one
    is_limited = tensors.is_drawn & (tensors.top_k < vocab_size) & is_ranked
    is_nucleus = tensors.is_drawn & ~is_limited & (tensors.top_p < 1) & is_ranked
    is_free = tensors.is_drawn & ~is_limited & ~is_nucleus
    widest = int(torch.where(is_limited, tensors.top_k, 0).max()) if logits.shape[0] else 0
    for group, width in ((is_free, 0), (is_limited, widest), (is_nucleus, min(vocab_size, NUCLEUS_WIDTH))):
        for rows in row_chunks(group.nonzero().squeeze(1), vocab_size):
            draw = tensors.draw(rows, positions, width, has_top_k=group is is_limited)
            some = logits[rows]
            tokens[rows] = draw_ranked(some, draw) if width else draw_free(some, draw, _vocabulary(logits))
    bad = ~torch.isfinite(highest)
    return tokens.masked_fill_(bad, 0), bad, torch.zeros_like(bad)


def choose_fixed(
    logits: torch.Tensor, positions: torch.Tensor, tensors: SamplingTensors, *, is_ranked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fixed form of `choose_tokens`. Without `is_ranked` no row is ranked."""
    vocab_size, is_drawn = logits.shape[1], tensors.is_drawn
    if not is_ranked:
        tokens, bad = choose_token(
            logits, tensors.seeds, positions, tensors.temperature, tensors.min_p, is_drawn, None
        )
        return tokens, bad, torch.zeros_like(bad)
    has_ranks = is_drawn & ((tensors.top_p < 1) | (tensors.top_k < vocab_size))
    tokens, bad = choose_token(
        logits, tensors.seeds, positions, tensors.temperature, tensors.min_p, is_drawn & ~has_ranks, None
    )
    ranking = Ranking(
        tensors.seeds, tensors.temperature, tensors.top_k, tensors.top_p, tensors.min_p, has_ranks
    )
    tokens, unseen = choose_ranked(logits, positions, ranking, tokens, bad, NUCLEUS_WIDTH)
    return tokens, bad, unseen


def row_chunks(rows: torch.Tensor, row_size: int) -> list[torch.Tensor]:
    """`rows` in chunks of at most CHUNK_LOGITS logits, `row_size` per row, to bound temporary memory."""
    each = max(1, CHUNK_LOGITS // row_size)
    return [rows[start : start + each] for start in range(0, rows.shape[0], each)]


def _vocabulary(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(logits.shape[1], device=logits.device)
