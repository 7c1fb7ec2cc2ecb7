"""Digests of spans of a GPU's memory, which stay where they are.

A span is (address, number of words, number of its first word). The digest of a run of spans is that of
`move_spans` for the same words.
"""

from __future__ import annotations

import torch

from .move_spans import CHUNK, NUM_WARPS, TILE, _mixed, is_table, mixed, words_at
from .triton_jit import jit, tl

DIGEST_FIELDS = 3


@jit
def _digest_spans_kernel(
    p_spans: tl.tensor, p_sums: tl.tensor, CHUNK: tl.constexpr, TILE: tl.constexpr
) -> None:
    i_span = tl.program_id(0)
    begin = tl.program_id(1) * CHUNK
    p_span = p_spans + i_span * 3
    num_words = tl.multiple_of(tl.load(p_span + 1).to(tl.int32), 4)
    b_sum = tl.zeros((TILE,), tl.uint32)
    if begin < num_words:
        p_words = tl.multiple_of(tl.load(p_span).to(tl.pointer_type(tl.uint32)), 16)
        first = tl.load(p_span + 2).to(tl.int32)
        for start in range(0, CHUNK, TILE):
            i_word = begin + start + tl.arange(0, TILE)
            m_word = i_word < num_words
            b_word = tl.load(p_words + i_word, mask=m_word, other=0)
            b_sum += tl.where(m_word, _mixed(b_word, (first + i_word).to(tl.uint32)), 0)
    tl.store(p_sums + i_span * tl.num_programs(1) + tl.program_id(1), tl.sum(b_sum, axis=0).to(tl.int64))


def digest_spans_triton(spans: torch.Tensor, sums: torch.Tensor) -> None:
    """Digest each of `spans` int64 `[n, 3]`: that of span i is the sum of row i of `sums` int64 `[n, c]`.

    c: at least `num_chunks` of the longest span. Addresses and sizes are multiples of `ALIGNMENT` bytes. The
    tables may lie in pinned memory of the host. Raises ValueError for other shapes or dtypes.
    """
    _check(spans, sums)
    _digest_spans_kernel[(spans.shape[0], sums.shape[1])](
        spans, sums, CHUNK=CHUNK, TILE=TILE, num_warps=NUM_WARPS
    )


def digest_spans_reference(spans: torch.Tensor, sums: torch.Tensor) -> None:
    """As `digest_spans_triton`, for addresses of the host's memory."""
    _check(spans, sums)
    sums.zero_()
    for number, (address, num_words, first) in enumerate(spans.tolist()):
        sums[number, 0] = mixed(words_at(address, num_words), first)


def _check(spans: torch.Tensor, sums: torch.Tensor) -> None:
    if not (is_table(spans, DIGEST_FIELDS) and is_table(sums) and spans.shape[0] == sums.shape[0]):
        given = f"{spans.dtype} {list(spans.shape)} and {sums.dtype} {list(sums.shape)}"
        wanted = f"[n, {DIGEST_FIELDS}] and [n, c]"
        raise ValueError(f"digest_spans: spans and sums are int64 {wanted}, not {given}")
