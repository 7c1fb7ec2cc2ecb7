"""Cuts a run of a room's byte stream into spans of memory for a `Device`.

One page of the stream is cut alike in every room: the KV page, then the feature page, or its pieces where
only some feature layers travel; between both the window page, if the page has one in the stream. numpy clips
these pieces for all pages of a run at once. Where only some KV heads travel, the piece of a page of KV is a
part of each of its rows (`kernels.move_rows`).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...engine.kv.layouts import PageRows
from ...kernels.move_rows import ROW_FIELDS
from ...kernels.move_spans import ALIGNMENT, WORD_BYTES
from ..protocol.layout import KVLayout, Plane, RoomStream, StreamRows
from ..protocol.session import SendBlock
from ..transport import Planes, PullRequest
from .device import Spans
from .slab import SlabError

Columns = tuple[int, ...] | None  # as in `blocks.BlockReader.read`
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RunPlaces:
    """The memory of a run, as one table that is made before the run is computed, and cut when it is moved.

    `table`: the spans of all pieces, in the order of the run, between them and a slot at address 0.
    `bounds`: the byte of the run at which each piece begins, and the end of the last one. `longest`: words of
    the largest piece. `is_write`: the spans lead into the pieces.
    """

    table: Spans
    bounds: Sequence[int]
    longest: int
    is_write: bool

    def spans(self, start: int, end: int, slot: int) -> Spans:
        """The spans of the bytes [start, end) of the run, for the slot at address `slot`."""
        first, last = bisect_right(self.bounds, start) - 1, bisect_left(self.bounds, end)
        spans = self.table[first:last].copy()
        spans[:, 0 if self.is_write else 1] += slot - start
        spans[:, 3] -= start // WORD_BYTES
        before, behind = start - self.bounds[first], self.bounds[last] - end
        return _cut(spans, before, behind) if before or behind else spans  # mostly whole pieces


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


Bases = Mapping[Plane, tuple[PlaneBase, Sequence[int]]]  # each plane, and the row there of each page


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one page of the stream; with `row_bytes` and `strides`, if KV heads are cut out of
    pages.
    """

    planes: tuple[Plane, ...]
    in_unit: Numbers
    in_page: Numbers
    sizes: Numbers
    row_bytes: Numbers
    strides: Numbers


