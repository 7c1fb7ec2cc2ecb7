"""Tree drafts on the real engine: they change how many tokens a step yields, never which."""

from pathlib import Path

import pytest
import torch
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafters.protocol import Proposal
from baton.engine.speculative.drafting.tree import branches
from baton.tests.parity.eagle3_engine import (
    NUM_PAGES,
    PAGE_SIZE,
    Engine,
    check_without_draft_state,
    features_of,
    recomputed_children,
    rows_of,
)
from baton.tests.parity.eagle3_toys import (
    ORACLE_VOCAB,
    RESERVED,
    head_tensors,
    successor,
)
from baton.tests.parity.graph_engine import FULL, arena, families, kv_of, uses_kernels, with_graphs
from baton.tests.parity.toy_engine import random_ids
from baton.tests.variants import slow

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ([5, 9, 200, 31, 7, 7, 90, 18, 3], [17], list(range(40, 64)), [250, 3, 250, 3, 250, 3])
SHAPES = [(1, 3, 0), (2, 2, 7), (3, 4, 8), (4, 2, 12)]  # steps, topk, tokens
SHAPE_IDS = ["-".join(map(str, shape)) for shape in SHAPES]


def tree(target: Path, head: Path, shape: tuple[int, int, int] = (3, 4, 8), **options: object) -> Engine:
    steps, topk, tokens = shape
    return Engine(target, head, steps=steps, topk=topk, tokens=tokens, **options)


def greedy(max_new_tokens: int = 20, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, ignore_eos=True, **changes)


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 11, "max_new_tokens": 16, "ignore_eos": True} | changes)
    )


def disguised(engine: Engine) -> Engine:
    """The oracle's head with a decoy slightly likelier than the right token; all others are unreachable."""
    right = engine.drafter.head.compute_logits

    def compute_logits(out: torch.Tensor) -> torch.Tensor:
        logits = 10 * right(out)
        best, index = logits.max(dim=1, keepdim=True)
        return logits.scatter(1, (index + 7) % (ORACLE_VOCAB - 1), best + 0.05)

    engine.drafter.head.compute_logits = compute_logits
    return engine


# --- tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize(
    "params",
    [
        greedy(),
        sampled(),
        sampled(temperature=1.7, top_k=5, seed=2**63 + 5),
        sampled(top_p=0.5, min_p=0.05),
        sampled(frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3),
    ],
    ids=["greedy", "sampled", "top-k", "top-p min-p", "penalties"],
)
def test_tokens_are_those_without_drafts(
    target: Path, head: Path, shape: tuple[int, int, int], params: SamplingParams
) -> None:
    plain = Engine(target)
    requests = [plain.prefill(prompt, params) for prompt in PROMPTS]
    expected, kv = plain.run(requests), [kv_of(plain, request)[0] for request in requests]
    engine = tree(target, head, shape)
    requests = [engine.prefill(prompt, params) for prompt in PROMPTS]
    assert engine.run(requests) == expected
    assert not bool(engine.runner.pool.kv[0].any()), "the sink stays zero"
    for request, wanted in zip(requests, kv, strict=True):
        torch.testing.assert_close(kv_of(engine, request)[0], wanted, atol=2e-4, rtol=1e-4)


def test_requests_of_a_mixed_batch_get_the_tokens_they_get_alone(target: Path, head: Path) -> None:
    all_params = [
        greedy(9),
        sampled(seed=3),
        sampled(temperature=0.5, frequency_penalty=1.0),
        greedy(17, logprobs=1),
    ]
    alone = [tree(target, head).generate([p], q)[0] for p, q in zip(PROMPTS, all_params, strict=True)]
    engine = tree(target, head)
    together = [engine.prefill(prompt, params) for prompt, params in zip(PROMPTS, all_params, strict=True)]
    assert engine.run(together) == alone


def test_a_request_without_drafts_keeps_its_draft_kv_beside_a_drafted_one(target: Path, head: Path) -> None:
    plain = Engine(target).generate(PROMPTS[:2], greedy())
    check_without_draft_state(tree(target, head), PROMPTS[:2], greedy(), plain)


