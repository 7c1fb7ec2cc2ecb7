"""The pairs that are eligible for a request."""

from baton.cluster.protocol.messages import WorkerStats
from baton.router.scheduling.balancing import Balancer, decode_load, prefill_load
from baton.router.scheduling.placement import choose
from baton.router.scheduling.prefixes import SeenPrompt
from baton.router.workers.eligibility import Need, able_pairs, can_ever, is_ready, limits, pairs, why_not_pair
from baton.router.workers.registry import Load, Worker
from baton.tests.unit.router.workers.test_registry import hello


def worker(name, role, load=(), *, is_serving=True, **more):
    made = Worker(hello(instance=name * 32, role=role, **more), name.encode(), 0.0)
    if is_serving:
        stats = WorkerStats(pages_total=made.hello.pages_total, pages_free=made.hello.pages_total)
        made.take_heartbeat(stats, 0.0)
    for i, (pages, tokens) in enumerate(load):
        made.ledger[str(i), 0] = Load(pages, tokens)
    return made


NEED = Need(100, 28)  # 8 pages of 16


def chosen(workers, need=NEED, avoid=(), taken=()):
    able = able_pairs(pairs(workers, avoid), need, avoid, taken)
    if not able:
        return None
    prefill, decode = choose(able, Balancer(prefill_load), Balancer(decode_load), SeenPrompt([]))
    return prefill.instance[0], decode.instance[0]


def test_only_equal_fingerprints_are_paired():
    p, d = worker("a", "prefill", fingerprint="x"), worker("b", "decode", fingerprint="y")
    assert not is_ready([p, d])
    assert chosen([p, d]) is None
    assert chosen([p, d, worker("c", "decode", fingerprint="x")]) == ("a", "c")


def test_a_role_alone_or_a_worker_that_does_not_serve_is_no_pair():
    p, d = worker("a", "prefill"), worker("b", "decode")
    assert not is_ready([p])
    assert not is_ready([d])
    assert not is_ready([p, worker("b", "decode", is_serving=False)])
    d.is_draining = True
    assert not is_ready([p, d])


def test_least_loaded_wins_on_both_sides():
    busy_p, idle_p = worker("a", "prefill", [(0, 500)]), worker("b", "prefill")
    busy_d, idle_d = worker("c", "decode", [(1, 1), (1, 1)]), worker("d", "decode", [(9, 1)])
    assert chosen([busy_p, idle_p, busy_d, idle_d]) == ("b", "d")


def test_full_decode_is_passed_over_and_all_full_is_none():
    p = worker("a", "prefill")
    no_pages, no_slot = worker("b", "decode", [(93, 1)]), worker("c", "decode", [(0, 1)] * 8)
    assert chosen([p, no_pages, no_slot]) is None
    assert chosen([p, worker("b", "decode", [(92, 1)]), no_slot]) == ("a", "b")


def test_decode_without_a_limit_on_running_rooms_takes_many():
    assert chosen([worker("a", "prefill"), worker("b", "decode", [(0, 1)] * 50, max_running=0)]) == ("a", "b")


def test_failed_workers_are_the_last_choice():
    p, used, fresh = worker("a", "prefill"), worker("b", "decode"), worker("c", "decode", [(1, 1)])
    assert chosen([p, used, fresh]) == ("a", "b")
    assert chosen([p, used, fresh], avoid={"b" * 32}) == ("a", "c")
    assert chosen([p, used], avoid={"b" * 32}) == ("a", "b")


def test_context_of_either_side_binds():
    assert chosen([worker("a", "prefill", max_context=127), worker("b", "decode")]) is None
    assert chosen([worker("a", "prefill"), worker("b", "decode", max_context=127)]) is None
    assert chosen([worker("a", "prefill", max_context=128), worker("b", "decode", max_context=128)]) == (
        "a",
        "b",
    )


def test_limits_are_the_largest_over_pairs_and_none_without():
    p, small, big = (
        worker("a", "prefill"),
        worker("b", "decode"),
        worker("c", "decode", pages_total=200, spec_tokens=4),
    )
    assert limits([p]) is None
    found = limits([p, small, big])
    assert (found.context, found.decode_tokens, found.prefill_tokens) == (1024, 3196, 1600)


def test_can_ever_ignores_load_but_not_size():
    p, d = worker("a", "prefill", [(0, 9999)]), worker("b", "decode", [(100, 1)] * 8)
    assert can_ever(pairs([p, d]), NEED)
    assert can_ever(pairs([p, d]), Need(1000, 24))
    assert not can_ever(pairs([p, d]), Need(1000, 25))
    assert not can_ever(pairs([p, worker("b", "decode", pages_total=7)]), NEED)


def local(name, **more):
    made = worker(name, "decode", **more)
    made.takes_prompts = True
    return made


def test_decode_computes_prompts_only_without_a_prefill_of_its_fingerprint():
    d = local("d", fingerprint="x")
    assert is_ready([d])
    assert chosen([d]) == ("d", "d")
    assert chosen([d, worker("p", "prefill", fingerprint="y")]) == ("d", "d")
    assert chosen([d, worker("p", "prefill", fingerprint="x")]) == ("p", "d")
    assert chosen([d, worker("p", "prefill", fingerprint="x", is_serving=False)]) == ("d", "d")
    assert limits([d]).prefill_tokens == limits([d, worker("p", "prefill", fingerprint="x")]).prefill_tokens


