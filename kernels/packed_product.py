"""The tile code of products of few rows with weights of 4 bits, whose inputs are split, see `split_rows`.

Legend: LINES lines and COLUMNS columns of a tile, UNIT 16-bit words of a part of the inputs, four inputs
each.
"""

from __future__ import annotations

from .packed_experts import packed_sums, x_quarter
from .triton_jit import jit, tl


@jit
def packed_product(
    p_rows: tl.tensor,
    m_column: tl.tensor,
    i_column_split: tl.tensor,
    i_in: tl.tensor,
    p_lines: tl.tensor,
    p_groups: tl.tensor,
    m_line: tl.tensor,
    i_line_split: tl.tensor,
    SIZE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    QUARTER: tl.constexpr,
) -> tl.tensor:
    """Products `[LINES, COLUMNS]` of words with rows of SIZE inputs, of which each line and each column takes
    one part of SPLITS. Only those of a line with a column of its own split mean anything.

    `p_rows` `[COLUMNS]`, `p_lines` `[LINES, UNIT]` and `p_groups` `[LINES]`: the first input, words and
    scale. The first value of each word belongs to input `i_in` `[UNIT]` of a part, the next three QUARTER
    inputs behind each other. GROUP as in `packed_experts`, or a multiple of a part.
    """
    SPAN: tl.constexpr = 4 * UNIT
    PARTS: tl.constexpr = (SIZE + SPAN - 1) // SPAN
    IS_EVEN: tl.constexpr = SIZE % (SPAN * SPLITS) == 0
    # scales that parts have of their own, or parts that share them
    GROUPS: tl.constexpr = SPAN // GROUP if GROUP > 0 and GROUP < SPAN else 1
    SHARED: tl.constexpr = GROUP // SPAN if GROUP > SPAN else 1
    # 128 means one scale for a part, of whatever size
    PART_GROUP: tl.constexpr = GROUP if GROUP < SPAN else 128
    b_y = tl.zeros((m_line.shape[0], m_column.shape[0]), dtype=tl.float32)
    for step in range(0, (PARTS + SPLITS - 1) // SPLITS):
        first = (step * SPLITS + i_column_split)[None, :] * SPAN
        p_inputs, left = p_rows[None, :] + first, SIZE - first
        b_x0 = x_quarter(p_inputs, i_in, left, m_column, IS_EVEN)
        b_x1 = x_quarter(p_inputs, i_in + QUARTER, left, m_column, IS_EVEN)
        b_x2 = x_quarter(p_inputs, i_in + 2 * QUARTER, left, m_column, IS_EVEN)
        b_x3 = x_quarter(p_inputs, i_in + 3 * QUARTER, left, m_column, IS_EVEN)
        i_part = step * SPLITS + i_line_split
        if not IS_EVEN:
            i_part = tl.minimum(i_part, PARTS - 1)  # whose rows are 0
        b_words = tl.load(p_lines + (i_part * UNIT)[:, None])
        p_part = p_groups + i_part // SHARED * (GROUPS * SCALE_STRIDE)
        b_y = packed_sums(
            b_words, b_x0, b_x1, b_x2, b_x3, p_part, SCALE_STRIDE, m_line, b_y, PART_GROUP, HAS_PAIRS
        )
    if GROUP == 0 and HAS_PAIRS:
        b_y *= 18446744073709551616.0  # 2^64, by which `packed_sums` makes them smaller
    return b_y
