"""Breakable graphs by token count, with breaks at attention, for the prefill of target and draft.

q, k and v cross each break in one set of buffers of the largest bucket. All layers and buckets share it,
because layers run in sequence. A set per layer would hold as much memory as the whole pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

import torch

from ..models.layers import Attend
from .breakable import Breaks, OutputT, ReplayContext
from .bucketed_graphs import GraphFamily, GraphLimits, PathDecision
from .graph_pool import GraphKind, GraphPool, NamedTensors
from .pytree import own
from .static import load_rows


@dataclass(frozen=True, kw_only=True)
class AttendContext(ReplayContext):
    """`attend` is bound to the live batch and handles its `num_rows` rows."""

    attend: Attend


@dataclass(frozen=True, kw_only=True)
class AttentionBridge:
    """The inputs and the output of attention on both sides of its break, each `[max_tokens, heads, D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    @classmethod
    def empty(
        cls,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "AttentionBridge":
        q, k, v, out = (
            torch.zeros((max_tokens, heads, head_dim), dtype=dtype, device=device)
            for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
        )
        return cls(q=q, k=k, v=v, out=out)

    def attend(self, breaks: Breaks[AttendContext]) -> Attend:
        """The attention that layers call under capture."""
        attend_rows = breaks.graph_break(attend_real_rows)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            n = q.shape[0]
            inside_q, inside_k, inside_v = (
                mine[:n].copy_(given) for mine, given in ((self.q, q), (self.k, k), (self.v, v))
            )
            out = self.out[:n]
            attend_rows(layer, inside_q, inside_k, inside_v, out=out)
            return out

        return attend


def attend_real_rows(
    context: AttendContext, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
) -> None:
    """The graph break: stores k and v of the real rows and attends with the live batch's plan."""
    n = context.num_rows
    out[:n] = context.attend(layer, q[:n], k[:n], v[:n])


def attend_nothing(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Replaces attention during capture, when no batch and no KV exist."""
    return q


# (static inputs cut to a bucket, attend) -> outputs, token-major
Body: TypeAlias = Callable[[Sequence[torch.Tensor], Attend], OutputT]


class TokenGraphs(Generic[OutputT]):
    """Graphs of `body` over `inputs`, static tensors `[max_tokens, ...]` by name."""

    def __init__(
        self,
        pool: GraphPool,
        kind: GraphKind,
        buckets: Sequence[int],
        *,
        inputs: dict[str, torch.Tensor],
        bridge: AttentionBridge,
        body: Body[OutputT],
        parameters: NamedTensors,
        hidden: int = 0,
    ) -> None:
        limits = GraphLimits(is_by_token=True, hidden=hidden)
        self.family: GraphFamily[AttendContext, OutputT] = GraphFamily(pool, kind, buckets, limits)
        self.inputs = inputs
        self.bridge = bridge
        self._body = body
        self._parameters = parameters

    def capture(self) -> None:
        def forward(bucket: int, breaks: Breaks[AttendContext]) -> OutputT:
            return self._body(
                [static[:bucket] for static in self.inputs.values()], self.bridge.attend(breaks)
            )

        def context(bucket: int) -> AttendContext:
            return AttendContext(num_rows=bucket, attend=attend_nothing)

        self.family.capture(forward, context, self._parameters)

    def run(self, decision: PathDecision, values: Sequence[torch.Tensor], attend: Attend) -> OutputT:
        """Returns the outputs of the real rows, owned by the caller. `values` are the inputs `[n, ...]` in
        order.
        """
        for (name, static), value in zip(self.inputs.items(), values, strict=True):
            load_rows(static, value, decision.bucket, name=f"{self.family.kind.value} {name}")
        n = values[0].shape[0]
        return own(self.family.replay(decision, AttendContext(num_rows=n, attend=attend)), n)

    def __repr__(self) -> str:
        return f"<TokenGraphs {self.family!r}>"
