"""The rows that MTP modules compute again at the end of a step, and their chain of proposals.

With committed tokens x[0..c], module k wrote its last k rows from guesses, because row i takes token i+k+1.
Each step therefore runs every module over one window: the last K-1 committed rows (the front) and the rows
that the step verified. Rows behind the accepted ones are junk, which the next step overwrites. All shapes are
fixed, and no operation synchronises with the host.

Shape legend: B requests, F = K-1 front rows, R verified rows, W = F+R rows of a window, H hidden, K modules,
V vocabulary, P pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....kernels.attention_form import PLAIN_FORM, AttentionForm
from ....kernels.kv_store import kv_rows
from ...kv.pool import KVPool
from ...models.layers import Attend
from ...row_plans import plan_rows
from ..drafting.choice import DraftSampling
from .mtp_head import MtpHead
from .mtp_states import FrontStates
from .states import PAD_ROW


class Window(NamedTuple):
    """The rows of one pass. Every module runs over all of them.

    `hidden` `[B, W, H]` is the target's residual stream. int64: `tokens` `[B, W]` are those behind each row,
    `positions` `[B, W]`, `rows` `[B, W]` the places in the pool (0: the sink), `select` `[B]` the window's
    row of the newest committed token but one, from which the proposals are made.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    select: torch.Tensor

    def followed_by(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> "Window":
        """This window and R further rows behind it, each tensor `[B, R, ...]`."""
        return Window(
            torch.cat((self.hidden, hidden), dim=1),
            torch.cat((self.tokens, tokens), dim=1),
            torch.cat((self.positions, positions), dim=1),
            torch.cat((self.rows, rows), dim=1),
            self.select,
        )


def front_window(
    states: FrontStates, rows: torch.Tensor, lens: torch.Tensor, page_table: torch.Tensor, pool: KVPool
) -> Window:
    """The front rows of requests with states `rows` `[B]` and `lens` `[B]` committed rows.

    Rows that a request does not have, and all rows of requests without drafts, lie in the sink.
    """
    count, device = states.num_front, lens.device
    offsets = torch.arange(count, device=device)
    positions = lens[:, None] - count + offsets
    at = positions.clamp(min=0)
    slots = page_table.gather(1, at // pool.page_size) * pool.page_size + at % pool.page_size
    is_held = offsets >= count - states.counts.index_select(0, rows)[:, None]
    is_held = is_held & (rows != PAD_ROW)[:, None] & (positions >= 0)
    return Window(
        states.hidden.index_select(0, rows),
        states.tokens.index_select(0, rows),
        at,
        torch.where(is_held, kv_rows(slots, pool.kv), 0),
        torch.full_like(lens, count - 1),
    )


def newest_rows(values: torch.Tensor, emitted: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` rows that end at the accepted boundary: of a window `[B, W, ...]` whose first `count`
    rows are the front, and of which `emitted` `[B]` rows behind it were accepted.
    """
    index = emitted[:, None] + torch.arange(count, device=emitted.device)
    if values.dim() > 2:
        index = index[:, :, None].expand(-1, -1, values.shape[2])
    return values.gather(1, index)


def rotate(tokens: torch.Tensor, select: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """The tokens `[B, W]` of the next module: one further to the left, with `drafts` `[B]` at `select`."""
    left = torch.cat((tokens[:, 1:], tokens[:, -1:]), dim=1)
    return left.scatter(1, select[:, None], drafts[:, None])


def module_attention(attend: Attend, module: int) -> Attend:
    """`attend` over the KV of module number `module`, whose only layer calls it as layer 0."""

    def attend_module(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: AttentionForm = PLAIN_FORM
    ) -> torch.Tensor:
        return attend(module + layer, q, k, v, form)

    return attend_module


def plan_modules(
    pool: KVPool,
    window: Window,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    num_modules: int,
    *,
    is_recorded: bool,
) -> list[Attend]:
    """The attention of each module over its own KV; `kv_lens` `[B]` counts the rows up to the window's last.

    The modules share one window and so one set of rows and lengths, which is checked at every call.
    """
    plan = plan_rows(pool, window.rows.reshape(-1), page_table, kv_lens, is_recorded=is_recorded)
    return [module_attention(plan.attend, module) for module in range(num_modules)]


def draft_window(
    head: MtpHead, window: Window, attends: Sequence[Attend], sampling: DraftSampling
) -> torch.Tensor:
    """Runs all modules over `window`; returns the proposals int64 `[B, K]`, one of each module.

    Module k+1 reads the tokens of module k, rotated by one, with the proposal of module k behind the
    committed ones. `attends` is from `plan_modules`.
    """
    count, width = window.tokens.shape
    tokens, drafts = window.tokens, []
    hidden = head.project(window.hidden.reshape(count * width, -1))
    cos, sin = head.rotary(window.positions.reshape(-1))
    picked = torch.arange(count, device=tokens.device) * width + window.select
    last = window.positions.reshape(-1).index_select(0, picked)
    for k, module in enumerate(head.modules):
        out = module(hidden, tokens.reshape(-1), cos, sin, attends[k])
        logits = head.compute_logits(out.index_select(0, picked), k)
        drafts.append(sampling.choose(logits, last + k + 2, head.target_ids))
        if k + 1 == head.num_modules:
            break
        tokens = rotate(tokens, window.select, drafts[-1])
        if head.is_chained:
            hidden = head.feedback(out, k)
    return torch.stack(drafts, dim=1)
