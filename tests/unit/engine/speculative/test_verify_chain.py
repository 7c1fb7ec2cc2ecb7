"""The acceptance rule, enumerated exactly over a toy vocabulary."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from baton.kernels.chain_verify import chain_verify

# The noise of a position is one of GRID equally likely values, and a choice inverts the cumulative
# distribution: the law of the first TOKENS tokens is then a count over all GRID ** TOKENS noises, exact as a
# fraction.
VOCAB, GRID, TOKENS, STEPS = 3, 5, 4, 2
# Weights out of GRID of the next token, given the newest one.
TARGET = torch.tensor([[2, 2, 1], [0, 1, 4], [3, 1, 1]])
DRAFTS = {
    "equal to the target": TARGET,
    "close": torch.tensor([[2, 1, 2], [1, 1, 3], [2, 2, 1]]),
    "uniform-ish": torch.tensor([[2, 2, 1]] * VOCAB),
    "always token 0": torch.tensor([[5, 0, 0]] * VOCAB),
    "disjoint support": torch.tensor([[0, 0, 5], [5, 0, 0], [0, 5, 0]]),
}
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def accept(targets: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Accept lengths `[B]` of `drafts` `[B, N-1]` for the target's choices `targets` `[B, N]`."""
    newest = torch.full((drafts.shape[0], 1), -1)
    return chain_verify(torch.cat((newest, drafts), dim=1), targets, torch.full((drafts.shape[0],), 1 << 20))


def choose(weights: torch.Tensor, newest: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Tokens `[B]` behind `newest` `[B]` for `noise` `[B]` in range(GRID)."""
    return (weights[newest].cumsum(1) <= noise[:, None]).sum(1)


def all_noises() -> torch.Tensor:
    return torch.tensor(list(product(range(GRID), repeat=TOKENS)))


def noise_at(noises: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The noise of each request at its own position; beyond the horizon nothing is looked at."""
    return noises.gather(1, positions.clamp(max=TOKENS - 1)[:, None])[:, 0]


def keep_matches(
    targets: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return targets, accept(targets, drafts)


def bonus_from_draft(
    targets: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: the token behind the last kept draft is the draft's."""
    lengths = accept(targets, drafts)
    padded = torch.cat((drafts, drafts[:, -1:]), dim=1)
    last = (lengths - 1)[:, None]
    return targets.scatter(1, last, padded.gather(1, last)), lengths


def accept_any_match(
    targets: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: a match counts though a draft before it was refused."""
    return targets, 1 + (targets[:, :-1] == drafts).sum(dim=1)


def accept_too_much(
    targets: torch.Tensor, drafts: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: the first draft is kept whatever the target says."""
    lengths = accept(targets, torch.cat((targets[:, :1], drafts[:, 1:]), dim=1))
    return torch.cat((drafts[:, :1], targets[:, 1:]), dim=1), lengths


def simulate(rule: Rule, draft: torch.Tensor, *, is_coupled: bool, is_reused: bool = False) -> torch.Tensor:
    """The first TOKENS tokens `[GRID ** TOKENS, TOKENS]` that rounds of drafting and `rule` emit after token
    0.

    `is_coupled`: the draft sees the noise that the target will use; else it takes its likeliest token.
    `is_reused`: every row of a round is sampled with the noise of its first, a mistake.
    """
    noises = all_noises()
    out = torch.zeros(len(noises), TOKENS + STEPS + 1, dtype=torch.int64)
    done = torch.zeros(len(noises), dtype=torch.int64)
    newest = torch.zeros(len(noises), dtype=torch.int64)
    while bool((done < TOKENS).any()):
        row_tokens, targets, drafts = newest, [], []
        for j in range(STEPS + 1):
            noise = noise_at(noises, done if is_reused else done + j)
            targets.append(choose(TARGET, row_tokens, noise))
            if j < STEPS:
                drafts.append(choose(draft, row_tokens, noise) if is_coupled else draft[row_tokens].argmax(1))
                row_tokens = drafts[-1]
        emitted, lengths = rule(torch.stack(targets, 1), torch.stack(drafts, 1), noises)
        for j in range(STEPS + 1):
            is_live = (j < lengths) & (done + j < TOKENS)
            out[is_live, (done + j)[is_live]] = emitted[is_live, j]
        newest = emitted.gather(1, (lengths - 1)[:, None])[:, 0]
        done = (done + lengths).clamp(max=TOKENS)
    return out[:, :TOKENS]


def law_of(tokens: torch.Tensor) -> dict[tuple[int, ...], Fraction]:
    counts = Counter(tuple(row) for row in tokens.tolist())
    return {row: Fraction(count, len(tokens)) for row, count in counts.items()}


def target_law() -> dict[tuple[int, ...], Fraction]:
    law = {}
    for tokens in product(range(VOCAB), repeat=TOKENS):
        weight, newest = Fraction(1), 0
        for token in tokens:
            weight *= Fraction(int(TARGET[newest, token]), GRID)
            newest = token
        if weight:
            law[tokens] = weight
    return law


@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
def test_the_joint_law_of_the_output_is_exactly_the_targets(draft: torch.Tensor, is_coupled: bool) -> None:
    assert law_of(simulate(keep_matches, draft, is_coupled=is_coupled)) == target_law()


@pytest.mark.parametrize("is_coupled", [False, True])
def test_with_the_same_noise_every_drafter_gives_the_identical_tokens(is_coupled: bool) -> None:
    outputs = [simulate(keep_matches, draft, is_coupled=is_coupled) for draft in DRAFTS.values()]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("mutant", [bonus_from_draft, accept_any_match, accept_too_much])
def test_the_enumeration_rejects_a_wrong_rule(mutant: Rule) -> None:
    laws = [law_of(simulate(mutant, draft, is_coupled=False)) for draft in DRAFTS.values()]
    assert any(law != target_law() for law in laws)


def test_the_enumeration_rejects_a_sample_that_is_used_twice() -> None:
    assert law_of(simulate(keep_matches, TARGET, is_coupled=True, is_reused=True)) != target_law()


def test_a_draft_behind_a_refused_one_is_never_kept() -> None:
    targets = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [9, 2, 3], [1, 9, 3], [1, 2, 9]])
    assert accept(targets, drafts).tolist() == [4, 1, 2, 3]


def test_without_drafts_a_request_emits_one_token_and_none_is_allowed() -> None:
    assert accept(torch.tensor([[5], [6]]), torch.empty((2, 0), dtype=torch.int64)).tolist() == [1, 1]
    assert (
        accept(torch.empty((0, 3), dtype=torch.int64), torch.empty((0, 2), dtype=torch.int64)).tolist() == []
    )


def test_a_wrong_number_of_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="chain_verify"):
        accept(torch.zeros((1, 3), dtype=torch.int64), torch.zeros((1, 3), dtype=torch.int64))
