"""The sampler: every row equals a slow reference, and its draws follow the distribution."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from baton.engine.request import Request
from baton.engine.sampling import choose
from baton.engine.sampling.edits import (
    IN_PROMPT,
    LogitEdits,
    SamplingRow,
    edit_exact,
    edit_fixed,
    write_seen,
)
from baton.engine.sampling.params import SamplingParams, validate_params
from baton.engine.sampling.sampler import Sampler
from baton.engine.sampling.tensors import SamplingTensors
from baton.engine.speculative.drafting.choice import DraftSampling
from baton.kernels.noise import gumbel, seed_tensor
from hypothesis import assume, given
from hypothesis import strategies as st

V = 12


def sample(logits, rows):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    sampler = Sampler(logits.shape[1])
    return sampler.sample(logits, sampler.build(rows))


def draw_support(logits, n=3000, **params):
    """Every token that some of n positions chose."""
    rows = [SamplingRow(params=SamplingParams(**params), position=i) for i in range(n)]
    return set(sample(torch.tensor(logits).expand(n, -1), rows).tokens.tolist())


class NearTie(Exception):
    """The reference's answer hangs on a rounding."""


def reference_logits(logits, row):
    """Penalties and bias, token by token."""
    p = row.params
    output = list(row.output_ids)
    adjusted = [float(x) for x in logits]
    for token in range(len(adjusted)):
        count = output.count(token)
        if count or token in list(row.prompt_ids):
            factor = p.repetition_penalty
            adjusted[token] = adjusted[token] / factor if adjusted[token] > 0 else adjusted[token] * factor
        adjusted[token] -= p.frequency_penalty * count + (p.presence_penalty if count else 0.0)
        adjusted[token] += p.logit_bias.get(token, 0.0)
    return adjusted


