"""Page tables: pages for tokens, slots of tokens, and padding."""

import pytest
import torch
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_pages_for_is_the_least_number_of_pages_that_hold_the_tokens(num_tokens, page_size):
    n = pages_for(num_tokens, page_size)
    assert n * page_size >= num_tokens
    assert n == 0 or (n - 1) * page_size < num_tokens


@given(st.data())
def test_slots_are_page_times_page_size_plus_offset(data):
    page_size = data.draw(st.integers(1, 17))
    pages = data.draw(st.lists(st.integers(1, 999), min_size=1, max_size=9, unique=True))
    start = data.draw(st.integers(0, len(pages) * page_size))
    end = data.draw(st.integers(start, len(pages) * page_size))
    slots = slots_for(pages, start, end, page_size)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [pages[t // page_size] * page_size + t % page_size for t in range(start, end)]


def test_slots_beyond_the_pages_raise():
    with pytest.raises(AssertionError):
        slots_for([3], 0, 17, 16)


def test_page_table_rows_are_padded_with_page_zero():
    table = build_page_table([[4, 5, 6], [], [7]])
    assert table.dtype == torch.int64
    assert table.tolist() == [[4, 5, 6], [0, 0, 0], [7, 0, 0]]


def test_empty_page_tables_keep_two_dimensions():
    assert build_page_table([]).shape == (0, 1)
    assert build_page_table([[]]).tolist() == [[0]]
