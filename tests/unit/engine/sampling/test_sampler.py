import dataclasses
import math

import numpy as np
import pytest
import torch
from baton.engine import sampler as sampler_module
from baton.engine.request import Request
from baton.engine.sampler import Sampler, SamplingRow, propose, sampling_rows, validate_params
from baton.engine.sampling_params import SamplingParams
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
    output = [*row.output_ids, *row.drafts]
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
    if p.temperature == 0:
        best = sorted(adjusted)[-1]
        if any(0 < best - x < 1e-4 for x in adjusted):
            raise NearTie
        return adjusted.index(best)
    ids = range(len(adjusted))
    if any(0 < abs(a - b) < 1e-4 for a in adjusted for b in adjusted):
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
    output_ids=st.lists(ids, max_size=6),
    drafts=st.lists(ids, max_size=3),
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
        patch.setattr(sampler_module, "NUCLEUS_WIDTH", nucleus_width)
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
    monkeypatch.setattr(sampler_module, "CHUNK_LOGITS", 200)
    assert sample(logits, rows).tokens.tolist() == whole.tolist()


def test_a_wide_nucleus_is_the_same_from_few_candidates_as_from_a_full_sort(monkeypatch):
    logits = (
        torch.randn(6, 3000, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    )  # full of ties
    rows = [SamplingRow(params=SamplingParams(top_p=0.2 * i + 0.19), position=0) for i in range(4)]
    rows += [SamplingRow(params=SamplingParams(top_p=0.5, top_k=k), position=0) for k in (40, 2000)]
    narrow = sample(logits, rows).tokens.tolist()
    monkeypatch.setattr(sampler_module, "NUCLEUS_WIDTH", 3000)
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


def test_top_p_keeps_the_fewest_tokens_that_hold_p_and_of_equals_the_lowest_ids():
    assert draw_support([0.0, 0.0, 0.0, 0.0], top_p=0.5) == {0, 1}
    assert draw_support([0.0, 0.0, 0.0, 0.0], top_p=0.51) == {0, 1, 2}


def test_top_p_counts_what_top_k_left():
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
    """60 000 draws over 5 of 8 tokens; at a limit with chance 1e-6 (df 4: 33.4) a total variation of 0.02 has a
    noncentrality of at least 4 * 0.02**2 * 60 000 = 96 and is seen with 99 %."""
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
        # Drafts that the raw logits like, before or after their row: a row that sees one too many or too few differs.
        drafts = logits.argmax(dim=1)[:3].tolist()
        request = Request(room="0" * 32, epoch=0, prompt_ids=[1, 7], sampling=params, output_ids=[3])
        verified = sample(logits, sampling_rows(request, drafts)).tokens.tolist()
        sequential = []
        for j in range(4):
            after = dataclasses.replace(request, output_ids=[3, *drafts[:j]])
            sequential.append(sample(logits[j : j + 1], sampling_rows(after)).tokens.item())
        assert verified == sequential
        changed += verified[:3] != drafts
    assert changed > 5


def test_the_first_output_token_of_n_prompt_tokens_has_position_n():
    request = Request(room="0" * 32, epoch=0, prompt_ids=[1, 2, 3], sampling=SamplingParams())
    assert [row.position for row in sampling_rows(request, [8, 9])] == [3, 4, 5]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_a_poisoned_row_is_reported_and_hurts_no_other(poison, filters):
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


def test_a_draft_with_the_targets_logits_proposes_the_targets_choice():
    n = 200
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(temperature=(0.0, 0.5, 1.5)[i % 3], seed=i) for i in range(n)]
    chosen = sample(logits, [SamplingRow(params=p, position=i) for i, p in enumerate(params)]).tokens
    assert torch.equal(propose(logits, params, torch.arange(n), torch.arange(V)), chosen)


def test_a_draft_vocabulary_takes_the_noise_of_its_target_tokens():
    n = 200
    target_ids = torch.tensor([1, 4, 6, 11])
    logits = torch.full((n, V), -math.inf)
    logits[:, target_ids] = torch.randn(n, 4, generator=torch.Generator().manual_seed(6))
    params = [SamplingParams(seed=i) for i in range(n)]
    chosen = sample(logits, [SamplingRow(params=p, position=9) for p in params]).tokens
    proposed = propose(logits[:, target_ids], params, torch.full((n,), 9), target_ids)
    assert torch.equal(target_ids[proposed], chosen)


def test_repr_states_the_condition():
    assert repr(Sampler(V)) == "<Sampler vocabulary 12, cpu>"
