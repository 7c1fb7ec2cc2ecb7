"""Which drafts are kept: sample-and-match along a chain, or down a tree.

The target samples a token in every row from its own distribution behind the row's drafts; drafts are kept while they
equal what was sampled. Every emitted token is thus the target's own choice, a function of (seed, position, prefix)
alone: no drafter can change the output, only how many tokens a step yields. In a tree the sampled token chooses among
the children of the node it was sampled behind. Shape legend: B requests, N rows each, R rows of the longest branch.
"""

from typing import NamedTuple

import torch

from ....kernels.chain_verify import chain_verify
from ....kernels.compact_kv import compact_kv
from ....kernels.tree_verify import tree_verify
from ...kv_pool import KVPool
from .shape import DraftShape
from .tree import DraftTree


class Verdict(NamedTuple):
    """`accept_len` int64 `[B]`: request b emits `tokens[b, :accept_len[b]]`, at least one token. `tokens` int64 `[B, R]`:
    the target's choices along the kept branch. `path` int64 `[B, R]`: the rows where they were made, root first."""

    accept_len: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor


def judge(
    shape: DraftShape,
    tokens: torch.Tensor,
    tree: DraftTree | None,
    targets: torch.Tensor,
    limits: torch.Tensor,
) -> Verdict:
    """The verdict on `tokens` `[B, N]`, root first, given the target's choice `targets` `[B, N]` behind each.

    `tree` None: they are a chain. `limits` `[B]`: rows from there on found no place and are not kept.
    """
    if tree is None:
        accept_len = chain_verify(tokens, targets, limits)
        return Verdict(
            accept_len, targets, torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        )
    walked = tree_verify(tokens, tree.parents, targets, limits)
    return Verdict(walked.accept_len, walked.tokens[:, : shape.num_path], walked.path[:, : shape.num_path])


def compact(pool: KVPool, slots: torch.Tensor, verdict: Verdict) -> None:
    """Move the KV of the kept branch of each request to where a chain's would lie: row i from `verdict.path[:, i]`.

    `slots` `[B, S]`: where the rows of each request stand.
    """
    rows = torch.arange(1, verdict.path.shape[1], device=verdict.path.device)
    is_kept = rows < verdict.accept_len[:, None]
    sources = slots.gather(1, verdict.path[:, 1:]).where(is_kept, 0)
    targets = slots[:, 1 : verdict.path.shape[1]].where(is_kept, 0)
    compact_kv(pool.kv, sources.contiguous(), targets.contiguous())
