"""The tables of one move: where they lie in pinned memory, and by how many programs they are read."""

import pytest
from baton.kernels.move_rows import ROW_FIELDS
from baton.kernels.move_spans import RUN_FIELDS, SPAN_FIELDS
from baton.kvtransfer.memory.cuda_device import CudaDevice, _Shape


@pytest.mark.parametrize("num_fields", [SPAN_FIELDS, ROW_FIELDS])
@pytest.mark.parametrize("num_spans", [1, 2, 5])
def test_tables_do_not_overlap_and_begin_at_multiples_of_16_bytes(num_spans, num_fields):
    shape = _Shape(num_spans, num_fields, num_runs=3, num_programs=7)
    assert shape.runs_at >= num_spans * num_fields
    assert shape.sums_at == shape.runs_at + 3 * RUN_FIELDS
    assert shape.size == shape.sums_at + 3 * 7
    assert 8 * shape.runs_at % 16 == 8 * shape.sums_at % 16 == 0


@pytest.mark.parametrize("is_write", [True, False])
def test_a_move_has_no_more_programs_than_chunks_and_at_least_one_a_run(is_write):
    device = CudaDevice.__new__(CudaDevice)
    device._num_processors = 132
    of_all = 66 if is_write else 264
    for num_runs, num_chunks, expected in (
        (1, 5000, of_all),
        (1, 3, 3),
        (2, 5000, of_all // 2),
        (500, 900, 1),
    ):
        assert device._num_programs(num_runs, num_chunks, is_write=is_write) == expected
