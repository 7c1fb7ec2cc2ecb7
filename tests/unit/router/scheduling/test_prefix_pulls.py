"""Where the beginning of a prompt comes from: pulled by prefill from decode, or computed."""

import pytest
from baton.cluster.protocol.messages import (
    PULL_DECLINED,
    PULL_LATE,
    PULL_LOST,
    PULL_OK,
    Failed,
    FirstToken,
    Heartbeat,
    HeldPrefixes,
    OfferPrefix,
    Prefill,
    PrefillTimeline,
    Reserve,
    Sampling,
    TellPrefixes,
    WorkerStats,
)
from baton.router.rooms.effects import COMPUTE, PULL, Pair
from baton.router.scheduling.cost_model import CostModel
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.placement import PairingPolicy
from baton.router.scheduling.prefix_pulls import (
    LONGEST_PATIENCE_S,
    SHORTEST_PATIENCE_S,
    SHUNNED_S,
    TRY_AGAIN_S,
    PrefixPulls,
)
from baton.router.scheduling.prefixes import SeenPrompt, expect_prompt
from baton.router.scheduling.request_state import Job
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World
from baton.tests.unit.router.workers.test_eligibility import worker
from baton.tests.unit.router.workers.test_registry import hello

IDS = list(range(1600))
PROMPT = SeenPrompt(IDS)
ENDPOINT = "tcp://10.0.0.9:7300"


def prefill(name="p", held=0, **hello):
    made = worker(name, "prefill", pulls_prefixes=True, **hello)
    expect_prompt(made, SeenPrompt(IDS[:held]), 9.0)
    return made


def decode(name="d", held=1600, endpoint=ENDPOINT, **hello):
    made = worker(name, "decode", prefix_endpoint=endpoint, **hello)
    expect_prompt(made, SeenPrompt(IDS[:held]), 9.0)
    return made


class Planner:
    """Plans for one prompt. Prefill takes `ms` milliseconds per token, a pull `pull_ms`; None: not known."""

    def __init__(self, mode="auto", *, ms=1.0, pull_ms=None):
        self.now, self.minted = 0.0, 0
        self.pulls = PrefixPulls(mode, self._mint, lambda: self.now)
        self.costs = CostModel()
        for tokens in (16, 256, 1024):
            if ms is not None:
                timeline = PrefillTimeline(prefill_ms=ms * tokens, prompt_tokens=tokens)
                self.costs.prefilled(timeline, is_local=False)
            if pull_ms is not None:
                self.costs.pulled(tokens, pull_ms * tokens / 1000)

    def _mint(self):
        self.minted += 1
        return f"{self.minted:032x}"

    def plan(self, ours=None, theirs=None, others=()):
        ours, theirs = ours or prefill(), theirs or decode()
        return self.pulls.plan(ours, theirs, PROMPT, [ours, theirs, *others], self.costs)


def test_what_decode_holds_is_pulled_where_that_is_faster():
    plan = Planner(pull_ms=0.1).plan()
    assert (plan.kind, plan.num_new) == (PULL, 16), "the last page is computed for its logits"
    pull = plan.pull
    assert (pull.tokens, pull.endpoint, pull.instance) == (1584, ENDPOINT, "d" * 32)
    assert pull.is_reader
    assert 1000 * SHORTEST_PATIENCE_S <= pull.patience_ms <= 1000 * LONGEST_PATIENCE_S
    slow = Planner(pull_ms=2.0)
    slow.pulls._tried_at[prefill().hello.fingerprint] = slow.now
    assert slow.plan().kind == COMPUTE


def test_patience_is_the_time_that_computing_would_take_within_bounds():
    assert Planner(ms=0.5, pull_ms=0.01).plan(theirs=decode(held=800)).pull.patience_ms == 400
    assert Planner(ms=0.01, pull_ms=0.001).plan().pull.patience_ms == 100
    assert Planner(ms=9.0, pull_ms=0.01).plan().pull.patience_ms == 2000


def test_only_the_part_behind_prefills_own_is_pulled_or_saved():
    planner = Planner(pull_ms=0.1)
    assert planner.plan(ours=prefill(held=1584)).kind == "", "prefill has all that decode has"
    assert planner.plan(ours=prefill(held=800)).kind == PULL
    assert planner.plan(theirs=decode(held=0)).kind == ""
    assert planner.plan(theirs=decode(held=160)).num_new == 1440


def test_a_queue_at_prefill_hides_a_slow_pull():
    """A pull runs while other prompts are computed."""
    planner = Planner(pull_ms=1.2)
    fingerprint = prefill().hello.fingerprint
    planner.pulls._tried_at[fingerprint] = 0.0
    busy = prefill()
    busy.ledger["a", 0] = worker("x", "prefill", [(0, 4000)]).ledger._loads["0", 0]
    assert planner.plan().kind == COMPUTE
    assert planner.plan(ours=busy).kind == PULL


