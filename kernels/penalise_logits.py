"""Copies logits with penalties for tokens of the request, and without the tokens that a grammar forbids.

The passes that torch would make over all logits, some thirty with their temporary values, are one.

Legend: S slots (known requests), B requests, N rows of each, R = B * N, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .choose_ranked import row_stride
from .triton_jit import cdiv, jit_varying, tl

IN_PROMPT = 1 << 30  # the bit of `seen` beside the count
SPLIT = 2048  # logits of a program


class RowEdits(NamedTuple):
    """Edits of N rows each of the requests in `slots` int64 `[B]`.

    `penalties` float32 `[S, 3]` holds repetition, frequency and presence. `seen` int32 `[S, V]` counts the
    tokens of outputs, plus the bit IN_PROMPT for tokens of prompts; None: no penalties. `drafts` int64
    `[B, N-1]` follow the newest token of each request, and count in the rows behind them. `ancestors` bool
    `[B, N, N]` marks the ancestors of each node, itself included; node 0 is the newest token; None: a chain.
    `masks` int32 `[R, W]` has the bits of allowed tokens; None allows all.
    """

    slots: torch.Tensor
    penalties: torch.Tensor
    seen: torch.Tensor | None
    drafts: torch.Tensor
    ancestors: torch.Tensor | None = None
    masks: torch.Tensor | None = None


def penalise_logits_reference(logits: torch.Tensor, edits: RowEdits) -> torch.Tensor:
    """The definition; arguments as in `penalise_logits`. It never waits for the device."""
    slots, penalties, seen, drafts, ancestors, masks = edits
    count, num_nodes, vocab_size = slots.shape[0], 1 + drafts.shape[1], logits.shape[1]
    rows = logits.view(count, num_nodes, vocab_size)
    if seen is not None:
        counts = seen[slots][:, None].expand(rows.shape).contiguous()
        if num_nodes > 1:
            if ancestors is None:
                nodes = torch.arange(num_nodes, device=rows.device)
                ancestors = (nodes[None, :] <= nodes[:, None]).expand(count, -1, -1)
            index = drafts[:, None].expand(-1, num_nodes, -1)
            counts = counts.scatter_add(2, index, ancestors[:, :, 1:].to(counts.dtype))
        repetition, frequency, presence = (x[:, None, None] for x in penalties[slots].unbind(1))
        scaled = torch.where(rows > 0, rows / repetition, rows * repetition)
        changed = torch.where(counts != 0, scaled, rows)
        counts = counts & (IN_PROMPT - 1)
        rows = changed - frequency * counts - presence * (counts > 0)
    rows = rows.reshape(-1, vocab_size)
    if masks is not None:
        return rows.masked_fill(~allowed(masks, vocab_size), -math.inf)
    return rows if seen is not None else rows.clone()


def allowed(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool `[..., V]`: the bits of `masks` int32 `[..., W]`."""
    bits = masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device)
    return (bits & 1 != 0).flatten(-2)[..., :vocab_size]


