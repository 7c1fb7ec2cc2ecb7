"""Copy rows of memory and digest them in the same pass: a part of each page into a slot, or a slot into it.

As `move_spans`, for a part of a page that is no contiguous run, as some of its KV heads. A span of rows is
(source address, target address, number of words, number of its first word, words per row, words from row to
row of the source, and of the target). All addresses and sizes are multiples of `ALIGNMENT` bytes. The digest
is that of `move_spans` for the same words, so one end may cut a run into rows and the other one not.
"""

from __future__ import annotations

import torch

from .move_spans import CHUNK, NUM_WARPS, TILE, _mixed, check_runs, mixed, words_at
from .triton_jit import jit, tl

ROW_FIELDS = 7
VECTOR = 4  # words of one load of a thread


@jit
def _move_rows_kernel(
    p_spans: tl.tensor,
    p_runs: tl.tensor,
    p_sums: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    p_run = p_runs + tl.program_id(1) * 4
    first_span = tl.load(p_run).to(tl.int32)
    num_chunks = tl.load(p_run + 2).to(tl.int32)
    num_turns = tl.load(p_run + 1).to(tl.int32) * num_chunks
    b_sum = tl.zeros((TILE // VECTOR, VECTOR), tl.uint32)
    i_part = tl.arange(0, VECTOR)[None, :]
    for i_turn in range(tl.program_id(0), num_turns, tl.num_programs(0)):
        i_span = i_turn // num_chunks
        begin = (i_turn - i_span * num_chunks) * CHUNK
        p_span = p_spans + (first_span + i_span) * 7
        num_words = tl.multiple_of(tl.load(p_span + 2).to(tl.int32), 4)
        if begin < num_words:
            p_source = tl.multiple_of(tl.load(p_span).to(tl.pointer_type(tl.uint32)), 16)
            p_target = tl.multiple_of(tl.load(p_span + 1).to(tl.pointer_type(tl.uint32)), 16)
            first = tl.load(p_span + 3).to(tl.int32)
            row_words = tl.multiple_of(tl.load(p_span + 4).to(tl.int32), 4)
            source_stride = tl.multiple_of(tl.load(p_span + 5).to(tl.int32), 4)
            target_stride = tl.multiple_of(tl.load(p_span + 6).to(tl.int32), 4)
            for start in range(0, CHUNK, TILE):
                # a load of VECTOR words lies in one row
                i_first = begin + start + VECTOR * tl.arange(0, TILE // VECTOR)
                i_row = i_first // row_words
                i_column = i_first - i_row * row_words
                o_source, o_target = i_row * source_stride + i_column, i_row * target_stride + i_column
                i_word = i_first[:, None] + i_part
                m_word = i_word < num_words
                b_word = tl.load(p_source + o_source[:, None] + i_part, mask=m_word, other=0)
                tl.store(p_target + o_target[:, None] + i_part, b_word, mask=m_word)
                b_sum += tl.where(m_word, _mixed(b_word, (first + i_word).to(tl.uint32)), 0)
    p_sum = p_sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_sum, tl.sum(tl.sum(b_sum, axis=1), axis=0).to(tl.int64))


def move_rows_triton(spans: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor) -> object:
    """As `move_spans_triton`, for spans of rows int64 `[n, 7]`. Rows must not overlap."""
    check_runs("move_rows", spans, runs, sums, ROW_FIELDS)
    return _move_rows_kernel[(sums.shape[1], sums.shape[0])](
        spans, runs, sums, CHUNK=CHUNK, TILE=TILE, VECTOR=VECTOR, num_warps=NUM_WARPS
    )


def move_rows_reference(spans: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor) -> None:
    """As `move_rows_triton`, for addresses of the host's memory."""
    check_runs("move_rows", spans, runs, sums, ROW_FIELDS)
    sums.zero_()
    for number, (begin, count, *_) in enumerate(runs.tolist()):
        for source, target, words, first, row_words, *strides in spans[begin : begin + count].tolist():
            num_rows = words // row_words
            rows = _rows_at(target, num_rows, row_words, strides[1])
            rows.copy_(_rows_at(source, num_rows, row_words, strides[0]))
            sums[number, 0] += mixed(rows.reshape(-1), first)


def _rows_at(address: int, num_rows: int, row_words: int, stride: int) -> torch.Tensor:
    num_words = (num_rows - 1) * stride + row_words
    return words_at(address, num_words).as_strided((num_rows, row_words), (stride, 1))
