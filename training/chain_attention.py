"""Attention of a training-time test: a row of step k sees the keys of step 0 at its own and earlier
positions, and its own keys of steps 1 to k. Step k of a served chain from this row sees the same keys.

The keys of step 0 are one causal attention, by a flash kernel. The row's own keys join it by the logarithm of
the normaliser; backward runs the kernel's own gradient with the joint normaliser.

Shape legend: B samples, L rows, N query heads, G key/value heads, D head dimension, J later steps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .gradients import GradientContext

KeysValues = tuple[torch.Tensor, torch.Tensor]  # each [B, G, L, D]


def chain_attention(q: torch.Tensor, steps: Sequence[KeysValues]) -> torch.Tensor:
    """`q` `[B, N, L, D]` over the keys and values of steps 0 to k -> `[B, N, L, D]`."""
    (k0, v0), own = steps[0], steps[1:]
    if not own:
        return F.scaled_dot_product_attention(q, k0, v0, is_causal=True, enable_gqa=True)
    if q.is_cuda and q.dtype is torch.float32:  # no flash kernel takes it
        return plain_chain_attention(q, steps)
    flat = [x for pair in own for x in pair]
    out: torch.Tensor = _ChainAttention.apply(q, k0, v0, *flat)  # type: ignore[no-untyped-call]
    return out


def plain_chain_attention(q: torch.Tensor, steps: Sequence[KeysValues]) -> torch.Tensor:
    """The definition of `chain_attention`, with all scores in memory."""
    batch, heads, length, dim = q.shape
    (k0, v0), own = steps[0], steps[1:]
    grouped = q.reshape(batch, k0.shape[1], -1, length, dim)  # [B, G, N/G, L, D]
    scale = 1 / math.sqrt(dim)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    prefix = (grouped @ k0.unsqueeze(2).transpose(-1, -2)).float() * scale
    prefix = prefix.masked_fill(future, float("-inf"))
    diagonal = [(grouped * k.unsqueeze(2)).sum(-1, keepdim=True).float() * scale for k, _ in own]
    weights = torch.cat((prefix, *diagonal), -1).softmax(-1).to(v0.dtype)
    out = weights[..., :length] @ v0.unsqueeze(2)
    for column, (_, v) in enumerate(own):
        out = out + weights[..., length + column, None] * v.unsqueeze(2)
    return out.reshape(batch, heads, length, dim)


def _chain_forward(
    ctx: GradientContext, q: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, own: Sequence[torch.Tensor]
) -> torch.Tensor:
    scale = 1 / math.sqrt(q.shape[-1])
    each = q.shape[1] // k0.shape[1]
    wide_k, wide_v = (x.repeat_interleave(each, 1) for x in (k0, v0))
    q = q.contiguous()
    prefix, norm, extra = _flash(q, wide_k, wide_v, scale)
    grouped = _grouped(q, each)
    scores = [_dot(grouped, k.unsqueeze(2)).flatten(1, 2) * scale for k in own[::2]]
    joint = torch.stack([norm, *scores]).logsumexp(0)
    out = prefix * (norm - joint).exp().unsqueeze(-1).to(q.dtype)
    for score, v in zip(scores, own[1::2], strict=True):
        share = (score - joint).exp().to(q.dtype).unsqueeze(-1)
        out += (_grouped(share, each) * v.unsqueeze(2)).flatten(1, 2)
    ctx.save_for_backward(q, wide_k, wide_v, out, joint, *scores, *own)
    ctx.rest = extra, scale, each, len(scores)
    return out


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: GradientContext, q: torch.Tensor, k0: torch.Tensor, v0: torch.Tensor, *own: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            return _chain_forward(ctx, q, k0, v0, own)

    @staticmethod
    def backward(ctx: GradientContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, wide_k, wide_v, out, joint, *rest = ctx.saved_tensors
        extra, scale, each, count = ctx.rest
        scores, own = rest[:count], rest[count:]
        given = gradients[0].contiguous()
        by_q, by_k, by_v = _flash_gradient(given, q, wide_k, wide_v, out, joint, extra, scale)
        found = [_grouped(x, each).sum(2) for x in (by_k, by_v)]
        delta = _dot(given, out)
        grouped, grouped_given = (_grouped(x, each) for x in (q, given))
        total = by_q.float()
        for score, k, v in zip(scores, own[::2], own[1::2], strict=True):
            share = (score - joint).exp()
            by_share = _dot(grouped_given, v.unsqueeze(2)).flatten(1, 2)
            by_score = _grouped((share * (by_share - delta) * scale).unsqueeze(-1), each)
            total += (by_score * k.unsqueeze(2)).flatten(1, 2)
            found.append((by_score * grouped).sum(2).to(k.dtype))
            found.append((_grouped(share.unsqueeze(-1), each) * grouped_given).sum(2).to(v.dtype))
        return total.to(q.dtype), *found


def _grouped(x: torch.Tensor, each: int) -> torch.Tensor:
    """`[B, N, L, D]` -> `[B, G, each, L, D]`: the query heads of each key head."""
    return x.reshape(x.shape[0], -1, each, *x.shape[2:])


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of the last dimension, summed in float32."""
    return (a * b).sum(-1, dtype=torch.float32)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """(output, logarithm of the normaliser `[B, N, L]`, what the gradient needs) of causal attention."""
    if q.is_cuda:
        out, norm, *extra = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, False, scale=scale
        )
        return out, norm, extra
    out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, norm, []


def _flash_gradient(
    given: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    extra: Sequence[Any],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by q, k and v of the part that the causal attention has in `out`."""
    if q.is_cuda:
        q_ends, k_ends, most_q, most_k, seed, offset, *_ = extra
        by_q, by_k, by_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            given, q, k, v, out, norm, q_ends, k_ends, most_q, most_k, 0.0, True, seed, offset, scale=scale
        )
    else:
        by_q, by_k, by_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            given, q, k, v, out, norm, 0.0, True, scale=scale
        )
    return by_q, by_k, by_v
