"""The side caches of sparse attention, and the plan that says which of their entries a forward writes.

A query attends to a local window of tokens, to the `top_k` blocks that an indexer picks for it, and to one
compressed key and value of each long group of tokens behind the window. Two side caches serve it:

    index     one key per `index_block` tokens: the mean of their keys over tokens and KV heads
    dense     one key and value per KV head and `dense_block` tokens: the means of their keys and values

Both are means of keys and values in the pool, so any forward can write an entry anew from its tokens. An
entry lies in the page of its last token, behind the layers of the page. It is written by the forward that
stores its last token. A rejected draft leaves a wrong entry only for a token that is stored again before any
row can see the entry. A query sees entries of tokens before its window, and drafts lie inside the window.

The write targets of a plan hold for its rows, in its order, and for the pages and lengths of its contexts.
Each kernel compares the planned numbers of rows and requests, the planned length of a row's request, and a
row's write targets, with the batch that it is launched on. On a CPU a difference raises PlanMismatch. A
kernel of a device cannot raise: it sets `faults`, and the row writes no entry and attends to NaN.

Legend: T rows, B requests, P pages per request, L layers of the model, K KV heads, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import cdiv, jit, jit_varying, next_power_of_2, tl

# Rows of `SparsePlan.rows`.
REQUEST, POSITION, INDEX_TARGET, DENSE_TARGET = range(4)
# Columns of `SparsePlan.stamp` before the context lengths.
NUM_ROWS, NUM_REQUESTS, LENGTHS = range(3)
COLUMNS = 32  # tokens of a group that are added at once


class PlanMismatch(RuntimeError):
    """A plan was made for other rows, requests, context lengths or pages than those of the forward."""


class SparseSizes(NamedTuple):
    """The sizes of sparse attention and of its pages.

    `num_layers`: layers of the model; the pool's layers behind them hold the side caches. `index_heads`:
    query heads of the indexer. `index_block` and `dense_block`: tokens per entry. `window`: the fewest
    tokens, a row itself included, that it attends to one by one. `page_size` is in tokens.
    """

    num_layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_block: int
    dense_block: int
    top_k: int
    window: int

    @property
    def index_entries(self) -> int:
        """Entries of the index cache per page and layer."""
        return self.page_size // self.index_block

    @property
    def dense_entries(self) -> int:
        """Entries of the dense cache per page and layer."""
        return max(self.page_size // self.dense_block, 1)

    @property
    def side_elements(self) -> int:
        """Elements of both side caches per page and layer: index entries, then dense entries."""
        return self.index_entries * self.head_dim + self.dense_entries * 2 * self.kv_heads * self.head_dim

    @property
    def layer_elements(self) -> int:
        """Elements of the keys and values of one layer in a page."""
        return 2 * self.page_size * self.kv_heads * self.head_dim

    @property
    def side_layers(self) -> int:
        """Layers of the pool that hold the side caches of all layers."""
        return cdiv(self.num_layers * self.side_elements, self.layer_elements)


class SparsePlan(NamedTuple):
    """The rows of one forward.

    `rows` int64 `[4, T]`: request, position (-1: the row is padding), and the entry of either side cache to
    be written (page * entries per page + number; -1: none). `stamp` int64 `[2+B]`: T, B, and the context
    lengths.
    """

    rows: torch.Tensor
    stamp: torch.Tensor


def index_entries_of(kv: torch.Tensor, layer: int, sizes: SparseSizes) -> torch.Tensor:
    """The index cache of `layer`: a strided view `[num_pages, index_entries, D]` of the pool."""
    first = sizes.num_layers * sizes.layer_elements + layer * sizes.side_elements
    size = sizes.index_entries * sizes.head_dim
    flat = kv.view(kv.shape[0], -1)[:, first : first + size]
    return flat.view(-1, sizes.index_entries, sizes.head_dim)


def dense_entries_of(kv: torch.Tensor, layer: int, sizes: SparseSizes) -> torch.Tensor:
    """The dense cache of `layer`: a strided view `[num_pages, dense_entries, 2, K, D]` of the pool."""
    end = sizes.num_layers * sizes.layer_elements + (layer + 1) * sizes.side_elements
    size = sizes.dense_entries * 2 * sizes.kv_heads * sizes.head_dim
    flat = kv.view(kv.shape[0], -1)[:, end - size : end]
    return flat.view(-1, sizes.dense_entries, 2, sizes.kv_heads, sizes.head_dim)


# --- plans --------------------------------------------------------------------------------------------------


def plan_rows(
    sizes: SparseSizes,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_rows: int,
    q_starts: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> SparsePlan:
    """The plan of the last rows of each request's context, `num_rows` in all, padding included.

    `page_table` int64 `[B, P]`, `kv_lens` int64 `[B]` (0: idle). `q_starts` int64 `[B+1]`: the first row of
    each request, rows from `q_starts[B]` on are padding; None: equally many rows per request. `tree_mask`
    bool `[B, N, W]`: a row lies as deep as it sees rows of the last W. Rows of a tree write no entries,
    because their slots are not their positions; `plan_commits` follows when a branch was accepted. Never
    waits for the device, so a graph can record it.
    """
    device, count = page_table.device, page_table.shape[0]
    number = torch.arange(num_rows, device=device)
    if count == 0 or num_rows == 0:
        request, position = torch.zeros_like(number), torch.full_like(number, -1)
    elif q_starts is not None:
        found = torch.searchsorted(q_starts[1:].contiguous(), number, right=True)
        request = found.clamp(max=count - 1)
        position = kv_lens[request] - (q_starts[1:][request] - number)
        position = torch.where((found < count) & (position >= 0), position, -1)
    else:
        each = num_rows // count
        request = number // each
        if tree_mask is None:
            position = kv_lens[request] - each + number % each
        else:
            depth = tree_mask.sum(dim=2).flatten() - 1
            position = kv_lens[request] - tree_mask.shape[2] + depth
        position = torch.where((kv_lens[request] > 0) & (position >= 0), position, -1)
    rows = _with_targets(sizes, page_table, request, position, writes=tree_mask is None)
    return SparsePlan(rows, _stamp(num_rows, count, kv_lens))


def plan_commits(
    sizes: SparseSizes,
    page_table: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    num_path: int,
) -> SparsePlan:
    """The plan of the entries that the accepted branches of trees complete, after their rows were moved.

    Request b has stored `counts[b]` of at most `num_path` rows from position `starts[b]` on, int64 `[B]`.
    """
    count, device = page_table.shape[0], page_table.device
    offset = torch.arange(num_path, device=device)
    position = torch.where(offset < counts[:, None], starts[:, None] + offset, -1).flatten()
    request = torch.arange(count, device=device).repeat_interleave(num_path)
    rows = _with_targets(sizes, page_table, request, position, writes=True)
    return SparsePlan(rows, _stamp(count * num_path, count, starts))


def _with_targets(
    sizes: SparseSizes,
    page_table: torch.Tensor,
    request: torch.Tensor,
    position: torch.Tensor,
    *,
    writes: bool,
) -> torch.Tensor:
    none = torch.full_like(position, -1)
    if not (writes and page_table.numel() and position.numel()):
        return torch.stack((request, position, none, none))
    column, offset = position // sizes.page_size, position % sizes.page_size
    page = page_table[request, column.clamp(0, page_table.shape[1] - 1)]
    # positions past the pages of a request lie in the sink, page 0, which stays zero
    is_stored = (position >= 0) & (column < page_table.shape[1]) & (page > 0)
    targets = [
        torch.where(is_stored & ((position + 1) % block == 0), page * entries + offset // block, none)
        for block, entries in (
            (sizes.index_block, sizes.index_entries),
            (sizes.dense_block, sizes.dense_entries),
        )
    ]
    return torch.stack((request, position, *targets))


def _stamp(num_rows: int, num_requests: int, lengths: torch.Tensor) -> torch.Tensor:
    counts = torch.full((LENGTHS,), num_rows, dtype=torch.int64, device=lengths.device)
    counts[NUM_REQUESTS:].fill_(num_requests)
    return torch.cat((counts, lengths))


def check_plan(
    plan: SparsePlan, num_rows: int, page_table: torch.Tensor, kv_lens: torch.Tensor, sizes: SparseSizes
) -> None:
    """Raises PlanMismatch unless `plan`, on the CPU, is for `num_rows` rows of `page_table` and `kv_lens`."""
    planned, lengths = plan.stamp[:LENGTHS].tolist(), plan.stamp[LENGTHS:]
    wanted = [num_rows, kv_lens.shape[0]]
    if planned != wanted or plan.rows.shape[1] != num_rows or not torch.equal(lengths, kv_lens):
        raise PlanMismatch(
            f"sparse attention of {wanted[0]} rows of {wanted[1]} requests with contexts {kv_lens.tolist()}, "
            f"planned for {planned[0]} rows of {planned[1]} with {lengths.tolist()}; plan the padded batch, "
            "before each forward"
        )
    request, position, *targets = plan.rows
    for name, target, block, entries in zip(
        ("index", "dense"),
        targets,
        (sizes.index_block, sizes.dense_block),
        (sizes.index_entries, sizes.dense_entries),
        strict=True,
    ):
        writes = target >= 0
        at, mine, entry = position[writes], request[writes], target[writes]
        page = page_table[mine, at // sizes.page_size]
        is_right = (entry == page * entries + at % sizes.page_size // block) & ((at + 1) % block == 0)
        if not bool((is_right & (page > 0)).all()):
            raise PlanMismatch(
                f"sparse attention writes the {name} entries {entry.tolist()} at positions {at.tolist()} of "
                f"pages {page.tolist()}, planned for other pages; plan the padded batch, before each forward"
            )


# --- writing entries ----------------------------------------------------------------------------------------


def compress_reference(
    kv: torch.Tensor,
    layer: int,
    num_layers: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
) -> None:
    """The definition and the CPU path; arguments as in `compress`."""
    check_plan(plan, plan.rows.shape[1], page_table, kv_lens, sizes)
    for kind, block in ((INDEX_TARGET, sizes.index_block), (DENSE_TARGET, sizes.dense_block)):
        wanted = plan.rows[:, plan.rows[kind] >= 0]
        if not wanted.shape[1]:
            continue
        columns = wanted[POSITION, :, None] - block + 1 + torch.arange(block, device=kv.device)
        pages = page_table[wanted[REQUEST, :, None], columns // sizes.page_size]
        for each in range(layer, layer + num_layers):
            found = kv[pages, each, :, columns % sizes.page_size].float()  # [entries, block, 2, K, D]
            if kind == INDEX_TARGET:
                entries, mean = index_entries_of(kv, each, sizes), found[:, :, 0].mean(dim=(1, 2))
            else:
                entries, mean = dense_entries_of(kv, each, sizes), found.mean(dim=1)
            per_page = entries.shape[1]
            entries[wanted[kind] // per_page, wanted[kind] % per_page] = mean.to(kv.dtype)


@jit
def planned_row(
    p_rows: tl.tensor,
    p_stamp: tl.tensor,
    p_pages: tl.tensor,
    p_kv_lens: tl.tensor,
    i_row: tl.tensor,
    num_rows: tl.tensor,
    num_requests: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    table_width: tl.tensor,
    INDEX_BLOCK: tl.constexpr,
    DENSE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
) -> tl.tensor:
    """(whether a row's plan fits the launch, its request, its position); 0 and -1 if it does not fit.

    `p_rows` has `row_stride` columns, `p_pages` `table_width`.
    """
    fits = (tl.load(p_stamp) == num_rows) & (tl.load(p_stamp + 1) == num_requests)
    i_request = tl.load(p_rows + i_row, mask=i_row < row_stride, other=-1)
    fits = fits & (i_request >= 0) & (i_request < num_requests)
    i_request = tl.where(fits, i_request, 0)
    planned = tl.load(p_stamp + 2 + i_request, mask=fits, other=-1)
    fits = fits & (planned == tl.load(p_kv_lens + i_request, mask=fits, other=-2))
    position = tl.load(p_rows + row_stride + i_row, mask=fits, other=-1)
    at = tl.maximum(position, 0)
    m_page = fits & (position >= 0) & (at // PAGE_SIZE < table_width)
    page = tl.load(p_pages + i_request * table_stride + at // PAGE_SIZE, mask=m_page, other=0)
    i_index = tl.load(p_rows + 2 * row_stride + i_row, mask=fits, other=-1)
    i_dense = tl.load(p_rows + 3 * row_stride + i_row, mask=fits, other=-1)
    index = page * (PAGE_SIZE // INDEX_BLOCK) + at % PAGE_SIZE // INDEX_BLOCK
    dense = page * max(PAGE_SIZE // DENSE_BLOCK, 1) + at % PAGE_SIZE // DENSE_BLOCK
    is_index = (page > 0) & (i_index == index) & ((at + 1) % INDEX_BLOCK == 0)
    is_dense = (page > 0) & (i_dense == dense) & ((at + 1) % DENSE_BLOCK == 0)
    fits = fits & ((i_index < 0) | is_index) & ((i_dense < 0) | is_dense)
    return fits, tl.where(fits, i_request, 0), tl.where(fits, position, -1)


@jit_varying(
    "num_rows", "num_requests", "row_stride", "table_stride", "table_width", "first_layer", "p_kv_lens"
)
def _compress_kernel(
    p_kv: tl.tensor,
    p_rows: tl.tensor,
    p_stamp: tl.tensor,
    p_pages: tl.tensor,
    p_kv_lens: tl.tensor,
    p_faults: tl.tensor,
    num_rows: tl.tensor,
    num_requests: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    table_width: tl.tensor,
    first_layer: tl.tensor,
    page_stride: tl.tensor,
    o_cache: tl.tensor,
    KIND: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    DENSE_BLOCK: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    ENTRIES: tl.constexpr,
    LAYER_ELEMENTS: tl.constexpr,
    SIDE_ELEMENTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_INDEX: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
) -> None:
    # program (row, layer, plane of an entry): an index entry has one plane, a dense one K and V of each head
    i_row = tl.program_id(0)
    i_layer = (first_layer + tl.program_id(1)).to(tl.int64)
    i_plane = tl.program_id(2)
    fits, i_request, position = planned_row(
        p_rows, p_stamp, p_pages, p_kv_lens, i_row, num_rows, num_requests, row_stride, table_stride,
        table_width, INDEX_BLOCK, DENSE_BLOCK, PAGE_SIZE,
    )  # fmt: skip
    if not fits:
        tl.store(p_faults, 1)
    target = tl.load(p_rows + KIND * row_stride + i_row, mask=fits, other=-1)
    i_dim = tl.arange(0, BLOCK_DIM)
    m_dim = i_dim < HEAD_DIM
    i_token = tl.arange(0, BLOCK_COLUMNS)
    p_mine = p_pages + i_request * table_stride
    b_sum = tl.zeros((BLOCK_DIM,), dtype=tl.float32)
    for first in range(0, tl.where(target >= 0, GROUP_TOKENS, 0), BLOCK_COLUMNS):
        i_column = position - GROUP_TOKENS + 1 + first + i_token
        m_column = first + i_token < GROUP_TOKENS
        i_page = tl.load(p_mine + i_column // PAGE_SIZE, mask=m_column, other=0).to(tl.int64)
        o_row = i_page * page_stride + (i_column % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
        p_row = p_kv + i_layer * LAYER_ELEMENTS + o_row[:, None] + i_dim[None, :]
        m_tile = m_column[:, None] & m_dim[None, :]
        if IS_INDEX:
            for i_head in range(KV_HEADS):
                b_rows = tl.load(p_row + i_head * HEAD_DIM, mask=m_tile, other=0.0).to(tl.float32)
                b_sum += tl.sum(b_rows, axis=0)
        else:
            o_plane = (i_plane // KV_HEADS) * (PAGE_SIZE * KV_HEADS * HEAD_DIM) + (
                i_plane % KV_HEADS
            ) * HEAD_DIM
            b_sum += tl.sum(tl.load(p_row + o_plane, mask=m_tile, other=0.0).to(tl.float32), axis=0)
    num_terms = GROUP_TOKENS * KV_HEADS if IS_INDEX else GROUP_TOKENS
    o_entry = (target // ENTRIES) * page_stride + o_cache + i_layer * SIDE_ELEMENTS
    if IS_INDEX:
        o_entry += (target % ENTRIES) * HEAD_DIM
    else:
        o_entry += (target % ENTRIES) * (2 * KV_HEADS * HEAD_DIM) + i_plane * HEAD_DIM
    tl.store(
        p_kv + o_entry + i_dim, (b_sum / num_terms).to(p_kv.dtype.element_ty), mask=m_dim & (target >= 0)
    )


def compress_triton(
    kv: torch.Tensor,
    layer: int,
    num_layers: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    faults: torch.Tensor,
    num_rows: int = -1,
) -> None:
    """Launch with the arguments of `compress`.

    `num_rows`: rows of the forward, by default those of the plan. Raises ValueError if shapes or dtypes do
    not fit.
    """
    check_sparse("compress", kv, plan, page_table, kv_lens, sizes)
    num_rows = plan.rows.shape[1] if num_rows < 0 else num_rows
    planned = min(num_rows, plan.rows.shape[1])
    if not planned:
        return
    o_side = sizes.num_layers * sizes.layer_elements
    o_dense, heads = o_side + sizes.index_entries * sizes.head_dim, 2 * sizes.kv_heads
    for kind, block, entries, planes, o_cache in (
        (INDEX_TARGET, sizes.index_block, sizes.index_entries, 1, o_side),
        (DENSE_TARGET, sizes.dense_block, sizes.dense_entries, heads, o_dense),
    ):
        _compress_kernel[(planned, num_layers, planes)](
            kv,
            plan.rows,
            plan.stamp,
            page_table,
            kv_lens,
            faults,
            num_rows,
            page_table.shape[0],
            plan.rows.shape[1],
            page_table.stride(0),
            page_table.shape[1],
            layer,
            kv.stride(0),
            o_cache,
            KIND=kind,
            INDEX_BLOCK=sizes.index_block,
            DENSE_BLOCK=sizes.dense_block,
            GROUP_TOKENS=block,
            ENTRIES=entries,
            LAYER_ELEMENTS=sizes.layer_elements,
            SIDE_ELEMENTS=sizes.side_elements,
            PAGE_SIZE=sizes.page_size,
            KV_HEADS=sizes.kv_heads,
            HEAD_DIM=sizes.head_dim,
            IS_INDEX=kind == INDEX_TARGET,
            BLOCK_COLUMNS=min(next_power_of_2(block), COLUMNS),
            BLOCK_DIM=next_power_of_2(sizes.head_dim),
            num_warps=1,
        )


def check_sparse(
    op: str,
    kv: torch.Tensor,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
) -> None:
    """Raises ValueError unless pool, plan, pages and lengths have the forms that `sizes` says."""
    shape = (sizes.num_layers + sizes.side_layers, 2, sizes.page_size, sizes.kv_heads, sizes.head_dim)
    if tuple(kv.shape[1:]) != shape or not kv.is_contiguous():
        raise ValueError(f"{op}: a pool of pages {tuple(kv.shape[1:])}, expected contiguous ones of {shape}")
    integers = (plan.rows, plan.stamp, page_table, kv_lens)
    is_dense = plan.rows.is_contiguous() and kv_lens.is_contiguous()
    is_dense = is_dense and (page_table.stride(-1) == 1 or page_table.numel() == 0)
    if not is_dense or any(part.dtype != torch.int64 for part in integers):
        raise ValueError(
            f"{op}: plan {tuple(plan.rows.shape)}, pages {tuple(page_table.shape)} and lengths "
            f"{tuple(kv_lens.shape)} must be dense int64"
        )


def compress(
    kv: torch.Tensor,
    layer: int,
    num_layers: int,
    plan: SparsePlan,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    sizes: SparseSizes,
    faults: torch.Tensor,
) -> None:
    """Write the entries that the rows of `plan` complete, of `num_layers` layers from `layer` on.

    `kv`: the pool `[num_pages, L + side layers, 2, page_size, K, D]`, which has the rows' keys and values.
    `page_table` int64 `[B, P]` and `kv_lens` int64 `[B]`: those of the plan, or PlanMismatch follows on a
    CPU, and `faults` int32 `[1]` becomes 1 on a device.
    """
    if kv.is_cuda:
        compress_triton(kv, layer, num_layers, plan, page_table, kv_lens, sizes, faults)
        return
    check_sparse("compress", kv, plan, page_table, kv_lens, sizes)
    compress_reference(kv, layer, num_layers, plan, page_table, kv_lens, sizes)
