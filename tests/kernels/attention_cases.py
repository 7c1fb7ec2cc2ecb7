"""Attention and tree walks against their definitions: the second half of `cases`."""

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from baton.kernels import (
    compact_kv,
    context_attention,
    extend_attention,
    gather_context,
    invariant_attention,
    tree_verify,
    verify_attention,
    wgmma_attention,
)
from baton.kernels.attention_form import AttentionForm, capped
from baton.kernels.context_attention import ContextKV, ContextTile
from baton.kernels.paged_attention import paged_attention_reference
from baton.kernels.paged_tile import LOG2_E
from baton.tests.kernels.cases import BFLOAT16, FLOAT32, NAN, assert_close, randn

HEADS = ((4, 4), (3, 1), (8, 2), (8, 1))  # groups of 1, 3, 4 and 8
HEAD_DIMS = (64, 80, 96, 128)
RAGGED = [(1, 1), (5, 5), (1, 33), (17, 48), (70, 71)]
BORDERS = [(16, 16), (31, 33), (3, 65), (33, 33), (2, 64)]
# Window, soft cap, and whether there are sinks. A window of 33 ends at and beside the edges of tiles.
FORMS = {
    "": (0, 0.0, False),
    "window": (9, 0.0, False),
    "wide window": (33, 0.0, False),
    "capped": (0, 1.5, False),
    "sinks": (0, 0.0, True),
    "all": (12, 2.0, True),
}


def form_of(name: str, num_heads: int) -> AttentionForm:
    window, softcap, has_sinks = FORMS[name]
    return AttentionForm(window, softcap, randn(num_heads, seed=77) if has_sinks else None)


def on(device: str, form: AttentionForm) -> AttentionForm:
    return form if form.sinks is None else form._replace(sinks=form.sinks.to(device))


# --- attention ----------------------------------------------------------------------------------------------


