"""The building blocks of a decoder layer, with the names of their tensors in a Hugging Face checkpoint.

Projections with the same input are merged into one matrix. `tensors(prefix)` yields the checkpoint's names
with views of the merged parameters, so loading is copying. A
layer of a tensor-parallel worker has the heads and the intermediate sizes of one rank. Legend: T tokens, H
hidden size, N query heads, K key/value heads, D head dimension, I intermediate size.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias

import torch

from ...kernels.row_ops import FASTEST, RowOps, of_one_rank
from .quant.projection import MakeProjection, Projection
from .quant.projection import NamedTensors as NamedTensors

# (layer index, q [T, N, D], k [T, K, D], v [T, K, D]) -> [T, N, D]; stores k and v, then attends.
# It may have a method `rotate_attend(layer, heads [T, N+2K, D], cos [T, D], sin [T, D])` for CUDA, which also
# rotates.
# Over latents: (layer index, q [T, N, F+P], latent [T, 1, R+P], up [N, F+V, R]) -> [T, N, V], with the names
# of `kernels.latent_attention`.
Attend: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Read(Protocol):
    """Attention over stored keys and values, or over latents with the projection `up` `[N, F+V, R]`."""

    def __call__(self, layer: int, q: torch.Tensor, out: torch.Tensor, *up: torch.Tensor) -> None:
        """Attends with `q` `[T, N, D]` and writes `out` `[T, N, D]`; over latents their widths are F+P, V."""


class Linear:
    """y = x W^T + b with `weight` `[out, in]`, its rows split into named `parts` of the checkpoint.

    `ops`, here and in all layers, computes the rows.
    """

    def __init__(
        self,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps = FASTEST,
    ) -> None:
        self.parts = parts
        self.ops = ops
        out_size = sum(parts.values())
        self.weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """silu of the first half of the outputs times the second half: `[T, in]` -> `[T, out/2]`."""
        return self.ops.gated_linear(x, self.weight, self.bias)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        start = 0
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size


class RowParallel:
    """A projection whose inputs are split over the ranks of a tensor-parallel worker.

    Each rank has the sum of all. The bias is rank 0's; the others have zeros.
    """

    def __init__(self, part: Projection, ops: RowOps) -> None:
        self.part = part
        self.ops = ops
        self.weight, self.bias = part.weight, part.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.sum_ranks(self.part(x))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Raises TypeError: a product of sums is none of parts."""
        raise TypeError("a gated projection is split by its outputs")

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        return self.part.tensors(prefix)


def row_parallel(projection: Projection, ops: RowOps) -> Projection:
    """`projection` with the sum over ranks behind it, if `ops` has several."""
    return projection if ops.sum_ranks is of_one_rank else RowParallel(projection, ops)


class RMSNorm:
    """Root-mean-square normalisation with a learned `weight` `[size]`."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps = FASTEST,
    ) -> None:
        self.eps = eps
        self.ops = ops
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of two tensors `[..., size]`, in one pass over memory."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def tensors(self, name: str) -> NamedTensors:
        """The checkpoint's tensor `name`, with the parameter."""
        yield f"{name}.weight", self.weight


class GatedMLP:
    """A SwiGLU MLP: down(silu(gate(x)) * up(x)), `[T, H]` -> `[T, H]`.

    `linear` makes the projections, by default plain ones.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps = FASTEST,
        linear: MakeProjection | None = None,
    ) -> None:
        halves = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        make = partial(Linear, ops=ops) if linear is None else linear
        self.gate_up = make(hidden_size, halves, bias=bias, dtype=dtype, device=device)
        down = make(intermediate_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype, device=device)
        self.down = row_parallel(down, ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up.gated(x))

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from self.gate_up.tensors(prefix)
        yield from self.down.tensors(prefix)


class SelfAttention:
    """Projections, rotation and output of one attention layer. The caller's `attend` computes the attention.

    `input_size` may differ from `hidden_size` (a draft layer reads two streams at once). `linear` makes the
    projections, by default plain ones.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        ops: RowOps = FASTEST,
        linear: MakeProjection | None = None,
    ) -> None:
        self.ops = ops
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        parts = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        make = partial(Linear, ops=ops) if linear is None else linear
        self.qkv = make(input_size, parts, bias=qkv_bias, dtype=dtype, device=device)
        output = make(
            num_heads * head_dim, {"o_proj": hidden_size}, bias=output_bias, dtype=dtype, device=device
        )
        self.output = row_parallel(output, ops)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device, ops=ops)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device, ops=ops)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """`x` `[T, input_size]`, rotary tables `[T, D]` -> `[T, H]`."""
        return self.output(self.attended(x, cos, sin, layer, attend))

    def attended(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """As a call, without the output projection: `[T, N*D]`."""
        split = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], split + self.num_kv_heads, self.head_dim)
        rotate_attend = getattr(attend, "rotate_attend", None)
        if rotate_attend is not None and heads.is_cuda and self.q_norm is None:
            rotated: torch.Tensor = rotate_attend(layer, heads, cos, sin)
            return rotated.flatten(1)
        qk, v = heads[:, :split], heads[:, split:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat(
                (self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1
            )
        qk = self.ops.rope(qk, cos, sin)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return attend(layer, q, k, v).flatten(1)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from self.qkv.tensors(prefix)
        yield from self.output.tensors(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield from norm.tensors(prefix + name)


class Attention(Protocol):
    """The part of a layer in which tokens meet. `output` follows it, each row by itself."""

    output: Projection

    def attended(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """`x` `[T, H]` and rotary tables -> the input of `output`, `[T, N*D]`."""

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""


class MLP(Protocol):
    """The part of a layer that works on each token alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, H]` -> `[T, H]`."""

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""


class DecoderLayer:
    """Pre-norm attention and MLP on a residual stream. `mlp_name`: the MLP in the checkpoint's names."""

    def __init__(
        self,
        attention: Attention,
        mlp: MLP,
        input_norm: RMSNorm,
        post_norm: RMSNorm,
        mlp_name: str = "mlp",
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.mlp_name = mlp_name
        self.input_norm = input_norm
        self.post_norm = post_norm

    def enter(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised stream, residual stream), each `[T, H]`.

        `delta` `[T, H]` is the MLP output of the previous layer, not yet added to `hidden` `[T, H]`; None:
        nothing to add.
        """
        return (self.input_norm(hidden), hidden) if delta is None else self.input_norm.add(delta, hidden)

    def __call__(
        self,
        normed: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of `enter` -> the residual stream `[T, H]` after attention, and the MLP output
        `[T, H]`.
        """
        return self.leave(self.attention.attended(normed, cos, sin, layer, attend), hidden)

    def leave(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The part behind attention, each row by itself: `SelfAttention.attended` `[R, N*D]` and the residual
        stream `[R, H]` of the same rows -> the outputs of a call for these rows.
        """
        normed, hidden = self.post_norm.add(self.attention.output(attended), hidden)
        return hidden, self.mlp(normed)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from self.mlp.tensors(f"{prefix}{self.mlp_name}.")
        yield from self.input_norm.tensors(f"{prefix}input_layernorm")
        yield from self.post_norm.tensors(f"{prefix}post_attention_layernorm")