def test_pulls_of_unknown_cost_are_tried_but_prefills_cost_must_be_known():
    assert Planner().plan().kind == PULL
    assert Planner(ms=None).plan().kind == COMPUTE
    assert Planner(ms=0.000001).plan().kind == COMPUTE, "nothing to save"
    assert Planner("always", ms=None).plan().kind == PULL
    assert Planner("off").plan().kind == ""


def test_a_pull_that_seems_too_slow_is_tried_again_after_a_while():
    planner = Planner(pull_ms=2.0)
    planner.now = TRY_AGAIN_S
    assert [planner.plan().kind for _ in range(3)] == [PULL, COMPUTE, COMPUTE]
    planner.now += TRY_AGAIN_S
    assert planner.plan().kind == PULL


def heard(planner, plan, **timeline):
    pair = Pair(prefill="p" * 32, decode="d" * 32, prefill_endpoint="", pull=plan.pull)
    planner.pulls.heard(pair, prefill(), PrefillTimeline(**timeline), planner.costs)


def test_a_failed_pull_keeps_the_pair_apart_for_longer_each_time():
    planner = Planner("always")
    for seconds in (SHUNNED_S, 2 * SHUNNED_S, 4 * SHUNNED_S):
        heard(planner, planner.plan(), pull_ms=300.0)
        assert planner.plan().kind == ""
        assert planner.plan(ours=prefill("q")).kind == PULL, "another worker may try"
        planner.now += seconds - 0.1
        assert planner.plan().kind == ""
        planner.now += 0.1
        assert planner.plan().kind == PULL
    heard(planner, planner.plan(), pull_ms=20.0, pulled_tokens=64)
    heard(planner, planner.plan(), pull_ms=300.0)
    planner.now += SHUNNED_S
    assert planner.plan().kind == PULL, "a success ends it"


def test_a_declined_pull_is_no_failure_and_measured_pulls_are_learned():
    planner = Planner()
    heard(planner, planner.plan(), pull_ms=3.0)
    assert planner.plan().kind == PULL
    for tokens in (160, 800, 1584):
        heard(planner, planner.plan(), pull_ms=0.1 * tokens, pulled_tokens=tokens)
    assert planner.costs.pull.at(1000) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("pull_end", "is_shunned"),
    [(PULL_OK, False), (PULL_DECLINED, False), (PULL_LATE, True), (PULL_LOST, True), ("of later", False)],
)
def test_only_a_pull_that_failed_keeps_the_pair_apart(pull_end, is_shunned):
    """The wait may be that of a running forward, and a pull may only have to confirm what is there."""
    for pull_ms in (3.0, 400.0):
        planner = Planner("always")
        heard(planner, planner.plan(), pull_ms=pull_ms, pull_end=pull_end)
        assert (planner.plan().kind == "") == is_shunned


def test_a_confirmation_ends_the_time_apart():
    planner = Planner("always")
    for end in (PULL_LOST, PULL_OK, PULL_LOST):
        heard(planner, planner.plan(), pull_ms=100.0, pull_end=end)
        planner.now += SHUNNED_S
        assert planner.plan().kind == PULL, "the time does not double"


def test_a_worker_is_reached_where_its_address_leads_and_its_pages_fit():
    planner = Planner("always")
    near = decode(endpoint="tcp://127.0.0.1:7300", host="a")
    assert planner.plan(ours=prefill(host="a"), theirs=near).kind == PULL
    assert planner.plan(ours=prefill(host="b"), theirs=near).kind == ""
    assert planner.plan(theirs=decode(endpoint="")).kind == ""
    assert planner.plan(theirs=decode(fingerprint="other")).kind == ""
    old = worker("o", "prefill")
    assert planner.plan(ours=old).kind == ""


def test_a_reader_of_features_gets_them_from_itself_alone():
    """Pages of another decode worker have no features, and the reader lacks the draft state."""
    planner, other = Planner("always"), decode("e")
    reads = decode(held=160, feature_ids=(1,))
    plan = planner.plan(theirs=reads, others=[other])
    assert (plan.pull.instance, plan.pull.tokens, plan.pull.is_reader) == ("d" * 32, 160, True)
    plan = planner.plan(theirs=decode(held=160), others=[other])
    assert (plan.pull.instance, plan.pull.tokens, plan.pull.is_reader) == ("e" * 32, 1584, False)


# --- through the dispatcher ---------------------------------------------------------------------------------


