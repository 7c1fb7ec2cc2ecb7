"""Attention of a decode step, with equally many rows per request. Each forward plans it once from device
tensors.

Legend: B requests, N rows each, P planned pages per request, W columns of a tree mask.
"""

from functools import cache, partial

import torch

from ..kernels.attention_form import PLAIN_FORM, AttentionForm
from ..kernels.invariant_attention import Rows
from ..kernels.kv_store import store_kv
from ..kernels.normed_linear import UnscaledRows
from ..kernels.ops import recorded_invariant_attention, recorded_paged_verify, recorded_store_kv
from ..kernels.rotary_product import rotary_product
from ..kernels.rotate_store import HeadNorms, rotate_store
from ..kernels.verify_attention import VerifyColumns, attend_verify_columns, verify_columns
from .errors import LifecycleError
from .kv.pool import KVPool


class RowPlan:
    """The storage slots and the visible rows of one forward. Each layer calls `attend`.

    `rows` int64 `[B*N]` are those of `kv_rows`. `page_table` is int64 `[B, P]`, `kv_lens` int64 `[B]`, and
    `tree_mask` None or bool `[B, N, W]`, all on the device. `is_recorded`: a graph records the forward, so
    each replay must read these tensors anew. Otherwise a CPU gathers row numbers and masks once for all
    layers. `is_invariant`: attention is batch-invariant.

    The constructor and `attend` raise LifecycleError if the shapes are inconsistent, if a tensor was written
    after planning, or if a layer passes another number of rows.
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
        self.pool = pool
        self.rows = rows
        self.page_table = page_table
        self.kv_lens = kv_lens
        self.tree_mask = tree_mask
        self.is_invariant = is_invariant
        self._scale = pool.layout.scale
        count = page_table.shape[0]
        masks = count if tree_mask is None else tree_mask.shape[0]
        if not (kv_lens.shape[0] == masks == count and rows.shape[0] % max(count, 1) == 0):
            raise LifecycleError(
                f"{rows.shape[0]} rows, {count} rows of pages, {kv_lens.shape[0]} lengths and {masks} masks "
                "do not make equally many rows per request"
            )
        self._written = self._versions()
        is_gathered = not (is_recorded or is_invariant or rows.is_cuda) and rows.shape[0] > 0
        gather = partial(self._gather, rows.shape[0] // max(count, 1))
        self._columns_of = cache(gather) if is_gathered else None  # by window

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        """Stores `k` and `v` of `layer` and attends.

        `q` is `[B*N, heads, D]`, `k` and `v` are `[B*N, kv heads, D]`, and the result is `[B*N, heads, D]`.
        """
        self.check(q.shape[0])
        pool = self.pool
        grouped = self._by_request(q)
        if self._columns_of is not None:
            store_kv(pool.kv, layer, self.rows, k, v)
            columns, scale = self._columns_of(form.window), form.scale or self._scale
            return attend_verify_columns(grouped, pool.kv, layer, columns, scale, form).reshape(q.shape)
        recorded_store_kv(pool.kv, layer, self.rows, k, v)
        return self._read(layer, q, form)

    def rotate_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """As `attend`, with the heads of q, k and v side by side in `heads` `[B*N, heads + 2 * kv heads, D]`,
        before `norms` and their rotation by the tables `cos` and `sin` `[B*N, R]`. For CUDA.
        """
        self.check(heads.shape[0])
        rotated = rotate_store(self.pool.kv, layer, self.rows, heads, cos, sin, norms)
        return self._read(layer, rotated, form)

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
        """As `rotate_attend` with the heads that `weight` and `bias` make of `rows`, where `can_rotate`."""
        self.check(rows.z.shape[0])
        q = rotary_product(self.pool.kv, layer, self.rows, rows, weight, bias, cos, sin)
        return self._read(layer, q, form)

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        return self.attend(layer, q, k, v, form)

    def _read(self, layer: int, q: torch.Tensor, form: AttentionForm) -> torch.Tensor:
        """Attends with `q` `[B*N, heads, D]` over the stored keys and values."""
        kv, grouped = self.pool.kv, self._by_request(q)
        scale = form.scale or self._scale
        if self.is_invariant:
            rows = Rows(self.kv_lens, uniform=grouped.shape[1], tree_mask=self.tree_mask)
            return recorded_invariant_attention(q, kv, layer, self.page_table, rows, scale, form)
        return recorded_paged_verify(
            grouped, kv, layer, self.page_table, self.kv_lens, scale, self.tree_mask, form
        ).view(q.shape)

    def _by_request(self, q: torch.Tensor) -> torch.Tensor:
        """`[B*N, heads, D]` -> `[B, N, heads, D]`; B may be 0."""
        count = self.page_table.shape[0]
        return q.reshape(count, q.shape[0] // max(count, 1), *q.shape[1:])

    def check(self, num_rows: int) -> None:
        """Raises LifecycleError unless the plan has `num_rows` rows and its tensors are unchanged."""
        if num_rows != self.rows.shape[0]:
            raise LifecycleError(f"attention was planned for {self.rows.shape[0]} rows and got {num_rows}")
        if self._versions() != self._written:
            raise LifecycleError(
                "rows, pages, lengths or mask were changed in place behind their plan; plan after the last "
                "change"
            )

    def _versions(self) -> tuple[int, ...]:
        parts = (self.rows, self.page_table, self.kv_lens, self.tree_mask)
        return tuple(0 if part is None else part._version for part in parts)

    def _gather(self, num_rows: int, window: int) -> VerifyColumns:
        num_pages = max(-(-int(self.kv_lens.max()) // self.pool.page_size), 1)
        columns = verify_columns(
            self.pool.kv,
            self.page_table[:, :num_pages],
            self.kv_lens,
            num_rows,
            self.tree_mask,
            window,
            dtype=self.pool.row_dtype,
        )
        has_idle = self.tree_mask is not None or not bool((self.kv_lens >= num_rows).all())
        return columns if has_idle else columns._replace(is_blind=None)

    def __repr__(self) -> str:
        return f"<RowPlan {self.page_table.shape[0]} requests, {self.rows.shape[0]} rows>"
