"""Reads the first bytes of a later kernel's weights into the L2 cache, beside the work of another kernel.

With few rows, a step's time is the time to read its weights. Between two products run kernels that read
almost nothing: norms, rotation, attention of a short context. Each product, too, needs some microseconds
until all of its reads are under way. Programs behind those of a kernel close these gaps: they ask for lines
of the weights that come next, and end without waiting for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import cdiv, jit, tl

# Bytes of one request to the cache. The device works on it by itself, from compute capability 9.0 on.
CHUNK = 1024
NUM_CHUNKS = 128  # of one program


class Ahead(NamedTuple):
    """The first `num_bytes` of `weight`, which a later kernel reads."""

    weight: torch.Tensor
    num_bytes: int

    @property
    def num_programs(self) -> int:
        return cdiv(self.num_bytes, CHUNK * NUM_CHUNKS)


@jit
def read_ahead(
    p_weight: tl.tensor,
    i_program: tl.tensor,
    num_bytes: tl.tensor,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
) -> None:
    """Asks for the chunks of program `i_program` among the first `num_bytes` of `p_weight`."""
    o_chunk = (i_program.to(tl.int64) * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)) * CHUNK
    tl.inline_asm_elementwise(
        "{ .reg .pred wanted; setp.le.s64 wanted, $2, $4; "
        "@wanted cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,l,r,l",
        [
            p_weight.to(tl.int64) + o_chunk,
            o_chunk + CHUNK,
            tl.full((NUM_CHUNKS,), CHUNK, dtype=tl.int32),
            num_bytes.to(tl.int64),
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
