"""The products between the attention of a layer and that of the next, for few rows, in one launch.

They are the output projection, both products of a GLU MLP, and the projection of queries, keys and values of
the next layer, with residual sums and norms as in `normed_linear`. Each product needs every output of the one
before it. The programs of the launch all run at once and meet at a barrier in device memory; on their way
there they ask for the first weights of the next product, so that memory has work while they wait.

The barrier is that of PyTorch's cooperative reductions (torch/_inductor/runtime/triton_helpers.py,
`x_grid_barrier`): the arrivals of all programs flip the highest bit of a counter, which thus needs no reset.

Legend: T rows, H hidden size, A heads times head dimension, I intermediate size, Q outputs of the projection
of queries, keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .normed_linear import scaled_linear_reference, sum_linear_reference
from .rms_norm import NextNorm
from .row_product import gated, load_residual, load_squares, row_product, store_sum, with_bias
from .skinny_linear import MIN_ROWS_TILE
from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

MAX_ROWS = 16
NUM_PHASES = 4


class PhaseShape(NamedTuple):
    """The tile of a product: outputs and inputs of a step, and steps under way at once."""

    out: int
    inner: int
    num_stages: int


class ChainShape(NamedTuple):
    """Launch configuration."""

    output: PhaseShape
    gate_up: PhaseShape
    down: PhaseShape
    heads: PhaseShape
    num_warps: int = 4
    prefetches: bool = True


PROGRAMS_EACH = 2  # of the usual shape, on a multiprocessor of an H200
DEFAULT_SHAPE = ChainShape(
    PhaseShape(16, 256, 4), PhaseShape(64, 64, 4), PhaseShape(16, 256, 4), PhaseShape(32, 128, 4)
)


@jit
def _arrive(p_barrier: tl.tensor) -> tl.tensor:
    """Counts this program in, behind all that it stored; returns the counter before."""
    tl.debug_barrier()  # the stores of all threads come before the arrival of one
    flip = 0x7FFFFFFF - (tl.num_programs(0) - 2)
    step = tl.where(tl.program_id(0) == 0, flip, 1)
    return tl.atomic_add(p_barrier, step, sem="release", scope="gpu")


@jit
def _wait(p_barrier: tl.tensor, arrival: tl.tensor) -> None:
    """Waits until the highest bit of the counter differs from that at the `arrival`."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .b32 %now;
            .reg .pred %waits;
        again:
            ld.acquire.gpu.global.b32 %now, [$1];
            xor.b32 %now, %now, $2;
            setp.ge.s32 %waits, %now, 0;
            @%waits bra again;
            mov.b32 $0, %now;
        }
        """,
        "=r,l,r",
        [p_barrier.to(tl.int64), arrival],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _first_weights(
    p_weight: tl.tensor,
    i_tile: tl.tensor,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tensor:
    """The weights `[OUT, IN]` of the first step of a tile; those of any tile for a program without one."""
    i_out = tl.minimum(i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT), OUT_SIZE - 1).to(tl.int64)
    i_in = tl.arange(0, BLOCK_IN)
    p_own = p_weight + i_out[:, None] * IN_SIZE + i_in[None, :]
    if IN_SIZE % BLOCK_IN == 0:
        return tl.load(p_own, eviction_policy="evict_first")
    else:
        return tl.load(p_own, mask=(i_in < IN_SIZE)[None, :], other=0.0)


@jit
def _tile_product(
    b_first: tl.tensor,
    b_first_up: tl.tensor,
    p_x: tl.tensor,
    x_stride: tl.tensor,
    p_weight: tl.tensor,
    i_tile: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """The outputs `[OUT, ROWS]` of a tile, and those of its lower half. With HAS_FIRST the weights of the
    first step are given.
    """
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < OUT_SIZE
    b_y = tl.zeros((BLOCK_OUT, i_row.shape[0]), dtype=tl.float32)
    b_up = b_y
    first_in = BLOCK_IN if HAS_FIRST else 0
    b_y, b_up = row_product(
        p_x, p_weight, i_row, m_row, i_out, m_out, first_in, OUT_SIZE, IN_SIZE, x_stride, OUT_SIZE, b_y, b_up,
        IS_GATED, OUT_SIZE % BLOCK_OUT == 0 and IN_SIZE % BLOCK_IN == 0, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    if HAS_FIRST:
        i_in = tl.arange(0, BLOCK_IN)
        m_x = (i_in < IN_SIZE)[:, None] & m_row[None, :]
        b_x = tl.load(p_x + i_row[None, :] * x_stride + i_in[:, None], mask=m_x, other=0.0)
        b_y = tl.dot(b_first, b_x, b_y, input_precision="ieee")
        if IS_GATED:
            b_up = tl.dot(b_first_up, b_x, b_up, input_precision="ieee")
    return b_y, b_up


@jit
def _sum_tile(
    b_first: tl.tensor,
    p_x: tl.tensor,
    x_stride: tl.tensor,
    p_weight: tl.tensor,
    p_residual: tl.tensor,
    p_norm: tl.tensor,
    p_total: tl.tensor,
    p_z: tl.tensor,
    p_squares: tl.tensor,
    i_tile: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """One tile of a product that ends in a residual sum."""
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < OUT_SIZE
    b_residual, b_norm = load_residual(
        p_residual, p_norm, i_row, m_row, i_out, m_out, OUT_SIZE, True, HAS_NORM, OFFSET
    )
    b_y, _ = _tile_product(
        b_first, b_first, p_x, x_stride, p_weight, i_tile, i_row, m_row, OUT_SIZE, IN_SIZE, False, HAS_FIRST,
        BLOCK_OUT, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    store_sum(
        b_y, b_residual, b_norm, p_total, p_z, p_squares, i_tile, tl.cdiv(OUT_SIZE, BLOCK_OUT), i_row, m_row,
        i_out, m_out, OUT_SIZE, HAS_NORM,
    )  # fmt: skip


@jit
def _scaled_tile(
    b_first: tl.tensor,
    b_first_up: tl.tensor,
    b_squares: tl.tensor,
    p_x: tl.tensor,
    p_weight: tl.tensor,
    p_bias: tl.tensor,
    p_y: tl.tensor,
    i_tile: tl.tensor,
    i_row: tl.tensor,
    m_row: tl.tensor,
    eps: tl.tensor,
    OUT_SIZE: tl.constexpr,
    IN_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> None:
    """One tile of a product behind a norm."""
    i_out = i_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    m_out = i_out < OUT_SIZE
    b_y, b_up = _tile_product(
        b_first, b_first_up, p_x, IN_SIZE, p_weight, i_tile, i_row, m_row, OUT_SIZE, IN_SIZE, IS_GATED,
        HAS_FIRST, BLOCK_OUT, BLOCK_IN, NUM_STAGES,
    )  # fmt: skip
    dtype: tl.constexpr = p_y.dtype.element_ty
    b_scale = tl.rsqrt(tl.sum(b_squares, axis=1) / IN_SIZE + eps)[None, :]
    b_y *= b_scale
    if HAS_BIAS:
        b_y = with_bias(b_y, p_bias, i_out, m_out)
    if IS_GATED:
        b_up *= b_scale
        if HAS_BIAS:
            b_up = with_bias(b_up, p_bias + OUT_SIZE, i_out, m_out)
        b_y = gated(b_y, b_up, dtype, IS_GELU)
    o_y = i_row[None, :].to(tl.int64) * OUT_SIZE + i_out[:, None]
    tl.store(p_y + o_y, b_y.to(dtype), mask=m_out[:, None] & m_row[None, :])


@jit_varying("num_rows")
def _chain_kernel(
    p_x: tl.tensor,
    p_hidden: tl.tensor,
    p_output: tl.tensor,
    p_post_norm: tl.tensor,
    p_gate_up: tl.tensor,
    p_down: tl.tensor,
    p_next_norm: tl.tensor,
    p_qkv: tl.tensor,
    p_qkv_bias: tl.tensor,
    p_middle: tl.tensor,
    p_middle_z: tl.tensor,
    p_middle_squares: tl.tensor,
    p_inner: tl.tensor,
    p_total: tl.tensor,
    p_z: tl.tensor,
    p_squares: tl.tensor,
    p_heads: tl.tensor,
    p_barrier: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    post_eps: tl.tensor,
    next_eps: tl.tensor,
    PHASE: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GELU: tl.constexpr,
    POST_OFFSET: tl.constexpr,
    NEXT_OFFSET: tl.constexpr,
    PREFETCHES: tl.constexpr,
    ATTENDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    OUTPUT_OUT: tl.constexpr,
    OUTPUT_IN: tl.constexpr,
    OUTPUT_STAGES: tl.constexpr,
    GATE_OUT: tl.constexpr,
    GATE_IN: tl.constexpr,
    GATE_STAGES: tl.constexpr,
    DOWN_OUT: tl.constexpr,
    DOWN_IN: tl.constexpr,
    DOWN_STAGES: tl.constexpr,
    HEADS_OUT: tl.constexpr,
    HEADS_IN: tl.constexpr,
    HEADS_STAGES: tl.constexpr,
    MIDDLE_SQUARES: tl.constexpr,
    BLOCK_MIDDLE: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_SQUARES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    # PHASE -1: all products, with barriers between them; otherwise that product alone
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    i_row = tl.arange(0, BLOCK_ROWS)
    m_row = i_row < num_rows
    if PHASE == -1 or PHASE == 0:
        b_none = tl.zeros((16, 16), dtype=tl.float32)
        for i_tile in range(i_program, tl.cdiv(HIDDEN, OUTPUT_OUT), num_programs):
            _sum_tile(
                b_none, p_x, x_stride, p_output, p_hidden, p_post_norm, p_middle, p_middle_z,
                p_middle_squares, i_tile, i_row, m_row, HIDDEN, ATTENDED, True, POST_OFFSET, False,
                OUTPUT_OUT, OUTPUT_IN, OUTPUT_STAGES,
            )  # fmt: skip
    if PHASE == -1:
        arrival = _arrive(p_barrier)
    if PHASE == -1 or PHASE == 1:
        b_first = tl.zeros((16, 16), dtype=tl.float32)
        b_first_up = b_first
        if PREFETCHES:
            b_first = _first_weights(p_gate_up, i_program, INNER, HIDDEN, GATE_OUT, GATE_IN)
            b_first_up = _first_weights(
                p_gate_up + INNER * HIDDEN, i_program, INNER, HIDDEN, GATE_OUT, GATE_IN
            )
        if PHASE == -1:
            _wait(p_barrier, arrival)
        b_squares = load_squares(p_middle_squares, MIDDLE_SQUARES, i_row, m_row, True, BLOCK_MIDDLE)
        if i_program < tl.cdiv(INNER, GATE_OUT):
            _scaled_tile(
                b_first, b_first_up, b_squares, p_middle_z, p_gate_up, p_gate_up, p_inner, i_program, i_row,
                m_row, post_eps, INNER, HIDDEN, False, True, IS_GELU, PREFETCHES, GATE_OUT, GATE_IN,
                GATE_STAGES,
            )  # fmt: skip
        for i_tile in range(i_program + num_programs, tl.cdiv(INNER, GATE_OUT), num_programs):
            _scaled_tile(
                b_first, b_first_up, b_squares, p_middle_z, p_gate_up, p_gate_up, p_inner, i_tile, i_row,
                m_row, post_eps, INNER, HIDDEN, False, True, IS_GELU, False, GATE_OUT, GATE_IN, GATE_STAGES,
            )  # fmt: skip
    if PHASE == -1:
        arrival = _arrive(p_barrier)
    if PHASE == -1 or PHASE == 2:
        b_first_down = tl.zeros((16, 16), dtype=tl.float32)
        if PREFETCHES:
            b_first_down = _first_weights(p_down, i_program, HIDDEN, INNER, DOWN_OUT, DOWN_IN)
        if PHASE == -1:
            _wait(p_barrier, arrival)
        if i_program < tl.cdiv(HIDDEN, DOWN_OUT):
            _sum_tile(
                b_first_down, p_inner, INNER, p_down, p_middle, p_next_norm, p_total, p_z, p_squares,
                i_program, i_row, m_row, HIDDEN, INNER, HAS_NEXT, NEXT_OFFSET, PREFETCHES, DOWN_OUT, DOWN_IN,
                DOWN_STAGES,
            )  # fmt: skip
        for i_tile in range(i_program + num_programs, tl.cdiv(HIDDEN, DOWN_OUT), num_programs):
            _sum_tile(
                b_first_down, p_inner, INNER, p_down, p_middle, p_next_norm, p_total, p_z, p_squares, i_tile,
                i_row, m_row, HIDDEN, INNER, HAS_NEXT, NEXT_OFFSET, False, DOWN_OUT, DOWN_IN, DOWN_STAGES,
            )  # fmt: skip
    if HAS_NEXT and PHASE == -1:
        arrival = _arrive(p_barrier)
    if HAS_NEXT and (PHASE == -1 or PHASE == 3):
        b_first_heads = tl.zeros((16, 16), dtype=tl.float32)
        if PREFETCHES:
            b_first_heads = _first_weights(p_qkv, i_program, HEADS, HIDDEN, HEADS_OUT, HEADS_IN)
        if PHASE == -1:
            _wait(p_barrier, arrival)
        b_sums = load_squares(p_squares, SQUARES, i_row, m_row, True, BLOCK_SQUARES)
        if i_program < tl.cdiv(HEADS, HEADS_OUT):
            _scaled_tile(
                b_first_heads, b_first_heads, b_sums, p_z, p_qkv, p_qkv_bias, p_heads, i_program, i_row,
                m_row, next_eps, HEADS, HIDDEN, HAS_BIAS, False, False, PREFETCHES, HEADS_OUT, HEADS_IN,
                HEADS_STAGES,
            )  # fmt: skip
        for i_tile in range(i_program + num_programs, tl.cdiv(HEADS, HEADS_OUT), num_programs):
            _scaled_tile(
                b_first_heads, b_first_heads, b_sums, p_z, p_qkv, p_qkv_bias, p_heads, i_tile, i_row, m_row,
                next_eps, HEADS, HIDDEN, HAS_BIAS, False, False, False, HEADS_OUT, HEADS_IN, HEADS_STAGES,
            )  # fmt: skip


class NextLayer(NamedTuple):
    """What begins the next layer: its norm, and its projection `[Q, H]` of queries, keys and values."""

    norm: NextNorm
    qkv: torch.Tensor
    bias: torch.Tensor | None = None


class LayerWeights(NamedTuple):
    """The weights behind attention: `output` `[H, A]`, the norm, `gate_up` `[2*I, H]`, `down` `[H, I]`."""

    output: torch.Tensor
    norm: NextNorm
    gate_up: torch.Tensor
    down: torch.Tensor
    is_gelu: bool = False


def layer_products_triton(
    attended: torch.Tensor,
    hidden: torch.Tensor,
    layer: LayerWeights,
    following: NextLayer | None,
    barrier: torch.Tensor,
    num_programs: int,
    *,
    shape: ChainShape = DEFAULT_SHAPE,
    is_apart: bool = False,
    is_cooperative: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch on `attended` `[T, A]` and the residual stream `hidden` `[T, H]`; returns the stream `[T, H]`
    behind the layer, and queries, keys and values of the next, `[T, Q]`.

    `barrier`: one int32, 0 before the first launch. `num_programs`: how many run at once. `is_apart`: one
    launch for each product.
    """
    num_rows, width = hidden.shape
    double, inner = layer.gate_up.shape[0], layer.down.shape[1]
    assert double == 2 * inner, layer.gate_up.shape
    middle, middle_z, total, z = (torch.empty_like(hidden) for _ in range(4))
    squares = [
        torch.empty(num_rows, cdiv(width, tile.out), dtype=torch.float32, device=hidden.device)
        for tile in (shape.output, shape.down)
    ]
    activated = hidden.new_empty(num_rows, inner)
    heads = None if following is None else hidden.new_empty(num_rows, following.qkv.shape[0])
    options = {"num_warps": shape.num_warps}
    if is_cooperative and not is_apart:
        options["launch_cooperative_grid"] = True
    phases = range(NUM_PHASES) if is_apart else (-1,)
    for phase in phases:
        _chain_kernel[(num_programs,)](
            attended,
            hidden,
            layer.output,
            layer.norm.weight,
            layer.gate_up,
            layer.down,
            layer.norm.weight if following is None else following.norm.weight,
            layer.output if following is None else following.qkv,
            layer.output if following is None or following.bias is None else following.bias,
            middle,
            middle_z,
            squares[0],
            activated,
            total,
            z,
            squares[1],
            hidden if heads is None else heads,
            barrier,
            num_rows,
            attended.stride(0),
            layer.norm.eps,
            0.0 if following is None else following.norm.eps,
            PHASE=phase,
            HAS_NEXT=following is not None,
            HAS_BIAS=following is not None and following.bias is not None,
            IS_GELU=layer.is_gelu,
            POST_OFFSET=layer.norm.offset or 0.0,
            NEXT_OFFSET=0.0 if following is None else following.norm.offset or 0.0,
            PREFETCHES=shape.prefetches,
            ATTENDED=attended.shape[1],
            HIDDEN=width,
            INNER=inner,
            HEADS=1 if heads is None else heads.shape[1],
            OUTPUT_OUT=shape.output.out,
            OUTPUT_IN=shape.output.inner,
            OUTPUT_STAGES=shape.output.num_stages,
            GATE_OUT=shape.gate_up.out,
            GATE_IN=shape.gate_up.inner,
            GATE_STAGES=shape.gate_up.num_stages,
            DOWN_OUT=shape.down.out,
            DOWN_IN=shape.down.inner,
            DOWN_STAGES=shape.down.num_stages,
            HEADS_OUT=shape.heads.out,
            HEADS_IN=shape.heads.inner,
            HEADS_STAGES=shape.heads.num_stages,
            MIDDLE_SQUARES=squares[0].shape[1],
            BLOCK_MIDDLE=next_power_of_2(squares[0].shape[1]),
            SQUARES=squares[1].shape[1],
            BLOCK_SQUARES=next_power_of_2(squares[1].shape[1]),
            BLOCK_ROWS=max(next_power_of_2(num_rows), MIN_ROWS_TILE),
            **options,
        )
    return total, heads


