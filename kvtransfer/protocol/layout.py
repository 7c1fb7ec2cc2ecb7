"""The layout of a room's KV in pages, and its cut into blocks on the wire.

The byte stream of a room holds, for each page from `have` on, the KV page and then the feature page if the
layout has features. The last page is sent whole. Between workers with window pages
(`engine.kv.window_layout`), a page whose window rows behind the prompt may read has its window page behind
the KV page. Block k is bytes [k*block_bytes, (k+1)*block_bytes) of that
stream. Both sides derive all of it from (layout, num_tokens, have), so a block needs no addresses on the
wire.

Between tensor-parallel workers each pair of ranks has a stream of its own: of each page it has the KV heads
that both ranks hold, and the features if this pair carries them (`shards`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec
import torch
from crc32c import crc32c

from ...cluster.errors import HandshakeRefused, LocalProtocolError
from ...cluster.protocol.messages import Layout
from ...engine.kv.layouts import MHALayout, PageRows
from ...engine.kv.window_sizes import first_read_page
from .rank_pairs import WHOLE, Shard, carries_features, heads_of, shared_heads

Plane = Literal["kv", "window", "features"]

Crc = Callable[[memoryview, int], int]  # (bytes, checksum of the bytes before) -> checksum

WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**WIRE_DTYPES, "float8_e4m3fn": torch.float8_e4m3fn}
DIGEST = "crc32c"


@dataclass(frozen=True)
class Segment:
    """Bytes [lo, hi) of a page in one plane, at offset `at` of the block.

    `page_index`: its place in the room's list of pages, which has those from `have` on, then window pages.
    """

    plane: Plane
    page_index: int
    lo: int
    hi: int
    at: int


class StreamRows(NamedTuple):
    """The bytes of a page of KV, and of a window page, of one rank that are in a stream."""

    kv: PageRows
    window: PageRows

    def of(self, plane: Plane) -> PageRows | None:
        """The bytes of a page in `plane`; None: pages of features travel whole."""
        return self.kv if plane == "kv" else self.window if plane == "window" else None

    @property
    def is_whole(self) -> bool:
        """Whether whole pages travel."""
        return self.kv.is_whole


@dataclass(frozen=True)
class KVLayout:
    """A `messages.Layout` with the sizes derived from it, for one rank of prefill and one of decode.

    `wire` names all KV heads, whatever the ranks. Raises LocalProtocolError for a dtype without a wire
    format, ValueError for KV heads that cannot be dealt to the ranks.
    """

    wire: Layout
    sender: Shard = WHOLE
    receiver: Shard = WHOLE

    def __post_init__(self) -> None:
        if self.wire.dtype not in KV_DTYPES:
            raise LocalProtocolError(
                f"dtype {self.wire.dtype!r} has no wire format, use one of {sorted(KV_DTYPES)}"
            )
        if self.wire.feature_width and _feature_dtype(self.wire) not in WIRE_DTYPES:
            raise LocalProtocolError(
                f"features of dtype {_feature_dtype(self.wire)!r} have no wire format, use one of "
                f"{sorted(WIRE_DTYPES)}"
            )
        if self.wire.window_layers > self.wire.num_layers:
            raise LocalProtocolError(
                f"{self.wire.window_layers} of {self.wire.num_layers} layers cannot have windows"
            )
        for shard in (self.sender, self.receiver):
            heads_of(self.wire.num_kv_heads, shard)

    @classmethod
    def of_rank(cls, wire: Layout, shard: Shard) -> "KVLayout":
        """The layout of a rank's own pages: that of a pair of equal ranks."""
        return cls(wire, sender=shard, receiver=shard)

    @cached_property
    def _heads(self) -> range:
        """The KV heads of the stream."""
        return shared_heads(self.wire.num_kv_heads, self.sender, self.receiver)

    def _rows_of(self, shard: Shard) -> StreamRows:
        w = self.wire
        dtype = KV_DTYPES[w.dtype]
        layer = MHALayout.of(w, num_layers=1, page_size=w.page_size, dtype=dtype)
        rows = layer.rows_of(heads_of(w.num_kv_heads, shard), self._heads)
        counts = w.num_layers - w.window_layers, w.window_layers
        return StreamRows(*(replace(rows, num_rows=count * rows.num_rows) for count in counts))

    @property
    def head_bytes(self) -> int:
        """Bytes of K, or V, of one token and KV head: no part of a page is cut finer."""
        return self.wire.head_dim * KV_DTYPES[self.wire.dtype].itemsize

    @cached_property
    def sender_rows(self) -> StreamRows:
        """The bytes of a page of prefill's rank that are in the stream."""
        return self._rows_of(self.sender)

    @cached_property
    def receiver_rows(self) -> StreamRows:
        """The bytes of a page of decode's rank that the stream fills."""
        return self._rows_of(self.receiver)

    @cached_property
    def name(self) -> str:
        """The name of the pair in the digests of its blocks; "" if both workers are one rank."""
        ends = (self.sender, self.receiver)
        if all(shard.num_ranks == 1 for shard in ends):
            return ""
        return "".join(f"/{shard.rank}:{shard.num_ranks}" for shard in ends)

    @cached_property
    def kv_page_bytes(self) -> int:
        """Bytes of one page of KV over all layers without window pages, of the KV heads of the stream."""
        return self.sender_rows.kv.num_bytes

    @cached_property
    def window_page_bytes(self) -> int:
        """Bytes of one window page, of the KV heads of the stream; 0 without window pages."""
        return self.sender_rows.window.num_bytes

    def tail_of(self, num_tokens: int) -> int:
        """The first page of a prompt of `num_tokens` tokens whose window page is handed over."""
        wire = self.wire
        return first_read_page(max(0, num_tokens - wire.window_margin), wire.window, wire.page_size)

    @cached_property
    def feature_page_bytes(self) -> int:
        """Bytes of one page of features in the stream; 0 without features."""
        if not self.wire.feature_width or not carries_features(self.sender, self.receiver):
            return 0
        item = WIRE_DTYPES[_feature_dtype(self.wire)].itemsize
        return self.wire.page_size * self.wire.feature_width * item

    @cached_property
    def has_features(self) -> bool:
        """Whether the stream has feature pages."""
        return self.feature_page_bytes > 0

    def stream(self, num_tokens: int, have: int) -> "RoomStream":
        """The blocks of a room.

        Raises LocalProtocolError unless `have` is a whole number of pages or the whole prompt.
        """
        return RoomStream(self, num_tokens, have)


