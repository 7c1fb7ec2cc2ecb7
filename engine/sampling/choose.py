"""Sampling as one operation of the torch library, every parameter in tensors: what a whole step records of `sampler`.

The tokens are those of `Sampler.sample` for rows without penalties, bias and logprobs. On CPU the operation looks at its
parameters and draws for the rows that need it; on CUDA its shapes are fixed and it never looks, so that a graph can hold
it. Legend: S slots, R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ...kernels.choose_token import choose_token
from ...kernels.noise import seed_tensor
from .draws import CHUNK_LOGITS, NUCLEUS_WIDTH, Draw, draw_fixed, draw_free, draw_ranked, is_argmax
from .params import SamplingParams

torch.library.define(
    "baton::choose_tokens",
    "(Tensor logits, Tensor positions, Tensor seeds, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,"
    " Tensor is_drawn, bool is_ranked) -> (Tensor, Tensor, Tensor)",
)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """How tokens are chosen, `[S]` each: `seeds`, `top_k` (V: none) int64, `temperature`, `top_p`, `min_p` float64,
    `is_drawn` bool (else the likeliest token is taken)."""

    seeds: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    is_drawn: torch.Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "Knobs":
        """One slot for each of `params`."""
        drawn = [not is_argmax(p) for p in params]
        reals = [[p.temperature if d else 1.0, p.top_p, p.min_p] for p, d in zip(params, drawn, strict=True)]
        temperature, top_p, min_p = (
            torch.tensor(reals, dtype=torch.float64).reshape(-1, 3).to(device).unbind(1)
        )
        limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        return cls(
            seeds=seed_tensor([p.seed for p in params], device),
            temperature=temperature,
            top_k=torch.tensor(limits, dtype=torch.int64).to(device),
            top_p=top_p,
            min_p=min_p,
            is_drawn=torch.tensor(drawn, dtype=torch.bool).to(device),
        )

    def repeated(self, num_rows: int) -> "Knobs":
        """Each slot's for its share of `num_rows` rows in a row."""
        each = num_rows // max(self.seeds.shape[0], 1)
        if each <= 1:
            return self
        return Knobs(
            **{f.name: getattr(self, f.name)[:, None].expand(-1, each).reshape(-1) for f in fields(self)}
        )

    def draw(self, rows: torch.Tensor, positions: torch.Tensor, width: int, *, has_top_k: bool) -> Draw:
        """`rows` of these, which are as many as `positions`, drawn together; legend of `Draw`."""
        return Draw(
            rows=rows,
            temperature=self.temperature[rows],
            seeds=self.seeds[rows],
            positions=positions[rows],
            top_k=self.top_k[rows] if has_top_k else None,
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            width=width,
        )


def needs_ranking(params: SamplingParams, vocab_size: int) -> bool:
    """Whether candidates have to be ranked: the row is drawn from a top-k or a nucleus."""
    return not is_argmax(params) and (0 < params.top_k < vocab_size or params.top_p < 1)


def choose_tokens(
    logits: torch.Tensor, positions: torch.Tensor, knobs: Knobs, *, is_ranked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens `[R]` int64; bool `[R]`: rows whose logits are not finite, their token is 0; bool `[R]`: rows whose support is
    wider than what was looked at, their token means nothing (on CUDA only).

    `logits` `[R, V]` float32, `positions` `[R]` int64 of the tokens chosen, `knobs` `[S]`, each for R/S rows in a row.
    `is_ranked`: some row `needs_ranking`; without it top-k and top-p are not looked at.
    """
    tokens, bad, short = torch.ops.baton.choose_tokens.default(
        logits,
        positions,
        knobs.seeds,
        knobs.temperature,
        knobs.top_k,
        knobs.top_p,
        knobs.min_p,
        knobs.is_drawn,
        is_ranked,
    )
    return tokens, bad, short


@torch.library.impl("baton::choose_tokens", "cpu")
def _choose_on_cpu(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    is_drawn: torch.Tensor,
    is_ranked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vocab_size = logits.shape[1]
    knobs = Knobs(
        seeds=seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, is_drawn=is_drawn
    ).repeated(logits.shape[0])
    highest, tokens = logits.max(dim=1)  # a NaN in the row comes out as the highest
    is_limited = knobs.is_drawn & (knobs.top_k < vocab_size) & is_ranked
    is_nucleus = knobs.is_drawn & ~is_limited & (knobs.top_p < 1) & is_ranked
    is_free = knobs.is_drawn & ~is_limited & ~is_nucleus
    widest = int(torch.where(is_limited, knobs.top_k, 0).max()) if logits.shape[0] else 0
    for group, width in ((is_free, 0), (is_limited, widest), (is_nucleus, min(vocab_size, NUCLEUS_WIDTH))):
        for rows in _chunks(group.nonzero().squeeze(1), vocab_size):
            draw = knobs.draw(rows, positions, width, has_top_k=group is is_limited)
            some = logits[rows]
            tokens[rows] = draw_ranked(some, draw) if width else draw_free(some, draw, _vocabulary(logits))
    bad = ~torch.isfinite(highest)
    return tokens.masked_fill_(bad, 0), bad, torch.zeros_like(bad)


@torch.library.impl("baton::choose_tokens", "cuda")
def _choose_on_cuda(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    is_drawn: torch.Tensor,
    is_ranked: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    knobs = Knobs(
        seeds=seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, is_drawn=is_drawn
    )
    return choose_fixed(logits, positions, knobs, is_ranked=is_ranked)


def choose_fixed(
    logits: torch.Tensor, positions: torch.Tensor, knobs: Knobs, *, is_ranked: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`choose_tokens` in fixed shapes: every row is ranked, whether or not that is used."""
    tokens, bad = choose_token(
        logits, knobs.seeds, positions, knobs.temperature, knobs.min_p, knobs.is_drawn, None
    )
    if not is_ranked:
        return tokens, bad, torch.zeros_like(bad)
    knobs = knobs.repeated(logits.shape[0])
    vocab_size = logits.shape[1]
    all_rows, parts = torch.arange(logits.shape[0], device=logits.device), []
    for rows, some in zip(_chunks(all_rows, vocab_size), _chunks(logits, vocab_size), strict=True):
        width = min(vocab_size, NUCLEUS_WIDTH)
        parts.append(draw_fixed(some, knobs.draw(rows, positions, width, has_top_k=True)))
    ranked, short = (torch.cat(halves) for halves in zip(*parts, strict=True))
    is_row_ranked = knobs.is_drawn & ((knobs.top_p < 1) | (knobs.top_k < vocab_size)) & ~bad
    return torch.where(is_row_ranked, ranked, tokens), bad, short & is_row_ranked


def _chunks(rows: torch.Tensor, vocab_size: int) -> list[torch.Tensor]:
    """`rows` in pieces of as many as are drawn at once, which bounds the memory of drawing."""
    each = max(1, CHUNK_LOGITS // vocab_size)
    return [rows[start : start + each] for start in range(0, rows.shape[0], each)]


def _vocabulary(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(logits.shape[1], device=logits.device)
