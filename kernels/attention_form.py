"""The form of a layer's attention: what differs from a causal softmax of scaled scores over all tokens.

    scores   s = scale * q k, then softcap * tanh(s / softcap) with a soft cap (Gemma 2)
    columns  a row at position p sees the positions (p - window, p] with a sliding window (Mistral)
    sinks    each head's denominator has one more term, exp(sink), which adds no value (gpt-oss)

Sources: Jiang et al., "Mistral 7B", 2023; Gemma Team, "Gemma 2", 2024; Xiao et al., "Efficient streaming
language models with attention sinks", 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionForm(NamedTuple):
    """One layer's attention. `window` in tokens, the row itself included; 0: all earlier tokens.

    `softcap` 0.0: none. `sinks` None or `[N]`, one per query head. `scale` of the scores, 0.0: the default of
    the pool's layout.
    """

    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    scale: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether a library's attention with a mask computes it."""
        return self.softcap == 0.0 and self.sinks is None


PLAIN_FORM = AttentionForm()


def capped(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """`scores` of any shape between -softcap and softcap; 0.0 changes nothing."""
    return scores if softcap == 0.0 else torch.tanh(scores / softcap) * softcap


def attend_by_form(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, form: AttentionForm
) -> torch.Tensor:
    """The definition of soft caps and sinks: `q` `[..., K, G, Q, D]`, `k`, `v` `[..., K, 1, S, D]` -> as `q`.

    `mask`, broadcast over the scores `[..., K, G, Q, S]`, is added to them behind the cap. The sinks are
    those of K*G heads, in this order. Computed in float32, rounded once.
    """
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(-1, -2)) * scale
    scores = capped(scores, form.softcap) + mask
    if form.sinks is not None:
        sinks = form.sinks.to(torch.float32).view(*q.shape[-4:-2], 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights, v.to(torch.float32)).to(q.dtype)
