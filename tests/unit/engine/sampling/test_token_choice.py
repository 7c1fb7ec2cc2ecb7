"""Sampling as one operation says what the sampler says, row by row, in either of its forms."""

import pytest
import torch
from baton.engine.sampling import choose as choosing
from baton.engine.sampling.choose import choose_fixed, choose_tokens
from baton.engine.sampling.edits import SamplingRow
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Sampler
from baton.engine.sampling.tensors import SamplingTensors
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 40
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 39, 40, 99]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(-(2**70), 2**70),
)
logit = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5, -3.0, -1e30, float("-inf"), 30.0])
row = st.tuples(params_of, st.integers(0, 10**6), st.lists(logit, min_size=VOCAB, max_size=VOCAB))
broken = st.sampled_from([[float("nan")] * VOCAB, [float("inf")] * VOCAB, [float("-inf")] * VOCAB])


@pytest.mark.parametrize("choose", [choose_tokens, choose_fixed])
@given(
    rows=st.lists(row, min_size=1, max_size=6),
    bad=st.lists(broken, max_size=1),
    chunk=st.sampled_from([80, 10**6]),
)
def test_the_operation_chooses_what_the_sampler_chooses(choose, rows, bad, chunk):
    rows = [*rows, *((rows[0][0], 3, values) for values in bad)]
    params = [p for p, _, _ in rows]
    logits, positions = (
        torch.tensor([values for _, _, values in rows]),
        torch.tensor([at for _, at, _ in rows]),
    )
    sampler = Sampler(VOCAB)
    wanted = sampler.sample(logits, sampler.build([SamplingRow(params=p, position=at) for p, at, _ in rows]))
    is_ranked = any(p.needs_ranking(VOCAB) for p in params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "CHUNK_LOGITS", chunk)
        tokens, bad_rows, short = choose(
            logits, positions, SamplingTensors.of(params, VOCAB), is_ranked=is_ranked
        )
    assert tokens.tolist() == wanted.tokens.tolist()
    assert bad_rows.tolist() == wanted.bad_rows.tolist()
    assert not short.any()


@given(rows=st.lists(row, min_size=1, max_size=5), width=st.sampled_from([1, 4, 30]))
def test_rows_with_too_wide_a_support_are_reported_and_others_are_exact(rows, width):
    params = [p for p, _, _ in rows]
    logits, positions = (
        torch.tensor([values for _, _, values in rows]),
        torch.tensor([at for _, at, _ in rows]),
    )
    exact, bad, _ = choose_tokens(logits, positions, SamplingTensors.of(params, VOCAB), is_ranked=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "NUCLEUS_WIDTH", width)
        tokens, _, short = choose_fixed(logits, positions, SamplingTensors.of(params, VOCAB), is_ranked=True)
    assert torch.equal(tokens[~short & ~bad], exact[~short & ~bad])
    wide = [p.needs_ranking(VOCAB) and 0 < p.top_k < VOCAB and p.top_k > width for p in params]
    assert all(told or not is_wide for told, is_wide in zip(short.tolist(), wide, strict=True))
    assert not any(
        told and not p.needs_ranking(VOCAB) for told, p in zip(short.tolist(), params, strict=True)
    )


def test_a_flat_distribution_reports_that_it_needs_more_candidates():
    params = [SamplingParams(temperature=1.0, top_p=0.99, seed=5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "NUCLEUS_WIDTH", 8)
        _, _, short = choose_fixed(
            torch.zeros(1, VOCAB), torch.tensor([3]), SamplingTensors.of(params, VOCAB), is_ranked=True
        )
    assert short.tolist() == [True]


@pytest.mark.parametrize("choose", [choose_tokens, choose_fixed])
def test_the_parameters_of_a_request_hold_for_each_of_its_rows(choose):
    params = [SamplingParams(temperature=0.5 + i, seed=i, top_k=(0, 3, 1)[i]) for i in range(3)]
    logits, positions = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)), torch.arange(6)
    together = choose(logits, positions, SamplingTensors.of(params, VOCAB), is_ranked=True)[0]
    alone = choose(
        logits, positions, SamplingTensors.of([p for p in params for _ in range(2)], VOCAB), is_ranked=True
    )[0]
    assert together.tolist() == alone.tolist()
