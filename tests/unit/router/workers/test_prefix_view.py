"""What a router believes that a worker holds: told, expected, and told anew after something was missed."""

import random

import pytest
from baton.cluster.protocol.messages import HeldPrefixes
from baton.engine.kv.page_names import NAME_BYTES, PageScheme, name_of
from baton.engine.kv.pool import PageAllocator
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.kv.prefix_journal import PrefixJournal
from baton.engine.kv.tiers.page_keys import PageKeys
from baton.router.scheduling.prefixes import SeenPrompt
from baton.router.workers.prefix_view import ASK_AGAIN_S, LATE_BEATS, PrefixView
from baton.worker import prefix_news
from baton.worker.prefix_news import PrefixNews

ROOT, SIZE, WORKER = b"r" * 32, 4, "1" * 32
PROMPT = SeenPrompt(range(40))
NAMES = list(PROMPT.names(PageScheme(root=ROOT, page_size=SIZE)))


def view(*, tells=True, **settings):
    return PrefixView(SIZE, tells=tells, **settings)


def said(seq, added=(), removed=(), **more):
    return HeldPrefixes(
        instance=WORKER, seq=seq, root=ROOT, added=b"".join(added), removed=b"".join(removed), **more
    )


def test_pages_are_held_from_their_telling_on_until_they_are_gone():
    seen = view()
    seen.hear(said(0, NAMES[:6], is_first=True))
    assert seen.scheme == PageScheme(root=ROOT, page_size=SIZE)
    assert seen.num_held(NAMES) == 6
    seen.hear(said(1, NAMES[6:8], NAMES[2:3]))
    assert seen.num_held(NAMES) == 2, "what lies behind a gap does not count"
    seen.hear(said(2, NAMES[2:3]))
    assert seen.num_held(NAMES) == 8


def test_pages_without_features_count_for_those_who_take_them():
    seen, bare = view(), [name[:-1] + bytes((name[-1] | 1,)) for name in NAMES]
    seen.hear(said(0, [*NAMES[:2], *bare[2:5]], is_first=True))
    assert (seen.num_held(NAMES), seen.num_held(NAMES, takes_bare=True)) == (2, 5)


def test_a_missed_message_makes_the_router_ask_until_all_is_told_anew():
    seen = view()
    assert not seen.must_ask(0.0), "a new worker tells unasked"
    seen.hear(said(0, NAMES[:3], is_first=True))
    seen.hear(said(1, NAMES[3:4]))
    seen.hear(said(1, NAMES[3:4]))
    seen.hear(said(0, NAMES[5:6], is_first=True))
    assert not seen.must_ask(10.0), "repeated messages are none"
    seen.hear(said(3, NAMES[5:6]))
    assert seen.must_ask(10.0)
    assert seen.num_held(NAMES) == 4, "what was told counts until then"
    seen.hear(said(4, NAMES[6:7]))
    assert not seen.must_ask(10.0 + ASK_AGAIN_S / 2)
    assert seen.must_ask(10.0 + ASK_AGAIN_S)
    seen.hear(said(5, NAMES[:1], is_first=True))
    assert seen.num_held(NAMES) == 1
    assert not seen.must_ask(99.0)


def test_what_is_told_anew_for_another_router_is_not_forgotten_meanwhile():
    seen = view()
    seen.hear(said(0, NAMES[:6], is_first=True))
    seen.hear(said(1, NAMES[3:5], is_first=True, is_last=False))
    assert seen.num_held(NAMES) == 6
    seen.hear(said(2, NAMES[6:7], NAMES[5:6], is_last=False))
    assert seen.num_held(NAMES) == 5, "news count at once"
    seen.hear(said(3, NAMES[:2]))
    assert seen.num_held(NAMES) == 2, "page 2 was not told again"
    assert seen.num_told == 5
    seen.hear(said(4, NAMES[2:3]))
    assert seen.num_held(NAMES) == 5


