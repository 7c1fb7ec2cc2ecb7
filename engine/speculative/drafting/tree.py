"""Draft trees: grown level by level, pruned to the likeliest nodes, described by parents and an ancestor
mask.

The growth is that of EAGLE-2 (Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft
Trees", 2024, arXiv 2406.16858). The score of a node is the product of the draft's probabilities along its
branch. Each level expands its `topk` best nodes, each to its `topk` likeliest children. Verify takes the best
N-1 of all nodes. A child scores no more than its parent and follows it in order, so the best nodes form a
tree under their root.

Candidates are numbered level by level: 0 is the root, 1..k are its children, then k * k per further level.

Shape legend: B requests, N nodes, D levels, k children per expanded node, C candidates, W draft rows so far,
H draft hidden, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from .choice import DraftSampling
from .shape import DraftShape

# (level, hidden [B*k, H], tokens [B*k], mask bool [B, k, level*k]) -> the layer's output [B*k, H] of a
# level's nodes, whose draft rows are the last k of level*k behind the committed ones.
LevelForward = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DraftHead(Protocol):
    """The draft model's methods that tree growth calls. `target_ids` int64 `[Vd]` maps draft to target
    tokens.
    """

    target_ids: torch.Tensor

    def compute_logits(self, out_rows: torch.Tensor) -> torch.Tensor:
        """Outputs `[R, H]` of a forward -> logits `[R, Vd]` float32."""

    def feedback(self, out_rows: torch.Tensor) -> torch.Tensor:
        """Outputs `[R, H]` of a forward -> the hidden input `[R, H]` of the next level."""


class DraftTree(NamedTuple):
    """N nodes per request, the root first and parents before children.

    `drafts` int64 `[B, N-1]` are the tokens of all nodes but the root. `parents` int64 `[B, N]` has -1 for
    the root. `depths` is int64 `[B, N]`. `mask` bool `[B, N, N]` is true where column j is an ancestor of row
    i, or i itself.
    """

    drafts: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    mask: torch.Tensor


class _Candidates(NamedTuple):
    """Tokens, scores and parents (candidate numbers) of one level, each `[B, C]`."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


class _Frontier(NamedTuple):
    """The k expanded nodes of a level.

    Candidate numbers, tokens and scores are `[B, k]`; their hidden input is `[B, k, H]`. `mask` `[B, k, W]`
    marks the draft rows that each node attends to, its own included.
    """

    numbers: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    hidden: torch.Tensor
    mask: torch.Tensor


def grow_tree(
    shape: DraftShape,
    head: DraftHead,
    sampling: DraftSampling,
    state: tuple[torch.Tensor, torch.Tensor],
    first_position: torch.Tensor,
    forward: LevelForward,
) -> DraftTree:
    """Grows and prunes the trees of B requests without host synchronisation.

    `state` is the hidden `[B, H]` and the logits `[B, Vd]` of the first proposal. `first_position` int64
    `[B]` is the position of the tokens of level 1.
    """
    hidden, logits = state
    k, (count, width) = shape.topk, hidden.shape
    ids, scores = sampling.rank(logits, first_position, head.target_ids, k)
    level_1 = _Candidates(ids, scores, torch.zeros_like(ids))
    candidates = [level_1]
    own_row = torch.eye(k, dtype=torch.bool, device=hidden.device).expand(count, k, k)
    frontier = _Frontier(
        torch.arange(1, k + 1, device=hidden.device).expand(count, k),
        *level_1[:2],
        hidden[:, None].expand(count, k, width),
        own_row,
    )
    for level in range(1, shape.steps):
        out = forward(level, frontier.hidden.reshape(-1, width), frontier.tokens.reshape(-1), frontier.mask)
        positions = (first_position + level)[:, None].expand(count, k).reshape(-1)
        ids, scores = sampling.rank(head.compute_logits(out), positions, head.target_ids, k)
        grown = _children(frontier, ids.view(count, k, k), scores.view(count, k, k))
        candidates.append(grown)
        if level < shape.steps - 1:
            fed_back = head.feedback(out).view(count, k, width)
            frontier = _expand(frontier, grown, fed_back, own_row, first_number=1 + k + (level - 1) * k * k)
    return _prune(shape, candidates)


def _children(frontier: _Frontier, tokens: torch.Tensor, scores: torch.Tensor) -> _Candidates:
    """The k children `[B, k, k]` of each frontier node as candidates, with the scores of their branches."""
    parents = frontier.numbers[:, :, None].expand_as(tokens)
    return _Candidates(
        tokens.flatten(1), (frontier.scores[:, :, None] + scores).flatten(1), parents.flatten(1)
    )


def _expand(
    old: _Frontier, grown: _Candidates, hidden: torch.Tensor, own_row: torch.Tensor, *, first_number: int
) -> _Frontier:
    """The k best of the new candidates `[B, k*k]`. `hidden` `[B, k, H]` is the feedback of their parents."""
    k = old.tokens.shape[1]
    best = _best(grown.scores, k)
    parent = best // k
    return _Frontier(
        best + first_number,
        grown.tokens.gather(1, best),
        grown.scores.gather(1, best),
        _rows(hidden, parent),
        torch.cat((_rows(old.mask, parent), own_row), dim=2),
    )


def _prune(shape: DraftShape, levels: list[_Candidates]) -> DraftTree:
    """The N-1 best candidates and the root, in the order of their numbers."""
    tokens, scores, parents = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    kept = _best(scores, shape.num_nodes - 1).sort(dim=1).values
    numbers = torch.nn.functional.pad(kept + 1, (1, 0))
    parent_numbers = parents.gather(1, kept)
    # Numbers ascend, and the parent of a kept node is kept. Its index is the count of lower numbers.
    parent_nodes = (numbers[:, None, :] < parent_numbers[:, :, None]).sum(dim=2)
    k = shape.topk
    depths = torch.where(
        numbers <= k, numbers.clamp(max=1), 2 + (numbers - 1 - k).div(k * k, rounding_mode="floor")
    )
    parents = torch.nn.functional.pad(parent_nodes, (1, 0), value=-1)
    return DraftTree(tokens.gather(1, kept), parents, depths, ancestors(parents, shape.steps))


def ancestors(parents: torch.Tensor, num_levels: int) -> torch.Tensor:
    """Bool `[B, N, N]`: true where column j is an ancestor of row i, or i itself. `parents` `[B, N]`, -1 for
    roots.
    """
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(
        parents.shape[0], -1, -1
    )
    seen = itself
    for _ in range(num_levels):
        seen = itself | (_rows(seen, parents.clamp(min=0)) & (parents >= 0)[:, :, None])
    return seen


def _rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows `index` `[B, R]` of `values` `[B, S, X]` -> `[B, R, X]`."""
    return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices `[B, count]` of the highest scores. Ties keep their order, so a parent precedes its child."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def branches(drafts: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens of the branch down to each node, without the root's token, for one tree on the host."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(drafts, parents[1:], strict=True):
        found.append((*found[parent], token))
    return found
