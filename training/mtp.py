"""One MTP module with trainable weights, applied again to its own output in every step (FastMTP, arXiv
2509.18362).

Unlike FastMTP, a row of step k sees the keys of step 0 of the rows before it, as a served chain does. The
hidden input is the target's behind its final norm; later steps take the module's own, behind its norm. The
checkpoint has the names of Qwen3-Next's module. Shape legend: B samples, L rows, H hidden, D head dimension.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ..engine.errors import CheckpointError
from ..engine.models.rope import RotaryEmbedding
from ..engine.speculative.drafters.mtp_config import DIALECTS, MtpConfig
from .chain import ChainTrainee
from .chain_attention import KeysValues
from .draft_layers import GatedMLP, Norm, Projections
from .eagle3 import chain_layer_attention
from .frozen_target import FrozenTarget, TargetRows
from .loss_vocabulary import LossVocabulary
from .seeds import seeded
from .target_layers import layer_tensors

NOISE = 0.02  # of the projection's first weights


class ModuleLayer(nn.Module):
    """The module's decoder layer: that of the target."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        sizes = config.layer
        self.input_layernorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.post_attention_layernorm = Norm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Projections(
            sizes,
            sizes.hidden_size,
            bias=sizes.attention_bias,
            output_bias=sizes.attention_output_bias,
            qk_norm=sizes.qk_norm,
        )
        self.mlp = GatedMLP(sizes, bias=sizes.mlp_bias)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, earlier: list[KeysValues]
    ) -> torch.Tensor:
        x = x + chain_layer_attention(self.self_attn, self.input_layernorm(x), cos, sin, earlier)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MtpTrainee(ChainTrainee):
    """The module of `config`. It starts from the target's last layer and final norm."""

    def __init__(
        self,
        config: MtpConfig,
        target: FrozenTarget,
        *,
        steps: int,
        seed: int,
        sharpness: float = 1.0,
        missed: float = 1.0,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        ids = torch.arange(config.layer.vocab_size)
        super().__init__(target, ids, steps=steps, sharpness=sharpness, missed=missed, vocabulary=vocabulary)
        self.config = config
        sizes = config.layer
        width, eps = sizes.hidden_size, sizes.rms_norm_eps
        with seeded(seed):
            self.fc = nn.Linear(2 * width, width, bias=False)
            nn.init.normal_(self.fc.weight, std=NOISE)
        self.embed_norm, self.hidden_norm, self.norm = (Norm(width, eps) for _ in range(3))
        self.block = ModuleLayer(config)
        with torch.no_grad():
            # both streams pass: the target's layer reads sums of what its layers before it wrote
            self.fc.weight += torch.cat((torch.eye(width), torch.eye(width)), 1) / 2
            self.norm.weight.copy_(target.model.norm.weight.float())
        tensors = layer_tensors(target.model, config.target_layers - 1)
        if others := sorted(tensors.keys() ^ self.block.state_dict().keys()):
            raise CheckpointError(
                f"{config.path}: an MTP module has plain layers in floats, and {others[0]} of the target's "
                f"{config.layer.architecture} does not fit them; train an EAGLE3 head or a DFLASH drafter"
            )
        self.block.load_state_dict(tensors, strict=True)
        self._rotary = RotaryEmbedding(
            sizes.rope, sizes.head_dim, sizes.max_position_embeddings, target.model.device, target.model.dtype
        )

    @property
    def rotary(self) -> RotaryEmbedding:
        return self._rotary

    def project(self, rows: TargetRows) -> torch.Tensor:
        return self._target.normed(rows.hidden)

    def layer(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        earlier: list[KeysValues],
    ) -> torch.Tensor:
        x = self.fc(torch.cat((self.embed_norm(embeds), self.hidden_norm(hidden)), -1))
        out: torch.Tensor = self.block(x, cos, sin, earlier)
        return out

    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(out)
        return normed

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint of the module, in the dialect `qwen`."""
        dialect = next(each for each in DIALECTS if each.name == "qwen")
        return {
            dialect.checkpoint_name(
                name.replace("block.", "layer."), 0, self.config.target_layers
            ): tensor.detach()
            for name, tensor in self.state_dict().items()
        }
