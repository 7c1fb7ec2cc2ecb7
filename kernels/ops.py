"""Operations of the torch library, each of which a full graph records as one: KV store, attention, experts,
and the products that run in blocks on a CPU.

A recorder sees operations and not the Python code around them, so each operation declares the arguments that
it mutates. Lengths and pages are tensors that are read when the operation runs, so a recorded graph follows
their values. The torch reference on CPU reads only as many pages as the longest context has, which fixed
shapes could not do. The Triton kernels on CUDA do that by themselves. On fake tensors the CUDA form runs, so
that a dry run sees its launches.

Shapes and dtypes are those of `kv_store`, `verify_attention`, `gather_context`, `context_attention`,
`invariant_attention`, `logits`, `invariant_linear`, `route_experts`, `expert_mlp`, `fp8_linear` and
`int4_linear`.
"""

from __future__ import annotations

import torch

from .attention_form import PLAIN_FORM, AttentionForm
from .context_attention import ContextKV, context_attention
from .expert_mlp import PLAIN_EXPERTS, ExpertForm, expert_mlp
from .fp8_linear import fp8_linear
from .gather_context import gather_context
from .int4_linear import int4_linear
from .invariant_attention import Rows, invariant_attention
from .invariant_linear import invariant_linear, invariant_logits
from .kv_store import store_kv
from .logits import float32_logits
from .route_experts import Routing, route_experts
from .verify_attention import paged_verify_reference, paged_verify_triton

