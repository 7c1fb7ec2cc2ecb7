"""Both workers, their schedulers and the KV plane in one process: random arrivals and cancels from a seed.

The engines, schedulers, sessions, codec and digests are the real ones; the network, the router, the link
thread and the clock are the test's. After every turn the pools must balance and free pages be untouched; at
the end nothing may be held.
"""

import logging
import random

import pytest
from baton.cluster.net.control_link import LEFT
from baton.cluster.protocol.messages import Cancel, Failed, Finished, FirstToken, Gone, Refused
from baton.decode.queues import DecodeState
from baton.engine.kv.budget import STAGING_SHARE
from baton.kvtransfer.transport import Complete, Dropped
from baton.prefill.queues import PrefillState
from baton.tests.parity.eagle3_toys import successor, write_oracle
from baton.tests.parity.toy_engine import ToyEngine
from baton.tests.sim.worker_pair import D, P, Pair, name
from baton.tests.variants import witnesses
from baton.worker.commands import Advance, Drop

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(toy_checkpoint):
    return toy_checkpoint("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def toy(model):
    return ToyEngine(model)


@pytest.fixture(scope="module")
def reference(toy):
    """Greedy tokens of one process without paging tricks, by prompt."""
    known = {}

    def greedy(prompt, count=12):
        key = tuple(prompt)
        if key not in known:
            toy.lengths.clear()
            for pages in toy.pages.values():
                toy.free.extend(pages)
            toy.pages.clear()
            known[key] = toy.greedy(list(prompt), 12)
        return known[key][:count]

    return greedy


def prompts(rng, count):
    """Prompts that share prefixes with each other now and then."""
    stems = [[rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
    return [rng.choice(stems)[: rng.randrange(1, 30)] + [rng.randrange(3, 250) for _ in range(rng.randrange(1,
        12))]
            for _ in range(count)]  # fmt: skip


@pytest.mark.parametrize("chunk_size", [4, 0])
def test_a_pair_gives_the_tokens_of_one_process(model, reference, chunk_size):
    pair = Pair(model, chunk_size=chunk_size, pages=96, max_running=8)
    wanted = prompts(random.Random(1), 8)
    for i, prompt in enumerate(wanted):
        pair.send(name(i), prompt)
    pair.run()
    assert [pair.tokens[name(i)] for i in range(8)] == [reference(prompt) for prompt in wanted]
    assert {end.reason for end in pair.ends.values()} == {"length"}
    pair.assert_nothing_is_held()


def test_a_request_that_ends_with_its_first_token_is_still_handed_over(model):
    """Would prefill drop it, decode's word of a lost hand-off could reach the router before the token
    does."""
    pair = Pair(model)
    pair.send(name(1), [7, 8, 9], max_new_tokens=1)
    link = pair.links[P]
    while not any(isinstance(message, FirstToken) for message in link.to_router):
        link.perform()
        assert pair.prefill.step()
    assert not any(isinstance(command, Drop) for command in link.commands)
    assert link.commands[-1].first_token is not None
    pair.run()
    assert not any(isinstance(end, Failed) for end in pair.ends.values())
    pair.assert_nothing_is_held()


def test_a_repeated_prompt_is_neither_computed_nor_pulled_again(model, reference):
    pair = Pair(model, pages=96)
    prompt = prompts(random.Random(2), 1)[0] + list(range(20, 36))
    pair.send(name(1), prompt)
    pair.run()
    pair.send(name(2), prompt)
    pair.run()
    assert pair.tokens[name(1)] == pair.tokens[name(2)] == reference(prompt)
    assert pair.ends[name(2)].timeline.have_tokens >= len(prompt) - 8
    assert pair.ends[name(2)].timeline.handoff_bytes < pair.ends[name(1)].timeline.handoff_bytes
    assert pair.prefill.stats().counters["cached_tokens"] >= len(prompt) - 8


@pytest.mark.parametrize("seed", witnesses(range(20), range(8)))
def test_random_cancels_leave_nothing_and_change_no_other_output(model, reference, seed):
    rng = random.Random(seed)
    pair = Pair(model, chunk_size=rng.choice([4, 8, 0]), pages=rng.choice([24, 40]), max_running=3)
    waiting = list(enumerate(prompts(rng, 12)))
    sent, cancelled = {}, set()
    for _ in range(600):
        if waiting and rng.random() < 0.3:
            i, prompt = waiting.pop()
            sent[name(i)] = prompt
            pair.send(name(i), prompt, max_new_tokens=rng.choice([1, 5, 12]))
        if sent and rng.random() < 0.15:
            room = rng.choice(list(sent))
            cancelled.add(room)
            pair.cancel(room)
        pair.turn(rng)
        if not waiting and pair.is_idle and not pair.network.packets:
            break
    pair.clock.now += 10  # leases of rooms that one side refused
    pair.run(rng)
    for room, prompt in sent.items():
        got = pair.tokens.get(room, [])
        assert got == reference(prompt, len(got)), "what was said is right, also of a room that was cancelled"
        assert (
            room in cancelled
            or len(got) in (1, 5, 12)
            or room not in pair.ends
            or isinstance(pair.ends[room], Failed)
        )
    assert all(pair.gone[room] >= 2 for room in cancelled), "each cancel was answered by both"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_refused_order_stays_refused_when_repeated(model, is_local):
    """The router has gone on without these two, and would never hear of what they hold."""
    pair = Pair(model, pages=24)
    cache = pair.decode.engine.cache
    held = cache.alloc(cache.num_available)
    pair.prefill.start_draining()
    for _ in range(2):
        pair.send(name(1), [7, 8, 9], is_local=is_local)
        cache.allocator.release(held)
        held = []
    refused = [message for link in pair.links.values() for message in link.to_router]
    assert [type(message) for message in refused] == [Refused] * (1 if is_local else 2)
    assert pair.is_idle
    pair.assert_nothing_is_held()
    pair.send(name(1), [7, 8, 9], epoch=1, is_local=True)
    assert pair.decode.num_rooms == 1, "the next attempt is another one"


def test_losing_the_router_drops_every_room(model):
    pair = Pair(model, pages=96, max_running=8)
    for i, prompt in enumerate(prompts(random.Random(3), 6)):
        pair.send(name(i), prompt)
    for _ in range(3):
        pair.turn()
    pair.prefill.drop_rooms(pair.prefill.queues.names(), "the router is gone")
    pair.decode.drop_rooms(pair.decode.queues.names(), "the router is gone")
    pair.run()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_newer_attempt_replaces_the_older_one_in_every_state(model, reference, turns, is_cancelled):
    pair = Pair(model, pages=96, chunk_size=8)
    prompt = list(range(10, 40))
    pair.send(name(1), prompt)
    for _ in range(turns):
        pair.turn()
    if is_cancelled:
        pair.cancel(name(1))
    pair.tokens.clear()
    pair.epochs[name(1)] = 1
    pair.send(name(1), prompt, epoch=1)
    pair.send(name(1), prompt, epoch=1)  # a repeated message
    pair.send(name(1), prompt, epoch=0)  # a late one
    pair.run()
    assert pair.tokens[name(1)] == reference(prompt)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("is_local", [True, False])
def test_a_newer_attempt_ends_the_work_on_the_older_one(model, is_local):
    pair = Pair(model, pages=96, chunk_size=8)
    pair.send(name(1), list(range(10, 40)), is_local=is_local)
    pair.turn()
    pair.send(name(1), list(range(10, 40)), epoch=1, is_local=is_local)
    for worker in (pair.decode,) if is_local else (pair.decode, pair.prefill):
        assert [room.request.epoch for room in worker.queues if not room.is_over] == [1]


def test_gone_waits_for_the_pages_of_every_attempt_that_was_cancelled(model):
    pair = Pair(model, pages=96, chunk_size=8)
    link, prefill = pair.links[P], pair.prefill
    gone = lambda: [message for message in link.to_router if isinstance(message, Gone)]  # noqa: E731
    pair.send(name(1), list(range(10, 40)))
    prefill.step()
    pair.send(name(1), list(range(10, 40)), epoch=1)
    assert [room.state for room in prefill.queues] == [PrefillState.CLOSING, PrefillState.QUEUED]
    prefill.handle(Cancel(room=name(1), epoch=1, instance=P), pair.clock.now)
    assert prefill.num_rooms == 1, "the newer one has no pages and is gone"
    assert gone() == [], "pages of the older one are still pinned"
    link.perform()
    for event in link.take():
        prefill.handle(event, pair.clock.now)
    assert [message.epoch for message in gone()] == [1]


def test_a_repeated_message_of_a_closed_attempt_is_ignored(model, reference):
    pair = Pair(model, pages=96)
    prompt = list(range(10, 40))
    pair.send(name(1), prompt)
    pair.run()
    pair.tokens.clear()
    pair.send(name(1), prompt)
    pair.send(name(2), prompt)
    pair.run(until=lambda: name(2) in pair.ends)
    pair.run()
    assert pair.tokens[name(2)] == reference(prompt)
    assert name(1) not in pair.tokens
    for side in (pair.prefill, pair.decode):
        assert side.stats().counters["requests"] == 2, "the repeated message began nothing"
    pair.assert_nothing_is_held()


def test_the_first_token_is_out_before_the_hand_off_ends(model):
    pair = Pair(model, pages=96, chunk_size=0)
    pair.send(name(1), list(range(10, 70)))
    while not pair.tokens:
        pair.turn()
    assert pair.decode.stats().transferring == 1, "decode is still pulling"
    assert len(pair.tokens[name(1)]) == 1
    pair.run()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_prefill_gives_way_when_all_first_tokens_are_posted(model, monkeypatch, caplog, num_prompts):
    """Behind the announcements of the hand-offs, and before its own log."""
    pair = Pair(model, pages=96, chunk_size=0)
    link, seen = pair.links[P], []
    monkeypatch.setattr(
        link,
        "hand_over",
        lambda: seen.append(
            (
                sum(isinstance(message, FirstToken) for message in link.to_router),
                sum(isinstance(command, Advance) for command in link.commands),
                "prefill completed" in caplog.messages,
            )
        ),
    )
    for number in range(num_prompts):
        pair.send(name(number), [4, 5, 6 + number])
    with caplog.at_level("INFO"):
        pair.prefill.step()
    assert seen == [(num_prompts, num_prompts, False)]
    assert caplog.messages.count("prefill completed") == num_prompts
    pair.prefill.step()
    assert len(seen) == 1, "nothing was posted since"
    pair.prefill.scheduler.chunk_size = 8
    pair.send(name(7), [7, 8, 9])
    pair.send(name(8), list(range(10, 40)))
    pair.prefill.step()
    assert sum(isinstance(message, FirstToken) for message in pair.links[P].to_router) == num_prompts + 1
    assert len(seen) == 1, "a prompt waits for its next forward"
    while len(seen) == 1:
        pair.prefill.step()
    assert seen[1][0] == num_prompts + 2


@pytest.mark.parametrize(("reason", "level"), [(LEFT, "INFO"), ("its lease ended", "WARNING")])
def test_a_hand_off_dropped_because_the_router_left_is_no_fault(model, caplog, reason, level):
    pair = Pair(model, pages=96)
    pair.send(name(1), list(range(10, 40)))
    with caplog.at_level(logging.INFO, "baton"):
        pair.prefill.handle(Dropped(room=name(1), epoch=0, reason=reason), pair.clock.now)
    assert [one.levelname for one in caplog.records if one.message == "hand-off dropped"] == [level]


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("is_local", [False, True])
def test_each_row_of_a_prompt_counts_once_as_work(model, is_local, overlap, monkeypatch):
    """A row takes 10 ms. A forward that is launched before the one before is read ends behind that, so only
    the sum of the work is exact then.
    """
    pair = Pair(model, chunk_size=16, pages=96, max_running=8, slo_ttft_s=100.0, overlap=overlap)
    runner = (pair.decode if is_local else pair.prefill).engine.runner
    forward, rows = runner.forward, []

    def timed(batch, *given, **options):
        if batch.num_tokens > len(wanted):  # else a step of the streams
            rows.append(batch.num_tokens)
            pair.clock.now += 0.01 * batch.num_tokens
        return forward(batch, *given, **options)

    wanted, began = [[10 + number] * (20 + 15 * number) for number in range(5)], pair.clock.now
    monkeypatch.setattr(runner, "forward", timed)
    for number, prompt in enumerate(wanted):
        pair.send(name(number), prompt, is_local=is_local, max_new_tokens=2)
    pair.run()
    timelines = [
        pair.ends[room].prefill if is_local else pair.prefilled[room] for room in map(name, range(5))
    ]
    assert sum(rows) == 250, rows
    assert len(rows) < sum(-(-len(prompt) // 16) for prompt in wanted), "prompts shared forwards"
    work_ms = [each.work_ms for each in timelines]
    if overlap == "off":
        assert work_ms == pytest.approx([10 * len(prompt) for prompt in wanted])
    assert sum(work_ms) >= 2500 - 0.001
    assert sum(work_ms) <= 1000 * (pair.clock.now - began) + 0.001, "no time counts twice"


def test_pages_are_cached_once_and_behind_token_1_and_the_offers_end(model, monkeypatch):
    pair = Pair(model, pages=96, chunk_size=0)
    insert, link, seen = pair.prefill.engine.cache.insert, pair.links[P], []

    def noted(*given, **options):
        ends = [item for item in link.commands if isinstance(item, Advance) and item.first_token is not None]
        seen.append((len(ends), sum(isinstance(item, FirstToken) for item in link.to_router)))
        return insert(*given, **options)

    monkeypatch.setattr(pair.prefill.engine.cache, "insert", noted)
    pair.send(name(1), list(range(10, 70)))
    pair.prefill.step()
    assert seen == [], "the link thread sends token 1 first"
    pair.prefill.step()
    assert seen == [(1, 1)]
    pair.run()


def test_a_prompt_finds_the_pages_of_one_that_has_just_ended(model):
    pair = Pair(model, pages=96, chunk_size=0)
    pair.send(name(1), list(range(10, 70)))
    pair.links[P].perform()
    pair.prefill.step()
    pair.send(name(2), list(range(10, 70)))
    pair.prefill.step()
    assert pair.prefill.stats().counters["cached_tokens"] >= 60 - 8
    pair.run()
    pair.assert_nothing_is_held()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A target whose next token depends on the newest alone, and a head that is right if its features are."""
    return write_oracle(tmp_path_factory.mktemp("oracle"))


def successors(token, count):
    out = []
    for _ in range(count):
        token = successor(token)
        out.append(token)
    return out


def test_every_full_step_accepts_every_draft_of_an_oracle(oracle):
    pair = Pair(*oracle, pages=96, max_running=4)
    prompt = [successor(5)] * 3 + [7, 9, 11, 13] * 5
    for i in range(3):  # cold; then found in both caches; then as the beginning of a longer text
        pair.send(name(i), prompt, max_new_tokens=13)
        pair.run()
        assert pair.tokens[name(i)] == successors(prompt[-1], 13)
        timeline = pair.ends[name(i)].timeline
        assert (timeline.verify_steps, timeline.accepted_tokens) == (3, 9), f"round {i}"
        assert (timeline.have_tokens > 0) is (i > 0)
        prompt = prompt + pair.tokens[name(i)] if i == 1 else prompt
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("seed", witnesses(range(10), range(5)))
def test_random_cancels_with_a_drafter_leak_nothing_and_keep_acceptance(oracle, seed):
    rng = random.Random(seed)
    pair = Pair(*oracle, chunk_size=rng.choice([4, 8, 0]), pages=rng.choice([24, 40]), max_running=3)
    sent, cancelled = {}, set()
    for i, prompt in enumerate(prompts(rng, 10)):
        sent[name(i)] = prompt = [token % 60 for token in prompt]
        pair.send(name(i), prompt, max_new_tokens=9)
        for _ in range(rng.randrange(6)):
            pair.turn(rng)
        if rng.random() < 0.4:
            room = rng.choice(list(sent))
            cancelled.add(room)
            pair.cancel(room)
    for _ in range(300):
        pair.turn(rng)
    pair.clock.now += 10  # leases of rooms that one side refused
    pair.run(rng)
    whole = [room for room, end in pair.ends.items() if isinstance(end, Finished)]
    assert len(whole) > 1
    for room in whole:
        assert pair.tokens[room] == successors(sent[room][-1], 9)
        assert pair.ends[room].timeline.accepted_tokens == 6, "8 tokens in two full verifies"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(("is_drafted", "have"), [(True, 4), (False, 8)])
def test_decode_shares_a_page_only_where_its_draft_kv_is_right_too(oracle, is_drafted, have):
    pair = Pair(oracle[0], oracle[1] if is_drafted else "", pages=96)
    for i, behind in enumerate(
        (20, 30)
    ):  # draft KV of the second page's last row depends on the token behind it
        pair.send(name(i), [1, 2, 3, 4, 5, 6, 7, 8, behind])
        pair.run()
    assert pair.ends[name(1)].timeline.have_tokens == have


def test_the_newest_token_has_no_kv_and_no_page_with_it_is_cached(model, reference):
    pair = Pair(model, pages=96)
    prompt = [11, 12, 13, 14, 15]
    pair.send(name(0), prompt, max_new_tokens=3)
    pair.run()
    text = prompt + pair.tokens[name(0)] + [99]
    assert len(text) == 9, "the newest token filled the second page"
    pair.send(name(1), text)
    pair.run()
    assert pair.ends[name(1)].timeline.have_tokens == 4
    assert pair.tokens[name(1)] == reference(text)


def test_a_room_cancelled_while_it_warms_leaves_only_warm_pages(oracle, monkeypatch):
    monkeypatch.setattr("baton.decode.draft_prefill.WARM_ROWS_PER_STEP", 4)
    pair = Pair(*oracle, pages=96, chunk_size=0)
    prompt = [token % 60 for token in range(40)]
    pair.send(name(0), prompt)
    while not (warming := pair.decode.queues.of(DecodeState.WARMING)):
        pair.turn()
    warmed = warming[0].warmed
    assert warmed < 36
    pair.cancel(name(0))
    pair.run()
    pair.ends.clear()
    pair.send(name(1), prompt)
    pair.run()
    assert pair.ends[name(1)].timeline.have_tokens <= warmed
    assert pair.ends[name(1)].timeline.accepted_tokens == 8, (
        "11 tokens in three verifies, the last of two drafts"
    )
    pair.assert_nothing_is_held()


def test_features_in_flight_stay_within_their_share_of_the_kv_pool(oracle):
    pair = Pair(*oracle, pages=96, max_running=8)
    share = pair.decode.engine.pool.kv.nbytes // STAGING_SHARE
    for i in range(8):
        pair.send(name(i), [i] * 40, max_new_tokens=4)
    staged = [room.features.nbytes for room in pair.decode.queues]
    refused = [message for message in pair.links[D].to_router if isinstance(message, Refused)]
    assert 1 < len(staged) < 8, "the pages would have done for all"
    assert len(refused) == 8 - len(staged)
    assert sum(staged) <= share < sum(staged) + staged[0]
    assert all("features" in message.reason and message.retry_after_ms for message in refused)
    for i in range(8):
        pair.cancel(name(i))
    pair.run()
    pair.send(name(8), [9] * 40, max_new_tokens=4)
    assert pair.decode.num_rooms == 1, "the share is free again"
    pair.run()
    pair.assert_nothing_is_held()


def test_features_of_a_single_room_may_exceed_the_share(oracle):
    pair = Pair(*oracle, pages=24)
    pair.send(name(0), [token % 60 for token in range(80)], max_new_tokens=4)
    (room,) = pair.decode.queues
    assert room.features.nbytes > pair.decode.engine.pool.kv.nbytes // STAGING_SHARE
    pair.run()
    assert isinstance(pair.ends[name(0)], Finished)


def test_decode_is_told_at_once_of_a_queued_prompt_given_up(model):
    pair = Pair(model)
    cache = pair.prefill.engine.cache
    held = cache.alloc(cache.num_available)
    pair.send(name(1), list(range(10, 30)))
    for _ in range(4):  # the reader attaches before the prompt has pages
        pair.turn()
    (queued,) = pair.prefill.queues
    assert (pair.prefill.stats().queued, pair.decode.stats().transferring) == (1, 1)
    queued.deadline = pair.clock.now
    started = pair.clock.now
    pair.run()
    assert pair.clock.now - started < 0.1, "neither a lease nor the wait for an offer ended it"
    assert pair.ends[name(1)].kind == "DeadlineExceeded"
    assert pair.decode.stats().counters["handoffs_aborted"] == 1
    cache.allocator.release(held)
    pair.assert_nothing_is_held()


def test_an_invalid_first_token_fails_only_its_room(model):
    pair = Pair(model, pages=96)
    pair.send(name(0), [1, 2, 3])
    done = {"num_bytes": 0, "num_blocks": 0, "seconds": 0.0}
    pair.decode.handle(Complete(room=name(0), epoch=0, first_token=10**6, **done), pair.clock.now)
    pair.cancel(name(0))
    pair.send(name(1), [1, 2, 3])
    pair.run()
    assert pair.ends[name(0)].kind == "RemoteProtocolError"
    assert len(pair.tokens[name(1)]) == 12


@pytest.mark.parametrize("is_local", [True, False])
def test_a_first_token_of_bad_logits_is_none(model, is_local):
    pair = Pair(model, pages=96, slo_ttft_s=5.0)
    worker = pair.decode if is_local else pair.prefill
    worker.engine.model.norm.weight.fill_(float("nan"))
    pair.send(name(0), list(range(10, 40)), is_local=is_local)
    pair.run()
    assert pair.ends[name(0)].kind == "BadLogits"
    counters = worker.stats().counters
    assert counters["ttft_met"] == counters["ttft_missed"] == counters.get("tokens", 0) == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_kv_of_a_request_with_bad_logits_is_never_reused(model, reference, side):
    pair = Pair(model, pages=96)
    prompt = list(range(10, 40))
    target = getattr(pair, side).engine.model
    good = target.norm.weight.clone()
    pair.send(name(0), prompt)
    if side == "decode":
        while not pair.decode.queues.of(DecodeState.RUNNING):
            pair.turn()
    target.norm.weight.fill_(float("nan"))
    pair.run()
    assert pair.ends[name(0)].kind == "BadLogits"
    assert not pair.ends[name(0)].retryable
    target.norm.weight.copy_(good)
    assert getattr(pair, side).engine.cache.num_cached == 0
    pair.send(name(1), prompt)
    pair.run()
    assert pair.tokens[name(1)] == reference(prompt)
    pair.assert_nothing_is_held()
