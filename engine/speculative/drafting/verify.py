"""Which drafts are kept: sample-and-match along a chain, or down a tree.

The target samples a token in every row from its own distribution behind the row's drafts; drafts are kept
while they equal what was sampled. Every emitted token is thus the target's own choice, a function of (seed,
position, prefix) alone: no drafter can change the output, only how many tokens a step yields. In a tree the
sampled token chooses among the children of the node it was sampled behind. Shape legend: B requests, N rows
each, R rows of the longest branch.
"""

from typing import NamedTuple

import torch

from ....kernels.chain_verify import chain_verify
from ....kernels.compact_kv import compact_kv
from ....kernels.tree_verify import tree_verify
from ...kv.pool import KVPool
from .shape import DraftShape
from .tree import DraftTree


class AcceptResult(NamedTuple):
    """`accept_len` int64 `[B]`: request b emits `tokens[b, :accept_len[b]]`, at least one token. `tokens`
    int64 `[B, R]`: the target's choices along the kept branch. `path` int64 `[B, R]`: the rows where they
    were made, root first."""

    accept_len: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor


def verify_drafts(
    shape: DraftShape,
    tokens: torch.Tensor,
    tree: DraftTree | None,
    targets: torch.Tensor,
    limits: torch.Tensor,
) -> AcceptResult:
    """What is accepted of `tokens` int64 `[B, N]`, root first, given the target's choice `targets` `[B, N]`
    behind each.

    `tree` None: the tokens are a chain. `limits` int64 `[B]`: rows from there on found no place and are not
    kept.
    """
    if tree is None:
        accept_len = chain_verify(tokens, targets, limits)
        rows = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return AcceptResult(accept_len, targets, rows)
    walked = tree_verify(tokens, tree.parents, targets, limits)
    count = shape.num_path
    return AcceptResult(walked.accept_len, walked.tokens[:, :count], walked.path[:, :count])


def compact(pool: KVPool, slots: torch.Tensor, accepted: AcceptResult) -> None:
    """Move the KV of the kept branch of each request to where a chain's would lie: row i from
    `accepted.path[:, i]`.

    `slots` int64 `[B, S]`: where the rows of each request stand.
    """
    rows = torch.arange(1, accepted.path.shape[1], device=accepted.path.device)
    is_kept = rows < accepted.accept_len[:, None]
    sources = slots.gather(1, accepted.path[:, 1:]).where(is_kept, 0)
    targets = slots[:, 1 : accepted.path.shape[1]].where(is_kept, 0)
    compact_kv(pool.kv, sources.contiguous(), targets.contiguous())
