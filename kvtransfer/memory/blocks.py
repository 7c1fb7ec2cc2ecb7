"""Reads blocks from prefill's pages and writes them into decode's pages.

numpy copies pages on the CPU and releases the interpreter lock. Pages on a GPU go through pinned staging
memory on a separate stream, see `DeviceCopies`. Every copy first waits for its pages: the `PageOrder` of the
planes knows the forwards that may still use them.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from ...cluster.errors import LocalProtocolError
from ...engine.kv.layouts import PageRows
from ...engine.kv.page_order import PageOrder
from ..protocol.layout import Crc, KVLayout, Plane, Segment, StreamRows
from ..protocol.seal import TAG_BYTES, BlockName, Sealer
from ..transport import Planes, PullRequest
from .copy_pool import CopyPool, copy_pool_of_host
from .pinning import Bytes, Pin, no_pin, pin

MAX_SPARE_STAGING = 16
Columns = tuple[int, ...] | None  # positions of the feature layers that travel; None: whole rows
CACHED_BYTES = 256 << 10  # source and target together fit a level 2 cache of 1 MiB


def check_planes(layout: KVLayout, planes: Planes) -> None:
    """Raises LocalProtocolError unless the planes are contiguous uint8 tensors with the layout's page sizes.

    Planes on a GPU also need a `PageOrder`.
    """
    if planes.kv.is_cuda and planes.order is None:
        raise LocalProtocolError(
            "pages on a GPU need a PageOrder: copies must know the forwards that use them"
        )
    _check_plane("kv", planes.kv, layout.kv_page_bytes)
    if planes.window is not None:
        _check_plane("window", planes.window, layout.window_page_bytes)
    elif layout.window_page_bytes:
        raise LocalProtocolError("the layout has window pages, and there is no plane of them")
    if planes.features is not None:
        _check_plane("feature", planes.features, layout.feature_page_bytes)


def _check_plane(name: str, plane: torch.Tensor, page_bytes: int) -> None:
    if (
        plane.dtype != torch.uint8
        or plane.dim() != 2
        or plane.shape[1] != page_bytes
        or not plane.is_contiguous()
    ):
        given = f"{plane.dtype} {list(plane.shape)}"
        raise LocalProtocolError(
            f"the {name} plane must be contiguous uint8 [num_pages, {page_bytes}], not {given}"
        )


class StagingPool:
    """Reusable buffers of `block_bytes` bytes, in pinned memory if they feed a GPU."""

    def __init__(self, block_bytes: int, *, is_pinned: bool) -> None:
        self._block_bytes = block_bytes
        self._is_pinned = is_pinned
        self._spare: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return f"StagingPool(spare={len(self._spare)})"

    def take(self) -> torch.Tensor:
        """A uint8 buffer `[block_bytes]` with undefined content."""
        if self._spare:
            return self._spare.pop()
        return torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back for reuse."""
        if len(self._spare) < MAX_SPARE_STAGING:
            self._spare.append(buffer)


class DeviceCopies:
    """Copies between a GPU's pages and pinned memory, on a separate stream.

    On the compute stream, each block would wait for all forwards launched before it, and forwards are
    launched ahead. On this stream, blocks move while forwards run. The stream waits only for forwards that
    may use the pages of a block.
    """

    def __init__(self, device: torch.device, order: PageOrder) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._order = order

    def __repr__(self) -> str:
        return f"DeviceCopies({self._stream})"

    def run(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]], pages: Iterable[int]) -> None:
        """Copies each (target, source) of `copies` after the work that uses `pages`.

        Returns when all copies are done.
        """
        self.begin(copies, pages)
        self.finish()

    def begin(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]], pages: Iterable[int]) -> None:
        """As `run`, but returns at once; the contents are defined after `finish`."""
        self._order.wait(pages, self._stream)
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def finish(self) -> None:
        """Returns when all begun copies are done."""
        self._stream.synchronize()


@dataclass(frozen=True)
class Filling:
    """A block of `size` bytes to copy into a slot.

    Its digest continues `seed`; `columns` and `rows` as in `BlockReader.read`.
    """

    slot: Bytes
    segments: Sequence[Segment]
    pages: Sequence[int]
    size: int
    seed: int
    columns: Columns = None
    rows: StreamRows | None = None


