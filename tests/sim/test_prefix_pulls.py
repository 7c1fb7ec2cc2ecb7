"""Prefill pulls what decode holds: the tokens of an undisturbed run, whatever becomes of the pull.

Free pages hold NaN (`worker_pair`), so a page that is read too early, or written too late, is seen.
"""

import random

import msgspec
import pytest
from baton.cluster.protocol.messages import PULL_ENDS, PULL_OK, Failed, Finished, OfferPrefix
from baton.decode.queues import DecodeState
from baton.tests.sim.late_copiers import attach_tiers
from baton.tests.sim.pull_pair import D, P, PullPair, name
from baton.tests.sim.worker_pair import Pair
from baton.worker.retractions import RETRACTED, Reason

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = "c" * 32
NUM_TOKENS, TURNS, CHATS = 14, 3, 2
CHAIN, TREE = {}, {"spec_topk": 2}


def played(pair, seed=5, *, pulls=None, rng=None, to=lambda turn: D, after=lambda pair, turn: None):
    """(tokens, accepted drafts) of every turn of some conversations. `pulls(turn)`: whether prefill pulls."""
    draw = random.Random(seed)
    texts = [[draw.randrange(3, 250) for _ in range(draw.randrange(18, 26))] for _ in range(CHATS)]
    said, accepted = [], []
    for turn in range(TURNS):
        for chat in range(CHATS):
            room, where = name(100 * turn + chat), to(turn)
            sampling = {"temperature": 1.0, "seed": chat} if chat % 2 else {}
            more = {"pull": pair.pull(texts[chat], to=where)} if pulls and pulls(turn) else {}
            pair.send(room, texts[chat], to=where, max_new_tokens=NUM_TOKENS, **more, **sampling)
            pair.run(rng, turns=3000)
            assert isinstance(pair.ends[room], Finished), pair.ends[room]
            said.append(pair.tokens[room])
            accepted.append(pair.ends[room].timeline.accepted_tokens)
            texts[chat] = texts[chat] + said[-1] + [draw.randrange(3, 250) for _ in range(4)]
        after(pair, turn)
    return said, accepted


def always(turn):
    return True


@pytest.fixture(scope="module")
def undisturbed(target, head):
    """What all turns say without any pull, by the settings of the drafts."""
    kept = {}

    def said(**settings):
        key = tuple(sorted(settings.items()))
        if key not in kept:
            kept[key] = played(Pair(target, head if settings.pop("drafts") else "", pages=200, **settings))
        return kept[key]

    return said


@pytest.mark.parametrize(
    ("drafts", "shape", "is_random"),
    [
        pytest.param(True, CHAIN, True, id="chain"),
        pytest.param(True, TREE, False, id="tree", marks=pytest.mark.slow),
        pytest.param(False, CHAIN, True, id="plain", marks=pytest.mark.slow),
        pytest.param(True, CHAIN | {"overlap": "on"}, True, id="chain-overlap", marks=pytest.mark.slow),
        pytest.param(False, CHAIN | {"overlap": "on"}, True, id="plain-overlap", marks=pytest.mark.slow),
        pytest.param(True, TREE, True, id="tree-random", marks=pytest.mark.slow),
    ],
)
def test_turns_behind_pulled_prefixes_say_and_draft_the_same(
    target, head, undisturbed, drafts, shape, is_random
):
    pair = PullPair(target, head if drafts else "", pages=200, **shape)
    rng = random.Random(3) if is_random else None
    assert played(pair, pulls=always, rng=rng) == undisturbed(drafts=drafts, **shape)
    computed = pair.counter("prompt_tokens")
    assert pair.counter("pulled_tokens") > 2 * CHATS * (NUM_TOKENS - 2 * 4)
    plain = PullPair(target, head if drafts else "", pages=200, **shape)
    played(plain)
    assert computed + pair.counter("pulled_tokens") == plain.counter("prompt_tokens"), "nothing twice"
    assert sum(pair.counter(f"pull_misses_{why}") for why in ("declined", "late", "lost")) == 0
    assert pair.counter("prefix_offers", D) == pair.counter("prefix_pulls") == 4
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_pages_without_features_wait_for_the_word_of_the_decode_worker(target, head, undisturbed):
    """Turns that are pulled stand between others: those compute again what they may not use."""
    pair = PullPair(target, head, pages=200)
    assert played(pair, pulls=lambda turn: turn == 1) == undisturbed(drafts=True)
    assert pair.prefill.engine.cache._num_bare > 0
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_another_decode_worker_gets_features_that_are_computed(target, head, undisturbed):
    pair = PullPair(target, head, pages=200)
    pair.add_decode(OTHER)
    said, _ = played(pair, pulls=always, to=lambda turn: OTHER if turn == 2 else D)
    assert said == undisturbed(drafts=True)[0]
    alone = PullPair(target, head, pages=200)
    alone.add_decode(OTHER)
    moved, accepted = played(alone, to=lambda turn: OTHER if turn == 2 else D)
    assert (moved, accepted) == (said, played_again(target, head)), "its drafts are as good"
    pair.end_leases()
    pair.assert_nothing_is_held()


