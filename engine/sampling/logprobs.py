"""Log probabilities of chosen tokens and of the likeliest ones, by the model's own distribution before any change.

Legend: R rows, V vocabulary, K most top tokens that a row asks for.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .choose import row_chunks
from .draws import ranked_ids

torch.library.define(
    "baton::top_logprobs", "(Tensor logits, Tensor chosen, Tensor wanted, int num_top) -> (Tensor, Tensor)"
)


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Of the model's own distribution: the chosen token's log probability and the likeliest (id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 `[R, 1+K]`: of the token `chosen` int64 `[R]`, then of the `num_top` likeliest; int64 `[R, K]`: these tokens.

    `wanted` int64 `[R]`: how many a row asks for, -1: nothing. Other rows may hold NaN and -1.
    """
    values, ids = torch.ops.baton.top_logprobs.default(logits, chosen, wanted, num_top)
    return values, ids


@torch.library.impl("baton::top_logprobs", "cpu")
def _top_on_cpu(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.full((logits.shape[0], 1 + num_top), math.nan)
    ids = torch.full((logits.shape[0], num_top), -1, dtype=torch.int64)
    rows = (wanted >= 0).nonzero().squeeze(1)
    if rows.numel():
        values[rows], ids[rows] = _logprobs(logits[rows], chosen[rows], num_top)
    return values, ids


@torch.library.impl("baton::top_logprobs", "cuda")
def _top_on_cuda(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fixed shapes: every row, whether or not it is asked for."""
    pieces = zip(*(row_chunks(x, logits.shape[1]) for x in (logits, chosen)), strict=True)
    values, ids = zip(*(_logprobs(some, theirs, num_top) for some, theirs in pieces), strict=True)
    return torch.cat(values), torch.cat(ids)


def _logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    raw = torch.log_softmax(logits.float(), dim=1)
    ids = ranked_ids(raw, num_top)
    return torch.cat((raw.gather(1, chosen[:, None]), raw.gather(1, ids)), dim=1), ids


def pack_logprobs(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`top_logprobs` as int64 `[R, 1+2*K]`: part of a report of integers, read by `unpack_logprobs`."""
    return torch.cat((values.view(torch.int32).to(torch.int64), ids), dim=1)


def unpack_logprobs(packed: npt.NDArray[np.int64], wanted: int) -> TokenLogprob:
    """One row of a report; `wanted` as of `SamplingParams.logprobs`, at least 0."""
    num_top = (len(packed) - 1) // 2
    values = packed[: 1 + num_top].astype(np.int32).view(np.float32).tolist()
    ids = packed[1 + num_top :].tolist()
    return TokenLogprob(logprob=values[0], top=list(zip(ids, values[1:], strict=True))[:wanted])


def packed_width(num_top: int) -> int:
    """Columns of `pack_logprobs`; `num_top` -1: none."""
    return 1 + 2 * num_top if num_top >= 0 else 0
