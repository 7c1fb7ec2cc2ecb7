"""Copy spans of memory and digest them in the same pass: pages into a slot, or a slot into pages.

A span is (source address, target address, number of words, number of its first word). Words are 32 bits. The
addresses are plain numbers, so a span may lie in memory of another process that is mapped here. All addresses
and sizes are multiples of `ALIGNMENT` bytes.

A run is a sequence of spans with one digest: (first span, number of spans, chunks of its longest span, 0). A
chunk is of `CHUNK` words at most. A few programs take the chunks of a run in turn, as many as keep the link
or the memory busy. So few sums are to be read, and a move over a link leaves most multiprocessors to the
forward beside it.

The digest of a run is the sum, modulo 2**32, of one mixed value per word. The value depends on the
word and on its number in the run, so the order of the sum does not matter: both ends may cut the run into
different spans, and still agree. The mix is a bijection of the word, so one changed word always changes the
digest.

Reference: Austin Appleby, MurmurHash3, `fmix32`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .triton_jit import cdiv, jit, tl

WORD_BYTES = 4
ALIGNMENT = 16  # bytes: one load of a thread
SPAN_FIELDS, RUN_FIELDS = 4, 4  # rows of 32 bytes: all tables in one memory are aligned
MODULUS = 1 << 32
# Words of a chunk, and of one step of its loop. A step is one load of 16 bytes per thread, four times.
CHUNK, TILE, NUM_WARPS = 16384, 4096, 8
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


@jit
def _mixed(b_word: tl.tensor, i_word: tl.tensor) -> tl.tensor:
    b_mix = b_word ^ ((i_word + 1) * 0x9E3779B9)
    b_mix ^= b_mix >> 16
    b_mix *= 0x85EBCA6B
    b_mix ^= b_mix >> 13
    b_mix *= 0xC2B2AE35
    b_mix ^= b_mix >> 16
    return b_mix


@jit
def _move_spans_kernel(
    p_spans: tl.tensor, p_runs: tl.tensor, p_sums: tl.tensor, CHUNK: tl.constexpr, TILE: tl.constexpr
) -> None:
    p_run = p_runs + tl.program_id(1) * 4
    first_span = tl.load(p_run).to(tl.int32)
    num_chunks = tl.load(p_run + 2).to(tl.int32)
    num_turns = tl.load(p_run + 1).to(tl.int32) * num_chunks
    b_sum = tl.zeros((TILE,), tl.uint32)
    for i_turn in range(tl.program_id(0), num_turns, tl.num_programs(0)):
        i_span = i_turn // num_chunks
        begin = (i_turn - i_span * num_chunks) * CHUNK
        p_span = p_spans + (first_span + i_span) * 4
        num_words = tl.multiple_of(tl.load(p_span + 2).to(tl.int32), 4)
        if begin < num_words:
            p_source = tl.multiple_of(tl.load(p_span).to(tl.pointer_type(tl.uint32)), 16)
            p_target = tl.multiple_of(tl.load(p_span + 1).to(tl.pointer_type(tl.uint32)), 16)
            first = tl.load(p_span + 3).to(tl.int32)
            for start in range(0, CHUNK, TILE):
                i_word = begin + start + tl.arange(0, TILE)
                m_word = i_word < num_words
                b_word = tl.load(p_source + i_word, mask=m_word, other=0)
                tl.store(p_target + i_word, b_word, mask=m_word)
                b_sum += tl.where(m_word, _mixed(b_word, (first + i_word).to(tl.uint32)), 0)
    p_sum = p_sums + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(p_sum, tl.sum(b_sum, axis=0).to(tl.int64))


def move_spans_triton(spans: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor) -> object:
    """Copy `spans` int64 `[n, 4]` in `runs` int64 `[r, 4]`.

    The digest of run i is the sum of row i of `sums` int64 `[r, p]`, for p programs a run. Spans must not
    overlap. The tables may lie in pinned memory of the host: a program reads a few words of them for each
    chunk, and writes one. Returns the compiled kernel. Raises ValueError for other shapes or dtypes.
    """
    check_runs("move_spans", spans, runs, sums, SPAN_FIELDS)
    return _move_spans_kernel[(sums.shape[1], sums.shape[0])](
        spans, runs, sums, CHUNK=CHUNK, TILE=TILE, num_warps=NUM_WARPS
    )


class SpanLauncher:
    """Launches of the compiled kernel on the current device, past Triton's dispatch.

    The dispatch looks at every argument again, and asks for hooks. It takes longer than the rest of a launch,
    above all in a thread that has slept. All tables are aligned, so one compiled kernel serves every launch.
    """

    def __init__(self, compiled: object) -> None:
        """`compiled`: what `move_spans_triton` returned for tables that begin at multiples of 16 bytes."""
        kernel: Any = compiled
        self._run, self._function, self._metadata = kernel.run, kernel.function, kernel.packed_metadata

    def launch(
        self, spans: int, runs: int, sums: int, *, num_runs: int, num_programs: int, stream: int
    ) -> None:
        """As `move_spans_triton` for tables at the addresses `spans`, `runs` and `sums`.

        `num_programs`: of each run. `stream`: the handle of a stream.
        """
        no_hooks = (None, None, None)
        tables = (spans, runs, sums, CHUNK, TILE)
        self._run(num_programs, num_runs, 1, stream, self._function, self._metadata, *no_hooks, *tables)


def num_chunks(num_words: int) -> int:
    """The number of chunks of a span of `num_words` words."""
    return cdiv(num_words, CHUNK)


def check_runs(
    name: str, spans: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor, num_fields: int
) -> None:
    """Raises ValueError for tables of other shapes or dtypes, or that are not contiguous.

    `spans` are int64 `[n, num_fields]`, `runs` int64 `[r, 4]` and `sums` int64 `[r, p]`. `name`: the
    operation that they are for.
    """
    fits = is_table(spans, num_fields) and is_table(runs, RUN_FIELDS) and is_table(sums)
    if not (fits and runs.shape[0] == sums.shape[0]):
        given = ", ".join(f"{table.dtype} {list(table.shape)}" for table in (spans, runs, sums))
        wanted = f"[n, {num_fields}], [r, {RUN_FIELDS}] and [r, p]"
        raise ValueError(f"{name}: spans, runs and sums are int64 {wanted}, not {given}")


def is_table(table: torch.Tensor, num_fields: int | None = None) -> bool:
    """Whether `table` is int64 `[n, num_fields]` and contiguous; `num_fields` None: any number."""
    return (
        table.dim() == 2
        and table.dtype == torch.int64
        and table.is_contiguous()
        and num_fields in (None, table.shape[1])
    )


def mixed(words: torch.Tensor, first: int) -> int:
    """The sum, modulo 2**32, of the mixed values of `words` int32 `[n]`, numbered from `first`."""
    # torch has no unsigned arithmetic: int32 multiplies modulo 2**32, a mask makes its shift a logical one
    number = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64)
    mix = words ^ _as_int32(number * GOLDEN)
    mix = mix ^ (mix >> 16 & 0xFFFF)
    mix = mix * _signed(FIRST)
    mix = mix ^ (mix >> 13 & 0x7FFFF)
    mix = mix * _signed(SECOND)
    mix = mix ^ (mix >> 16 & 0xFFFF)
    return int(mix.to(torch.int64).sum()) % MODULUS


def move_spans_reference(spans: torch.Tensor, runs: torch.Tensor, sums: torch.Tensor) -> None:
    """As `move_spans_triton`, for addresses of the host's memory."""
    check_runs("move_spans", spans, runs, sums, SPAN_FIELDS)
    sums.zero_()
    for number, (begin, count, *_) in enumerate(runs.tolist()):
        for source, target, num_words, first in spans[begin : begin + count].tolist():
            words_at(target, num_words).copy_(words_at(source, num_words))
            sums[number, 0] += mixed(words_at(target, num_words), first)


def words_at(address: int, num_words: int) -> torch.Tensor:
    """Words of the host's memory as int32 `[num_words]`, not copied."""
    memory = (ctypes.c_int32 * num_words).from_address(address)
    return torch.frombuffer(memory, dtype=torch.int32)


def _as_int32(numbers: torch.Tensor) -> torch.Tensor:
    low = numbers & (MODULUS - 1)
    return torch.where(low >= MODULUS // 2, low - MODULUS, low).to(torch.int32)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number