def played_again(target, head):
    pair = PullPair(target, head, pages=200)
    pair.add_decode(OTHER)
    return played(pair, pulls=always, to=lambda turn: OTHER if turn == 2 else D)[1]


def test_a_decode_worker_without_a_head_gets_what_another_one_holds(target, undisturbed):
    pair = PullPair(target, pages=200)
    pair.add_decode(OTHER)
    draw = random.Random(5)
    prompt = [draw.randrange(3, 250) for _ in range(20)]
    pair.send(name(0), prompt, max_new_tokens=NUM_TOKENS)
    pair.run()
    again = [*prompt, *pair.tokens[name(0)], 7, 8]
    pair.send(name(1), again, to=OTHER, pull=pair.pull(again, to=OTHER), wants_features=False)
    pair.run()
    plain = Pair(target, pages=200)
    plain.send(name(1), again)
    plain.run()
    assert pair.tokens[name(1)] == plain.tokens[name(1)]
    assert pair.counter("pulled_tokens") == 12
    assert pair.ends[name(1)].timeline.have_tokens == 0
    pair.assert_nothing_is_held()


# --- what goes wrong ----------------------------------------------------------------------------------------


FIRST = random.Random(9).choices(range(3, 250), k=22)


@pytest.fixture(scope="module")
def expected(target, head):
    """(prompt of the second turn of a chat, its tokens) without a pull."""
    plain = Pair(target, head, pages=60)
    plain.send(name(0), FIRST, max_new_tokens=20)
    plain.run()
    prompt = [*FIRST, *plain.tokens[name(0)], *range(7, 14)]
    plain.send(name(1), prompt)
    plain.run()
    return prompt, plain.tokens[name(1)]


@pytest.fixture
def second_turn(target, head, expected):
    """A pair with one finished turn of a chat: `begin(**order)` sends the second one, `end()` checks it."""

    class Chat:
        def __init__(self):
            self.prompt, self.expected = expected
            self.pair = PullPair(target, head, pages=60)
            self.pair.send(name(0), FIRST, max_new_tokens=20)
            self.pair.run()

        def begin(self, **order):
            self.pair.send(name(1), self.prompt, pull=self.pair.pull(self.prompt, **order))

        def end(self, turns=3000):
            self.pair.run(turns=turns)
            assert self.pair.tokens[name(1)] == self.expected
            missed = [end for end in PULL_ENDS if end != PULL_OK and self.misses(end)]
            has_pulled = self.pair.counter("prefix_pulls") > 0
            assert [self.pair.prefilled[name(1)].pull_end] == (missed or [PULL_OK if has_pulled else ""])
            self.pair.end_leases()
            self.pair.assert_nothing_is_held()

        def misses(self, why):
            return self.pair.counter(f"pull_misses_{why}")

    return Chat()


