"""The bookkeeping around the forwards of a decode step, one launch each: row places before, outcome after.

Legend: B requests, F fields of a request's state, P pages of it, S places planned, N nodes verified, R rows
of the longest branch. Pool rows are those of `kv_store.kv_rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import jit_varying, next_power_of_2, tl

# Columns of a request's state; the pages are the last. LATE counts rows that wait for the drafter. MATCHED
# tells whether the drafter had proposed the first of those that it has seen last.
NEWEST, LENGTH, REMAINING, CAPACITY, DRAFT_ROW, SEED, TOP_K, IS_DRAWN, LATE, MATCHED, PAGES = range(11)
UNASKED, MISS, MATCH = range(3)  # whether a token was proposed
NUM_COUNTS = 4  # columns of a report after the tokens


class Places(NamedTuple):
    """The rows of a step.

    `positions`, `proposed` (positions + 1), `slots`, `target_rows`, `draft_rows` (row numbers in either pool)
    and `nodes` (0 to S - 1): int64 `[B, S]`. `chain_lens` int64 `[S, B]`: lengths + 0 to S - 1. Each of the
    following is int64 `[B]`: `lengths`, rows with KV; `limits`, rows that may be accepted; `verify_lens` and
    `extend_lens`, context length of the verify and of the draft extend; `num_drafts`, N - 1. An idle request
    has lengths of 0, but in `chain_lens`. Its rows, rows past a request's capacity and all draft rows of a
    request without drafts lie in the sink.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    target_rows: torch.Tensor
    draft_rows: torch.Tensor
    proposed: torch.Tensor
    nodes: torch.Tensor
    chain_lens: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor
    verify_lens: torch.Tensor
    extend_lens: torch.Tensor
    num_drafts: torch.Tensor


class PlaceSizes(NamedTuple):
    """The sizes of a step.

    `num_places` S, `num_nodes` N, `num_path` R, `page_size` and `max_context` in tokens. `target_page` and
    `draft_page`: rows of a page in either pool.
    """

    num_places: int
    num_nodes: int
    num_path: int
    page_size: int
    max_context: int
    target_page: int
    draft_page: int


