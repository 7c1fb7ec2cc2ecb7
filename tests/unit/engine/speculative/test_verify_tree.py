"""The acceptance rule of trees, enumerated over a toy vocabulary whose next token depends on two."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.drafting.tree import DraftTree, ancestors
from baton.engine.speculative.drafting.verify import verify_drafts

# The noise of a position is one of GRID equally likely values, and a choice inverts the cumulative
# distribution: the law of the first TOKENS tokens is then a count over all GRID ** TOKENS noises, exact as a
# fraction.
VOCAB, GRID, TOKENS = 3, 4, 4
# Weights out of GRID of the next token, given the one before the newest and the newest.
TARGET = torch.tensor([
    [[2, 1, 1], [0, 1, 3], [1, 1, 2]], [[1, 3, 0], [1, 2, 1], [2, 0, 2]], [[0, 2, 2], [3, 1, 0], [1, 2, 1]],
])  # fmt: skip
DRAFTS = {
    "equal to the target's average": TARGET.sum(0),
    "close": torch.tensor([[5, 4, 3], [1, 6, 5], [6, 1, 5]]),
    "flat": torch.tensor([[4, 4, 4]] * VOCAB),
    "backwards": torch.tensor([[1, 3, 8], [8, 3, 1], [1, 8, 3]]),
}
SHAPES = [DraftShape.of(2, 2, 7), DraftShape.of(2, 3, 6), DraftShape.of(1, 2)]


class Round(NamedTuple):
    """Of M noises: nodes `[M, N]`, the target's choice behind each, and for mutants what it was made from."""

    tokens: torch.Tensor
    tree: DraftTree
    targets: torch.Tensor
    weights: torch.Tensor  # [M, N, V] of the target behind each node


Rule = Callable[[DraftShape, Round], tuple[torch.Tensor, torch.Tensor]]


