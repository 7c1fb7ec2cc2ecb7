"""How a room's KV lies in pages and how it is cut into blocks on the wire.

A room's byte stream is, for each page from `have` on: its kv page, then its feature page if the layout has features.
The last page is sent whole. Block k is bytes [k*block_bytes, (k+1)*block_bytes) of that stream. Both sides derive all
of it from (layout, num_tokens, have), so a block needs no addresses on the wire.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import msgspec
from crc32c import crc32c

from ..cluster.errors import HandshakeRefused, LocalProtocolError
from ..cluster.protocol.messages import Layout

Plane = Literal["kv", "features"]

Crc = Callable[[memoryview, int], int]  # bytes and what came before them -> checksum

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DIGEST = "crc32c"


@dataclass(frozen=True)
class Segment:
    """Bytes [lo, hi) of page `page_index` (counted from `have`) in one plane; they stand at `at` in the block."""

    plane: Plane
    page_index: int
    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class KVLayout:
    """A `messages.Layout` with the sizes that follow from it."""

    wire: Layout

    def __post_init__(self) -> None:
        if self.wire.dtype not in ITEM_BYTES:
            raise LocalProtocolError(
                f"dtype {self.wire.dtype!r} has no wire format, use one of {sorted(ITEM_BYTES)}"
            )

    @cached_property
    def kv_page_bytes(self) -> int:
        w = self.wire
        return w.num_layers * 2 * w.page_size * w.num_kv_heads * w.head_dim * ITEM_BYTES[w.dtype]

    @cached_property
    def feature_page_bytes(self) -> int:
        return self.wire.page_size * self.wire.feature_width * ITEM_BYTES[self.wire.dtype]

    @cached_property
    def has_features(self) -> bool:
        return self.wire.feature_width > 0

    def stream(self, num_tokens: int, have: int) -> "RoomStream":
        """The blocks of a room. Raises LocalProtocolError unless `have` is whole pages of the prompt, or all of it."""
        return RoomStream(self, num_tokens, have)


@dataclass(frozen=True)
class RoomStream:
    """The byte stream of one room: prompt tokens [have, num_tokens) under a layout."""

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
    def unit_bytes(self) -> int:
        """Bytes of the stream per page."""
        return self.layout.kv_page_bytes + self.layout.feature_page_bytes

    @cached_property
    def block_bytes(self) -> int:
        return self.layout.wire.block_bytes

    @cached_property
    def num_pages(self) -> int:
        return -(-(self.num_tokens - self.have) // self.layout.wire.page_size)

    @cached_property
    def total_bytes(self) -> int:
        return self.num_pages * self.unit_bytes

    @cached_property
    def num_blocks(self) -> int:
        return -(-self.total_bytes // self.block_bytes)

    def block_size(self, block: int) -> int:
        """Bytes of block `block`."""
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        return min((block + 1) * self.block_bytes, self.total_bytes) - block * self.block_bytes

    def ready_blocks(self, tokens_ready: int) -> int:
        """How many leading blocks lie wholly in pages that `tokens_ready` tokens have completed."""
        if tokens_ready >= self.num_tokens:
            return self.num_blocks
        ready_pages = max(0, tokens_ready - self.have) // self.layout.wire.page_size
        return ready_pages * self.unit_bytes // self.block_bytes

    def landed_tokens(self, num_leading_blocks: int) -> int:
        """Prompt tokens [have, ...) that are in place once blocks [0, num_leading_blocks) are."""
        if num_leading_blocks >= self.num_blocks:
            return self.num_tokens
        pages = num_leading_blocks * self.block_bytes // self.unit_bytes
        return min(self.num_tokens, self.have + pages * self.layout.wire.page_size)

    def segments(self, block: int) -> tuple[Segment, ...]:
        """Where block `block` lies, in stream order and without gaps."""
        start = block * self.block_bytes
        end = start + self.block_size(block)
        return tuple(self._segments_between(start, end))

    def _segments_between(self, start: int, end: int) -> Iterator[Segment]:
        kv = self.layout.kv_page_bytes
        planes: tuple[tuple[Plane, int, int], ...] = (("kv", 0, kv), ("features", kv, self.unit_bytes))
        for page in range(start // self.unit_bytes, -(-end // self.unit_bytes)):
            base = page * self.unit_bytes
            for plane, first, last in planes:
                lo = max(start, base + first)
                hi = min(end, base + last)
                if lo < hi:
                    yield Segment(plane, page, lo - base - first, hi - base - first, lo - start)


def agree(ours: Layout, theirs: Layout) -> Layout:
    """The layout that both sides will use. Raises HandshakeRefused, showing both, when there is none.

    The block size is the smaller one, and a feature plane that only one side has is left out; all else must be equal.
    """
    common = msgspec.structs.replace(ours, block_bytes=min(ours.block_bytes, theirs.block_bytes))
    if not (ours.feature_width and theirs.feature_width):
        common = msgspec.structs.replace(common, feature_ids=[], feature_width=0)
        theirs_common = msgspec.structs.replace(theirs, feature_ids=[], feature_width=0)
    else:
        theirs_common = theirs
    if msgspec.structs.replace(theirs_common, block_bytes=common.block_bytes) != common:
        raise HandshakeRefused(f"KV layouts differ: ours {_show(ours)}, theirs {_show(theirs)}")
    if common.dtype not in ITEM_BYTES or common.digest != DIGEST:
        raise HandshakeRefused(f"KV layout has an unknown dtype or digest: {_show(theirs)}")
    return common


def block_digest(room: str, epoch: int, block: int, payload: memoryview, crc: Crc = crc32c) -> int:
    """crc32c over the block's name and its bytes, so that another block's right bytes do not pass for this one's."""
    return crc(payload, digest_seed(room, epoch, block, payload.nbytes))


def digest_seed(room: str, epoch: int, block: int, size: int) -> int:
    """The digest of the block's name alone, which its bytes continue."""
    return crc32c(f"{room}/{epoch}/{block}/{size}".encode())


def _show(layout: Layout) -> str:
    """One short line; `!r` keeps a peer's text from breaking it."""
    return (
        f"[fingerprint {layout.fingerprint[:16]!r} {layout.dtype[:16]!r} page {layout.page_size} layers "
        f"{layout.num_layers} kv heads {layout.num_kv_heads} head dim {layout.head_dim} features "
        f"{layout.feature_ids} x {layout.feature_width} block {layout.block_bytes} {layout.digest[:16]!r}]"
    )