class Cluster(World):
    """A prefill worker that pulls, and a decode worker that offers and holds the prompt of `submit`."""

    def __init__(self, mode="always", **decode):
        super().__init__(policy=PairingPolicy(prefix_pulls=mode))
        for identity, instance, role, more in (
            (b"p", P, "prefill", {"pulls_prefixes": True}),
            (b"d", D, "decode", {"prefix_endpoint": ENDPOINT, **decode}),
        ):
            takes = ("routed_experts", "prompt_logprobs")
            self.add(identity, instance, role, tells_prefixes=True, page_size=4, takes=takes, **more)
        names = b"".join(SeenPrompt([5] * 16).names(self.worker(D).prefixes.scheme))
        self.tell(D, 0, is_first=True, added=names)

    def add(self, identity, instance, role, **more):
        message = hello(instance=instance, role=role, **more)
        self.dispatcher.on_message(identity, message)
        stats = WorkerStats(pages_total=message.pages_total, pages_free=message.pages_total)
        self.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))

    def worker(self, instance):
        return self.dispatcher.registry.get(instance)

    def tell(self, instance, seq, **more):
        identity = b"p" if instance == P else b"d"
        message = HeldPrefixes(instance=instance, seq=seq, root=bytes(32), **more)
        self.dispatcher.on_message(identity, message)


def test_the_orders_of_a_pull_name_one_transfer_and_its_room():
    cluster = Cluster()
    (entry,), _ = cluster.submit(16)
    (order,), (offer,), (reserve,) = (
        cluster.of(b"p", Prefill), cluster.of(b"d", OfferPrefix), cluster.of(b"d", Reserve)
    )  # fmt: skip
    assert order.pull.transfer == offer.transfer
    assert order.pull.tokens == offer.tokens == 12
    assert (offer.room, offer.epoch) == (reserve.room, reserve.epoch) == (entry.room.room, 0)
    assert offer.prompt_ids == []
    assert cluster.sent[b"d"].index(reserve) < cluster.sent[b"d"].index(offer), "the room must be there"
    assert not order.wants_features
    assert cluster.dispatcher.events["prefix_pull"] == 1
    assert cluster.worker(P).num_tokens == 4


def test_rows_that_a_client_asks_for_are_not_pulled():
    for asked in ({"routed_experts": 0}, {"prompt_logprobs": 0}):
        cluster = Cluster()
        sampling = Sampling(max_new_tokens=16, **asked)
        job = Job(prompt_ids=[5] * 16, sampling=sampling, arrived=0.0, tokenize_s=0.0)
        cluster.dispatcher.submit([job], Inbox(lambda: 0.0))
        (order,) = cluster.of(b"p", Prefill)
        assert order.pull is None
        assert not cluster.of(b"d", OfferPrefix)


def test_an_attempt_behind_a_failed_one_pulls_nothing():
    cluster = Cluster()
    (entry,), _ = cluster.submit(16)
    failed = Failed(
        room=entry.room.room, epoch=0, instance=D, kind="TransferError", message="", retryable=True
    )
    cluster.dispatcher.on_message(b"d", failed)
    orders = cluster.of(b"p", Prefill)
    assert [(order.epoch, order.pull is None) for order in orders] == [(0, False), (1, True)]


def test_a_router_that_missed_a_message_asks_the_worker():
    cluster = Cluster()
    cluster.tell(D, 5)
    assert [message.instance for message in cluster.of(b"d", TellPrefixes)] == [D]
    assert cluster.dispatcher.events["prefix_news_lost"] == 1
    assert cluster.of(b"p", TellPrefixes) == []


def test_pulled_tokens_count_as_cached_for_the_client():
    cluster = Cluster()
    (entry,), _ = cluster.submit(16)
    first = FirstToken(
        room=entry.room.room, epoch=0, instance=P, token=9,
        timeline=PrefillTimeline(prompt_tokens=16, cached_tokens=12, pulled_tokens=12, pull_ms=2.0),
    )  # fmt: skip
    cluster.dispatcher.on_message(b"p", first)
    assert entry.room.cached_tokens == 12
    costs = cluster.dispatcher._placer._cost_model_of(cluster.worker(P))
    assert costs.pull.num_samples == 1


def test_an_idle_answer_is_expected_at_decode_before_it_tells_of_it():
    cluster = Cluster()
    (entry,), _ = cluster.submit(16)
    cluster.finish(entry.room.room)
    whole = SeenPrompt([*entry.room.prompt_ids, *entry.room.output_ids, *range(8)])
    view = cluster.worker(D).prefixes
    assert view.num_held(whole.names(view.scheme)) == (16 + 2 - 1) // 4


def test_nothing_is_hashed_or_ordered_where_pulls_are_off():
    cluster = Cluster("off")
    (entry,), _ = cluster.submit(16)
    assert cluster.of(b"d", OfferPrefix) == []
    assert entry.prompt._names == {}
