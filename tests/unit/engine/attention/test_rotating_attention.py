"""Attention of prompts in graphs that rotates, too, gives what attention gives to rotated rows."""

from collections.abc import Callable

import pytest
import torch
from baton.engine.attention.places import RequestPlaces
from baton.engine.attention.registry import attention_for
from baton.engine.graphs.breakable import Breaks
from baton.engine.graphs.token_graphs import AttendContext, AttentionBridge
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import KVPool
from baton.engine.kv.window_layout import WindowedLayout
from baton.engine.kv.window_pool import WindowedPool
from baton.engine.models.layers import RotatingAttend
from baton.kernels.rms_norm import rms_norm
from baton.kernels.rope import apply_rope
from baton.kernels.rotate_store import HeadNorms
from baton.tests.unit.engine.attention.test_attention import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    PAGES,
    make_batch,
)

LENGTHS, NUM_PADDING = [(5, 29), (1, 4), (9, 9)], 2
NUM_LAYERS, NUM_PAGES, MAX_CONTEXT = 3, 64, 256


def pool_of(is_windowed: bool) -> KVPool:
    layout = MHALayout(
        page_size=PAGE_SIZE,
        num_layers=NUM_LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
    )
    if not is_windowed:
        return KVPool(NUM_PAGES, layout)
    pool = WindowedPool(NUM_PAGES, NUM_PAGES, WindowedLayout(whole=layout, windows=(8, 0, 8)))
    pages = [page for mine in PAGES[: len(LENGTHS)] for page in mine]
    pool.map_pages({page: 1 + number for number, page in enumerate(pages)})
    return pool


def across_a_break(pool: KVPool) -> RotatingAttend:
    attention, batch = (
        attention_for(pool, "triton", max_context=MAX_CONTEXT),
        make_batch(LENGTHS, NUM_PADDING),
    )
    read = attention.bind_reads(attention.plan(batch))
    bridge = AttentionBridge.empty(batch.num_tokens + 3, HEADS, DIM, torch.float32, pool.device)
    breaks = Breaks(AttendContext(num_rows=batch.num_tokens, read=read))  # `read` knows its padding
    return bridge.attend(breaks, pool, batch.slots)


def in_a_graph(pool: KVPool) -> RotatingAttend:
    batch, places = (
        make_batch(LENGTHS, NUM_PADDING),
        RequestPlaces.empty(len(LENGTHS), len(PAGES[0]), pool.device),
    )
    places.load(batch)
    return attention_for(pool, "triton", max_context=MAX_CONTEXT).recorded(places, batch.slots)


@pytest.mark.parametrize("is_windowed", [False, True], ids=["pages", "window pages"])
@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("attend_of", [across_a_break, in_a_graph])
def test_attention_that_rotates_gives_the_rows_of_rotated_heads(
    attend_of: Callable[[KVPool], RotatingAttend], has_norms: bool, is_windowed: bool
):
    generator = torch.Generator().manual_seed(3)
    num_real, split = sum(rows for rows, _ in LENGTHS), HEADS + KV_HEADS
    num_rows = num_real + NUM_PADDING
    one, other = pool_of(is_windowed), pool_of(is_windowed)
    rotating, rotated = attend_of(one), attend_of(other)
    assert isinstance(rotating, RotatingAttend)
    angles = torch.rand(num_rows, DIM // 2, generator=generator)
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    norms = HeadNorms(*torch.rand(2, DIM, generator=generator), 1e-5) if has_norms else None
    for layer in range(NUM_LAYERS):
        heads = torch.randn(num_rows, split + KV_HEADS, DIM, generator=generator)
        heads[num_real:] = float("nan")
        q, k = heads[:, :HEADS], heads[:, HEADS:split]
        if norms is not None:
            q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        expected = rotated(layer, apply_rope(q, cos, sin), apply_rope(k, cos, sin), heads[:, split:])
        found = rotating.rotate_attend(layer, heads, cos, sin, norms=norms)
        torch.testing.assert_close(found[:num_real], expected[:num_real])
    torch.testing.assert_close(one.kv, other.kv)
    assert bool(other.kv.any())
    if isinstance(one, WindowedPool) and isinstance(other, WindowedPool):
        torch.testing.assert_close(one.part.kv, other.part.kv)
        assert bool(other.part.kv.any())


def test_a_wrong_place_for_queries_is_refused():
    pool = pool_of(False)
    bridge = AttentionBridge.empty(17, HEADS + 1, DIM, torch.float32, pool.device)
    attend = bridge.attend(
        Breaks(AttendContext(num_rows=17, read=None)), pool, make_batch(LENGTHS, NUM_PADDING).slots
    )
    heads, table = torch.zeros(17, HEADS + 2 * KV_HEADS, DIM), torch.zeros(17, DIM)
    with pytest.raises(ValueError, match=rf"out \(17, {HEADS + 1}, {DIM}\)"):
        attend.rotate_attend(0, heads, table, table)
