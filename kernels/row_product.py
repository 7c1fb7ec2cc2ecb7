"""The tile code of products of few rows, which may carry norms and residual sums with them.

RMSNorm multiplies a whole row by one number, so a product need not wait for it: with z = x * w,
norm(x) W^T = scale * (z W^T). The product in front of a norm adds its outputs to the residual stream,
multiplies the sum by the norm's weights, and keeps the sum of the squares of each tile of outputs. The
product behind the norm adds these sums while its weights are on their way, and scales its outputs.

One row needs no matrix instruction. Such an instruction pads it to 8 rows in shared memory, and waits for a
whole wide tile at each step, so that fewer bytes are on their way.

Legend: OUT outputs and ROWS rows of a tile, IN inputs of one step; T rows, H inputs, S tiles whose squares
were summed.
"""

from __future__ import annotations

from .silu_mul import activated
from .triton_jit import jit, tl


@jit
def load_squares(
    p_squares: tl.tensor,
    num_squares: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    IS_SCALED: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
) -> tl.tensor:
    """The sums of squares `[ROWS, S]` of `p_squares` `[T, S]`, float32, to be loaded while weights arrive."""
    b_squares = tl.zeros((i_row.shape[0], BLOCK_SQUARES), dtype=tl.float32)
    if IS_SCALED:
        i_part = tl.arange(0, BLOCK_SQUARES)
        m_part = m_row[:, None] & (i_part < num_squares)[None, :]
        p_part = p_squares + i_row[:, None] * num_squares + i_part[None, :]
        b_squares = tl.load(p_part, mask=m_part, other=0.0)
    return b_squares


