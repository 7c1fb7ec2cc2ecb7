"""Breakable graphs by token count, with breaks at attention, for the prefill of target and draft.

k and v are stored inside the graph, at the slots of a static input. q and the result cross each break in one
pair of buffers of the largest bucket. All layers and buckets share it, because layers run in sequence. A pair
per layer would hold as much memory as the whole pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.latent_ops import recorded_store_latent
from ...kernels.latent_store import is_latent
from ...kernels.ops import recorded_store_kv
from ...kernels.rotate_store import HeadNorms, rotate_store
from ..kv.pool import KVPool, StoreRows
from ..models.layers import Attend, More, Read
from .breakable import Breaks, OutputT, ReplayContext
from .bucketed_graphs import GraphFamily, GraphLimits, PathDecision
from .graph_pool import GraphKind, GraphPool, NamedTensors
from .pytree import own
from .static import load_rows


@dataclass(frozen=True, kw_only=True)
class AttendContext(ReplayContext):
    """`read` is bound to the live batch and attends its `num_rows` rows."""

    read: Read


@dataclass(frozen=True, kw_only=True)
class AttentionBridge:
    """The queries and the output of attention on both sides of its break, each `[max_tokens, heads, D]`, with
    a D of their own over latents.
    """

    q: torch.Tensor
    out: torch.Tensor

    @classmethod
    def empty(
        cls,
        max_tokens: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        value_dim: int = 0,
    ) -> "AttentionBridge":
        """`value_dim`: the width of the output, by default `head_dim`, that of the queries."""
        q, out = (
            torch.zeros((max_tokens, num_heads, width), dtype=dtype, device=device)
            for width in (head_dim, value_dim or head_dim)
        )
        return cls(q=q, out=out)

    def attend(self, breaks: Breaks[AttendContext], pool: KVPool, slots: torch.Tensor) -> Attend:
        """The attention that layers call under capture.

        `pool`: of the layers' KV. `slots` int64 `[T]`: the static slots of the rows, 0 (the sink) for
        padding.
        """
        kind = _BridgedLatents if is_latent(pool.kv) else _BridgedHeads
        return kind(self, breaks.graph_break(read_real_rows), pool.store_rows(slots))


class _BridgedAttend:
    """The attention of one capture: stores inside of the graph, reads in a break.

    `read` is the break, `store_rows` says where each layer stores.
    """

    def __init__(self, bridge: AttentionBridge, read: Callable[..., None], store_rows: StoreRows) -> None:
        self._bridge = bridge
        self._read = read
        self._store_rows = store_rows

    def _queries(self, num_rows: int) -> torch.Tensor:
        """Where the queries of `num_rows` rows cross the break."""
        return self._bridge.q[:num_rows]

    def _read_across(self, layer: int, q: torch.Tensor, more: More) -> torch.Tensor:
        out = self._bridge.out[: q.shape[0]]
        self._read(layer, q, more, out=out)
        return out


class _BridgedHeads(_BridgedAttend):
    """A `RotatingAttend` over keys and values."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        kv, number, rows = self._store_rows(layer)
        recorded_store_kv(kv, number, rows, k, v)
        return self._read_across(layer, self._queries(q.shape[0]).copy_(q), form)

    def rotate_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """As `RotatingAttend.rotate_attend`. The rotated queries are written where they cross."""
        kv, number, rows = self._store_rows(layer)
        q = rotate_store(kv, number, rows, heads, cos, sin, norms, self._queries(heads.shape[0]))
        return self._read_across(layer, q, form)


class _BridgedLatents(_BridgedAttend):
    """An `Attend` over latents."""

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
    ) -> torch.Tensor:
        kv, number, rows = self._store_rows(layer)
        recorded_store_latent(kv, number, rows, latent)
        return self._read_across(layer, self._queries(q.shape[0]).copy_(q), up)


def read_real_rows(
    context: AttendContext, layer: int, q: torch.Tensor, *more: More, out: torch.Tensor
) -> None:
    """The graph break: attends the real rows with the live batch's plan."""
    n = context.num_rows
    context.read(layer, q[:n], out[:n], *more)


def read_nothing(layer: int, q: torch.Tensor, out: torch.Tensor, *more: More) -> None:
    """Replaces attention during capture, when no batch exists."""
    if out.shape == q.shape:
        out.copy_(q)
    else:
        out.zero_()


# (static inputs but the slots, cut to a bucket, attend) -> outputs, token-major
Body: TypeAlias = Callable[[Sequence[torch.Tensor], Attend], OutputT]


class TokenGraphs(Generic[OutputT]):
    """Graphs of `body` over `inputs`, static tensors `[max_tokens, ...]` by name.

    The last of them, "slots", says where in the pool `kv_pool` each row is stored.
    """

    def __init__(
        self,
        pool: GraphPool,
        kind: GraphKind,
        buckets: Sequence[int],
        *,
        inputs: dict[str, torch.Tensor],
        bridge: AttentionBridge,
        kv_pool: KVPool,
        body: Body[OutputT],
        parameters: NamedTensors,
        hidden: int = 0,
    ) -> None:
        limits = GraphLimits(is_by_token=True, hidden=hidden)
        self.family: GraphFamily[AttendContext, OutputT] = GraphFamily(pool, kind, buckets, limits)
        self.inputs = inputs
        self.bridge = bridge
        self._kv_pool = kv_pool
        self._body = body
        self._parameters = parameters

    def capture(self) -> None:
        def forward(bucket: int, breaks: Breaks[AttendContext]) -> OutputT:
            *inputs, slots = (static[:bucket] for static in self.inputs.values())
            return self._body(inputs, self.bridge.attend(breaks, self._kv_pool, slots))

        def context(bucket: int) -> AttendContext:
            return AttendContext(num_rows=bucket, read=read_nothing)

        self.family.capture(forward, context, self._parameters)

    def run(self, decision: PathDecision, values: Sequence[torch.Tensor], read: Read) -> OutputT:
        """Returns the outputs of the real rows, owned by the caller. `values` are the inputs `[n, ...]` in
        order; `read` is bound to the live batch.
        """
        for (name, static), value in zip(self.inputs.items(), values, strict=True):
            load_rows(static, value, decision.bucket, name=f"{self.family.kind.value} {name}")
        n = values[0].shape[0]
        return own(self.family.replay(decision, AttendContext(num_rows=n, read=read)), n)

    def __repr__(self) -> str:
        return f"<TokenGraphs {self.family!r}>"
