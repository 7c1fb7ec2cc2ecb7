"""The layout of the KV of a model with windows, in two kinds of pages.

A layer with a window reads a row's last W positions only. So its KV is needed for a few pages of a request,
and that of a layer without one for all. A page has the layers without a window. While a row may still read
it, a page has a *window page* beside it, which has the layers with one. Pages are as many as the tokens of a
request, window pages as many as W tokens. Where every layer has a window, a page has no memory of its own in
the target's pool: it is a place in a text, which draft KV and features share.

SGLang's pool for sliding windows maps the slots of full layers to those of windowed ones in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from .layouts import MHALayout, PageLayout


@dataclass(frozen=True, kw_only=True)
class WindowedLayout:
    """The pages of `whole`, the layout of all layers, cut by `windows`: tokens of each layer, 0 for none.

    As a `PageLayout` it describes a page, with the layers without a window; `part` describes a window page.
    Raises ValueError for another number of windows, or if no layer has one.
    """

    whole: MHALayout
    windows: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.whole.num_layers or not any(self.windows):
            raise ValueError(
                f"windows {list(self.windows)} of {self.whole.num_layers} layers: one for each is needed, "
                "some of them not 0"
            )

    @cached_property
    def window(self) -> int:
        """W, the longest window: a row at position p reads no windowed KV before p - W + 1."""
        return max(self.windows)

    @cached_property
    def places(self) -> tuple[tuple[bool, int], ...]:
        """Of each layer: whether its KV lies in window pages, and its number among the layers there."""
        counts, found = [0, 0], []
        for window in self.windows:
            found.append((window > 0, counts[window > 0]))
            counts[window > 0] += 1
        return tuple(found)

    @property
    def num_full(self) -> int:
        """Layers without a window."""
        return self.windows.count(0)

    @property
    def num_windowed(self) -> int:
        """Layers with a window."""
        return len(self.windows) - self.num_full

    @cached_property
    def part(self) -> MHALayout:
        """The layout of window pages."""
        return self._with_layers(self.num_windowed)

    @property
    def page_size(self) -> int:
        return self.whole.page_size

    @property
    def num_layers(self) -> int:
        return self.whole.num_layers

    @property
    def token_layers(self) -> int:
        return self.num_full

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def planes(self) -> tuple[str, ...]:
        return self.whole.planes

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (self.num_full, *self.whole.page_shape[1:])

    @property
    def elements_per_token(self) -> int:
        return self.whole.elements_per_token // self.num_layers * self.num_full

    @property
    def bytes_per_token(self) -> int:
        return self.elements_per_token * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token

    @property
    def scale(self) -> float:
        return self.whole.scale

    @property
    def wire_heads(self) -> tuple[int, int]:
        return self.whole.wire_heads

    def shard(self, num_ranks: int) -> "WindowedLayout":
        """As `MHALayout.shard`, of both kinds of pages."""
        return WindowedLayout(whole=self.whole.shard(num_ranks), windows=self.windows)

    def _with_layers(self, num_layers: int) -> MHALayout:
        whole = self.whole
        return MHALayout(
            page_size=whole.page_size,
            num_layers=num_layers,
            num_kv_heads=whole.num_kv_heads,
            head_dim=whole.head_dim,
            dtype=whole.dtype,
        )


def windowed_layout(layout: PageLayout, windows: Sequence[int]) -> WindowedLayout | None:
    """The layout of pages and window pages for a model with `layout` and `windows` of its layers.

    None if no layer has a window, or if the layout is no plain `MHALayout`.
    """
    if not any(windows) or type(layout) is not MHALayout:
        return None
    return WindowedLayout(whole=layout, windows=tuple(windows))
