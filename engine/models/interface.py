"""The protocol of a target model. Code outside of `models` uses only this interface."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ..kv.layouts import PageLayout
from .config import ModelConfig
from .layers import Attend, NamedTensors, RMSNorm
from .quant.projections import Projections


class CausalLM(Protocol):
    """A decoder in three parts: embed, body, logits.

    Legend: T tokens, R selected rows, V vocabulary, H hidden size, K features. `embed_tokens` and `lm_head`
    are the weights `[V, H]` that a draft head may share; they are the same tensor when tied. As one rank of
    several a model has some of their rows, and `config` is that of the rank. `norm` is the final norm.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    norm: RMSNorm

    def kv_layout(self, page_size: int) -> PageLayout:
        """The layout of this model's KV in pages of `page_size` tokens, in the model's dtype."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[T]` int64 -> the residual stream `[T, H]`."""

    def body(
        self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, aux_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All layers over `hidden` `[T, H]` at `positions` int64 `[T]`; each calls `attend` once.

        Returns the residual stream `[T, H]` before the final norm, and the outputs of layers `aux_ids` side
        by side in that order, `[T, K*H]` (None without ids).
        """

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Residual stream `[R, H]` -> logits, float32 `[R, V]`."""

    def tensors(self) -> NamedTensors:
        """The name of every tensor that a checkpoint must hold, with the memory to copy it to."""

    def parameters(self) -> NamedTensors:
        """Every constant tensor that a forward reads. The experts of a layer are one tensor, so that a walk
        over all of them takes about a millisecond.
        """


@runtime_checkable
class AuxCapture(Protocol):
    """The interface of a model whose layer outputs a drafter (EAGLE3, DFLASH) can read."""

    aux_layer_ids: tuple[int, ...] | None

    def set_aux_layer_ids(self, ids: Sequence[int]) -> None:
        """Choose, once, the layer outputs that a capturing forward returns, in the given order.

        Raises CheckpointError for a duplicate or missing layer, LifecycleError for a second, different
        choice.
        """


@runtime_checkable
class InputEmbeds(Protocol):
    """The interface of a model whose `body` may take embeddings outside its own table."""

    takes_input_embeds: bool


@runtime_checkable
class StoredForms(Protocol):
    """The interface of a model whose matrices may have the form of a quantised checkpoint."""

    projections: Projections


@runtime_checkable
class ShortEnd(Protocol):
    """The interface of a model that computes the end of its last layer for few rows only.

    Behind its last attention a row depends on no other row, so a prompt needs that part for the rows whose
    logits are wanted. `finish` of all rows of `trunk` is `body`. `needs_all_rows`: something else reads the
    last layer of every row, so forwards compute it.
    """

    needs_all_rows: bool

    def trunk(
        self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, aux_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `body`, up to the attention of the last layer: what it attended `[T, N*D]`, the residual stream
        in front of it `[T, H]`, and the outputs of layers `aux_ids`.

        The columns of the last layer's output are not filled.
        """

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The rest of the last layer, for some rows of `trunk`: the residual stream `[R, H]`."""