@dataclass(frozen=True)
class Arrival:
    """A block in memory that the peer may change.

    Its digest continues `seed`; a good copy has digest `digest`. `rows` as in `BlockWriter.write`.
    """

    data: Bytes
    segments: Sequence[Segment]
    request: PullRequest
    seed: int
    digest: int
    rows: StreamRows | None = None


@dataclass(frozen=True)
class Payload:
    """The bytes of a block, in the pages themselves (`staging` None) or in a staging buffer to recycle after
    the send.
    """

    data: memoryview
    staging: torch.Tensor | None


class BlockReader:
    """Reads blocks from prefill's planes."""

    def __init__(self, layout: KVLayout, planes: Planes) -> None:
        check_planes(layout, planes)
        self._planes: dict[Plane, torch.Tensor] = {"kv": planes.kv}
        if planes.features is not None:
            self._planes["features"] = planes.features
        if planes.window is not None:
            self._planes["window"] = planes.window
        self._num_pages = planes.kv.shape[0]
        self._page_size, self._num_features = layout.wire.page_size, len(layout.wire.feature_ids)
        self._is_cuda = planes.kv.is_cuda
        self._order = planes.order or PageOrder(_num_pages(planes))
        self._copies = DeviceCopies(planes.kv.device, self._order) if self._is_cuda else None
        self._arrays: dict[Plane, Bytes] = (
            {} if self._is_cuda else {k: t.numpy() for k, t in self._planes.items()}
        )
        self._pool = StagingPool(layout.wire.block_bytes + TAG_BYTES, is_pinned=self._is_cuda)
        self._copy_pool = copy_pool_of_host() if self._is_cuda else CopyPool(1)
        self.crc: Crc = self._copy_pool.crc
        self.pin: Pin = partial(pin, device=planes.kv.device, is_read_only=False) if self._is_cuda else no_pin

    def read(
        self,
        segments: Sequence[Segment],
        pages: Sequence[int],
        size: int,
        columns: Columns = None,
        rows: StreamRows | None = None,
    ) -> Payload:
        """The `size` bytes of a block; zero-copy if they are one run of CPU memory.

        `columns`: the feature layers in the block, as positions in the plane's row, in the block's order.
        None: whole rows. `rows`: the bytes of each KV page that the segments count. None: all of them.
        """
        if not self._is_cuda:
            self._order.wait(_pages_of(segments, pages))
        if len(segments) == 1 and not self._is_cuda:
            return Payload(self._run(segments[0], pages, columns, rows).data, None)
        staging = self._pool.take()
        target = staging.numpy()
        if self._is_cuda:
            self._gather_cuda(staging, segments, pages, columns, rows)
        else:
            for segment in segments:
                np.copyto(_cut(target, segment), self._run(segment, pages, columns, rows))
        return Payload(target[:size].data, staging)

    def fill(self, fillings: Sequence[Filling], *, is_pinned: bool = False) -> list[int]:
        """Copies blocks into their slots and returns their digests, in order.

        With `is_pinned`, the slots are registered by `pin`: the GPU writes all of them in one batch, and each
        thread of the copy pool digests whole blocks.
        """
        if not is_pinned:
            return [self._fill(filling) for filling in fillings]
        assert self._copies is not None
        for filling in fillings:
            target = _tensor_of(filling.slot)
            pairs = self._gathered(target, filling.segments, filling.pages, filling.columns, filling.rows)
            self._copies.begin(pairs, _pages_of(filling.segments, filling.pages))
        self._copies.finish()
        return self._copy_pool.digests(
            [(filling.slot[: filling.size].data, filling.seed) for filling in fillings], self.crc
        )

    def _fill(self, filling: Filling) -> int:
        target, seed = filling.slot, filling.seed
        if self._is_cuda:
            staging = self._pool.take()
            self._gather_cuda(staging, filling.segments, filling.pages, filling.columns, filling.rows)
            self._copy_pool.copy(target, staging.numpy()[: filling.size])
            self._pool.give(staging)
            return self.crc(target[: filling.size].data, seed)
        self._order.wait(_pages_of(filling.segments, filling.pages))
        for segment in filling.segments:
            source = self._run(segment, filling.pages, filling.columns, filling.rows)
            seed = _copy(source, _cut(target, segment), seed, self.crc)
        return seed

    def seal(self, payload: Payload, sealer: Sealer, name: BlockName) -> tuple[Payload, int]:
        """The ciphertext and tag of a block in a staging buffer, and the attempt.

        Recycles the buffer of `payload`.

        Raises LocalProtocolError when the nonces of the block are used up.
        """
        staging = self._pool.take()
        sealed = staging.numpy()[: name.size + TAG_BYTES].data
        attempt = sealer.seal(name, payload.data, sealed)
        if payload.staging is not None:
            self._pool.give(payload.staging)
        return Payload(sealed, staging), attempt

    def recycle(self, staging: torch.Tensor) -> None:
        """Takes back the staging buffer of a sent payload."""
        self._pool.give(staging)

    def _run(
        self, segment: Segment, pages: Sequence[int], columns: Columns, rows: StreamRows | None
    ) -> Bytes:
        page = pages[segment.page_index]
        self._order.touch(page, is_write=False)
        if columns is not None and segment.plane == "features":
            return self._taken(segment, pages, columns).numpy()
        array, row = self._arrays[segment.plane], self._row(segment, page)
        if cut := part_of(segment, rows):
            run: Bytes = np.empty(segment.hi - segment.lo, dtype=np.uint8)
            plane = array[row].reshape(cut.num_rows, cut.row_bytes)
            for one in cut.rectangles(segment.lo, segment.hi):
                part = run[one.at : one.at + one.num_bytes].reshape(one.shape)
                np.copyto(part, plane[one.first_row : one.end_row, one.lo : one.hi])
            return run
        return array[row, segment.lo : segment.hi]

    def _row(self, segment: Segment, page: int) -> int:
        """The row of `page` in its plane."""
        return page - self._num_pages if segment.plane == "window" else page

    def _gather_cuda(
        self,
        staging: torch.Tensor,
        segments: Sequence[Segment],
        pages: Sequence[int],
        columns: Columns,
        rows: StreamRows | None,
    ) -> None:
        assert self._copies is not None
        copies = self._gathered(staging, segments, pages, columns, rows)
        self._copies.run(copies, _pages_of(segments, pages))

    def _gathered(
        self,
        staging: torch.Tensor,
        segments: Sequence[Segment],
        pages: Sequence[int],
        columns: Columns,
        rows: StreamRows | None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) of each segment.

        On a GPU, iterate on the copy stream: sources may be computed there.
        """
        for segment in segments:
            plane, row = self._planes[segment.plane], self._row(segment, pages[segment.page_index])
            if cut := part_of(segment, rows):
                yield from _row_pairs(plane[row], segment, cut, staging)
                continue
            if columns is not None and segment.plane == "features":
                source = self._taken(segment, pages, columns)
            else:
                source = plane[row, segment.lo : segment.hi]
            yield staging[segment.at : segment.at + segment.hi - segment.lo], source

    def _taken(self, segment: Segment, pages: Sequence[int], columns: tuple[int, ...]) -> torch.Tensor:
        """Bytes [lo, hi) of a feature page reduced to the layers `columns`, as a copy of whole rows cut to
        size.
        """
        page = self._planes["features"][pages[segment.page_index]]
        layers = page.view(self._page_size, self._num_features, -1)
        row_bytes = len(columns) * layers.shape[2]
        first, end = segment.lo // row_bytes, -(-segment.hi // row_bytes)
        rows = torch.cat([layers[first:end, column] for column in columns], dim=1)
        return rows.view(-1)[segment.lo - first * row_bytes : segment.hi - first * row_bytes]


class BlockWriter:
    """Writes checked blocks into the pages and feature rows of a `PullRequest`."""

    def __init__(self, layout: KVLayout, planes: Planes) -> None:
        check_planes(layout, replace(planes, features=None))
        self._planes: dict[Plane, torch.Tensor] = {"kv": planes.kv}
        if planes.window is not None:
            self._planes["window"] = planes.window
        self._num_pages = planes.kv.shape[0]
        self._order = planes.order or PageOrder(_num_pages(planes))
        self._copies = DeviceCopies(planes.kv.device, self._order) if planes.kv.is_cuda else None
        self._arrays: dict[Plane, Bytes] = (
            {} if planes.kv.is_cuda else {name: plane.numpy() for name, plane in self._planes.items()}
        )
        self._pool = StagingPool(layout.wire.block_bytes, is_pinned=planes.kv.is_cuda)
        self._copy_pool = copy_pool_of_host() if planes.kv.is_cuda else CopyPool(1)
        self.crc: Crc = self._copy_pool.crc
        self.pin: Pin = (
            partial(pin, device=planes.kv.device, is_read_only=True) if planes.kv.is_cuda else no_pin
        )

    def write(
        self,
        payload: memoryview,
        segments: Sequence[Segment],
        request: PullRequest,
        rows: StreamRows | None = None,
    ) -> None:
        """Copies a block into its segments. Returns when the bytes are in place.

        `rows`: the bytes of each KV page that the segments count. None: all of them.
        """
        data: Bytes = np.frombuffer(payload, dtype=np.uint8)
        if self._copies is not None:
            staging = self._pool.take()
            self._copy_pool.copy(staging.numpy(), data)
            self._scatter_cuda(staging, segments, request, rows)
            self._pool.give(staging)
            return
        self._order.wait(_pages_of(segments, request.pages))
        for segment in segments:
            self._put(data, segment, request, rows)

    def land(self, arrivals: Sequence[Arrival], *, is_pinned: bool = False) -> list[bool]:
        """Copies blocks from memory that the peer may still change.

        Returns for each whether the copy matches its digest.

        With `is_pinned`, the memory is registered by `pin`: the GPU reads all blocks in one batch, and the
        digests are computed afterwards on the source. A change made before or during the GPU's read is still
        visible then.
        """
        if not is_pinned:
            return [self._land(arrival) for arrival in arrivals]
        assert self._copies is not None
        for one in arrivals:
            pairs = self._scattered(_tensor_of(one.data), one.segments, one.request, one.rows)
            self._copies.begin(pairs, _pages_of(one.segments, one.request.pages))
        self._copies.finish()
        digests = self._copy_pool.digests([(one.data.data, one.seed) for one in arrivals], self.crc)
        return [digest == one.digest for digest, one in zip(digests, arrivals, strict=True)]

    def _land(self, arrival: Arrival) -> bool:
        data, seed = arrival.data, arrival.seed
        if self._copies is not None:
            staging = self._pool.take()
            self._copy_pool.copy(staging.numpy(), data)
            is_right = self.crc(staging.numpy()[: data.size].data, seed) == arrival.digest
            if is_right:
                self._scatter_cuda(staging, arrival.segments, arrival.request, arrival.rows)
            self._pool.give(staging)
            return is_right
        self._order.wait(_pages_of(arrival.segments, arrival.request.pages))
        if any(part_of(segment, arrival.rows) for segment in arrival.segments):
            return self._land_rows(arrival)
        for segment in arrival.segments:
            seed = _copy(_cut(data, segment), self._own(segment, arrival.request), seed, self.crc)
        return seed == arrival.digest

    def _land_rows(self, arrival: Arrival) -> bool:
        """As `_land`, for a part of each page: the digest is that of a copy, which then goes there."""
        copy = arrival.data.copy()
        is_right = self.crc(copy.data, arrival.seed) == arrival.digest
        for segment in arrival.segments if is_right else ():
            self._put(copy, segment, arrival.request, arrival.rows)
        return is_right

    def open(
        self,
        fill: Callable[[memoryview], None],
        size: int,
        segments: Sequence[Segment],
        request: PullRequest,
        rows: StreamRows | None = None,
    ) -> None:
        """As `write`, for `size` bytes that `fill` writes into the buffer passed to it.

        Passes on errors of `fill`.

        A block that is one run of CPU memory is filled in place, so its bytes may be garbage until `fill`
        returns.
        """
        if len(segments) == 1 and self._copies is None and not part_of(segments[0], rows):
            self._order.wait(_pages_of(segments, request.pages))
            fill(self._own(segments[0], request).data)
            return
        staging = self._pool.take()
        try:
            buffer = staging.numpy()[:size].data
            fill(buffer)
            if self._copies is None:
                self.write(buffer, segments, request, rows)
            else:
                self._scatter_cuda(staging, segments, request, rows)
        finally:
            self._pool.give(staging)

    def _put(self, data: Bytes, segment: Segment, request: PullRequest, rows: StreamRows | None) -> None:
        """Copies the segment's bytes of a block on the CPU into its page."""
        cut = part_of(segment, rows)
        if cut is None:
            np.copyto(self._own(segment, request), _cut(data, segment))
            return
        self._order.touch(request.pages[segment.page_index], is_write=True)
        page = self._arrays[segment.plane][self._row(segment, request)]
        plane = page.reshape(cut.num_rows, cut.row_bytes)
        for one in cut.rectangles(segment.lo, segment.hi):
            part = data[segment.at + one.at : segment.at + one.at + one.num_bytes].reshape(one.shape)
            np.copyto(plane[one.first_row : one.end_row, one.lo : one.hi], part)

    def _own(self, segment: Segment, request: PullRequest) -> Bytes:
        """As `_target`, as a numpy array: on the CPU, a view of a tensor costs several times a view of an
        array.
        """
        self._order.touch(request.pages[segment.page_index], is_write=True)
        if segment.plane in self._arrays:
            return self._arrays[segment.plane][self._row(segment, request), segment.lo : segment.hi]
        return self._target(segment, request).numpy()

    def _row(self, segment: Segment, request: PullRequest) -> int:
        """The row of a segment's page in its plane."""
        page = request.pages[segment.page_index]
        return page - self._num_pages if segment.plane == "window" else page

    def _target(self, segment: Segment, request: PullRequest) -> torch.Tensor:
        if segment.plane in self._planes:
            return self._planes[segment.plane][self._row(segment, request), segment.lo : segment.hi]
        assert request.features is not None, "the room brought its feature rows"
        return request.features[segment.page_index, segment.lo : segment.hi]

    def _scatter_cuda(
        self,
        staging: torch.Tensor,
        segments: Sequence[Segment],
        request: PullRequest,
        rows: StreamRows | None,
    ) -> None:
        """Copies a block that lies whole in `staging` to its segments."""
        assert self._copies is not None
        copies = self._scattered(staging, segments, request, rows)
        self._copies.run(copies, _pages_of(segments, request.pages))

    def _scattered(
        self,
        staging: torch.Tensor,
        segments: Sequence[Segment],
        request: PullRequest,
        rows: StreamRows | None,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for segment in segments:
            if cut := part_of(segment, rows):
                page = self._planes[segment.plane][self._row(segment, request)]
                for source, target in _row_pairs(page, segment, cut, staging):
                    yield target, source
                continue
            yield self._target(segment, request), staging[segment.at : segment.at + segment.hi - segment.lo]


def part_of(segment: Segment, rows: StreamRows | None) -> PageRows | None:
    """The bytes of a page of KV that the segment counts; None if it counts those of the whole page."""
    cut = None if rows is None else rows.of(segment.plane)
    return None if cut is None or cut.is_whole else cut


def _row_pairs(
    page: torch.Tensor, segment: Segment, rows: PageRows, staging: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(bytes of the block, bytes of the page) of each rectangle of a segment, with equal shapes."""
    plane = page.view(rows.num_rows, rows.row_bytes)
    for one in rows.rectangles(segment.lo, segment.hi):
        begin = segment.at + one.at
        block = staging[begin : begin + one.num_bytes].view(one.shape)
        yield block, plane[one.first_row : one.end_row, one.lo : one.hi]


def _num_pages(planes: Planes) -> int:
    """Pages and window pages."""
    return planes.kv.shape[0] + (0 if planes.window is None else planes.window.shape[0])


def _pages_of(segments: Sequence[Segment], pages: Sequence[int]) -> list[int]:
    """The pages of a block's segments."""
    return [pages[segment.page_index] for segment in segments]


def _tensor_of(array: Bytes) -> torch.Tensor:
    """The same memory as a tensor, which torch does not know to be read-only where the array is."""
    address = array.__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_uint8 * array.size).from_address(address), dtype=torch.uint8)


def _copy(source: Bytes, target: Bytes, seed: int, crc: Crc) -> int:
    """Copies and digests piece by piece, while each piece is in the CPU cache.

    Returns the digest of the copy.
    """
    for at in range(0, source.size, CACHED_BYTES):
        piece = target[at : at + CACHED_BYTES]
        np.copyto(piece, source[at : at + CACHED_BYTES])
        seed = crc(piece.data, seed)
    return seed


def _cut(data: Bytes, segment: Segment) -> Bytes:
    return data[segment.at : segment.at + segment.hi - segment.lo]
