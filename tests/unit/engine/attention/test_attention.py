"""The plan of a batch: every row has its slot and attends exactly to earlier rows of its own request."""

import pytest
import torch
from baton.engine.attention.metadata import MAX_UNIFORM_ROWS, AttentionMetadata, plan
from baton.engine.attention.registry import BACKENDS, attention_for
from baton.engine.batch.forward_batch import ForwardBatch
from baton.engine.errors import LifecycleError
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.page_table import build_page_table, slots_for
from baton.engine.kv.pool import KVPool
from baton.kernels.paged_attention import paged_attention_reference

HEADS, KV_HEADS, DIM, PAGE_SIZE = 4, 2, 8, 4
PAGES = [[7, 3, 11, 2, 19, 30, 31, 5], [4], [9, 8, 1], [12, 13, 20, 21, 22, 23]]


def make_pool(seed: int = 0) -> KVPool:
    """Random content everywhere but in the sink, as after a long run."""
    layout = MHALayout(
        page_size=PAGE_SIZE, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32
    )
    pool = KVPool(32, layout)
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(seed)))
    pool.kv[0, :, :, 0] = 0
    return pool


def make_batch(lengths: list[tuple[int, int]], num_padding: int = 0) -> ForwardBatch:
    """Requests of (rows, context length), the i-th on PAGES[i]; padding rows behind them."""
    slots = [slots_for(PAGES[i], kv - q, kv, PAGE_SIZE) for i, (q, kv) in enumerate(lengths)]
    padding = torch.zeros(num_padding, dtype=torch.int64)
    num_rows = sum(q for q, _ in lengths) + num_padding
    return ForwardBatch(
        input_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.zeros(num_rows, dtype=torch.int64),
        slots=torch.cat((*slots, padding)),
        page_table=build_page_table(PAGES[: len(lengths)]),
        q_lens=[q for q, _ in lengths],
        kv_lens=[kv for _, kv in lengths],
    )


