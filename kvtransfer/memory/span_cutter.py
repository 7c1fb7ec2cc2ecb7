"""Cuts a run of a room's byte stream into spans of memory for a `Device`.

One page of the stream is cut alike in every room: the KV page, then the feature page, or its pieces where
only some feature layers travel; between both the window page, if the page has one in the stream. numpy clips
these pieces for all pages of a run at once. Where only some KV heads travel, the piece of a page of KV is a
part of each of its rows (`kernels.move_rows`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...engine.kv.layouts import PageRows
from ...kernels.move_rows import ROW_FIELDS
from ...kernels.move_spans import ALIGNMENT, SPAN_FIELDS, WORD_BYTES
from ..protocol.layout import KVLayout, Plane, RoomStream, StreamRows
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
        first = int(self.offsets.searchsorted(start, side="right")) - 1
        last = int(self.offsets.searchsorted(end))
        addresses, offsets, sizes = (each[first:last] for each in (self.addresses, self.offsets, self.sizes))
        if offsets[0] == start and offsets[-1] + sizes[-1] <= end:  # whole pieces, as of most layouts
            return RunPlaces(addresses, offsets - start, sizes)
        low, high = np.maximum(offsets, start), np.minimum(offsets + sizes, end)
        return RunPlaces(addresses + low - offsets, low - start, high - low)

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

    def places(self, stream: RoomStream, bases: Bases) -> RunPlaces:
        """The memory of all blocks of the stream.

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
        if self._has_rows:
            return RunPlaces(addresses, offsets, sizes, row_bytes, strides)
        return RunPlaces(addresses, offsets, sizes)

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
        return known[1].places(stream, bases)


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
        return known[1].places(stream, bases)


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
