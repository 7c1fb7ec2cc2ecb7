"""What the products with 4-bit weights have in common, in Gluon: words become operands of matrix instructions
in the registers where they are loaded.

A tile of words `[.., M, U/8]` (see `int4_values`) is spread over the threads of a warp as its values
`[.., M, U]` are in the left operand of a matrix instruction of 16 rows. Four threads share rows r and r + 8,
and no value moves to another thread. With a gate, those two rows are the gate and the other half of one
output, so a thread multiplies them by itself.

Sources: Frantar et al., "MARLIN: Mixed-precision auto-regressive parallel inference on LLMs", 2024, for
words in the order of operands; Kim et al., "Who says elephants can't run", 2022, for values made by bits of
the exponent.
Legend as in `int4_values`; M rows of a tile of weights, R rows of x.
"""

from __future__ import annotations

import torch

from .triton_jit import constexpr_function, gl, gluon_jit, has_gluon, tl

# Eight values from the word $8 and the word $9 of its group. 4 bits become the mantissa of a float whose
# exponent counts in ones: from 128 in bfloat16, from 1024 in float16. That base plus the zero point is then
# subtracted, and all results are exact. GPUs before sm_90 have no difference of two bfloat16, but fused
# multiply-adds: ONE is a pair of ones, MINUS_BASE such a negative float.
_UNPACK = """
{
.reg .b32 z, one, a, b, c, d;
mov.b32 one, ONE;
shr.u32 z, $9, 16;
or.b32 z, z, MINUS_BASE;
prmt.b32 z, z, z, 0x1010;
shr.u32 b, $8, 4;
shr.u32 c, $8, 8;
shr.u32 d, $8, 12;
lop3.b32 a, $8, 0x000f000f, BASE, 0xea;
lop3.b32 b, b, 0x000f000f, BASE, 0xea;
lop3.b32 c, c, 0x000f000f, BASE, 0xea;
lop3.b32 d, d, 0x000f000f, BASE, 0xea;
fma.rn.TYPE a, a, one, z;
fma.rn.TYPE b, b, one, z;
fma.rn.TYPE c, c, one, z;
fma.rn.TYPE d, d, one, z;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}
"""
_TYPES = {
    "bf16": {"TYPE": "bf16x2", "ONE": "0x3f803f80", "MINUS_BASE": "0xc300", "BASE": "0x43004300"},
    "fp16": {"TYPE": "f16x2", "ONE": "0x3c003c00", "MINUS_BASE": "0xe400", "BASE": "0x64006400"},
}


def can_unpack(dtype: torch.dtype) -> bool:
    """Whether words become values of `dtype` here."""
    return dtype in (torch.bfloat16, torch.float16) and has_gluon()


@constexpr_function
def unpacking(dtype: object) -> str:
    """The instructions that make values of `dtype`."""
    text = _UNPACK
    for name, value in _TYPES[str(dtype)].items():
        text = text.replace(name, value)
    return text


