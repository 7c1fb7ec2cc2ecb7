"""Sampling of rows whose parameters are on the host: the first token of a prompt.

Decode steps call the same operations. A row is one choice. Prefill has one row per prompt. Verify has one row
per draft and one for the root, each with the drafts in front of it as context. The transforms run in this
order:

    1. repetition penalty     l / r if l > 0, else l * r, for every token of prompt or output
    2. frequency, presence    l - f * count - p * [count > 0]
                              counts include the output and the drafts in front of the row
    3. logit bias             l + bias; -inf for end tokens before `min_new_tokens` (`edits`)
    4. grammar mask           -inf for tokens that the grammar forbids
                              greedy stops here: the highest logit, ties go to the lowest id (`choose`)
    5. temperature            l / T
    6. top-k                  exactly k tokens; ties go to the lowest ids
    7. top-p                  the fewest likeliest tokens that hold at least the mass p of the renormalised
                              rest, and at least one token
    8. min-p                  tokens with at least min_p times the probability of the likeliest
    9. Gumbel-max             argmax of l / T + gumbel(seed, position, token id) (`draws`)

The choice of a row depends on that row alone. Legend: R rows, V vocabulary, K top logprobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from ..host_copy import all_to_device, to_device
from ..host_reads import HostCopies
from .choose import choose_tokens
from .edits import ALL_ALLOWED, LogitEdits, SamplingRow, edit_logits
from .logprobs import ScoredToken, top_logprobs
from .tensors import SamplingTensors


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The inputs of `Sampler.sample` besides the logits, on the device. `Sampler.build` makes it during the
    forward.

    `edits` and `masks` are None if no row needs them. `wanted` int64 `[R]` is the number of top logprobs of
    each row, -1 for none. `num_top` is the maximum of `wanted`.
    """

    num_rows: int
    positions: torch.Tensor
    tensors: SamplingTensors
    is_ranked: bool
    edits: LogitEdits | None
    masks: torch.Tensor | None
    wanted: torch.Tensor
    num_top: int


@dataclass(frozen=True, kw_only=True)
class SampleOutput:
    """`tokens` `[R]` int64, and `bad_rows` `[R]` bool: rows with a NaN, +inf or nothing above -inf; their
    token is 0.

    `logprobs` `[R]` float32 are those of the chosen tokens. `top_ids` `[R, K]` int64 and `top_logprobs`
    `[R, K]` float32 are the likeliest tokens in order, under the model's distribution before any transform.
    All three are None if no row asks for logprobs, and undefined for rows that do not ask. A row that asks
    for fewer than K takes its first. `unseen_rows` `[R]` bool: rows whose token is undefined, because their
    support is wider than the candidates of the fixed form; none in the exact form.
    """

    tokens: torch.Tensor
    bad_rows: torch.Tensor
    unseen_rows: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None

    def token_logprobs(self, row: int, wanted: int) -> list[ScoredToken]:
        """Those of `row` with its `wanted` likeliest tokens; none where `wanted` is negative."""
        if wanted < 0 or self.logprobs is None or self.top_ids is None or self.top_logprobs is None:
            return []
        ids, values = self.top_ids[row, :wanted].tolist(), self.top_logprobs[row, :wanted].tolist()
        return [ScoredToken(logprob=float(self.logprobs[row]), top=list(zip(ids, values, strict=True)))]


class Sampler:
    """Chooses a token per row of logits; holds no state between calls."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def build(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        """Builds the tensors for `rows`, whose parameters passed `validate_params`.

        The host does not wait for the device.
        """
        params = [row.params for row in rows]
        wanted = [p.logprobs for p in params]
        is_edited = any(p.needs_penalties or p.logit_bias for p in params) or any(r.first_end for r in rows)
        host = [
            torch.tensor(values, dtype=torch.int64) for values in ([row.position for row in rows], wanted)
        ]
        positions, wanted_tops = all_to_device(host, self.device)
        return SamplingBatch(
            num_rows=len(rows),
            positions=positions,
            tensors=SamplingTensors.of(params, self.vocab_size, self.device),
            is_ranked=any(p.needs_ranking(self.vocab_size) for p in params),
            edits=LogitEdits.of(rows, self.vocab_size, self.device)
            if is_edited or any(row.mask is not None for row in rows)
            else None,
            masks=self._masks(rows),
            wanted=wanted_tops,
            num_top=min(self.vocab_size, max(wanted, default=-1)),
        )

    def _masks(self, rows: Sequence[SamplingRow]) -> torch.Tensor | None:
        known = [row.mask for row in rows if row.mask is not None]
        if not known:
            return None
        free = np.full_like(known[0], ALL_ALLOWED)
        stacked = np.stack([free if row.mask is None else row.mask for row in rows])
        return to_device(torch.from_numpy(stacked), self.device)

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, batch: SamplingBatch, *, is_exact: bool = True) -> SampleOutput:
        """Chooses one token per row of `logits` `[R, V]` float32, which stays unchanged.

        Ranked rows make the host wait for the device. Without `is_exact` it does not, and they may stay
        unseen.
        """
        count = batch.num_rows
        assert logits.shape == (count, self.vocab_size), (logits.shape, count, self.vocab_size)
        edited = logits
        if batch.edits is not None:
            slots = torch.arange(count, device=logits.device)
            edited = edit_logits(logits, batch.positions, slots, batch.edits, masks=batch.masks)
        tokens, bad_rows, unseen_rows = choose_tokens(
            edited,
            batch.positions,
            batch.tensors,
            is_ranked=batch.is_ranked,
            is_exact=is_exact and batch.is_ranked,
        )
        if batch.num_top < 0:
            return SampleOutput(tokens=tokens, bad_rows=bad_rows, unseen_rows=unseen_rows)
        values, ids = top_logprobs(logits, tokens, batch.wanted, batch.num_top)
        return SampleOutput(
            tokens=tokens,
            bad_rows=bad_rows,
            unseen_rows=unseen_rows,
            logprobs=values[:, 0],
            top_ids=ids,
            top_logprobs=values[:, 1:],
        )

    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> "LaunchedSample":
        """`sample` for `rows`, launched behind earlier work. The host reads the result later."""
        return LaunchedSample(self, logits, self.build(rows))

    def __repr__(self) -> str:
        return f"<Sampler vocabulary {self.vocab_size}, {self.device}>"


class LaunchedSample:
    """A choice of tokens that the host reads later. It keeps `logits` for rows that must be chosen again."""

    def __init__(self, sampler: Sampler, logits: torch.Tensor, batch: SamplingBatch) -> None:
        self._sampler = sampler
        self._logits = logits
        self._batch = batch
        output = sampler.sample(logits, batch, is_exact=False)
        self._names = [f.name for f in fields(output) if getattr(output, f.name) is not None]
        self._copies = HostCopies([getattr(output, name) for name in self._names])

    def read(self) -> SampleOutput:
        """Waits for the choice, and for no later work, and returns it on the host.

        If a row is unseen, chooses again, exactly; that result is on the logits' device.
        """
        output = SampleOutput(**dict(zip(self._names, self._copies.wait(), strict=True)))
        if bool(output.unseen_rows.any()):
            return self._sampler.sample(self._logits, self._batch)
        return output

    def __repr__(self) -> str:
        return f"<LaunchedSample of {self._batch.num_rows} rows>"
