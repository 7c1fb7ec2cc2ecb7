"""Cuts a run of a room's byte stream into spans of memory for a `Device`.

One page of the stream is cut alike in every room: the KV page, then the feature page, or its pieces where
only some feature layers travel. numpy clips these pieces for all pages of a run at once. Where only some KV
heads travel, the piece of the KV page is a part of each of its rows (`kernels.move_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...engine.kv.layouts import PageRows
from ...kernels.move_rows import ROW_FIELDS
from ...kernels.move_spans import ALIGNMENT, SPAN_FIELDS, WORD_BYTES
from ..protocol.layout import KVLayout, RoomStream
from ..protocol.session import SendBlock
from ..transport import Planes, PullRequest
from .device import Spans
from .slab import SlabError

Columns = tuple[int, ...] | None  # as in `blocks.BlockReader.read`
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunPlaces:
    """The memory of a run, in pieces by offset: its address, its offset in the run and its size, in bytes.

    Where KV heads are cut out of pages, pieces are rows: `row_bytes` of each, and `strides` from row to row.
    """

    addresses: Numbers
    offsets: Numbers
    sizes: Numbers
    row_bytes: Numbers | None = None
    strides: Numbers | None = None

    def part(self, start: int, end: int) -> "RunPlaces":
        """The bytes [start, end) of the run as a run of their own."""
        if self.row_bytes is not None:
            return _cut_rows(self, start, end)
        first = int(np.searchsorted(self.offsets, start, side="right")) - 1
        last = int(np.searchsorted(self.offsets, end, side="left"))
        low = np.maximum(self.offsets[first:last], start)
        high = np.minimum(self.offsets[first:last] + self.sizes[first:last], end)
        return RunPlaces(self.addresses[first:last] + low - self.offsets[first:last], low - start, high - low)

    def gather(self, slot: int) -> Spans:
        """The spans from the pieces into the slot at address `slot`."""
        return self._spans(self.addresses, slot + self.offsets, (self.strides, self.row_bytes))

    def scatter(self, slot: int) -> Spans:
        """The spans from the slot at address `slot` into the pieces."""
        return self._spans(slot + self.offsets, self.addresses, (self.row_bytes, self.strides))

    def _spans(
        self, sources: Numbers, targets: Numbers, strides: tuple[Numbers | None, Numbers | None]
    ) -> Spans:
        num_fields = SPAN_FIELDS if self.row_bytes is None else ROW_FIELDS
        spans = np.empty((len(self.sizes), num_fields), dtype=np.int64)
        spans[:, 0], spans[:, 1] = sources, targets
        spans[:, 2], spans[:, 3] = self.sizes // WORD_BYTES, self.offsets // WORD_BYTES
        for field, numbers in enumerate((self.row_bytes, *strides), start=SPAN_FIELDS):
            if numbers is not None:
                spans[:, field] = numbers // WORD_BYTES
        return spans


@dataclass(frozen=True)
class PlaneBase:
    """A plane as an address: page i begins at `address` + i * `page_bytes`."""

    address: int
    page_bytes: int

    @classmethod
    def of(cls, plane: torch.Tensor) -> "PlaneBase":
        """Of uint8 `[num_pages, page_bytes]`, contiguous. Raises SlabError if it is not aligned."""
        address, page_bytes = plane.data_ptr(), plane.shape[1]
        if address % ALIGNMENT or page_bytes % ALIGNMENT:
            raise SlabError(
                f"pages of {page_bytes} bytes at {address:#x} are not aligned to {ALIGNMENT} bytes"
            )
        return cls(address, page_bytes)


class SpanCutter:
    """The pieces of one page of the stream, under the common layout of a pair."""

    def __init__(
        self, layout: KVLayout, rows: PageRows, *, num_features: int = 0, columns: Columns = None
    ) -> None:
        """`rows`: the bytes of a KV page here that are in the stream.

        `columns`: positions of the layers that travel, of the `num_features` layers in prefill's rows. None:
        whole rows. Raises SlabError if a piece or a block is not aligned.
        """
        # plane, offset in the stream's page, in the plane's, size
        pieces = [(0, 0, rows.first, layout.kv_page_bytes)]
        if layout.has_features and columns is None:
            pieces.append((1, layout.kv_page_bytes, 0, layout.feature_page_bytes))
        elif layout.has_features and columns is not None:
            pieces += _column_pieces(layout, num_features, columns)
        table = np.array(pieces, dtype=np.int64)
        if (table[:, 1:] % ALIGNMENT).any() or layout.wire.block_bytes % ALIGNMENT:
            size = f"pages of {layout.kv_page_bytes} and {layout.feature_page_bytes} bytes in blocks of"
            raise SlabError(f"{size} {layout.wire.block_bytes} are not aligned to {ALIGNMENT} bytes")
        self._is_feature = table[:, 0] == 1
        self._in_unit, self._in_page, self._sizes = table[:, 1], table[:, 2], table[:, 3]
        self._row_bytes = self._strides = None
        if not rows.is_whole:
            if rows.size % ALIGNMENT or rows.row_bytes % ALIGNMENT:
                raise SlabError(f"KV heads of {rows.size} bytes are not aligned to {ALIGNMENT} bytes")
            self._row_bytes, self._strides = self._sizes.copy(), self._sizes.copy()
            self._row_bytes[0], self._strides[0] = rows.size, rows.row_bytes

    def __repr__(self) -> str:
        return f"SpanCutter(pieces={len(self._sizes)})"

    def places(
        self,
        stream: RoomStream,
        block: int,
        count: int,
        kv: tuple[PlaneBase, Sequence[int]],
        features: tuple[PlaneBase, Sequence[int]] | None,
    ) -> RunPlaces:
        """The memory of the blocks [block, block + count).

        Each plane comes with the page in it of every page of the stream.
        """
        start = block * stream.block_bytes
        end = start + stream.block_size(block, count)
        first, last = start // stream.unit_bytes, -(-end // stream.unit_bytes)
        pages = _page_addresses(*kv, first, last)[:, None] + self._in_page
        if features is not None:
            feature_pages = _page_addresses(*features, first, last)[:, None] + self._in_page
            pages = np.where(self._is_feature, feature_pages, pages)
        begins = np.arange(first, last, dtype=np.int64)[:, None] * stream.unit_bytes + self._in_unit
        if self._row_bytes is not None and self._strides is not None:
            num_pages = last - first
            whole = RunPlaces(
                pages.reshape(-1),
                begins.reshape(-1) - start,
                np.tile(self._sizes, num_pages),
                np.tile(self._row_bytes, num_pages),
                np.tile(self._strides, num_pages),
            )
            return whole.part(0, end - start)
        low, high = np.maximum(begins, start), np.minimum(begins + self._sizes, end)
        is_inside = low < high
        addresses = (pages + low - begins)[is_inside]
        return RunPlaces(addresses, low[is_inside] - start, (high - low)[is_inside])


class SenderPages:
    """Prefill's planes as memory of runs."""

    def __init__(self, layout: KVLayout, planes: Planes) -> None:
        """Raises SlabError if the planes are not aligned."""
        self._kv = PlaneBase.of(planes.kv)
        self._features = None if planes.features is None else PlaneBase.of(planes.features)
        self._num_features = len(layout.wire.feature_ids)
        # of the last common layout of each pair of ranks
        self._cutters: dict[tuple[Columns, str], tuple[KVLayout, SpanCutter]] = {}

    def places(self, item: SendBlock) -> RunPlaces:
        """The memory of the run `item`."""
        layout, pages = item.stream.layout, item.pages[item.first_page :]
        known = self._cutters.get((item.columns, layout.name))
        if known is None or known[0] is not layout:
            num_features, columns = self._num_features, item.columns
            cutter = SpanCutter(layout, layout.sender_rows, num_features=num_features, columns=columns)
            known = self._cutters[columns, layout.name] = (layout, cutter)
        features = (self._features, pages) if self._features is not None and layout.has_features else None
        return known[1].places(item.stream, item.block, item.count, (self._kv, pages), features)


