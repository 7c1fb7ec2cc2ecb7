"""The pairs of ranks: every KV head of decode's ranks comes once, and the features come once."""

import itertools

import pytest
import torch
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.layouts import MHALayout
from baton.kvtransfer.protocol.layout import KVLayout, block_digest
from baton.kvtransfer.protocol.rank_pairs import (
    Shard,
    carries_features,
    heads_of,
    receivers_of,
    shared_heads,
    sources_of,
)

COMBINATIONS = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)))
LAYOUT = Layout(
    fingerprint="f", dtype="bfloat16", page_size=4, num_layers=3, num_kv_heads=4, head_dim=8,
    feature_ids=[0, 2], feature_width=12, block_bytes=4096,
)  # fmt: skip


def ranks(number: int) -> list[Shard]:
    return [Shard(rank, number) for rank in range(number)]


@pytest.mark.parametrize(("heads", "senders", "receivers"), COMBINATIONS)
def test_every_head_of_a_decode_rank_comes_from_one_prefill_rank(
    heads: int, senders: int, receivers: int
) -> None:
    for receiver in ranks(receivers):
        sources = [Shard(rank, senders) for rank in sources_of(heads, receiver, senders)]
        pulled = [head for source in sources for head in shared_heads(heads, source, receiver)]
        assert pulled == list(heads_of(heads, receiver))
        has_features = [carries_features(source, receiver) for source in sources]
        assert has_features == [True] * (receiver.rank == 0) + [False] * (len(sources) - (receiver.rank == 0))


@pytest.mark.parametrize(("heads", "senders", "receivers"), COMBINATIONS)
def test_both_sides_know_the_same_pairs(heads: int, senders: int, receivers: int) -> None:
    by_decode = {(p, d.rank) for d in ranks(receivers) for p in sources_of(heads, d, senders)}
    by_prefill = {(p.rank, d) for p in ranks(senders) for d in receivers_of(heads, p, receivers)}
    assert by_decode == by_prefill
    assert (0, 0) in by_decode, "decode's rank 0 learns the other addresses from a rank that it pulls from"


def test_copies_of_a_head_share_the_work() -> None:
    pairs = [sources_of(2, receiver, 4) for receiver in ranks(4)]
    assert pairs == [(0,), (1,), (2,), (3,)]


def test_bad_ranks_are_named() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2 ranks"):
        Shard(2, 2)
    with pytest.raises(ValueError, match="6 KV heads cannot be dealt to 4 ranks"):
        heads_of(6, Shard(0, 4))
    with pytest.raises(ValueError, match="6 KV heads cannot be dealt to 4 ranks"):
        KVLayout(LAYOUT.__class__(**{**_fields(LAYOUT), "num_kv_heads": 6}), sender=Shard(0, 4))


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2), Shard(3, 4), Shard(5, 8)])
def test_the_pages_of_a_rank_are_those_of_its_pool(shard: Shard) -> None:
    own = KVLayout.of_rank(LAYOUT, shard)
    pool = MHALayout.of(LAYOUT, num_layers=3, page_size=4, dtype=torch.bfloat16).shard(shard.num_ranks)
    assert own.kv_page_bytes == pool.page_bytes
    assert own.sender_rows.is_whole
    assert own.feature_page_bytes == (4 * 12 * 2 if shard.rank == 0 else 0)


def test_the_digest_of_a_block_names_the_pair() -> None:
    data = memoryview(b"same bytes of heads")
    names = [KVLayout(LAYOUT, sender, receiver).name for sender in ranks(2) for receiver in ranks(4)]
    digests = {block_digest("a" * 32, 0, 3, data, pair=name) for name in ["", *names]}
    assert len(digests) == 9
    assert KVLayout(LAYOUT).name == "", "two workers of one rank each digest as before there were ranks"


def _fields(layout: Layout) -> dict[str, object]:
    return {name: getattr(layout, name) for name in layout.__struct_fields__}
