"""Attention over a pool with window pages: each layer by that of its pages, decode steps by row plans."""

from collections.abc import Mapping, Sequence

import torch

from ..kernels.attention_form import PLAIN_FORM, AttentionForm
from ..kernels.kv_store import kv_rows
from ..kernels.normed_linear import UnscaledRows
from ..kernels.rotate_store import HeadNorms
from .kv.window_pool import WindowedPool
from .models.layers import RotatingAttend
from .row_attention import RowPlan


class AttendByLayer:
    """A `RotatingAttend` that passes each layer on to the one of its pages.

    `places`: (has window pages, its number among such layers) of each layer.
    """

    def __init__(self, places: Sequence[tuple[bool, int]], attends: Mapping[bool, RotatingAttend]) -> None:
        self._places = places
        self._attends = attends

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        is_windowed, number = self._places[layer]
        return self._attends[is_windowed](number, q, k, v, form)

    def rotate_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """As `RotatingAttend.rotate_attend`."""
        is_windowed, number = self._places[layer]
        return self._attends[is_windowed].rotate_attend(number, heads, cos, sin, form, norms)


class WindowedRowPlan(AttendByLayer):
    """As `RowPlan`, whose methods pass each layer on to the plan of its pages.

    `slots` int64 `[B*N]` are those of the rows, of which `rows` are the rows of `kv_rows`. The constructor
    maps slots and pages through the pool's table; a graph that records it reads the table at each replay.
    """

    def __init__(
        self,
        pool: WindowedPool,
        rows: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        tree_mask: torch.Tensor | None = None,
        *,
        is_recorded: bool,
        is_invariant: bool = False,
    ) -> None:
        pages, window_slots = pool.places(page_table, slots)
        window_rows = kv_rows(window_slots, pool.part.kv)
        self._plans = {
            True: RowPlan(
                pool.part,
                window_rows,
                pages,
                kv_lens,
                tree_mask,
                is_recorded=is_recorded,
                is_invariant=is_invariant,
            )
        }
        if pool.layout.num_full:
            self._plans[False] = RowPlan(
                pool, rows, page_table, kv_lens, tree_mask, is_recorded=is_recorded, is_invariant=is_invariant
            )
        super().__init__(pool.layout.places, self._plans)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        """As `RowPlan.attend`."""
        return self(layer, q, k, v, form)

    def project_attend(
        self,
        layer: int,
        rows: UnscaledRows,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> torch.Tensor:
        """As `RowPlan.project_attend`."""
        is_windowed, number = self._places[layer]
        return self._plans[is_windowed].project_attend(number, rows, weight, bias, cos, sin, form)

    def __repr__(self) -> str:
        return f"<WindowedRowPlan of {self._plans}>"