def test_a_prefix_that_is_not_there_any_more_is_declined_and_computed(second_turn):
    tokens = second_turn.pair.held(second_turn.prompt)
    second_turn.pair.decode.engine.cache.clear()
    second_turn.begin(tokens=tokens)
    second_turn.end()
    assert (second_turn.misses("declined"), second_turn.pair.counter("pulled_tokens")) == (1, 0)
    assert second_turn.pair.counter("offers_declined", D) == 1


def test_an_order_of_more_than_decode_has_is_declined(second_turn):
    second_turn.begin(tokens=second_turn.pair.held(second_turn.prompt) + 4)
    second_turn.end()
    assert second_turn.misses("declined") == 1


@pytest.mark.parametrize(
    "what",
    [
        *(pytest.param(what, marks=pytest.mark.slow) for what in ("KVHello", "Attach", "Announce")),
        "Block",
        "Release",
    ],
)
def test_a_pull_that_is_stuck_is_given_up_after_its_patience(second_turn, what):
    def hold(packet):
        is_ours = second_turn.pair.network._links[packet.link][0] == f"fake://{D[:4]}"
        return () if is_ours and what.encode() in bytes(packet.frames[0]) else (packet,)

    second_turn.pair.network.fault = hold
    second_turn.begin(patience_ms=100)
    second_turn.end()
    assert second_turn.misses("late") == (what != "Release")
    is_pulled = what == "Release"
    assert (second_turn.pair.counter("pulled_tokens") > 0) == is_pulled