torch.library.define("baton::store_kv", "(Tensor(a!) kv, int layer, Tensor rows, Tensor k, Tensor v) -> ()")
torch.library.define(
    "baton::paged_verify",
    "(Tensor q, Tensor kv, int layer, Tensor page_table, Tensor kv_lens, float scale, Tensor? tree_mask, "
    "int window, float softcap, Tensor? sinks) -> Tensor",
)
torch.library.define(
    "baton::gather_context",
    "(Tensor kv, int layer, Tensor page_table, Tensor kv_starts, Tensor kv_lens, Tensor(a!) keys, "
    "Tensor(b!) values) -> ()",
)
torch.library.define(
    "baton::context_attention",
    "(Tensor q, Tensor keys, Tensor values, Tensor q_starts, Tensor kv_starts, Tensor kv_lens, float scale, "
    "int window, float softcap, Tensor? sinks) -> Tensor",
)
torch.library.define(
    "baton::invariant_attention",
    "(Tensor q, Tensor kv, int layer, Tensor page_table, Tensor kv_lens, int num_rows, float scale, "
    "Tensor? tree_mask, int window, float softcap, Tensor? sinks) -> Tensor",
)
torch.library.define("baton::invariant_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.define("baton::invariant_logits", "(Tensor hidden, Tensor weight) -> Tensor")
torch.library.define("baton::float32_logits", "(Tensor hidden, Tensor weight) -> Tensor")
torch.library.define(
    "baton::route_experts",
    "(Tensor logits, Tensor? bias, int top_k, bool is_normalised, bool is_sigmoid, int num_groups, "
    "int kept_groups, int best_of_group, float scale) -> (Tensor, Tensor)",
)
torch.library.define(
    "baton::expert_mlp",
    "(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, bool is_invariant, "
    "Tensor? gate_up_bias, Tensor? down_bias, float limit, float alpha, int first, int total) -> Tensor",
)
torch.library.define(
    "baton::fp8_linear",
    "(Tensor x, Tensor weight, Tensor scales, Tensor? bias, bool is_gated, bool is_invariant) -> Tensor",
)
torch.library.define(
    "baton::int4_linear",
    "(Tensor x, Tensor weight, Tensor groups, Tensor? bias, bool is_gated, bool is_invariant) -> Tensor",
)


def _store_kv(kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    store_kv(kv, layer, rows, k, v)


torch.library.impl("baton::store_kv", ("cpu", "cuda"), _store_kv)
torch.library.register_fake("baton::store_kv", _store_kv)


@torch.library.impl("baton::paged_verify", "cpu")
def _paged_verify_cpu(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    longest = int(kv_lens.max()) if kv_lens.numel() else 0
    num_pages = max(-(-longest // kv.shape[3]), 1)
    form = AttentionForm(window, softcap, sinks)
    return paged_verify_reference(q, kv, layer, page_table[:, :num_pages], kv_lens, scale, tree_mask, form)


def _paged_verify_cuda(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    form = AttentionForm(window, softcap, sinks)
    return paged_verify_triton(q, kv, layer, page_table, kv_lens, scale, tree_mask, form=form)


torch.library.impl("baton::paged_verify", "cuda", _paged_verify_cuda)
torch.library.register_fake("baton::paged_verify", _paged_verify_cuda)


def _gather_context(
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    gather_context(kv, layer, page_table, kv_starts, kv_lens, keys, values)


def _context_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    form = AttentionForm(window, softcap, sinks)
    return context_attention(q, ContextKV(keys, values), q_starts, kv_starts, kv_lens, scale, form=form)


def _invariant_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_rows: int,
    scale: float,
    tree_mask: torch.Tensor | None,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows = Rows(kv_lens, uniform=num_rows, tree_mask=tree_mask)
    form = AttentionForm(window, softcap, sinks)
    return invariant_attention(q, kv, layer, page_table, rows, scale, form)


def _route_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    is_normalised: bool,
    is_sigmoid: bool,
    num_groups: int,
    kept_groups: int,
    best_of_group: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    routing = Routing(
        top_k=top_k,
        is_normalised=is_normalised,
        is_sigmoid=is_sigmoid,
        num_groups=num_groups,
        kept_groups=kept_groups,
        best_of_group=best_of_group,
        scale=scale,
    )
    return route_experts(logits, routing, bias)


def _expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_invariant: bool,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float,
    alpha: float,
    first: int,
    total: int,
) -> torch.Tensor:
    form = ExpertForm(gate_up_bias, down_bias, limit, alpha, first, total)
    return expert_mlp(x, ids, weights, gate_up, down, is_invariant, form)


for _name, _form in (
    ("baton::gather_context", _gather_context),
    ("baton::context_attention", _context_attention),
    ("baton::invariant_attention", _invariant_attention),
    ("baton::invariant_linear", invariant_linear),
    ("baton::invariant_logits", invariant_logits),
    ("baton::float32_logits", float32_logits),
    ("baton::route_experts", _route_experts),
    ("baton::expert_mlp", _expert_mlp),
    ("baton::fp8_linear", fp8_linear),
    ("baton::int4_linear", int4_linear),
):
    torch.library.impl(_name, ("cpu", "cuda"), _form)
    torch.library.register_fake(_name, _form)


def recorded_store_kv(
    kv: torch.Tensor, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """`kv_store.store_kv` as one operation, which mutates `kv`."""
    torch.ops.baton.store_kv.default(kv, layer, rows, k, v)


def recorded_paged_verify(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    tree_mask: torch.Tensor | None = None,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """`verify_attention.paged_verify` as one operation; returns `[B, Q, N, D]`.

    `q`: `[B, Q, N, D]`. `page_table`: int `[B, P]`. `kv_lens`: int `[B]`, 0 for an idle request, whose rows
    give zeros. `tree_mask`: None or bool `[B, Q, W]`.
    """
    out: torch.Tensor = torch.ops.baton.paged_verify.default(
        q, kv, layer, page_table, kv_lens, scale, tree_mask, form.window, form.softcap, form.sinks
    )
    return out


def recorded_gather_context(
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """`gather_context.gather_context` as one operation, which mutates `keys` and `values`."""
    torch.ops.baton.gather_context.default(kv, layer, page_table, kv_starts, kv_lens, keys, values)


def recorded_context_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """`context_attention.context_attention` as one operation; returns `[T, N, D]`."""
    out: torch.Tensor = torch.ops.baton.context_attention.default(
        q, keys, values, q_starts, kv_starts, kv_lens, scale, form.window, form.softcap, form.sinks
    )
    return out


def recorded_invariant_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    rows: Rows,
    scale: float,
    form: AttentionForm = PLAIN_FORM,
) -> torch.Tensor:
    """`invariant_attention.invariant_attention` as one operation, for uniform `rows`."""
    assert rows.starts is None, rows
    out: torch.Tensor = torch.ops.baton.invariant_attention.default(
        q,
        kv,
        layer,
        page_table,
        rows.kv_lens,
        rows.uniform,
        scale,
        rows.tree_mask,
        form.window,
        form.softcap,
        form.sinks,
    )
    return out


def recorded_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`invariant_linear.invariant_linear` as one operation."""
    out: torch.Tensor = torch.ops.baton.invariant_linear.default(x, weight, bias)
    return out


def recorded_invariant_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`invariant_linear.invariant_logits` as one operation."""
    out: torch.Tensor = torch.ops.baton.invariant_logits.default(hidden, weight)
    return out


def recorded_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`logits.float32_logits` as one operation."""
    out: torch.Tensor = torch.ops.baton.float32_logits.default(hidden, weight)
    return out


def recorded_route_experts(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_experts.route_experts` as one operation."""
    routes: tuple[torch.Tensor, torch.Tensor] = torch.ops.baton.route_experts.default(
        logits,
        bias,
        routing.top_k,
        routing.is_normalised,
        routing.is_sigmoid,
        routing.num_groups,
        routing.kept_groups,
        routing.best_of_group,
        routing.scale,
    )
    return routes


def recorded_expert_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    is_invariant: bool = False,
    form: ExpertForm = PLAIN_EXPERTS,
) -> torch.Tensor:
    """`expert_mlp.expert_mlp` as one operation, since a CPU reads which experts were chosen."""
    out: torch.Tensor = torch.ops.baton.expert_mlp.default(
        x, ids, weights, gate_up, down, is_invariant, *form
    )
    return out


def recorded_fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_invariant: bool = False,
) -> torch.Tensor:
    """`fp8_linear.fp8_linear` as one operation, so that a tape keeps no dequantised weight."""
    out: torch.Tensor = torch.ops.baton.fp8_linear.default(x, weight, scales, bias, is_gated, is_invariant)
    return out


def recorded_int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_gated: bool = False,
    is_invariant: bool = False,
) -> torch.Tensor:
    """`int4_linear.int4_linear` as one operation, so that a tape keeps no dequantised weight."""
    out: torch.Tensor = torch.ops.baton.int4_linear.default(x, weight, groups, bias, is_gated, is_invariant)
    return out