class SpanCutter:
    """The pieces of one page of the stream, under the common layout of a pair."""

    def __init__(
        self, layout: KVLayout, rows: StreamRows, *, num_features: int = 0, columns: Columns = None
    ) -> None:
        """`rows`: the bytes of a page of KV here that are in the stream.

        `columns`: positions of the layers that travel, of the `num_features` layers in prefill's rows. None:
        whole rows. Raises SlabError if a piece or a block is not aligned.
        """
        self._has_rows = not rows.is_whole
        self._plain = self._cut(layout, rows, num_features, columns, has_window=False)
        self._windowed = self._cut(layout, rows, num_features, columns, has_window=True)

    def _cut(
        self, layout: KVLayout, rows: StreamRows, num_features: int, columns: Columns, *, has_window: bool
    ) -> _Pieces:
        """The pieces of a page with, or without, its window page."""
        # plane, offset in the stream's page, in the plane's, size
        kv, window = layout.kv_page_bytes, layout.window_page_bytes * has_window
        pieces: list[tuple[Plane, int, int, int]] = []
        if kv:
            pieces.append(("kv", 0, rows.kv.first, kv))
        if window:
            pieces.append(("window", kv, rows.window.first, window))
        if layout.has_features and columns is None:
            pieces.append(("features", kv + window, 0, layout.feature_page_bytes))
        elif layout.has_features and columns is not None:
            pieces += _column_pieces(layout, kv + window, num_features, columns)
        table = np.array([piece[1:] for piece in pieces], dtype=np.int64).reshape(-1, 3)
        if (table % ALIGNMENT).any() or layout.wire.block_bytes % ALIGNMENT:
            size = f"pages of {kv}, {window} and {layout.feature_page_bytes} bytes in blocks of"
            raise SlabError(f"{size} {layout.wire.block_bytes} are not aligned to {ALIGNMENT} bytes")
        row_bytes, strides = table[:, 2].copy(), table[:, 2].copy()
        if self._has_rows:
            if rows.kv.size % ALIGNMENT or rows.kv.row_bytes % ALIGNMENT:
                raise SlabError(f"KV heads of {rows.kv.size} bytes are not aligned to {ALIGNMENT} bytes")
            for at, piece in enumerate(pieces):
                if piece[0] != "features":
                    row_bytes[at], strides[at] = rows.kv.size, rows.kv.row_bytes
        planes = tuple(piece[0] for piece in pieces)
        return _Pieces(planes, table[:, 0], table[:, 1], table[:, 2], row_bytes, strides)

    def __repr__(self) -> str:
        return f"SpanCutter(pieces={len(self._plain.planes)}, {len(self._windowed.planes)})"

    def places(self, stream: RoomStream, bases: Bases, *, is_write: bool) -> RunPlaces:
        """The memory of all blocks of the stream; `is_write`: as in `RunPlaces`.

        Each plane comes with the page in it of every page of the stream that has one: the last ones, for
        window pages.
        """
        parts = [
            self._placed(self._plain, stream, bases, 0, stream.window_first),
            self._placed(self._windowed, stream, bases, stream.window_first, stream.num_pages),
        ]
        addresses, offsets, sizes, row_bytes, strides = (
            np.concatenate(each) for each in zip(*parts, strict=True)
        )
        ends = (offsets, addresses) if is_write else (addresses, offsets)
        fields = [*ends, sizes // WORD_BYTES, offsets // WORD_BYTES]
        if self._has_rows:
            steps = (row_bytes, strides) if is_write else (strides, row_bytes)
            fields += [each // WORD_BYTES for each in (row_bytes, *steps)]
        table, bounds = np.stack(fields, axis=1), [*offsets.tolist(), stream.total_bytes]
        return RunPlaces(table, bounds, int(table[:, 2].max(initial=0)), is_write)

    def _placed(
        self, pieces: _Pieces, stream: RoomStream, bases: Bases, first: int, last: int
    ) -> tuple[Numbers, ...]:
        """Addresses, offsets in the stream, sizes, row bytes and strides of all pieces of some pages."""
        count, pages = last - first, np.arange(first, last, dtype=np.int64)
        behind = np.maximum(pages - stream.window_first, 0)
        starts = pages * stream.plain_bytes + behind * stream.layout.window_page_bytes
        addresses = np.empty((count, len(pieces.planes)), dtype=np.int64)
        for at, plane in enumerate(pieces.planes):
            base, rows = bases[plane]
            skipped = stream.window_first if plane == "window" else 0
            addresses[:, at] = _page_addresses(base, rows, first - skipped, last - skipped)
        return (
            (addresses + pieces.in_page).reshape(-1),
            (starts[:, None] + pieces.in_unit).reshape(-1),
            *(np.tile(each, count) for each in (pieces.sizes, pieces.row_bytes, pieces.strides)),
        )


class SenderPages:
    """Prefill's planes as memory of runs."""

    def __init__(self, layout: KVLayout, planes: Planes) -> None:
        """Raises SlabError if the planes are not aligned."""
        self._kv = PlaneBase.of(planes.kv)
        self._window = None if planes.window is None else PlaneBase.of(planes.window)
        self._num_pages = planes.kv.shape[0]
        self._features = None if planes.features is None else PlaneBase.of(planes.features)
        self._num_features = len(layout.wire.feature_ids)
        # of the last common layout of each pair of ranks
        self._cutters: dict[tuple[Columns, str], tuple[KVLayout, SpanCutter]] = {}

    def places(self, item: SendBlock) -> RunPlaces:
        """The memory of all blocks of the room of `item`."""
        layout, stream = item.stream.layout, item.stream
        known = self._cutters.get((item.columns, layout.name))
        if known is None or known[0] is not layout:
            num_features, columns = self._num_features, item.columns
            cutter = SpanCutter(layout, layout.sender_rows, num_features=num_features, columns=columns)
            known = self._cutters[columns, layout.name] = (layout, cutter)
        pages, parts = item.pages[: stream.num_pages], item.pages[stream.num_pages :]
        bases: dict[Plane, tuple[PlaneBase, Sequence[int]]] = {"kv": (self._kv, pages)}
        if self._window is not None:
            bases["window"] = self._window, [page - self._num_pages for page in parts]
        if self._features is not None:
            bases["features"] = self._features, pages
        return known[1].places(stream, bases, is_write=False)


class ReceiverPages:
    """Decode's pages, and the feature rows of its requests, as memory of runs."""

    def __init__(self, planes: Planes) -> None:
        """Raises SlabError if the pages are not aligned."""
        self._kv = PlaneBase.of(planes.kv)
        self._window = None if planes.window is None else PlaneBase.of(planes.window)
        self._num_pages = planes.kv.shape[0]
        # of the last common layout of each pair of ranks
        self._cutters: dict[str, tuple[KVLayout, SpanCutter]] = {}

    def places(self, stream: RoomStream, request: PullRequest) -> RunPlaces:
        """The memory of all blocks of a room."""
        layout = stream.layout
        known = self._cutters.get(layout.name)
        if known is None or known[0] is not layout:
            known = self._cutters[layout.name] = (layout, SpanCutter(layout, layout.receiver_rows))
        pages, parts = request.pages[: stream.num_pages], request.pages[stream.num_pages :]
        bases: dict[Plane, tuple[PlaneBase, Sequence[int]]] = {"kv": (self._kv, pages)}
        if self._window is not None:
            bases["window"] = self._window, [page - self._num_pages for page in parts]
        if request.features is not None and layout.has_features:
            bases["features"] = PlaneBase.of(request.features), range(stream.num_pages)
        return known[1].places(stream, bases, is_write=True)


def is_aligned(layout: KVLayout) -> bool:
    """Whether every run under `layout`, with any of its KV heads and features, can be cut into spans."""
    wire = layout.wire
    layer_bytes = layout.feature_page_bytes // (wire.page_size * max(1, len(wire.feature_ids)))
    return not any(n % ALIGNMENT for n in (layout.head_bytes, layer_bytes, wire.block_bytes))


def pages_of_run(stream: RoomStream, block: int, count: int, pages: Sequence[int]) -> Sequence[int]:
    """The pages of the blocks [block, block + count), of all `pages` of the stream, with their window
    pages.
    """
    start = block * stream.block_bytes
    end = start + stream.block_size(block, count)
    first, last = stream.pages_before(start), stream.pages_before(end - 1) + 1
    behind = stream.num_pages - stream.window_first
    return [*pages[first:last], *pages[max(first + behind, stream.num_pages) : last + behind]]


def _cut(spans: Spans, before: int, behind: int) -> Spans:
    """`spans` without the first `before` bytes of the first one, and the last `behind` bytes of the last."""
    before, behind = before // WORD_BYTES, behind // WORD_BYTES
    if spans.shape[1] == ROW_FIELDS:
        first, last = spans[0].tolist(), spans[-1].tolist()
        if len(spans) == 1:
            return _cut_rows(first, before, first[2] - behind)
        return np.concatenate(
            [_cut_rows(first, before, first[2]), spans[1:-1], _cut_rows(last, 0, last[2] - behind)]
        )
    spans[0] += np.array([before * WORD_BYTES, before * WORD_BYTES, -before, before])
    spans[-1, 2] -= behind
    return spans


def _cut_rows(span: Sequence[int], lo: int, hi: int) -> Spans:
    """The words [lo, hi) of a span of rows: at most three spans, since it may begin and end within a row."""
    source, target, num_words, first, row_words, source_stride, target_stride = span
    rows = PageRows(num_rows=num_words // row_words, row_bytes=row_words, first=0, size=row_words)  # in words
    cut = [
        (
            source + WORD_BYTES * (one.first_row * source_stride + one.lo),
            target + WORD_BYTES * (one.first_row * target_stride + one.lo),
            one.num_bytes,
            first + lo + one.at,
            one.shape[1],
            source_stride,
            target_stride,
        )
        for one in rows.rectangles(lo, hi)
    ]
    return np.array(cut, dtype=np.int64)


def _page_addresses(base: PlaneBase, pages: Sequence[int], first: int, last: int) -> Numbers:
    return base.address + np.array(pages[first:last], dtype=np.int64) * base.page_bytes


def _column_pieces(
    layout: KVLayout, begin: int, num_features: int, columns: tuple[int, ...]
) -> list[tuple[Plane, int, int, int]]:
    """The pieces of a feature page of which only `columns` travel; neighbours in a row are one piece. It
    begins at byte `begin` of the stream's page.
    """
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
            "features",
            begin + (token * num_taken + there) * width,
            (token * num_features + here) * width,
            number * width,
        )
        for token in range(num_tokens)
        for there, here, number in groups
    ]
