"""Attention over a pool with window pages: each layer attends to the kind of pages that has its KV.

Two backends of one kind run in turn, one for each kind of pages. Pages and slots of windowed layers are those
of the batch, mapped through the pool's table, once for all layers of a forward.
"""

from dataclasses import dataclass, replace

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ..batch.forward_batch import ForwardBatch
from ..graphs.errors import GraphError
from ..kv.window_pool import WindowedPool
from ..models.layers import Attend, More, Read, RotatingAttend
from ..windowed_rows import AttendByLayer
from .backend import PagedAttention
from .metadata import AttentionMetadata, contents_of, context_slots, plan
from .places import RequestPlaces


@dataclass(frozen=True, kw_only=True)
class WindowedMetadata(AttentionMetadata):
    """The plan of a batch, and `windowed`, that of the same batch over window pages."""

    windowed: AttentionMetadata


class WindowedAttention:
    """The `AttentionBackend` of models with windows, over `pool`. `kind`, `scale` and `max_context` as in
    `PagedAttention`.
    """

    def __init__(
        self,
        pool: WindowedPool,
        kind: type[PagedAttention],
        scale: float | None = None,
        *,
        max_context: int = 0,
    ) -> None:
        self.pool = pool
        self._full = kind(pool, scale, max_context=max_context)  # of no layer, where all have windows
        self._windowed = self._full.beside(pool.part)

    def __repr__(self) -> str:
        return f"<WindowedAttention of {type(self._full).__name__}, {self.pool!r}>"

    def plan(self, batch: ForwardBatch) -> WindowedMetadata:
        """As `AttentionBackend.plan`, of both kinds of pages."""
        full, size = self._full, self.pool.page_size
        gathers = full.gathers and self.pool.layout.num_full > 0
        base = plan(batch, size, gathers=gathers, copies=full.copies(batch))
        pages, slots = self.pool.places(batch.page_table, batch.slots)
        mapped, longest = replace(batch, page_table=pages, slots=slots), max(batch.kv_lens, default=0)
        windowed = replace(
            base,
            batch=mapped,
            version=mapped.version,
            contents=contents_of(mapped),
            context_slots=context_slots(pages, base.kv_lens, longest if full.gathers else 0, size),
        )
        return WindowedMetadata(**vars(base), windowed=windowed)

    def bind(self, metadata: AttentionMetadata) -> Attend:
        """As `AttentionBackend.bind`."""
        assert isinstance(metadata, WindowedMetadata), metadata
        parts, places = self._parts(metadata), self.pool.layout.places
        attends = {is_windowed: backend.bind(part) for is_windowed, (backend, part) in parts.items()}

        def attend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
        ) -> torch.Tensor:
            metadata.check(q.shape[0])
            is_windowed, number = places[layer]
            return attends[is_windowed](number, q, k, v, form)

        return attend

    def bind_reads(self, metadata: AttentionMetadata) -> Read:
        """As `AttentionBackend.bind_reads`."""
        assert isinstance(metadata, WindowedMetadata), metadata
        parts, places = self._parts(metadata), self.pool.layout.places
        reads = {is_windowed: backend.bind_reads(part) for is_windowed, (backend, part) in parts.items()}

        def read(layer: int, q: torch.Tensor, out: torch.Tensor, *more: More) -> None:
            metadata.check(q.shape[0])
            is_windowed, number = places[layer]
            reads[is_windowed](number, q, out, *more)

        return read

    @property
    def recordable_context(self) -> int:
        """As `AttentionBackend.recordable_context`."""
        return self._full.recordable_context

    def recorded(self, places: RequestPlaces, slots: torch.Tensor) -> Attend:
        """As `AttentionBackend.recorded`. The mapping is part of the graph: each replay reads the table."""
        if not self.recordable_context:
            raise GraphError(f"{self!r} cannot be recorded; break the graph at attention")
        pages, window_slots = self.pool.places(places.page_table, slots)
        attends = {True: _recorded(self._windowed, replace(places, page_table=pages), window_slots)}
        if self.pool.layout.num_full:
            attends[False] = _recorded(self._full, places, slots)
        return AttendByLayer(self.pool.layout.places, attends)

    def _parts(self, metadata: WindowedMetadata) -> dict[bool, tuple[PagedAttention, AttentionMetadata]]:
        """(backend, plan) of each kind of pages that some layer has."""
        metadata.check(metadata.batch.num_tokens)
        is_windowed, number = self.pool.layout.places[metadata.unread]
        unread = {
            each: number if metadata.unread >= 0 and each == is_windowed else -1 for each in (False, True)
        }
        parts: dict[bool, tuple[PagedAttention, AttentionMetadata]] = {
            True: (self._windowed, replace(metadata.windowed, unread=unread[True]))
        }
        if self.pool.layout.num_full:
            parts[False] = self._full, replace(metadata, unread=unread[False])
        return parts


def _recorded(backend: PagedAttention, places: RequestPlaces, slots: torch.Tensor) -> RotatingAttend:
    found = backend.recorded(places, slots)
    assert isinstance(found, RotatingAttend), found
    return found
