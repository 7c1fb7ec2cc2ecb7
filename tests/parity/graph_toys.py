"""A small attention model whose attention is a break, and what runs it through buckets.

Legend: T rows of the bucket, H hidden size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from baton.engine.graphs.backend import GraphBackend
from baton.engine.graphs.breakable import BreakableGraph, Breaks, ReplayContext
from baton.engine.graphs.pytree import own

HIDDEN, HEADS, LAYERS = 32, 4, 3


@dataclass(frozen=True, kw_only=True)
class ToyContext(ReplayContext):
    """`lens`: rows of each request; their sum is `num_rows`."""

    lens: tuple[int, ...]


def context_of(*lens: int) -> ToyContext:
    return ToyContext(num_rows=sum(lens), lens=lens)


def plan_mask(context: ToyContext, rows: torch.Tensor) -> torch.Tensor:
    """`[T, T]`, added to scores: rows see earlier rows of their request. Copied at each replay."""
    owner = torch.full((rows.shape[0],), -1, device=rows.device)
    start = 0
    for request, length in enumerate(context.lens):
        owner[start : start + length] = request
        start += length
    visible = (owner[:, None] == owner[None, :]) & (rows[:, None] >= rows[None, :])
    return torch.zeros(visible.shape, device=rows.device).masked_fill(~visible, float("-inf"))


def attend(
    context: ToyContext,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`q`, `k`, `v`, `out` `[T, H]`; real rows only."""
    n = context.num_rows
    q, k, v = (x[:n].view(n, HEADS, -1).transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    weights = (scores + mask[:n, :n]).softmax(-1)
    out[:n] = (weights @ v).transpose(0, 1).reshape(n, HIDDEN)


class ToyDecoder:
    """LAYERS layers of attention and MLP over `[T, H]`; the layers in `aux` return their outputs too."""

    def __init__(self, seed: int = 0, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "qkv": (3 * HIDDEN, HIDDEN),
            "o": (HIDDEN, HIDDEN),
            "up": (2 * HIDDEN, HIDDEN),
            "down": (HIDDEN, HIDDEN),
        }
        self.device = device
        self.weights = {
            f"{layer}.{name}": (torch.randn(shape, generator=generator) * 0.2).to(device)
            for layer in range(LAYERS)
            for name, shape in shapes.items()
        }
        self.aux: tuple[int, ...] = (0, 2)

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.weights.items())

    def forward(self, breaks: Breaks[ToyContext], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H]` -> the residual stream `[T, H]` and the picked layer outputs `[T, len(aux) * H]`."""
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        mask = breaks.graph_break(plan_mask)(rows)
        attention, picked = breaks.graph_break(attend), []
        for layer in range(LAYERS):
            w = {name: self.weights[f"{layer}.{name}"] for name in ("qkv", "o", "up", "down")}
            q, k, v = F.linear(F.rms_norm(hidden, (HIDDEN,)), w["qkv"]).chunk(3, dim=-1)
            out = torch.empty_like(hidden)
            attention(q, k, v, mask, out=out)
            hidden = hidden + F.linear(out, w["o"])
            gate, up = F.linear(F.rms_norm(hidden, (HIDDEN,)), w["up"]).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, w["down"])
            if layer in self.aux:
                picked.append(hidden)
        return hidden, torch.cat(picked, dim=-1)

    @torch.no_grad()
    def eager(self, hidden: torch.Tensor, context: ToyContext) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward(Breaks(context), hidden)


class ToyBucket:
    """One captured bucket with its static input."""

    def __init__(
        self, backend: GraphBackend, model: ToyDecoder, bucket: int, *, as_one_break: bool = False
    ) -> None:
        self.model = model
        self.static = torch.zeros(bucket, HIDDEN, device=model.device)
        self.graph: BreakableGraph[ToyContext, tuple[torch.Tensor, torch.Tensor]] = BreakableGraph(
            backend, name=f"toy {bucket}", as_one_break=as_one_break
        )
        self.graph.capture(lambda breaks: model.forward(breaks, self.static), context_of(bucket))

    def run(self, hidden: torch.Tensor, context: ToyContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Real rows in, pads filled with NaN; copies of the real rows out."""
        self.static[: context.num_rows] = hidden
        self.static[context.num_rows :] = float("nan")
        return own(self.graph.replay(context), context.num_rows)

    def check(self, seed: int, *lens: int) -> None:
        """One replay on random rows equals the eager forward of exactly these rows."""
        context = context_of(*lens)
        hidden = rows_of(context.num_rows, seed, self.model.device)
        expected = self.model.eager(hidden, context)
        torch.testing.assert_close(self.run(hidden, context), expected, atol=1e-5, rtol=1e-5)


def rows_of(count: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(device)
