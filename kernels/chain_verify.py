"""Chain verification: the number of accepted drafts of a chain. It is `tree_verify` for one branch."""

from __future__ import annotations

import torch

from .chained_launch import chained, release_next, wait_for_previous
from .triton_jit import jit_varying, next_power_of_2, tl


def chain_verify_reference(tokens: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """The definition and the CPU path; arguments as in `chain_verify`. It never waits for the device."""
    matches = targets[:, :-1] == tokens[:, 1:]
    return torch.minimum(1 + matches.long().cumprod(dim=1).sum(dim=1), limits)


@jit_varying("num_nodes", "p_limits")
def _chain_verify_kernel(
    p_tokens: tl.tensor,
    p_targets: tl.tensor,
    p_limits: tl.tensor,
    p_accept_len: tl.tensor,
    num_nodes: tl.tensor,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    wait_for_previous(CHAINED)
    i_request = tl.program_id(0).to(tl.int64)
    i_node = tl.arange(0, BLOCK)
    o_node = i_request * num_nodes + i_node
    m_draft = i_node < num_nodes - 1
    b_draft = tl.load(p_tokens + o_node + 1, mask=m_draft, other=-1)
    b_target = tl.load(p_targets + o_node, mask=m_draft, other=-2)
    accept_len = 1 + tl.min(
        tl.where(b_draft == b_target, BLOCK, tl.minimum(i_node, num_nodes - 1)), axis=0
    ).to(tl.int64)
    release_next(CHAINED)
    tl.store(p_accept_len + i_request, tl.minimum(accept_len, tl.load(p_limits + i_request)))


def chain_verify_triton(tokens: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Launch on `tokens`, `targets` int64 `[B, N]` and `limits` int64 `[B]`; returns accept lengths int64
    `[B]`.

    Raises ValueError if shapes or dtypes do not fit.
    """
    _check(tokens, targets, limits)
    accept_len = torch.empty_like(limits)
    if tokens.shape[0]:
        _chain_verify_kernel[(tokens.shape[0],)](
            tokens.contiguous(),
            targets.contiguous(),
            limits.contiguous(),
            accept_len,
            tokens.shape[1],
            BLOCK=next_power_of_2(tokens.shape[1]),
            **chained(tokens.device),
            num_warps=1,
        )
    return accept_len


def _check(tokens: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor) -> None:
    is_shaped = tokens.dim() == 2 and tokens.shape == targets.shape and limits.shape == tokens.shape[:1]
    if not is_shaped or {tokens.dtype, targets.dtype, limits.dtype} != {torch.int64} or not tokens.shape[1]:
        raise ValueError(
            f"chain_verify: tokens {tuple(tokens.shape)}, targets {tuple(targets.shape)} and limits "
            f"{tuple(limits.shape)} "
            "must be int64 [B, N] and [B], N at least 1"
        )


def chain_verify(tokens: torch.Tensor, targets: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Accept lengths int64 `[B]`: emitted tokens, 1 + accepted drafts.

    A draft is accepted if it equals the target's choice before it and all earlier drafts were accepted.
    `tokens` int64 `[B, N]`: the newest token and N-1 drafts. `targets` int64 `[B, N]`: the target's choice
    behind each token. `limits` int64 `[B]`: upper bounds of the accept lengths, 0 for an idle row. Raises
    ValueError if shapes or dtypes do not fit.
    """
    if tokens.is_cuda:
        return chain_verify_triton(tokens, targets, limits)
    _check(tokens, targets, limits)
    return chain_verify_reference(tokens, targets, limits)
