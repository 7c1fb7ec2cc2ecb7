"""The tile of a product with weights of 8-bit floating point and rows of 8 or more bits, over a part of the
inputs.

With scales of blocks each product of 128 inputs is scaled before it is added. The scales of a step are asked
for in the step before: Triton makes loads ahead of their step only for the operands of a product. A step of
many waits took 470 ns, where one without scales takes 180 (H200, 14336 inputs, 16 to 32 rows).

Legend: R rows of a tile, N outputs of it, U inputs of a step.
"""

from __future__ import annotations

from .triton_jit import jit, tl


@jit
def _values(
    p_lines: tl.tensor,
    i_in: tl.tensor,
    in_size: tl.tensor,
    dtype: tl.constexpr,
    IS_EVEN: tl.constexpr,
    EVICTION: tl.constexpr,
) -> tl.tensor:
    """Weights `[N, U]` in `dtype`, of lines that all exist."""
    if IS_EVEN:
        b_weight = tl.load(p_lines + i_in[None, :], eviction_policy=EVICTION)
    else:
        m_in = (i_in < in_size)[None, :]
        b_weight = tl.load(p_lines + i_in[None, :], mask=m_in, other=0.0, eviction_policy=EVICTION)
    return b_weight.to(dtype)


@jit
def _block_scales(
    p_rows: tl.tensor,
    p_outs: tl.tensor,
    up_offset: tl.tensor,
    m_row: tl.tensor,
    row_stride: tl.tensor,
    i_block: tl.tensor,
    IS_ROUNDED: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scales of block `i_block` of the inputs, float32: of the rows `[R]`, 1 unless IS_ROUNDED, of the
    outputs, and of the other half of gated outputs. `row_stride` is an int64.
    """
    b_rows = m_row.to(tl.float32)
    if IS_ROUNDED:
        b_rows = tl.load(p_rows + i_block * row_stride, mask=m_row, other=0.0)
    out = tl.load(p_outs + i_block)
    up = out
    if IS_GATED:
        up = tl.load(p_outs + up_offset + i_block)
    return b_rows, out, up


@jit
def fp8_tile(
    p_rows: tl.tensor,
    p_outs: tl.tensor,
    p_row_scales: tl.tensor,
    p_scales: tl.tensor,
    i_first_out: tl.tensor,
    m_row: tl.tensor,
    first_in: tl.tensor,
    end_in: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    row_scale_stride: tl.tensor,
    scale_stride: tl.tensor,
    HAS_BLOCKS: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    EVICTION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sums of the products of inputs `first_in` to `end_in`, float32 `[N, R]`, and with a gate those of
    the other half.

    `p_rows` `[1, R]` and `p_outs` `[N, 1]` point to lines of `in_size` inputs, and the other half of gated
    outputs is `out_size` lines behind. With HAS_BLOCKS products are scaled: `p_row_scales` `[R]` point to the
    rows' scales of the first block, `row_scale_stride` apart from the next, `p_scales` to those of the
    weight, `scale_stride` a line of blocks, one of which holds all N outputs from `i_first_out` on. IS_EVEN:
    steps of BLOCK_IN inputs are whole.
    """
    i_offset = tl.arange(0, BLOCK_IN)
    dtype: tl.constexpr = p_rows.dtype.element_ty
    p_ups = p_outs + out_size.to(tl.int64) * in_size
    b_y = tl.zeros((p_outs.shape[0], p_rows.shape[1]), dtype=tl.float32)
    b_up = b_y
    if HAS_BLOCKS:
        p_line = p_scales + i_first_out // SCALE_BLOCK * scale_stride
        up_offset = out_size // SCALE_BLOCK * scale_stride
        i_block = first_in // SCALE_BLOCK
        stride = tl.full((), row_scale_stride, tl.int64)
        b_rows, out, up = _block_scales(
            p_row_scales, p_line, up_offset, m_row, stride, i_block, IS_ROUNDED, IS_GATED
        )
    for first in range(first_in, end_in, BLOCK_IN):
        i_in = first + i_offset
        m_x = m_row[None, :]
        if not IS_EVEN:
            m_x = m_x & (i_in < in_size)[:, None]
        b_x = tl.load(p_rows + i_in[:, None], mask=m_x, other=0.0)
        b_weight = _values(p_outs, i_in, in_size, dtype, IS_EVEN, EVICTION)
        if HAS_BLOCKS:
            i_block = tl.minimum(first + BLOCK_IN, end_in - 1) // SCALE_BLOCK
            b_next, next_out, next_up = _block_scales(
                p_row_scales, p_line, up_offset, m_row, stride, i_block, IS_ROUNDED, IS_GATED
            )
            b_y += tl.dot(b_weight, b_x, input_precision="ieee") * (b_rows * out)[None, :]
            if IS_GATED:
                b_weight = _values(p_ups, i_in, in_size, dtype, IS_EVEN, EVICTION)
                b_up += tl.dot(b_weight, b_x, input_precision="ieee") * (b_rows * up)[None, :]
            b_rows, out, up = b_next, next_out, next_up
        else:
            b_y = tl.dot(b_weight, b_x, b_y, input_precision="ieee")
            if IS_GATED:
                b_weight = _values(p_ups, i_in, in_size, dtype, IS_EVEN, EVICTION)
                b_up = tl.dot(b_weight, b_x, b_up, input_precision="ieee")
    return b_y, b_up


@jit
def by_outputs(
    b_y: tl.tensor,
    b_up: tl.tensor,
    p_row_scales: tl.tensor,
    p_scales: tl.tensor,
    i_out: tl.tensor,
    m_row: tl.tensor,
    m_out: tl.tensor,
    out_size: tl.tensor,
    IS_ROUNDED: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`b_y` and, gated, `b_up` times the scales of rows and of outputs `i_out`, which have one each."""
    b_rows = m_row.to(tl.float32)
    if IS_ROUNDED:
        b_rows = tl.load(p_row_scales, mask=m_row, other=0.0)
    b_y *= tl.load(p_scales + i_out, mask=m_out, other=0.0)[:, None] * b_rows[None, :]
    if IS_GATED:
        b_up *= tl.load(p_scales + out_size + i_out, mask=m_out, other=0.0)[:, None] * b_rows[None, :]
    return b_y, b_up
