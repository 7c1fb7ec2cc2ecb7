"""The EAGLE3 head: a decoder layer over (token embedding, hidden), further plain layers in deep heads, and a
reduced output vocabulary.

Row i takes the target's features of position i, or in a chain the head's own hidden, and the embedding of
token i+1. The rotary position is i. The row predicts token i+2. Shape legend: T rows, R selected rows, H
draft hidden, Ht target hidden, K features, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence
from enum import Enum

import torch

from ....kernels.norm_pair import norm_pair
from ...errors import CheckpointError, LifecycleError
from ...models.dense_layer import sized_layer
from ...models.layers import (
    Attend,
    DecoderLayer,
    GatedMLP,
    Linear,
    NamedTensors,
    QKNorm,
    RMSNorm,
    SelfAttention,
    added,
)
from ...models.rope import RotaryEmbedding
from ...parallel.vocabulary import Table, look_up_beside, table_logits
from .spec_config import Eagle3Config, HeadConfig


class DraftPhase(Enum):
    """The source of a forward's hidden input. The caller states it, because both sources may have the same
    width.
    """

    FROM_TARGET_FEATURES = "from_target_features"
    SELF_CHAIN = "self_chain"


class FeatureHead:
    """A head that reads target features in its first step and its own hidden in later ones.

    It is allocated but not filled; `tensors()` names the tensors to fill. `embed_tokens` `[V, H]` and
    `lm_head` `[Vd, H]` are None until the checkpoint or the target provides them. `target_ids` `[Vd]` int64
    maps draft tokens to target tokens. `final_norm` is the target's, for heads that read behind it.
    `mask_input` `[H]`, after `share`, is the hidden input of the places that a parallel head fills; None for
    other heads.
    """

    def __init__(self, config: HeadConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.dims = config.dims
        self.dtype = dtype
        self.device = torch.device(device)
        self.target_ids = torch.arange(config.draft_vocab_size, device=device)
        self.embed_tokens: Table | None = None
        self.lm_head: Table | None = None
        self.final_norm: RMSNorm | None = None
        self.mask_input: torch.Tensor | None = None
        self._rotary: RotaryEmbedding | None = None

    @property
    def config(self) -> HeadConfig:
        """The config that the head was made of."""
        raise NotImplementedError

    @property
    def mask_token(self) -> int:
        """The token of the places that a parallel head fills; -1 for other heads."""
        return -1

    @property
    def is_shared(self) -> bool:
        """Whether `share` was called; the head runs only after it."""
        return self._rotary is not None

    def share(
        self,
        embed_tokens: Table,
        lm_head: Table,
        max_position: int,
        final_norm: RMSNorm | None = None,
    ) -> None:
        """Uses the target's `embed_tokens` and `lm_head`, each `[V, Ht]`, where the checkpoint had none.

        `max_position` is the number of positions to serve. `final_norm` is the target's. Raises
        CheckpointError when a shared weight does not fit, LifecycleError when the head lacks the norm.
        """
        config = self.config
        if self.embed_tokens is None:
            self.embed_tokens = self._fitting("embed_tokens.weight", embed_tokens)
        if self.lm_head is None:
            if config.draft_vocab_size != config.vocab_size:
                raise CheckpointError(
                    f"{config.path}: tensor lm_head.weight is missing; the target's {config.vocab_size} rows "
                    f"cannot stand for draft_vocab_size {config.draft_vocab_size}; fetch the checkpoint again"
                )
            own = self.embed_tokens if config.tie_word_embeddings else lm_head
            self.lm_head = self._fitting("lm_head.weight", own)
        if config.reads_normed and final_norm is None:
            raise LifecycleError(f"the head at {config.path} reads behind the target's final norm; share it")
        self.final_norm = final_norm if config.reads_normed else None
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, max_position, self.device, self.dtype)

    def _fitting(self, name: str, weight: Table) -> Table:
        if weight.shape != (self.config.vocab_size, self.config.hidden_size):
            raise CheckpointError(
                f"{self.config.path}: tensor {name} is missing, and the target's of shape "
                f"{list(weight.shape)} cannot stand for [{self.config.vocab_size}, "
                f"{self.config.hidden_size}]; fetch the checkpoint again"
            )
        return weight.to(self.device, self.dtype)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Target features `[T, K*Ht]` -> the hidden input of the first step `[T, H]`."""
        raise NotImplementedError

    def layers(
        self, hidden: torch.Tensor, embeds: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """All layers over hidden input and token embeddings, each `[T, H]` -> the output `[T, H]`."""
        raise NotImplementedError

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        phase: DraftPhase,
        embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the last layer's output `[T, H]`, with the residual added, un-normed.

        `hidden` is `[T, K*Ht]` for FROM_TARGET_FEATURES, or `[T, H]` from `feedback` for SELF_CHAIN.
        `token_ids` `[T]` are the tokens one to the right of `positions` `[T]`; `embeds` `[T, H]` replaces
        their embeddings. Raises LifecycleError before `share`.
        """
        if self._rotary is None or self.embed_tokens is None:
            raise LifecycleError(
                "the draft head runs before the target's embedding and lm_head were shared with it"
            )
        if phase is DraftPhase.FROM_TARGET_FEATURES:
            assert hidden.shape[-1] == self.dims.target_feature_width, (hidden.shape, self.dims)
            hidden = hidden.to(self.dtype)
            hidden = self.project(hidden if self.final_norm is None else self.final_norm(hidden))
        assert hidden.shape[-1] == self.dims.self_width, (hidden.shape, self.dims)
        if embeds is None:
            tables = self._rotary.lookups(positions, self.dtype)
            embeds, cos, sin = look_up_beside(token_ids, self.embed_tokens, *tables)
        else:
            cos, sin = self._rotary.lookup(positions, self.dtype)
        return self.layers(hidden, embeds, cos, sin, attend)

    def compute_logits(self, out_rows: torch.Tensor) -> torch.Tensor:
        """Outputs `[R, H]` of `forward` -> logits over the draft vocabulary `[R, Vd]` float32."""
        raise NotImplementedError

    def feedback(self, out_rows: torch.Tensor) -> torch.Tensor:
        """Outputs `[R, H]` of `forward` -> the hidden `[R, H]` of the next chain step."""
        raise NotImplementedError

    def tensors(self) -> NamedTensors:
        """Every tensor that a checkpoint must hold: its name and its memory."""
        raise NotImplementedError

    def __repr__(self) -> str:
        state = "shared" if self.is_shared else "not shared"
        return f"<{type(self).__name__} {self.config!r}, {self.dtype}, {self.device}, {state}>"


def plain_layer(
    config: HeadConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    qkv_bias: bool,
    qk_norm: bool,
) -> DecoderLayer:
    """A decoder layer of the usual kind, with input and output of the draft's width."""
    return sized_layer(
        config,
        dtype,
        device,
        qkv_bias=qkv_bias,
        output_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=qk_norm,
    )


class DraftLayer:
    """A decoder layer whose attention input is the pair (normed embedding, normed hidden), twice the output
    width.
    """

    def __init__(self, config: Eagle3Config, dtype: torch.dtype, device: torch.device) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.post_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.attention = SelfAttention(
            2 * width,
            width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=QKNorm(eps=eps) if config.qk_norm else None,
        )
        self.mlp = GatedMLP(width, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device)

    def __call__(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """`embeds` and `hidden` `[T, H]`, rotary tables `[T, D]` -> `[T, H]`, with the residual added,
        un-normed.
        """
        norms = self.input_norm.next, self.hidden_norm.next
        pair, normed = norm_pair(embeds, norms[0], hidden, norms[1], has_alone=self.norm_before_residual)
        residual = hidden if normed is None else normed
        attended = self.attention.attended(pair, cos, sin, 0, attend)
        joins, output = self.post_norm.ops.joins, self.attention.output
        if joins.takes(attended, joins.norms) and self.mlp.joins(joins, attended.shape[0]):
            assert isinstance(output, Linear)
            residual, rows = output.add(attended, residual, self.post_norm.next)
            assert rows is not None
            return self.mlp.add(rows, residual, None)[0]
        normed, residual = self.post_norm.add(output(attended), residual)
        return residual + self.mlp(normed)

    def tensors(self, prefix: str) -> NamedTensors:
        yield from self.input_norm.tensors(f"{prefix}input_layernorm")
        yield from self.hidden_norm.tensors(f"{prefix}hidden_norm")
        yield from self.post_norm.tensors(f"{prefix}post_attention_layernorm")
        yield from self.attention.tensors(f"{prefix}self_attn.")
        yield from self.mlp.tensors(f"{prefix}mlp.")


class Eagle3Head(FeatureHead):
    """An EAGLE3 head. Its first layer reads the pair of embedding and hidden; further ones are plain."""

    def __init__(
        self, config: Eagle3Config, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self._config = config
        width, eps, dims = config.hidden_size, config.rms_norm_eps, config.dims
        parts = {"fc": width}
        self.fc = Linear(dims.target_feature_width, parts, bias=config.fc_bias, dtype=dtype, device=device)
        norm_widths = [dims.target_feature_width] if config.input_norm else []
        self.input_norms = [RMSNorm(w, eps, dtype=dtype, device=device) for w in norm_widths]
        norm_widths = [config.target_hidden_size] * dims.num_features if config.fc_norm else []
        self.fc_norms = [RMSNorm(w, eps, dtype=dtype, device=device) for w in norm_widths]
        self.layer = DraftLayer(config, dtype, self.device)
        self.further = [
            plain_layer(config, dtype, self.device, qkv_bias=config.attention_bias, qk_norm=config.qk_norm)
            for _ in range(1, config.num_layers)
        ]
        self.norm = RMSNorm(width, eps, dtype=dtype, device=device)
        # [K*Ht] as a feature, or [H] as `fc` would give it
        self.mask_hidden: torch.Tensor | None = None
        if config.mask_token is not None:
            self.mask_hidden = torch.empty(dims.target_feature_width, dtype=dtype, device=device)

    @property
    def config(self) -> Eagle3Config:
        return self._config

    @property
    def mask_token(self) -> int:
        return -1 if self.config.mask_token is None else self.config.mask_token

    @torch.no_grad()
    def share(
        self,
        embed_tokens: Table,
        lm_head: Table,
        max_position: int,
        final_norm: RMSNorm | None = None,
    ) -> None:
        super().share(embed_tokens, lm_head, max_position, final_norm)
        if self.mask_hidden is not None:
            is_feature = len(self.mask_hidden) == self.dims.target_feature_width
            self.mask_input = self.project(self.mask_hidden[None])[0] if is_feature else self.mask_hidden

    def project(self, features: torch.Tensor) -> torch.Tensor:
        for norm in self.input_norms:
            features = norm(features)
        if self.fc_norms:
            chunks = features.chunk(len(self.fc_norms), dim=-1)
            features = torch.cat([norm(c) for norm, c in zip(self.fc_norms, chunks, strict=True)], dim=-1)
        return self.fc(features)

    def layers(
        self, hidden: torch.Tensor, embeds: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        return run_layers(
            self.further, self.layer(embeds, hidden, cos, sin, attend), cos, sin, attend, first=1
        )

    def compute_logits(self, out_rows: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "the head runs before share"
        return table_logits(self.norm(out_rows), self.lm_head)

    def feedback(self, out_rows: torch.Tensor) -> torch.Tensor:
        return self.norm(out_rows) if self.config.norm_output else out_rows

    def tensors(self) -> NamedTensors:
        yield from self.fc.tensors("")
        for norm in self.input_norms:
            yield from norm.tensors("input_norm")
        for index, norm in enumerate(self.fc_norms):
            yield from norm.tensors(f"fc_norm.{index}")
        yield from self.layer.tensors("midlayer.")
        for index, layer in enumerate(self.further, start=1):
            yield from layer.tensors(f"layers.{index}.")
        yield from self.norm.tensors("norm")
        if self.mask_hidden is not None:
            yield "mask_hidden", self.mask_hidden


def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attend: Attend,
    *,
    first: int,
) -> torch.Tensor:
    """`layers`, numbered from `first` on, over the residual stream `hidden` `[T, H]`."""
    for index, layer in enumerate(layers, start=first):
        normed, hidden = layer.enter(hidden, None)
        hidden, delta = layer(normed, hidden, cos, sin, index, attend)
        hidden = added(hidden, delta)
    return hidden
