"""Choosing tokens. Shape legend: R rows, V vocabulary, E edited logits, C candidates of a row, K top logprobs.

A row is one choice: decode has one per request, verify one per draft and one more, each behind its drafts. In order:

    1. repetition penalty     l > 0: l / r, else l * r, for every token of prompt or output
    2. frequency, presence    l - f * count - p * [count > 0], counts over the output and the drafts in front of the row
    3. logit bias             l + bias, and -inf for tokens that the row's grammar forbids; greedy ends here: the highest
                              logit, of equals the lowest id
    4. temperature            l / T
    5. top-k                  exactly k tokens; of equal logits the lowest ids
    6. top-p                  of what is left, renormalised: the fewest likeliest tokens that hold at least p, and one
    7. min-p                  tokens with at least min_p times the probability of the likeliest
    8. Gumbel-max             argmax of l / T + gumbel(seed, position, token id)

A row's choice depends on that row alone. Steps 4 to 8 are `draws`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.noise import gumbel, seed_tensor
from ..guided import Mask
from ..request import Request
from .draws import (
    CHUNK_LOGITS,
    NUCLEUS_WIDTH,
    Draw,
    draw_free,
    draw_ranked,
    is_argmax,
    ranked_ids,
    scaled_logits,
)
from .params import SamplingParams

_Ids = npt.NDArray[np.int64]


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError, naming the value, for parameters that no sampler can serve."""
    bad_bias = [token for token, bias in params.logit_bias.items() if not math.isfinite(bias)]
    foreign, endless = (
        [token for token in ids if not 0 <= token < vocab_size]
        for ids in (params.logit_bias, params.stop_token_ids)
    )
    for is_wrong, text in (
        (not 0 <= params.temperature < math.inf, f"temperature {params.temperature}: finite, >= 0"),
        (params.top_k < 0, f"top_k {params.top_k}: 0 (off) or more"),
        (not 0 <= params.top_p <= 1, f"top_p {params.top_p}: in [0, 1]"),
        (not 0 <= params.min_p <= 1, f"min_p {params.min_p}: in [0, 1]"),
        (
            not math.isfinite(params.frequency_penalty),
            f"frequency_penalty {params.frequency_penalty}: finite",
        ),
        (not math.isfinite(params.presence_penalty), f"presence_penalty {params.presence_penalty}: finite"),
        (
            not 0 < params.repetition_penalty < math.inf,
            f"repetition_penalty {params.repetition_penalty}: > 0, finite",
        ),
        (bool(bad_bias), f"logit_bias of tokens {bad_bias}: finite"),
        (bool(foreign), f"logit_bias of tokens {foreign}: ids in [0, {vocab_size})"),
        (bool(endless), f"stop_token_ids {endless}: ids in [0, {vocab_size})"),
    ):
        if is_wrong:
            raise ValueError(f"{text} is what the sampler takes")


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """One choice: the token at absolute `position`, behind `prompt_ids`, `output_ids` and `drafts`."""

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    drafts: Sequence[int] = ()
    mask: Mask | None = None  # of the tokens that may be chosen, as of `guided`; None: all


def sampling_rows(request: Request, drafts: Sequence[int] = ()) -> list[SamplingRow]:
    """The rows of one forward over the newest token and `drafts`: row j sees the output and drafts[:j]."""
    return rows_behind(request, [drafts[:j] for j in range(len(drafts) + 1)])