class ReceiverPages:
    """Decode's pages, and the feature rows of its requests, as memory of runs."""

    def __init__(self, planes: Planes) -> None:
        """Raises SlabError if the pages are not aligned."""
        self._kv = PlaneBase.of(planes.kv)
        # of the last common layout of each pair of ranks
        self._cutters: dict[str, tuple[KVLayout, SpanCutter]] = {}

    def places(self, stream: RoomStream, request: PullRequest) -> RunPlaces:
        """The memory of all blocks of a room."""
        layout = stream.layout
        known = self._cutters.get(layout.name)
        if known is None or known[0] is not layout:
            known = self._cutters[layout.name] = (layout, SpanCutter(layout, layout.receiver_rows))
        features = None
        if request.features is not None and layout.has_features:
            features = (PlaneBase.of(request.features), range(len(request.pages)))
        return known[1].places(stream, 0, stream.num_blocks, (self._kv, request.pages), features)


def is_aligned(layout: KVLayout) -> bool:
    """Whether every run under `layout`, with any of its KV heads and features, can be cut into spans."""
    wire = layout.wire
    layer_bytes = layout.feature_page_bytes // (wire.page_size * max(1, len(wire.feature_ids)))
    return not any(n % ALIGNMENT for n in (layout.head_bytes, layer_bytes, wire.block_bytes))


