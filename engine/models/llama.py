"""The Llama family, by switches of the config.

It covers Llama, SmolLM2, Qwen2 and MiMo (biased q, k, v), Qwen3 (normed q, k), Qwen3-MoE and Mixtral
(experts instead of the MLP), and what `layer_forms` describes: Mistral, Gemma 2 and 3, Phi-3 and 4, OLMo 2,
SmolLM3 and gpt-oss. Legend: T tokens, R selected rows, V vocabulary, H hidden size, K captured layers.
"""

from collections.abc import Callable, Sequence

import torch

from ...kernels.attention_form import capped
from ...kernels.row_ops import FASTEST, RowOps
from ..errors import CheckpointError, LifecycleError
from ..kv.layouts import PageLayout
from ..parallel.group import SOLO, TensorGroup
from ..parallel.vocabulary import look_up, num_rank_rows, table_logits, table_of
from .config import ModelConfig
from .dense_layer import decoder_layer
from .layers import Attend, DecoderLayer, Left, NamedTensors, RMSNorm, added, link_layers
from .quant.kv_scales import stored_dtype
from .quant.projections import Projections
from .rope import RotaryEmbedding

KEPT_ROWS = 1024  # up to so many, captured rows are kept and copied in one launch behind the layers


class LlamaForCausalLM:
    """A `CausalLM` with allocated, uninitialised weights; `tensors()` names the memory to fill.

    As a rank of `group` it has the part of each weight that `cuts` tells, and `config` is that of the rank.
    """

    takes_input_embeds = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ops: RowOps = FASTEST,
        group: TensorGroup = SOLO,
    ) -> None:
        self.config = config
        self.ops = ops
        self.group = group
        self.dtype = dtype
        self.device = torch.device(device)
        self.aux_layer_ids: tuple[int, ...] | None = None
        rows = num_rank_rows(config.vocab_size, group.size)
        self.embed_tokens = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.lm_head = (
            self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        )
        self.projections = Projections(config.quant, is_invariant=ops.is_invariant)
        self.needs_all_rows = False
        self.layers = [self.decoder_layer(layer) for layer in range(config.num_layers)]
        link_layers(self.layers)
        forms, places = config.forms, (config.rotary_size, config.max_position_embeddings, device, dtype)
        self.norm = RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            dtype=dtype,
            device=device,
            ops=ops,
            offset=forms.norm_offset,
        )
        self.rotary = RotaryEmbedding(config.rope, *places)
        self.local_rotary = None if forms.local_rope is None else RotaryEmbedding(forms.local_rope, *places)
        self._embed_scale = float(torch.tensor(forms.embed_scale).to(dtype))  # rounded as the embeddings are

    def decoder_layer(self, layer: int) -> DecoderLayer:
        """Layer `layer`, with uninitialised weights."""
        return decoder_layer(self.config, self.dtype, self.device, self.ops, layer, self.projections)

    def kv_layout(self, page_size: int) -> PageLayout:
        """The layout of this model's KV in pages of `page_size` tokens."""
        config = self.config
        return config.kv_layout(config.num_layers, page_size, stored_dtype(config.kv_dtype, self.dtype))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids `[T]` int64 -> the residual stream `[T, H]`."""
        found = look_up(input_ids, table_of(self.embed_tokens, self.config.vocab_size, self.group))
        return found if self._embed_scale == 1.0 else found * self._embed_scale

    def body(
        self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, aux_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run all layers over `hidden` `[T, H]` at `positions` int64 `[T]`.

        Returns the residual stream `[T, H]` before the final norm, and the outputs of layers `aux_ids` side
        by side in that order, `[T, K*H]` (None without ids).
        """
        attended, hidden, aux = self.trunk(hidden, positions, attend, aux_ids)
        hidden = self.finish(attended, hidden)
        last = len(self.layers) - 1
        if aux is not None and last in aux_ids:
            column = list(aux_ids).index(last) * self.config.hidden_size
            aux[:, column : column + self.config.hidden_size] = hidden
        return hidden, aux

    def trunk(
        self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend, aux_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """As `ShortEnd.trunk`."""
        tables = self._tables(positions)
        width, last = self.config.hidden_size, len(self.layers) - 1
        columns = {layer: slice(j * width, (j + 1) * width) for j, layer in enumerate(aux_ids)}
        kept: dict[int, torch.Tensor] = {}
        aux = None
        if columns and (hidden.shape[0] > KEPT_ROWS or max(columns) >= last):
            aux = hidden.new_empty(hidden.shape[0], len(columns) * width)
        delta: Left = None
        for index, layer in enumerate(self.layers):
            # a layer's output is complete after the next layer's norm, which adds the MLP output
            normed, hidden = layer.enter(hidden, delta)
            if index - 1 in columns:
                if aux is None:
                    kept[index - 1] = hidden
                else:
                    aux[:, columns[index - 1]] = hidden
            if index < last:
                hidden, delta = layer(normed, hidden, *tables[index], index, attend)
        if kept:
            aux = torch.cat([kept[layer] for layer in aux_ids], dim=1)
        return self.layers[-1].attention.attended(normed, *tables[last], last, attend), hidden, aux

    def _tables(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The rotary tables of each layer at `positions` int64 `[T]`."""
        tables = self.rotary.lookup(positions, self.dtype)
        if self.local_rotary is None:
            return [tables] * len(self.layers)
        local, forms = self.local_rotary.lookup(positions, self.dtype), self.config.forms
        return [local if forms.window(layer) else tables for layer in range(len(self.layers))]

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """As `ShortEnd.finish`."""
        return added(*self.layers[-1].leave(attended, hidden))

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Residual stream `[R, H]` before the final norm -> logits, float32 `[R, V]`."""
        table = table_of(self.lm_head, self.config.vocab_size, self.group)
        logits = table_logits(self.norm(hidden_rows), table, self.ops.logits)
        return capped(logits, self.config.forms.final_softcap)

    def set_aux_layer_ids(self, ids: Sequence[int]) -> None:
        """Choose, once, the layer outputs that a capturing forward returns, in the given order.

        Raises CheckpointError for a duplicate or missing layer, LifecycleError for a second, different
        choice.
        """
        chosen = tuple(ids)
        where = f"aux layer ids {list(chosen)} for {type(self).__name__} with {len(self.layers)} layers"
        for layer in chosen:
            if not 0 <= layer < len(self.layers):
                raise CheckpointError(
                    f"{where}: {layer} is not a layer; ids run from 0 to {len(self.layers) - 1}"
                )
            if chosen.count(layer) > 1:
                raise CheckpointError(f"{where}: {layer} is listed twice; correct the draft's config")
        if self.aux_layer_ids not in (None, chosen):
            raise LifecycleError(f"{where}: already configured as {list(self.aux_layer_ids or ())}")
        self.aux_layer_ids = chosen

    def tensors(self) -> NamedTensors:
        """The name of every tensor that a checkpoint must hold, with the memory to copy it to."""
        return self._named(lambda layer, prefix: layer.tensors(prefix))

    def parameters(self) -> NamedTensors:
        """As `CausalLM.parameters`."""
        return self._named(lambda layer, prefix: layer.parameters(prefix))

    def _named(self, of_layer: Callable[[DecoderLayer, str], NamedTensors]) -> NamedTensors:
        yield "model.embed_tokens.weight", self.embed_tokens
        for index, layer in enumerate(self.layers):
            yield from of_layer(layer, f"model.layers.{index}.")
        yield from self.norm.tensors("model.norm")
        if not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.lm_head

    def __repr__(self) -> str:
        config = self.config
        return (
            f"<{config.architecture} {config.num_layers} x {config.hidden_size}, {self.dtype}, {self.device}>"
        )
