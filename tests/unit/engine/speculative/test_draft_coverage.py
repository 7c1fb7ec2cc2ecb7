"""The draft rows that a request counts as covered, within the draft's context and beyond it."""

from types import SimpleNamespace

import torch
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.step.draft_coverage import DraftCoverage

LIMIT = 8


def test_rows_beyond_the_drafts_context_are_covered_once_computed():
    drafter = SimpleNamespace(max_context=LIMIT, open=lambda: 1, lookahead=1)
    coverage = DraftCoverage(drafter, SimpleNamespace(steps=3))
    request = Request(room="a" * 32, epoch=0, prompt_ids=list(range(20)), sampling=SamplingParams())
    request.num_computed = 6
    coverage.begin(drafter, request, torch.zeros(6, 4), 0)
    assert coverage.num_covered(request) == 6
    request.num_computed = 12  # their draft rows are not written yet
    assert coverage.num_covered(request) == 6
    coverage.begin(drafter, request, torch.zeros(6, 4), 6)
    assert coverage.num_covered(request) == 12, "rows 0..7 are written, 8..11 are beyond the context"


def test_rows_that_looked_ahead_to_unknown_tokens_are_not_covered():
    drafter = SimpleNamespace(max_context=100, open=lambda: 1, lookahead=3)
    coverage = DraftCoverage(drafter, SimpleNamespace(steps=3))
    request = Request(room="a" * 32, epoch=0, prompt_ids=list(range(10)), sampling=SamplingParams())
    request.num_computed = 10
    coverage.begin(drafter, request, torch.zeros(9, 4), 0)
    request.append([7], ())  # the first token ends the request before its last rows are drafted
    assert coverage.num_covered(request) == 7
    coverage.begin(drafter, request, torch.zeros(1, 4), 9)
    assert coverage.num_covered(request) == 8
    request.append([8, 9], ())
    request.num_computed = 12
    coverage.advance(request, 2)
    assert coverage.num_covered(request) == 12