def reference_support(logits, p):
    """Temperature, top-k, top-p and min-p over a sorted list of (id, probability)."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if p.top_k:
        order = order[: p.top_k]
    peak = max(logits)
    weights = [math.exp((logits[token] - peak) / p.temperature) for token in order]
    total, kept, before = sum(weights), [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if abs(before / total - p.top_p) < 1e-6 or abs(weight - p.min_p) < 1e-6 < p.min_p < 1:
            raise NearTie
        if kept and p.top_p < 1 and before / total >= p.top_p:
            break
        before += weight
        if weight >= p.min_p:
            kept.append(token)
    return kept


def reference_token(logits, row):
    p = row.params
    adjusted = reference_logits(logits, row)
    ids = range(len(adjusted))

    def is_near(a, b):
        """Edited logits that are equal here may differ in float32."""
        is_edited = (adjusted[a], adjusted[b]) != (logits[a], logits[b])
        return a != b and abs(adjusted[a] - adjusted[b]) < 1e-4 and (is_edited or adjusted[a] != adjusted[b])

    if p.temperature == 0:
        best = adjusted.index(max(adjusted))
        if any(is_near(best, other) for other in ids):
            raise NearTie
        return best
    if any(is_near(a, b) for a in ids for b in ids):
        raise NearTie
    kept = reference_support(adjusted, p)
    noise = gumbel(seed_tensor([p.seed]), torch.tensor([row.position]), torch.tensor(list(ids)))[0].tolist()
    scores = sorted(((adjusted[token] / p.temperature + noise[token], token) for token in kept), reverse=True)
    if len(scores) > 1 and scores[0][0] - scores[1][0] < 1e-4 / p.temperature:
        raise NearTie
    return scores[0][1]


ids = st.integers(0, V - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, V - 1, V, 99]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 1e-9, 0.31, 0.72, 0.97]),
    min_p=st.sampled_from([0.0, 0.0, 0.023, 0.37, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.71, -1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.43, -0.57]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.37, 0.6]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, -1.7, 2.3, 100.0]), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)
sampling_row = st.builds(
    SamplingRow,
    params=params,
    position=st.integers(0, 2**31),
    prompt_ids=st.lists(ids, max_size=6),
    output_ids=st.lists(ids, max_size=9),
)
# A coarse grid makes ties; a shift makes rows without a positive logit.
logit = st.one_of(st.integers(-6, 6).map(lambda x: x / 2), st.floats(-8, 8, width=32))
logit_row = st.builds(
    lambda values, shift: [x + shift for x in values],
    st.lists(logit, min_size=V, max_size=V),
    st.sampled_from([0.0, -9.0, 9.0]),
)


@pytest.mark.parametrize("nucleus_width", [2, 5, 1024])
@given(rows=st.lists(st.tuples(sampling_row, logit_row), min_size=1, max_size=6))
def test_every_row_of_a_mixed_batch_equals_the_slow_reference(nucleus_width, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "NUCLEUS_WIDTH", nucleus_width)
        output = sample([logits for _, logits in rows], [row for row, _ in rows])
    assert not output.bad_rows.any()
    compared = 0
    for token, (row, logits) in zip(output.tokens.tolist(), rows, strict=True):
        try:
            expected = reference_token(np.float32(logits).tolist(), row)
        except NearTie:
            continue
        assert token == expected
        compared += 1
    assume(compared)


@given(rows=st.lists(sampling_row, min_size=2, max_size=7), seed=st.integers(0, 2**31), data=st.data())
def test_a_row_alone_or_in_any_batch_gets_the_identical_token(rows, seed, data):
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, rows).tokens
    order = data.draw(st.permutations(range(len(rows))))
    assert sample(logits[order], [rows[i] for i in order]).tokens.tolist() == together[order].tolist()
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row]).tokens.item() == together[i]


def test_rows_beyond_one_chunk_are_drawn_like_rows_within(monkeypatch):
    rows = [SamplingRow(params=SamplingParams(top_p=0.9, seed=i % 3), position=i) for i in range(9)]
    rows += [SamplingRow(params=SamplingParams(min_p=0.1, seed=i % 3), position=i) for i in range(9)]
    logits = torch.randn(18, 50, generator=torch.Generator().manual_seed(1))
    whole = sample(logits, rows).tokens
    monkeypatch.setattr(choose, "CHUNK_LOGITS", 200)
    assert sample(logits, rows).tokens.tolist() == whole.tolist()


def test_a_wide_nucleus_of_few_candidates_equals_that_of_a_full_sort(monkeypatch):
    logits = (
        torch.randn(6, 3000, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    )  # full of ties
    rows = [SamplingRow(params=SamplingParams(top_p=0.2 * i + 0.19), position=0) for i in range(4)]
    rows += [SamplingRow(params=SamplingParams(top_p=0.5, top_k=k), position=0) for k in (40, 2000)]
    narrow = sample(logits, rows).tokens.tolist()
    monkeypatch.setattr(choose, "NUCLEUS_WIDTH", 3000)
    assert sample(logits, rows).tokens.tolist() == narrow


def test_greedy_ties_go_to_the_lowest_id():
    row = SamplingRow(params=SamplingParams(temperature=0.0), position=0)
    assert sample([[1.0, 4.0, 4.0, 4.0]], [row]).tokens.tolist() == [1]


@pytest.mark.parametrize(
    "restriction", [{"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0.0}, {"temperature": 1e-300}]
)
def test_the_tightest_filters_leave_the_likeliest_token(restriction):
    assert draw_support([0.0, 2.0, 1.9, 2.0 - 1e-6], **restriction) == {1}


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids():
    assert draw_support([1.0, 1.0, 3.0, 1.0], top_k=3) == {0, 1, 2}
    assert draw_support([1.0, 1.0, 3.0, 1.0], top_k=4) == {0, 1, 2, 3}
    assert draw_support([-0.0, 0.0, 0.0], top_k=2) == {0, 1}


def test_top_p_keeps_the_fewest_tokens_and_of_equals_the_lowest_ids():
    assert draw_support([0.0, 0.0, 0.0, 0.0], top_p=0.5) == {0, 1}
    assert draw_support([0.0, 0.0, 0.0, 0.0], top_p=0.51) == {0, 1, 2}


def test_top_p_counts_the_tokens_that_top_k_kept():
    logits = [math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]
    assert draw_support(logits, top_p=0.6) == {0, 1}
    assert draw_support(logits, top_p=0.55, top_k=2) == {0}  # 0.4 of 0.7


def test_min_p_is_relative_to_the_likeliest_after_temperature():
    logits = [math.log(x) for x in (0.4, 0.3, 0.16, 0.14)]
    assert draw_support(logits, min_p=0.39) == {0, 1, 2}
    assert draw_support(logits, min_p=0.39, temperature=0.5) == {0, 1}
    assert draw_support(logits, min_p=1.0) == {0}


def test_masked_tokens_are_never_drawn():
    for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.001}):
        assert draw_support([-math.inf, 0.0, -math.inf, 0.0], **filters) == {1, 3}


def test_drawn_frequencies_follow_the_filtered_softmax():
    """60 000 draws over 5 of 8 tokens; at a limit with chance 1e-6 (df 4: 33.4) a total variation of 0.02 has
    a noncentrality of at least 4 * 0.02**2 * 60 000 = 96 and is seen with 99 %."""
    n = 60_000
    logits = torch.linspace(1, -1, 8)
    rows = [
        SamplingRow(params=SamplingParams(temperature=0.7, top_k=5, seed=11), position=i) for i in range(n)
    ]
    counts = sample(logits.expand(n, -1), rows).tokens.bincount(minlength=8).double()
    expected = torch.softmax(logits[:5].double() / 0.7, dim=0) * n
    assert counts[5:].sum() == 0
    assert ((counts[:5] - expected) ** 2 / expected).sum() < 33.4


def test_verify_rows_with_penalties_choose_as_the_sequential_decode_does():
    generator = torch.Generator().manual_seed(3)
    changed = 0
    for seed in range(40):
        params = SamplingParams(
            frequency_penalty=0.9,
            presence_penalty=0.4,
            repetition_penalty=1.3,
            temperature=0.8 * (seed % 2),
            seed=seed,
        )
        logits = torch.randn(4, V, generator=generator)
        # Drafts that the raw logits like, before or after their row: a row that sees one too many or too few
        # differs.
        drafts = logits.argmax(dim=1)[:3].tolist()
        request = Request(room="0" * 32, epoch=0, prompt_ids=[1, 7], sampling=params, output_ids=[3])
        edits, tensors = LogitEdits.of([request.sampling_row], V), SamplingTensors.of([params], V)
        positions = request.num_tokens + torch.arange(4)
        for edit in (edit_exact, edit_fixed):
            edited = edit(logits, positions, torch.zeros(1).long(), edits, torch.tensor([drafts]), None, None)
            tokens, *_ = choose.choose_tokens(edited, positions, tensors, is_ranked=False)
            sequential = []
            for j in range(4):
                after = dataclasses.replace(request, output_ids=[3, *drafts[:j]])
                sequential.append(sample(logits[j : j + 1], [after.sampling_row]).tokens.item())
            assert tokens.tolist() == sequential
        changed += sequential[:3] != drafts
    assert changed > 5


@given(rows=st.lists(sampling_row, min_size=1, max_size=5), order=st.permutations(range(8)))
def test_seen_tokens_are_counted_in_the_rows_of_their_slots(rows, order):
    seen = torch.full((8, V), 77, dtype=torch.int32)
    slots = order[: len(rows)]
    write_seen(seen, slots, rows)
    for slot, row in zip(slots, rows, strict=True):
        looks_at_prompt = row.params.repetition_penalty != 1.0
        for token, found in enumerate(seen[slot].tolist()):
            is_in_prompt = looks_at_prompt and token in row.prompt_ids
            assert found == list(row.output_ids).count(token) + (IN_PROMPT if is_in_prompt else 0)
    assert (seen[list(set(range(8)) - set(slots))] == 77).all()


@pytest.mark.parametrize("where", ["prompt_ids", "output_ids"])
@pytest.mark.parametrize("token", [-1, V])
def test_tokens_that_are_not_in_the_vocabulary_are_no_others_tokens(where, token):
    row = SamplingRow(params=SamplingParams(repetition_penalty=1.1), position=0, **{where: [3, token]})
    with pytest.raises(AssertionError, match="not in the vocabulary"):
        write_seen(torch.zeros((3, V), dtype=torch.int32), [1], [row])


def test_a_row_of_a_tree_sees_the_drafts_of_its_own_branch_alone():
    params = SamplingParams(temperature=0.0, frequency_penalty=5.0)
    edits = LogitEdits.of([SamplingRow(params=params, position=0)], V)
    ancestors = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]).bool()
    drafts = torch.tensor([[3, 4, 3]])  # two children of the root, and a child of the first
    for edit in (edit_exact, edit_fixed):
        edited = edit(
            torch.zeros(4, V), torch.arange(4), torch.zeros(1).long(), edits, drafts, ancestors, None
        )
        assert edited[:, 3].tolist() == [0, -5, 0, -10]
        assert edited[:, 4].tolist() == [0, 0, -5, 0]
        assert not edited[:, [0, 1, 2, *range(5, V)]].any()


def test_end_tokens_are_banned_below_a_position_and_whatever_their_bias():
    params = SamplingParams(temperature=0.0, logit_bias={2: 9.0, 5: 1.0}, min_new_tokens=3)
    row = SamplingRow(params=params, position=4, ends=(2, 7), first_end=6)
    edits = LogitEdits.of([row], V)
    for edit in (edit_exact, edit_fixed):
        edited = edit(
            torch.zeros(3, V), torch.tensor([4, 5, 6]), torch.zeros(1).long(), edits, None, None, None
        )
        assert edited[:, 2].tolist() == [-math.inf, -math.inf, 9.0]
        assert edited[:, 7].tolist() == [-math.inf, -math.inf, 0.0]
        assert edited[:, 5].tolist() == [1.0] * 3


@given(
    rows=st.lists(sampling_row, min_size=1, max_size=4), each=st.integers(1, 3), seed=st.integers(0, 2**31)
)
def test_both_forms_of_an_edit_give_the_same_logits(rows, each, seed):
    generator = torch.Generator().manual_seed(seed)
    count = len(rows)
    logits = torch.randn(count * each, V, generator=generator) * 3
    before, edits = logits.clone(), LogitEdits.of(rows, V)
    masks = torch.randint(-(2**31), 2**31, (count * each, 1), generator=generator, dtype=torch.int32)
    masks[: each * (count // 2)] = -1
    slots = torch.randperm(count, generator=generator)
    drafts = torch.randint(0, V, (count, each - 1), generator=generator)
    args = (torch.arange(count * each), slots, edits, drafts, None, masks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "CHUNK_LOGITS", 2 * V)
        exact, fixed = edit_exact(logits, *args), edit_fixed(logits, *args)
    assert torch.equal(exact, fixed)
    assert torch.equal(logits, before)
    for row, request in enumerate(slots.tolist()):
        if each == 1 and row < count // 2:
            expected = reference_logits(before[row].tolist(), rows[request])
            torch.testing.assert_close(exact[row], torch.tensor(expected), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("form", [choose.choose_exact, choose.choose_fixed])
def test_top_p_after_top_k_does_not_depend_on_other_rows(form):
    """400 draws alone and beside a row with a wide top-k, whose candidates are ranked for all of them."""
    logits = torch.tensor([math.log(x) for x in (0.4, 0.3, 0.2, 0.1)]).repeat(401, 1)
    params = [SamplingParams(top_p=0.6, top_k=2, seed=i) for i in range(400)]
    beside = [*params, SamplingParams(top_k=3, top_p=0.99, seed=1)]
    alone, *_ = form(logits[:400], torch.arange(400), SamplingTensors.of(params, 4), is_ranked=True)
    together, *_ = form(logits, torch.arange(401), SamplingTensors.of(beside, 4), is_ranked=True)
    assert together.tolist()[:400] == alone.tolist()
    assert set(alone.tolist()) == {0, 1}, "0.4 of 0.7 is not enough"
    tight = [dataclasses.replace(p, top_p=0.55) for p in beside[:400]] + beside[400:]
    tokens, *_ = form(logits, torch.arange(401), SamplingTensors.of(tight, 4), is_ranked=True)
    assert set(tokens.tolist()[:400]) == {0}


def test_the_first_output_token_of_n_prompt_tokens_has_position_n():
    request = Request(room="0" * 32, epoch=0, prompt_ids=[1, 2, 3], sampling=SamplingParams())
    assert request.sampling_row.position == 3


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_poisoned_row_is_reported_and_changes_no_other_row(poison, filters):
    params = SamplingParams(**filters, repetition_penalty=1.2, logprobs=2)
    rows = [SamplingRow(params=params, position=4, output_ids=[2, 5]) for _ in range(3)]
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(4))
    healthy = sample(logits, rows)
    logits[1, 5] = poison
    output = sample(logits, rows)
    assert output.bad_rows.tolist() == [False, True, False]
    assert output.tokens.tolist() == [healthy.tokens[0], 0, healthy.tokens[2]]


def test_a_row_without_any_possible_token_is_bad():
    row = SamplingRow(params=SamplingParams(), position=0)
    assert sample([[-math.inf] * 4], [row]).bad_rows.tolist() == [True]


def test_sampling_leaves_the_callers_logits_alone():
    logits = torch.randn(2, V)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=1.5, logit_bias={1: 3.0}, top_p=0.5, logprobs=1)
    sample(logits, [SamplingRow(params=params, position=0, prompt_ids=[1, 2])] * 2)
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_distribution_and_only_for_rows_that_ask():
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]] * 3)
    bias = SamplingParams(temperature=0.0, logit_bias={3: 50.0}, logprobs=2)
    chosen_only = SamplingParams(temperature=0.0, logprobs=0)
    silent = SamplingParams(temperature=0.0)
    output = sample(logits, [SamplingRow(params=p, position=0) for p in (bias, silent, chosen_only)])
    raw = torch.log_softmax(logits[0], dim=0)
    assert output.tokens.tolist() == [3, 1, 1]
    assert output.logprobs[[0, 2]].tolist() == raw[[3, 1]].tolist()
    assert output.logprobs[1].isnan()
    assert output.top_ids.tolist()[:2] == [[1, 2], [-1, -1]]
    assert output.top_logprobs[0].tolist() == raw[[1, 2]].tolist()
    assert sample(logits[:1], [SamplingRow(params=silent, position=0)]).logprobs is None


def test_an_empty_batch_gives_no_tokens():
    output = sample(torch.empty(0, V), [])
    assert output.tokens.shape == output.bad_rows.shape == (0,)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 1.5}, "top_p 1.5"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0"),
        ({"frequency_penalty": math.inf}, "frequency_penalty inf"),
        ({"presence_penalty": math.nan}, "presence_penalty nan"),
        ({"logit_bias": {V: 1.0}}, r"logit_bias of tokens \[12\]"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias of tokens \[3\]"),
        ({"stop_token_ids": [V - 1, V], "min_new_tokens": 1}, r"stop_token_ids \[12\]"),
    ],
)
def test_parameters_that_cannot_be_served_are_refused_by_value(wrong, named):
    validate_params(SamplingParams(), V)
    with pytest.raises(ValueError, match=named):
        validate_params(SamplingParams(**wrong), V)


def drafting(params):
    tensors = SamplingTensors.of(params, V)
    return DraftSampling(seeds=tensors.seeds, temperature=tensors.temperature, is_drawn=tensors.is_drawn)


def test_a_draft_with_the_targets_logits_proposes_the_targets_choice():
    n = 200
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(temperature=(0.0, 0.5, 1.5)[i % 3], seed=i) for i in range(n)]
    chosen = sample(logits, [SamplingRow(params=p, position=i) for i, p in enumerate(params)]).tokens
    assert torch.equal(drafting(params).choose(logits, torch.arange(n), torch.arange(V)), chosen)


def test_a_draft_vocabulary_takes_the_noise_of_its_target_tokens():
    n = 200
    target_ids = torch.tensor([1, 4, 6, 11])
    logits = torch.full((n, V), -math.inf)
    logits[:, target_ids] = torch.randn(n, 4, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(seed=i) for i in range(n)]
    chosen = sample(logits, [SamplingRow(params=p, position=9) for p in params]).tokens
    proposed = drafting(params).choose(logits[:, target_ids], torch.full((n,), 9), target_ids)
    assert torch.equal(proposed, chosen)


def test_repr_states_the_condition():
    assert repr(Sampler(V)) == "<Sampler vocabulary 12, cpu>"


def test_a_launched_choice_reads_as_the_exact_one():
    rows = [
        SamplingRow(params=SamplingParams(temperature=1.0, seed=i, top_p=0.7, logprobs=2), position=i)
        for i in range(5)
    ]
    logits = torch.randn((5, V), generator=torch.Generator().manual_seed(3))
    exact, launched = sample(logits, rows), Sampler(V).launch(logits, rows).read()
    assert launched.tokens.tolist() == exact.tokens.tolist()
    assert [launched.token_logprobs(i, 2) for i in range(5)] == [exact.token_logprobs(i, 2) for i in range(5)]


def test_a_launched_choice_with_an_unseen_row_is_made_again_exactly():
    class Narrow(Sampler):
        """Its fixed form sees no row."""

        def sample(self, logits, batch, *, is_exact=True):
            output = super().sample(logits, batch)
            unseen = torch.full_like(output.bad_rows, not is_exact)
            tokens = output.tokens if is_exact else torch.full_like(output.tokens, -1)
            return dataclasses.replace(output, tokens=tokens, unseen_rows=unseen)

    rows = [SamplingRow(params=SamplingParams(temperature=0.0), position=3)]
    logits = torch.arange(V, dtype=torch.float32)[None]
    assert Narrow(V).launch(logits, rows).read().tokens.tolist() == [V - 1]
