"""The protocol of a target model: the only form in which code outside of `models` knows one."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ..kv.layouts import PageLayout
from .config import ModelConfig
from .layers import Attend, NamedTensors


class CausalLM(Protocol):
    """A decoder in three parts: embed, body, logits. T tokens, R selected rows, V vocabulary, H hidden size, K features.

    `embed_tokens` and `lm_head` are the weights `[V, H]` that a draft head may share, one and the same tensor when tied.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embed_tokens: torch.Tensor
    lm_head: torch.Tensor

    def kv_layout(self, page_size: int) -> PageLayout:
        """How the KV of this model lies in a page of `page_size` tokens; its dtype is the model's."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[T]` int64 to the residual stream `[T, H]`."""

    def body(
        self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, aux_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers over `hidden` `[T, H]` at `positions` `[T]`; each calls `attend` once.

        Returns the residual stream `[T, H]` before the final norm, and the outputs of layers `aux_ids` side by side in that
        order, `[T, K*H]` (None without ids).
        """

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Residual stream `[R, H]` to float32 logits `[R, V]`."""

    def tensors(self) -> NamedTensors:
        """Every tensor that a checkpoint must hold: its name and the memory to copy it to."""


@runtime_checkable
class AuxCapture(Protocol):
    """The hook of a model whose layer outputs a drafter (EAGLE3, DFLASH) can read."""

    aux_layer_ids: tuple[int, ...] | None

    def set_aux_layer_ids(self, ids: Sequence[int]) -> None:
        """Choose, once, the layer outputs that a capturing forward returns, in the order given.

        Raises CheckpointError for a layer that is named twice or does not exist, LifecycleError for a second, different
        choice.
        """


@runtime_checkable
class InputEmbeds(Protocol):
    """A model whose `body` takes embeddings that are no rows of its own table."""

    takes_input_embeds: bool
