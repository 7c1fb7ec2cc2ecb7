"""Edits of logits before the choice of a token: penalties, biases, bans of end tokens and grammar masks.

They apply in this order: penalties (over the output and the drafts in front of a row), biases and bans, the
mask. Two forms give the same logits. On a CPU, the exact form edits only the rows that need it. On a device,
the fixed form applies every edit to every row without host synchronisation.

Legend: S slots (known requests), B requests, N rows of each, R = B * N, V vocabulary, E entries of a slot, W
words of 32 tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.penalise_logits import IN_PROMPT, RowEdits, penalise_logits, penalise_logits_reference
from ..host_copy import all_to_device, arrays_to_device
from .choose import row_chunks
from .params import SamplingParams

Mask = npt.NDArray[np.int32]

ALWAYS = 1 << 62  # beyond any position, so the entry always applies
ALL_ALLOWED = -1  # a word of a mask

torch.library.define(
    "baton::edit_logits",
    "(Tensor logits, Tensor positions, Tensor slots, Tensor ids, Tensor values, Tensor until, Tensor "
    "penalties, Tensor? seen, Tensor? drafts, Tensor? ancestors, Tensor? masks) -> Tensor",
)


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """The sampling input of the token at absolute `position`, behind `prompt_ids` and `output_ids`.

    `ends` are the tokens that would end the request. They are banned at positions below `first_end`. `mask`,
    int32 `[W]`, has the bits of the tokens that the grammar allows; None allows all.
    """

    params: SamplingParams
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    ends: Sequence[int] = ()
    first_end: int = 0
    mask: Mask | None = field(default=None, compare=False)

    @property
    def entries(self) -> list[tuple[int, float, int]]:
        """Tuples (token, addend to its logit, first position without the addend)."""
        biases = [(token, bias, ALWAYS) for token, bias in self.params.logit_bias.items()]
        bans = [(token, -math.inf, self.first_end) for token in self.ends] if self.first_end else []
        return biases + bans

    @property
    def repeatable_ids(self) -> Sequence[int]:
        """The tokens of the prompt, if penalties look at them."""
        return self.prompt_ids if self.params.repetition_penalty != 1.0 else ()


@dataclass(frozen=True, kw_only=True)
class LogitEdits:
    """The edits of S slots.

    `ids` int64, `values` float32 and `until` int64 are `[S, E]`: `values` is added to the logits of `ids` at
    positions below `until`; unused entries are 0. `penalties` `[S, 3]` float32 holds repetition, frequency
    and presence. `seen` `[S, V]` int32 is that of `write_seen`; None if no slot has penalties. Rows of `seen`
    for slots without penalties are undefined.
    """

    ids: torch.Tensor
    values: torch.Tensor
    until: torch.Tensor
    penalties: torch.Tensor
    seen: torch.Tensor | None

    @classmethod
    def of(
        cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "LogitEdits":
        """One slot for each of `rows`, whose parameters passed `validate_params`.

        The host does not wait for `device`.
        """
        device = torch.device(device)
        ids, values, until, penalties = all_to_device(entries_of(rows, vocab_size), device)
        seen, counted = None, [slot for slot, row in enumerate(rows) if row.params.needs_penalties]
        if counted:
            seen = torch.zeros((len(rows), vocab_size), dtype=torch.int32, device=device)
            write_seen(seen, counted, [rows[slot] for slot in counted])
        return cls(ids=ids, values=values, until=until, penalties=penalties, seen=seen)


def entries_of(rows: Sequence[SamplingRow], vocab_size: int) -> tuple[torch.Tensor, ...]:
    """(ids, values, until, penalties) of `LogitEdits` for `rows`, on the host."""
    entries = [row.entries for row in rows]
    width = max((len(each) for each in entries), default=0)
    padded = [[*each, *[(0, 0.0, 0)] * (width - len(each))] for each in entries]
    assert all(0 <= token < vocab_size for each in entries for token, *_ in each), (
        "validate_params was not called"
    )
    ids, values, until = (
        torch.tensor([[entry[i] for entry in each] for each in padded], dtype=dtype).view(len(rows), width)
        for i, dtype in enumerate((torch.int64, torch.float32, torch.int64))
    )
    penalties = [
        (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in (r.params for r in rows)
    ]
    return ids, values, until, torch.tensor(penalties, dtype=torch.float32).view(len(rows), 3)


def write_seen(seen: torch.Tensor, slots: Sequence[int], rows: Sequence[SamplingRow]) -> None:
    """Writes the rows `slots` of `seen` `[S, V]` int32: the count of each token in the output of the request,
    plus the bit IN_PROMPT for tokens of the prompt that penalties look at.

    Tokens are copied to the device, which counts them: rows of a large vocabulary take longer to make and to
    copy. The host does not wait for the device.
    """
    vocab_size = seen.shape[1]
    prompts, outputs = (
        np.concatenate(
            [slot * vocab_size + _known(ids, vocab_size) for slot, ids in zip(slots, each, strict=True)]
        )
        for each in ([row.repeatable_ids for row in rows], [row.output_ids for row in rows])
    )
    where, prompt, output = arrays_to_device([np.array(slots, dtype=np.int64), prompts, outputs], seen.device)
    seen.index_fill_(0, where, 0)
    counts = seen.view(-1)
    counts.index_fill_(0, prompt, IN_PROMPT)
    counts.index_add_(0, output, torch.ones_like(output, dtype=counts.dtype))


def _known(ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """`ids` as an array of tokens of the vocabulary."""
    found = np.asarray(ids, dtype=np.int64)
    assert not len(found) or 0 <= found.min() <= found.max() < vocab_size, "a token is not in the vocabulary"
    return found


def edit_logits(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    edits: LogitEdits,
    *,
    drafts: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns a copy of `logits` `[R, V]` float32 with the edits of `slots` int64 `[B]` applied.

    `positions` int64 `[R]` are those of the tokens to choose. `drafts` int64 `[B, N-1]` follow the newest
    token of each request. `ancestors` bool `[B, N, N]` marks the ancestors of each node, itself included;
    node 0 is the newest token. None means a chain. `masks` int32 `[R, W]` has the bits of allowed tokens.
    """
    edited: torch.Tensor = torch.ops.baton.edit_logits.default(
        logits,
        positions,
        slots,
        edits.ids,
        edits.values,
        edits.until,
        edits.penalties,
        edits.seen,
        drafts,
        ancestors,
        masks,
    )
    return edited


