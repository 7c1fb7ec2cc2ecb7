"""The DFLASH draft model: a few decoder layers that draft a block of tokens in one forward.

The committed tokens are the context of a block. Each has a context vector, norm(fc(target features)), which
no draft layer changes. A layer's keys and values of the context are projections of these vectors, so the
draft KV of committed tokens needs no draft forward. The rows of a block are the newest token and mask tokens,
with the target's embedding. The row at position i predicts the token at position i, by the target's lm_head.

Source: "DFlash: Block diffusion for flash speculative decoding", arXiv 2602.06036. Legend: T rows, H hidden
size, K captured features, V vocabulary, L draft layers, N key/value heads, D head dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....kernels.rms_norm import rms_norm
from ....kernels.rope import apply_rope
from ....kernels.skinny_linear import linear
from ...errors import CheckpointError, LifecycleError
from ...models.dense_layer import sized_layer
from ...models.layers import Attend, DecoderLayer, Left, Linear, NamedTensors, RMSNorm, SelfAttention
from ...models.rope import RotaryEmbedding
from ...parallel.vocabulary import Table, look_up, rows_of, table_logits
from .dflash_config import DflashConfig


class ContextRows(NamedTuple):
    """Committed tokens as the draft layers see them: context vectors `[T, H]`, and the keys and values of all
    layers, each `[T, L, N, D]`.
    """

    vectors: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class ContextProjection:
    """The key and value projections of all layers as one matrix, copied from the layers' own weights."""

    def __init__(self, layers: list[DecoderLayer], config: DflashConfig) -> None:
        attentions = [each.attention for each in layers if isinstance(each.attention, SelfAttention)]
        queries, each = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.shape = (2, len(layers), config.num_kv_heads, config.head_dim)
        self.eps = config.rms_norm_eps
        parts = [slice(queries + i * each, queries + (i + 1) * each) for i in range(2)]  # keys, then values
        self.weight = torch.cat([a.qkv.weight[part] for part in parts for a in attentions])
        biases = [a.qkv.bias[part] for part in parts for a in attentions if a.qkv.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        norms = [a.k_norm.weight for a in attentions if a.k_norm is not None]
        self.norms = torch.stack(norms)[:, None]
        self.ones = torch.ones_like(norms[0])

    def __call__(
        self, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Context vectors `[T, H]`, rotary tables `[T, D]` -> keys and values `[T, L, N, D]`."""
        both = linear(vectors, self.weight, self.bias).view(vectors.shape[0], *self.shape)
        keys, values = both.unbind(1)
        keys = rms_norm(keys.flatten(1, 2), self.ones, self.eps).view(keys.shape) * self.norms
        return apply_rope(keys.flatten(1, 2), cos, sin).view(keys.shape), values

    def tensors(self) -> NamedTensors:
        """Every tensor that a forward reads."""
        yield "context.weight", self.weight
        if self.bias is not None:
            yield "context.bias", self.bias
        yield "context.norms", self.norms
        yield "context.ones", self.ones


class DflashHead:
    """The draft model of `config`, allocated but not filled. `tensors()` names the tensors to fill.

    `embed_tokens` and `lm_head` `[V, H]` are None until `share`.
    """

    def __init__(
        self, config: DflashConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = Linear(
            config.dims.target_feature_width, {"fc": width}, bias=False, dtype=dtype, device=device
        )
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.layers = [_decoder_layer(config, dtype, self.device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.embed_tokens: Table | None = None
        self.lm_head: Table | None = None
        self._rotary: RotaryEmbedding | None = None
        self._projection: ContextProjection | None = None

    @property
    def is_shared(self) -> bool:
        """Whether `share` was called; the model runs only after it."""
        return self._rotary is not None

    def share(self, embed_tokens: Table, lm_head: Table, max_position: int) -> None:
        """Uses the target's `embed_tokens` and `lm_head`, each `[V, H]`, for up to `max_position` positions.

        Call it when the weights are filled. Raises CheckpointError if the shapes do not fit.
        """
        config = self.config
        for name, weight in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if weight.shape != (config.vocab_size, config.hidden_size):
                raise CheckpointError(
                    f"{config.path}: the target's {name} has shape {list(weight.shape)}, but the drafter "
                    f"needs [{config.vocab_size}, {config.hidden_size}]; use the drafter trained for "
                    "this target"
                )
        self.embed_tokens = embed_tokens.to(self.device, self.dtype)
        self.lm_head = lm_head.to(self.device, self.dtype)
        self._projection = ContextProjection(self.layers, config)
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, max_position, self.device, self.dtype)

    def project(self, features: torch.Tensor, positions: torch.Tensor) -> ContextRows:
        """The committed tokens at `positions` int64 `[T]`, from the target's features `[T, K*H]`."""
        rotary, projection = self._shared()
        vectors = self.hidden_norm(self.fc(features.to(self.dtype)))
        return ContextRows(vectors, *projection(vectors, *rotary.lookup(positions, self.dtype)))

    def embed_block(self, newest: torch.Tensor, count: int) -> torch.Tensor:
        """The rows of blocks of `count` tokens: `newest` int64 `[B]` and mask tokens -> `[B*count, H]`."""
        self._shared()
        assert self.embed_tokens is not None
        masks = torch.full(
            (newest.shape[0], count - 1), self.config.mask_token_id, dtype=torch.int64, device=newest.device
        )
        ids = torch.cat((newest[:, None], masks), dim=1)
        hidden = look_up(ids.view(-1), self.embed_tokens)
        return hidden if self.config.embedding_scale == 1.0 else hidden * self.config.embedding_scale

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, attends: Sequence[Attend]
    ) -> torch.Tensor:
        """Runs layer i with `attends[i]` over the rows of blocks, `[T, H]` at `positions` int64 `[T]`.

        Returns the normed output `[T, H]`.
        """
        rotary, _ = self._shared()
        cos, sin = rotary.lookup(positions, self.dtype)
        delta: Left = None
        for index, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            normed, hidden = layer.enter(hidden, delta)
            hidden, delta = layer(normed, hidden, cos, sin, index, attend)
        return self.norm.add(delta, hidden)[0] if isinstance(delta, torch.Tensor) else self.norm(hidden)

    def compute_logits(self, out_rows: torch.Tensor) -> torch.Tensor:
        """Outputs `[R, H]` of `forward` -> logits `[R, V]` float32."""
        self._shared()
        assert self.lm_head is not None
        config, logits = self.config, table_logits(out_rows, self.lm_head)
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        return (logits / config.logit_cap).tanh() * config.logit_cap if config.logit_cap else logits

    def tensors(self) -> NamedTensors:
        """Every tensor that a checkpoint must hold: its published name and its memory."""
        yield from self.fc.tensors("")
        yield from self.hidden_norm.tensors("hidden_norm")
        for index, layer in enumerate(self.layers):
            yield from layer.tensors(f"layers.{index}.")
        yield from self.norm.tensors("norm")

    def parameters(self) -> NamedTensors:
        """Every constant tensor that a graph reads, including those shared by the target."""
        yield from self.tensors()
        if self._projection is not None and self.embed_tokens is not None and self.lm_head is not None:
            yield from self._projection.tensors()
            yield "embed_tokens", rows_of(self.embed_tokens)
            yield "lm_head", rows_of(self.lm_head)

    def _shared(self) -> tuple[RotaryEmbedding, ContextProjection]:
        if self._rotary is None or self._projection is None:
            raise LifecycleError(
                "the draft model runs before the target's embedding and lm_head were shared with it"
            )
        return self._rotary, self._projection

    def __repr__(self) -> str:
        state = "shared" if self.is_shared else "not shared"
        return f"<DflashHead {self.config!r}, {self.dtype}, {self.device}, {state}>"


def _decoder_layer(config: DflashConfig, dtype: torch.dtype, device: torch.device) -> DecoderLayer:
    bias = config.attention_bias
    return sized_layer(config, dtype, device, qkv_bias=bias, output_bias=bias, mlp_bias=False, qk_norm=True)