@jit
def _vector_product(
    p_row: tl.tensor,
    p_weight: tl.tensor,
    i_line: tl.tensor,
    m_line: tl.tensor,
    first_in: tl.tensor,
    in_size: tl.tensor,
    IS_EVEN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """The products `[LINES]` of one row with the lines `i_line` of a weight, without a matrix instruction:
    each thread multiplies the inputs that it reads.
    """
    i_offset = tl.arange(0, BLOCK_IN)
    p_lines = p_weight + i_line[:, None] * in_size
    b_each = tl.zeros((i_line.shape[0], BLOCK_IN), dtype=tl.float32)
    for first in tl.range(first_in, in_size, BLOCK_IN, num_stages=NUM_STAGES):
        i_in = first + i_offset
        if IS_EVEN:
            b_x = tl.load(p_row + i_in)
            b_weight = tl.load(p_lines + i_in[None, :], eviction_policy="evict_first")
        else:
            m_in = i_in < in_size
            b_x = tl.load(p_row + i_in, mask=m_in, other=0.0)
            m_weight = m_line[:, None] & m_in[None, :]
            b_weight = tl.load(
                p_lines + i_in[None, :], mask=m_weight, other=0.0, eviction_policy="evict_first"
            )
        b_each += b_weight.to(tl.float32) * b_x.to(tl.float32)[None, :]
    return tl.sum(b_each, axis=1)


@jit
def row_product(
    p_x: tl.tensor,
    p_weight: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    i_out: tl.tensor,
    m_out: tl.tensor,
    first_in: tl.tensor,
    out_size: tl.tensor,
    in_size: tl.tensor,
    x_stride: tl.tensor,
    up_rows: tl.tensor,
    b_y: tl.tensor,
    b_up: tl.tensor,
    IS_GATED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """(`b_y`, `b_up`) `[OUT, ROWS]`, each with the products of the inputs from `first_in` on added.

    `p_weight` `[N, H]`. With IS_GATED, `b_up` gets the products of N more rows, which begin at row
    `up_rows`. With IS_EVEN the tiles divide N and H. Outputs are the rows of the product, because they are
    the long side. With ROWS = 1, a row that exists, no matrix instruction is used.
    """
    if b_y.shape[1] == 1:
        i_line, m_line = tl.minimum(i_out, out_size - 1).to(tl.int64), m_out
        if IS_GATED:
            # one load asks for the lines of both halves
            i_line = tl.reshape(tl.join(i_line, i_line + up_rows), (2 * i_out.shape[0],))
            m_line = tl.reshape(tl.join(m_out, m_out), (2 * i_out.shape[0],))
        p_row = p_x + tl.sum(i_row, axis=0) * x_stride
        b_line = _vector_product(
            p_row, p_weight, i_line, m_line, first_in, in_size, IS_EVEN, BLOCK_IN, NUM_STAGES
        )
        if IS_GATED:
            b_line, b_more = tl.split(tl.reshape(b_line, (i_out.shape[0], 2)))
            b_up += b_more[:, None]
        return b_y + b_line[:, None], b_up
    i_offset = tl.arange(0, BLOCK_IN)
    p_rows = p_x + i_row[None, :] * x_stride
    i_own = tl.minimum(i_out, out_size - 1).to(tl.int64)
    p_outs = p_weight + i_own[:, None] * in_size
    p_ups = p_weight + (i_own + up_rows)[:, None] * in_size
    for first in tl.range(first_in, in_size, BLOCK_IN, num_stages=NUM_STAGES):
        i_in = first + i_offset
        if IS_EVEN:
            b_x = tl.load(p_rows + i_in[:, None], mask=m_row[None, :], other=0.0)
            b_weight = tl.load(p_outs + i_in[None, :], eviction_policy="evict_first")
        else:
            m_in = i_in < in_size
            b_x = tl.load(p_rows + i_in[:, None], mask=m_in[:, None] & m_row[None, :], other=0.0)
            m_weight = m_out[:, None] & m_in[None, :]
            b_weight = tl.load(
                p_outs + i_in[None, :], mask=m_weight, other=0.0, eviction_policy="evict_first"
            )
        b_y = tl.dot(b_weight, b_x, b_y, input_precision="ieee")
        if IS_GATED:
            if IS_EVEN:
                b_weight = tl.load(p_ups + i_in[None, :], eviction_policy="evict_first")
            else:
                b_weight = tl.load(
                    p_ups + i_in[None, :], mask=m_weight, other=0.0, eviction_policy="evict_first"
                )
            b_up = tl.dot(b_weight, b_x, b_up, input_precision="ieee")
    return b_y, b_up


@jit
def with_bias(b_y: tl.tensor, p_bias: tl.tensor, i_out: tl.tensor, m_out: tl.tensor) -> tl.tensor:
    """`b_y` `[OUT, ROWS]` with the bias of its outputs added."""
    return b_y + tl.load(p_bias + i_out, mask=m_out, other=0.0).to(tl.float32)[:, None]


@jit
def gated(b_y: tl.tensor, b_up: tl.tensor, dtype: tl.constexpr, IS_GELU: tl.constexpr) -> tl.tensor:
    """The gate of a GLU MLP with the rounding of `silu_mul`, float32 `[OUT, ROWS]`."""
    b_gate = b_y.to(dtype).to(tl.float32)
    b_silu = activated(b_gate, IS_GELU).to(dtype).to(tl.float32)
    return b_silu * b_up.to(dtype).to(tl.float32)


@jit
def load_residual(
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    i_out: tl.tensor,
    m_out: tl.tensor,
    out_size: tl.tensor,
    IS_SUM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:
    """The residual stream `[OUT, ROWS]` and the weights of the next norm `[OUT]`, float32, to be loaded while
    weights arrive.
    """
    b_residual = tl.zeros((i_out.shape[0], i_row.shape[0]), dtype=tl.float32)
    b_norm = tl.zeros((i_out.shape[0],), dtype=tl.float32)
    if IS_SUM:
        o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
        b_residual = tl.load(p_residual + o_y, mask=m_out[:, None] & m_row[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            b_norm = tl.load(p_norm + i_out, mask=m_out, other=0.0).to(tl.float32) + OFFSET
    return b_residual, b_norm


@jit
def store_sum(
    b_y: tl.tensor,
    b_residual: tl.tensor,
    b_norm: tl.tensor,
    p_total: tl.tensor,
    p_z: tl.tensor,
    p_squares: tl.tensor,
    i_tile: tl.tensor,
    num_tiles: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    i_out: tl.tensor,
    m_out: tl.tensor,
    out_size: tl.tensor,
    HAS_NORM: tl.constexpr,
) -> None:
    """Stores the rounded sum of `b_y` and the residual, each `[OUT, ROWS]`; with HAS_NORM also that sum
    times the weights of the next norm, to `p_z`, and the sum of the tile's squares, to column `i_tile` of
    `p_squares`.
    """
    m_y = m_out[:, None] & m_row[None, :]
    o_y = i_row[None, :].to(tl.int64) * out_size + i_out[:, None]
    dtype: tl.constexpr = p_total.dtype.element_ty
    b_rounded = (b_y.to(dtype).to(tl.float32) + b_residual).to(dtype)
    tl.store(p_total + o_y, b_rounded, mask=m_y)
    if HAS_NORM:
        b_total = tl.where(m_y, b_rounded.to(tl.float32), 0.0)
        tl.store(p_z + o_y, (b_total * b_norm[:, None]).to(dtype), mask=m_y)
        b_squares = tl.sum(b_total * b_total, axis=0)
        tl.store(p_squares + i_row * num_tiles + i_tile, b_squares, mask=m_row)
