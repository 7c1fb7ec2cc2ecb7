"""Pages of a prompt that waited: a longer cached prefix replaces its own first pages, and none is lost."""

import pytest
from baton.engine.kv.page_order import PageOrder
from baton.engine.kv.pool import PageAllocator, PoolExhausted
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.request import Request
from baton.engine.request_windows import RequestWindows
from baton.engine.sampling.params import SamplingParams
from baton.worker.prompt_pages import peek_pages, take_longer_prefix, take_pages

PAGE = 4
PROMPT = list(range(10, 23))  # 13 tokens: three whole pages and a token


def off(cache):
    return RequestWindows(cache, margin=1)


def request_of(**sampling):
    return Request(room="r", epoch=0, prompt_ids=PROMPT, sampling=SamplingParams(temperature=0.0, **sampling))


def waiting(cache, **sampling):
    request = request_of(**sampling)
    assert take_pages(cache, off(cache), request, 5, is_computed=True) == 0
    return request


def test_pages_cached_meanwhile_replace_own_ones_which_are_free_again():
    cache = PrefixCache(PageAllocator(12), PAGE)
    older, younger = waiting(cache), waiting(cache)
    own = list(younger.pages)
    assert take_longer_prefix(cache, off(cache), younger, 0) == 0, "nothing is cached yet"
    assert younger.pages == own
    cache.insert(PROMPT, older.pages)
    assert take_longer_prefix(cache, off(cache), younger, 0) == 12
    assert younger.pages == older.pages[:3] + own[3:]
    assert [cache.allocator.refs(page) for page in own] == [0, 0, 0, 1, 1]
    cache.check_integrity()
    for request in (older, younger):
        cache.allocator.release(request.pages)
    cache.clear()
    assert cache.allocator.num_used == 0


def test_a_prefix_that_is_held_already_is_not_taken_twice():
    cache = PrefixCache(PageAllocator(12), PAGE)
    older = waiting(cache)
    cache.insert(PROMPT[:8], older.pages)
    younger = request_of()
    have = take_pages(cache, off(cache), younger, 5, is_computed=True)
    pages = list(younger.pages)
    assert (have, take_longer_prefix(cache, off(cache), younger, have), younger.pages) == (8, 8, pages)
    assert [cache.allocator.refs(page) for page in pages] == [3, 3, 1, 1, 1]


def test_a_scored_prompt_computes_every_row():
    cache = PrefixCache(PageAllocator(12), PAGE)
    older, scored = waiting(cache), waiting(cache, prompt_logprobs=1)
    cache.insert(PROMPT, older.pages)
    own = list(scored.pages)
    assert (take_longer_prefix(cache, off(cache), scored, 0), scored.pages) == (0, own)


@pytest.mark.parametrize(("first", "have"), [(0, 0), (5, 4), (8, 8), (99, 12)])
def test_a_prompt_computes_the_rows_whose_experts_are_wanted(first, have):
    cache = PrefixCache(PageAllocator(12), PAGE)
    older, asking = waiting(cache), waiting(cache, routed_experts=first)
    cache.insert(PROMPT, older.pages)
    assert take_longer_prefix(cache, off(cache), asking, 0) == have


def taken_in_vain(cache, request):
    with pytest.raises(PoolExhausted):
        take_pages(cache, off(cache), request, 99, is_computed=True)


def looked_for_in_vain(cache, request):
    request.pages = cache.alloc(2)  # of its own, so that the cache is searched
    assert take_longer_prefix(cache, off(cache), request, 8) == 8


@pytest.mark.parametrize(
    "look_up",
    [lambda cache, request: peek_pages(cache, off(cache), request), taken_in_vain, looked_for_in_vain],
    ids=["peek", "no pages", "no longer prefix"],
)
def test_after_a_look_up_a_copy_waits_for_no_later_work(look_up):
    order = PageOrder(12)
    order.check_uses()
    cache = PrefixCache(PageAllocator(12, order), PAGE)
    older = waiting(cache)
    order.use(reads=[], writes=older.pages)
    order.stamp(older.pages)
    cache.insert(PROMPT[:8], older.pages)
    order.wait(older.pages)
    order.use(reads=[], writes=cache.alloc(1))  # of somebody else
    look_up(cache, request_of())
    assert not order.wait(older.pages)
