"""A grown tree is that of the definition: the best branches of a toy draft, found by brute force."""

import math
from itertools import product

import pytest
import torch
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.tensors import SamplingTensors
from baton.engine.speculative.drafting.choice import DraftSampling
from baton.engine.speculative.drafting.shape import DraftShape
from baton.engine.speculative.drafting.tree import ancestors, branches, grow_tree
from baton.kernels.noise import gumbel, seed_tensor

VOCAB, HIDDEN = 7, 4
TARGET_IDS = torch.arange(VOCAB) * 3 + 1  # the draft's vocabulary is not the target's
POSITION = 11


class ToyHead:
    """Logits behind a branch depend on all its tokens: the hidden is a running hash of them."""

    target_ids = TARGET_IDS

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(int(TARGET_IDS.max()) + 1, HIDDEN, generator=generator)
        self.out = torch.randn(HIDDEN, VOCAB, generator=generator)

    def layer(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden * 1.7 + self.embed[tokens])

    def compute_logits(self, out: torch.Tensor) -> torch.Tensor:
        return 2 * out @ self.out

    def feedback(self, out: torch.Tensor) -> torch.Tensor:
        return out


def sampling_of(params: list[SamplingParams]) -> DraftSampling:
    tensors = SamplingTensors.of(params, VOCAB)
    return DraftSampling(seeds=tensors.seeds, temperature=tensors.temperature, is_drawn=tensors.is_drawn)


def grow(shape: DraftShape, head: ToyHead, hidden: torch.Tensor, params: list[SamplingParams]) -> tuple:
    """(the trees, the masks that the forwards of the levels were given)."""
    masks, rows = [], torch.empty((len(params), 0), dtype=torch.int64)

    def forward(level: int, fed: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        assert mask.shape == (len(params), shape.topk, level * shape.topk)
        masks.append(mask)
        rows = torch.cat((rows, tokens.view(len(params), shape.topk)), dim=1)
        if len(params):  # the rows that a node sees are the branch that its hidden was made from
            seen = rows[:, None].expand(mask.shape)[mask].view(-1, level)
            expected = hidden.repeat_interleave(shape.topk, 0)
            for earlier in range(level - 1):
                expected = head.layer(expected, seen[:, earlier])
            assert torch.equal(expected, fed)
            assert torch.equal(seen[:, -1], tokens)
        return head.layer(fed, tokens)

    sampling = sampling_of(params)
    first = torch.full((len(params),), POSITION)
    state = hidden, head.compute_logits(hidden)
    return grow_tree(shape, head, sampling, state, first, forward), masks


def definition(
    shape: DraftShape, head: ToyHead, hidden: torch.Tensor, params: SamplingParams
) -> set[tuple[int, ...]]:
    """The branches, from the root to each kept node, of one request, in plain Python."""
    expanded, seen = {(): (0.0, hidden)}, {}
    for level in range(shape.steps):
        grown = {}
        for branch, (score, fed) in expanded.items():
            logits = head.compute_logits(fed)
            if not params.is_greedy:
                noise = gumbel(seed_tensor([params.seed]), torch.tensor([POSITION + level]), TARGET_IDS)[0]
                logits = (logits.double() / params.temperature + noise).float()
            scores = logits.log_softmax(0)
            for index in scores.topk(shape.topk).indices.tolist():
                token = int(TARGET_IDS[index])
                out = head.layer(fed[None], torch.tensor([token]))[0]
                grown[(*branch, token)] = (score + float(scores[index]), out)
        seen |= grown
        expanded = dict(sorted(grown.items(), key=lambda item: -item[1][0])[: shape.topk])
    best = sorted(seen, key=lambda branch: -seen[branch][0])[: shape.num_nodes - 1]
    return set(best)


@pytest.mark.parametrize("shape", [(1, 3, 3), (2, 2, 5), (3, 3, 9), (4, 2, 12), (3, 7, 20), (2, 4, 21)])
def test_the_kept_branches_are_the_best_of_the_definition(shape):
    shape = DraftShape.of(*shape)
    head = ToyHead(shape.num_nodes)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(seed=2**63 + 1),
    ]
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(5))
    trees, _ = grow(shape, head, hidden, params)
    assert trees.drafts.shape == (3, shape.num_nodes - 1)
    for request in range(3):
        drafts, parents = trees.drafts[request].tolist(), trees.parents[request].tolist()
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
        found = branches(drafts, parents)
        assert set(found[1:]) == definition(shape, head, hidden[request], params[request])
        assert [len(branch) for branch in found] == trees.depths[request].tolist()
        for node, other in product(range(shape.num_nodes), repeat=2):
            is_ancestor = found[node][: len(found[other])] == found[other]
            assert bool(trees.mask[request, node, other]) is is_ancestor


def test_each_expanded_node_sees_its_own_branch_of_the_draft_rows():
    shape = DraftShape.of(4, 3)
    _, masks = grow(
        shape, ToyHead(1), torch.ones(2, HIDDEN), [SamplingParams(seed=4), SamplingParams(temperature=0.0)]
    )
    k = shape.topk
    for level, mask in enumerate(masks, start=1):
        assert mask.sum(dim=2).eq(level).all(), "one row of every level so far"
        assert mask.view(2, k, level, k).sum(dim=3).eq(1).all()
        assert torch.equal(mask[:, :, -k:], torch.eye(k, dtype=torch.bool).expand(2, k, k)), "and its own"
        if level > 1:
            rows = mask[:, :, : (level - 1) * k].view(2, k, 1, -1)
            assert (rows == masks[level - 2][:, None]).all(dim=3).any(dim=2).all(), (
                "the rest is a node's of level - 1"
            )


@pytest.mark.parametrize("logits", [0.0, math.nan, math.inf, -math.inf])
def test_ties_and_non_finite_scores_still_make_a_tree(logits):
    shape = DraftShape.of(3, 3, 9)
    head = ToyHead(1)
    head.compute_logits = lambda out: torch.full((out.shape[0], VOCAB), logits)
    trees, _ = grow(shape, head, torch.ones(1, HIDDEN), [SamplingParams(temperature=0.0)])
    parents = trees.parents[0].tolist()
    assert all(0 <= parent < node for node, parent in enumerate(parents[1:], start=1))
    assert trees.depths[0].tolist() == [len(branch) for branch in branches(trees.drafts[0].tolist(), parents)]
    assert set(trees.drafts.flatten().tolist()) <= set(TARGET_IDS.tolist())


def test_an_empty_batch_gives_no_tree():
    trees, _ = grow(DraftShape.of(2, 2), ToyHead(1), torch.ones(0, HIDDEN), [])
    assert [tuple(part.shape) for part in trees] == [(0, 4), (0, 5), (0, 5), (0, 5, 5)]


def test_ancestors_reach_over_all_levels():
    parents = torch.tensor([[-1, 0, 1, 2, 0]])
    assert ancestors(parents, 3)[0].long().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 1],
    ]  # fmt: skip


def test_the_best_proposal_is_the_one_that_a_chain_would_make():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0.0, 0.4, 1.0, 2.0))]
    sampling = sampling_of(params)
    positions = torch.arange(4) + 3
    ids, scores = sampling.rank(logits, positions, TARGET_IDS, 3)
    assert torch.equal(ids[:, 0], sampling.choose(logits, positions, TARGET_IDS))
    assert (scores[:, 0] >= scores[:, 1]).all()
    assert (scores <= 0).all()
