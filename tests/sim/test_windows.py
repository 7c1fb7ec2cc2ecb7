"""Models with windows give up the KV behind them: the tokens of transformers, in few window pages.

Free pages and free window pages hold NaN and are looked at after every turn. So a row that is read or written
outside of what a request holds changes its tokens, or is found.
"""

import random
from functools import cache, partial

import pytest
from baton.cluster.protocol.messages import Failed
from baton.engine.engine import Engine
from baton.engine.kv import prefix_cache, window_pages
from baton.engine.kv.window_pages import WindowPages
from baton.engine.kv.window_pool import WindowedPool
from baton.engine.kv.window_sizes import first_read_page
from baton.engine.request_windows import RequestWindows
from baton.engine.speculative.step.step_graphs import step_graphs
from baton.kvtransfer.protocol.layout import KVLayout
from baton.tests.parity.eagle3_toys import head_config, head_tensors, write_head
from baton.tests.parity.overlap_engine import LateSteps
from baton.tests.parity.toy_engine import random_ids
from baton.tests.parity.toy_models import reference_greedy, reference_model
from baton.tests.sim.test_page_growth import Asked, played
from baton.tests.sim.worker_pair import Pair, name
from baton.tests.variants import second

pytestmark = pytest.mark.usefixtures("one_thread")

# every layer of Mistral and Phi-3 has a window, every other one of the rest
SETTINGS = {"mistral": {}, "phi3": {"sliding_window": 11}, "gemma2": {}, "gemma3": {}, "gpt_oss": {}}
FAMILIES = [
    pytest.param(family, marks=[] if family in ("mistral", "gemma2") else pytest.mark.slow)
    for family in SETTINGS
]
BOTH = ["mistral", "gemma2"]
LENGTHS = (5, 17, 40, 61)
NEW_TOKENS = 30
ROOMY = {"pages": 400, "window_pages": 140, "max_context": 400, "max_running": 6}
TIGHT = {"pages": 400, "window_pages": 30, "max_context": 400, "max_running": 6}
GRAPHS = {"graphs": "on", "captured": {"chunk_size": 32, "max_running": 6}}
CHAIN, TREE = {"spec_steps": 3}, {"spec_steps": 3, "spec_topk": 2, "spec_tokens": 6}
WAYS = {
    "plain": {"no_draft": True},
    "chain": CHAIN,
    "tree": TREE,
    "lookup": {"draft": "ngram"},
    "plain graphs": {"no_draft": True} | GRAPHS,
    "chain graphs": CHAIN | GRAPHS,
    "tree graphs": TREE | GRAPHS,
    "chain ahead": CHAIN | {"overlap": "on"},
    "tree ahead graphs": TREE | GRAPHS | {"overlap": "on"},
    "deterministic": {"deterministic": True} | CHAIN,
}
QUICK_WAYS = {("mistral", "chain graphs"), ("gemma2", "tree")}
CELLS = [
    pytest.param(family, way, marks=[] if (family, way) in QUICK_WAYS else pytest.mark.slow)
    for family in SETTINGS
    for way in WAYS
]
HANDED_OVER_FIRST = [pytest.param(False, id="handed over"), second(True, id="local")]


@pytest.fixture(scope="module")
def models(toy_checkpoint, tmp_path_factory):
    """(target, head) of a family."""
    head = write_head(tmp_path_factory.mktemp("head"), head_config(2, (0, 1, 2)), head_tensors())
    return cache(lambda family: (toy_checkpoint(family, **SETTINGS[family]), head))


@pytest.fixture(scope="module")
def expected(models):
    """The tokens of transformers behind a prompt."""
    references = cache(lambda family: reference_model(models(family)[0]))
    known = {}

    def tokens(family, prompt, count=NEW_TOKENS):
        key = family, tuple(prompt), count
        if key not in known:
            known[key] = reference_greedy(references(family), list(prompt), count)
        return known[key]

    return tokens


