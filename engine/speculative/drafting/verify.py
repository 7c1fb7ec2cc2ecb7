"""Verification of drafts by sample-and-match, along a chain or down a tree.

The target samples one token per row from its own distribution given the row's drafts. A draft is accepted
while it equals the sampled token. Every emitted token is therefore the target's own sample, a function of
(seed, position, prefix) alone. A drafter changes only the number of tokens per step, never the output. In a
tree, the sampled token selects among the children of its node. Shape legend: B requests, N rows each, R rows
of the longest branch.
"""

from typing import NamedTuple

import torch

from ....kernels.chain_verify import chain_verify
from ....kernels.compact_kv import compact_kv
from ....kernels.tree_verify import tree_verify
from ...kv.pool import KVPool
from ...kv.window_pool import WindowedPool
from .shape import DraftShape
from .tree import DraftTree


class AcceptResult(NamedTuple):
    """The accepted branch of each request.

    `accept_len` int64 `[B]`: request b emits `tokens[b, :accept_len[b]]`, at least one token. `tokens` int64
    `[B, R]` are the target's samples along the branch. `path` int64 `[B, R]` are the rows of these samples,
    root first.
    """

    accept_len: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor


def verify_drafts(
    shape: DraftShape,
    tokens: torch.Tensor,
    tree: DraftTree | None,
    targets: torch.Tensor,
    limits: torch.Tensor,
    nodes: torch.Tensor | None = None,
) -> AcceptResult:
    """Accepts a prefix or branch of `tokens` int64 `[B, N]` (root first), given the target's samples
    `targets` `[B, N]`.

    `tree` None: the tokens are a chain. `limits` int64 `[B]`: the first row without a KV slot; rows from it
    on are never accepted. `nodes` int64 `[B, N]`: the rows of a chain, 0 to N - 1, if they are there already.
    """
    if tree is None:
        accept_len = chain_verify(tokens, targets, limits)
        if nodes is None:
            nodes = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return AcceptResult(accept_len, targets, nodes)
    walked = tree_verify(tokens, tree.parents, targets, limits)
    count = shape.num_path
    return AcceptResult(walked.accept_len, walked.tokens[:, :count], walked.path[:, :count])


def compact(pool: KVPool, slots: torch.Tensor, accepted: AcceptResult) -> None:
    """Moves the KV of each accepted branch to the slots of a chain: row i comes from `accepted.path[:, i]`.

    `slots` int64 `[B, S]` are the KV slots of each request's rows.
    """
    rows = torch.arange(1, accepted.path.shape[1], device=accepted.path.device)
    is_kept = rows < accepted.accept_len[:, None]
    sources = slots.gather(1, accepted.path[:, 1:]).where(is_kept, 0)
    targets = slots[:, 1 : accepted.path.shape[1]].where(is_kept, 0)
    if not isinstance(pool, WindowedPool):
        compact_kv(pool.kv, sources.contiguous(), targets.contiguous(), pool.layout.token_layers)
        return
    if pool.layout.num_full:
        compact_kv(pool.kv, sources.contiguous(), targets.contiguous())
    moved = pool.slots_of(torch.stack((sources, targets)))
    compact_kv(pool.part.kv, moved[0], moved[1])