def test_a_cached_prefix_serves_a_tree(target: Path, head: Path) -> None:
    """Pages of a finished request, both KVs of which trees have written, are taken over by the next."""
    engine = tree(target, head)
    owner = engine.prefill(PROMPTS[2], greedy(13))
    engine.run([owner])
    shared = (owner.num_tokens - 2) // PAGE_SIZE
    prompt = [*owner.all_ids[: shared * PAGE_SIZE + 1], 99, 98]
    fresh = tree(target, head)
    expected = fresh.prefill(prompt, greedy())
    features = features_of(fresh, prompt)
    request = Request(room="b" * 32, epoch=0, prompt_ids=prompt, sampling=greedy())
    request.pages = [*owner.pages[:shared], *range(300, 315)]
    for row in range(shared * PAGE_SIZE, len(prompt)):
        page, offset = request.pages[row // PAGE_SIZE], row % PAGE_SIZE
        engine.runner.pool.kv[page, :, :, offset] = fresh.runner.pool.kv[
            expected.pages[row // PAGE_SIZE], :, :, offset
        ]
    request.append(expected.output_ids, ())
    request.num_computed = len(prompt)
    engine.decoder.draft_prefill(request, features[shared * PAGE_SIZE :], shared * PAGE_SIZE)
    assert engine.run([request]) == fresh.run([expected])
    assert [r.accept_lens for r in engine.results[-3:]] == [r.accept_lens for r in fresh.results[-3:]]


# --- acceptance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 2, 0), (3, 2, 5), (5, 3, 12)])
def test_the_oracles_branch_is_accepted_in_full_at_every_step(
    oracle: tuple[Path, Path], shape: tuple[int, int, int]
) -> None:
    engine = tree(*oracle, shape)
    outputs = engine.generate([[1, 2, 3], [40], [62, 0, 17, 5, 5]], greedy(1 + 6 * (1 + shape[0])))
    for token, output in zip((3, 40, 5), outputs, strict=True):
        for emitted in output:
            token = successor(token)
            assert emitted == token
    assert {n for result in engine.results for n in result.accept_lens} == {1 + shape[0]}
    assert {n for result in engine.results for n in result.drafted} == {engine.shape.num_nodes - 1}


@pytest.mark.parametrize(
    ("shape", "has_graphs"),
    [((1, 2, 3), True), ((2, 2, 7), False), ((3, 4, 15), False), slow((2, 2, 7), True)],
)
def test_a_tree_accepts_the_second_child_where_a_chain_accepts_nothing(
    oracle: tuple[Path, Path], shape: tuple[int, int, int], has_graphs: bool
) -> None:
    params = greedy(1 + 4 * (1 + shape[0]))
    lengths = []
    for engine in (disguised(tree(*oracle, shape)), disguised(Engine(*oracle, steps=shape[0]))):
        if has_graphs:
            with_graphs(engine, arena())
        outputs = engine.generate([[1, 2, 3], [40]], params)
        assert outputs == Engine(oracle[0]).generate([[1, 2, 3], [40]], params)
        lengths.append({n for result in engine.results for n in result.accept_lens})
        assert {result.path for result in engine.results} == ({"graph"} if has_graphs else {"eager"})
    assert lengths == [{1 + shape[0]}, {1}]


@pytest.mark.parametrize("aux_ids", [(0, 2, 4), (5, 3, 1)])
def test_features_of_other_layers_are_never_accepted_in_a_tree(
    oracle: tuple[Path, Path], aux_ids: tuple[int, ...]
) -> None:
    engine = tree(*oracle, (3, 2, 5), aux_ids=aux_ids)
    assert engine.generate([[1, 2, 3], [40]], greedy()) == Engine(oracle[0]).generate(
        [[1, 2, 3], [40]], greedy()
    )
    assert {n for result in engine.results for n in result.accept_lens} == {1}


def test_sampled_branches_are_accepted_more_often_than_chains(oracle: tuple[Path, Path]) -> None:
    """The oracle's target is random at temperature 1, and noise is shared: more branches, more matches."""
    params = sampled(max_new_tokens=60, temperature=1.3)
    plain = Engine(oracle[0]).generate([[1, 2], [40], [7]], params)
    mean = []
    for engine in (Engine(*oracle), tree(*oracle, (3, 4, 13))):
        assert engine.generate([[1, 2], [40], [7]], params) == plain
        lengths = [n for result in engine.results for n in result.accept_lens]
        mean.append(sum(lengths) / len(lengths))
    assert 1 < mean[0] < mean[1], mean


def test_penalties_see_the_drafts_of_their_own_branch(oracle: tuple[Path, Path]) -> None:
    """RESERVED follows itself until its count in the branch changes the choice, beside the decoy's branch."""
    params = greedy(20, frequency_penalty=3.0)
    plain = Engine(oracle[0]).generate([[RESERVED]], params)
    for engine in (tree(*oracle, (3, 3, 10)), disguised(tree(*oracle, (3, 4, 15)))):
        assert engine.generate([[RESERVED]], params) == plain
        assert max(n for result in engine.results for n in result.accept_lens) > 1
    assert len(set(plain[0])) > 1


def test_logprobs_are_those_of_the_kept_branch(oracle: tuple[Path, Path]) -> None:
    found = []
    for engine in (disguised(tree(*oracle, (2, 2, 7))), Engine(oracle[0])):
        engine.run([engine.prefill([3], greedy(9, logprobs=2)), engine.prefill([8], greedy(9))])
        assert all(not result.logprobs[1] for result in engine.results if len(result.logprobs) > 1)
        found.append([entry for result in engine.results for entry in result.logprobs[0]])
    assert len(found[0]) == len(found[1]) == 8
    for in_tree, plain in zip(*found, strict=True):
        assert in_tree.logprob == pytest.approx(plain.logprob, abs=1e-4)
        assert in_tree.top[0] == (plain.top[0][0], pytest.approx(in_tree.logprob))


# --- memory -------------------------------------------------------------------------------------------------


def test_draft_kv_and_state_behind_a_tree_are_those_of_a_prefill(oracle: tuple[Path, Path]) -> None:
    decoded = disguised(tree(*oracle, (2, 2, 7)))
    request = decoded.prefill([3, 40], greedy(30))
    while request.num_output < 20:
        decoded.decoder.step([request])
    fresh = disguised(tree(*oracle, (2, 2, 7)))
    again = fresh.prefill(request.all_ids[:-1], greedy(30))
    assert again.all_ids == request.all_ids
    rows = slice(0, request.num_tokens - 1)
    for draft_kv in zip(rows_of(decoded, request), rows_of(fresh, again), strict=True):
        assert torch.allclose(draft_kv[0][rows], draft_kv[1][rows], atol=1e-4)
    states = [
        e.drafter.states.logits[e.decoder.coverage.known[r].row]
        for e, r in ((decoded, request), (fresh, again))
    ]
    assert torch.allclose(*states, atol=1e-3)


@pytest.mark.parametrize(
    ("pages", "max_context", "has_graphs"),
    [(4, 256, False), (9, 18, False), (9, 18, True), slow(4, 256, True)],
)
def test_no_token_is_accepted_without_a_slot_for_its_kv(
    oracle: tuple[Path, Path], pages: int, max_context: int, has_graphs: bool
) -> None:
    engine = disguised(tree(*oracle, (2, 2, 7), max_context=max_context))
    if has_graphs:
        with_graphs(engine, arena())
    request = engine.prefill([1, 2, 3], greedy(60), pages=pages)
    others = [page for page in range(1, NUM_PAGES) if page not in request.pages]
    engine.runner.pool.kv[others], engine.drafter.pool.kv[others] = 7.0, 7.0
    limit = min(pages * PAGE_SIZE, max_context)
    while request.num_computed < limit:
        engine.decoder.step([request])
        assert request.num_computed <= limit
    for pool in (engine.runner.pool, engine.drafter.pool):
        assert not bool(pool.kv[0].any()), "the sink stays zero"
        assert bool((pool.kv[others] == 7.0).all()), "nothing is written beyond the request's pages"
    assert request.output_ids == Engine(oracle[0]).generate([[1, 2, 3]], greedy(60))[0][: limit - 2]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5])
