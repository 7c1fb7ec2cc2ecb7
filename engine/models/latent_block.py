"""The attention of DeepSeek-V2 and V3: multi-head latent attention.

A layer stores one latent per token, R values that are normalised and P that are rotated, from which the keys
and values of all heads are made; `attend` does that, see `kernels.latent_attention`. Source: DeepSeek-AI,
"DeepSeek-V2", 2024. Legend: T tokens, H hidden size, N heads, R rank of the latents, P width of the rotated
key, F and V widths of a head's key and value that are made of the latent.
"""

from functools import partial

import torch

from ...kernels.latent_step import LatentRows, LatentSizes
from ...kernels.row_ops import FASTEST, RowOps
from .deepseek_config import NORM_EPS, LatentConfig
from .layers import (
    Attend,
    JoinedProjection,
    Linear,
    NamedTensors,
    Normed,
    RMSNorm,
    may_join,
    row_parallel,
)
from .quant.projection import Projection
from .quant.projections import Projections


class LatentAttention:
    """Projections, rotation and output of one layer of attention over latents.

    `projections` knows the form of their weights, by names that begin with `prefix`
    ("model.layers.0.self_attn."); None: the model's dtype.
    """

    def __init__(
        self,
        config: LatentConfig,
        dtype: torch.dtype,
        device: torch.device,
        ops: RowOps = FASTEST,
        projections: Projections | None = None,
        prefix: str = "",
    ) -> None:
        self.config = config
        self.ops = ops
        heads, hidden = config.num_heads, config.hidden_size
        made = Projections(None) if projections is None else projections
        linear = made.under(prefix, partial(Linear, ops=ops))
        make = {"dtype": dtype, "device": device}
        latent = {"kv_a_proj_with_mqa": config.rank + config.rope_size}
        queries = (
            {"q_a_proj": config.query_rank} if config.query_rank else {"q_proj": heads * config.head_dim}
        )
        self.down = linear(hidden, queries | latent, bias=config.attention_bias, **make)  # type: ignore[arg-type]
        self.query_norm: RMSNorm | None = None
        self.query_up: Projection | None = None
        if config.query_rank:
            self.query_norm = RMSNorm(config.query_rank, NORM_EPS, ops=ops, **make)  # type: ignore[arg-type]
            parts = {"q_b_proj": heads * config.head_dim}
            self.query_up = linear(config.query_rank, parts, bias=False, **make)  # type: ignore[arg-type]
        self.sizes = LatentSizes(
            config.key_size, config.rope_size, config.value_size, config.rank, config.is_interleaved
        )
        self.latent_norm = RMSNorm(config.rank, NORM_EPS, ops=ops, **make)  # type: ignore[arg-type]
        # attention takes this matrix apart, so once loaded it has no other form than the model's dtype
        shape = heads * config.latent_outputs, config.rank
        self._stored_up = made.stored(prefix, shape[1], {"kv_b_proj": shape[0]}, bias=False, **make)  # type: ignore[arg-type]
        self.up = torch.empty(0, **make)  # type: ignore[call-overload]
        if self._stored_up is None:
            self.up = torch.empty(heads, config.latent_outputs, config.rank, **make)  # type: ignore[call-overload]
        else:
            made.remember(self, f"{prefix}kv_b_proj")
        output = linear(
            heads * config.value_size,
            {"o_proj": hidden},
            bias=config.attention_output_bias,
            **make,  # type: ignore[arg-type]
        )
        self.output = row_parallel(output, ops)

    def takes_unscaled(self, num_rows: int) -> bool:
        """As `Attention.takes_unscaled`."""
        return may_join(num_rows, self.down)

    def __call__(
        self, x: Normed, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """`x` `[T, H]`, rotary tables `[T, P]` -> `[T, H]`."""
        return self.output(self.attended(x, cos, sin, layer, attend))

    def attended(
        self, x: Normed, cos: torch.Tensor, sin: torch.Tensor, layer: int, attend: Attend
    ) -> torch.Tensor:
        """As a call, without the output projection: `[T, N*V]`."""
        config = self.config
        assert isinstance(x, torch.Tensor) or isinstance(self.down, JoinedProjection)
        found = self.down(x)  # type: ignore[arg-type]
        width = found.shape[1] - config.rank - config.rope_size
        queries, latent = found[:, :width], found[:, width : width + config.rank]
        if self.query_norm is not None and self.query_up is not None:
            queries = self.query_up(self.query_norm(queries))
        latent_attend = getattr(attend, "latent_attend", None)
        joins = self.ops.joins
        if latent_attend is not None and joins.takes(found, joins.latents):
            rows = LatentRows(queries, found[:, width:], self.latent_norm.weight, NORM_EPS, cos, sin)
            joined: torch.Tensor = latent_attend(layer, rows, self.up, self.sizes)
            return joined.flatten(1)
        q = queries.reshape(found.shape[0], config.num_heads, config.head_dim)
        turning = torch.cat((q[..., config.key_size :], found[:, None, width + config.rank :]), dim=1)
        if config.is_interleaved:
            turning = turning.view(*turning.shape[:2], config.rope_size // 2, 2).transpose(-1, -2).flatten(-2)
        turned = self.ops.rope(turning, cos, sin)
        q = torch.cat((q[..., : config.key_size], turned[:, :-1]), dim=-1)
        stored = torch.cat((self.latent_norm(latent)[:, None], turned[:, -1:]), dim=-1)
        return attend(layer, q, stored, self.up).flatten(1)

    def finish(self) -> None:
        """As `StoredWeights.finish`: the projection from latents has its values."""
        if self._stored_up is not None:
            self._stored_up.finish()
            found = self._stored_up.values(self.latent_norm.weight.dtype)
            self.up = found.contiguous().view(self.config.num_heads, self.config.latent_outputs, -1)
            self._stored_up = None

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        yield from self.down.tensors(prefix)
        if self.query_norm is not None and self.query_up is not None:
            yield from self.query_norm.tensors(f"{prefix}q_a_layernorm")
            yield from self.query_up.tensors(prefix)
        yield from self.latent_norm.tensors(f"{prefix}kv_a_layernorm")
        if self._stored_up is None:
            yield f"{prefix}kv_b_proj.weight", self.up.view(-1, self.config.rank)
        else:
            yield from self._stored_up.tensors(prefix)
        yield from self.output.tensors(prefix)
