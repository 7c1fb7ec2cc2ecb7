"""Logits in float32: h W^T with products of the dtype, sums and results of float32.

A bfloat16 logit has 8 bits. Tokens whose logits differ by less than 0.4 % would tie, and the lower id would
win. Legend: R rows, V vocabulary, H hidden size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

# On a CPU, rows of W that are widened to float32 at once: few enough to stay in a cache.
BLOCK_VOCABULARY = 2048


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden` `[R, H]`, `weight` `[V, H]` of the same dtype -> float32 `[R, V]`."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, weight)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return widened_logits(hidden.to(torch.float32), weight)


def widened_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> torch.Tensor:
    """As `float32_logits` on a CPU, for `hidden` in float32 and `weight` in any dtype."""
    logits = torch.empty(hidden.shape[0], weight.shape[0])
    wide = torch.empty(min(BLOCK_VOCABULARY, weight.shape[0]), weight.shape[1])
    for start in range(0, weight.shape[0], BLOCK_VOCABULARY):
        block = weight[start : start + BLOCK_VOCABULARY]
        wide[: block.shape[0]].copy_(block)
        logits[:, start : start + BLOCK_VOCABULARY] = product(hidden, wide[: block.shape[0]])
    return logits