@jit_varying(
    "num_nodes", "draft_stride", "has_seen", "has_tree", "has_masks", "p_slots", "p_seen", "p_drafts",
    "p_ancestors", "p_masks",
)  # fmt: skip
def _penalise_kernel(
    p_logits: tl.tensor,
    p_slots: tl.tensor,
    p_penalties: tl.tensor,
    p_seen: tl.tensor,
    p_drafts: tl.tensor,
    p_ancestors: tl.tensor,
    p_masks: tl.tensor,
    p_out: tl.tensor,
    num_nodes: tl.tensor,
    draft_stride: tl.tensor,
    has_seen: tl.tensor,
    has_tree: tl.tensor,
    has_masks: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    row_stride: tl.tensor,
    COUNT_BITS: tl.constexpr,
    SPLIT: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    # program (row, split); the kernel learns when it runs what is missing, so that there is one variant
    wait_for_previous(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    i_request, i_node = i_row // num_nodes, i_row % num_nodes
    slot = tl.load(p_slots + i_request)
    i_token = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    m_token = i_token < vocab_size
    b_logits = tl.load(p_logits + i_row * row_stride + i_token, mask=m_token, other=0.0)
    repetition = tl.load(p_penalties + 3 * slot)
    frequency, presence = tl.load(p_penalties + 3 * slot + 1), tl.load(p_penalties + 3 * slot + 2)
    if (has_seen != 0) & ((repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)):
        b_counts = tl.load(p_seen + slot * vocab_size + i_token, mask=m_token, other=0)
        for i_draft in range(0, num_nodes - 1):
            is_before = i_draft < i_node
            if has_tree != 0:
                is_before = tl.load(p_ancestors + i_row * num_nodes + 1 + i_draft) != 0
            draft = tl.load(p_drafts + i_request * draft_stride + i_draft)
            b_counts += ((i_token == draft) & is_before).to(tl.int32)
        b_scaled = tl.where(b_logits > 0, tl.div_rn(b_logits, repetition), b_logits * repetition)
        b_logits = tl.where(b_counts != 0, b_scaled, b_logits)
        b_counts = b_counts & COUNT_BITS
        b_logits = b_logits - frequency * b_counts.to(tl.float32)
        b_logits = b_logits - tl.where(b_counts > 0, presence, 0.0)
    if has_masks != 0:
        b_words = tl.load(p_masks + i_row * num_words + i_token // 32, mask=m_token, other=0)
        b_logits = tl.where((b_words >> (i_token % 32)) & 1 != 0, b_logits, float("-inf"))
    release_next(CHAINED)
    tl.store(p_out + i_row * vocab_size + i_token, b_logits, mask=m_token)


def penalise_logits_triton(logits: torch.Tensor, edits: RowEdits) -> torch.Tensor:
    """Launch; arguments as in `penalise_logits`. Raises ValueError if shapes or dtypes do not fit."""
    _check(logits, edits)
    slots, penalties, seen, drafts, ancestors, masks = edits
    (num_rows, vocab_size), device = logits.shape, logits.device
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    if num_rows == 0:
        return out
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    drafts = drafts if drafts.stride(1) == 1 else drafts.contiguous()
    words = -(-vocab_size // 32) if masks is None else masks.shape[1]
    nothing = torch.empty(1, dtype=torch.int32, device=device)  # stands for what is missing
    _penalise_kernel[(num_rows, cdiv(vocab_size, SPLIT))](
        logits,
        slots.contiguous(),
        penalties,
        nothing if seen is None else seen,
        drafts,
        (nothing if ancestors is None else ancestors.contiguous()).view(torch.uint8),
        nothing if masks is None else masks.contiguous(),
        out,
        1 + drafts.shape[1],
        drafts.stride(0),
        int(seen is not None),
        int(ancestors is not None),
        int(masks is not None),
        vocab_size,
        words,
        row_stride(logits),
        COUNT_BITS=IN_PROMPT - 1,
        SPLIT=SPLIT,
        **chained(device),
        num_warps=4,
        enable_fp_fusion=False,  # products are rounded before their sums, as in torch
    )
    return out


def _check(logits: torch.Tensor, edits: RowEdits) -> None:
    slots, penalties, seen, drafts, ancestors, masks = edits
    count, num_nodes = slots.shape[0], 1 + drafts.shape[-1]
    given = {
        "logits": (logits, torch.float32, (count * num_nodes, logits.shape[-1])),
        "slots": (slots, torch.int64, (count,)),
        "penalties": (penalties, torch.float32, (penalties.shape[0], 3)),
        "seen": (seen, torch.int32, (penalties.shape[0], logits.shape[-1])),
        "drafts": (drafts, torch.int64, (count, num_nodes - 1)),
        "ancestors": (ancestors, torch.bool, (count, num_nodes, num_nodes)),
        "masks": (masks, torch.int32, (count * num_nodes, -(-logits.shape[-1] // 32))),
    }
    for name, (x, dtype, shape) in given.items():
        if x is not None and (x.dtype != dtype or x.shape != shape):
            raise ValueError(
                f"penalise_logits: {name} {tuple(x.shape)} {x.dtype}, expected {shape} {dtype} for {count} "
                f"requests with {num_nodes} rows each"
            )
    if not (penalties.is_contiguous() and (seen is None or seen.is_contiguous())):
        raise ValueError("penalise_logits: penalties and seen must be contiguous")


def penalise_logits(logits: torch.Tensor, edits: RowEdits) -> torch.Tensor:
    """A copy of `logits` float32 `[R, V]` with penalties and masks. Raises ValueError if shapes or dtypes do
    not fit.
    """
    if logits.is_cuda:
        return penalise_logits_triton(logits, edits)
    _check(logits, edits)
    return penalise_logits_reference(logits, edits)