def prompts_of(lengths=LENGTHS):
    """Half of each prompt repeats itself, so that lookup finds drafts."""
    halves = [(random_ids(count - count // 2, seed=count), count // 2) for count in lengths]
    return [half + half[:count] for half, count in halves]


def pair_of(models, family, way="plain", **settings):
    target, head = models(family)
    shape = dict(WAYS[way])
    return Pair(target, shape.pop("draft", head), **{**ROOMY, **shape, **settings})


def tokens_of(pair, wanted, *, is_local=False, rng=None, **sampling):
    start = len(pair.epochs) + len(pair.tokens)
    for i, prompt in enumerate(wanted):
        pair.send(name(start + i), prompt, is_local=is_local, **{"max_new_tokens": NEW_TOKENS, **sampling})
    pair.run(rng, turns=4000)
    return [pair.tokens.get(name(start + i)) for i in range(len(wanted))]


@pytest.mark.parametrize("is_local", [False, True], ids=["handed over", "local"])
@pytest.mark.parametrize(("family", "way"), CELLS)
def test_every_way_gives_the_tokens_of_transformers(models, expected, family, way, is_local):
    pair, prompts = pair_of(models, family, way), prompts_of()
    assert isinstance(pair.decode.engine.pool, WindowedPool)
    wanted = [expected(family, prompt) for prompt in prompts]
    assert tokens_of(pair, prompts, is_local=is_local, rng=random.Random(1)) == wanted, "cold"
    assert tokens_of(pair, prompts, is_local=is_local) == wanted, "with cached prefixes"
    counters = pair.decode.stats().counters, pair.prefill.stats().counters
    assert counters[0]["have_tokens"] > 0
    assert is_local or counters[1]["cached_tokens"] > 0
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_that_run_late_find_the_window_pages_of_their_rows(models, expected, family, monkeypatch):
    monkeypatch.setattr("baton.engine.loader.step_graphs", partial(step_graphs, make=LateSteps))
    pair, prompts = pair_of(models, family, "tree", overlap="on"), prompts_of((40, 9, 61))
    assert tokens_of(pair, prompts, rng=random.Random(2)) == [expected(family, prompt) for prompt in prompts]
    pair.assert_nothing_is_held()


# --- bounds -------------------------------------------------------------------------------------------------


def watched(pair, worker):
    """Runs to the end; the most window pages that were in use or idle, and the most that one request held."""
    pages, most, each = worker.engine.windows.pages, 0, 0
    for _ in range(4000):
        pair.turn()
        most = max(most, pages.num_total - pages.num_available)
        each = max([each, *(len(room.request.windows) for room in worker.queues)])
        if pair.is_idle:
            return most, each
    raise AssertionError("not idle")


@pytest.mark.parametrize("is_local", HANDED_OVER_FIRST)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_request_holds_a_bounded_number_of_window_pages(models, expected, family, is_local):
    """A prompt of 160 tokens and 60 of output, 55 pages, in a pool of 30 window pages."""
    held = {}
    for count in (40, 160):
        pair, prompt = pair_of(models, family, "chain", **TIGHT), random_ids(count, seed=3)
        pair.send(name(0), prompt, max_new_tokens=60, is_local=is_local)
        held[count] = watched(pair, pair.decode)
        assert pair.tokens[name(0)] == expected(family, prompt, 60)
        pair.assert_nothing_is_held()
    assert held[160][1] == held[40][1], "the length of a prompt does not matter"
    assert held[160][1] <= pair.decode.growth.steady_windows + 2 * is_local
    assert held[160][1] < 22 < 55


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_holds_a_bounded_number_of_window_pages(models, family):
    most = []
    for count in (100, 260):
        pair = pair_of(models, family, "plain", **TIGHT)
        pair.send(name(0), random_ids(count, seed=3), max_new_tokens=2)
        windows = pair.prefill.engine.windows
        most.append(watched(pair, pair.prefill)[1])
        assert most[-1] <= windows.peak(count, -(-count // 4), pair.prefill.scheduler.chunk_size)
    assert most[0] == most[1] < 25


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hand_off_has_the_window_pages_of_the_tail_alone(models, family):
    sent = []
    for count in (40, 41, 44, 120, 244):
        pair = pair_of(models, family, "plain")
        pair.send(name(0), random_ids(count, seed=count), max_new_tokens=2)
        pair.run()
        engine = pair.decode.engine
        pool, size, window = engine.pool, engine.page_size, engine.pool.layout.window
        pages, first = -(-count // size), (count - 1 - window + 1) // size
        windowed = pages - first
        assert windowed <= (window + 2 * size) // size
        found = pair.ends[name(0)].timeline.handoff_bytes
        assert found == pages * pool.page_bytes + windowed * pool.part.page_bytes
        sent.append(found)
    if pool.layout.num_full == 0:
        assert max(sent[:3]) <= sent[0] + pool.part.page_bytes
        assert sent[0] == sent[3] == sent[4], "a prompt of any length costs the same"


# --- prefixes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_local", HANDED_OVER_FIRST)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_its_own_window(models, expected, family, is_local):
    """Each turn has all tokens before it as its prompt; hits need few window pages."""
    pair, text = pair_of(models, family, "chain", **TIGHT), random_ids(30, seed=1)
    for turn in range(4):
        pair.send(name(turn), text, max_new_tokens=20, is_local=is_local)
        pair.run()
        assert pair.tokens[name(turn)] == expected(family, text, 20), turn
        have = pair.ends[name(turn)].timeline.have_tokens
        assert have >= (len(text) - 20 if turn else 0), "the turn before was found"
        text = text + pair.tokens[name(turn)] + random_ids(7, seed=10 + turn)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_leave_the_window_of_a_common_beginning_in_the_cache(models, expected, family):
    """The window pages of the common part lie far behind the end of either prompt."""
    common = random_ids(40, seed=5)
    prompts = [common + random_ids(count, seed=count) for count in (50, 61)]
    pair = pair_of(models, family, "plain")
    for i, prompt in enumerate(prompts):
        pair.send(name(i), prompt, max_new_tokens=9, is_local=True)
        pair.run()
        assert pair.tokens[name(i)] == expected(family, prompt, 9)
    assert pair.ends[name(1)].prefill.cached_tokens == 40
    pair.assert_nothing_is_held()


def take_idle_windows(engine):
    """Something else needs all idle window pages, and gives them back."""
    pages = engine.windows.pages
    taken = engine.cache.alloc(pages.num_available)
    pages.take(taken)
    pages.drop(taken)
    engine.cache.allocator.release(taken)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_without_its_window_is_computed_again_and_has_it_then(models, expected, family):
    prompt, pair = random_ids(41, seed=6), pair_of(models, family, "plain")
    cached = []
    for number in range(4):
        pair.send(name(number), prompt, max_new_tokens=3, is_local=True)
        pair.run()
        assert pair.tokens[name(number)] == expected(family, prompt, 3)
        cached.append(pair.ends[name(number)].prefill.cached_tokens)
        if number == 1:
            take_idle_windows(pair.decode.engine)
    assert cached == [0, 40, 0, 40]
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_share_a_prompt_with_the_window_of_its_tail(models, expected, family):
    pair, prompt = pair_of(models, family, "chain"), random_ids(43, seed=8)
    for is_local in (False, True):
        start = len(pair.ends)
        pair.send(name(start), prompt, max_new_tokens=NEW_TOKENS, is_local=is_local)
        for choice in (1, 2):
            pair.send(name(start + choice), prompt, shares=name(start), max_new_tokens=NEW_TOKENS)
        pair.run()
        for choice in range(3):
            assert pair.tokens[name(start + choice)] == expected(family, prompt)
    assert pair.decode.stats().counters["shared_prompts"] == 4
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("family", BOTH)
def test_a_choice_does_not_share_a_prompt_whose_window_has_gone(models, expected, family):
    pair, prompt = pair_of(models, family, "plain"), random_ids(43, seed=8)
    pair.send(name(0), prompt, max_new_tokens=60)
    pair.run(until=lambda: len(pair.tokens.get(name(0), [])) > 55)
    pair.send(name(1), prompt, shares=name(0), max_new_tokens=NEW_TOKENS)
    pair.run()
    end = pair.ends[name(1)]
    assert isinstance(end, Failed)
    assert end.kind == "Unshared"
    assert pair.tokens[name(0)] == expected(family, prompt, 60)
    pair.assert_nothing_is_held()


# --- full pools ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "way", "is_local"),
    [
        pytest.param("mistral", "chain", False),
        *(
            pytest.param(family, way, is_local, marks=pytest.mark.slow)
            for family in SETTINGS
            for way in ("plain", "tree", "chain ahead")
            for is_local in (False, True)
        ),
    ],
)
def test_requests_that_are_retracted_go_on_with_their_tokens(models, expected, family, way, is_local):
    """Fewer window pages than the requests need together: the newest gives its pages up, again and again."""
    prompts = prompts_of((3, 5, 30, 4, 6))
    pair = pair_of(models, family, way, pages=400, window_pages=15, max_context=200, max_running=6)
    pair.decode.growth.ahead_tokens = 0
    asked = [
        Asked(pair, i, prompt, {"temperature": 0.0}, is_local=is_local) for i, prompt in enumerate(prompts)
    ]
    played(pair, asked, random.Random(4))
    assert [each.told for each in asked] == [expected(family, prompt) for prompt in prompts]
    assert pair.decode.stats().counters["retractions"] > 0
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("family", BOTH)
def test_what_can_never_be_held_is_refused_with_the_numbers(models, family):
    pair = pair_of(models, family, "plain", pages=400, window_pages=9, max_context=400)
    pair.send(name(0), random_ids(300, seed=1), max_new_tokens=40)
    reasons = [message.reason for link in pair.links.values() for message in link.to_router]
    assert any("window pages at once, this worker has 9" in reason for reason in reasons), reasons


def test_a_model_keeps_all_pages_if_it_is_told_to(models, expected):
    pair, prompts = pair_of(models, "gemma2", "chain", window_kv="keep"), prompts_of()
    assert not isinstance(pair.decode.engine.pool, WindowedPool)
    assert tokens_of(pair, prompts) == [expected("gemma2", prompt) for prompt in prompts]


def test_workers_of_the_two_kinds_do_not_pair(models):
    kept, freed = (pair_of(models, "gemma2", window_kv=kind) for kind in ("keep", "free"))
    layouts = [pair.decode.admission.engine.pool.layout for pair in (kept, freed)]
    assert type(layouts[0]) is not type(layouts[1])
    wires = [pair.links["b" * 32].transport.session.layout.wire for pair in (kept, freed)]
    assert wires[0].fingerprint != wires[1].fingerprint


# --- planted bugs -------------------------------------------------------------------------------------------


def a_page_given_up_too_early(planting):
    drop = RequestWindows._drop_before
    planting.setattr(
        RequestWindows, "_drop_before", lambda self, request, first: drop(self, request, first + 1)
    )


def pages_given_up_as_if_all_drafts_were_accepted(planting):
    def retire(self, request):
        self._drop_before(request, self.pages.first_page(request.num_computed + 4))

    planting.setattr(RequestWindows, "retire", retire)


def a_window_that_is_one_token_short(planting):
    """The border: the row at the end of a window is the first one of a page."""
    planting.setattr(
        window_pages, "first_read_page", lambda row, window, size: first_read_page(row, window - 1, size)
    )


def a_page_of_the_tail_not_handed_over(planting):
    """Both sides agree on it, so that nothing but the tokens tells."""
    ours, theirs = RequestWindows.tail_of, KVLayout.tail_of
    planting.setattr(RequestWindows, "tail_of", lambda self, count: ours(self, count) + 1)
    planting.setattr(KVLayout, "tail_of", lambda self, count: theirs(self, count) + 1)


def a_tail_given_up_before_it_is_handed_over(planting):
    planting.setattr(
        RequestWindows,
        "retire_prompt",
        lambda self, request, row: self._drop_before(request, self.pages.first_page(row + self.margin)),
    )


def a_device_that_is_not_told(planting):
    planting.setattr(Engine, "place_windows", lambda self: self.windows.pages.take_changes() and None)


def a_hit_without_its_window(planting):
    planting.setattr(prefix_cache, "_usable", lambda pages, windows, held_from: len(pages))
    hold = WindowPages.hold
    planting.setattr(
        WindowPages, "hold", lambda self, pages: hold(self, [page for page in pages if self.of(page)])
    )


def a_window_page_freed_with_a_holder(planting):
    def drop(self, pages):
        for page in pages:
            self._holders[page] = 0
            self._free([page])

    planting.setattr(WindowPages, "drop", drop)


PLANTS = [
    a_page_given_up_too_early,
    pages_given_up_as_if_all_drafts_were_accepted,
    a_window_that_is_one_token_short,
    a_page_of_the_tail_not_handed_over,
    a_tail_given_up_before_it_is_handed_over,
    a_device_that_is_not_told,
    a_hit_without_its_window,
    a_window_page_freed_with_a_holder,
]
QUICK_PLANTS = ("a_page_given_up_too_early", "a_page_of_the_tail_not_handed_over")


def is_right(models, expected, family):
    """Whether a pair gives the tokens of transformers for prompts of all remainders, cold, cached, and behind
    cached pages whose windows have gone, with nothing held at the end. Of two equal prompts one ends early.
    """
    prompts = [*prompts_of((36, 37, 38, 39)), *prompts_of((39,))]
    pair = pair_of(models, family, "lookup")
    pair.decode.growth.ahead_tokens = 0
    try:
        for is_local in (False, True):
            for number in range(3):
                start = len(pair.tokens)
                for i, prompt in enumerate(prompts):
                    count = 6 if i == len(prompts) - 1 else 22
                    pair.send(name(start + i), prompt, is_local=is_local, max_new_tokens=count)
                pair.run()
                for i, prompt in enumerate(prompts):
                    found = pair.tokens[name(start + i)]
                    if found != expected(family, prompt, 22)[: len(found)]:
                        return False
                if number == 1:
                    take_idle_windows(pair.decode.engine)
            pair.decode.engine.cache.clear()
        pair.assert_nothing_is_held()
    except (AssertionError, IndexError, KeyError):
        return False
    return True


@pytest.mark.parametrize(
    ("family", "plant"),
    [
        pytest.param(
            family,
            plant,
            id=f"{family}-{plant.__name__}",
            marks=[] if family == "mistral" and plant.__name__ in QUICK_PLANTS else pytest.mark.slow,
        )
        for family in BOTH
        for plant in PLANTS
    ],
)
def test_each_planted_bug_is_found(models, expected, family, plant, monkeypatch):
    plant(monkeypatch)
    assert not is_right(models, expected, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_planted_bug_nothing_is_found(models, expected, family):
    assert is_right(models, expected, family)
