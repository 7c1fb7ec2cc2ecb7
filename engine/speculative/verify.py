"""Which drafts are kept: sample-and-match along a chain.

The target samples a token in every row from its own distribution behind the row's drafts; drafts are kept while they
equal what was sampled. Every emitted token is thus the target's own choice, a function of (seed, position, prefix)
alone: no drafter can change the output, only how many tokens a step yields. Shape legend: B requests, N rows each.
"""

import torch


def accept(target_tokens: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Accept lengths `[B]` int64 in 1..N: request b emits `target_tokens[b, :accept_len[b]]`.

    `target_tokens` `[B, N]`: what the target chose in row j, behind the newest token and drafts 0..j-1.
    `draft_tokens` `[B, N-1]`: draft j stands in row j+1, so it is kept when it equals target_tokens[b, j] and all
    drafts before it were kept.
    """
    assert draft_tokens.shape[1] == target_tokens.shape[1] - 1, (target_tokens.shape, draft_tokens.shape)
    matches = target_tokens[:, :-1] == draft_tokens
    return 1 + matches.long().cumprod(dim=1).sum(dim=1)
