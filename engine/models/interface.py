"""What the runner asks of a target model."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ..kv.layouts import PageLayout
from .config import ModelConfig
from .layers import Attend, NamedTensors


class CausalLM(Protocol):
    """A decoder in three parts; shapes as in `models.llama`."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def kv_layout(self, page_size: int) -> PageLayout:
        """How the KV of this model lies in a page of `page_size` tokens; its dtype is the model's."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids to the residual stream."""

    def body(
        self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, aux_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers; the residual stream and the captured layer outputs."""

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Residual stream to float32 logits."""

    def tensors(self) -> NamedTensors:
        """Every parameter by name."""


@runtime_checkable
class AuxCapture(Protocol):
    """The hook that a model needs to feed an EAGLE3 head."""

    aux_layer_ids: tuple[int, ...] | None

    def set_aux_layer_ids(self, ids: Sequence[int]) -> None:
        """Choose the captured layers, once."""


@runtime_checkable
class DflashCapture(Protocol):
    """The hook that a model needs to feed a DFLASH drafter; what it captures is the same."""

    aux_layer_ids: tuple[int, ...] | None

    def set_dflash_layer_ids(self, ids: Sequence[int]) -> None:
        """Choose the captured layers, once, for either kind of drafter."""


@runtime_checkable
class InputEmbeds(Protocol):
    """What a model says whose `body` may be given embeddings that are no rows of its own table."""

    takes_input_embeds: bool
