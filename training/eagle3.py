"""An EAGLE3 head with trainable weights: one layer over pairs of token embedding and fused target features.

Shape legend: B samples, L rows, H draft hidden, Ht target hidden, K features, V vocabulary, Vd draft
vocabulary, D head dimension.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ..engine.models.rope import RotaryEmbedding
from ..engine.speculative.drafters.spec_config import Eagle3Config
from .chain import ChainTrainee
from .chain_attention import KeysValues, chain_attention
from .draft_layers import GatedMLP, Norm, Projections
from .frozen_target import FrozenTarget, TargetRows
from .seeds import seeded


class MidLayer(nn.Module):
    """The head's decoder layer over the pair (normed embedding, normed hidden)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Norm(width, eps)
        self.hidden_norm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.self_attn = Projections(config, 2 * width, bias=bias, output_bias=bias, qk_norm=config.qk_norm)
        self.mlp = GatedMLP(config, bias=config.mlp_bias)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        earlier: list[KeysValues],
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        pair = torch.cat((self.input_layernorm(embeds), normed), -1)
        residual = normed if self.norm_before_residual else hidden
        residual = residual + chain_layer_attention(self.self_attn, pair, cos, sin, earlier)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


def chain_layer_attention(
    attention: Projections,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    earlier: list[KeysValues],
) -> torch.Tensor:
    """The attention of one step over `x` `[B, L, width]`; adds the step's keys and values to `earlier`."""
    earlier.append((attention.keys(x, cos, sin), attention.values(x)))
    return attention.output(chain_attention(attention.queries(x, cos, sin), earlier))


class Eagle3Trainee(ChainTrainee):
    """The head of `config` with trainable weights, whose names are those of its checkpoint.

    A head of a smaller vocabulary starts from the target's rows of lm_head.
    """

    def __init__(
        self,
        config: Eagle3Config,
        target: FrozenTarget,
        target_ids: torch.Tensor,
        *,
        steps: int,
        seed: int,
        sharpness: float = 1.0,
        missed: float = 1.0,
    ) -> None:
        super().__init__(target, target_ids, steps=steps, sharpness=sharpness, missed=missed)
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        with seeded(seed):
            self.fc = nn.Linear(config.dims.target_feature_width, width, bias=config.fc_bias)
            self.midlayer = MidLayer(config)
            self.norm = Norm(width, eps)
            if config.draft_vocab_size != config.vocab_size:
                self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if self.lm_head is not None and config.target_hidden_size == width:
            rows = target.model.lm_head[target_ids.to(target.model.device)]
            self.lm_head.weight.data.copy_(rows.float())
        self._rotary = RotaryEmbedding(
            config.rope,
            config.head_dim,
            config.max_position_embeddings,
            target.model.device,
            target.model.dtype,
        )

    @property
    def rotary(self) -> RotaryEmbedding:
        return self._rotary

    def project(self, rows: TargetRows) -> torch.Tensor:
        hidden: torch.Tensor = self.fc(rows.features)
        return hidden

    def layer(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        earlier: list[KeysValues],
    ) -> torch.Tensor:
        out: torch.Tensor = self.midlayer(embeds, hidden, cos, sin, earlier)
        return out

    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out) if self.config.norm_output else out

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint of the head, in the dialect of SpecForge and SGLang."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        if self.lm_head is not None:
            ids = self.target_ids.cpu()
            known = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            known[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        return tensors