def pages_of_run(stream: RoomStream, block: int, count: int, pages: Sequence[int]) -> Sequence[int]:
    """The pages of the blocks [block, block + count), of all `pages` of the stream."""
    start = block * stream.block_bytes
    end = start + stream.block_size(block, count)
    return pages[start // stream.unit_bytes : -(-end // stream.unit_bytes)]


def _cut_rows(run: RunPlaces, start: int, end: int) -> RunPlaces:
    """The bytes [start, end) of a run whose pieces are rows.

    Only the first and the last piece may begin or end within a row, and are cut into up to three.
    """
    assert run.row_bytes is not None
    assert run.strides is not None
    first = int(np.searchsorted(run.offsets, start, side="right")) - 1
    last = int(np.searchsorted(run.offsets, end, side="left"))
    columns = np.stack([run.addresses, run.offsets, run.sizes, run.row_bytes, run.strides], axis=1)[
        first:last
    ]
    edges = sorted({0, len(columns) - 1})
    cut = {edge: _cut_piece(columns[edge].tolist(), start, end) for edge in edges}
    parts = [cut[0], columns[1:-1]] + ([cut[edges[-1]]] if len(edges) > 1 else [])
    table = np.concatenate(parts)
    return RunPlaces(table[:, 0], table[:, 1] - start, table[:, 2], table[:, 3], table[:, 4])


def _cut_piece(piece: Sequence[int], start: int, end: int) -> Numbers:
    """The bytes [start, end) of the run in one piece; each part: address, offset, size, row bytes, stride."""
    address, offset, size, row_bytes, stride = piece
    rows = PageRows(num_rows=size // row_bytes, row_bytes=stride, first=0, size=row_bytes)
    lo, hi = max(0, start - offset), min(size, end - offset)
    cut = [
        (address + one.first_row * stride + one.lo, offset + lo + one.at, one.num_bytes, one.shape[1], stride)
        for one in rows.rectangles(lo, hi)
    ]
    return np.array(cut, dtype=np.int64).reshape(-1, 5)


def _page_addresses(base: PlaneBase, pages: Sequence[int], first: int, last: int) -> Numbers:
    return base.address + np.array(pages[first:last], dtype=np.int64) * base.page_bytes


def _column_pieces(
    layout: KVLayout, num_features: int, columns: tuple[int, ...]
) -> list[tuple[int, int, int, int]]:
    """The pieces of a feature page of which only `columns` travel; neighbours in a row are one piece."""
    num_tokens, num_taken = layout.wire.page_size, len(columns)
    width = layout.feature_page_bytes // (num_tokens * num_taken)  # bytes of one layer of one token
    groups: list[tuple[int, int, int]] = []  # first column there, first column here, number
    for place, column in enumerate(columns):
        if groups and groups[-1][1] + groups[-1][2] == column:
            groups[-1] = (*groups[-1][:2], groups[-1][2] + 1)
        else:
            groups.append((place, column, 1))
    return [
        (
            1,
            layout.kv_page_bytes + (token * num_taken + there) * width,
            (token * num_features + here) * width,
            number * width,
        )
        for token in range(num_tokens)
        for there, here, number in groups
    ]
