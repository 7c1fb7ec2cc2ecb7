"""Cutting a room into blocks, and the agreement of two layouts."""

import msgspec
import pytest
import torch
from baton.cluster.errors import HandshakeRefused, LocalProtocolError
from baton.cluster.protocol.messages import Layout
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import KVPool
from baton.kvtransfer.protocol.layout import KVLayout, RoomStream, agree, block_digest, feature_columns
from baton.worker.identity import layout_of
from hypothesis import given
from hypothesis import strategies as st


def make_layout(**changes: object) -> Layout:
    base = Layout(
        fingerprint="f" * 64,
        dtype="bfloat16",
        page_size=4,
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        feature_ids=[0, 1],
        feature_width=16,
        block_bytes=4096,
    )
    return msgspec.structs.replace(base, **changes)


@st.composite
def streams(draw: st.DrawFn) -> RoomStream:
    feature_ids = draw(st.lists(st.integers(0, 9), max_size=3, unique=True))
    num_layers = draw(st.integers(1, 3))
    layout = make_layout(
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        page_size=draw(st.integers(1, 5)),
        num_layers=num_layers,
        window_layers=draw(st.integers(0, num_layers)),
        window=draw(st.integers(1, 9)),
        window_margin=draw(st.integers(0, 3)),
        num_kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.integers(1, 5)),
        feature_ids=feature_ids,
        feature_width=len(feature_ids) * draw(st.integers(1, 7)),
        block_bytes=draw(st.integers(24, 900)),
    )
    num_tokens = draw(st.integers(0, 20))
    have = draw(st.integers(0, num_tokens // layout.page_size)) * layout.page_size
    return KVLayout(layout).stream(num_tokens, have)


@given(streams())
def test_the_blocks_of_a_room_hold_each_byte_of_its_pages_once_in_order(stream: RoomStream) -> None:
    layout = stream.layout
    expected = []
    for page in range(stream.num_pages):
        expected += [("kv", page, i) for i in range(layout.kv_page_bytes)]
        if page >= stream.window_first:
            index = stream.num_pages + page - stream.window_first
            expected += [("window", index, i) for i in range(layout.window_page_bytes)]
        expected += [("features", page, i) for i in range(layout.feature_page_bytes)]
    got = []
    for block in range(stream.num_blocks):
        size = 0
        for segment in stream.segments(block):
            assert segment.at == size
            got += [(segment.plane, segment.page_index, i) for i in range(segment.lo, segment.hi)]
            size += segment.hi - segment.lo
        assert 0 < size == stream.block_size(block) <= layout.wire.block_bytes
    assert got == expected
    assert stream.num_pages * layout.wire.page_size >= stream.num_tokens - stream.have


def page_of(stream: RoomStream, index: int) -> int:
    """The page of the stream that a segment's index names."""
    return index if index < stream.num_pages else stream.window_first + index - stream.num_pages


@given(streams())
def test_window_pages_are_those_that_rows_behind_the_prompt_may_read(stream: RoomStream) -> None:
    wire = stream.layout.wire
    first_row = max(0, stream.num_tokens - wire.window_margin) - wire.window + 1
    wanted = [
        page
        for page in range(stream.num_pages)
        if wire.window_layers and stream.have + (page + 1) * wire.page_size > max(0, first_row)
    ]
    assert list(range(stream.window_first, stream.num_pages)) == wanted


@given(streams(), st.integers(0, 40))
def test_a_block_is_ready_exactly_when_all_its_pages_are(stream: RoomStream, tokens_ready: int) -> None:
    size = stream.layout.wire.page_size

    def is_page_ready(page: int) -> bool:
        return min(stream.have + (page + 1) * size, stream.num_tokens) <= tokens_ready

    ready = 0
    while ready < stream.num_blocks and all(
        is_page_ready(page_of(stream, s.page_index)) for s in stream.segments(ready)
    ):
        ready += 1
    assert stream.ready_blocks(tokens_ready) == ready


@given(streams())
def test_landed_tokens_are_those_whose_pages_landed_completely(stream: RoomStream) -> None:
    for landed in range(stream.num_blocks + 1):
        missing = [
            page_of(stream, s.page_index)
            for block in range(landed, stream.num_blocks)
            for s in stream.segments(block)
        ]
        whole_pages = min(missing, default=stream.num_pages)
        tokens = min(stream.num_tokens, stream.have + whole_pages * stream.layout.wire.page_size)
        assert stream.landed_tokens(landed) == tokens


def test_a_page_holds_keys_and_values_of_all_layers_and_the_features() -> None:
    layout = KVLayout(make_layout())
    assert layout.kv_page_bytes == 2 * 2 * 4 * 1 * 8 * 2
    assert layout.feature_page_bytes == 4 * 16 * 2


@pytest.mark.parametrize(("num_tokens", "have"), [(8, 2), (8, 12), (8, -4), (-1, 0)])
def test_a_room_that_does_not_start_at_a_page_of_its_prompt_is_refused(num_tokens: int, have: int) -> None:
    with pytest.raises(LocalProtocolError):
        KVLayout(make_layout()).stream(num_tokens, have)


@pytest.mark.parametrize(
    ("num_layers", "num_kv_heads", "head_dim", "feature_width", "mib"),
    [
        (30, 3, 64, 1728, 1),
        (16, 8, 64, 0, 1),
        (32, 8, 128, 0, 4),
        (28, 8, 128, 0, 3.5),
        (80, 8, 128, 24576, 4),
    ],
    ids=["smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "llama-3.2-3b", "llama-3.1-70b"],
)
def test_a_block_holds_32_tokens_but_one_to_four_mib(
    num_layers: int, num_kv_heads: int, head_dim: int, feature_width: int, mib: float
) -> None:
    pages = MHALayout(
        page_size=16,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
    )
    pool = KVPool(2, pages, "meta")
    layout = layout_of(pool, model_fingerprint="f", feature_ids=[0], feature_width=feature_width)
    assert layout.block_bytes == mib * 2**20
    assert layout.block_bytes >= 4096


def test_layouts_agree_on_the_smaller_block() -> None:
    ours, theirs = make_layout(block_bytes=8192), make_layout(block_bytes=4096)
    assert agree(ours, theirs) == agree(theirs, ours) == theirs


@pytest.mark.parametrize("wanted", [[], [3], [9, 3], [3, 0, 9]], ids=str)
def test_decode_takes_the_offered_layers_that_its_head_reads_in_its_order(wanted: list[int]) -> None:
    offered = make_layout(feature_ids=[0, 3, 9], feature_width=24)
    asked = make_layout(feature_ids=wanted, feature_width=8 * len(wanted), block_bytes=8192)
    common = agree(offered, asked)
    assert (common.feature_ids, common.feature_width) == (wanted, 8 * len(wanted))
    assert agree(common, asked) == common, "decode finds the same in prefill's answer"
    columns = feature_columns(offered, common)
    assert columns is None if not wanted else [offered.feature_ids[c] for c in columns or ()] == wanted


@pytest.mark.parametrize("wanted", [([1], 8), ([0, 1], 16), ([0], 16), ([], 8), ([0], 0)], ids=str)
def test_features_that_prefill_does_not_offer_are_refused(wanted: tuple[list[int], int]) -> None:
    offered = make_layout(feature_ids=[0, 3, 9], feature_width=24)
    with pytest.raises(HandshakeRefused, match="features"):
        agree(offered, make_layout(feature_ids=wanted[0], feature_width=wanted[1]))
    with pytest.raises(HandshakeRefused, match="features"):
        agree(make_layout(feature_ids=[], feature_width=0), make_layout())


def test_weights_of_another_hash_are_refused_once_both_know_theirs() -> None:
    one, other, unknown = (make_layout(weights_hash=text) for text in ("a" * 64, "b" * 64, ""))
    assert agree(one, one) == agree(one, unknown) == agree(unknown, other) == unknown
    with pytest.raises(HandshakeRefused, match="weights differ"):
        agree(one, other)


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "e" * 64},
        {"dtype": "float32"},
        {"page_size": 8},
        {"num_layers": 3},
        {"num_kv_heads": 2},
        {"head_dim": 16},
        {"feature_width": 32},
        {"digest": "xxh3"},
    ],
)
def test_layouts_that_differ_are_refused_with_both_in_one_line(change: dict[str, object]) -> None:
    for ours, theirs in ((make_layout(), make_layout(**change)), (make_layout(**change), make_layout())):
        with pytest.raises(HandshakeRefused) as refusal:
            agree(ours, theirs)
        text = str(refusal.value)
        assert "\n" not in text
        for value in change.values():
            assert str(value)[:16] in text


def test_equal_layouts_of_an_unknown_kind_are_refused() -> None:
    for change in ({"dtype": "int3"}, {"digest": "none"}):
        with pytest.raises(HandshakeRefused):
            agree(make_layout(**change), make_layout(**change))


@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_digest_names_its_block_and_sees_every_flipped_bit(payload: bytes, data: st.DataObject) -> None:
    digest = block_digest("a" * 32, 1, 2, memoryview(payload))
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    flipped = bytearray(payload)
    flipped[bit // 8] ^= 1 << bit % 8
    assert digest != block_digest("a" * 32, 1, 2, memoryview(bytes(flipped)))
    assert digest != block_digest("b" * 32, 1, 2, memoryview(payload))
    assert digest != block_digest("a" * 32, 2, 2, memoryview(payload))
    assert digest != block_digest("a" * 32, 1, 3, memoryview(payload))
