"""Copy the paged keys and values of one layer into contiguous buffers, in which a tile of rows is one copy.

Legend: B requests, P pages per request, S buffer rows, K heads, D head dimension. Pool and page numbers are
those of `kv_store`. Request b owns buffer rows from kv_starts[b] on, a multiple of ROW_ALIGNMENT.
"""

from __future__ import annotations

import torch

from .fp8_scales import FP8, raw
from .kv_store import kv_rows
from .triton_jit import jit_varying, next_power_of_2, tl

# A request's rows begin at a multiple of this. The rows behind its last are zeros up to the next multiple,
# so a tile of the reader holds values of one request, and no NaN of another one.
ROW_ALIGNMENT = 128
# Rows that one step of a program copies, and programs of a launch: some for each multiprocessor of an H200.
BLOCK_ROWS = 8
NUM_PROGRAMS = 528
# Requests that a program looks at together to find the owner of a row.
REQUEST_BLOCK = 64


def context_rows(kv_lens: list[int]) -> list[int]:
    """The first buffer row of each request, and behind them the number of rows of all."""
    starts = [0]
    for length in kv_lens:
        starts.append(starts[-1] + -(-length // ROW_ALIGNMENT) * ROW_ALIGNMENT)
    return starts


@jit_varying("num_requests", "table_stride")
def _gather_kernel(
    p_kv: tl.tensor,
    p_pages: tl.tensor,
    p_kv_starts: tl.tensor,
    p_kv_lens: tl.tensor,
    p_keys: tl.tensor,
    p_values: tl.tensor,
    num_requests: tl.tensor,
    table_stride: tl.tensor,
    page_stride: tl.tensor,
    width: tl.tensor,
    o_layer: tl.tensor,
    o_value: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
) -> None:
    # a fixed number of programs covers any number of rows, which only the device knows in a captured graph
    num_rows = tl.load(p_kv_starts + num_requests).to(tl.int32)
    i_column = tl.arange(0, BLOCK_WIDTH)
    m_column = i_column < width
    for first in range(tl.program_id(0) * BLOCK_ROWS, num_rows, tl.num_programs(0) * BLOCK_ROWS):
        i_request = -1
        for start in range(0, num_requests, REQUEST_BLOCK):
            i_start = start + tl.arange(0, REQUEST_BLOCK)
            b_starts = tl.load(p_kv_starts + i_start, mask=i_start < num_requests, other=num_rows)
            i_request += tl.sum((b_starts <= first).to(tl.int32), axis=0)
        i_row = first - tl.load(p_kv_starts + i_request).to(tl.int32) + tl.arange(0, BLOCK_ROWS)
        m_row = i_row < tl.load(p_kv_lens + i_request).to(tl.int32)
        p_row_pages = p_pages + i_request * table_stride
        i_page = tl.load(p_row_pages + i_row // PAGE_SIZE, mask=m_row, other=0).to(tl.int64)
        o_kv = i_page * page_stride + (i_row % PAGE_SIZE) * width + o_layer
        m_kv = m_row[:, None] & m_column[None, :]
        p_source = p_kv + o_kv[:, None] + i_column[None, :]
        b_keys = tl.load(p_source, mask=m_kv, other=0.0)
        b_values = tl.load(p_source + o_value, mask=m_kv, other=0.0)
        o_out = (first + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None] * width + i_column[None, :]
        tl.store(p_keys + o_out, b_keys.to(p_keys.dtype.element_ty), mask=m_column[None, :])
        tl.store(p_values + o_out, b_values.to(p_keys.dtype.element_ty), mask=m_column[None, :])


def gather_context_triton(
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Launch on `kv` `[num_pages, L, 2, page_size, K, D]`; fills the rows of `keys`, `values` `[S, K, D]`.

    `page_table`: int `[B, P]`. `kv_starts`: int `[B+1]`, from `context_rows`. `kv_lens`: int `[B]`. Values of
    starts, lengths and pages are not checked.
    """
    page_size, kv_heads, head_dim = kv.shape[3:]
    width = kv_heads * head_dim
    if kv_lens.shape[0] == 0:
        return
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    block_width = next_power_of_2(width)
    _gather_kernel[(NUM_PROGRAMS,)](
        kv,
        page_table,
        kv_starts,
        kv_lens,
        keys,
        values,
        kv_lens.shape[0],
        page_table.stride(0),
        kv.stride(0),
        width,
        layer * 2 * page_size * width,
        page_size * width,
        PAGE_SIZE=page_size,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_WIDTH=block_width,
        REQUEST_BLOCK=REQUEST_BLOCK,
        num_warps=8 if block_width >= 1024 else 4,
    )


def gather_context_reference(
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """The CPU path, with the arguments of `gather_context_triton`. It reads the lengths on the host."""
    page_size = kv.shape[3]
    flat = kv.view(-1, *kv.shape[4:])
    starts = kv_starts.tolist()
    for request, length in enumerate(kv_lens.tolist()):
        columns = torch.arange(length, device=kv.device)
        slots = page_table[request, columns // page_size].to(torch.int64) * page_size + columns % page_size
        rows = kv_rows(slots, kv) + layer * 2 * page_size
        for plane, buffer in enumerate((keys, values)):
            mine = buffer[starts[request] : starts[request + 1]]
            mine[:length] = (
                raw(flat).index_select(0, rows + plane * page_size).view(kv.dtype).to(buffer.dtype)
            )
            mine[length:] = 0


def gather_context(
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy the context of all requests from `layer` of the pool into rows of `keys`, `values` `[S, K, D]`.

    `page_table`: int `[B, P]`. `kv_starts`: int `[B+1]`, from `context_rows`, the last at most S. `kv_lens`:
    int `[B]`. Rows between a request's last and the next start become zeros. Raises ValueError if shapes or
    dtypes do not fit the pool.
    """
    fits = keys.shape[1:] == kv.shape[4:] and keys.shape == values.shape
    if not fits or keys.dtype != values.dtype or kv.dtype not in (keys.dtype, FP8):
        raise ValueError(
            f"gather_context: buffers {tuple(keys.shape)}, {tuple(values.shape)} {keys.dtype} do not fit a "
            f"pool of {tuple(kv.shape[4:])} {kv.dtype}"
        )
    copy = gather_context_triton if kv.is_cuda else gather_context_reference
    copy(kv, layer, page_table, kv_starts, kv_lens, keys, values)