def make_rows(count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


def assert_attends(pool: KVPool, lengths: list[tuple[int, int]], num_padding: int = 0) -> AttentionMetadata:
    """Runs one layer and compares each request with the float64 definition over the resulting pool."""
    batch = make_batch(lengths, num_padding)
    q, k, v = make_rows(batch.num_tokens)
    if num_padding:
        for tensor in (q, k, v):
            tensor[-num_padding:] = float("nan")
    metadata = plan(batch, PAGE_SIZE)
    out = attention_for(pool).attend(metadata, 1, q, k, v)
    start = 0
    for i, (q_len, kv_len) in enumerate(lengths):
        mine = slice(start, start + q_len)
        keys = pool.kv[torch.tensor(PAGES[i]), 1, 0].flatten(0, 1)
        assert torch.equal(keys[kv_len - q_len : kv_len], k[mine])
        expected = paged_attention_reference(q[mine], pool.kv, 1, torch.tensor(PAGES[i]), kv_len, DIM**-0.5)
        torch.testing.assert_close(out[mine], expected, atol=2e-6, rtol=1e-5)
        start += q_len
    return metadata


@pytest.mark.parametrize("num_rows", [1, 3])
def test_equally_many_rows_are_attended_as_one_batch(num_rows: int):
    metadata = assert_attends(
        make_pool(), [(num_rows, 29), (num_rows, 4), (num_rows, num_rows), (num_rows, 24)]
    )
    assert metadata.uniform_rows == num_rows


@pytest.mark.parametrize(
    "lengths",
    [[(20, 29), (1, 4), (12, 12)], [(1, 32), (4, 4)], [(MAX_UNIFORM_ROWS + 1, 32)], [(24, 24)]],
    ids=["extends", "mixed-verify", "long-uniform", "no-prefix"],
)
def test_unequal_or_long_extends_are_attended_one_by_one(lengths: list[tuple[int, int]]):
    assert assert_attends(make_pool(), lengths).uniform_rows == 0


@pytest.mark.parametrize("lengths", [[(1, 29), (1, 4)], [(20, 29), (3, 4)]], ids=["decode", "extend"])
def test_padding_rows_reach_nothing_even_when_they_are_nan(lengths: list[tuple[int, int]]):
    pool = make_pool()
    before = pool.kv.clone()
    assert_attends(pool, lengths, num_padding=3)
    written = [
        (PAGES[i][t // PAGE_SIZE], t % PAGE_SIZE)
        for i, (q, kv) in enumerate(lengths)
        for t in range(kv - q, kv)
    ]
    for page, offset in written:
        before[page, 1, :, offset] = pool.kv[page, 1, :, offset]
    assert torch.equal(pool.kv, before)


@pytest.mark.parametrize("lengths", [[(1, 29), (1, 2)], [(20, 29), (1, 2)]], ids=["batched", "one-by-one"])
def test_nothing_beyond_a_requests_length_is_read(lengths: list[tuple[int, int]]):
    pool = make_pool()
    pool.kv[5, :, :, 1:] = float("nan")  # behind row 28 of request 0
    pool.kv[4, :, :, 2:] = float("nan")  # behind row 1 of request 1
    pool.kv[0, :, :, 1:] = float("nan")  # page 0 pads the page table
    batch = make_batch(lengths)
    out = attention_for(pool).attend(plan(batch, PAGE_SIZE), 1, *make_rows(batch.num_tokens))
    assert not out.isnan().any()


def test_both_paths_give_the_same_rows():
    batched = make_batch([(3, 29), (3, 4)])
    alone = [make_batch([(3, 29)]), make_batch([(3, 29), (1, 4)])]
    q, k, v = make_rows(6)
    out = attention_for(make_pool()).attend(plan(batched, PAGE_SIZE), 0, q, k, v)
    single = attention_for(make_pool()).attend(plan(alone[0], PAGE_SIZE), 0, q[:3], k[:3], v[:3])
    ragged = attention_for(make_pool()).attend(plan(alone[1], PAGE_SIZE), 0, q[:4], k[:4], v[:4])
    torch.testing.assert_close(out[:3], single, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out[:3], ragged[:3], atol=1e-6, rtol=1e-5)


def test_the_scale_can_be_chosen():
    batch, (q, k, v) = make_batch([(1, 9)]), make_rows(1)
    metadata = plan(batch, PAGE_SIZE)
    halved = attention_for(make_pool(), scale=0.5 * DIM**-0.5).attend(metadata, 0, q, k, v)
    torch.testing.assert_close(halved, attention_for(make_pool()).attend(metadata, 0, q * 0.5, k, v))


def test_an_empty_batch_attends_to_nothing():
    batch = make_batch([(1, 1)])
    batch.input_ids = batch.positions = batch.slots = torch.empty(0, dtype=torch.int64)
    batch.page_table, batch.q_lens, batch.kv_lens = torch.empty(0, 1, dtype=torch.int64), [], []
    assert attention_for(make_pool()).attend(plan(batch, PAGE_SIZE), 0, *make_rows(0)).shape == (
        0,
        HEADS,
        DIM,
    )


def test_a_plan_of_an_older_version_of_the_batch_is_refused():
    batch, attention = make_batch([(1, 9)]), attention_for(make_pool())
    metadata = plan(batch, PAGE_SIZE)
    bound = attention.bind(metadata)
    batch.slots = batch.slots.clone()
    for use in (lambda: attention.bind(metadata), lambda: bound(0, *make_rows(1))):
        with pytest.raises(
            LifecycleError, match="planned for version 0 of the batch, which is now at version 1"
        ):
            use()
    attention.attend(plan(batch, PAGE_SIZE), 0, *make_rows(1))


@pytest.mark.parametrize("lengths", [[(1, 9)], [(20, 29)]], ids=["batched", "one-by-one"])
def test_rows_that_were_not_planned_are_refused(lengths: list[tuple[int, int]]):
    attention = attention_for(make_pool())
    with pytest.raises(LifecycleError, match="and got 2"):
        attention.attend(plan(make_batch(lengths), PAGE_SIZE), 0, *make_rows(2))


@pytest.mark.parametrize(
    "lengths", [[(1, 40)], [(5, 4)], [(0, 4)]], ids=["beyond-table", "rows>context", "no-rows"]
)
def test_impossible_lengths_raise(lengths: list[tuple[int, int]]):
    batch = make_batch([(1, 4)])
    batch.q_lens, batch.kv_lens = [lengths[0][0]], [lengths[0][1]]
    batch.slots = batch.input_ids = torch.zeros(max(lengths[0][0], 1), dtype=torch.int64)
    with pytest.raises(AssertionError):
        plan(batch, PAGE_SIZE)


@pytest.mark.parametrize("lengths", [[(1, 9), (1, 3)], [(4, 12), (4, 4)], [(5, 9), (2, 2), (3, 11)]])
def test_every_backend_gives_the_same_rows_and_the_same_pages(lengths):
    outs, pages = [], []
    for name in BACKENDS:
        backend = attention_for(make_pool(), name)
        batch = make_batch(lengths)
        outs.append(backend.bind(backend.plan(batch))(1, *make_rows(batch.num_tokens)))
        pages.append(backend.pool.kv)
    assert list(BACKENDS) == ["triton", "torch", "invariant"]
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(pages[0], pages[1])


def test_the_cpu_attends_by_torch_and_an_unknown_backend_names_the_known():
    assert isinstance(attention_for(make_pool()), BACKENDS["torch"])
    with pytest.raises(ValueError, match="'flash': use one of triton, torch"):
        attention_for(make_pool(), "flash")
