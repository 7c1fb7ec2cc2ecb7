"""The frozen target of a training run: features and hidden states of padded batches, without KV pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..engine.errors import CheckpointError
from ..engine.models.interface import CausalLM
from ..engine.models.registry import load_model_config
from ..engine.models.weights import load_model
from ..kernels.attention_form import PLAIN_FORM, AttentionForm
from ..kernels.paged_attention import batched_attention, causal_band

MAX_FORWARD_TOKENS = 1 << 15  # of one forward of the target


@dataclass(frozen=True)
class TargetRows:
    """`features` `[B, L, K*Ht]` of the chosen layers and `hidden` `[B, L, Ht]` before the final norm."""

    features: torch.Tensor
    hidden: torch.Tensor


class FrozenTarget:
    """The target model. `layer_ids` are the layer outputs in the order of the features' columns."""

    def __init__(self, model: CausalLM, layer_ids: Sequence[int]) -> None:
        self.model = model
        self.layer_ids = tuple(layer_ids)

    @classmethod
    def load(
        cls, path: Path, layer_ids: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> "FrozenTarget":
        """Raises CheckpointError for a model that cannot be loaded, or whose attention is sparse."""
        config = load_model_config(path)
        if config.query_heads != config.num_heads:
            # `_rows` attends to every earlier token, so features would differ from those that are served
            raise CheckpointError(
                f"{path}: drafters cannot be trained for {config.architecture}, whose attention is sparse; "
                "use --draft ngram"
            )
        model, _ = load_model(path, dtype=dtype, device=device)
        return cls(model, layer_ids)

    @torch.no_grad()
    def rows(self, tokens: torch.Tensor) -> TargetRows:
        """The rows of `tokens` int64 `[B, L]`. Padding is on the right, so no real row sees it."""
        batch, length = tokens.shape
        count = max(1, MAX_FORWARD_TOKENS // length)
        parts = [self._rows(tokens[start : start + count]) for start in range(0, batch, count)]
        return TargetRows(torch.cat([p.features for p in parts]), torch.cat([p.hidden for p in parts]))

    def _rows(self, tokens: torch.Tensor) -> TargetRows:
        batch, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).repeat(batch)

        def attend(
            layer: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            form: AttentionForm = PLAIN_FORM,
        ) -> torch.Tensor:
            if form != PLAIN_FORM:
                q, k, v = (x.view(batch, length, *x.shape[1:]) for x in (q, k, v))
                band = causal_band(0, length, q.dtype, q.device, form.window)
                scale = form.scale or float(q.shape[-1] ** -0.5)
                return batched_attention(q, k, v, band[None, None], scale, form).flatten(0, 1)
            q, k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        hidden = self.model.embed(tokens.flatten())
        hidden, aux = self.model.body(hidden, positions, attend, self.layer_ids)
        features = hidden if aux is None else aux
        return TargetRows(features.view(batch, length, -1), hidden.view(batch, length, -1))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` `[R, Ht]` before the final norm -> logits float32 `[R, V]`."""
        return self.model.compute_logits(hidden)

    @torch.no_grad()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` `[..., Ht]` behind the final norm."""
        return self.model.norm(hidden)