def rows_behind(request: Request, branches: Sequence[Sequence[int]]) -> list[SamplingRow]:
    """One row behind each of `branches`, the drafts that it sees besides the output."""
    prompt_ids: Sequence[int] = request.prompt_ids
    output_ids: Sequence[int] = request.output_ids
    if request.sampling.needs_penalties:
        prompt_ids, output_ids = request.asked_and_chosen
    guide = request.guide
    masks = [None] * len(branches) if guide is None else guide.masks(request.asked_and_chosen[1], branches)
    return [
        SamplingRow(
            params=request.sampling_behind(len(drafts)),
            position=request.num_tokens + len(drafts),
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            drafts=drafts,
            mask=mask,
        )
        for drafts, mask in zip(branches, masks, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Edits:
    """Logits that penalties change: `logits[rows[e], tokens[e]]`, each pair once. All `[E]`."""

    rows: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor  # occurrences in the output and the drafts
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    def apply_(self, logits: torch.Tensor) -> None:
        old = logits[self.rows, self.tokens]
        new = torch.where(old > 0, old / self.repetition, old * self.repetition)
        new = new - self.frequency * self.counts - self.presence * (self.counts > 0)
        logits[self.rows, self.tokens] = new


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """What a `sample` call needs besides the logits, on the device; `build` makes it while the forward runs.

    Greedy rows without penalties, bias or logprobs leave nothing in it.
    """

    num_rows: int
    penalties: _Edits | None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # rows, tokens, values, each [E]
    banned: tuple[torch.Tensor, torch.Tensor] | None  # rows [G] and bool [G, V]: what may not be chosen there
    draws: tuple[Draw, ...]
    logprob_rows: torch.Tensor | None  # rows that ask for logprobs
    num_top: int  # the most top logprobs that a row asks for

    @classmethod
    def build(
        cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingBatch":
        """Tensors for `rows`, whose parameters passed `validate_params`."""
        wants = [i for i, row in enumerate(rows) if row.params.logprobs >= 0]
        return cls(
            num_rows=len(rows),
            penalties=_plan_penalties(rows, vocab_size, device),
            bias=_plan_bias(rows, vocab_size, device),
            banned=_plan_banned(rows, vocab_size, device),
            draws=_plan_draws(rows, vocab_size, device),
            logprob_rows=torch.tensor(wants, device=device) if wants else None,
            num_top=min(vocab_size, max((rows[i].params.logprobs for i in wants), default=0)),
        )

    def at(self, positions: torch.Tensor) -> "SamplingBatch":
        """The same rows at `positions` int64 `[R]`, where only the device knows them."""
        return replace(
            self, draws=tuple(replace(draw, positions=positions[draw.rows]) for draw in self.draws)
        )

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` after penalties, bias and masks; the caller's tensor is never written."""
        if self.penalties is None and self.bias is None and self.banned is None:
            return logits
        logits = logits.clone()
        if self.penalties is not None:
            self.penalties.apply_(logits)
        if self.bias is not None:
            rows, tokens, values = self.bias
            logits[rows, tokens] += values
        if self.banned is not None:
            rows, banned = self.banned
            logits[rows] = logits[rows].masked_fill_(banned, -math.inf)
        return logits


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """`tokens` `[R]` int64. `bad_rows` `[R]` bool: rows with a NaN, with +inf or with nothing above -inf; their token
    is 0 and means nothing. The rest is None when no row asks for logprobs; other rows hold NaN and -1.

    `logprobs` `[R]` float32 of the chosen tokens, `top_ids` `[R, K]` int64 and `top_logprobs` `[R, K]` float32,
    likeliest first, of the model's own distribution before any transform. A row that asks for fewer takes its first.
    """

    tokens: torch.Tensor
    bad_rows: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


class Sampler:
    """Chooses a token per row of logits; holds no state between calls."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._vocabulary = torch.arange(vocab_size, device=self.device)

    def build(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        return SamplingBatch.build(rows, self.vocab_size, self.device)

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampleOutput:
        """Choose from `logits` `[R, V]` float32, one row per row of `batch`; `logits` is left as it is."""
        assert logits.shape == (batch.num_rows, self.vocab_size), (
            logits.shape,
            batch.num_rows,
            self.vocab_size,
        )
        adjusted = batch.adjust(logits)
        highest, tokens = adjusted.max(dim=1)  # a NaN in the row comes out as the highest
        bad_rows = ~torch.isfinite(highest)
        for draw in batch.draws:
            rows = adjusted[draw.rows]
            tokens[draw.rows] = (
                draw_ranked(rows, draw) if draw.width else draw_free(rows, draw, self._vocabulary)
            )
        tokens.masked_fill_(bad_rows, 0)
        if batch.logprob_rows is None:
            return SampleOutput(tokens=tokens, bad_rows=bad_rows)
        return _with_logprobs(logits, tokens, bad_rows, batch.logprob_rows, batch.num_top)

    def __repr__(self) -> str:
        return f"<Sampler vocabulary {self.vocab_size}, {self.device}>"


def propose(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: torch.Tensor, target_ids: torch.Tensor
) -> torch.Tensor:
    """A drafter's choices `[R]` int64, as indices into its vocabulary: what the target would choose with these logits.

    `logits` `[R, Vd]`; `positions` `[R]` int64 of the tokens proposed; `target_ids` `[Vd]` int64, the target token of
    each draft token: the noise is the target's, so a good draft makes the target's choice. Filters and penalties are
    left to the target.
    """
    drawn = [i for i, p in enumerate(params) if not is_argmax(p)]
    tokens = logits.argmax(dim=1)
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        temperature = torch.tensor(
            [params[i].temperature for i in drawn], dtype=torch.float64, device=logits.device
        )
        noise = gumbel(
            seed_tensor([params[i].seed for i in drawn], logits.device), positions[rows], target_ids
        )
        logits = logits[rows].double()
        tokens[rows] = (noise + scaled_logits(logits, logits.amax(dim=1), temperature)).argmax(dim=1)
    return tokens


def _with_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, bad_rows: torch.Tensor, rows: torch.Tensor, num_top: int
) -> SampleOutput:
    raw = torch.log_softmax(logits[rows].float(), dim=1)
    top = ranked_ids(raw, num_top)
    num_rows = tokens.shape[0]
    logprobs = torch.full((num_rows,), math.nan, device=logits.device)
    top_ids = torch.full((num_rows, num_top), -1, dtype=torch.int64, device=logits.device)
    top_logprobs = torch.full((num_rows, num_top), math.nan, device=logits.device)
    logprobs[rows] = raw.gather(1, tokens[rows, None]).squeeze(1)
    top_ids[rows] = top
    top_logprobs[rows] = raw.gather(1, top)
    return SampleOutput(
        tokens=tokens, bad_rows=bad_rows, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs
    )


def _plan_draws(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str) -> tuple[Draw, ...]:
    """The drawn rows by what must be ranked for them: nothing, their top-k, a nucleus; in chunks of bounded size."""
    free: list[int] = []
    limited: list[int] = []
    nucleus: list[int] = []
    for i, row in enumerate(rows):
        if not is_argmax(row.params):
            is_limited = 0 < row.params.top_k < vocab_size
            (limited if is_limited else nucleus if row.params.top_p < 1 else free).append(i)
    widest = max((rows[i].params.top_k for i in limited), default=0)
    step = max(1, CHUNK_LOGITS // vocab_size)
    return tuple(
        _plan_draw(rows, group[start : start + step], width, group is limited, device)
        for group, width in ((free, 0), (limited, widest), (nucleus, min(vocab_size, NUCLEUS_WIDTH)))
        for start in range(0, len(group), step)
    )


def _plan_draw(
    rows: Sequence[SamplingRow], group: list[int], width: int, is_limited: bool, device: torch.device | str
) -> Draw:
    params = [rows[i].params for i in group]
    reals = torch.tensor(
        [[p.temperature, p.top_p, p.min_p] for p in params], dtype=torch.float64, device=device
    )
    return Draw(
        rows=torch.tensor(group, device=device),
        temperature=reals[:, 0],
        seeds=seed_tensor([p.seed for p in params], device),
        positions=torch.tensor([rows[i].position for i in group], device=device),
        top_k=torch.tensor([p.top_k for p in params], device=device) if is_limited else None,
        top_p=reals[:, 1],
        min_p=reals[:, 2],
        width=width,
    )


def _plan_bias(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    entries = [
        (i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias.items()
    ]
    if not entries:
        return None
    index, tokens, values = zip(*entries, strict=True)
    assert all(0 <= token < vocab_size for token in tokens), "validate_params was not called"
    return (
        torch.tensor(index, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def _plan_banned(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    masks = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if not masks:
        return None
    index, words = zip(*masks, strict=True)
    packed = torch.from_numpy(np.stack(words)).to(device)
    bits = packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)
    return torch.tensor(index, device=device), (bits & 1 == 0).flatten(1)[:, :vocab_size]


def _plan_penalties(
    rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str
) -> _Edits | None:
    arrays: dict[
        int, _Ids
    ] = {}  # rows of one request share their lists: converted once each, keyed by identity
    index, tokens, counts, knobs = [], [], [], []
    for i, row in enumerate(rows):
        if not row.params.needs_penalties:
            continue
        for ids in (row.prompt_ids, row.output_ids):
            if id(ids) not in arrays:
                arrays[id(ids)] = np.asarray(ids, dtype=np.int64)
        output = np.concatenate([arrays[id(row.output_ids)], np.asarray(row.drafts, dtype=np.int64)])
        prompt = arrays[id(row.prompt_ids)] if row.params.repetition_penalty != 1.0 else output[:0]
        seen, inverse = np.unique(np.concatenate([output, prompt]), return_inverse=True)
        assert len(seen) == 0 or 0 <= seen[0] <= seen[-1] < vocab_size, "a token id is not in the vocabulary"
        index.append(np.full(len(seen), i))
        tokens.append(seen)
        counts.append(np.bincount(inverse[: len(output)], minlength=len(seen)))
        knob = (row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty)
        knobs.append(np.tile(np.array(knob, dtype=np.float32), (len(seen), 1)))
    if not index:
        return None
    repetition, frequency, presence = torch.from_numpy(np.concatenate(knobs)).to(device).unbind(1)
    return _Edits(
        rows=torch.from_numpy(np.concatenate(index)).to(device),
        tokens=torch.from_numpy(np.concatenate(tokens)).to(device),
        counts=torch.from_numpy(np.concatenate(counts).astype(np.float32)).to(device),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )
