"""Attention of each row over a local window, the blocks that an indexer picks, and compressed groups.

A row at position q attends, in one softmax, to
- the tokens from `window_start(q)` to q, one by one; in a tree, to its ancestors instead of all new rows;
- the tokens of the `top_k` blocks of `index_block` tokens before the window with the highest scores;
- the compressed key and value of every group of `dense_block` tokens before the window.

The score of a block is the sum over the indexer's heads of relu(query . entry), in float32. Blocks of equal
scores are taken from the newest to the oldest. The window begins at a multiple of `index_block`, so it has
`window` to `window + index_block - 1` tokens, and no token is in no block.

The last `index_heads` heads of q are the queries of the indexer. Their rows of the output are zeros.

Legend: T rows, B requests, P pages per request, N query heads, I heads of the indexer, K KV heads, D head
dimension, C columns. Plans and caches are those of `sparse_caches`.
"""

from __future__ import annotations

import torch

from .paged_tile import LOG2_E, MIN_DOT, fold_tile, load_kv_tile
from .sparse_caches import (
    POSITION,
    REQUEST,
    SparsePlan,
    SparseSizes,
    check_plan,
    check_sparse,
    compress_reference,
    compress_triton,
    dense_entries_of,
    index_entries_of,
    planned_row,
)
from .triton_jit import cdiv, jit_varying, next_power_of_2, tl

ROWS_AT_ONCE = 64  # of the reference
SCORES_AT_ONCE = 1 << 24  # scores of one launch, which bounds their memory to 64 MiB
BLOCK_SCORES = 64
BLOCK_PICKS = 1024


def window_start(position: torch.Tensor, sizes: SparseSizes) -> torch.Tensor:
    """The first position that a row at `position` sees in its window; int64, of any shape."""
    return (position - sizes.window + 1).clamp(min=0) // sizes.index_block * sizes.index_block


# --- the definition -----------------------------------------------------------------------------------------


def sparse_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    scale: float,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition and the CPU path; arguments as in `sparse_attention`. Raises PlanMismatch."""
    check_plan(plan, q.shape[0], page_table, kv_lens, sizes)
    compress_reference(kv, layer, 1, plan, page_table, kv_lens, sizes)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    real = torch.nonzero(plan.rows[POSITION] >= 0).flatten()
    for rows in torch.split(real, ROWS_AT_ONCE) if real.numel() else ():
        out[rows] = _attend_rows(q, kv, layer, rows, plan, page_table, kv_lens, sizes, scale, tree_mask)
    return out


def _attend_rows(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    rows: torch.Tensor,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    scale: float,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The output `[R, N+I, D]` of `rows` `[R]`."""
    request, position = plan.rows[REQUEST, rows], plan.rows[POSITION, rows]
    start = window_start(position, sizes)
    queries = q[rows, : q.shape[1] - sizes.index_heads].float()
    picked = _pick_blocks(
        q[rows, q.shape[1] - sizes.index_heads :], kv, layer, request, start, page_table, sizes
    )
    columns, is_seen = _token_columns(rows, request, position, start, picked, kv_lens, sizes, tree_mask)
    pages = page_table[request[:, None], (columns // sizes.page_size).clamp(max=page_table.shape[1] - 1)]
    # unseen columns read the sink, which is zeros: 0 * NaN would be NaN
    found = kv[pages.where(is_seen, 0), layer, :, (columns % sizes.page_size).where(is_seen, 0)].float()
    groups, is_group = _dense_entries(kv, layer, request, start, page_table, sizes)
    found, is_seen = torch.cat((found, groups), dim=1), torch.cat((is_seen, is_group), dim=1)
    grouped = queries.view(len(rows), sizes.kv_heads, -1, sizes.head_dim)
    scores = torch.einsum("rkgd,rckd->rkgc", grouped, found[:, :, 0]) * scale
    weights = scores.masked_fill(~is_seen[:, None, None], float("-inf")).softmax(dim=-1)
    mixed = torch.einsum("rkgc,rckd->rkgd", weights, found[:, :, 1]).flatten(1, 2)
    return torch.nn.functional.pad(mixed, (0, 0, 0, sizes.index_heads)).to(q.dtype)


def _pick_blocks(
    queries: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    request: torch.Tensor,
    start: torch.Tensor,
    page_table: torch.Tensor,
    sizes: SparseSizes,
) -> torch.Tensor:
    """The numbers of the chosen blocks, int64 `[R, top_k]`, -1 for none; `queries` `[R, I, D]`."""
    num_blocks = int(start.max()) // sizes.index_block
    blocks = torch.arange(num_blocks, device=start.device).flip(0)
    tokens = blocks * sizes.index_block
    pages = page_table[request[:, None], tokens // sizes.page_size]
    is_before = tokens < start[:, None]
    entries = index_entries_of(kv, layer, sizes)
    keys = entries[pages.where(is_before, 0), tokens % sizes.page_size // sizes.index_block].float()
    # products and sums of a block in the same order in any batch, so that equal inputs are ties anywhere
    scores = (queries.float()[:, :, None] * keys[:, None]).sum(dim=3).relu().sum(dim=1)
    scores = scores.masked_fill(~is_before, -1.0)
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    picked = blocks[order.indices].where(order.values >= 0, -1)[:, : sizes.top_k]
    return torch.nn.functional.pad(picked, (0, sizes.top_k - picked.shape[1]), value=-1)


def _token_columns(
    rows: torch.Tensor,
    request: torch.Tensor,
    position: torch.Tensor,
    start: torch.Tensor,
    picked: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    tree_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The context columns that rows may see as tokens, `[R, C]`, and whether they do."""
    device, width = rows.device, sizes.window + sizes.index_block - 1
    width += 0 if tree_mask is None else tree_mask.shape[2]
    near = start[:, None] + torch.arange(width, device=device)
    if tree_mask is None:
        is_near = near <= position[:, None]
    else:
        each, window = tree_mask.shape[1:]
        node = near - (kv_lens[request] - window)[:, None]
        masks = tree_mask[request, rows % each]
        is_near = (node < 0) | masks.gather(1, node.clamp(0, window - 1))
        is_near &= near < kv_lens[request][:, None]
    far = (picked[:, :, None] * sizes.index_block + torch.arange(sizes.index_block, device=device)).flatten(1)
    is_far = (picked >= 0).repeat_interleave(sizes.index_block, dim=1)
    return torch.cat((near, far), dim=1).clamp(min=0), torch.cat((is_near, is_far), dim=1)


def _dense_entries(
    kv: torch.Tensor,
    layer: int,
    request: torch.Tensor,
    start: torch.Tensor,
    page_table: torch.Tensor,
    sizes: SparseSizes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of the dense cache, `[R, M, 2, K, D]`, and whether a row sees them, `[R, M]`."""
    ends = torch.arange(1, int(start.max()) // sizes.dense_block + 1, device=start.device) * sizes.dense_block
    is_seen = ends <= start[:, None]
    last = ends - 1
    pages = page_table[request[:, None], last // sizes.page_size]
    entries = dense_entries_of(kv, layer, sizes)
    found = entries[pages.where(is_seen, 0), last % sizes.page_size // sizes.dense_block]
    return found.float().masked_fill(~is_seen[:, :, None, None, None], 0.0), is_seen


# --- kernels ------------------------------------------------------------------------------------------------


@jit_varying("first_row", "num_requests", "row_stride", "table_stride", "max_blocks", "p_scores")
def _score_blocks_kernel(
    p_q: tl.tensor,
    p_kv: tl.tensor,
    p_rows: tl.tensor,
    p_pages: tl.tensor,
    p_scores: tl.tensor,
    first_row: tl.tensor,
    num_requests: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    max_blocks: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    first_head: tl.tensor,
    page_stride: tl.tensor,
    o_cache: tl.tensor,
    WINDOW: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SCORES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # program (row, tile of blocks)
    i_row = first_row + tl.program_id(0)
    i_request = tl.load(p_rows + i_row)
    position = tl.load(p_rows + row_stride + i_row)
    start = tl.maximum(position - WINDOW + 1, 0) // INDEX_BLOCK * INDEX_BLOCK
    # a plan of more requests than the table is refused by `_sparse_kernel`, and must not be read past it here
    num_blocks = tl.where(i_request < num_requests, tl.minimum(start // INDEX_BLOCK, max_blocks), 0)
    i_block = tl.program_id(1) * BLOCK_SCORES + tl.arange(0, BLOCK_SCORES)
    m_block = i_block < num_blocks
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    i_token = i_block * INDEX_BLOCK
    i_page = tl.load(p_pages + i_request * table_stride + i_token // PAGE_SIZE, mask=m_block, other=0)
    o_entry = i_page.to(tl.int64) * page_stride + o_cache + (i_token % PAGE_SIZE // INDEX_BLOCK) * HEAD_DIM
    b_keys = tl.load(
        p_kv + o_entry[:, None] + i_dim[None, :], mask=m_block[:, None] & m_dim[None, :], other=0.0
    ).to(tl.float32)
    b_scores = tl.zeros((BLOCK_SCORES,), dtype=tl.float32)
    for i_head in range(INDEX_HEADS):
        o_q = i_row.to(tl.int64) * q_row_stride + (first_head + i_head) * q_head_stride
        b_q = tl.load(p_q + o_q + i_dim, mask=m_dim, other=0.0).to(tl.float32)
        b_scores += tl.maximum(tl.sum(b_keys * b_q[None, :], axis=1), 0.0)
    o_scores = tl.program_id(0).to(tl.int64) * max_blocks + i_block
    tl.store(p_scores + o_scores, b_scores, mask=m_block)


@jit_varying("first_row", "row_stride", "max_blocks", "p_scores")
def _pick_blocks_kernel(
    p_scores: tl.tensor,
    p_rows: tl.tensor,
    p_picked: tl.tensor,
    first_row: tl.tensor,
    row_stride: tl.tensor,
    max_blocks: tl.tensor,
    WINDOW: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_PICKS: tl.constexpr,
) -> None:
    # one row per program: each pick is the largest (score, number) below the pick before
    i_row = first_row + tl.program_id(0)
    position = tl.load(p_rows + row_stride + i_row)
    start = tl.maximum(position - WINDOW + 1, 0) // INDEX_BLOCK * INDEX_BLOCK
    num_blocks = tl.minimum(start // INDEX_BLOCK, max_blocks).to(tl.int32)
    p_mine = p_scores + tl.program_id(0).to(tl.int64) * max_blocks
    i_offset = tl.arange(0, BLOCK_PICKS)
    last_score = tl.full((), float("inf"), dtype=tl.float32)
    last_number = tl.full((), 0, dtype=tl.int32)
    for i_pick in range(TOP_K):
        best_score = tl.full((), -1.0, dtype=tl.float32)
        best_number = tl.full((), -1, dtype=tl.int32)
        for first in range(0, num_blocks, BLOCK_PICKS):
            i_block = first + i_offset
            m_block = i_block < num_blocks
            b_scores = tl.load(p_mine + i_block, mask=m_block, other=-1.0)
            m_left = (b_scores < last_score) | ((b_scores == last_score) & (i_block < last_number))
            m_left = m_left & m_block
            score = tl.max(tl.where(m_left, b_scores, -1.0), axis=0)
            number = tl.max(tl.where(m_left & (b_scores == score), i_block, -1), axis=0)
            is_better = (number >= 0) & (score >= best_score)
            best_score = tl.where(is_better, score, best_score)
            best_number = tl.where(is_better, number, best_number)
        tl.store(p_picked + i_row.to(tl.int64) * TOP_K + i_pick, best_number)
        last_score = tl.where(best_number >= 0, best_score, -2.0)
        last_number = best_number


@jit_varying(
    "num_rows", "num_requests", "row_stride", "table_stride", "table_width", "each_rows", "tree_width",
    "p_tree_mask", "p_kv_lens",
)  # fmt: skip
def _sparse_kernel(
    p_q: tl.tensor,
    p_kv: tl.tensor,
    p_rows: tl.tensor,
    p_stamp: tl.tensor,
    p_pages: tl.tensor,
    p_kv_lens: tl.tensor,
    p_picked: tl.tensor,
    p_tree_mask: tl.tensor,
    p_faults: tl.tensor,
    p_out: tl.tensor,
    num_rows: tl.tensor,
    num_requests: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    table_width: tl.tensor,
    each_rows: tl.tensor,
    tree_width: tl.tensor,
    q_row_stride: tl.tensor,
    q_head_stride: tl.tensor,
    page_stride: tl.tensor,
    o_layer: tl.tensor,
    o_dense: tl.tensor,
    scale: tl.tensor,
    HAS_TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    DENSE_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # program (row, kv head): a tile of the heads of its group, over window, picked blocks and groups
    i_row = tl.program_id(0).to(tl.int64)
    i_kv_head = tl.program_id(1)
    fits, i_request, position = planned_row(
        p_rows, p_stamp, p_pages, p_kv_lens, i_row, num_rows, num_requests, row_stride, table_stride,
        table_width, INDEX_BLOCK, DENSE_BLOCK, PAGE_SIZE,
    )  # fmt: skip
    if not fits:
        tl.store(p_faults, 1)
    start = tl.maximum(position - WINDOW + 1, 0) // INDEX_BLOCK * INDEX_BLOCK
    is_real = position >= 0
    i_head = tl.arange(0, BLOCK_ROWS)
    i_dim = tl.arange(0, BLOCK_DIM)
    m_rows = (i_head < GROUP)[:, None] & (i_dim < HEAD_DIM)[None, :]
    o_q = i_row * q_row_stride + (i_kv_head * GROUP + i_head) * q_head_stride
    b_q = tl.load(p_q + o_q[:, None] + i_dim[None, :], mask=m_rows, other=0.0)
    b_max = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_ROWS, BLOCK_DIM), dtype=tl.float32)
    i_offset = tl.arange(0, BLOCK_COLUMNS)
    m_heads = (i_head < BLOCK_ROWS)[:, None]
    p_mine = p_pages + i_request * table_stride
    p_head = p_kv + o_layer + i_kv_head * HEAD_DIM
    o_value = PAGE_SIZE * KV_HEADS * HEAD_DIM
    # the window
    end = position + 1
    if HAS_TREE:
        end = tl.where(is_real, tl.load(p_kv_lens + i_request, mask=fits, other=0), 0)
    for first in range(start, end, BLOCK_COLUMNS):
        i_column = first + i_offset
        m_column = i_column < end
        if HAS_TREE:
            i_node = i_column - (end - tree_width)
            o_mask = (i_request * each_rows + i_row % each_rows) * tree_width + i_node
            b_seen = tl.load(p_tree_mask + o_mask, mask=m_column & (i_node >= 0), other=1)
            m_column = m_column & (b_seen != 0)
        b_k, b_v = load_kv_tile(
            p_head, p_mine, i_column, m_column, page_stride, KV_HEADS * HEAD_DIM, o_value,
            False, PAGE_SIZE, HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k, b_v, m_heads & m_column[None, :], b_max, b_sum, b_out, scale, False
        )
    # the picked blocks
    num_picked = tl.where(is_real, tl.minimum(start // INDEX_BLOCK, TOP_K), 0) * INDEX_BLOCK
    for first in range(0, num_picked, BLOCK_COLUMNS):
        i_far = first + i_offset
        m_column = i_far < num_picked
        o_picked = i_row * TOP_K + i_far // INDEX_BLOCK
        i_block = tl.load(p_picked + o_picked, mask=m_column, other=-1)
        m_column = m_column & (i_block >= 0)
        i_column = i_block * INDEX_BLOCK + i_far % INDEX_BLOCK
        b_k, b_v = load_kv_tile(
            p_head, p_mine, i_column, m_column, page_stride, KV_HEADS * HEAD_DIM, o_value,
            False, PAGE_SIZE, HEAD_DIM, BLOCK_DIM,
        )  # fmt: skip
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k, b_v, m_heads & m_column[None, :], b_max, b_sum, b_out, scale, False
        )
    # the compressed groups
    num_groups = tl.where(is_real, start // DENSE_BLOCK, 0)
    for first in range(0, num_groups, BLOCK_COLUMNS):
        i_group = first + i_offset
        m_column = i_group < num_groups
        i_token = (i_group + 1) * DENSE_BLOCK - 1
        i_page = tl.load(p_mine + i_token // PAGE_SIZE, mask=m_column, other=0).to(tl.int64)
        i_entry = i_token % PAGE_SIZE // DENSE_BLOCK
        o_entry = i_page * page_stride + o_dense + i_entry * (2 * KV_HEADS * HEAD_DIM) + i_kv_head * HEAD_DIM
        m_dim = i_dim < HEAD_DIM
        b_k = tl.load(
            p_kv + o_entry[None, :] + i_dim[:, None], mask=m_dim[:, None] & m_column[None, :], other=0.0
        )
        b_v = tl.load(
            p_kv + KV_HEADS * HEAD_DIM + o_entry[:, None] + i_dim[None, :],
            mask=m_column[:, None] & m_dim[None, :],
            other=0.0,
        )
        b_max, b_sum, b_out = fold_tile(
            b_q, b_k, b_v, m_heads & m_column[None, :], b_max, b_sum, b_out, scale, False
        )
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    b_out = tl.where(fits, b_out, float("nan")).to(p_out.dtype.element_ty)
    o_out = (i_row * (KV_HEADS * GROUP + INDEX_HEADS) + i_kv_head * GROUP + i_head) * HEAD_DIM
    tl.store(p_out + o_out[:, None] + i_dim[None, :], b_out, mask=m_rows)


def sparse_attention_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    scale: float,
    faults: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch with the arguments of `sparse_attention`. Raises ValueError if shapes or dtypes do not fit."""
    _check(q, kv, plan, page_table, kv_lens, sizes, tree_mask)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0 or page_table.shape[0] == 0:  # all rows of a batch without requests are padding
        return out
    q = q if q.stride(-1) == 1 else q.contiguous()
    compress_triton(kv, layer, 1, plan, page_table, kv_lens, sizes, faults, q.shape[0])
    picked = _pick_triton(q, kv, layer, plan, page_table, sizes)
    num_heads = q.shape[1] - sizes.index_heads
    group = num_heads // sizes.kv_heads
    o_dense = sizes.num_layers * sizes.layer_elements + layer * sizes.side_elements
    _sparse_kernel[(q.shape[0], sizes.kv_heads)](
        q,
        kv,
        plan.rows,
        plan.stamp,
        page_table,
        kv_lens,
        picked,
        kv_lens if tree_mask is None else tree_mask.contiguous().view(torch.uint8),
        faults,
        out,
        q.shape[0],
        page_table.shape[0],
        plan.rows.shape[1],
        page_table.stride(0),
        page_table.shape[1],
        1 if tree_mask is None else tree_mask.shape[1],
        1 if tree_mask is None else tree_mask.shape[2],
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        layer * sizes.layer_elements,
        o_dense + sizes.index_entries * sizes.head_dim,
        scale * LOG2_E,
        HAS_TREE=tree_mask is not None,
        WINDOW=sizes.window,
        INDEX_BLOCK=sizes.index_block,
        DENSE_BLOCK=sizes.dense_block,
        TOP_K=sizes.top_k,
        INDEX_HEADS=sizes.index_heads,
        KV_HEADS=sizes.kv_heads,
        GROUP=group,
        PAGE_SIZE=sizes.page_size,
        HEAD_DIM=sizes.head_dim,
        BLOCK_ROWS=max(next_power_of_2(group), MIN_DOT),
        BLOCK_COLUMNS=32,
        BLOCK_DIM=max(next_power_of_2(sizes.head_dim), MIN_DOT),
        num_warps=4,
    )
    return out


def _pick_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    sizes: SparseSizes,
) -> torch.Tensor:
    """The numbers of the chosen blocks, int32 `[T, top_k]`, -1 for none, for rows that are planned."""
    num_rows, max_blocks = q.shape[0], page_table.shape[1] * sizes.page_size // sizes.index_block
    picked = torch.empty((num_rows, sizes.top_k), dtype=torch.int32, device=q.device)
    planned, most = min(num_rows, plan.rows.shape[1]), max(SCORES_AT_ONCE // max(max_blocks, 1), 1)
    scores = torch.empty((min(planned, most), max_blocks), dtype=torch.float32, device=q.device)
    o_cache = sizes.num_layers * sizes.layer_elements + layer * sizes.side_elements
    for first in range(0, planned, most):
        count = min(most, planned - first)
        _score_blocks_kernel[(count, cdiv(max_blocks, BLOCK_SCORES))](
            q,
            kv,
            plan.rows,
            page_table,
            scores,
            first,
            page_table.shape[0],
            plan.rows.shape[1],
            page_table.stride(0),
            max_blocks,
            q.stride(0),
            q.stride(1),
            q.shape[1] - sizes.index_heads,
            kv.stride(0),
            o_cache,
            WINDOW=sizes.window,
            INDEX_BLOCK=sizes.index_block,
            INDEX_HEADS=sizes.index_heads,
            PAGE_SIZE=sizes.page_size,
            HEAD_DIM=sizes.head_dim,
            BLOCK_SCORES=BLOCK_SCORES,
            BLOCK_DIM=next_power_of_2(sizes.head_dim),
            num_warps=4,
        )
        _pick_blocks_kernel[(count,)](
            scores,
            plan.rows,
            picked,
            first,
            plan.rows.shape[1],
            max_blocks,
            WINDOW=sizes.window,
            INDEX_BLOCK=sizes.index_block,
            TOP_K=sizes.top_k,
            BLOCK_PICKS=BLOCK_PICKS,
            num_warps=4,
        )
    return picked


def _check(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    tree_mask: torch.Tensor | None,
) -> None:
    check_sparse("sparse_attention", kv, plan, page_table, kv_lens, sizes)
    heads = q.shape[1] - sizes.index_heads if q.dim() == 3 else 0
    if heads < 1 or heads % sizes.kv_heads or q.shape[2] != sizes.head_dim or q.dtype != kv.dtype:
        raise ValueError(
            f"sparse_attention: q {tuple(q.shape)} {q.dtype}, with {sizes.index_heads} heads of the indexer, "
            f"does not fit a pool of {sizes.kv_heads} heads x {sizes.head_dim} {kv.dtype}"
        )
    if tree_mask is not None:
        requests, each, width = tree_mask.shape if tree_mask.dim() == 3 else (0, 0, 0)
        if tree_mask.dtype != torch.bool or requests != page_table.shape[0] or width < each:
            raise ValueError(
                f"sparse_attention: tree mask {tuple(tree_mask.shape)} {tree_mask.dtype}, expected bool "
                f"{(page_table.shape[0], 'N', 'W')}, W >= N"
            )


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    scale: float,
    faults: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the entries of the side caches that the rows complete, then attend: `[T, N+I, D]` -> the same.

    `q` `[T, N+I, D]`, whose keys and values are stored in `kv` `[num_pages, L + side layers, 2, page_size, K,
    D]`. `page_table` int64 `[B, P]`, `kv_lens` int64 `[B]`. `tree_mask` None or bool `[B, T/B, W]`: what each
    row sees of the last W rows of its request. No branch of a tree may be deeper than the window.

    Raises ValueError if shapes or dtypes do not fit. If `plan` was made for other rows, requests, lengths or
    pages, raises PlanMismatch on a CPU; on a device, `faults` int32 `[1]` becomes 1 and the outputs of the
    rows concerned are NaN.
    """
    if q.is_cuda:
        return sparse_attention_triton(
            q, kv, layer, plan, page_table, kv_lens, sizes, scale, faults, tree_mask
        )
    _check(q, kv, plan, page_table, kv_lens, sizes, tree_mask)
    return sparse_attention_reference(q, kv, layer, plan, page_table, kv_lens, sizes, scale, tree_mask)
