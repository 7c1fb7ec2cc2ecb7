"""The spans of a run of blocks, word by word, against the segments that the layout says."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from baton.cluster.protocol.messages import Layout
from baton.kernels.move_rows import ROW_FIELDS
from baton.kernels.move_spans import MODULUS, RUN_FIELDS
from baton.kvtransfer.memory.device import longest_of, run_digests, run_table
from baton.kvtransfer.memory.span_cutter import PlaneBase, SpanCutter
from baton.kvtransfer.protocol.layout import KVLayout, Plane, RoomStream, StreamRows
from baton.kvtransfer.protocol.rank_pairs import Shard

SLOT = 7 << 40
NUM_TOKENS = 26
BASES: dict[Plane, int] = {"kv": 1 << 40, "window": 2 << 40, "features": 3 << 40}
TAKEN = (0, 1, 3)  # columns of the feature layers that travel, of four
LAYER_BYTES = 128  # of a token; all four layers of a page are larger than its KV
PAIRS = [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 2), (2, 4))]


def layout(*, window_layers: int, num_features: int, block_bytes: int) -> Layout:
    return Layout(
        fingerprint="f", dtype="bfloat16", page_size=4, num_layers=3, num_kv_heads=4, head_dim=8,
        window_layers=window_layers, window=6 * bool(window_layers), feature_ids=list(range(num_features)),
        feature_width=LAYER_BYTES // 2 * num_features, block_bytes=block_bytes,
    )  # fmt: skip


def page_bytes(rows: StreamRows) -> dict[Plane, int]:
    """Bytes of a whole page of one rank, and of a feature page with all four layers."""
    return {
        "kv": rows.kv.num_rows * rows.kv.row_bytes,
        "window": rows.window.num_rows * rows.window.row_bytes,
        "features": 4 * 4 * LAYER_BYTES,
    }


def words_of_run(
    stream: RoomStream, rows: StreamRows, pages: list[int], blocks: range, *, is_cut: bool
) -> Iterator[int]:
    """The address of each word of the blocks in the pages, as `RoomStream.segments` says."""
    size = page_bytes(rows)
    for block in blocks:
        for segment in stream.segments(block):
            base = BASES[segment.plane] + pages[segment.page_index] * size[segment.plane]
            part = rows.of(segment.plane)
            for byte in range(segment.lo, segment.hi, 4):
                if part is not None:
                    row, column = divmod(byte, part.size)
                    yield base + row * part.row_bytes + part.first + column
                elif is_cut:
                    layer, column = divmod(byte, LAYER_BYTES)
                    token, place = divmod(layer, len(TAKEN))
                    yield base + (4 * token + TAKEN[place]) * LAYER_BYTES + column
                else:
                    yield base + byte


def words_of_spans(spans: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Source, target and number of each word that the spans move."""
    for source, target, num_words, first, *steps in spans.tolist():
        row_words, *strides = steps or (num_words, num_words, num_words)
        for word in range(num_words):
            row, column = divmod(word, row_words)
            yield (
                source + 4 * (row * strides[0] + column),
                target + 4 * (row * strides[1] + column),
                first + word,
            )


@pytest.mark.parametrize("is_write", [False, True])
@pytest.mark.parametrize("features", ["none", "all", "some"])
@pytest.mark.parametrize("window_layers", [0, 1])
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
@pytest.mark.parametrize("block_bytes", [1040, 4096])
def test_the_spans_of_any_run_are_those_of_its_segments(
    sender, receiver, window_layers, features, is_write, block_bytes
):
    num_features = {"none": 0, "all": 4, "some": len(TAKEN)}[features]
    wire = layout(window_layers=window_layers, num_features=num_features, block_bytes=block_bytes)
    pair = KVLayout(wire, Shard(*sender), Shard(*receiver))
    rows = pair.receiver_rows if is_write else pair.sender_rows
    is_cut = features == "some"
    cutter = SpanCutter(pair, rows, num_features=4, columns=TAKEN if is_cut else None)
    stream = pair.stream(NUM_TOKENS, 4)
    pages = random.Random(5).sample(range(99), stream.num_pages + stream.num_window_pages)
    own = {
        "kv": pages[: stream.num_pages],
        "window": pages[stream.num_pages :],
        "features": pages[: stream.num_pages],
    }
    size = page_bytes(rows)
    bases = {plane: (PlaneBase(BASES[plane], size[plane]), own[plane]) for plane in BASES}
    places = cutter.places(stream, bases, is_write=is_write)
    for first in range(stream.num_blocks):
        for end in range(first + 1, stream.num_blocks + 1):
            start = first * stream.block_bytes
            spans = places.spans(start, start + stream.block_size(first, end - first), SLOT)
            moved = list(words_of_spans(spans))
            in_pages = list(words_of_run(stream, rows, pages, range(first, end), is_cut=is_cut))
            in_slot = [SLOT + 4 * number for number in range(len(in_pages))]
            ends = (in_slot, in_pages) if is_write else (in_pages, in_slot)
            assert moved == list(zip(*ends, range(len(in_pages)), strict=True))
            assert longest_of([spans]) <= places.longest
    assert (spans.shape[1] == ROW_FIELDS) == (not rows.is_whole)
    assert longest_of([places.table]) == places.longest


def test_each_run_of_a_move_has_its_own_spans_and_its_own_digest():
    rng = random.Random(3)
    for _ in range(50):
        parts = [[rng.randrange(MODULUS) for _ in range(7)] for _ in range(rng.randint(1, 5))]
        assert run_digests(np.array(parts)) == [sum(part) % MODULUS for part in parts]
        counts = [rng.randint(1, 9) for _ in parts]
        runs = np.array(run_table(counts, 6)).reshape(-1, RUN_FIELDS).tolist()
        assert [number for begin, count, *_ in runs for number in range(begin, begin + count)] == list(
            range(sum(counts))
        )
        assert [(chunks, rest) for *_, chunks, rest in runs] == [(6, 0)] * len(parts)
