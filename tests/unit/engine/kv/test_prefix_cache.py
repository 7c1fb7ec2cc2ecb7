"""The prefix cache: matches, insertions, eviction, and the owners of pages."""

import itertools
import random
from collections import Counter

import pytest
from baton.engine.kv.pool import PageAllocator, PoolExhausted
from baton.engine.kv.prefix_cache import PrefixCache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

PAGE = 2


def make_cache(num_pages=9, **kwargs):
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(allocator, PAGE, **kwargs)


def run_prompt(cache, tokens):
    """Prefill's use of the cache: match, compute the rest, insert, release. Returns the pages used."""
    pages = cache.match(tokens, len(tokens) - 1)
    pages += cache.alloc(-(-len(tokens) // PAGE) - len(pages))
    cache.insert(tokens, pages)
    cache.check_integrity()
    cache.allocator.release(pages)
    cache.check_integrity()
    return pages


def test_a_second_prompt_starts_behind_the_common_whole_pages():
    allocator, cache = make_cache()
    first = run_prompt(cache, [1, 2, 3, 4, 5])
    assert cache.num_cached == 2  # the last, half page is not cached
    matched = cache.match([1, 2, 3, 4, 9, 9], 6)
    assert matched == first[:2]
    assert [allocator.refs(page) for page in matched] == [2, 2]


def test_a_prefix_is_found_under_its_own_salt_only():
    _, cache = make_cache(lookahead=1)
    pages = cache.alloc(2)
    cache.insert([1, 2, 3, 4, 5], pages, "tenant")
    cache.check_integrity()
    assert cache.match([1, 2, 3, 4, 5], 4, "tenant") == pages
    for other in ("", "tenant2", "tenan"):
        assert cache.match([1, 2, 3, 4, 5], 4, other) == []
        assert cache.insert([1, 2, 3, 4, 5], cache.alloc(2), other) == 2
    cache.check_integrity()


def test_match_stays_within_the_limit():
    _, cache = make_cache()
    pages = run_prompt(cache, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], 3) == pages[:1]
    assert cache.match([1, 2, 3, 4], 1) == []
    assert cache.match([1, 2, 3, 4], 99) == pages


def test_the_same_page_of_tokens_behind_another_prefix_is_another_page():
    _, cache = make_cache()
    run_prompt(cache, [1, 2, 7, 7])
    assert cache.match([3, 4, 7, 7], 4) == []


def test_whether_a_prefix_goes_on_is_known_from_its_last_page():
    rng = random.Random(4)
    for lookahead in (0, 1):
        cache = PrefixCache(PageAllocator(40), PAGE, lookahead=lookahead)
        for _ in range(300):
            prompt, salt = [rng.randrange(2) for _ in range(rng.randrange(1, 24))], rng.choice(["", "tenant"])
            limit = rng.randrange(len(prompt) + 4)
            held = cache.match(prompt, limit, salt)
            for count in range(len(held) + 1):
                assert cache.goes_on(prompt, held[:count], limit, salt) == (count < len(held))
            count = -(-len(prompt) // PAGE)
            if count - len(held) <= cache.num_available:
                held = held + cache.alloc(count - len(held))
                cache.insert(prompt, held, salt)
            cache.allocator.release(held)
        assert cache.num_cached > 20


def test_a_prefix_in_own_pages_may_go_on_in_cached_ones():
    cache = PrefixCache(PageAllocator(12), PAGE)
    older, own = cache.alloc(2), cache.alloc(2)
    cache.insert(list(range(2 * PAGE)), older)
    assert cache.goes_on(list(range(2 * PAGE)), own[:1], 2 * PAGE)
    assert not cache.goes_on(list(range(2 * PAGE)), own[:1], 2 * PAGE - 1), "no whole page is left"


def test_a_prefix_that_is_present_keeps_the_caches_page():
    allocator, cache = make_cache()
    first = run_prompt(cache, [1, 2])
    mine = cache.alloc(2)  # computed side by side, without a match
    assert cache.insert([1, 2, 3, 4], mine) == 1
    allocator.release(mine)
    cache.check_integrity()
    assert cache.match([1, 2, 3, 4], 4) == [first[0], mine[1]]
    assert allocator.refs(mine[0]) == 0


def test_eviction_takes_the_longest_unused_leaf_first():
    _, cache = make_cache(num_pages=6)  # 5 to give
    old = run_prompt(cache, [1, 2, 3, 4])
    new = run_prompt(cache, [5, 6, 7, 8])
    cache.allocator.release(cache.match([1, 2, 3, 4], 4))  # used again
    assert cache.num_available == 5
    assert set(cache.alloc(2)) & set(old) == set()
    assert cache.match([5, 6, 7, 8], 4) == new[:1]  # of the two, the leaf went
    assert cache.match([1, 2, 3, 4], 4) == old


def test_insert_of_a_known_prefix_counts_as_a_use():
    _, cache = make_cache(num_pages=8)
    old = run_prompt(cache, [1, 2, 3, 4])
    run_prompt(cache, [5, 6])
    mine = cache.alloc(2)
    assert cache.insert([1, 2, 3, 4], mine) == 0
    cache.check_integrity()
    cache.allocator.release(mine)
    cache.alloc(cache.allocator.num_free + 1)
    assert cache.match([5, 6], 2) == []
    assert cache.match([1, 2, 3, 4], 4) == old


def test_bare_pages_are_found_only_by_those_who_take_them():
    _, cache = make_cache()
    pages = cache.alloc(3)
    cache.insert([1, 2, 3, 4, 5, 6], pages, num_whole=1)
    cache.check_integrity()
    assert [cache.is_bare(page) for page in pages] == [False, True, True]
    assert cache.match([1, 2, 3, 4, 5, 6], 6) == pages[:1]
    assert cache.match([1, 2, 3, 4, 5, 6], 6, bare_limit=4) == pages[:2]
    assert cache.match([1, 2, 3, 4, 5, 6], 6, bare_limit=6) == pages


def test_a_whole_path_grows_beside_a_bare_one_and_the_longest_is_matched():
    _, cache = make_cache(num_pages=16)
    bare, tokens = cache.alloc(4), [1, 2, 3, 4, 5, 6, 7, 8]
    cache.insert(tokens, bare, num_whole=1)
    whole = cache.alloc(3)
    assert cache.insert(tokens[:6], whole) == 2  # computed again, with features
    cache.check_integrity()
    assert cache.match(tokens, 8) == [bare[0], *whole[1:]]
    assert cache.match(tokens, 8, bare_limit=8) == bare, "the longer one"
    assert cache.match(tokens, 8, bare_limit=6) == [bare[0], *whole[1:]], "of equal ones the whole one"
    longer = [*bare, *cache.alloc(1)]
    assert cache.insert([*tokens, 9, 9], longer, num_whole=1) == 1, "the path that the caller is on"
    cache.check_integrity()
    assert cache.match([*tokens, 9, 9], 10, bare_limit=10) == longer


def test_the_watcher_of_a_cache_never_hears_of_bare_pages():
    _, cache = make_cache()
    heard = []

    class Watcher:
        num_held = 0

        def turned_idle(self, page):
            heard.append(("idle", page))

        def turned_busy(self, page):
            heard.append(("busy", page))

        def leaves(self, page):
            heard.append(("leaves", page))
            return False

    cache.watch(Watcher())
    pages = cache.alloc(2)
    cache.insert([1, 2, 3, 4], pages, num_whole=1)
    cache.allocator.release(pages)
    cache.alloc(8)
    assert heard == [("idle", pages[0]), ("leaves", pages[0])]


def test_a_journal_hears_of_children_before_their_parents_when_they_leave():
    _, cache = make_cache()
    story = []

    class Journal:
        def entered(self, page):
            story.append(page)

        def left(self, page):
            assert cache.part_of(page)
            story.append(-page)

    cache.keep_journal(Journal())
    pages = run_prompt(cache, [1, 2, 3, 4])
    cache.clear()
    again = run_prompt(cache, [1, 2, 3, 4])
    cache.alloc(8)
    a, b = pages
    c, d = again
    assert story == [a, b, -b, -a, c, d, -d, -c]


def test_eviction_never_takes_a_held_page_or_a_prefix_of_it():
    allocator, cache = make_cache(num_pages=5)
    run_prompt(cache, [1, 2])
    mine = cache.alloc(2)
    cache.insert([1, 2, 3, 4], mine)
    allocator.release(mine[:1])  # holds the second page only; the first node's page is the cache's
    cache.check_integrity()
    assert cache.num_available == 2
    with pytest.raises(PoolExhausted, match=r"3 pages asked for, 2 free and 0 evictable of 4"):
        cache.alloc(3)
    cache.alloc(2)
    assert len(cache.match([1, 2, 3, 4], 4)) == 2


def test_a_failed_alloc_evicts_nothing():
    _, cache = make_cache(num_pages=5)
    run_prompt(cache, [1, 2, 3, 4])
    with pytest.raises(PoolExhausted):
        cache.alloc(5)
    assert cache.num_cached == 2


def test_with_lookahead_a_page_is_shared_only_if_the_next_token_is_equal():
    allocator, cache = make_cache(lookahead=1)
    pages = cache.alloc(2)
    assert cache.insert([1, 2, 3, 4], pages) == 1  # what follows [3, 4] is not known
    allocator.release(pages)
    cache.check_integrity()
    assert cache.match([1, 2, 3, 9], 3) == pages[:1]
    assert cache.match([1, 2, 8, 4], 3) == []
    assert cache.match([1, 2, 3], 2) == pages[:1]  # behind the limit, but known
    assert cache.match([1, 2], 2) == []


def test_a_lookahead_longer_than_a_page_reaches_over_the_next_one():
    """Draft KV of several modules depends on as many tokens behind a page."""
    allocator, cache = make_cache(lookahead=3)
    pages = cache.alloc(4)
    assert cache.insert([1, 2, 3, 4, 5, 6, 7], pages) == 2
    allocator.release(pages)
    cache.check_integrity()
    assert cache.match([1, 2, 3, 4, 5, 6, 7], 7) == pages[:2]
    assert cache.match([1, 2, 3, 4, 5, 6, 9], 7) == pages[:1]
    assert cache.match([1, 2, 3, 4, 5, 6], 6) == pages[:1], "the tokens behind the second page are not known"
    assert cache.match([1, 2, 3, 4, 9, 6, 7], 7) == []
    cache.check_integrity()


def test_a_disabled_cache_keeps_nothing():
    allocator, cache = make_cache(enabled=False)
    run_prompt(cache, [1, 2, 3, 4])
    assert (cache.num_cached, cache.num_available, allocator.num_free) == (0, 8, 8)
    assert cache.match([1, 2, 3, 4], 4) == []
    assert "off" in repr(cache)


def test_clear_leaves_pages_to_their_other_owners():
    allocator, cache = make_cache()
    run_prompt(cache, [1, 2, 3, 4])
    held = cache.match([1, 2], 2)
    cache.clear()
    cache.check_integrity()
    assert (cache.num_cached, allocator.num_used) == (0, 1)
    allocator.release(held)
    assert allocator.num_free == 8
    run_prompt(cache, [1, 2])
    assert cache.num_cached == 1


def test_a_page_cannot_be_inserted_under_two_prefixes():
    _, cache = make_cache()
    pages = cache.alloc(1)
    cache.insert([1, 2], pages)
    with pytest.raises(AssertionError, match="another prefix"):
        cache.insert([3, 4], pages)


def test_a_long_prompt_is_matched_evicted_and_checked_without_recursion():
    _, cache = make_cache(num_pages=4001)
    tokens = [i % 91 for i in range(8000)]
    pages = cache.alloc(4000)
    cache.insert(tokens, pages)
    cache.allocator.release(pages)
    cache.check_integrity()
    assert cache.match(tokens, 8000) == pages
    cache.allocator.release(pages)
    cache.alloc(4000)
    assert cache.num_cached == 0


def test_repr_states_the_condition():
    _, cache = make_cache()
    run_prompt(cache, [1, 2, 3, 4])
    assert repr(cache) == "<PrefixCache 2 pages cached, 2 evictable, 6 free of 8>"


def check_owners(cache, held):
    """Each reference to a page belongs to a holder of `held` or to the cache; a page without one is free."""
    pages = range(1, cache.allocator.num_pages)
    owners = Counter(itertools.chain.from_iterable(held))
    cached = [cache.allocator.refs(page) - owners[page] for page in pages]
    assert set(cached) <= {0, 1}
    assert sum(cached) == cache.num_cached
    assert cache.allocator.num_free == sum(not cache.allocator.refs(page) for page in pages)


# Few kinds of pages, so that prompts meet; the tail does not fill its page.
prompts = st.builds(
    lambda kinds, tail: [token for kind in kinds for token in (kind, kind)] + tail,
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
    st.sampled_from([[], [7]]),
)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute page by page, share, and go in any order, over a pool too small for them.

    `written` is the memory: what each page holds, as the whole prefix up to its end. A write checks that it
    has the page for itself; a match checks that it got what it asked for.
    """

    @initialize(num_pages=st.integers(3, 14))
    def start(self, num_pages):
        self.allocator, self.cache = make_cache(num_pages)
        self.running = {}
        self.written = {}
        self.bare, self.num_whole = set(), {}  # pages without features; whole pages of a request
        self.ids = itertools.count()

    def write(self, page, prefix):
        assert self.allocator.refs(page) == 1, "a page that is shared or cached was written"
        self.written[page] = tuple(prefix)

    @rule(tokens=prompts, skip_match=st.booleans(), bare=st.integers(0, 3))
    def admit(self, tokens, skip_match, bare):
        self.try_admit(tokens, skip_match, bare)

    @rule(tokens=prompts, skip_match=st.booleans(), bare=st.integers(0, 3))
    def serve(self, tokens, skip_match, bare):
        key = self.try_admit(tokens, skip_match, bare)
        if key is not None:
            self.compute(key, len(self.running[key][1]))
            self.cache.check_integrity()
            self.allocator.release(self.running.pop(key)[1])

    def try_admit(self, tokens, skip_match, bare):
        """`bare`: pages that a decode worker has; the request takes bare ones and gets more of them."""
        limit = len(tokens) - 1
        pages = [] if skip_match else self.cache.match(tokens, limit, bare_limit=bare * PAGE)
        num_whole = next((i for i, page in enumerate(pages) if page in self.bare), len(pages))
        assert num_whole == len(pages) or len(pages) <= bare, "a bare page that was not asked for"
        for i, page in enumerate(pages):
            assert self.written[page] == tuple(tokens[: (i + 1) * PAGE])
        held = {page for other in self.running.values() for page in other[1]}
        needed = -(-len(tokens) // PAGE) - len(pages)
        before = self.cache.num_available
        try:
            new = self.cache.alloc(needed)
        except PoolExhausted:
            assert needed > before
            self.allocator.release(pages)
            return None
        assert len(set(new)) == needed <= before
        assert not set(new) & (held | set(pages)), "a page in use was given away"
        self.bare.difference_update(new)
        key = next(self.ids)
        is_pulled = len(pages) < bare <= limit // PAGE
        self.num_whole[key] = num_whole if is_pulled or num_whole < len(pages) else None
        self.running[key] = (tokens, pages + new, len(pages))
        if is_pulled:
            self.compute(key, bare)
        return key

    def compute(self, key, upto):
        tokens, pages, done = self.running[key]
        for i in range(done, upto):
            self.write(pages[i], tokens[: (i + 1) * PAGE])
        self.running[key] = (tokens, pages, upto)
        whole, num_whole = min(upto, len(tokens) // PAGE), self.num_whole[key]
        self.bare.update([] if num_whole is None else pages[max(num_whole, done) : upto])
        self.cache.insert(tokens[: whole * PAGE], pages, num_whole=num_whole)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute_and_insert(self, data):
        key = data.draw(st.sampled_from(sorted(self.running)))
        _, pages, done = self.running[key]
        self.compute(key, data.draw(st.integers(done, len(pages))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.allocator.release(self.running.pop(key)[1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave_in_pieces(self, data):
        key = data.draw(st.sampled_from(sorted(self.running)))
        for page in data.draw(st.permutations(self.running.pop(key)[1])):
            self.allocator.release([page])
            self.cache.check_integrity()

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def pages_are_conserved(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        check_owners(self.cache, [pages for _, pages, _ in self.running.values()])

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for _, pages, _ in self.running.values():
            self.allocator.release(pages)
        self.cache.check_integrity()
        assert self.cache.num_available == self.allocator.num_total
        self.cache.alloc(self.allocator.num_total)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)
