"""Attention of a decode step over latents, with equally many rows per request; see `row_attention`.

All rows attend absorbed, see `kernels.latent_attention`. Legend: B requests, N rows each, P planned pages per
request, W columns of a tree mask.
"""

import torch

from ..kernels.attention_form import PLAIN_FORM, AttentionForm
from ..kernels.latent_attention import absorb, project_values
from ..kernels.latent_ops import recorded_latent_verify, recorded_store_latent
from ..kernels.latent_step import LatentRows, LatentSizes, attend_latents, prepare_latents
from .errors import LifecycleError
from .kv.layouts import MLALayout
from .kv.pool import KVPool
from .row_attention import RowPlan


class LatentRowPlan(RowPlan):
    """A `RowPlan` over a pool of latents.

    Raises LifecycleError as `RowPlan`, and for batch-invariant attention, which there is none of.
    """

    def __init__(
        self,
        pool: KVPool,
        rows: torch.Tensor,
        page_table: torch.Tensor,
        kv_lens: torch.Tensor,
        tree_mask: torch.Tensor | None = None,
        *,
        is_recorded: bool,
        is_invariant: bool = False,
    ) -> None:
        if is_invariant:
            raise LifecycleError("attention over latents is not batch-invariant")
        assert isinstance(pool.layout, MLALayout), pool.layout
        # recorded: the base gathers no columns
        super().__init__(pool, rows, page_table, kv_lens, tree_mask, is_recorded=True)
        self._layout = pool.layout

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        """Stores the latents `k` `[B*N, 1, R+P]` of `layer` and attends with `q` `[B*N, heads, F+P]` and the
        projection `v` `[heads, F+V, R]` -> `[B*N, heads, V]`, with the names of `kernels.latent_attention`.
        """
        self.check(q.shape[0])
        kv, layout = self.pool.kv, self._layout
        recorded_store_latent(kv, layer, self.rows, k)
        absorbed = absorb(q, v, layout.rope_size)
        grouped = self._by_request(absorbed)
        found = recorded_latent_verify(
            grouped, kv, layer, self.page_table, self.kv_lens, layout.scale, layout.rank, self.tree_mask
        )
        key_size = q.shape[-1] - layout.rope_size
        return project_values(found.flatten(0, 1), v, v.shape[1] - key_size)

    def latent_attend(
        self, layer: int, rows: LatentRows, up: torch.Tensor, sizes: LatentSizes
    ) -> torch.Tensor:
        """As `attend`, with queries and latents `[B*N, ...]` in front of norm and rotation, see
        `kernels.latent_step`.
        """
        self.check(rows.latent.shape[0])
        kv, scale = self.pool.kv, self._layout.scale
        q = prepare_latents(kv, layer, self.rows, rows, up, sizes)
        return attend_latents(q, kv, layer, self.page_table, self.kv_lens, scale, up, sizes, self.tree_mask)
