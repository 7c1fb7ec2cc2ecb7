"""Page pools and the prefix cache under random use: the owners of every page are those of the model."""

import hypothesis.strategies as st
from baton.engine.kv.page_table import build_page_table, pages_for, slots_for
from baton.engine.kv.pool import PageAllocator, PoolExhausted
from baton.engine.kv.prefix_cache import PrefixCache
from baton.tests.unit.engine.kv.test_prefix_cache import check_owners
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

NUM_PAGES = 13
PAGE_SIZE = 2


class Holding:
    """A request that holds pages: the shared ones at the front, its own behind them."""

    def __init__(self, tokens, shared, own):
        self.tokens = tokens
        self.shared, self.own = shared, own

    @property
    def pages(self):
        return self.shared + self.own


class Pools(RuleBasedStateMachine):
    """The model is what each holder was given and what each cached page was offered for."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.cache = None
        self.held = []
        self.content = {}  # page -> the tokens up to its end, once it is written
        self.lookahead = 0

    @rule(lookahead=st.integers(0, 3), is_enabled=st.booleans())
    @precondition(lambda self: self.cache is None)
    def start(self, lookahead, is_enabled):
        self.lookahead = lookahead
        self.cache = PrefixCache(self.allocator, PAGE_SIZE, is_enabled, lookahead=lookahead)

    @rule(
        target=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), spare=st.integers(0, 4)
    )
    @precondition(lambda self: self.cache is not None)
    def admit(self, tokens, spare):
        """As both roles admit a request: match, allocate the rest, or give everything back."""
        shared = self.cache.match(tokens, limit=len(tokens) - 1)
        for i, page in enumerate(shared):
            end = (i + 1) * PAGE_SIZE
            assert self.content[page] == tuple(tokens[: end + self.lookahead]), (
                "a page of another prefix was shared"
            )
        free, need = self.cache.num_available, pages_for(len(tokens) + spare, PAGE_SIZE) - len(shared)
        try:
            own = self.cache.alloc(need)
        except PoolExhausted:
            assert need > free, "pages were refused that were there"
            self.allocator.release(shared)
            return multiple()
        assert len(set(own)) == need
        assert 0 not in own
        taken = {page for holding in self.held for page in holding.pages} | set(shared)
        assert not taken & set(own), "a page was given to a second owner"
        for page in own:
            self.content.pop(page, None)
        self.held.append(Holding(tokens, shared, own))
        return self.held[-1]

    @rule(holding=requests, share=st.floats(0, 1))
    def offer(self, holding, share):
        """The first tokens are computed, and their whole pages go to the cache."""
        if holding not in self.held:
            return
        tokens = holding.tokens[: round(share * len(holding.tokens))]
        num_whole = max(0, len(tokens) - self.lookahead) // PAGE_SIZE
        for i, page in enumerate(holding.pages[:num_whole]):
            self.content.setdefault(page, tuple(tokens[: (i + 1) * PAGE_SIZE + self.lookahead]))
        self.cache.insert(tokens, holding.pages)

    @rule(holding=consumes(requests))
    def release(self, holding):
        """The end, or a cancel: the one exit of a request."""
        if holding in self.held:
            self.held.remove(holding)
            self.allocator.release(holding.pages)

    @rule()
    @precondition(lambda self: self.cache is not None)
    def clear(self):
        self.cache.clear()
        assert self.cache.num_cached == 0

    @rule(holding=requests)
    def read_page_table(self, holding):
        """Tokens of different owners never share a slot that one of them writes."""
        if holding not in self.held:
            return
        count = len(holding.tokens)
        table = build_page_table([holding.pages])[0].tolist()
        slots = slots_for(holding.pages, 0, count, PAGE_SIZE).tolist()
        assert slots == [table[t // PAGE_SIZE] * PAGE_SIZE + t % PAGE_SIZE for t in range(count)]
        assert len(set(slots)) == count
        assert min(slots) >= PAGE_SIZE, "page 0 is nobody's"

    @invariant()
    def every_page_has_the_owners_that_are_known(self):
        if self.cache is None:
            return
        self.cache.check_integrity()
        check_owners(self.cache, [holding.pages for holding in self.held])

    def teardown(self):
        if self.cache is None:
            return
        for holding in self.held:
            self.allocator.release(holding.pages)
        assert self.cache.num_available == self.allocator.num_total, "pages are lost"
        self.cache.clear()
        assert self.allocator.num_used == 0


def test_pages_are_conserved_and_owned_under_any_use():
    many_steps = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Pools, settings=many_steps)
