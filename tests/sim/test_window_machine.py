"""Window pages, requests and the prefix cache under random use: a row finds in its window what was written.

The model knows the text for which each window page was written. So a window page that is given up too early,
given to two texts, or inherited by another text is found, whatever else holds.
"""

import hypothesis.strategies as st
import pytest
from baton.engine.kv.page_table import pages_for
from baton.engine.kv.pool import PageAllocator, PoolExhausted
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.window_pages import WindowPages
from baton.engine.kv.window_sizes import first_read_page
from baton.engine.request import Request
from baton.engine.request_windows import RequestWindows
from baton.engine.sampling.params import SamplingParams
from baton.worker.prompt_pages import give_back_pages, take_longer_prefix, take_pages
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

NUM_PAGES, NUM_WINDOW_PAGES, PAGE_SIZE, MOST = 40, 14, 2, 22


class Windows(RuleBasedStateMachine):
    """Requests are computed in parts, then run, and are read at every row."""

    requests = Bundle("requests")

    @initialize(window=st.integers(1, 7), margin=st.integers(1, 3), lookahead=st.integers(0, 2))
    def start(self, window, margin, lookahead):
        allocator = PageAllocator(NUM_PAGES)
        self.window = window
        pages = WindowPages(PageAllocator(NUM_WINDOW_PAGES), NUM_PAGES, window=window, page_size=PAGE_SIZE)
        self.cache = PrefixCache(allocator, PAGE_SIZE, lookahead=lookahead, windows=pages)
        self.windows = RequestWindows(self.cache, margin=margin)
        self.table = [0] * NUM_PAGES  # as a device knows it
        self.texts = {}  # window page -> the tokens at each of its rows, with all before them
        self.live = []

    # --- what the workers do --------------------------------------------------------------------------------

    @rule(
        target=requests,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        output=st.integers(0, 8),
        is_computed=st.booleans(),
    )
    def admit(self, tokens, output, is_computed):
        request = Request(
            room=f"{len(self.live):032x}",
            epoch=0,
            prompt_ids=tokens,
            sampling=SamplingParams(max_new_tokens=output),
        )
        try:
            have = take_pages(
                self.cache,
                self.windows,
                request,
                pages_for(len(tokens) + output, PAGE_SIZE),
                is_computed=is_computed,
                num_windowed=pages_for(len(tokens), PAGE_SIZE),
            )
        except PoolExhausted:
            assert not request.pages
            assert not request.windows
            return multiple()
        self.live.append(request)
        request.num_computed = have if is_computed else len(tokens)
        if not is_computed:  # the rest lands, with the window pages of the tail
            first = max(self.windows.tail_of(len(tokens)) * PAGE_SIZE, have)
            for row in range(first, len(tokens)):
                self._write(request, row)
            self._read(request, max(0, len(tokens) - self.windows.margin))
        return request

    @rule(request=requests)
    def find_more(self, request):
        if request in self.live and 0 <= request.num_computed < request.num_prompt and not request.output_ids:
            have = request.num_computed
            if have % PAGE_SIZE == 0 and have // PAGE_SIZE == len(self._own_prefix(request)):
                request.num_computed = take_longer_prefix(self.cache, self.windows, request, have)

    def _own_prefix(self, request):
        """Pages in front that the request shares with the cache: nothing behind them is written yet."""
        return [
            page for page in request.pages[: request.num_computed // PAGE_SIZE] if self.cache._key_of[page]
        ]

    @rule(request=requests, count=st.integers(1, 5))
    def compute(self, request, count):
        """A part of a prompt, and the window pages behind it are given up."""
        if request not in self.live or request.num_computed >= request.num_prompt:
            return
        start, end = request.num_computed, min(request.num_prompt, request.num_computed + count)
        try:
            self.windows.cover(request, start, end)
        except PoolExhausted:
            return
        for row in range(start, end):
            self._write(request, row)
            self._read(request, row)
        request.num_computed = end
        self.cache.insert(request.prompt_ids[:end], request.pages)
        self.windows.retire_prompt(request, end)
        self._read(request, min(end, max(0, request.num_prompt - self.windows.margin)), is_next=True)

    @rule(request=requests, token=st.integers(0, 1))
    def step(self, request, token):
        """A token of output."""
        if request not in self.live or request.num_computed < request.num_prompt:
            return
        if request.num_output >= request.sampling.max_new_tokens:
            return
        row = request.num_computed
        self.windows.retire(request)
        try:
            self.windows.extend(request, row // PAGE_SIZE + 1)
        except PoolExhausted:
            return
        request.output_ids.append(token)
        self._write(request, row)
        self._read(request, row)
        request.num_computed = row + 1

    @rule(request=consumes(requests), is_kept=st.booleans())
    def end(self, request, is_kept):
        if request in self.live:
            self.live.remove(request)
            if is_kept:
                self.cache.insert(request.all_ids[: request.num_computed], request.pages)
            give_back_pages(self.cache, self.windows, request)

    @rule(request=requests)
    def taint(self, request):
        """Its KV must not be reused."""
        if request in self.live:
            self.live.remove(request)
            self.cache.forget(request.pages)
            give_back_pages(self.cache, self.windows, request)

    @rule()
    def clear(self):
        self.cache.clear()

    # --- the memory -----------------------------------------------------------------------------------------

    def _sync(self):
        for page, part in self.windows.pages.take_changes().items():
            self.table[page] = part

    def _write(self, request, row):
        self._sync()
        part = self.table[request.pages[row // PAGE_SIZE]]
        assert part, f"row {row} is written where nothing is"
        self.texts.setdefault(part, {})[row % PAGE_SIZE] = tuple(request.all_ids[: row + 1])

    def _read(self, request, row, is_next=False):
        """All rows that a row at `row` reads: those of its window."""
        self._sync()
        for other in range(
            max(0, row - self.window + 1), row if is_next else min(row + 1, request.num_tokens)
        ):
            part = self.table[request.pages[other // PAGE_SIZE]]
            assert part, f"row {row} reads row {other}, which has no memory"
            wanted = tuple(request.all_ids[: other + 1])
            assert self.texts[part][other % PAGE_SIZE] == wanted, f"row {row} reads another text at {other}"

    @invariant()
    def books_agree(self):
        if hasattr(self, "cache"):
            self.cache.check_integrity()
            held = [request.pages[number] for request in self.live for number in request.windows]
            for page in range(NUM_PAGES):
                assert self.windows.pages._holders[page] == held.count(page), page

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for request in self.live:
            give_back_pages(self.cache, self.windows, request)
        pages = self.windows.pages
        assert pages.num_available == pages.num_total, "window pages are lost"
        self.cache.clear()
        assert pages.allocator.num_used == self.cache.allocator.num_used == 0


def run(examples=None):
    most = {} if examples is None else {"max_examples": examples, "report_multiple_bugs": False}
    run_state_machine_as_test(
        Windows, settings=settings(stateful_step_count=MOST, suppress_health_check=list(HealthCheck), **most)
    )


def test_rows_find_their_windows_under_any_use():
    run()


def one_page_too_few(planting):
    planting.setattr(
        WindowPages, "first_page", lambda self, row: first_read_page(row, self.window, PAGE_SIZE) + 1
    )


def a_window_that_is_one_row_short(planting):
    planting.setattr(
        WindowPages, "first_page", lambda self, row: first_read_page(row, self.window - 1, PAGE_SIZE)
    )


def any_hit(planting):
    planting.setattr("baton.engine.kv.prefix_cache._usable", lambda pages, windows, held_from: len(pages))
    hold = WindowPages.hold
    planting.setattr(
        WindowPages, "hold", lambda self, pages: hold(self, [page for page in pages if self.of(page)])
    )


@pytest.mark.slow
@pytest.mark.parametrize("plant", [one_page_too_few, a_window_that_is_one_row_short, any_hit])
def test_each_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run(1000)