def poisoned_pool(
    kv_lens: list[int], page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of 2 layers and a page table `[B, P]` that hold exactly `kv_lens` rows in `layer`; all else but
    the sink, rows behind a request's last in its own page included, is NaN. Pages are scattered."""
    needed = [-(-length // page_size) for length in kv_lens]
    total, width = sum(needed) + 3, max(needed, default=0) + 1
    pages = (torch.randperm(total - 1, generator=torch.Generator().manual_seed(7)) + 1).tolist()
    pool = torch.full((total, 2, 2, page_size, kv_heads, head_dim), NAN, dtype=dtype)
    pool[0, :, :, 0] = 0
    table = torch.zeros(len(kv_lens), width, dtype=torch.int64)
    for request, length in enumerate(kv_lens):
        for index in range(needed[request]):
            table[request, index] = page = pages.pop()
            rows = min(page_size, length - index * page_size)
            pool[page, layer, :, :rows] = randn(
                2, rows, kv_heads, head_dim, dtype=dtype, seed=1000 * page + request
            )
    return pool, table


def definition(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    pages: torch.Tensor,
    kv_len: int,
    scale: float,
    form: AttentionForm,
) -> torch.Tensor:
    """`paged_attention_reference`, which reads whole pages, without the poison."""
    return paged_attention_reference(q, pool.nan_to_num(0.0), layer, pages, kv_len, scale, form)


def check_extend(
    device: str,
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    form_name: str = "",
) -> None:
    """Requests of (new rows, context rows) and three padding rows of NaN behind them."""
    num_heads, kv_heads = heads
    form = form_of(form_name, num_heads)
    q_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    pool, table = poisoned_pool(kv_lens, page_size, kv_heads, head_dim, dtype, layer=1)
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    wide = randn(sum(q_lens) + 3, num_heads + 1, head_dim, dtype=dtype, seed=8)
    wide[-3:] = wide[:, -1] = NAN
    lengths = torch.tensor(kv_lens, dtype=torch.int64)
    scale, q = head_dim**-0.5, wide[:, :-1]
    on_device = [x.to(device) for x in (table, starts, lengths)]
    out = extend_attention.paged_extend_triton(
        wide.to(device)[:, :-1],
        pool.to(device),
        1,
        *on_device,
        max(q_lens, default=0),
        scale,
        form=on(device, form),
    )
    on_cpu = extend_attention.paged_extend_reference(
        q, pool.nan_to_num(0.0), 1, table, starts, lengths, scale, form
    )
    assert torch.equal(out[-3:].cpu(), torch.zeros_like(q[-3:]))
    for request, (q_len, kv_len) in enumerate(lens):
        mine = slice(int(starts[request]), int(starts[request]) + q_len)
        expected = definition(q[mine], pool, 1, table[request], kv_len, scale, form)
        assert_close(out[mine], expected)
        assert_close(on_cpu[mine], expected)


def check_context(
    device: str,
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    num_unused: int = 0,
    form_name: str = "",
) -> None:
    """As `check_extend`, over a copy of the pages. `num_unused` places behind the requests have none."""
    num_heads, kv_heads = heads
    form = form_of(form_name, num_heads)
    q_lens, kv_lens = [q for q, _ in lens], [kv for _, kv in lens]
    pool, table = poisoned_pool(kv_lens, page_size, kv_heads, head_dim, dtype, layer=1)
    table = torch.nn.functional.pad(table, (0, 0, 0, num_unused))
    starts, rows = torch.tensor([0, *q_lens]).cumsum(0).tolist(), gather_context.context_rows(kv_lens)
    wide = randn(sum(q_lens) + 3, num_heads + 1, head_dim, dtype=dtype, seed=8)
    wide[-3:] = wide[:, -1] = NAN
    scale, q = head_dim**-0.5, wide[:, :-1]
    keys, values = (torch.full((rows[-1] + 5, kv_heads, head_dim), NAN, dtype=dtype) for _ in range(2))
    on_device = [
        torch.tensor(x).to(device) for x in (rows + rows[-1:] * num_unused, kv_lens + [0] * num_unused)
    ]
    copied = [x.to(device, copy=True) for x in (keys, values)]
    gather_context.gather_context_triton(pool.to(device), 1, table.to(device), *on_device, *copied)
    gather_context.gather_context_reference(pool, 1, table, *(x.cpu() for x in on_device), keys, values)
    for found, expected in zip(copied, (keys, values), strict=True):
        assert torch.equal(found[: rows[-1]].cpu(), expected[: rows[-1]])
        assert found[rows[-1] :].isnan().all(), "rows of nobody"
    places = torch.tensor(starts + starts[-1:] * num_unused).to(device), *on_device
    is_small = ContextTile(rows=16, columns=32, num_warps=4, num_stages=2)
    # the interpreter takes long over the tile of many rows
    counts = [q.shape[0], 1 << 20] if device == "cuda" else [q.shape[0]]
    tiles = {is_small, *(context_attention.tile_of(n, num_heads, 0, dtype, head_dim) for n in counts)}
    outs = [
        context_attention.context_attention_triton(
            wide.to(device)[:, :-1], ContextKV(*copied), *places, scale, tile=tile, form=on(device, form)
        ).cpu()
        for tile in tiles
    ]
    is_plain = form.is_plain and not form.window and device == "cuda"
    if is_plain and wgmma_attention.can_run(torch.device(device), head_dim, dtype):
        q_there, tiles = wide.to(device)[:, :-1], ContextKV(*copied).tile_descriptors()
        arguments = q_there, tiles, kv_heads, *places, scale * LOG2_E
        outs.append(wgmma_attention.wgmma_attention_triton(*arguments).cpu())
    on_cpu = [x.cpu() for x in places]
    on_cpu = ContextKV(keys, values), *on_cpu
    outs.append(context_attention.context_attention_reference(q, *on_cpu, scale, form=form))
    for out in outs:
        assert torch.equal(out[-3:], torch.zeros_like(q[-3:]))
        for request, (q_len, kv_len) in enumerate(lens):
            mine = slice(starts[request], starts[request] + q_len)
            assert_close(out[mine], definition(q[mine], pool, 1, table[request], kv_len, scale, form))


def tree_definition(
    q: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    pages: torch.Tensor,
    kv_len: int,
    scale: float,
    seen: torch.Tensor,
    form: AttentionForm,
) -> torch.Tensor:
    """One request in float64, row by row, over the columns given by `seen` bool `[Q, W]` and the prefix.

    A row's position is that of its depth behind the prefix.
    """
    keys, values = (
        plane.flatten(0, 1)[:kv_len].repeat_interleave(q.shape[1] // pool.shape[4], dim=1).double()
        for plane in pool[pages, layer].unbind(1)
    )
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        context = kv_len - seen.shape[1]
        near = context + int(seen[row].sum()) - 1 - form.window if form.window else -1
        columns = [
            c for c in range(kv_len) if (near < c < context) or (c >= context and seen[row, c - context])
        ]
        if columns:
            scores = capped(torch.einsum("nd,snd->ns", q[row].double(), keys[columns]) * scale, form.softcap)
            if form.sinks is not None:
                scores = torch.cat((scores, form.sinks.double()[:, None]), dim=1)
            weights = scores.softmax(-1)[:, : len(columns)]
            out[row] = torch.einsum("ns,snd->nd", weights, values[columns]).to(q.dtype)
    return out


def random_trees(num_requests: int, num_rows: int) -> torch.Tensor:
    """Ancestor masks `[B, Q, Q]` of random trees: parents precede children, and every node sees itself."""
    generator = torch.Generator().manual_seed(9)
    masks = torch.eye(num_rows, dtype=torch.bool).repeat(num_requests, 1, 1)
    for mask in masks:
        for node in range(1, num_rows):
            mask[node] |= mask[int(torch.randint(0, node, (), generator=generator))]
    return masks


def check_verify(
    device: str,
    num_rows: int,
    kv_lens: list[int],
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    num_splits: int = 1,
    is_tree: bool = False,
    earlier: int = 0,
    form_name: str = "",
) -> None:
    """kv_len 0 is an idle request: its queries are NaN and its rows come out as zeros. The tree has `earlier`
    more nodes, whose rows stand before the new ones."""
    num_heads, kv_heads = heads
    form = form_of(form_name, num_heads)
    pool, table = poisoned_pool(kv_lens, page_size, kv_heads, head_dim, dtype, layer=0)
    wide = randn(len(kv_lens), num_rows, num_heads + 1, head_dim, dtype=dtype, seed=8)
    wide[:, :, -1] = NAN
    lengths = torch.tensor(kv_lens, dtype=torch.int64)
    wide[lengths == 0] = NAN
    trees = random_trees(len(kv_lens), earlier + num_rows)[:, earlier:].contiguous() if is_tree else None
    if trees is not None:
        trees[1, 1:, 0] = False  # a mask that is no tree's: only what it says counts
    q, scale = wide[:, :, :-1], head_dim**-0.5
    arguments = pool.to(device), 0, table.to(device), lengths.to(device), scale
    out = verify_attention.paged_verify_triton(
        wide.to(device)[:, :, :-1],
        *arguments,
        None if trees is None else trees.to(device),
        num_splits=num_splits,
        min_split=32,
        form=on(device, form),
    )
    on_cpu = verify_attention.paged_verify_reference(q, pool, 0, table, lengths, scale, trees, form)
    seen = (
        torch.ones(num_rows, num_rows, dtype=torch.bool).tril().repeat(len(kv_lens), 1, 1)
        if trees is None
        else trees
    )
    for request, kv_len in enumerate(kv_lens):
        expected = tree_definition(q[request], pool, 0, table[request], kv_len, scale, seen[request], form)
        assert_close(out[request], expected)
        assert_close(on_cpu[request], expected)


def check_invariant(
    device: str,
    num_rows: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    is_tree: bool,
    form_name: str = "",
) -> None:
    """Splits of 64 columns and longer ones, computed in parallel or by one program; and ragged rows.

    The bits of both are equal on a device.
    """
    form = form_of(form_name, heads[0])
    longest = 300 if num_rows <= 4 else 150  # of trees, which take long to interpret
    kv_lens, (num_heads, kv_heads) = [40, 0, longest, num_rows, 65], heads
    pool, table = poisoned_pool(kv_lens, 16, kv_heads, head_dim, dtype, layer=1)
    q = randn(len(kv_lens) * num_rows, num_heads, head_dim, dtype=dtype, seed=8)
    lengths, scale = torch.tensor(kv_lens), head_dim**-0.5
    trees = random_trees(len(kv_lens), num_rows) if is_tree else None
    causal = torch.ones(num_rows, num_rows, dtype=torch.bool).tril().expand(len(kv_lens), -1, -1)
    seen = causal if trees is None else trees
    rows = invariant_attention.Rows(
        lengths.to(device), uniform=num_rows, tree_mask=None if trees is None else trees.to(device)
    )
    arguments = pool.to(device), 1, table.to(device)
    outs = [
        invariant_attention.invariant_attention_triton(
            q.to(device),
            *arguments,
            rows,
            scale,
            form=on(device, form),
            base_split=64,
            max_partial_bytes=limit,
        )
        for limit in (0, 1 << 30)
    ]
    if device == "cuda":  # the interpreter's products differ by their shapes
        assert torch.equal(*outs)
    if trees is None and num_rows == 4:  # the first two requests, 3 rows and none, and the third in two runs
        starts = torch.tensor([0, 3, 3, 10])
        ragged = invariant_attention.Rows(torch.tensor(kv_lens[:3]).to(device), 0, starts.to(device), 7)
        out = invariant_attention.invariant_attention_triton(
            q[:12].to(device),
            *arguments[:2],
            table[:3].to(device),
            ragged,
            scale,
            form=on(device, form),
            base_split=64,
        )
        assert torch.equal(out[10:].cpu(), torch.zeros_like(q[10:12]))
        assert_close(out[:3], definition(q[:3], pool, 1, table[0], 40, scale, form))
        assert_close(out[3:10], definition(q[3:10], pool, 1, table[2], 300, scale, form))
    on_cpu = invariant_attention.Rows(lengths, uniform=num_rows, tree_mask=trees)
    outs.append(invariant_attention.invariant_attention_torch(q, pool, 1, table, on_cpu, scale, form))
    for request, kv_len in enumerate(kv_lens):
        mine = slice(request * num_rows, (request + 1) * num_rows)
        expected = tree_definition(q[mine], pool, 1, table[request], kv_len, scale, seen[request], form)
        for out in outs:
            assert_close(out[mine], expected)


# --- trees --------------------------------------------------------------------------------------------------


def walk(tokens: list[int], parents: list[int], targets: list[int], limit: int) -> list[int]:
    """The kept nodes of one tree, in plain Python."""
    path = [0] if limit else []
    while path:
        children = [n for n in range(limit) if parents[n] == path[-1] and tokens[n] == targets[path[-1]]]
        if not children:
            break
        path.append(children[0])
    return path


def check_tree_verify(
    device: str, num_requests: int, num_nodes: int, vocabulary: int, is_chain: bool = False
) -> None:
    """Few tokens, so that walks go deep and siblings collide; limits from 0 to all nodes."""
    generator = torch.Generator().manual_seed(num_nodes)
    shape = num_requests, num_nodes
    tokens, targets = (torch.randint(0, vocabulary, shape, generator=generator) for _ in range(2))
    parents = torch.full(shape, -1, dtype=torch.int64)
    for node in range(1, num_nodes):
        draw = torch.randint(-1, node, (num_requests,), generator=generator)
        parents[:, node] = node - 1 if is_chain else draw
    limits = torch.randint(0, num_nodes + 1, (num_requests,), generator=generator)
    limits[num_requests // 2 :] = num_nodes
    inputs = tokens, parents, targets, limits
    for verdict in (
        tree_verify.tree_verify_triton(*(x.to(device) for x in inputs)),
        tree_verify.tree_verify_reference(*inputs),
    ):
        for request in range(num_requests):
            path = walk(*(x[request].tolist() for x in inputs))
            filled = (path or [0]) + [path[-1] if path else 0] * (num_nodes - max(len(path), 1))
            assert int(verdict.accept_len[request]) == len(path)
            assert verdict.path[request].tolist() == filled
            assert verdict.tokens[request].tolist() == targets[request, filled].tolist()


def check_compact_kv(device: str, num_moves: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Overlapping moves to the front, a request without any, and rows that go nowhere; the rest stays."""
    num_layers, page_size, num_heads, head_dim = shape
    count = num_moves + 3  # slots of each request, scattered
    order = torch.randperm(3 * count, generator=torch.Generator().manual_seed(8)) + page_size
    pool = randn(
        2 + 3 * count // page_size, num_layers, 2, page_size, num_heads, head_dim, dtype=dtype, seed=9
    )
    pool[0] = 0
    slots = order.view(3, count)
    sources, targets = slots[:, 3:].clone(), slots[:, 1 : 1 + num_moves].clone()
    targets[1] = sources[1]
    sources[2, num_moves // 2 :] = targets[2, num_moves // 2 :] = 0
    expected = pool.clone()
    for request in range(3):
        for source, target in zip(sources[request].tolist(), targets[request].tolist(), strict=True):
            row = pool[source // page_size, :, :, source % page_size]
            expected[target // page_size, :, :, target % page_size] = row
    moved = pool.to(device, copy=True)
    compact_kv.compact_kv_triton(moved, sources.to(device), targets.to(device))
    assert torch.equal(moved.cpu(), expected)
    compact_kv.compact_kv(pool, sources, targets)
    assert torch.equal(pool, expected)


# --- the list -----------------------------------------------------------------------------------------------


def attention_cases(*, is_whole: bool = True) -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    """Not `is_whole`: of the grid of heads and ways to verify every second cell, and no long lists."""
    turns = cycle(((1, FLOAT32), (16, FLOAT32), (16, BFLOAT16)))
    for row, (heads, head_dim) in enumerate(zip(HEADS, HEAD_DIMS, strict=True)):
        for lens in (RAGGED, BORDERS):
            yield check_extend, (lens, heads, head_dim, *next(turns))
        ways = ((1, 1, False), (1, 4, False), (4, 3, False), (7, 1, True), (7, 3, True))
        for column, (num_rows, splits, is_tree) in enumerate(ways):
            lens = [0, num_rows, 31, 32, 33, 97]
            case = check_verify, (num_rows, lens, heads, head_dim, *next(turns), splits, is_tree)
            if is_whole or (row + column) % 2 == 0:
                yield case
    for heads, head_dim, lens, page_size, dtype in (
        ((4, 4), 32, BORDERS, 16, BFLOAT16),
        ((3, 1), 64, RAGGED, 1, FLOAT32),
        ((8, 2), 128, [(70, 71), (1, 128), (40, 129)], 16, BFLOAT16),
        ((4, 2), 96, [(40, 129), (1, 128)], 16, BFLOAT16),
        ((3, 3), 72, RAGGED, 16, FLOAT32),
        ((4, 2), 256, [(70, 71), (40, 129)], 16, BFLOAT16),
    ):
        yield check_context, (lens, heads, head_dim, page_size, dtype, 2)
    for count in (20, 70) if is_whole else (20,):
        yield check_context, ([(1, 1)] * count, (2, 1), 16, 16, FLOAT32)
    for num_rows, heads, head_dim, dtype, is_tree in (
        (1, (8, 2), 64, BFLOAT16, False),
        (4, (3, 1), 80, FLOAT32, False),
        (4, (4, 4), 128, BFLOAT16, False),
        (8, (8, 2), 64, BFLOAT16, True),
        (5, (3, 1), 64, FLOAT32, True),
    ):
        if is_whole or num_rows < 8:
            yield check_invariant, (num_rows, heads, head_dim, dtype, is_tree)
    yield check_extend, ([(5, 5), (17, 48)], (4, 2), 32, 16, FLOAT32, "all")
    yield check_verify, (5, [0, 5, 50], (4, 2), 32, 16, FLOAT32, 2, True, 0, "all")
    for name in FORMS if is_whole else ():
        yield check_extend, (RAGGED, (8, 2), 64, 16, FLOAT32, name)
        yield check_extend, (BORDERS, (4, 4), 256, 16, BFLOAT16, name)
        yield check_context, ([(70, 71), (1, 128), (40, 129)], (3, 1), 64, 16, BFLOAT16, 1, name)
        yield check_context, ([(70, 71), (1, 128), (40, 129)], (4, 2), 256, 16, BFLOAT16, 1, name)
        yield check_verify, (4, [0, 4, 31, 33, 97], (3, 1), 80, 16, FLOAT32, 3, False, 0, name)
        yield check_verify, (1, [0, 1, 31, 33, 97], (4, 2), 256, 16, BFLOAT16, 1, False, 0, name)
        yield check_verify, (1, [0, 1, 31, 33, 97], (4, 1), 256, 16, BFLOAT16, 3, False, 0, name)
        yield check_verify, (7, [0, 7, 32, 97], (8, 2), 64, 16, FLOAT32, 2, True, 0, name)
        yield check_invariant, (4, (3, 1), 64, FLOAT32, False, name)
        yield check_invariant, (5, (8, 2), 64, FLOAT32, True, name)
    yield check_extend, ([], (2, 1), 64, 16, FLOAT32)
    yield check_extend, ([(300, 300)], (8, 1), 64, 16, BFLOAT16)
    yield check_verify, (1, [], (2, 1), 64, 16, FLOAT32)
    yield check_verify, (40, [40, 75], (8, 2), 64, 16, BFLOAT16, 2, True)
    yield check_verify, (4, [0, 12, 12, 33, 50], (3, 1), 80, 16, FLOAT32, 2, True, 8)
    yield check_verify, (1, [3, 34], (2, 2), 64, 1, BFLOAT16, 1, True, 2)
    yield check_verify, (3, [2, 1, 5], (2, 1), 64, 16, FLOAT32)  # fewer context rows than new ones


def tree_cases() -> Iterator[tuple[Callable[..., None], tuple[object, ...]]]:
    for num_requests, num_nodes in ((0, 4), (3, 1), (24, 2), (24, 5), (16, 33)):
        yield check_tree_verify, (num_requests, num_nodes, 2)
    yield check_tree_verify, (32, 6, 2, True)
    yield check_tree_verify, (8, 16, 1)
    for moves in ((0, (1, 4, 2, 8), FLOAT32), (1, (3, 1, 3, 80), BFLOAT16), (6, (2, 16, 8, 128), BFLOAT16)):
        yield check_compact_kv, moves