def choose(weights: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Tokens `[...]` by `weights` `[..., V]` for `noise` `[...]` in range(GRID)."""
    return (weights.cumsum(-1) <= noise[..., None]).sum(-1)


@cache
def grown(draft: str, shape: DraftShape, newest: int, noises: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """(tokens, parents) behind `newest`: the best nodes by the draft's weights; a draft that sees the noise
    that the target will use, in `noises` (empty: it does not), puts its own choice first."""
    weights = DRAFTS[draft]
    frontier, seen = [((), newest, Fraction(1))], []
    for level in range(shape.steps):
        level_nodes = []
        for branch, token, score in frontier:
            row = weights[token].tolist()
            order = sorted(range(VOCAB), key=lambda t: -row[t])
            if noises:
                scaled = torch.tensor(row) * GRID / sum(row)
                first = min(int((scaled.cumsum(0) <= noises[level]).sum()), VOCAB - 1)
                order = [first, *(t for t in order if t != first)]
            for rank, child in enumerate(order[: shape.topk]):
                level_nodes.append(
                    ((*branch, child), child, score * (Fraction(row[child], sum(row)) if rank else 1))
                )
        seen += level_nodes
        frontier = sorted(level_nodes, key=lambda node: -node[2])[: shape.topk]
    kept = sorted(
        sorted(seen, key=lambda node: -node[2])[: shape.num_nodes - 1], key=lambda node: len(node[0])
    )
    numbers = {(): 0} | {branch: i for i, (branch, _, _) in enumerate(kept, start=1)}
    return [newest, *(token for _, token, _ in kept)], [-1, *(numbers[branch[:-1]] for branch, _, _ in kept)]


def walk_down(shape: DraftShape, step: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """What is served."""
    limits = torch.full((len(step.tokens),), shape.num_nodes)
    accepted = verify_drafts(shape, step.tokens, step.tree, step.targets, limits)
    return accepted.tokens, accepted.accept_len


def bonus_from_draft(shape: DraftShape, step: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: the last token emitted is the draft's favourite child where there is one."""
    tokens, lengths = walk_down(shape, step)
    last = (lengths - 1)[:, None]
    path = verify_drafts(
        shape, step.tokens, step.tree, step.targets, torch.full_like(lengths, shape.num_nodes)
    ).path
    children = (step.tree.parents == path.gather(1, last)).long()
    has_child, first_child = children.max(dim=1, keepdim=True)
    drafted = torch.where(has_child == 1, step.tokens.gather(1, first_child), tokens.gather(1, last))
    return tokens.scatter(1, last, drafted), lengths


def siblings_instead_of_children(shape: DraftShape, step: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: at every level a node matches whichever node of the level before it stands behind."""
    level_starts = torch.stack([(step.tree.depths < d).sum(1) for d in range(shape.steps + 1)], dim=1)
    parents = level_starts.gather(1, (step.tree.depths - 1).clamp(min=0)).masked_fill(
        step.tree.depths == 0, -1
    )
    return walk_down(shape, step._replace(tree=step.tree._replace(parents=parents)))


def favourite_always_kept(shape: DraftShape, step: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: the first child of the root is kept whatever the target chose."""
    targets = step.targets.clone()
    targets[:, 0] = step.tokens[:, 1]
    return walk_down(shape, step._replace(targets=targets))


def likely_enough(shape: DraftShape, step: Round) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong: the first child of the root is kept when the target gives it half the probability."""
    is_likely = step.weights[:, 0].gather(1, step.tokens[:, 1:2])[:, 0] >= GRID // 2
    targets = step.targets.clone()
    targets[:, 0] = torch.where(is_likely, step.tokens[:, 1], targets[:, 0])
    return walk_down(shape, step._replace(targets=targets))


def simulate(
    rule: Rule, draft: str, shape: DraftShape, *, is_coupled: bool = False, mistake: str = ""
) -> torch.Tensor:
    """The first TOKENS tokens `[GRID ** TOKENS, TOKENS]` that rounds of drafting and `rule` emit behind
    tokens 0, 0.

    `mistake`: "position": nodes are sampled with the noise of their number instead of their depth; "context":
    each behind the row before it instead of its parent.
    """
    noises = torch.tensor(list(product(range(GRID), repeat=TOKENS)))
    count, rows = len(noises), torch.arange(len(noises))
    out = torch.zeros(count, TOKENS + shape.num_path + 2, dtype=torch.int64)  # columns 0 and 1: the prompt
    done = torch.zeros(count, dtype=torch.int64)
    while bool((done < TOKENS).any()):
        newest, before = out[rows, done + 1], out[rows, done]
        ahead = noises.gather(1, (done[:, None] + torch.arange(shape.steps)).clamp(max=TOKENS - 1))
        seen = ahead.tolist() if is_coupled else [[]] * count
        trees = [
            grown(draft, shape, token, tuple(mine)) for token, mine in zip(newest.tolist(), seen, strict=True)
        ]
        tokens, parents = torch.tensor([t for t, _ in trees]), torch.tensor([p for _, p in trees])
        mask = ancestors(parents, shape.steps)
        depths = mask.sum(2) - 1
        behind = torch.arange(-1, shape.num_nodes - 1).expand_as(parents) if mistake == "context" else parents
        previous = tokens.gather(1, behind.clamp(min=0))
        previous[:, 0] = before
        weights = TARGET[previous, tokens]
        at = torch.arange(shape.num_nodes) if mistake == "position" else depths
        targets = choose(weights, noises.gather(1, (done[:, None] + at).clamp(max=TOKENS - 1)))
        tree = DraftTree(tokens[:, 1:], parents, depths, mask)
        emitted, lengths = rule(shape, Round(tokens, tree, targets, weights))
        for j in range(shape.num_path):
            is_live = (j < lengths) & (done + j < TOKENS)
            out[rows[is_live], (done + j + 2)[is_live]] = emitted[is_live, j]
        done = (done + lengths).clamp(max=TOKENS)
    return out[:, 2 : TOKENS + 2]


def law_of(tokens: torch.Tensor) -> dict[tuple[int, ...], Fraction]:
    counts = Counter(tuple(row) for row in tokens.tolist())
    return {row: Fraction(count, len(tokens)) for row, count in counts.items()}


@cache
def target_law() -> dict[tuple[int, ...], Fraction]:
    law = {}
    for tokens in product(range(VOCAB), repeat=TOKENS):
        weight, before, newest = Fraction(1), 0, 0
        for token in tokens:
            weight *= Fraction(int(TARGET[before, newest, token]), GRID)
            before, newest = newest, token
        law[tokens] = weight
    return law


def distance(tokens: torch.Tensor) -> Fraction:
    """Total variation between what was emitted and the target's law."""
    found, wanted = law_of(tokens), target_law()
    return sum((abs(found.get(key, Fraction(0)) - weight) for key, weight in wanted.items()), Fraction(0)) / 2


@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_joint_law_is_the_targets_and_all_drafters_give_equal_tokens(shape, is_coupled):
    outputs = [simulate(walk_down, draft, shape, is_coupled=is_coupled) for draft in DRAFTS]
    assert distance(outputs[0]) == 0
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize(
    "mutant", [bonus_from_draft, siblings_instead_of_children, favourite_always_kept, likely_enough]
)
def test_the_enumeration_rejects_a_wrong_rule(mutant):
    assert any(distance(simulate(mutant, draft, SHAPES[0])) > Fraction(1, 100) for draft in DRAFTS)


@pytest.mark.parametrize("mistake", ["position", "context"])
def test_the_enumeration_rejects_noise_or_context_of_another_row(mistake):
    distances = (distance(simulate(walk_down, draft, SHAPES[0], mistake=mistake)) for draft in DRAFTS)
    assert any(found > Fraction(1, 100) for found in distances)


def test_a_tree_keeps_what_a_chain_of_its_best_branch_would_and_more():
    shape, chain = SHAPES[0], DraftShape.of(2)
    yields = {}
    for each in (shape, chain):
        lengths = []

        def rule(
            of: DraftShape, step: Round, lengths: list[float] = lengths
        ) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, kept = walk_down(of, step)
            lengths.append(float(kept.double().mean()))
            return tokens, kept

        simulate(rule, "close", each)
        yields[each] = lengths[0]
    assert yields[shape] > yields[chain] > 1


def test_limits_end_the_walk_before_a_node_without_a_place():
    parents = torch.tensor([[-1, 0, 0, 2, 3]])
    mask = ancestors(parents, 3)
    tokens = torch.tensor([[9, 1, 2, 3, 4]])
    tree = DraftTree(tokens[:, 1:], parents, mask.sum(2) - 1, mask)
    targets = torch.tensor([[2, 0, 3, 4, 5]])
    shape = DraftShape.of(3, 2, 5)
    found = [verify_drafts(shape, tokens, tree, targets, torch.tensor([limit])) for limit in range(1, 6)]
    assert [int(accepted.accept_len) for accepted in found] == [1, 1, 2, 3, 4]
    assert found[-1].path.tolist() == [[0, 2, 3, 4]]
    assert found[-1].tokens.tolist() == [[2, 3, 4, 5]]