@pytest.mark.parametrize("times", [1, 99])
def test_a_damaged_block_is_pulled_again_or_its_tokens_are_computed(second_turn, times):
    left = [times]

    def damage(packet):
        is_block = len(packet.frames) == 2 and second_turn.pair.network._links[packet.link][0] != "fake://p"
        if not is_block or not left[0]:
            return (packet,)
        left[0] -= 1
        data = bytearray(packet.frames[1])
        data[len(data) // 2] ^= 4
        return (type(packet)(packet.link, packet.is_up, (packet.frames[0], bytes(data))),)

    second_turn.pair.network.fault = damage
    second_turn.begin()
    second_turn.end()
    assert second_turn.pair.links[P].transport.counters["prefix_digest_mismatches"] == min(times, 3)
    assert (second_turn.misses("lost"), second_turn.pair.counter("pulled_tokens") > 0) == (
        int(times > 1),
        times == 1,
    )


def test_a_decode_worker_that_goes_away_is_a_miss(second_turn):
    second_turn.begin()
    second_turn.pair.network.unlisten(f"fake://{D[:4]}")
    second_turn.end()
    assert second_turn.misses("late") + second_turn.misses("lost") == 1


@pytest.mark.parametrize(
    "turns", [pytest.param(i, marks=[] if i in (1, 3) else pytest.mark.slow) for i in range(6)]
)
def test_a_request_that_is_cancelled_during_its_pull_leaves_nothing(second_turn, turns):
    pair = second_turn.pair
    second_turn.begin()
    for _ in range(turns):
        pair.turn()
    pair.cancel(name(1))
    pair.run()
    assert pair.gone[name(1)] == 2
    pair.end_leases()
    pair.assert_nothing_is_held()


def test_repeated_and_late_orders_offer_nothing_twice(second_turn):
    pair, pull = second_turn.pair, second_turn.pair.pull(second_turn.prompt)
    pair.send(name(1), second_turn.prompt, pull=pull)
    order = pair.offer_of(pull, {"room": name(1), "epoch": 0})
    pair.decode.handle(order, pair.clock.now)
    assert pair.counter("prefix_offers", D) == 1
    late = pair.pull(second_turn.prompt)
    second_turn.end()
    pair.decode.handle(order, pair.clock.now)
    pair.decode.handle(pair.offer_of(late, {"room": name(1), "epoch": 0}), pair.clock.now)
    assert (pair.counter("prefix_offers", D), pair.counter("offers_declined", D)) == (1, 1)


def test_a_room_that_waits_for_others_offers_once_it_is_admitted(second_turn):
    pair = second_turn.pair
    pair.send(name(5), list(range(3, 13)), is_local=True, max_new_tokens=40)
    while not pair.decode.stats().running:
        pair.turn()
    other = pair.decode.queues.get(name(5), 0)
    other.priority, other.granted_pages = 1, 0
    pair.decode.queues.max_running = 1
    second_turn.begin()
    (room,) = pair.decode.queues.of(DecodeState.ADMITTING)
    assert room.request.room == name(1)
    assert pair.counter("prefix_offers", D) == pair.counter("offers_declined", D) == 0
    second_turn.end()
    assert pair.ends[name(5)].kind == RETRACTED
    assert pair.counter("prefix_offers", D) == pair.counter("prefix_pulls") == 1
    assert pair.counter("pulled_tokens") > 0


def test_an_urgent_prompt_takes_pages_whose_prefix_is_being_pulled(second_turn):
    pair = second_turn.pair
    second_turn.begin()
    waiting = pair.prefill.queues.get(name(1), 0)
    while waiting.running_pull is None:
        pair.prefill.step()
    waiting.priority = 1
    total = pair.prefill.engine.cache.allocator.num_total
    taken = pair.prefill.engine.cache.alloc(total - len(waiting.request.pages) - 2)
    pair.send(name(6), list(range(3, 23)), max_new_tokens=2)
    pair.prefill.step()
    pair.prefill.engine.cache.allocator.release(taken)
    pair.run()
    assert pair.prefill.stats().counters[Reason.URGENT_PAGES.value] == 1
    assert pair.ends[name(1)].kind == RETRACTED
    assert isinstance(pair.ends[name(6)], Finished)
    pair.end_leases()
    pair.assert_nothing_is_held()


def test_pages_of_a_pull_that_was_given_up_are_waited_for(second_turn):
    pair = second_turn.pair
    pair.prefill.scheduler.chunk_size = 4
    pair.send(name(4), list(range(100, 140)), max_new_tokens=2)
    pair.prefill.step()
    begun = pair.prefill.queues.get(name(4), 0)
    pair.clock.now += 1.0
    second_turn.begin()
    waiting = pair.prefill.queues.get(name(1), 0)
    while waiting.running_pull is None:
        pair.prefill.step()
    begun.priority = waiting.priority = 1
    taken = pair.prefill.engine.cache.alloc(pair.prefill.engine.cache.num_available)
    pair.send(name(6), list(range(3, 45)), max_new_tokens=2)
    for _ in range(3):  # the transport says nothing yet
        pair.prefill.step()
    assert pair.prefill.queues.get(name(6), 0).request.pages == []
    assert pair.prefill.stats().counters[Reason.URGENT_PAGES.value] == 1
    assert pair.prefill.queues.get(name(4), 0) is begun
    pair.prefill.engine.cache.allocator.release(taken)
    pair.cancel(name(6))  # decode has no room for it
    pair.run()
    assert isinstance(pair.ends[name(4)], Finished)
    pair.end_leases()
    pair.assert_nothing_is_held()


def test_an_order_whose_transfer_is_a_rooms_name_leaves_the_room_alone(second_turn):
    pair = second_turn.pair
    pair.send(name(1), second_turn.prompt)
    order = OfferPrefix(instance=D, transfer=name(1), tokens=4, prompt_ids=[1] * 4)
    pair.decode.handle(order, pair.clock.now)
    pair.run()
    assert pair.tokens[name(1)] == second_turn.expected
    pair.decode.handle(msgspec.structs.replace(order, tokens=8), pair.clock.now)
    assert pair.counter("offers_declined", D) == 0
    pair.assert_nothing_is_held()


def test_an_offer_that_nobody_pulls_ends_with_its_lease(second_turn):
    pair, pull = second_turn.pair, second_turn.pair.pull(second_turn.prompt)
    order = pair.offer_of(
        type(pull)(transfer=pull.transfer, instance=D, endpoint="", tokens=pull.tokens, patience_ms=1),
        {"prompt_ids": second_turn.prompt},
    )
    pair.decode.handle(order, pair.clock.now)
    pair.turn()
    cache = pair.decode.engine.cache
    assert cache.num_available == cache.allocator.num_total - pull.tokens // 4
    pair.clock.now += 10
    pair.turn()
    assert pair.counter("offers_dropped", D) == 1
    assert cache.num_available == cache.allocator.num_total


def test_foreign_prefixes_hold_a_bounded_part_of_the_pool(second_turn):
    pair, prompt = second_turn.pair, second_turn.prompt
    for _ in range(9):
        pull = pair.pull(prompt, to=OTHER)
        pair.decode.handle(pair.offer_of(pull, {"prompt_ids": prompt}), pair.clock.now)
    total = pair.decode.engine.cache.allocator.num_total
    assert len(pair.decode.offers.held_pages) <= total // 4
    assert 0 < pair.counter("prefix_offers", D) < 9
    assert pair.counter("offers_declined", D) == 9 - pair.counter("prefix_offers", D)


def test_bare_pages_are_not_served_to_a_worker_that_reads_features(second_turn):
    """Prefill is told that its decode worker holds the prefix, and that lacks it when it attaches."""
    pair = second_turn.pair
    second_turn.begin()
    pair.run()
    pair.prefill.pulls.wants = lambda *_, **__: False  # the word of decode is not waited for
    pull = pair.pull(second_turn.prompt)
    pair.decode.engine.cache.clear()
    take = pair.prefill.scheduler._take
    pair.prefill.scheduler._take = lambda room, bare_limit: take(room, bare_limit=room.bare_limit)
    pair.send(name(2), second_turn.prompt, pull=pull)
    pair.run(until=lambda: name(2) in pair.ends)
    end = pair.ends[name(2)]
    assert isinstance(end, Failed)
    assert "have no features here" in end.message
    assert end.retryable
    pair.end_leases()
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_pulls_wait_for_what_decode_restores_and_follow_prefills_tier(target, head):
    expected, _ = played(Pair(target, head, pages=200))
    pair, rng = PullPair(target, head, pages=34), random.Random(5)
    for worker in (pair.prefill, pair.decode):
        attach_tiers(worker, lambda: pair.clock.now, rng, host_slots=60)
    spoil = [[random.Random(i).randrange(3, 250) for _ in range(60)] for i in range(4)]

    def crowd_out(pair, turn):
        for i, prompt in enumerate(spoil):
            pair.send(name(9000 + 10 * turn + i), prompt, max_new_tokens=4)
            pair.run(rng, turns=3000)

    def known(prompt, instance=D):
        cache, tiers = pair.decode.engine.cache, pair.decode.tiers.tiers
        pages = cache.match(prompt, len(prompt) - 1)
        count, parts = len(pages), pair.decode.engine.cache.page_size
        before = pages[-1] if pages else 0
        for _, key in tiers.keys.of_prompt(before, prompt, count, (len(prompt) - 1) // parts, ""):
            if not tiers._is_stored(key):
                break
            count += 1
        cache.allocator.release(pages)
        return count * parts

    pair.held = known
    said, _ = played(pair, pulls=always, rng=rng, after=crowd_out)
    assert said == expected
    assert pair.counter("pulled_tokens") > 0
    assert pair.decode.tiers.counters["host_hit_tokens"] > 0
    for _ in range(200):
        pair.turn()
    pair.assert_nothing_is_held()


@pytest.mark.slow
def test_no_page_is_copied_before_the_forwards_that_use_it(target, head):
    pair, rng = PullPair(target, head, pages=60), random.Random(7)
    for worker in (pair.prefill, pair.decode):
        worker.engine.pool.order.check_uses()
    played(pair, pulls=always, rng=rng)
    assert pair.counter("pulled_tokens") > 0