def test_a_request_ends_at_max_new_tokens_inside_an_accepted_branch(
    oracle: tuple[Path, Path], max_new_tokens: int
) -> None:
    engine = tree(*oracle, (3, 2, 5))
    request = engine.prefill([1], greedy(max_new_tokens))
    assert engine.run([request]) == Engine(oracle[0]).generate([[1]], greedy(max_new_tokens))
    assert (request.num_output, request.finish_reason) == (max_new_tokens, "length")
    assert sum(n for result in engine.results for n in result.accept_lens) == max_new_tokens - 1, (
        "no more than is useful"
    )


def test_non_finite_logits_flag_only_their_own_request(target: Path, head: Path) -> None:
    engine = tree(target, head)
    sick, well = (engine.prefill(prompt, greedy()) for prompt in PROMPTS[:2])
    engine.runner.pool.kv[sick.pages] = float("nan")
    engine.drafter.states.logits[engine.decoder.coverage.known[sick].row] = float("nan")
    result = engine.decoder.step([sick, well])
    assert result.is_bad == [True, False]
    assert (result.tokens[0], sick.num_output) == ([], 1)
    assert (
        result.tokens[1] == Engine(target).generate(PROMPTS[1:2], greedy())[0][1 : 1 + len(result.tokens[1])]
    )


