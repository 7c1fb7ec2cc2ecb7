"""Logits in float32: h W^T with products of the dtype, sums and results of float32.

A bfloat16 logit has 8 bits. Tokens whose logits differ by less than 0.4 % would tie, and the lower id would
win. Legend: R rows, V vocabulary, H hidden size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .skinny_linear import has_tiles, linear_triton, vector_shape

# On a CPU, rows of W that are widened to float32 at once: few enough to stay in a cache.
BLOCK_VOCABULARY = 2048
MIN_VOCABULARY = 65536  # smaller tables, such as those of draft heads and routers, stay with the library


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`hidden` `[R, H]`, `weight` `[V, H]` of the same dtype -> float32 `[R, V]`."""
    if hidden.dtype == torch.float32:
        return F.linear(hidden, weight)
    if hidden.is_cuda and hidden.shape[0] == 1 and _pays(weight) and has_tiles(hidden):
        # on an H200 141 us for the table of Qwen3-30B-A3B, where the library takes 149 (8B Llama: 235, 242)
        shape = vector_shape(hidden.shape[1], weight.shape[0])
        return linear_triton(hidden, weight, shape=shape, max_tile_rows=1, out_dtype=torch.float32)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return widened_logits(hidden.to(torch.float32), weight)


def _pays(weight: torch.Tensor) -> bool:
    """Whether many small programs read a weight faster than the library, where they can."""
    return weight.shape[0] >= MIN_VOCABULARY and weight.is_contiguous()


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
