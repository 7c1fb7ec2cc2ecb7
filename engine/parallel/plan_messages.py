"""What rank 0 tells the other ranks of a tensor-parallel worker: the work that they do with it, in order.

Rank 0 alone schedules, owns requests and chooses tokens and pages. A plan has the numbers by which another
rank does the same forward over its part of the weights and of the KV cache. Tensors do not travel in plans:
features of a draft prefill are shared by a collective behind the plan, and so are the tokens that a step
drafts and accepts. Plans are MessagePack of frozen, typed structs.
"""

from collections.abc import Callable
from typing import TypeAlias

import msgspec


class DrawPart(msgspec.Struct, frozen=True, array_like=True):
    """The sampling of a request as far as drafters follow it: all ranks must draft the same tokens."""

    seed: int
    temperature: float
    top_k: int


class PromptPart(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + len(ids)) of a prompt; `pages` hold the prompt up to its end."""

    ids: list[int]
    start: int
    pages: list[int]


class PromptPlan(msgspec.Struct, frozen=True, tag=True):
    """One forward over parts of prompts. `logit_rows`: its rows whose logits rank 0 reads.

    `has_features`: features of all rows are captured.
    """

    parts: list[PromptPart]
    logit_rows: list[int]
    has_features: bool = False


class DraftPart(msgspec.Struct, frozen=True, array_like=True):
    """One request of a draft prefill, as `DraftPrefill` without tensors."""

    pages: list[int]
    start: int
    next_ids: list[int]
    state_row: int
    is_final: bool
    known_ids: list[int]
    draw: DrawPart


class DraftPrefillPlan(msgspec.Struct, frozen=True, tag=True):
    """One draft prefill. Rank 0 shares the features of all rows, part by part."""

    parts: list[DraftPart]


class BeginDraftsPlan(msgspec.Struct, frozen=True, tag=True):
    """Requests that join and whose drafter needs their text alone: each state row, and all tokens so far."""

    rows: list[int]
    texts: list[list[int]]


class JoinPart(msgspec.Struct, frozen=True, array_like=True):
    """A request that joins the batch in `slot`, as `RequestInit` without the sampling that rank 0 does."""

    slot: int
    newest: int
    length: int
    remaining: int
    capacity: int
    draft_row: int
    pages: list[int]
    draw: DrawPart


class JoinPlan(msgspec.Struct, frozen=True, tag=True):
    """Requests that join the batch."""

    joining: list[JoinPart]


class GrowPart(msgspec.Struct, frozen=True, array_like=True):
    """Further `pages` of the request in `slot`, from index `start` on, for `capacity` rows in all."""

    slot: int
    start: int
    pages: list[int]
    capacity: int


class GrowPlan(msgspec.Struct, frozen=True, tag=True):
    """Requests of the batch that got pages."""

    grown: list[GrowPart]


class StopDraftingPlan(msgspec.Struct, frozen=True, tag=True):
    """The request in `slot` gets no more drafts."""

    slot: int


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """As `DraftShape`."""

    steps: int
    topk: int
    num_nodes: int


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    """One decode step of the requests in `slots`, computed as `num_rows` rows; `is_graph`: by a graph of that
    size. `watched`: as in `StepKind`."""

    slots: list[int]
    shape: StepShape
    num_rows: int
    is_graph: bool
    watched: StepShape | None = None


class CatchUpPlan(msgspec.Struct, frozen=True, tag=True):
    """The drafter observes the late rows of the requests in `slots`; sizes as in `StepPlan`."""

    slots: list[int]
    num_rows: int
    is_graph: bool


class CopyPagePlan(msgspec.Struct, frozen=True, tag=True):
    """Page `source`, KV and draft KV, is copied into page `target`."""

    source: int
    target: int


class WindowPlan(msgspec.Struct, frozen=True, tag=True):
    """Each of `pages` has the window page beside it in `parts` from now on; 0: none."""

    pages: list[int]
    parts: list[int]


class LeavePlan(msgspec.Struct, frozen=True, tag=True):
    """The last plan: the rank ends."""


Plan: TypeAlias = (
    PromptPlan
    | DraftPrefillPlan
    | BeginDraftsPlan
    | JoinPlan
    | GrowPlan
    | StopDraftingPlan
    | StepPlan
    | CatchUpPlan
    | CopyPagePlan
    | WindowPlan
    | LeavePlan
)
Tell: TypeAlias = Callable[[Plan], None]


def encode_plan(plan: Plan) -> bytes:
    """The bytes of `plan`."""
    return msgspec.msgpack.encode(plan)


def decode_plan(data: bytes) -> Plan:
    """The plan in `data`. Raises msgspec.DecodeError for anything else."""
    plan: Plan = msgspec.msgpack.decode(data, type=Plan)
    return plan
