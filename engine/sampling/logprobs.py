"""Log probabilities of chosen and likeliest tokens under the model's distribution before any edit.

Legend: R rows, V vocabulary, K maximum number of top tokens per row.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.top_logprobs import top_logprobs as top_fixed
from ...kernels.top_logprobs import top_logprobs_reference

torch.library.define(
    "baton::top_logprobs", "(Tensor logits, Tensor chosen, Tensor wanted, int num_top) -> (Tensor, Tensor)"
)


@dataclass(frozen=True, kw_only=True)
class ScoredToken:
    """Log probability of the chosen token in the model's own distribution, and the likeliest tokens as
    (id, log probability)."""

    logprob: float
    top: list[tuple[int, float]]


def top_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities float32 `[R, 1+K]` and ids int64 `[R, K]`, likeliest first.

    Column 0 is the token `chosen` int64 `[R]`; the others are the `num_top` likeliest tokens. `wanted` int64
    `[R]` is the number that each row asks for, -1 for none. Rows that do not ask hold NaN and -1.
    """
    values, ids = torch.ops.baton.top_logprobs.default(logits, chosen, wanted, num_top)
    return values, ids


def _top(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    top = top_fixed if logits.is_cuda else top_exact
    return top(logits, chosen, wanted, num_top)


torch.library.impl("baton::top_logprobs", ("cpu", "cuda"), _top)
torch.library.register_fake("baton::top_logprobs", _top)


def top_exact(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top_logprobs` for the rows that ask. The host waits for the device."""
    values = torch.full((logits.shape[0], 1 + num_top), math.nan, device=logits.device)
    ids = torch.full((logits.shape[0], num_top), -1, dtype=torch.int64, device=logits.device)
    rows = (wanted >= 0).nonzero().squeeze(1)
    if rows.numel():
        values[rows], ids[rows] = top_logprobs_reference(logits[rows], chosen[rows], wanted[rows], num_top)
    return values, ids


def pack_logprobs(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`top_logprobs` as int64 `[R, 1+2*K]`: part of a report of integers, read by `unpack_logprobs`."""
    return torch.cat((values.view(torch.int32).to(torch.int64), ids), dim=1)


def unpack_logprobs(packed: npt.NDArray[np.int64], wanted: int) -> ScoredToken:
    """One row of a report; `wanted` as of `SamplingParams.logprobs`, at least 0."""
    num_top = (len(packed) - 1) // 2
    values = packed[: 1 + num_top].astype(np.int32).view(np.float32).tolist()
    ids = packed[1 + num_top :].tolist()
    return ScoredToken(logprob=values[0], top=list(zip(ids, values[1:], strict=True))[:wanted])


def packed_width(num_top: int) -> int:
    """Columns of `pack_logprobs`; `num_top` -1: none."""
    return 1 + 2 * num_top if num_top >= 0 else 0