@dataclass(frozen=True)
class RoomStream:
    """The byte stream of one room: prompt tokens [have, num_tokens) under a layout.

    Raises LocalProtocolError unless `have` is a whole number of pages or the whole prompt.
    """

    layout: KVLayout
    num_tokens: int
    have: int

    def __post_init__(self) -> None:
        if not 0 <= self.have <= self.num_tokens or self.have % self.layout.wire.page_size:
            raise LocalProtocolError(
                f"have {self.have} must be a multiple of the page size {self.layout.wire.page_size} "
                f"and at most the {self.num_tokens} tokens of the room"
            )

    @cached_property
    def plain_bytes(self) -> int:
        """Bytes of the stream per page without its window page."""
        return self.layout.kv_page_bytes + self.layout.feature_page_bytes

    @cached_property
    def window_first(self) -> int:
        """The first page of the stream with a window page; behind the last one without window pages."""
        if not self.layout.window_page_bytes:
            return self.num_pages
        first = self.layout.tail_of(self.num_tokens) - self.have // self.layout.wire.page_size
        return min(max(0, first), self.num_pages)

    @cached_property
    def num_window_pages(self) -> int:
        """Window pages of the stream: of its last pages."""
        return self.num_pages - self.window_first

    def begin_of(self, page: int) -> int:
        """The first byte of page `page` of the stream; of the page behind the last: the bytes of all."""
        return page * self.plain_bytes + max(0, page - self.window_first) * self.layout.window_page_bytes

    def pages_before(self, end: int) -> int:
        """The pages that lie wholly in the first `end` bytes. `end` in the stream: also the page that has the
        byte.
        """
        behind = end - self.begin_of(self.window_first)
        if behind < 0:
            return end // self.plain_bytes
        each = self.plain_bytes + self.layout.window_page_bytes
        return self.window_first + (behind // each if each else 0)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of every block but the last, which may be shorter."""
        return self.layout.wire.block_bytes

    @cached_property
    def num_pages(self) -> int:
        """Pages of the stream."""
        return -(-(self.num_tokens - self.have) // self.layout.wire.page_size)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the stream."""
        return self.begin_of(self.num_pages)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of the stream."""
        return -(-self.total_bytes // self.block_bytes)

    def block_size(self, block: int, count: int = 1) -> int:
        """Bytes of the blocks [block, block + count)."""
        assert 0 <= block < block + count <= self.num_blocks, f"{block} + {count} of {self.num_blocks}"
        return min((block + count) * self.block_bytes, self.total_bytes) - block * self.block_bytes

    def ready_blocks(self, tokens_ready: int) -> int:
        """Number of leading blocks that lie wholly in pages completed by the first `tokens_ready` tokens."""
        if tokens_ready >= self.num_tokens:
            return self.num_blocks
        ready_pages = max(0, tokens_ready - self.have) // self.layout.wire.page_size
        return self.begin_of(ready_pages) // self.block_bytes

    def landed_tokens(self, num_leading_blocks: int) -> int:
        """The token t: prompt tokens [have, t) are in place once blocks [0, num_leading_blocks) are."""
        if num_leading_blocks >= self.num_blocks:
            return self.num_tokens
        pages = self.pages_before(num_leading_blocks * self.block_bytes)
        return min(self.num_tokens, self.have + pages * self.layout.wire.page_size)

    def segments(self, block: int) -> tuple[Segment, ...]:
        """The segments of block `block`, in stream order and without gaps."""
        start = block * self.block_bytes
        end = start + self.block_size(block)
        return tuple(self._segments_between(start, end))

    def _segments_between(self, start: int, end: int) -> Iterator[Segment]:
        kv, window = self.layout.kv_page_bytes, self.layout.window_page_bytes
        for page in range(self.pages_before(start), self.pages_before(end - 1) + 1):
            base, behind = self.begin_of(page), page - self.window_first
            features = kv + window * (behind >= 0)
            planes: tuple[tuple[Plane, int, int, int], ...] = (
                ("kv", page, 0, kv),
                ("window", self.num_pages + behind, kv, features),
                ("features", page, features, features + self.layout.feature_page_bytes),
            )
            for plane, index, first, last in planes:
                lo = max(start, base + first)
                hi = min(end, base + last)
                if lo < hi:
                    yield Segment(plane, index, lo - base - first, hi - base - first, lo - start)


def agree(offered: Layout, wanted: Layout) -> Layout:
    """The common layout of prefill's layout `offered` and decode's layout `wanted`.

    The block size is the smaller of both. The features are the layers that decode wants, in its order: some
    of the offered layers, or none. The window margin is decode's, and at most prefill's. The weights hash
    must agree if both sides know it. All other fields must be equal. Raises HandshakeRefused, showing both
    layouts, when no common layout exists.
    """
    reason = ""
    if offered.weights_hash and wanted.weights_hash and offered.weights_hash != wanted.weights_hash:
        prefill_hash, decode_hash = offered.weights_hash[:16], wanted.weights_hash[:16]
        reason = f"weights differ: {prefill_hash!r} on prefill, {decode_hash!r} on decode; "
    common = msgspec.structs.replace(
        wanted, block_bytes=min(offered.block_bytes, wanted.block_bytes), weights_hash=""
    )
    taken = msgspec.structs.replace(
        offered,
        block_bytes=common.block_bytes,
        weights_hash="",
        feature_ids=common.feature_ids,
        feature_width=common.feature_width,
        window_margin=min(offered.window_margin, wanted.window_margin),
    )
    if reason or taken != common or not _has_features(offered, wanted):
        raise HandshakeRefused(f"{reason}KV layouts differ: prefill {_show(offered)}, decode {_show(wanted)}")
    if common.dtype not in KV_DTYPES or common.digest != DIGEST:
        raise HandshakeRefused(f"KV layout has an unknown dtype or digest: {_show(common)}")
    return common


def _feature_dtype(layout: Layout) -> str:
    return layout.feature_dtype or layout.dtype


def feature_columns(offered: Layout, common: Layout) -> tuple[int, ...] | None:
    """The feature layers that travel, as positions in `offered.feature_ids`.

    None: whole rows travel unchanged.
    """
    if common.feature_ids in ([], offered.feature_ids):
        return None
    return tuple(offered.feature_ids.index(layer) for layer in common.feature_ids)


def _has_features(offered: Layout, wanted: Layout) -> bool:
    """Whether prefill offers every layer that decode wants, with the width that decode wants."""
    if not (wanted.feature_ids and wanted.feature_width):
        return not wanted.feature_ids and not wanted.feature_width
    is_as_wide = offered.feature_width * len(wanted.feature_ids) == wanted.feature_width * len(
        offered.feature_ids
    )
    return is_as_wide and set(wanted.feature_ids) <= set(offered.feature_ids)


def block_digest(
    room: str, epoch: int, block: int, payload: memoryview, crc: Crc = crc32c, pair: str = ""
) -> int:
    """crc32c over the block's name and bytes. `pair`: the name of the pair of ranks, `KVLayout.name`.

    With the name, the intact bytes of another block do not pass, nor those of another pair.
    """
    return crc(payload, digest_seed(room, epoch, block, payload.nbytes, pair))


def digest_seed(room: str, epoch: int, block: int, size: int, pair: str = "") -> int:
    """The digest of the block's name alone; the digest of its bytes continues it."""
    return crc32c(f"{room}/{epoch}/{block}/{size}{pair}".encode())


def device_digest(room: str, epoch: int, block: int, size: int, total: int, pair: str = "") -> int:
    """The digest of a run in device memory: that of its name, and `total`, that of `kernels.move_spans`."""
    return (digest_seed(room, epoch, block, size, pair) + total) % (1 << 32)


def _show(layout: Layout) -> str:
    """One short line; `!r` keeps a peer's text from breaking it."""
    return (
        f"[fingerprint {layout.fingerprint[:16]!r} {layout.dtype[:16]!r} page {layout.page_size} layers "
        f"{layout.num_layers} kv heads {layout.num_kv_heads} head dim {layout.head_dim} features "
        f"{layout.feature_ids} x {layout.feature_width} windows of {layout.window_layers} layers "
        f"{layout.window}+{layout.window_margin} block {layout.block_bytes} {layout.digest[:16]!r}]"
    )
