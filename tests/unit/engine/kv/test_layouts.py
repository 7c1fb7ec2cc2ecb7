"""All sizes of a page follow from one layout: pool memory, wire, a rank's share and the capacity estimate."""

from pathlib import Path

import pytest
import torch
from baton.cluster.protocol.messages import Layout
from baton.deploy.capacity.checkpoints import shape_of
from baton.engine.kv.budget import STAGING_SHARE, PageBudget
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import KVPool
from baton.engine.models.registry import load_model_config
from baton.engine.models.weights import load_model
from baton.kvtransfer.protocol.layout import KVLayout
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.unit.engine.test_engine_config import load
from baton.worker.identity import layout_of

GQA = MHALayout(page_size=16, num_layers=3, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16)


def test_a_page_has_the_bytes_that_its_shape_and_tokens_say():
    pool = KVPool(4, GQA)
    assert pool.kv.shape == (4, *GQA.page_shape)
    assert GQA.page_shape == (3, len(GQA.planes), 16, 8, 64)
    assert pool.kv[0].nbytes == GQA.page_bytes == 16 * GQA.bytes_per_token == pool.page_bytes
    assert GQA.bytes_per_token == 2 * GQA.elements_per_token == 2 * 3 * 2 * 8 * 64
    assert [plane.shape for plane in pool.layer(1)] == [(4, 16, 8, 64)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_wire_moves_the_bytes_of_a_page(dtype: torch.dtype):
    layout = MHALayout(page_size=4, num_layers=2, num_kv_heads=3, head_dim=8, dtype=dtype)
    wire = layout_of(KVPool(2, layout), model_fingerprint="f", feature_ids=[], feature_width=0)
    assert isinstance(wire, Layout)
    assert KVLayout(wire).kv_page_bytes == layout.page_bytes
    heads, width = layout.wire_heads
    assert 2 * heads * width * layout.num_layers == layout.elements_per_token


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_model_the_pool_and_the_planner_agree_on_the_bytes_of_a_token(toy_checkpoint, family):
    path = toy_checkpoint(family)
    model, config = load_model(path, dtype=torch.float32)
    layout = model.kv_layout(16)
    assert layout == MHALayout.of(config, num_layers=config.num_layers, page_size=16, dtype=torch.float32)
    assert shape_of(Path(path), dtype="float32").kv_bytes == layout.bytes_per_token
    assert load_model_config(path).num_kv_heads < config.num_heads, "the toy shares KV heads"


@pytest.mark.parametrize(("num_ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_deal_the_kv_heads_out_or_share_them(num_ranks: int, heads: int):
    part = GQA.shard(num_ranks)
    assert part.num_kv_heads == heads
    assert part.page_shape[:3] == GQA.page_shape[:3]
    assert num_ranks > 8 or num_ranks * part.page_bytes == GQA.page_bytes


@pytest.mark.parametrize("num_ranks", [0, 3, 12])
def test_heads_that_ranks_cannot_divide_are_refused_by_number(num_ranks: int):
    with pytest.raises(ValueError, match=f"8 KV heads .* {num_ranks} ranks"):
        GQA.shard(num_ranks)


# --- how many pages a budget buys ---------------------------------------------------------------------------


@pytest.mark.parametrize("draft_bytes", [0, 700])
@pytest.mark.parametrize("feature_bytes", [0, 900])
@pytest.mark.parametrize("has_staging", [False, True])
def test_pages_and_staging_fill_the_memory_and_stay_within_it(draft_bytes, feature_bytes, has_staging):
    budget = PageBudget(
        kv_bytes=5000, draft_bytes=draft_bytes, feature_bytes=feature_bytes, has_staging=has_staging
    )
    for memory in (10**6, 10**7 + 1):
        count = budget.num_pages(memory)
        assert budget.total(count) <= memory
        staging = 5000 / STAGING_SHARE if has_staging else 0
        needed = 5000 + draft_bytes + feature_bytes + staging
        assert budget.total(count) == pytest.approx(count * needed, abs=1)
        assert budget.total(count) > 0.95 * memory - needed


@pytest.mark.parametrize("has_drafter", [False, True])
def test_what_an_engine_allocates_stays_within_its_kv_memory(toy_checkpoint, tmp_path, has_drafter):
    target = toy_checkpoint("llama", num_hidden_layers=12)
    head = write_head(tmp_path, head_config(2, (8, 1, 5)), head_tensors())
    engine = load(target, draft=str(head), kv_memory_mb=8, has_drafter=has_drafter)
    used = engine.pool.kv.nbytes
    if has_drafter:
        used += engine.drafter.pool.kv.nbytes + engine.pool.kv.nbytes // STAGING_SHARE
    else:
        used += engine.features.features.nbytes
    assert 0.95 * (8 << 20) < used <= 8 << 20