def test_an_aggregated_worker_pairs_with_itself_beside_prefill_workers():
    p, d = worker("p", "prefill"), worker("d", "decode")
    d.is_aggregated = d.takes_prompts = True
    assert {(one.instance[0], other.instance[0]) for one, other in pairs([p, d])} == {("p", "d"), ("d", "d")}
    assert chosen([p, d], avoid=[p.instance]) == ("d", "d")


def test_decode_computes_a_prompt_that_failed_on_every_prefill_worker():
    p, q, d = worker("p", "prefill"), worker("q", "prefill"), local("d")
    ids = [w.instance for w in (p, q, d)]
    assert chosen([p, q, d], avoid=ids[:1]) == ("q", "d")
    assert chosen([p, q, d], avoid=ids[:2]) == ("d", "d")
    assert chosen([p, q, d], avoid=ids) == ("d", "d"), "one doubtful worker is better than two"


def test_a_busy_prefill_worker_is_awaited_and_not_replaced_by_decode():
    p, q, d = worker("p", "prefill"), worker("q", "prefill"), local("d")
    ids = [w.instance for w in (p, q, d)]
    assert chosen([p, q, d], taken=ids[:1]) == ("q", "d")
    assert chosen([p, q, d], taken=ids[:2]) == ("p", "d")
    assert chosen([p, q, d], avoid=ids[:1], taken=ids[1:2]) == ("q", "d"), "nobody goes back to who failed it"
    assert chosen([p, q, d], avoid=ids[:2], taken=ids[2:]) == ("d", "d")


def test_a_decode_worker_that_must_not_take_prompts_is_no_pair_alone():
    assert chosen([worker("d", "decode")]) is None


def test_a_started_request_resumes_only_on_workers_of_its_fingerprint():
    old = [worker("a", "prefill", fingerprint="x"), worker("b", "decode", [(9, 1)] * 3, fingerprint="x")]
    new = [worker("c", "prefill", fingerprint="y"), worker("d", "decode", fingerprint="y")]
    assert chosen(old + new) == ("c", "d"), "two versions side by side"
    assert chosen(old + new, Need(100, 28, "x")) == ("a", "b")
    assert chosen(new, Need(100, 28, "x")) is None
    assert can_ever(pairs(old + new), Need(100, 28, "x"))
    assert not can_ever(pairs(new), Need(100, 28, "x"))


def test_decode_pairs_with_prefill_that_offers_the_layers_of_its_head():
    p = worker("a", "prefill", feature_ids=(1, 5, 8, 2), feature_width=256)
    plain, some = worker("b", "decode"), worker("c", "decode", feature_ids=(8, 1), feature_width=128)
    other = worker("d", "decode", feature_ids=(8, 3), feature_width=128)
    assert [bool(why_not_pair(p, d)) for d in (plain, some, other)] == [False, False, True]
    assert "[1, 5, 8, 2]" in why_not_pair(p, other)
    assert "[8, 3]" in why_not_pair(p, other)
    assert list(pairs([p, plain, some, other])) == [(p, plain), (p, some)]
    assert not is_ready([worker("a", "prefill"), some])


def test_workers_of_other_weights_pair_until_both_hashes_are_known():
    p, d = worker("a", "prefill"), worker("b", "decode")
    for ours, theirs, is_pair in (("x", "", True), ("", "y", True), ("x", "y", False), ("x", "x", True)):
        for made, text in ((p, ours), (d, theirs)):
            made.take_heartbeat(WorkerStats(pages_total=100, pages_free=100, weights_hash=text), 0.0)
        assert is_ready([p, d]) is is_pair
        assert bool(why_not_pair(p, d)) is not is_pair


def test_a_started_request_does_not_resume_on_other_weights():
    p, d = worker("a", "prefill"), worker("b", "decode")
    for made in (p, d):
        made.take_heartbeat(WorkerStats(pages_total=100, pages_free=100, weights_hash="x"), 0.0)
    assert chosen([p, d], Need(100, 28, "f", (), "x")) == ("a", "b")
    assert chosen([p, d], Need(100, 28, "f", (), "y")) is None
    assert chosen([p, d], Need(100, 28, "f")) == ("a", "b")


def test_decode_that_grows_is_booked_with_the_first_pages_of_a_request():
    sizes = {"ahead_tokens": 32, "spec_tokens": 4}
    prefill, decode = worker("a", "prefill"), worker("b", "decode", grows=True, **sizes)
    pages = {expected: Need(16, 512, expected=expected).held_on(decode) - 16 for expected in (1, 35, 37, 0)}
    assert pages == {1: 36, 35: 36, 37: 37, 0: 512}
    assert Need(16, 7, expected=1).held_on(decode) == 23, "never more than its output"
    assert Need(16, 512, expected=1).held_on(prefill) == 528, "it holds all of it"


def test_what_fits_is_bounded_by_the_pool_of_decode():
    p, d = worker("a", "prefill"), worker("b", "decode", pages_total=20, page_size=16, max_context=8192)
    found = limits([p, d])
    assert (found.decode_tokens, found.fitting) == (320, 320)
    roomy = limits([p, d, worker("c", "decode", pages_total=4096, page_size=16, max_context=512)])
    assert roomy.fitting == roomy.context <= 8192
