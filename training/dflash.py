"""Trains a DFLASH drafter (arXiv 2602.06036) on blocks that begin at random anchors.

An anchor is a generated token, whose successor is generated too. Its block holds the token and mask tokens,
at the positions from the anchor on. Row j of a block predicts the token j positions behind the anchor. A row
sees the context vectors of the positions before the anchor, not that of the anchor itself, whose features no
server has yet when it drafts, and all rows of its own block.

The loss is D-PACE: the cross entropy of row j is weighted by the part that its probability has in the
expected number of accepted drafts.

Shape legend: B samples, L tokens, A anchors of each, S rows of a block, H hidden, K features, V vocabulary, N
query heads, G key/value heads, D head dimension.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.host_copy import to_device
from ..engine.models.rope import RotaryEmbedding
from ..engine.speculative.drafters.dflash_config import DflashConfig
from ..kernels.output_loss import loss_gradient, loss_rows
from .draft_layers import GatedMLP, Norm, Projections
from .frozen_target import FrozenTarget, TargetRows
from .loss_vocabulary import LossVocabulary, places_in
from .output_loss import output_loss
from .samples import Batch
from .seeds import seeded
from .target_layers import layer_tensors
from .trainee import StepLosses

PACE = 0.5  # of D-PACE: 1 weighs a row by the number of rows from it on, 0 by their present probabilities
NOISE = 0.02  # of the projection's first weights


class Anchors(NamedTuple):
    """`places` int64 `[B, A]`, ascending, and which of them are real, bool `[B, A]`."""

    places: torch.Tensor
    is_real: torch.Tensor


def draw_anchors(mask: torch.Tensor, count: int, seed: int) -> Anchors:
    """Up to `count` anchors of each sample of `mask` bool `[B, L]`, on the host; no more than any has."""
    usable = mask.clone()
    usable[:, :-1] &= mask[:, 1:]
    usable[:, -1] = False
    count = max(1, min(count, int(usable.sum(1).max())))
    noise = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed))
    drawn = noise.masked_fill(~usable, 2.0).topk(count, dim=1, largest=False)
    places, order = drawn.indices.sort(1)
    return Anchors(places, (drawn.values < 2.0).gather(1, order))


def unseen(places: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Which of `places` int64 `[L]` no row of the block at each anchor `[B, A]` sees, bool `[B, A, L]`."""
    return places >= anchors[..., None]