def layer_products_reference(
    attended: torch.Tensor, hidden: torch.Tensor, layer: LayerWeights, following: NextLayer | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The definition and the CPU path."""
    middle, rows = sum_linear_reference(attended, layer.output, None, hidden, layer.norm)
    assert rows is not None
    inner = scaled_linear_reference(rows, layer.gate_up, is_gated=True, is_gelu=layer.is_gelu)
    norm = None if following is None else following.norm
    total, left = sum_linear_reference(inner, layer.down, None, middle, norm)
    if following is None or left is None:
        return total, None
    return total, scaled_linear_reference(left, following.qkv, following.bias)


def num_programs_of(device: torch.device) -> int:
    """How many programs of the usual shape run at once on CUDA `device`."""
    return PROGRAMS_EACH * int(torch.cuda.get_device_properties(device).multi_processor_count)


def layer_products(
    attended: torch.Tensor,
    hidden: torch.Tensor,
    layer: LayerWeights,
    following: NextLayer | None,
    barrier: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attended` `[T, A]` and the residual stream `hidden` `[T, H]` -> (the stream behind the layer `[T, H]`,
    queries, keys and values `[T, Q]` of the next layer, or None without one).

    `barrier`: one int32 of the layer, 0 before its first launch. Raises ValueError for more than MAX_ROWS
    rows.
    """
    if hidden.shape[0] > MAX_ROWS:
        raise ValueError(f"layer_products: {hidden.shape[0]} rows; at most {MAX_ROWS} are computed at once")
    if hidden.is_cuda:
        programs = num_programs_of(hidden.device)
        return layer_products_triton(attended, hidden, layer, following, barrier, programs)
    return layer_products_reference(attended, hidden, layer, following)