@constexpr_function
def _powers(first: int, end: int) -> list[int]:
    """`first`, doubled while below `end`."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@constexpr_function
def words_layout(m: int, unit: int, warps: int) -> object:
    """Words `[M, U/8]` where the left operand has their values; each warp has 16 rows, then 16 more."""
    parts = unit // 32
    return gl.DistributedLinearLayout(
        reg_bases=[[0, i] for i in _powers(1, parts)] + [[8, 0]] + [[i, 0] for i in _powers(16 * warps, m)],
        lane_bases=[[0, parts], [0, 2 * parts], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16 * i, 0] for i in _powers(1, warps)],
        block_bases=[],
        shape=[m, unit // 8],
    )


@constexpr_function
def split_words_layout(m: int, unit: int, warps: int) -> object:
    """Words `[W, M, U/8]`, each warp with a unit of its own."""
    parts = unit // 32
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, i] for i in _powers(1, parts)] + [[0, i, 0] for i in _powers(8, m)],
        lane_bases=[[0, 0, parts], [0, 0, 2 * parts], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[i, 0, 0] for i in _powers(1, warps)],
        block_bases=[],
        shape=[warps, m, unit // 8],
    )


@constexpr_function
def outputs_layout(outs: int, warps: int) -> object:
    """Outputs `[outs, R]` as they are stored: side by side along the outputs."""
    lanes = min(outs // 2, 32)
    return gl.BlockedLayout([2, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon_jit
def weight_rows(
    i_tile: tl.tensor, out_size: tl.tensor, M: tl.constexpr, IS_GATED: tl.constexpr, LAYOUT: tl.constexpr
) -> tl.tensor:
    """The rows of the weight in tile `i_tile`, in `LAYOUT` `[M]`; behind the last output the last again."""
    i_row = gl.arange(0, M, LAYOUT)
    if IS_GATED:
        i_out = gl.minimum(i_tile * (M // 2) + i_row // 16 * 8 + i_row % 8, out_size - 1)
        return i_out + i_row % 16 // 8 * out_size
    return gl.minimum(i_tile * M + i_row, out_size - 1)


@gluon_jit
def fragments(
    b_words: tl.tensor, b_groups: tl.tensor, OPERAND: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """(stored - zero) `[.., M, U]` of words `[.., M, U/8]` and the words `[.., M]` of their groups."""
    RANK: tl.constexpr = len(b_words.shape)
    M: tl.constexpr = b_words.shape[RANK - 2]
    PARTS: tl.constexpr = b_words.shape[RANK - 1] // 4
    WARPS: tl.constexpr = b_words.shape[0] if RANK == 3 else 1
    b_j0e0, b_j0e1, b_j1e0, b_j1e1, b_j2e0, b_j2e1, b_j3e0, b_j3e1 = gl.inline_asm_elementwise(
        unpacking(dtype),
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [b_words, gl.expand_dims(b_groups, RANK - 1)],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
        is_pure=True,
        pack=1,
    )
    b_low = gl.join(gl.join(b_j0e0, b_j0e1), gl.join(b_j1e0, b_j1e1))
    b_high = gl.join(gl.join(b_j2e0, b_j2e1), gl.join(b_j3e0, b_j3e1))
    b_parts = gl.reshape(gl.join(b_low, b_high), [WARPS, M, 4, PARTS, 2, 2, 2])  # t, i, e, low j, high j
    b_values = gl.reshape(gl.permute(b_parts, [0, 1, 3, 6, 5, 2, 4]), [WARPS, M, 32 * PARTS])
    if RANK == 2:
        b_values = gl.reshape(b_values, [M, 32 * PARTS])
    return gl.convert_layout(b_values.to(dtype, bitcast=True), OPERAND, assert_trivial=True)


@gluon_jit
def group_scales(b_groups: tl.tensor, LAYOUT: tl.constexpr) -> tl.tensor:
    """The float32 scales of words of groups."""
    b_scales = (b_groups & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return gl.convert_layout(b_scales, LAYOUT, assert_trivial=True)


@gluon_jit
def store_outputs(
    b_y: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    i_tile: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    out_size: tl.tensor,
    dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    WARPS: tl.constexpr,
    Y: tl.constexpr,
) -> None:
    """Stores sums `[M, R]` in layout `Y` as rows of `p_y`, with a bias and, IS_GATED, as the gate of a SwiGLU
    MLP, whose halves and silu are rounded to `dtype`.
    """
    M: tl.constexpr = b_y.shape[0]
    ROWS: tl.constexpr = b_y.shape[1]
    OUTS: tl.constexpr = M // 2 if IS_GATED else M
    if HAS_BIAS:
        i_weight = weight_rows(i_tile, out_size, M, IS_GATED, gl.SliceLayout(1, Y))
        b_y += gl.load(p_bias + i_weight).to(gl.float32)[:, None]
    if IS_GATED:
        b_pairs = gl.permute(gl.reshape(b_y, [M // 16, 2, 8, ROWS]), [0, 2, 3, 1])
        b_gate, b_up = gl.split(b_pairs)
        b_gate = b_gate.to(dtype).to(gl.float32)
        b_silu = (b_gate / (1.0 + gl.exp(-b_gate))).to(dtype).to(gl.float32)
        b_y = gl.reshape(b_silu * b_up.to(dtype).to(gl.float32), [OUTS, ROWS])
    STORED: tl.constexpr = outputs_layout(OUTS, WARPS)
    b_out = gl.convert_layout(b_y.to(p_y.dtype.element_ty), STORED)
    i_out = i_tile * OUTS + gl.arange(0, OUTS, gl.SliceLayout(1, STORED))
    i_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, STORED))
    o_y = i_row.to(gl.int64)[None, :] * out_size + i_out[:, None]
    gl.store(p_y + o_y, b_out, mask=(i_out < out_size)[:, None] & (i_row < num_rows)[None, :])