def test_a_router_that_joins_costs_the_others_nothing_of_a_large_cache(monkeypatch):
    monkeypatch.setattr(prefix_news, "NEWS_PAGES", 4)
    cache = PrefixCache(PageAllocator(80), SIZE)
    news = PrefixNews(PrefixJournal(cache, PageKeys(cache, "weights")), WORKER)
    old, new, tokens = view(), view(), list(range(120))
    pages = cache.alloc(30)
    cache.insert(tokens, pages)

    def tell(*views, times=1):
        for _ in range(times):
            if (message := news.take()) is not None:
                for each in views:
                    each.hear(message)

    tell(old, times=20)
    names = SeenPrompt(tokens).names(old.scheme)
    assert old.num_held(names) == 30
    news.asked()
    more = cache.alloc(5)
    cache.insert(list(range(500, 520)), more)
    for _ in range(9):
        tell(old, new)
        assert old.num_held(names) == 30
    tell(old, new, times=5)
    assert new.num_held(names) == old.num_held(names) == 30
    assert new.num_told == old.num_told == 35


def test_what_a_worker_names_between_steps_is_told_with_the_rest():
    rng, cache = random.Random(3), PrefixCache(PageAllocator(30), SIZE)
    journal, told = PrefixJournal(cache, PageKeys(cache, "weights")), set()
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(SIZE * rng.randint(1, 6))]
        pages = cache.alloc(len(tokens) // SIZE)
        cache.insert(tokens, pages)
        cache.allocator.release(pages)
        for _ in range(rng.randint(0, 4)):
            journal.work(rng.randint(1, 3))
        if rng.random() < 0.4 and (part := journal.take(100)) is not None:
            told = (set() if part.is_first else told) | set(part.added)
            told -= set(part.removed)
            assert told == {name_of(journal.keys.of_page(page)) for page in cache.cached_pages()}


def test_no_step_names_more_than_its_part_of_the_pages():
    cache = PrefixCache(PageAllocator(800), SIZE)
    journal = PrefixJournal(cache, PageKeys(cache, "weights"))
    news = PrefixNews(journal, WORKER)
    cache.insert(list(range(SIZE * 700)), cache.alloc(700))
    for num_left in range(
        700 - prefix_news.PAGES_PER_STEP, -prefix_news.PAGES_PER_STEP, -prefix_news.PAGES_PER_STEP
    ):
        news.work()
        assert len(journal._new) == max(0, num_left)
    assert len(news.take().added) == 700 * NAME_BYTES


def test_a_worker_that_never_told_anything_is_asked_after_a_while():
    seen = view()
    assert [seen.must_ask(now) for now in (5.0, 5.5, 6.0, 6.5, 7.0)] == [False, False, True, False, True]


def test_heartbeats_that_count_more_messages_show_a_loss():
    seen = view()
    seen.hear(said(0, is_first=True))
    assert not seen.must_ask(0.0)
    for _ in range(LATE_BEATS - 1):
        seen.beat(2, 1.0)
    seen.hear(said(1))
    for _ in range(LATE_BEATS):
        seen.beat(2, 1.0)
    assert not seen.must_ask(9.0), "it was only late"
    for _ in range(LATE_BEATS):
        seen.beat(3, 1.0)
    assert seen.must_ask(9.0)
    assert seen.num_lost == 1


def test_what_is_expected_counts_until_its_time_or_until_it_is_told():
    seen = view()
    seen.hear(said(0, NAMES[:1], is_first=True))
    seen.expect(NAMES[:4], 5.0)
    assert seen.num_held(NAMES) == 4
    seen.hear(said(1, NAMES[1:2], NAMES[2:3]))
    assert seen.num_held(NAMES) == 2, "the worker knows better"
    seen.expect(NAMES[:4], 5.0)
    seen.beat(2, 4.9)
    assert seen.num_held(NAMES) == 4
    seen.beat(2, 5.0)
    assert seen.num_held(NAMES) == 2


def test_a_worker_that_tells_nothing_is_believed_until_its_reserved():
    silent = view(tells=False)
    silent.expect(NAMES[:6], 0.0)
    silent.beat(0, 99.0)
    assert silent.num_held(NAMES) == 6
    silent.learn(NAMES, 3)
    assert silent.num_held(NAMES) == 3
    silent.learn(NAMES, 10)
    assert silent.num_held(NAMES) == 10
    assert not silent.must_ask(99.0)
    telling = view()
    telling.hear(said(0, NAMES[:2], is_first=True))
    telling.learn(NAMES, 0)
    assert telling.num_held(NAMES) == 2, "its Reserved does not count what lies in lower tiers"


def test_other_weights_are_another_root_under_which_nothing_is_held():
    seen = view()
    seen.hear(said(0, NAMES, is_first=True))
    seen.expect(NAMES, 9.0)
    other = HeldPrefixes(instance=WORKER, seq=1, root=b"s" * 32, lookahead=1)
    seen.hear(other)
    assert seen.num_held(PROMPT.names(seen.scheme)) == 0


@pytest.mark.parametrize("tells", [False, True])
def test_a_view_is_bounded_and_forgets_ends_before_beginnings(tells):
    seen = view(tells=tells, max_pages=3)
    seen.expect(NAMES, 9.0)
    assert seen.num_held(NAMES) == 3
    if tells:
        seen.hear(said(0, NAMES, is_first=True))
        assert seen.num_told == 3
        assert seen.num_held(NAMES) == 3


@pytest.mark.parametrize("takes_bare", [False, True])
def test_beginnings_that_prompts_are_looked_for_with_outlive_all_others(takes_bare):
    seen, rng = view(max_pages=16), random.Random(2)
    hot = [name[:-1] + bytes((name[-1] & ~1 | takes_bare,)) for name in NAMES]
    asked = [name[:-1] + bytes((name[-1] & ~1,)) for name in NAMES]
    seen.hear(said(0, hot[:4], is_first=True))
    for seq in range(1, 50):
        assert seen.num_held(asked, takes_bare=takes_bare) == 4
        seen.hear(said(seq, [rng.randbytes(NAME_BYTES) for _ in range(5)]))
    assert seen.num_told == 16


def test_a_view_over_a_lossy_wire_comes_to_what_the_worker_holds():
    """A worker's own cache, journal and messages, over a wire that drops and repeats some."""
    for seed in range(20):
        rng = random.Random(seed)
        cache = PrefixCache(PageAllocator(24), SIZE)
        news = PrefixNews(PrefixJournal(cache, PageKeys(cache, "weights")), WORKER)
        seen, now, prompts = view(), 0.0, [[rng.randrange(3) for _ in range(24)] for _ in range(6)]
        for turn in range(80):
            now += 0.25
            tokens = rng.choice(prompts)[: rng.randrange(4, 25)]
            held = cache.match(tokens, len(tokens))
            pages = held + cache.alloc(len(tokens) // SIZE - len(held))
            cache.insert(tokens, pages, num_whole=rng.choice((None, len(held))))
            cache.allocator.release(pages)
            seen.beat(news.num_sent, now)
            if (message := news.take()) is not None and (turn > 60 or rng.random() < 0.7):
                for _ in range(rng.choice((1, 1, 2))):
                    seen.hear(message)
            if seen.must_ask(now):
                news.asked()
        while (message := news.take()) is not None:
            seen.hear(message)
        for tokens in prompts:
            names = SeenPrompt(tokens).names(seen.scheme)
            whole = cache.match(tokens, len(tokens))
            longest = cache.match(tokens, len(tokens), bare_limit=len(tokens))
            assert seen.num_held(names) == len(whole), seed
            assert seen.num_held(names, takes_bare=True) >= len(longest), seed
            cache.allocator.release(whole + longest)
