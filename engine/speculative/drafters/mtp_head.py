"""The network of MTP modules: embedding and hidden, each normed, projected to one stream, and one layer.

Row i of module k takes the token at i+k+1 and predicts the token at i+k+2, at rotary position i. Its hidden
input is the target's of position i, or in a chained family the hidden of module k-1 in the same row. Shape
legend: T rows, R selected rows, H hidden of target and module, V vocabulary, K modules.
"""

from collections.abc import Sequence

import torch

from ....kernels.norm_pair import norm_pair
from ...errors import CheckpointError, LifecycleError
from ...models.dense_layer import decoder_layer
from ...models.layers import Attend, Linear, NamedTensors, RMSNorm, added
from ...models.quant.projections import Projections
from ...models.rope import RotaryEmbedding
from ...parallel.vocabulary import Table, look_up, rows_of, table_logits
from .eagle3_head import DraftPhase
from .mtp_config import MtpConfig, MtpDialect


class MtpModule:
    """One module, allocated but not filled. `tensors` names the memory to fill.

    `embed_tokens` and `lm_head` `[V, H]` are None until the checkpoint or the target provides them. `number`:
    of the module; `projections`: the forms of its matrices.
    """

    def __init__(
        self,
        config: MtpConfig,
        dialect: MtpDialect,
        dtype: torch.dtype,
        device: torch.device,
        number: int,
        projections: Projections,
    ) -> None:
        width, eps = config.layer.hidden_size, config.layer.rms_norm_eps
        self.hidden_first = dialect.hidden_first
        self.embed_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.norm = RMSNorm(width, eps, dtype=dtype, device=device)
        self.fc = Linear(2 * width, {"fc": width}, bias=False, dtype=dtype, device=device)
        # behind the layers of the target, whose first ones may be dense
        layer = config.target_layers + number
        self.layer = decoder_layer(config.layer, dtype, device, layer=layer, projections=projections)
        self.embed_tokens: Table | None = None
        self.lm_head: Table | None = None

    def __call__(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """`hidden` `[T, H]`, `token_ids` int64 `[T]`, rotary tables `[T, D]` -> `[T, H]` before the final
        norm.

        `attend` is bound to the KV of this module; it is called for layer 0.
        """
        assert self.embed_tokens is not None, "the module runs before share"
        embeds = look_up(token_ids, self.embed_tokens), self.embed_norm.next
        streams = (hidden, self.hidden_norm.next), embeds
        left, right = streams if self.hidden_first else streams[::-1]
        x = self.fc(norm_pair(*left, *right)[0])
        normed, x = self.layer.enter(x, None)
        x, delta = self.layer(normed, x, cos, sin, 0, attend)
        return added(x, delta)

    def tensors(self) -> NamedTensors:
        """Every tensor that a checkpoint must hold, by the names of `MtpDialect.checkpoint_name`."""
        return self._named(self.layer.tensors("layer."))

    def parameters(self) -> NamedTensors:
        """As `tensors`, with the experts of the layer as one tensor of each matrix."""
        return self._named(self.layer.parameters("layer."))

    def _named(self, layer: NamedTensors) -> NamedTensors:
        yield from self.fc.tensors("")
        for name in ("embed_norm", "hidden_norm", "norm"):
            norm: RMSNorm = getattr(self, name)
            yield from norm.tensors(name)
        yield from layer

    @property
    def num_weights(self) -> int:
        """Number of weights that one forward reads, with the output projection."""
        own = sum(weight.numel() for _, weight in self.tensors())
        return own + (0 if self.lm_head is None else self.lm_head.numel())


class MtpHead:
    """The first `num_modules` modules of `config`, in the order of their proposals."""

    def __init__(
        self,
        config: MtpConfig,
        dialect: MtpDialect,
        num_modules: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.dialect = dialect
        self.dtype = dtype
        self.device = torch.device(device)
        self.is_normed = dialect.is_normed
        self.is_chained = dialect.is_chained if config.is_chained is None else config.is_chained
        self.projections = Projections(config.layer.quant)
        self.modules = [
            MtpModule(config, dialect, dtype, self.device, number, self.projections)
            for number in range(num_modules)
        ]
        self.target_ids = torch.arange(config.layer.vocab_size, device=device)
        self._target_norm: RMSNorm | None = None
        self._rotary: RotaryEmbedding | None = None

    @property
    def num_modules(self) -> int:
        """K, the number of loaded modules."""
        return len(self.modules)

    @property
    def is_shared(self) -> bool:
        """Whether `share` was called; the modules run only after it."""
        return self._rotary is not None

    def share(self, embed_tokens: Table, lm_head: Table, final_norm: RMSNorm, max_position: int) -> None:
        """Uses the target's `embed_tokens` and `lm_head`, each `[V, H]`, where a module has none or a copy.

        `final_norm` is the target's; `max_position` is the number of positions to serve. Raises
        CheckpointError when a shared weight does not fit.
        """
        layer = self.config.layer
        for name, weight in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if weight.shape != (layer.vocab_size, layer.hidden_size):
                raise CheckpointError(
                    f"{self.config.path}: the target's {name} of shape {list(weight.shape)} cannot stand for "
                    f"[{layer.vocab_size}, {layer.hidden_size}]; use the target of these modules"
                )
            for module in self.modules:
                own = getattr(module, name)
                is_copy = isinstance(weight, torch.Tensor) and own is not None and torch.equal(own, weight)
                if own is None or is_copy:
                    setattr(module, name, weight)
        self._target_norm = final_norm
        self._rotary = RotaryEmbedding(layer.rope, layer.rotary_size, max_position, self.device, self.dtype)

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """The target's residual stream `[T, H]` -> the hidden input of the first module `[T, H]`."""
        if self._target_norm is None:
            raise LifecycleError("MTP modules run before the target's weights were shared with them")
        features = features.to(self.dtype)
        return self._target_norm(features) if self.is_normed else features

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, D]` for `positions` int64 `[T]`. Raises LifecycleError before `share`."""
        if self._rotary is None:
            raise LifecycleError("MTP modules run before the target's weights were shared with them")
        return self._rotary.lookup(positions, self.dtype)

    def run(
        self,
        features: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """All modules over rows whose tokens are known: `[T, K*H]`, the outputs side by side.

        `features` `[T, H]` are the target's. Column k of `token_ids` int64 `[T, K]` holds the tokens of
        module k, and `attends[k]` is bound to its KV.
        """
        hidden, outs = self.project(features), []
        cos, sin = self.rotary(positions)
        for k, module in enumerate(self.modules):
            out = module(hidden, token_ids[:, k], cos, sin, attends[k])
            outs.append(out)
            if self.is_chained and k + 1 < self.num_modules:
                hidden = self.feedback(out, k)
        return torch.cat(outs, dim=1)

    def forward(
        self,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        phase: DraftPhase,
    ) -> torch.Tensor:
        """The first module's output `[T, H]` before its final norm.

        `hidden` `[T, H]` is the target's residual stream for FROM_TARGET_FEATURES, or from `feedback` for
        SELF_CHAIN.
        """
        if phase is DraftPhase.FROM_TARGET_FEATURES:
            hidden = self.project(hidden)
        return self.modules[0](hidden, token_ids, *self.rotary(positions), attend)

    def compute_logits(self, out_rows: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Outputs `[R, H]` of module number `module` -> logits `[R, V]` float32."""
        mine = self.modules[module]
        assert mine.lm_head is not None, "the module runs before share"
        return table_logits(mine.norm(out_rows), mine.lm_head)

    def feedback(self, out_rows: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Outputs `[R, H]` of module number `module` -> the hidden `[R, H]` that the next pass takes."""
        return self.modules[module].norm(out_rows) if self.is_normed else out_rows

    def tensors(self) -> NamedTensors:
        """Every tensor that a graph of the modules reads, shared ones included."""
        yield "target_ids", self.target_ids
        if self._target_norm is not None:
            yield from self._target_norm.tensors("target_norm")
        for k, module in enumerate(self.modules):
            yield from ((f"{k}.{name}", weight) for name, weight in module.parameters())
            if module.embed_tokens is not None and module.lm_head is not None:
                yield f"{k}.embed_tokens", rows_of(module.embed_tokens)
                yield f"{k}.lm_head", rows_of(module.lm_head)

    def __repr__(self) -> str:
        state = "shared" if self.is_shared else "not shared"
        kind = "chained" if self.is_chained else "from the target"
        return f"<MtpHead {self.num_modules} {self.dialect.name} modules, {kind}, {self.dtype}, {state}>"
