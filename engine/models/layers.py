"""The building blocks of a decoder layer, with the names of their tensors in a Hugging Face checkpoint.

Projections with the same input are merged into one matrix. `tensors(prefix)` yields the checkpoint's names
with views of the merged parameters, so loading is copying. A
layer of a tensor-parallel worker has the heads and the intermediate sizes of one rank. Legend: T tokens, H
hidden size, N query heads, K key/value heads, D head dimension, I intermediate size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from ...kernels.attention_form import PLAIN_FORM, AttentionForm
from ...kernels.normed_linear import MAX_ROWS as MAX_JOINED_ROWS
from ...kernels.normed_linear import UnscaledRows, scaled_linear, sum_linear
from ...kernels.rms_norm import NextNorm, norm_add_norm
from ...kernels.rotary_product import can_rotate
from ...kernels.rotate_store import HeadNorms
from ...kernels.row_ops import FASTEST, Joins, RowOps, of_one_rank
from .quant.kv_scales import KVScales
from .quant.projection import MakeProjection, Projection
from .quant.projection import NamedTensors as NamedTensors

# What a layer hands to attention beside its rows: the form of its scores, or the projection of latents.
More: TypeAlias = torch.Tensor | AttentionForm


class RowsBeforeNorm(NamedTuple):
    """Rows `[T, H]` to be normalised before they are added."""

    rows: torch.Tensor
    norm: "RMSNorm"


# What a layer begins with: rows behind its norm, or in front of the norm's scale.
Normed: TypeAlias = torch.Tensor | UnscaledRows
# What a layer leaves: an MLP output that is not yet added, or not yet normalised, nothing to add, or the
# beginning of the next layer.
Left: TypeAlias = torch.Tensor | RowsBeforeNorm | UnscaledRows | None


def added(hidden: torch.Tensor, delta: Left) -> torch.Tensor:
    """The residual stream `hidden` `[T, H]` with the MLP output that a layer left."""
    if isinstance(delta, RowsBeforeNorm):
        return hidden + delta.norm(delta.rows)
    return hidden + delta if isinstance(delta, torch.Tensor) else hidden


class Attend(Protocol):
    """The attention of all layers of a forward.

    On CUDA it may be a `RotatingAttend`. Over latents: (layer index, q [T, N, F+P], latent [T, 1, R+P],
    up [N, F+V, R]) -> [T, N, V], with the names of `kernels.latent_attention`.
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        /,
    ) -> torch.Tensor:
        """Stores `k` and `v` `[T, K, D]` of a layer, then attends with `q` `[T, N, D]` -> `[T, N, D]`."""


@runtime_checkable
class RotatingAttend(Attend, Protocol):
    """Attention that also rotates queries and keys by the tables `cos` and `sin` `[T, R]`. For CUDA."""

    def rotate_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        form: AttentionForm = PLAIN_FORM,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """As a call, with the heads of q, k and v side by side in `heads` `[T, N+2K, D]`, before `norms`."""


@runtime_checkable
class ProjectingAttend(RotatingAttend, Protocol):
    """Attention that also makes the heads it rotates."""

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


class Read(Protocol):
    """Attention over stored keys and values in a layer's form, or over latents with the projection `up`
    `[N, F+V, R]`.
    """

    def __call__(self, layer: int, q: torch.Tensor, out: torch.Tensor, *more: More) -> None:
        """Attends with `q` `[T, N, D]` and writes `out` `[T, N, D]`; over latents their widths are F+P, V."""


