"""Window pages: who holds them, which are taken back first, and who inherits them."""

import pytest
import torch
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import PageAllocator, PoolExhausted
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.window_layout import WindowedLayout, windowed_layout
from baton.engine.kv.window_pages import WindowPages
from baton.engine.kv.window_pool import WindowedPool
from baton.engine.kv.window_sizes import chunk_of, first_read_page, most_pages
from hypothesis import given
from hypothesis import strategies as st

PAGE, WINDOW, TOKENS = 2, 4, list(range(8))
WHOLE = MHALayout(page_size=PAGE, num_layers=5, num_kv_heads=1, head_dim=3, dtype=torch.float32)


@pytest.fixture
def windows():
    return WindowPages(PageAllocator(9), 20, window=WINDOW, page_size=PAGE)


@pytest.fixture
def cache(windows):
    return PrefixCache(PageAllocator(20), PAGE, windows=windows)


def cached(cache, tokens=TOKENS):
    """The pages of a text that a request has left in the cache with their window pages."""
    pages = cache.alloc(len(tokens) // PAGE)
    cache.windows.take(pages)
    cache.insert(tokens, pages)
    cache.windows.drop(pages)
    cache.allocator.release(pages)
    cache.check_integrity()
    return pages


def take_back(cache, count):
    """Another request takes so many window pages and ends."""
    pages = cache.alloc(count)
    cache.windows.take(pages)
    cache.windows.drop(pages)
    cache.allocator.release(pages)


def test_the_window_page_that_was_dropped_first_is_taken_back_first(cache):
    pages = cached(cache)
    take_back(cache, 6)  # 4 of 8 are idle
    assert [bool(cache.windows.of(page)) for page in pages] == [False, False, True, True]
    assert cache.match(TOKENS, 8, "", lambda count: count) == pages, "the pages are there"
    cache.check_integrity()


def test_a_hit_ends_where_its_window_is_whole(cache):
    pages = cached(cache)
    take_back(cache, 5)  # the first of 4

    def held_from(count):  # the next row reads the 3 tokens before it
        return first_read_page(count * PAGE, WINDOW, PAGE)

    assert cache.match(TOKENS, 8, "", held_from) == pages
    cache.windows.drop(pages[held_from(4) :])
    cache.allocator.release(pages)
    take_back(cache, 6)
    assert cache.match(TOKENS, 8, "", held_from) == pages, "its last two are left"
    cache.windows.drop(pages[held_from(4) :])
    cache.allocator.release(pages)
    take_back(cache, 8)
    assert cache.match(TOKENS, 8, "", held_from) == []
    assert cache.match(TOKENS, 8, "", lambda count: count) == pages, "a hit that reads no window"
    cache.allocator.release(pages)
    cache.check_integrity()


def test_a_cached_page_inherits_the_window_page_of_a_later_request(cache):
    pages = cached(cache)
    take_back(cache, 8)
    own = cache.alloc(4)
    cache.windows.take(own)
    parts = [cache.windows.of(page) for page in own]
    cache.insert(TOKENS, own)
    cache.windows.drop(own)
    cache.allocator.release(own)
    assert [cache.windows.of(page) for page in pages] == parts
    assert [cache.windows.of(page) for page in own] == [0] * 4
    cache.check_integrity()


@pytest.mark.parametrize("is_cached_again", [False, True])
def test_a_page_that_has_left_the_cache_inherits_nothing(cache, is_cached_again):
    pages = cached(cache)
    take_back(cache, 8)
    own = cache.alloc(4)
    cache.windows.take(own)
    cache.insert(TOKENS, own)
    cache.clear()
    if is_cached_again:  # the same pages, for another text
        again = cache.alloc(4)
        assert set(again) == set(pages)
        cache.insert(list(range(10, 18)), again)
        cache.allocator.release(again)
    cache.windows.drop(own)
    cache.allocator.release(own)
    assert not any(cache.windows.of(page) for page in pages)
    assert cache.windows.allocator.num_used == 0
    cache.check_integrity()


def test_pages_that_are_forgotten_take_those_behind_them_along(cache):
    first, other = cached(cache), cached(cache, [7, 7, 7, 7])
    cache.forget(first[1:2])
    assert cache.match(TOKENS, 8, "", lambda count: count) == first[:1]
    assert cache.match([7, 7, 7, 7], 4, "", lambda count: count) == other
    cache.allocator.release([*first[:1], *other])
    cache.check_integrity()
    cache.clear()
    assert cache.allocator.num_used == cache.windows.allocator.num_used == 0


def test_pages_are_taken_all_or_none(cache):
    pages = cache.alloc(9)
    with pytest.raises(PoolExhausted, match="9 window pages asked for, 8 free and 0 idle of 8"):
        cache.windows.take(pages)
    assert cache.windows.num_available == 8
    cache.windows.take(pages[:8])
    with pytest.raises(AssertionError, match="dropped more often"):
        cache.windows.drop(pages[8:])


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 30))
def test_most_pages_is_the_most_that_any_place_touches(num_tokens, page_size, begin):
    touched = [(start + num_tokens - 1) // page_size - start // page_size + 1 for start in range(page_size)]
    assert most_pages(num_tokens, page_size) == max(touched)
    assert (begin + num_tokens - 1) // page_size - begin // page_size + 1 <= most_pages(num_tokens, page_size)


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 9))
def test_the_first_page_that_is_read_has_the_first_row_of_the_window(row, window, page_size):
    first = max(0, row - (window - 1))
    assert first_read_page(row, window, page_size) == first // page_size


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
def test_a_chunk_stays_within_its_share_of_the_window_pages(chunk, pages, window, page_size, lag):
    rows = chunk_of(chunk, num_window_pages=pages, window=window, page_size=page_size, share=2, lag=lag)
    assert 1 <= rows <= chunk
    if rows > page_size:
        assert lag * rows + window <= pages // 2 * page_size


