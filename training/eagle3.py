"""Trains an EAGLE3 head by training-time test (EAGLE-3, arXiv 2503.01840).

Row i pairs the target's features of position i with token i+1. Step 0 predicts token i+2 from the
features, step k predicts token i+2+k from the head's own output of step k-1, as the chain of a decode step
does. A row of step k sees the keys of step 0 at positions 0 to i and its own keys of steps 1 to k.

Shape legend: B samples, L rows, T steps, H draft hidden, Ht target hidden, K features, V vocabulary, Vd draft
vocabulary, N query heads, G key/value heads, D head dimension.
"""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..engine.models.rope import RotaryEmbedding
from ..engine.speculative.drafters.spec_config import Eagle3Config
from .frozen_target import FrozenTarget, TargetRows
from .samples import Batch
from .trainee import StepLosses

STEP_DECAY = 0.8  # weight of a step's loss over that of the step before
LOSS_ROWS = 4096  # rows of which logits are in memory at once


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scaled: torch.Tensor = self.weight.float() * normed
        return scaled.to(x.dtype)


class ChainAttention(nn.Module):
    """Attention of one step over the first step's keys and the row's own keys of later steps."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = Norm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        earlier: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """`x` `[B, L, 2H]`, rotary tables `[L, D]` -> `[B, L, H]`.

        `earlier` holds the keys and values of the steps before, each `[B, G, L, D]`; this step's are added.
        """
        q, k, v = (_heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin)
        earlier.append((k, v))
        if len(earlier) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self._chained(q, earlier)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return projected

    def _chained(self, q: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        batch, _, length, dim = q.shape
        grouped = q.reshape(batch, self.num_kv_heads, -1, length, dim)  # [B, G, N/G, L, D]
        (k0, v0), own = steps[0], steps[1:]
        scale = 1 / math.sqrt(dim)
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        prefix = (grouped @ k0.unsqueeze(2).transpose(-1, -2)).float() * scale
        prefix = prefix.masked_fill(future, float("-inf"))
        diagonal = torch.stack([(grouped * k.unsqueeze(2)).sum(-1) for k, _ in own], -1).float() * scale
        weights = torch.cat((prefix, diagonal), -1).softmax(-1).to(v0.dtype)
        out = weights[..., :length] @ v0.unsqueeze(2)
        for column, (_, v) in enumerate(own):
            out = out + weights[..., length + column, None] * v.unsqueeze(2)
        return out.reshape(batch, self.num_heads, length, dim)


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        inner, width, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The head's decoder layer over the pair (normed embedding, normed hidden)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Norm(width, eps)
        self.hidden_norm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)
        self.self_attn = ChainAttention(config)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        earlier: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        pair = torch.cat((self.input_layernorm(embeds), normed), -1)
        residual = normed if self.norm_before_residual else hidden
        residual = residual + self.self_attn(pair, cos, sin, earlier)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Trainee(nn.Module):
    """The head of `config` with trainable weights, whose names are those of its checkpoint.

    `target_ids` int64 `[Vd]` maps draft tokens to target tokens. A head of the whole vocabulary shares the
    target's lm_head; a smaller one starts from its rows. Weights are float32; `dtype` is that of products.
    """

    target_ids: torch.Tensor

    def __init__(
        self, config: Eagle3Config, target: FrozenTarget, target_ids: torch.Tensor, *, steps: int, seed: int
    ) -> None:
        super().__init__()
        self.config, self.steps = config, steps
        width, eps = config.hidden_size, config.rms_norm_eps
        generator_state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.fc = nn.Linear(config.dims.target_feature_width, width, bias=config.fc_bias)
        self.midlayer = MidLayer(config)
        self.norm = Norm(width, eps)
        torch.set_rng_state(generator_state)
        self._target = target
        self.register_buffer("target_ids", target_ids.clone(), persistent=False)
        self.lm_head: nn.Linear | None = None
        if config.draft_vocab_size != config.vocab_size:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
            if config.target_hidden_size == width:
                rows = target.model.lm_head[target_ids.to(target.model.device)]
                self.lm_head.weight.data.copy_(rows.float())
        self._rotary = RotaryEmbedding(
            config.rope, config.head_dim, config.max_position_embeddings, target.model.device, torch.float32
        )

    @property
    def position_weights(self) -> torch.Tensor:
        """The weight of each step's loss, float32 `[T]`."""
        return STEP_DECAY ** torch.arange(self.steps, dtype=torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products: the target's."""
        return self._target.model.dtype

    def forward(self, batch: Batch, rows: TargetRows) -> StepLosses:
        """The losses of all steps over `batch`; rows that predict no generated token count nothing."""
        sums = []
        with torch.autocast(batch.tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for step, out in enumerate(self.outputs(batch.tokens, rows.features)):
                wanted = _shifted(batch.mask, 2 + step)
                sums.append(self._step_sums(out[wanted], _shifted(rows.hidden, 1 + step)[wanted]))
        loss, correct, count = (torch.stack(column) for column in zip(*sums, strict=True))
        # every parameter takes part, also where a batch has no row to predict: ranks exchange all gradients
        anchor = sum(parameter.sum() for parameter in self.parameters()) * 0
        return StepLosses(loss + anchor, correct.detach(), count.detach())

    def outputs(self, tokens: torch.Tensor, features: torch.Tensor) -> Iterator[torch.Tensor]:
        """The layer's output `[B, L, H]` of each step, un-normed.

        `tokens` int64 `[B, L]`, `features` `[B, L, K*Ht]`.
        """
        length, last = tokens.shape[1], self.config.max_position_embeddings - 1
        hidden = self.fc(features)
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(self.steps):
            embeds = F.embedding(_shifted(tokens, 1 + step), self._target.model.embed_tokens)
            positions = torch.arange(length, device=tokens.device) + step
            cos, sin = self._rotary.lookup(positions.clamp(max=last), torch.float32)
            hidden = self.midlayer(embeds, hidden, cos, sin, earlier)
            yield hidden
            if self.config.norm_output:
                hidden = self.norm(hidden)

    def _step_sums(
        self, out: torch.Tensor, target_hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, correct, count) summed over rows: outputs `[R, H]`, the target's hidden `[R, Ht]`.

        Logits are computed in parts and again on the way back, so that few are in memory.
        """
        zero = out.float().sum() * 0
        sums = [zero, zero.detach(), zero.detach()]
        for start in range(0, len(out), LOSS_ROWS):
            part = checkpoint(
                self._part_sums,
                out[start : start + LOSS_ROWS],
                target_hidden[start : start + LOSS_ROWS],
                use_reentrant=False,
            )
            sums = [total + value for total, value in zip(sums, part, strict=True)]
        return sums[0], sums[1], sums[2]

    def _part_sums(
        self, out: torch.Tensor, target_hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._target.logits(target_hidden)
        best = logits.argmax(-1)
        restricted = logits if self.lm_head is None else logits[:, self.target_ids]
        # a token that the draft vocabulary lacks cannot be predicted: its row teaches nothing
        is_known = (self.target_ids[restricted.argmax(-1)] == best).float()
        weight = self._target.model.lm_head if self.lm_head is None else self.lm_head.weight
        drafted = F.linear(self.norm(out), weight.to(out.dtype)).float().log_softmax(-1)
        loss = -(restricted.softmax(-1) * drafted).sum(-1)
        correct = self.target_ids[drafted.argmax(-1)] == best
        # a wrong draft is wrong to a client, whether or not the vocabulary has the right one
        return (loss * is_known).sum(), correct.float().sum(), is_known.new_tensor(float(len(out)))

    def checkpoint_tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a checkpoint of the head, in the dialect of SpecForge and SGLang."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        if self.lm_head is not None:
            ids = self.target_ids.cpu()
            known = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            known[ids] = True
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
        return tensors


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """`x` `[B, L, ...]` moved left by `by` rows; zeros come in on the right."""
    if by >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def _heads(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[B, L, N*D]` -> `[B, N, L, D]`."""
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x` `[B, N, L, D]`, tables `[L, D]`; the first half of `sin` is negated already."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat((high, low), -1) * sin).to(x.dtype)