def step_places_reference(state: torch.Tensor, sizes: PlaceSizes) -> Places:
    """The definition and the CPU path; arguments as in `step_places`. It never waits for the device."""
    is_active = state[:, REMAINING] > 0
    lengths = torch.where(is_active, state[:, LENGTH], 0)
    nodes = torch.arange(sizes.num_places, device=state.device)
    positions = lengths[:, None] + nodes
    pages = state[:, PAGES:].gather(1, positions // sizes.page_size)
    is_stored = (positions < state[:, CAPACITY, None]) & is_active[:, None]
    is_drafted = is_stored & (state[:, DRAFT_ROW, None] != 0)
    offsets = positions % sizes.page_size
    room = torch.where(is_active, state[:, CAPACITY] - lengths, 0)
    at = positions.clamp(max=sizes.max_context - 1)
    return Places(
        at,
        torch.where(is_stored, pages * sizes.page_size + offsets, 0),
        torch.where(is_stored, pages * sizes.target_page + offsets, 0),
        torch.where(is_drafted, pages * sizes.draft_page + offsets, 0),
        at + 1,
        nodes.expand(positions.shape),
        positions.T.contiguous(),
        lengths,
        room.clamp(max=sizes.num_places),
        torch.where(is_active, lengths + sizes.num_nodes, 0),
        torch.where(is_active, lengths + sizes.num_path, 0),
        torch.full_like(lengths, sizes.num_nodes - 1),
    )


@jit_varying("num_requests", "state_stride")
def _places_kernel(
    p_state: tl.tensor,
    p_grid: tl.tensor,
    p_rows: tl.tensor,
    num_requests: tl.tensor,
    state_stride: tl.tensor,
    NUM_PLACES: tl.constexpr,
    NUM_NODES: tl.constexpr,
    NUM_PATH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_CONTEXT: tl.constexpr,
    TARGET_PAGE: tl.constexpr,
    DRAFT_PAGE: tl.constexpr,
    LENGTH: tl.constexpr,
    REMAINING: tl.constexpr,
    CAPACITY: tl.constexpr,
    DRAFT_ROW: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_request = tl.program_id(0).to(tl.int64)
    p_mine = p_state + i_request * state_stride
    is_active = tl.load(p_mine + REMAINING) > 0
    length = tl.where(is_active, tl.load(p_mine + LENGTH), 0)
    capacity = tl.load(p_mine + CAPACITY)
    is_warm = tl.load(p_mine + DRAFT_ROW) != 0
    i_place = tl.arange(0, BLOCK)
    m_place = i_place < NUM_PLACES
    b_position = length + i_place
    b_page = tl.load(p_mine + PAGES + b_position // PAGE_SIZE, mask=m_place, other=0)
    b_offset = b_position % PAGE_SIZE
    m_stored = (b_position < capacity) & is_active
    num_cells = num_requests * NUM_PLACES
    o_cell = i_request * NUM_PLACES + i_place
    release_next(CHAINED)
    b_at = tl.minimum(b_position, MAX_CONTEXT - 1)
    tl.store(p_grid + o_cell, b_at, mask=m_place)
    tl.store(p_grid + num_cells + o_cell, tl.where(m_stored, b_page * PAGE_SIZE + b_offset, 0), mask=m_place)
    tl.store(
        p_grid + 2 * num_cells + o_cell, tl.where(m_stored, b_page * TARGET_PAGE + b_offset, 0), mask=m_place
    )
    b_draft = tl.where(m_stored & is_warm, b_page * DRAFT_PAGE + b_offset, 0)
    tl.store(p_grid + 3 * num_cells + o_cell, b_draft, mask=m_place)
    tl.store(p_grid + 4 * num_cells + o_cell, b_at + 1, mask=m_place)
    tl.store(p_grid + 5 * num_cells + o_cell, i_place.to(tl.int64), mask=m_place)
    tl.store(p_grid + 6 * num_cells + i_place * num_requests + i_request, b_position, mask=m_place)
    tl.store(p_rows + i_request, length)
    tl.store(
        p_rows + num_requests + i_request, tl.where(is_active, tl.minimum(capacity - length, NUM_PLACES), 0)
    )
    tl.store(p_rows + 2 * num_requests + i_request, tl.where(is_active, length + NUM_NODES, 0))
    tl.store(p_rows + 3 * num_requests + i_request, tl.where(is_active, length + NUM_PATH, 0))
    tl.store(p_rows + 4 * num_requests + i_request, NUM_NODES - 1)


def step_places_triton(state: torch.Tensor, sizes: PlaceSizes) -> Places:
    """Launch on `state` int64 `[B, F+P]` (rows dense).

    Raises ValueError if `state` has another form or no page.
    """
    _check_state(state)
    count = state.shape[0]
    grid = torch.empty((7, count, sizes.num_places), dtype=torch.int64, device=state.device)
    rows = torch.empty((5, count), dtype=torch.int64, device=state.device)
    if count:
        _places_kernel[(count,)](
            state,
            grid,
            rows,
            count,
            state.stride(0),
            *sizes,
            LENGTH=LENGTH,
            REMAINING=REMAINING,
            CAPACITY=CAPACITY,
            DRAFT_ROW=DRAFT_ROW,
            PAGES=PAGES,
            BLOCK=next_power_of_2(sizes.num_places),
            **chained(state.device),
            num_warps=1,
        )
    positions, slots, target_rows, draft_rows, proposed, nodes, lens = grid.unbind(0)
    chain_lens = lens.view(sizes.num_places, count)
    return Places(positions, slots, target_rows, draft_rows, proposed, nodes, chain_lens, *rows.unbind(0))


def step_places(state: torch.Tensor, sizes: PlaceSizes) -> Places:
    """The places of a step's rows, from the `state` int64 `[B, F+P]` of its requests.

    Raises ValueError if `state` has another form or no page.
    """
    if state.is_cuda:
        return step_places_triton(state, sizes)
    _check_state(state)
    return step_places_reference(state, sizes)


class StepOutcome(NamedTuple):
    """The outcome of a step.

    `report` int64 `[B, R+4]`: the target's R choices along the accepted branch; the verified accept length;
    the number of rows before the first row with bad logits; the number of rows before the first unseen row;
    whether further drafts would have matched. `emitted` int64 `[B]`: tokens given to the request; 0: its
    state stays unchanged.
    """

    report: torch.Tensor
    emitted: torch.Tensor


def step_outcome_reference(
    table: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    accept_len: torch.Tensor,
    is_bad: torch.Tensor,
    is_unseen: torch.Tensor,
    would_match: torch.Tensor,
) -> StepOutcome:
    """The definition and the CPU path; arguments as in `step_outcome`. It never waits for the device."""
    by_node = (path.shape[0], is_bad.shape[0] // max(path.shape[0], 1))
    good, seen = (
        (flags.view(by_node).gather(1, path).long().cumsum(dim=1) == 0).sum(dim=1)
        for flags in (is_bad, is_unseen)
    )
    rows = table[:, : REMAINING + 1].index_select(0, slots)
    emitted = torch.stack((accept_len, good, seen, rows[:, REMAINING])).amin(dim=0)
    last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None]).squeeze(1)
    newest = torch.where(emitted > 0, last, rows[:, NEWEST])
    moved = torch.stack((newest, rows[:, LENGTH] + emitted, rows[:, REMAINING] - emitted), dim=1)
    table[:, NEWEST : REMAINING + 1].index_copy_(0, slots, moved)
    report = torch.cat((tokens, torch.stack((accept_len, good, seen, would_match), dim=1)), dim=1)
    return StepOutcome(report, emitted)


@jit_varying(
    "table_stride", "tokens_stride", "path_stride", "num_nodes",
    "p_slots", "p_tokens", "p_path", "p_accept_len", "p_would_match",
)  # fmt: skip
def _outcome_kernel(
    p_table: tl.tensor,
    p_slots: tl.tensor,
    p_tokens: tl.tensor,
    p_path: tl.tensor,
    p_accept_len: tl.tensor,
    p_is_bad: tl.tensor,
    p_is_unseen: tl.tensor,
    p_would_match: tl.tensor,
    p_report: tl.tensor,
    p_emitted: tl.tensor,
    table_stride: tl.tensor,
    tokens_stride: tl.tensor,
    path_stride: tl.tensor,
    num_nodes: tl.tensor,
    NUM_PATH: tl.constexpr,
    NUM_COUNTS: tl.constexpr,
    NEWEST: tl.constexpr,
    LENGTH: tl.constexpr,
    REMAINING: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_request = tl.program_id(0).to(tl.int64)
    i_row = tl.arange(0, BLOCK)
    m_row = i_row < NUM_PATH
    b_path = tl.load(p_path + i_request * path_stride + i_row, mask=m_row, other=0)
    o_node = i_request * num_nodes + b_path
    b_bad = tl.load(p_is_bad + o_node, mask=m_row, other=0) != 0
    b_unseen = tl.load(p_is_unseen + o_node, mask=m_row, other=0) != 0
    good = tl.min(tl.where(b_bad, i_row, NUM_PATH), axis=0).to(tl.int64)
    seen = tl.min(tl.where(b_unseen, i_row, NUM_PATH), axis=0).to(tl.int64)
    accepted = tl.load(p_accept_len + i_request)
    p_mine = p_table + tl.load(p_slots + i_request) * table_stride
    remaining = tl.load(p_mine + REMAINING)
    emitted = tl.minimum(tl.minimum(accepted, remaining), tl.minimum(good, seen))
    b_tokens = tl.load(p_tokens + i_request * tokens_stride + i_row, mask=m_row, other=0)
    release_next(CHAINED)
    p_out = p_report + i_request * (NUM_PATH + NUM_COUNTS)
    tl.store(p_out + i_row, b_tokens, mask=m_row)
    tl.store(p_out + NUM_PATH, accepted)
    tl.store(p_out + NUM_PATH + 1, good)
    tl.store(p_out + NUM_PATH + 2, seen)
    tl.store(p_out + NUM_PATH + 3, tl.load(p_would_match + i_request))
    tl.store(p_emitted + i_request, emitted)
    # all padding requests share one idle slot and leave it unchanged
    last = tl.sum(tl.where(i_row == emitted - 1, b_tokens, 0), axis=0)
    m_moved = emitted > 0
    tl.store(p_mine + NEWEST, last, mask=m_moved)
    tl.store(p_mine + LENGTH, tl.load(p_mine + LENGTH) + emitted, mask=m_moved)
    tl.store(p_mine + REMAINING, remaining - emitted, mask=m_moved)


def step_outcome_triton(
    table: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    accept_len: torch.Tensor,
    is_bad: torch.Tensor,
    is_unseen: torch.Tensor,
    would_match: torch.Tensor,
) -> StepOutcome:
    """Launch with the arguments of `step_outcome`. Raises ValueError if shapes or dtypes do not fit."""
    _check_outcome(table, slots, tokens, path, (accept_len, would_match), (is_bad, is_unseen))
    count, num_path = path.shape
    report = torch.empty((count, num_path + NUM_COUNTS), dtype=torch.int64, device=table.device)
    emitted = torch.empty(count, dtype=torch.int64, device=table.device)
    if count:
        tokens, path = (x if x.stride(1) == 1 else x.contiguous() for x in (tokens, path))
        _outcome_kernel[(count,)](
            table,
            slots.contiguous(),
            tokens,
            path,
            accept_len.contiguous(),
            is_bad.contiguous().view(torch.uint8),
            is_unseen.contiguous().view(torch.uint8),
            would_match.contiguous(),
            report,
            emitted,
            table.stride(0),
            tokens.stride(0),
            path.stride(0),
            is_bad.numel() // count,
            NUM_PATH=num_path,
            NUM_COUNTS=NUM_COUNTS,
            NEWEST=NEWEST,
            LENGTH=LENGTH,
            REMAINING=REMAINING,
            BLOCK=next_power_of_2(num_path),
            **chained(table.device),
            num_warps=1,
        )
    return StepOutcome(report, emitted)


def step_outcome(
    table: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    accept_len: torch.Tensor,
    is_bad: torch.Tensor,
    is_unseen: torch.Tensor,
    would_match: torch.Tensor,
) -> StepOutcome:
    """The outcome of a step.

    Advances the state `table` int64 `[slots, F+P]` of its requests, at `slots` int64 `[B]`.

    `tokens`, `path` int64 `[B, R]`: the target's choices along the accepted branch, and the nodes at which
    they were made. `accept_len`: int64 `[B]`. `is_bad`, `is_unseen`: bool `[B*N]` by node. `would_match`:
    int64 `[B]`. Raises ValueError if shapes or dtypes do not fit.
    """
    if table.is_cuda:
        return step_outcome_triton(table, slots, tokens, path, accept_len, is_bad, is_unseen, would_match)
    _check_outcome(table, slots, tokens, path, (accept_len, would_match), (is_bad, is_unseen))
    return step_outcome_reference(table, slots, tokens, path, accept_len, is_bad, is_unseen, would_match)


def _check_state(state: torch.Tensor) -> None:
    if state.dim() != 2 or state.dtype != torch.int64 or state.shape[1] <= PAGES or state.stride(1) != 1:
        raise ValueError(
            f"step_places: state {tuple(state.shape)} {state.dtype}, expected int64 [B, {PAGES} + pages] "
            "with dense rows"
        )


def _check_outcome(
    table: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    counts: tuple[torch.Tensor, ...],
    flags: tuple[torch.Tensor, ...],
) -> None:
    _check_state(table)
    count = slots.shape[0]
    is_shaped = tokens.shape == path.shape == (count, path.shape[-1]) and all(
        x.shape == (count,) for x in counts
    )
    is_integer = all(x.dtype == torch.int64 for x in (slots, tokens, path, *counts))
    is_flagged = all(
        x.dtype == torch.bool and (x.numel() % count == 0 if count else not x.numel()) for x in flags
    )
    if not (is_shaped and is_integer and is_flagged):
        raise ValueError(
            f"step_outcome: tokens {tuple(tokens.shape)}, path {tuple(path.shape)} and counts "
            f"{[tuple(x.shape) for x in counts]} must be int64 [B, R] and [B] for {count} slots, flags "
            f"{[(tuple(x.shape), x.dtype) for x in flags]} bool [B * N]"
        )