def test_pages_have_layers_without_and_window_pages_those_with_a_window():
    layout = WindowedLayout(whole=WHOLE, windows=(4, 0, 0, 4, 2))
    assert layout.places == ((True, 0), (False, 0), (False, 1), (True, 1), (True, 2))
    assert (layout.window, layout.num_full, layout.num_windowed) == (4, 2, 3)
    assert layout.page_shape == (2, 2, PAGE, 1, 3)
    assert layout.part.page_shape == (3, 2, PAGE, 1, 3)
    assert layout.page_bytes + layout.part.page_bytes == WHOLE.page_bytes
    assert windowed_layout(WHOLE, (0,) * 5) is None
    for windows in ((0,) * 5, (4,) * 4):
        with pytest.raises(ValueError, match="one for each is needed"):
            WindowedLayout(whole=WHOLE, windows=windows)


def test_a_pool_maps_pages_and_slots_and_keeps_its_sink():
    pool = WindowedPool(7, 4, WindowedLayout(whole=WHOLE, windows=(4, 0, 0, 4, 2)))
    pool.map_pages({3: 2, 5: 1})
    pages, slots = pool.places(torch.tensor([[3, 5, 4, 0]]), torch.tensor([0, 6, 7, 8, 11]))
    assert pages.tolist() == [[2, 1, 0, 0]]
    assert slots.tolist() == [0, 4, 5, 0, 3], "no row of a page without a window page is stored"
    pool.part.kv[2] = 1.0
    pool.kv[3] = 2.0
    pool.copy_page(3, 5)
    assert bool((pool.part.kv[1] == 1).all() & (pool.kv[5] == 2).all())
    pool.copy_page(3, 4)
    assert not bool(pool.part.kv[0].any()), "the target has no window page"
    pool.map_pages({3: 0})
    assert pool.table.tolist() == [0, 0, 0, 0, 0, 1, 0]
    assert [tuple(plane.shape) for plane in pool.layer(4)] == [(4, PAGE, 1, 3)] * 2


def test_a_model_of_windows_alone_has_pages_without_memory():
    pool = WindowedPool(7, 4, WindowedLayout(whole=WHOLE, windows=(4,) * 5))
    assert pool.page_bytes == 0
    assert pool.byte_view().shape == (7, 0)
    assert pool.nbytes == pool.part.kv.nbytes == 4 * WHOLE.page_bytes


class Stamps:
    """A page order that counts its stamps."""

    def __init__(self):
        self.pages = []

    def stamp(self, pages):
        self.pages.append(sorted(pages))


def test_window_pages_given_up_together_are_stamped_once():
    order = Stamps()
    windows = WindowPages(PageAllocator(9, order), 20, window=WINDOW, page_size=PAGE)
    cache = PrefixCache(PageAllocator(20), PAGE, windows=windows)
    pages = cache.alloc(4)
    windows.take(pages)
    parts = sorted(windows.of(page) for page in pages)
    windows.drop(pages)
    assert order.pages == [parts]
    idle = cached(cache)
    assert order.pages == [parts], "they stay with their pages"
    parts = sorted(windows.of(page) for page in idle)
    windows.take(cache.alloc(8))
    assert order.pages[1:] == [parts]
    cache.check_integrity()