def _edit(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    until: torch.Tensor,
    penalties: torch.Tensor,
    seen: torch.Tensor | None,
    drafts: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    edits = LogitEdits(ids=ids, values=values, until=until, penalties=penalties, seen=seen)
    edit = edit_fixed if logits.is_cuda else edit_exact
    return edit(logits, positions, slots, edits, drafts, ancestors, masks)


torch.library.impl("baton::edit_logits", ("cpu", "cuda"), _edit)
torch.library.register_fake("baton::edit_logits", _edit)


def edit_fixed(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    edits: LogitEdits,
    drafts: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    """`edit_logits` with fixed shapes: every request takes every edit."""
    slots, drafts = _followed(logits, slots, drafts)
    each = RowEdits(slots, edits.penalties, edits.seen, drafts, ancestors, masks)
    edited = penalise_logits(logits, each)
    _add_entries(edited, positions, slots, edits)
    return edited


def edit_exact(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    edits: LogitEdits,
    drafts: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    masks: torch.Tensor | None,
) -> torch.Tensor:
    """`edit_logits` for the requests that need an edit. The host waits for the device."""
    slots, drafts = _followed(logits, slots, drafts)
    neutral = torch.tensor([1.0, 0.0, 0.0], device=logits.device)
    needs = (edits.penalties[slots] != neutral).any(dim=1) | (edits.until[slots] > 0).any(dim=1)
    if masks is not None:
        needs = needs | (masks != ALL_ALLOWED).view(slots.shape[0], -1).any(dim=1)
    edited = logits.clone()  # an operator must not return its input
    count, each = slots.shape[0], 1 + drafts.shape[1]
    by_request = edited.view(count, each, logits.shape[1])
    for some in row_chunks(needs.nonzero().squeeze(1), max(each * logits.shape[1], 1)):
        theirs, rows = slots[some], by_request[some].flatten(0, 1)
        family = None if ancestors is None else ancestors[some]
        bits = None if masks is None else masks.view(count, each, -1)[some].flatten(0, 1)
        part = RowEdits(theirs, edits.penalties, edits.seen, drafts[some], family, bits)
        rows = penalise_logits_reference(rows, part)
        _add_entries(rows, positions.view(count, each)[some].flatten(), theirs, edits)
        by_request.index_copy_(0, some, rows.view(-1, *by_request.shape[1:]))
    return edited


def _followed(
    logits: torch.Tensor, slots: torch.Tensor, drafts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, drafts). Without drafts each row of `logits` is a request of its own, with no rows behind."""
    if drafts is not None:
        return slots, drafts
    each = logits.shape[0] // max(slots.shape[0], 1)
    slots = slots.repeat_interleave(each, output_size=logits.shape[0])
    return slots, slots.new_empty((slots.shape[0], 0))


def _add_entries(
    logits: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, edits: LogitEdits
) -> None:
    """Adds the entries of the requests in `slots` `[B]` that apply at `positions` `[R]` to `logits`."""
    count = slots.shape[0]
    if edits.ids.shape[1] and count:
        rows = logits.view(count, -1, logits.shape[1])
        holds = positions.view(count, -1)[:, :, None] < edits.until[slots][:, None]
        added = torch.where(holds, edits.values[slots][:, None], 0.0)
        rows.scatter_add_(2, edits.ids[slots][:, None].expand_as(added), added)
