"""The layout of a model's KV in a page: the one home of every size derived from it.

A page holds `page_size` tokens of all layers as one contiguous byte range. A layout is made once, from the
model's config. The pool, the attention plan, the wire format and the sizing of a worker use it. `MHALayout`
is the layout of attention with K and V per KV head (multi-head, grouped-query, multi-query), `MLALayout` that
of attention over latents (multi-head latent attention).
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True, kw_only=True)
class PageRows:
    """A part of a page: of each of its `num_rows` rows of `row_bytes`, the bytes [`first`, `first` + `size`).

    Read in order, the part is a byte stream of its own, `num_bytes` long.
    """

    num_rows: int
    row_bytes: int
    first: int
    size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.num_rows * self.size

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole page."""
        return self.size == self.row_bytes

    def rectangles(self, lo: int, hi: int) -> "tuple[RowRectangle, ...]":
        """Bytes [lo, hi) of the part as at most three rectangles: a row's end, whole rows, a row's start."""
        pieces: list[RowRectangle] = []
        at = lo
        while at < hi:
            row, column = divmod(at, self.size)
            if column or hi - at < self.size:
                end = min(self.size, column + hi - at)
                pieces.append(RowRectangle(row, row + 1, self.first + column, self.first + end, at - lo))
                at += end - column
            else:
                num_rows = (hi - at) // self.size
                pieces.append(RowRectangle(row, row + num_rows, self.first, self.first + self.size, at - lo))
                at += num_rows * self.size
        return tuple(pieces)


class RowRectangle(NamedTuple):
    """Bytes [lo, hi) of each of the rows [first_row, end_row) of a page, at byte `at` of what is moved."""

    first_row: int
    end_row: int
    lo: int
    hi: int
    at: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and bytes of each."""
        return self.end_row - self.first_row, self.hi - self.lo

    @property
    def num_bytes(self) -> int:
        """Bytes of the rectangle."""
        return (self.end_row - self.first_row) * (self.hi - self.lo)


class PageLayout(Protocol):
    """The content of a page. Implementations are frozen; equal layouts have equal bytes."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""

    @property
    def num_layers(self) -> int:
        """Layers of a page; each has all `planes`."""

    @property
    def token_layers(self) -> int:
        """The first layers, those of the model: their rows belong to tokens. Others hold side caches."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every element."""

    @property
    def planes(self) -> tuple[str, ...]:
        """The values that a layer keeps of each token, in the order of the page's second axis."""

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Elements of one page: `[num_layers, len(planes), page_size, ...]`."""

    @property
    def elements_per_token(self) -> int:
        """Elements of one token over all layers and planes."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers and planes."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: `page_size` tokens."""

    @property
    def scale(self) -> float:
        """The default factor of attention scores."""

    @property
    def wire_heads(self) -> tuple[int, int]:
        """(heads, elements per head) for the handshake.

        Twice their product is the number of elements per token and layer.
        """

    def shard(self, num_ranks: int) -> "PageLayout":
        """The layout of the part of each page on one of `num_ranks` ranks.

        Raises ValueError if the page cannot be split.
        """


class KVHeads(Protocol):
    """The sizes of an MHA layout, from a model's config or a handshake."""

    @property
    def num_kv_heads(self) -> int:
        """K (or V) vectors per token and layer."""

    @property
    def head_dim(self) -> int:
        """Elements per vector."""


@dataclass(frozen=True, kw_only=True)
class MHALayout:
    """K and V of every KV head, `[num_layers, 2, page_size, num_kv_heads, head_dim]`; 2 = K, V.

    Raises ValueError for a size below 1.
    """

    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, heads: KVHeads, *, num_layers: int, page_size: int, dtype: torch.dtype) -> "MHALayout":
        """The layout of `num_layers` layers with the sizes of `heads`, such as a config."""
        return cls(
            page_size=page_size,
            num_layers=num_layers,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            dtype=dtype,
        )

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size {self.page_size}: a page holds at least 1 token")
        if min(self.num_layers, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(
                f"KV of {self.num_layers} layers x {self.num_kv_heads} KV heads x {self.head_dim}: "
                "each must be at least 1"
            )

    @property
    def token_layers(self) -> int:
        return self.num_layers

    @property
    def planes(self) -> tuple[str, ...]:
        return ("k", "v")

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (self.num_layers, len(self.planes), self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def elements_per_token(self) -> int:
        return math.prod(self.page_shape) // self.page_size

    @property
    def bytes_per_token(self) -> int:
        return self.elements_per_token * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def wire_heads(self) -> tuple[int, int]:
        return self.num_kv_heads, self.head_dim

    def shard(self, num_ranks: int) -> "MHALayout":
        """KV heads are split evenly. With fewer heads than ranks, each rank holds a copy of one head.

        Raises ValueError if neither number divides the other.
        """
        most, least = max(self.num_kv_heads, num_ranks), min(self.num_kv_heads, num_ranks)
        if num_ranks < 1 or most % least:
            raise ValueError(
                f"{self.num_kv_heads} KV heads cannot be dealt to {num_ranks} ranks; one number must divide "
                "the other"
            )
        return replace(self, num_kv_heads=max(self.num_kv_heads // num_ranks, 1))

    def rows_of(self, heads: range, part: range) -> PageRows:
        """The bytes of KV heads `part` in a page that holds the KV heads `heads` of this layout's.

        A page of a rank has a row of its heads per layer, plane and token.
        """
        assert heads.start <= part.start <= part.stop <= heads.stop, f"heads {part} of {heads}"
        head_bytes = self.head_dim * self.dtype.itemsize
        return PageRows(
            num_rows=self.num_layers * len(self.planes) * self.page_size,
            row_bytes=len(heads) * head_bytes,
            first=(part.start - heads.start) * head_bytes,
            size=len(part) * head_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class MLALayout:
    """One latent per token and layer for all heads, `[num_layers, 1, page_size, 1, rank + rope_size]`: the
    `rank` values that keys and values are made of, then the rotated key; see `kernels.latent_attention`.

    `scale`: the factor of scores, which the widths of the latent do not tell. Raises ValueError for a size
    below 1, or an odd sum of `rank` and `rope_size`.
    """

    page_size: int
    num_layers: int
    rank: int
    rope_size: int
    scale: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size {self.page_size}: a page holds at least 1 token")
        if min(self.num_layers, self.rank, self.rope_size) < 1 or self.width % 2:
            raise ValueError(
                f"latents of {self.num_layers} layers x ({self.rank} + {self.rope_size}): each must be at "
                "least 1, their sum even"
            )

    @property
    def width(self) -> int:
        """Elements of a latent."""
        return self.rank + self.rope_size

    @property
    def token_layers(self) -> int:
        return self.num_layers

    @property
    def planes(self) -> tuple[str, ...]:
        return ("latent",)

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (self.num_layers, 1, self.page_size, 1, self.width)

    @property
    def elements_per_token(self) -> int:
        return self.num_layers * self.width

    @property
    def bytes_per_token(self) -> int:
        return self.elements_per_token * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token

    @property
    def wire_heads(self) -> tuple[int, int]:
        return 1, self.width // 2

    def shard(self, num_ranks: int) -> "MLALayout":
        """Every rank holds whole pages, since all heads read the same latents.

        Raises ValueError for a number below 1.
        """
        if num_ranks < 1:
            raise ValueError(f"latents cannot be dealt to {num_ranks} ranks; use 1 or more")
        return self
