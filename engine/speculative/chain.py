"""Where the rows of one speculative step stand: planned once per step, read by draft, verify and draft extend.

Request b has n_b committed tokens with KV (rows 0..n_b-1) and one newest token without. Of N rows per request, row j
stands in slot n_b+j.

    chain   position n_b+j. Drafting writes rows 0..N-3 into the draft pool, verify rows 0..N-1 into the target pool, and
            draft extend rows 0..N-1 into the draft pool again, from true features.
    tree    k nodes of each of D levels but the last are rows of the draft pool, level by level; N nodes of the target
            pool, parents first, at position n_b + depth. Of the target's rows the accepted branch is then moved to rows
            0..; draft extend writes rows 0..D, the branch's, into the draft pool.

Shape legend: B requests, N rows each, P pages, M rows of one forward, W columns of a tree mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..batch.forward_batch import CaptureHidden, ForwardBatch, ForwardMode
from ..kv.page_table import build_page_table, pages_for
from ..request import Request


@dataclass(frozen=True, kw_only=True)
class ChainPlan:
    """Positions and slots `[B, N]` int64 of a step; rows past a request's pages or the context limit go to slot 0.

    `lens` holds n_b on the host, `limits` `[B]` how many of the N rows of each request may be accepted (at least 1).
    """

    num_rows: int
    lens: list[int]
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    limits: torch.Tensor

    @property
    def num_requests(self) -> int:
        return len(self.lens)

    def first(self, count: int) -> "ChainPlan":
        """The plan of the first `count` rows of each request."""
        if count == self.num_rows:
            return self
        return replace(
            self,
            num_rows=count,
            positions=self.positions[:, :count],
            slots=self.slots[:, :count],
            limits=self.limits.clamp(max=count),
        )


def plan_chain(
    requests: Sequence[Request],
    num_rows: int,
    *,
    page_size: int,
    max_context: int,
    device: torch.device | str,
) -> ChainPlan:
    """Plan `num_rows` rows for each of `requests`; each must have room for its newest token at least."""
    lens = [request.num_tokens - 1 for request in requests]
    needed = [pages_for(n + num_rows, page_size) for n in lens]
    table = build_page_table([r.pages[:need] for r, need in zip(requests, needed, strict=True)], device)
    width = max(needed, default=1)
    if table.shape[1] < width:
        table = torch.nn.functional.pad(table, (0, width - table.shape[1]))
    room = [min(len(r.pages) * page_size, max_context) - n for r, n in zip(requests, lens, strict=True)]
    for request, left in zip(requests, room, strict=True):
        assert left >= 1, f"{request!r}: no page or no context left for its newest token"
    stored = torch.tensor([min(left, num_rows) for left in room], dtype=torch.int64, device=device)
    starts = torch.tensor(lens, dtype=torch.int64, device=device)
    rows = torch.arange(num_rows, device=device)
    positions = starts[:, None] + rows
    slots = table.gather(1, positions // page_size) * page_size + positions % page_size
    slots = torch.where(rows < stored[:, None], slots, 0)
    return ChainPlan(
        num_rows=num_rows,
        lens=lens,
        positions=positions.clamp(max=max_context - 1),
        slots=slots,
        page_table=table,
        limits=stored,
    )


def chain_batch(
    plan: ChainPlan,
    token_ids: torch.Tensor,
    *,
    mode: ForwardMode,
    first: int = 0,
    slots: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    capture: CaptureHidden = CaptureHidden.NULL,
    features: torch.Tensor | None = None,
) -> ForwardBatch:
    """The batch of rows [first, first + M) of `plan` holding `token_ids` `[B, M]`, by default at the plan's slots and
    positions; both `[B, M]`. `tree_mask` bool `[B, M, W]` as of ForwardBatch."""
    count = token_ids.shape[1]
    window = slice(first, first + count)
    return ForwardBatch(
        mode=mode,
        input_ids=token_ids.reshape(-1),
        positions=(plan.positions[:, window] if positions is None else positions).reshape(-1),
        slots=(plan.slots[:, window] if slots is None else slots).reshape(-1),
        page_table=plan.page_table,
        q_lens=[count] * plan.num_requests,
        kv_lens=[n + first + count for n in plan.lens],
        capture_hidden=capture,
        features=features,
        tree_mask=tree_mask,
    )
