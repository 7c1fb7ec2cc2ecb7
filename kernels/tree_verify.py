"""Tree verification: the accepted nodes of a draft tree, from the target's choice at each node.

Greedy and sampled verification are the same walk. It starts at the root and goes to the child whose token
equals the target's choice at the current node; it stops where no child matches. Only the origin of the
choices differs (argmax, or a sample of the target's own distribution). Every emitted token is the target's,
so no drafter can change the output.

Legend: B requests, N nodes each; node 0, the root, is the newest committed token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .triton_jit import jit_varying, next_power_of_2, tl

MAX_NODES = 1024


class TreeVerdict(NamedTuple):
    """The result of a verification.

    `accept_len` int64 `[B]`: emitted tokens, 1 + accepted drafts; 0 for an idle row (limit 0). `path` int64
    `[B, N]`: the accepted nodes from the root on, padded with the last of them. `tokens` int64 `[B, N]`: the
    target's choices along `path`; the first accept_len are emitted.
    """

    accept_len: torch.Tensor
    path: torch.Tensor
    tokens: torch.Tensor


def tree_verify_reference(
    tokens: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor
) -> TreeVerdict:
    """The walk in tensor operations, one level at a time; the CPU path. It never waits for the device."""
    num_requests, num_nodes = tokens.shape
    nodes = torch.arange(num_nodes, device=tokens.device)
    node = torch.zeros(num_requests, 1, dtype=torch.int64, device=tokens.device)
    accept_len = limits.to(torch.int64).clamp(max=1)[:, None]
    path = [node]
    for _ in range(1, num_nodes):
        is_child = (
            (parents == node)
            & (tokens == targets.gather(1, node))
            & (nodes > node)
            & (nodes < limits[:, None])
        )
        child = torch.where(is_child, nodes, num_nodes).amin(dim=1, keepdim=True)
        node = torch.where(child < num_nodes, child, node)  # without a matching child the walk stays here
        accept_len = accept_len + (child < num_nodes)
        path.append(node)
    walked = torch.cat(path, dim=1)
    return TreeVerdict(accept_len[:, 0], walked, targets.gather(1, walked))


@jit_varying("num_nodes", "p_limits")
def _tree_verify_kernel(
    p_tokens: tl.tensor,
    p_parents: tl.tensor,
    p_targets: tl.tensor,
    p_limits: tl.tensor,
    p_accept_len: tl.tensor,
    p_path: tl.tensor,
    p_chosen: tl.tensor,
    num_nodes: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    i_node = tl.arange(0, BLOCK)
    m_node = i_node < num_nodes
    o_node = i_request * num_nodes + i_node
    b_tokens = tl.load(p_tokens + o_node, mask=m_node, other=-1)
    b_parents = tl.load(p_parents + o_node, mask=m_node, other=-1)
    limit = tl.minimum(tl.load(p_limits + i_request).to(tl.int32), num_nodes)
    node = limit * 0
    accept_len = tl.minimum(limit, 1)
    b_path = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in range(1, num_nodes):
        wanted = tl.load(p_targets + i_request * num_nodes + node)
        m_child = (b_parents == node) & (b_tokens == wanted) & (i_node > node) & (i_node < limit)
        child = tl.min(tl.where(m_child, i_node, BLOCK), axis=0)
        node = tl.where(child < BLOCK, child, node)
        accept_len += (child < BLOCK).to(tl.int32)
        b_path = tl.where(i_node >= step, node, b_path)
    b_chosen = tl.load(p_targets + i_request * num_nodes + b_path, mask=m_node, other=0)
    tl.store(p_accept_len + i_request, accept_len.to(tl.int64))
    tl.store(p_path + o_node, b_path.to(tl.int64), mask=m_node)
    tl.store(p_chosen + o_node, b_chosen, mask=m_node)


def tree_verify_triton(
    tokens: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor
) -> TreeVerdict:
    """Launch on `tokens`, `parents`, `targets` int64 `[B, N]` and `limits` int `[B]`; returns a TreeVerdict.

    Raises ValueError if shapes or dtypes differ, or N is 0 or above 1024.
    """
    _check(tokens, parents, targets, limits)
    verdict = TreeVerdict(
        torch.empty(tokens.shape[0], dtype=torch.int64, device=tokens.device),
        torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device),
        torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device),
    )
    if tokens.shape[0] == 0:
        return verdict
    _tree_verify_kernel[(tokens.shape[0],)](
        tokens.contiguous(),
        parents.contiguous(),
        targets.contiguous(),
        limits.contiguous(),
        *verdict,
        tokens.shape[1],
        BLOCK=next_power_of_2(tokens.shape[1]),
        num_warps=1,
    )
    return verdict


def _check(tokens: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor) -> None:
    shapes = [tuple(x.shape) for x in (tokens, parents, targets)]
    dtypes = {x.dtype for x in (tokens, parents, targets)}
    is_shaped = tokens.dim() == 2 and len(set(shapes)) == 1 and limits.shape == tokens.shape[:1]
    if not is_shaped or dtypes != {torch.int64} or not 1 <= tokens.shape[1] <= MAX_NODES:
        raise ValueError(
            f"tree_verify: tokens, parents, targets {shapes} and limits {tuple(limits.shape)} "
            f"must be int64 [B, N] and [B] with 1 <= N <= {MAX_NODES}"
        )


def tree_verify(
    tokens: torch.Tensor, parents: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor
) -> TreeVerdict:
    """Walk the tree of each request along the target's choices.

    `tokens` int64 `[B, N]`: the token of each node. `parents` int64 `[B, N]`: the parent of each node, a
    lower index; -1 for the root and for unused nodes. `targets` int64 `[B, N]`: the target's choice at each
    node. `limits` int `[B]`: nodes from this index on are rejected (no page left, no context left, or 0 for
    an idle row). Among children with the same token, the first counts. Raises ValueError if shapes or dtypes
    differ, or N is 0 or above 1024.
    """
    if tokens.is_cuda:
        return tree_verify_triton(tokens, parents, targets, limits)
    _check(tokens, parents, targets, limits)
    return tree_verify_reference(tokens, parents, targets, limits)