# --- paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        pytest.param(
            shape,
            kinds,
            marks=[] if (shape[0] == 3) is is_deep else pytest.mark.slow,
            id=f"{shape_id} {name}",
        )
        for shape, shape_id in zip(SHAPES[1:3], SHAPE_IDS[1:3], strict=True)
        for kinds, name, is_deep in ((None, "all", False), (FULL, "full", True), ("kernels", "kernels", True))
    ],
)
def test_every_path_gives_the_same_trees_tokens_and_kv(
    target: Path, head: Path, shape: tuple[int, int, int], kinds: object
) -> None:
    eager, other = tree(target, head, shape), tree(target, head, shape)
    if kinds == "kernels":
        uses_kernels(other)
    else:
        with_graphs(other, arena(), kinds)
    for size in (1, 2, 3, 4, 5):
        params = [(greedy(9), sampled(seed=size, max_new_tokens=9))[(size + i) % 2] for i in range(size)]
        outputs, kv = [], []
        for engine in (eager, other):
            requests = [
                engine.prefill(random_ids(1 + 9 * i, seed=10 * size + i), p) for i, p in enumerate(params)
            ]
            outputs.append(engine.run(requests))
            kv.append([rows for request in requests for rows in kv_of(engine, request)])
        assert outputs[0] == outputs[1], f"batch of {size}"
        torch.testing.assert_close(kv[1], kv[0], atol=2e-4, rtol=1e-4)
    assert [r.accept_lens for r in eager.results] == [r.accept_lens for r in other.results]
    assert [r.drafted for r in eager.results] == [r.drafted for r in other.results]
    assert {r.path for r in other.results} == ({"eager"} if kinds == "kernels" else {"graph", "eager"})


def test_graph_and_eager_steps_in_turn_equal_eager_alone(oracle: tuple[Path, Path]) -> None:
    engine = disguised(tree(*oracle, (2, 2, 7)))
    with_graphs(engine, arena())
    step, turn = engine.decoder.step, 0

    def by_turns(requests: list[Request]) -> object:
        nonlocal turn
        turn += 1
        for i, family in enumerate(families(engine)):
            family.is_enabled = (turn + i) % 3 != 0
        return step(requests)

    engine.decoder.step = by_turns
    expected = Engine(oracle[0]).generate([[1, 2, 3], [9]], greedy(31))
    assert engine.generate([[1, 2, 3], [9]], greedy(31)) == expected
    assert {n for result in engine.results for n in result.accept_lens} == {3}


def test_children_are_those_of_a_full_recompute_of_their_branch(deep_target: Path, deep_head: Path) -> None:
    tensors = head_tensors()
    for prompt in PROMPTS:
        engine = tree(deep_target, deep_head, (3, 3, 22))  # all that is drafted
        request = engine.prefill(prompt, greedy())
        ids, grown = list(request.all_ids), []
        propose = engine.drafter.propose
        engine.drafter.propose = lambda *args, propose=propose, grown=grown: (
            grown.append(propose(*args).tree) or Proposal(grown[0].drafts, grown[0])
        )
        engine.decoder.step([request])
        parents = grown[0].parents[0].tolist()
        found = branches(grown[0].drafts[0].tolist(), parents)
        assert len(set(parents)) == 1 + 1 + 3 + 3, "none's, the root's, and three of each level's"
        for node in sorted(set(parents[1:])):
            children = {found[child][-1] for child, parent in enumerate(parents) if parent == node}
            assert children == set(recomputed_children(deep_target, tensors, ids, found[node], 3)), (
                f"behind {found[node]}"
            )