def pace_weights(likelihood: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
    """The weight of each draft of blocks, from the probability of its token, both `[S-1, M]`."""
    reached = torch.where(is_valid, (1 - PACE) * likelihood + PACE, 1.0).cumprod(0) * is_valid
    return reached.flip(0).cumsum(0).flip(0) * is_valid


class BlockLayer(nn.Module):
    """A decoder layer of a block, over the context and the block's own rows."""

    def __init__(self, config: DflashConfig) -> None:
        super().__init__()
        width, eps, bias = config.hidden_size, config.rms_norm_eps, config.attention_bias
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.self_attn = Projections(config, width, bias=bias, output_bias=bias, qk_norm=True)
        self.mlp = GatedMLP(config, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor,
        block_table: tuple[torch.Tensor, torch.Tensor],
        context_table: tuple[torch.Tensor, torch.Tensor],
        hidden_context: torch.Tensor,
    ) -> torch.Tensor:
        """`x` `[B, A*S, H]`, context vectors `[B, L, H]`, rotary tables of both; `hidden_context` bool
        `[B, A, L]`: the positions that a block does not see.
        """
        attention, normed = self.self_attn, self.input_layernorm(x)
        keys = attention.keys(context, *context_table), attention.keys(normed, *block_table)
        values = attention.values(context), attention.values(normed)
        out = block_attention(attention.queries(normed, *block_table), keys, values, hidden_context)
        x = x + attention.output(out)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


def block_attention(
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    values: tuple[torch.Tensor, torch.Tensor],
    hidden_context: torch.Tensor,
) -> torch.Tensor:
    """`q` `[B, N, A*S, D]` over `keys` and `values` of the context `[B, G, L, D]` and of the blocks
    `[B, G, A*S, D]` -> `[B, N, A*S, D]`.
    """
    batch, heads, rows, dim = q.shape
    groups, anchors = keys[0].shape[1], hidden_context.shape[1]
    each, size = heads // groups, rows // anchors
    scale = 1 / math.sqrt(dim)
    q = q.reshape(batch, groups, each * rows, dim)
    before = (q @ keys[0].transpose(-1, -2)).view(batch, heads, anchors, size, -1)
    before = before.masked_fill(hidden_context[:, None, :, None], float("-inf"))
    blocks = q.reshape(batch, groups, each, anchors, size, dim)
    own_k, own_v = (x.reshape(batch, groups, 1, anchors, size, dim) for x in (keys[1], values[1]))
    own = (blocks @ own_k.transpose(-1, -2)).view(batch, heads, anchors, size, size)
    weights = (torch.cat((before, own), -1) * scale).softmax(-1, dtype=torch.float32).to(q.dtype)
    of_context, of_block = weights[..., : before.shape[-1]], weights[..., before.shape[-1] :]
    out = of_context.reshape(batch, groups, each * rows, -1) @ values[0]
    inner = of_block.reshape(batch, groups, each, anchors, size, size) @ own_v
    joined: torch.Tensor = out.view(inner.shape) + inner
    return joined.reshape(batch, heads, rows, dim)


class DflashTrainee(nn.Module):
    """The drafter of `config` with trainable weights, whose names are those of its checkpoint.

    `num_anchors`: blocks of a sample in one batch. The loss runs over a `vocabulary` if there is one. Layers
    start from the target's last ones, which read their context from the newest features. Weights are float32;
    the dtype of products is the target's.
    """

    def __init__(
        self,
        config: DflashConfig,
        target: FrozenTarget,
        *,
        num_anchors: int,
        seed: int,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.config, self.num_anchors, self._vocabulary = config, num_anchors, vocabulary
        width, eps = config.hidden_size, config.rms_norm_eps
        self._target = target
        with seeded(seed):
            self.fc = nn.Linear(config.dims.target_feature_width, width, bias=False)
            nn.init.normal_(self.fc.weight, std=NOISE)
            self.hidden_norm = Norm(width, eps)
            self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
            self.norm = Norm(width, eps)
        self._start_from_target()
        self._rotary = RotaryEmbedding(
            config.rope,
            config.head_dim,
            config.max_position_embeddings,
            target.model.device,
            target.model.dtype,
        )

    @torch.no_grad()
    def _start_from_target(self) -> None:
        """Copies what fits of the target's last layers. A target of other sizes leaves random weights."""
        model, width = self._target.model, self.config.hidden_size
        first = model.config.num_layers - self.config.num_layers
        if first < 0:
            return
        found = [layer_tensors(model, first + index) for index in range(self.config.num_layers)]
        for layer, tensors in zip(self.layers, found, strict=True):
            own = layer.state_dict()
            layer.load_state_dict(
                {name: tensors[name] if _fits(tensors, name, own) else own[name] for name in own}
            )
        self.norm.weight.copy_(model.norm.weight.float())
        self.hidden_norm.weight.copy_(found[0]["input_layernorm.weight"])
        self.fc.weight[:, -width:] += torch.eye(width)

    def forward(self, batch: Batch, rows: TargetRows) -> StepLosses:
        """The losses of all rows of the blocks of `batch`. A draft counts if all before it are right."""
        device, dtype = rows.hidden.device, self._target.model.dtype
        drawn = draw_anchors(batch.mask, self.num_anchors, batch.seed)
        size = self.config.block_size
        ends = drawn.places[..., None] + torch.arange(1, size)  # [B, A, S-1]
        inside = ends.clamp(max=batch.mask.shape[1] - 1)
        is_valid = batch.mask[:, None].expand(-1, ends.shape[1], -1).gather(2, inside) & (ends == inside)
        is_valid = (is_valid & drawn.is_real[..., None]).cumprod(2).bool()  # up to the first that is not
        anchors, inside, valid = (to_device(x, device) for x in (drawn.places, inside, is_valid))
        labels = batch.tokens[:, None].expand(-1, ends.shape[1], -1).gather(2, inside)
        labels, valid = (x.flatten(0, 1).T.contiguous() for x in (labels, valid))  # [S-1, M]
        num_blocks = valid[0].sum().clamp(min=1)
        weight, known = self._target.model.lm_head, torch.ones_like(valid)
        if self._vocabulary is not None:
            ids = self._vocabulary.draw(batch.seed)
            # a token that is not among them cannot be predicted: its row teaches nothing
            weight, (labels, known) = weight[ids], places_in(ids, labels)
        loss, correct, reached = (torch.zeros(size - 1, device=device) for _ in range(3))

        def grade(part: slice, logits: torch.Tensor) -> torch.Tensor:
            wanted, counted, taught = labels[:, part], valid[:, part], known[:, part]
            found = loss_rows(logits, wanted.flatten())
            losses = found.loss.view(wanted.shape) * taught
            weights = pace_weights((-losses).exp() * taught, counted) * taught / num_blocks
            is_kept = ((found.best.view(wanted.shape) == wanted) & counted & taught).cumprod(0)
            loss.add_((losses * counted).sum(1))
            correct.add_(is_kept.sum(1))
            reached.add_(torch.cat((counted[:1], counted[1:] * is_kept[:-1])).sum(1))
            loss_gradient(logits, wanted.flatten(), found.norm, weights.flatten())
            return (losses * weights).sum()

        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outs = self.outputs(batch.tokens, rows.features, anchors)  # [B, A, S, H]
            drafts = outs[:, :, 1:].flatten(0, 1).transpose(0, 1)
            objective = output_loss(drafts, weight, grade)
        unused = sum(parameter.sum() for parameter in self.parameters()) * 0
        return StepLosses(objective + unused, loss / valid.sum(1).clamp(min=1), correct, reached)

    def outputs(self, tokens: torch.Tensor, features: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """The normed outputs `[B, A, S, H]` of the blocks at `anchors` int64 `[B, A]`.

        `tokens` int64 `[B, L]`, `features` `[B, L, K*H]`.
        """
        config, (batch, length) = self.config, tokens.shape
        size, count = config.block_size, anchors.shape[1]
        context = self.hidden_norm(self.fc(features))
        ids = torch.full((batch, count, size), config.mask_token_id, device=tokens.device)
        ids[:, :, 0] = tokens.gather(1, anchors)
        x = F.embedding(ids.view(batch, -1), self._target.model.embed_tokens)
        places = torch.arange(length, device=tokens.device)
        positions = anchors[..., None] + torch.arange(size, device=tokens.device)
        positions = positions.clamp(max=self._rotary.max_position - 1)
        dtype = self._target.model.dtype
        block_table = _table(self._rotary, positions.view(batch, -1), dtype)
        context_table = self._rotary.lookup(places, dtype)
        hidden_context = unseen(places, anchors)
        for layer in self.layers:
            x = layer(x, context, block_table, context_table, hidden_context)
        out: torch.Tensor = self.norm(x).view(batch, count, size, -1)
        return out

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint, in the names of `DFlashDraftModel`."""
        return {name: tensor.detach() for name, tensor in self.state_dict().items()}


def _fits(tensors: Mapping[str, torch.Tensor], name: str, own: Mapping[str, torch.Tensor]) -> bool:
    return name in tensors and tensors[name].shape == own[name].shape


def _table(
    rotary: RotaryEmbedding, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[B, 1, T, D]` of `positions` int64 `[B, T]`."""
    cos, sin = rotary.lookup(positions.flatten(), dtype)
    return cos.view(*positions.shape, -1).unsqueeze(1), sin.view(*positions.shape, -1).unsqueeze(1)
