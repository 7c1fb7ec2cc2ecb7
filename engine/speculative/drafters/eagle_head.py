"""The EAGLE head: plain decoder layers over fc(token embedding, hidden), and the target's output projection.

The first layer has no input norm, and the output no norm either, since the head predicts the target's hidden
behind its final norm. Rows and positions are those of an EAGLE3 head. Shape legend: T rows, R selected rows,
H hidden size of draft and target, V vocabulary.
"""

import torch

from ...models.layers import Attend, Linear, NamedTensors, added
from ...parallel.vocabulary import table_logits
from .eagle3_head import FeatureHead, plain_layer, run_layers
from .eagle_config import EagleConfig

SKIPPED_NORM = "layers.0.input_layernorm.weight"


class EagleHead(FeatureHead):
    """An EAGLE head. The feature of a row takes the place of the hidden that the head feeds back."""

    def __init__(
        self, config: EagleConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(config, dtype=dtype, device=device)
        self._config = config
        width = config.hidden_size
        self.fc = Linear(2 * width, {"fc": width}, bias=config.fc_bias, dtype=dtype, device=device)
        self.stack = [
            plain_layer(config, dtype, self.device, qkv_bias=config.qkv_bias, qk_norm=False)
            for _ in range(config.num_layers)
        ]

    @property
    def config(self) -> EagleConfig:
        return self._config

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def layers(
        self, hidden: torch.Tensor, embeds: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        stream = self.fc(torch.cat((embeds, hidden), dim=-1))
        stream, delta = self.stack[0](stream, stream, cos, sin, 0, attend)
        return run_layers(self.stack[1:], added(stream, delta), cos, sin, attend, first=1)

    def compute_logits(self, out_rows: torch.Tensor) -> torch.Tensor:
        assert self.lm_head is not None, "the head runs before share"
        return table_logits(out_rows, self.lm_head)

    def feedback(self, out_rows: torch.Tensor) -> torch.Tensor:
        return out_rows

    def tensors(self) -> NamedTensors:
        yield from self.fc.tensors("")
        for index, layer in enumerate(self.stack):
            for name, memory in layer.tensors(f"layers.{index}."):
                if name != SKIPPED_NORM:
                    yield name, memory
