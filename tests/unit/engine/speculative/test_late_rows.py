"""Rows that wait for the drafter come back in order, and no other request's."""

from types import SimpleNamespace

import torch
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape
from baton.engine.speculative.step.device_state import DeviceState
from baton.engine.speculative.step.draft_coverage import Coverage, DraftCoverage
from baton.engine.speculative.step.late_rows import LateRows
from baton.kernels.step_glue import LATE, LENGTH, MATCH, MATCHED, MISS, UNASKED

ROWS, WIDTH = 3, 4


def late_rows(num_slots: int = 3) -> LateRows:
    state = DeviceState(num_slots, max_pages=2, vocab_size=16, device="cpu")
    return LateRows(state, ROWS, DraftShape.of(1, 2), WIDTH, torch.float32)


def keep(late: LateRows, slots: list[int], number: int, emitted: list[int] | None = None) -> None:
    """Keeps row `number` of each request in `slots`: features and token tell slot and number."""
    where = torch.tensor(slots)
    values = where * 10 + number
    features = values[:, None].expand(-1, WIDTH).float()
    given = torch.tensor([1] * len(slots) if emitted is None else emitted)
    late.keep(where, late.state.read(where), features, values, given)
    late.state.integers[where, LENGTH] += given


def test_rows_come_back_in_order_behind_the_length_before_them():
    late = late_rows()
    late.state.integers[1:, LENGTH] = torch.tensor([20, 30])
    keep(late, [1, 2], 0)
    keep(late, [2], 1)
    batch = late.take(torch.tensor([2, 1]))
    assert batch.counts.tolist() == [2, 1]
    assert batch.rows.integers[:, LENGTH].tolist() == [30, 20]
    assert batch.accepted.tokens[0, :2].tolist() == [20, 21]
    assert batch.accepted.tokens[1, :1].tolist() == [10]
    assert batch.features.view(2, ROWS, WIDTH)[0, :2, 0].tolist() == [20.0, 21.0]
    assert late.state.integers[:, LATE].tolist() == [0, 0, 0]
    assert late.take(torch.tensor([2, 1])).counts.tolist() == [0, 0]


def test_rows_behind_the_last_one_repeat_it():
    late = late_rows()
    keep(late, [1], 0)
    keep(late, [1], 1)
    assert late.take(torch.tensor([1])).accepted.tokens.tolist() == [[10, 11, 11]]


def test_a_request_without_a_token_keeps_no_row():
    late = late_rows()
    keep(late, [1, 2], 0, emitted=[0, 1])
    assert late.state.integers[:, LATE].tolist() == [0, 0, 1]


def test_no_row_overwrites_another_when_all_places_are_taken():
    late = late_rows()
    for number in range(ROWS + 1):
        keep(late, [1], number)
    batch = late.take(torch.tensor([1]))
    assert batch.counts.tolist() == [ROWS]
    assert batch.accepted.tokens.tolist() == [[10, 11, 12]]


def test_the_first_late_row_is_compared_with_the_proposals_for_it():
    late = late_rows(num_slots=4)
    for number in range(2):
        keep(late, [1, 2], number)
    slots = torch.tensor([2, 3, 1])
    batch = late.take(slots)
    proposals = torch.tensor([[7, 20], [30, 31], [11, 12]])  # of the first row, of no row, of the second row
    late.note_matches(slots, batch, proposals)
    assert late.state.integers[:, MATCHED].tolist() == [UNASKED, MISS, MATCH, UNASKED]


def test_rows_stay_when_the_state_grows():
    late = late_rows()
    keep(late, [1], 0)
    before = late.anchors
    opened = [late.state.open() for _ in range(3)]
    keep(late, [max(opened)], 0)
    assert late.anchors[0] is not before[0]
    batch = late.take(torch.tensor([1, max(opened)]))
    assert batch.accepted.tokens[:, 0].tolist() == [10, 10 * max(opened)]


def test_rows_that_may_be_late_are_never_more_than_none_covered():
    request = Request(room="r", epoch=0, prompt_ids=[1, 2], sampling=SamplingParams())
    coverage = DraftCoverage(SimpleNamespace(max_context=64), PLAIN)
    coverage.known[request] = Coverage(row=1, covered=2)
    found = []
    for _ in range(4):
        found.append(coverage.num_covered(request))
        coverage.note_late([request], 1)
    assert found == [2, 1, 0, 0]