@runtime_checkable
class JoinedProjection(Projection, Protocol):
    """A projection that may share launches with norms and residual sums, for up to `joined_rows` rows."""

    joined_rows: int

    def __call__(self, x: torch.Tensor | UnscaledRows) -> torch.Tensor:
        """As `Projection`."""

    def gated(self, x: torch.Tensor | UnscaledRows, is_gelu: bool = False) -> torch.Tensor:
        """As `Projection`."""

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `sum_linear`: the sum `[T, N]` of the outputs and `residual`, and its rows in front of
        `norm`.
        """


class Linear:
    """y = x W^T + b with `weight` `[out, in]`, its rows split into named `parts` of the checkpoint.

    `ops`, here and in all layers, computes the rows.
    """

    joined_rows = MAX_JOINED_ROWS

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

    def __call__(self, x: torch.Tensor | UnscaledRows) -> torch.Tensor:
        if isinstance(x, UnscaledRows):
            return scaled_linear(x, self.weight, self.bias)
        return self.ops.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor | UnscaledRows, is_gelu: bool = False) -> torch.Tensor:
        """As `Projection.gated`."""
        if isinstance(x, UnscaledRows):
            return scaled_linear(x, self.weight, self.bias, is_gated=True, is_gelu=is_gelu)
        return self.ops.gated_linear(x, self.weight, self.bias, is_gelu)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `JoinedProjection.add`."""
        return sum_linear(x, self.weight, self.bias, residual, norm)

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

    def gated(self, x: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
        """Raises TypeError: a product of sums is none of parts."""
        raise TypeError("a gated projection is split by its outputs")

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        return self.part.tensors(prefix)


def row_parallel(projection: Projection, ops: RowOps) -> Projection:
    """`projection` with the sum over ranks behind it, if `ops` has several."""
    return projection if ops.sum_ranks is of_one_rank else RowParallel(projection, ops)


def may_join(num_rows: int, *projections: object) -> bool:
    """Whether all may share launches with norms and residual sums for `num_rows` rows."""
    return all(0 < num_rows <= getattr(each, "joined_rows", 0) for each in projections)


class RMSNorm:
    """Root-mean-square normalisation with a learned `weight` `[size]`; `offset` as in `kernels.rms_norm`."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps = FASTEST,
        offset: float | None = None,
    ) -> None:
        self.eps = eps
        self.offset = offset
        self.ops = ops
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised sum, sum) of two tensors `[..., size]`, in one pass over memory."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)

    def add_normed(
        self, x: torch.Tensor, inner: "RMSNorm", residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `add`, of `x` behind the norm `inner`, as one after the other: see `norm_add_norm`."""
        if x.is_cuda and inner.offset == self.offset:
            return norm_add_norm(x, inner.next, residual, self.next)
        return self.add(inner(x), residual)

    @property
    def next(self) -> NextNorm:
        """This norm as the one behind a residual sum."""
        return NextNorm(self.weight, self.eps, self.offset)

    def scaled(self, normed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`normed` `[..., size]`, float32, times the weight, rounded to `dtype` as a call rounds."""
        if self.offset is None:
            return self.weight * normed.to(dtype)
        return (normed * (self.offset + self.weight.to(torch.float32))).to(dtype)

    def tensors(self, name: str) -> NamedTensors:
        """The checkpoint's tensor `name`, with the parameter."""
        yield f"{name}.weight", self.weight


class GatedMLP:
    """A GLU MLP: down(silu(gate(x)) * up(x)), `[T, H]` -> `[T, H]`.

    `linear` makes the projections, by default plain ones. `is_gelu`: gelu by tanh takes the place of silu.
    `is_fused`: gate and up are one matrix of the checkpoint.
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
        is_gelu: bool = False,
        is_fused: bool = False,
    ) -> None:
        halves = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        halves = {"gate_up_proj": 2 * intermediate_size} if is_fused else halves
        make = partial(Linear, ops=ops) if linear is None else linear
        self.is_gelu = is_gelu
        self.gate_up = make(hidden_size, halves, bias=bias, dtype=dtype, device=device)
        down = make(intermediate_size, {"down_proj": hidden_size}, bias=bias, dtype=dtype, device=device)
        self.down = row_parallel(down, ops)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up.gated(x, self.is_gelu))

    def joins(self, joins: Joins, num_rows: int) -> bool:
        """As `JoinedMLP.joins`."""
        is_known = type(self.gate_up) is Linear or not self.is_gelu
        return is_known and may_join(num_rows, self.gate_up, self.down)

    def add(
        self, rows: UnscaledRows, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `JoinedMLP.add`."""
        assert isinstance(self.gate_up, JoinedProjection)
        assert isinstance(self.down, JoinedProjection)
        return self.down.add(self.gate_up.gated(rows, self.is_gelu), residual, norm)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from self.gate_up.tensors(prefix)
        yield from self.down.tensors(prefix)

    def parameters(self, prefix: str) -> NamedTensors:
        """As `MLP.parameters`."""
        return self.tensors(prefix)


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """The normalisation of q and k before their rotation.

    `is_whole`: over all heads together (OLMo 2), otherwise over each head. `offset` as in `kernels.rms_norm`.
    `whole_heads`: heads of q and of k over all ranks; None with one rank.
    """

    eps: float
    is_whole: bool = False
    offset: float | None = None
    whole_heads: tuple[int, int] | None = None


class SelfAttention:
    """Projections, rotation and output of one attention layer. The caller's `attend` computes the attention.

    `input_size` may differ from `hidden_size` (a draft layer reads two streams at once). `linear` makes the
    projections, by default plain ones. `form`: what is special about its scores; with `has_sinks`, its sinks
    are parameters of the layer. `turns`: q and k are rotated. `is_fused`: q, k and v are one matrix of the
    checkpoint. `kv_scales`: keys and values are stored divided by them.
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
        qk_norm: QKNorm | None = None,
        ops: RowOps = FASTEST,
        linear: MakeProjection | None = None,
        form: AttentionForm = PLAIN_FORM,
        has_sinks: bool = False,
        turns: bool = True,
        is_fused: bool = False,
        kv_scales: KVScales | None = None,
    ) -> None:
        self.ops = ops
        self.kv_scales = kv_scales
        self.form = form
        if has_sinks:
            self.form = form._replace(sinks=torch.empty(num_heads, dtype=dtype, device=device))
        self.turns = turns
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        parts = {
            "q_proj": num_heads * head_dim,
            "k_proj": num_kv_heads * head_dim,
            "v_proj": num_kv_heads * head_dim,
        }
        parts = {"qkv_proj": sum(parts.values())} if is_fused else parts
        make = partial(Linear, ops=ops) if linear is None else linear
        self.qkv = make(input_size, parts, bias=qkv_bias, dtype=dtype, device=device)
        output = make(
            num_heads * head_dim, {"o_proj": hidden_size}, bias=output_bias, dtype=dtype, device=device
        )
        self.output = row_parallel(output, ops)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.qk_norm = qk_norm
        if qk_norm is not None:
            widths = (num_heads * head_dim, num_kv_heads * head_dim) if qk_norm.is_whole else (head_dim,) * 2
            self.q_norm, self.k_norm = (
                RMSNorm(width, qk_norm.eps, dtype=dtype, device=device, ops=ops, offset=qk_norm.offset)
                for width in widths
            )

    def __call__(
        self, x: Normed, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """`x` `[T, input_size]`, rotary tables `[T, R]` -> `[T, H]`."""
        return self.output(self.attended(x, cos, sin, layer, attend))

    def attended(
        self, x: Normed, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """As a call, without the output projection: `[T, N*D]`."""
        may_rotate = cos.is_cuda and self.turns and self.kv_scales is None
        rotating = attend if may_rotate and isinstance(attend, RotatingAttend) else None
        projecting = rotating if isinstance(rotating, ProjectingAttend) else None
        if projecting is not None and isinstance(x, UnscaledRows) and self._rotates_in_product(x, cos):
            given = layer, x, self.qkv.weight, self.qkv.bias, cos, sin, self.form
            return projecting.project_attend(*given).flatten(1)
        split = self.num_heads + self.num_kv_heads
        heads = self._project(x).view(-1, split + self.num_kv_heads, self.head_dim)
        if rotating is not None and self._joins_norms():
            return rotating.rotate_attend(layer, heads, cos, sin, self.form, self._head_norms()).flatten(1)
        qk, v = self._normed(heads[:, :split]), heads[:, split:]
        qk = self.ops.rope(qk, cos, sin) if self.turns else qk
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        if self.kv_scales is not None:
            return self.kv_scales.attend(attend, layer, q, k, v, self.form).flatten(1)
        return attend(layer, q, k, v, self.form).flatten(1)

    def _project(self, x: torch.Tensor | UnscaledRows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor) or isinstance(self.qkv, JoinedProjection)
        return self.qkv(x)  # type: ignore[arg-type]

    def _rotates_in_product(self, rows: UnscaledRows, cos: torch.Tensor) -> bool:
        """Whether the projection of `rows` and their rotation are one launch."""
        joins, sizes = self.ops.joins, (*self.qkv.weight.shape, self.head_dim, cos.shape[1])
        is_plain = self.qk_norm is None and type(self.qkv) is Linear
        return is_plain and joins.takes(rows.z, joins.rotary) and can_rotate(rows.z.shape[0], *sizes)

    def _joins_norms(self) -> bool:
        """Whether attention may normalise q and k itself: not where all forwards must have equal bits."""
        return self.qk_norm is None or not (self.qk_norm.is_whole or self.ops.is_invariant)

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)

    def takes_unscaled(self, num_rows: int) -> bool:
        """As `Attention.takes_unscaled`."""
        return may_join(num_rows, self.qkv)

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """The heads `[T, N+K, D]` of q and k behind their norms."""
        if self.qk_norm is None or self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        if not self.qk_norm.is_whole:
            return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if self.qk_norm.whole_heads is not None:
            return self._normed_over_ranks(q, k, self.qk_norm.whole_heads)
        parts = (norm(x.flatten(1)).view(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        return torch.cat(tuple(parts), dim=1)

    def _normed_over_ranks(
        self, q: torch.Tensor, k: torch.Tensor, whole_heads: tuple[int, int]
    ) -> torch.Tensor:
        """As `_normed`, over the `whole_heads` of q and k on all ranks, whose squares are summed in float32.

        With fewer KV heads than ranks, several ranks add the squares of one head.
        """
        assert self.q_norm is not None
        assert self.k_norm is not None
        num_ranks = whole_heads[0] // self.num_heads
        copies = num_ranks * self.num_kv_heads // whole_heads[1]
        flat = [x.flatten(1).to(torch.float32) for x in (q, k)]
        total = self.ops.sum_ranks(torch.cat([x.pow(2).sum(1, keepdim=True) for x in flat], dim=1))
        found = []
        for x, norm, column, count in (
            (flat[0], self.q_norm, 0, whole_heads[0]),
            (flat[1], self.k_norm, 1, whole_heads[1] * copies),
        ):
            mean = total[:, column : column + 1] / (count * self.head_dim)
            found.append(norm.scaled(x * torch.rsqrt(mean + norm.eps), q.dtype))
        return torch.cat(found, dim=1).view(q.shape[0], -1, self.head_dim)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from self.qkv.tensors(prefix)
        yield from self.output.tensors(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield from norm.tensors(prefix + name)
        if self.form.sinks is not None:
            yield f"{prefix}sinks", self.form.sinks
        if self.kv_scales is not None:
            yield from self.kv_scales.tensors(prefix)


class Attention(Protocol):
    """The part of a layer in which tokens meet. `output` follows it, each row by itself."""

    output: Projection

    def takes_unscaled(self, num_rows: int) -> bool:
        """Whether it begins with `num_rows` rows in front of the scale of a norm, too."""

    def attended(
        self, x: Normed, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
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

    def parameters(self, prefix: str) -> NamedTensors:
        """As `tensors`, with the experts, if there are any, as one tensor of each matrix."""


@runtime_checkable
class JoinedMLP(Protocol):
    """An MLP that may share launches with the norms around it."""

    def joins(self, joins: Joins, num_rows: int) -> bool:
        """Whether `add` computes `num_rows` rows."""

    def add(
        self, rows: UnscaledRows, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """The sum `[T, H]` of `residual` and the MLP of `rows`, and its rows in front of `norm`."""


class DecoderLayer:
    """Pre-norm attention and MLP on a residual stream. `mlp_name`: the MLP in the checkpoint's names.

    `following` is the next layer of the model, if there is one and it begins with what this one may leave.
    """

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
        self.following: DecoderLayer | None = None

    def enter(self, hidden: torch.Tensor, delta: Left) -> tuple[Normed, torch.Tensor]:
        """(normalised stream, residual stream), each `[T, H]`.

        `delta` is what the previous layer left: its MLP output `[T, H]`, not yet added to `hidden` `[T, H]`;
        None: nothing to add; or the normalised stream.
        """
        if isinstance(delta, UnscaledRows):
            return delta, hidden
        if isinstance(delta, RowsBeforeNorm):
            return self.input_norm.add_normed(delta.rows, delta.norm, hidden)
        return (self.input_norm(hidden), hidden) if delta is None else self.input_norm.add(delta, hidden)

    def __call__(
        self,
        normed: Normed,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: int,
        attend: Attend,
    ) -> tuple[torch.Tensor, Left]:
        """The outputs of `enter` -> the residual stream `[T, H]` after attention, and the MLP output
        `[T, H]`.
        """
        return self.leave(self.attention.attended(normed, cos, sin, layer, attend), hidden)

    def leave(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, Left]:
        """The part behind attention, each row by itself: `SelfAttention.attended` `[R, N*D]` and the residual
        stream `[R, H]` of the same rows -> the outputs of a call for these rows.
        """
        joins, output, mlp = self.input_norm.ops.joins, self.attention.output, self.mlp
        num_rows, following = attended.shape[0], self.following
        is_few = joins.takes(attended, joins.norms) and may_join(num_rows, output)
        if not (is_few and isinstance(mlp, JoinedMLP) and mlp.joins(joins, num_rows)):
            normed, hidden = self.post_norm.add(output(attended), hidden)
            return hidden, mlp(normed)
        assert isinstance(output, JoinedProjection)
        middle, rows = output.add(attended, hidden, self.post_norm.next)
        assert rows is not None
        takes = following is not None and following.attention.takes_unscaled(num_rows)
        return mlp.add(rows, middle, following.input_norm.next if following and takes else None)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        return self._named(prefix, self.mlp.tensors(f"{prefix}{self.mlp_name}."))

    def parameters(self, prefix: str) -> NamedTensors:
        """As `tensors`, with the experts as in `MLP.parameters`."""
        return self._named(prefix, self.mlp.parameters(f"{prefix}{self.mlp_name}."))

    def _named(self, prefix: str, mlp: NamedTensors) -> NamedTensors:
        """All tensors under `prefix`, with those of the MLP."""
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from mlp
        yield from self.input_norm.tensors(f"{prefix}input_layernorm")
        yield from self.post_norm.tensors(f"{prefix}post_attention_layernorm")


def link_layers(layers: Sequence[DecoderLayer]) -> None:
    """Tells each layer of a model which one follows, where both may be joined."""
    for layer, following in pairwise(layers):
        if type(layer) is type(following) is DecoderLayer:
            layer.following = following


class SandwichLayer(DecoderLayer):
    """A layer of Gemma 2 and 3: a norm in front of attention and MLP, and one behind each before the sum.

    `post_norm` is the one behind attention.
    """

    def __init__(
        self, attention: SelfAttention, mlp: MLP, norms: tuple[RMSNorm, RMSNorm, RMSNorm, RMSNorm]
    ) -> None:
        input_norm, post_norm, self.mlp_norm, self.post_mlp_norm = norms
        super().__init__(attention, mlp, input_norm, post_norm)

    def leave(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, Left]:
        """As `DecoderLayer.leave`."""
        delta = self.attention.output(attended)
        normed, hidden = self.mlp_norm.add_normed(delta, self.post_norm, hidden)
        return hidden, RowsBeforeNorm(self.mlp(normed), self.post_mlp_norm)

    def _named(self, prefix: str, mlp: NamedTensors) -> NamedTensors:
        yield from super()._named(prefix, mlp)
        yield from self.mlp_norm.tensors(f"{prefix}pre_feedforward_layernorm")
        yield from self.post_mlp_norm.tensors(f"{prefix}post_feedforward_layernorm")


class PostNormLayer(DecoderLayer):
    """A layer of OLMo 2: no norm in front of attention and MLP, one behind each, before the addition."""

    def __init__(self, attention: SelfAttention, mlp: MLP, norms: tuple[RMSNorm, RMSNorm]) -> None:
        post_norm, self.post_mlp_norm = norms
        super().__init__(attention, mlp, post_norm, post_norm)

    def enter(self, hidden: torch.Tensor, delta: Left) -> tuple[Normed, torch.Tensor]:
        """As `DecoderLayer.enter`; both results are the residual stream."""
        hidden = added(hidden, delta)
        return hidden, hidden

    def leave(self, attended: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, Left]:
        """As `DecoderLayer.leave`."""
        hidden = hidden + self.post_norm(self.attention.output(attended))
        return hidden, self.post_mlp_norm(self.mlp(hidden))

    def _named(self, prefix: str, mlp: NamedTensors) -> NamedTensors:
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from mlp
        yield from self.post_norm.tensors(f"{prefix}post_attention_layernorm")
        yield from self.post_mlp_norm.tensors(f"{prefix}post_feedforward_layernorm")
