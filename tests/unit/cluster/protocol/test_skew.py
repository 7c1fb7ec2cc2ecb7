"""Workers of two versions side by side: a field that one does not know is never lost in silence."""

import msgspec
import pytest
from baton.cluster.protocol.messages import (
    YOUNG_FIELDS,
    Failed,
    FirstToken,
    Heartbeat,
    Prefill,
    Reserve,
    Reserved,
    Sampling,
    WorkerStats,
)
from baton.router.errors import ApiError
from baton.router.http.rate_limits import Caller
from baton.router.rooms.effects import Deliver, Failure
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_limits import SAID
from baton.router.scheduling.request_state import Job
from baton.tests.embeds import embeddings_of
from baton.tests.unit.router.scheduling.test_dispatcher import World, events
from baton.tests.unit.router.workers.test_registry import hello

ASKING = {
    "min_new_tokens": {"sampling": Sampling(min_new_tokens=2)},
    "prompt_logprobs": {"sampling": Sampling(prompt_logprobs=1)},
    "routed_experts": {"sampling": Sampling(routed_experts=0)},
    "grammar": {"sampling": Sampling(grammar='{"grammars":[]}')},
    "salt": {"caller": Caller(id="a" * 8, salt="5a")},
    "embeds": {"embeds": embeddings_of([[1.0, 2.0]] * 8)},
}
# Of protocol 1 from its first day on.
OLD = {
    Sampling: (
        "temperature", "top_k", "top_p", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty",
        "logit_bias", "seed", "max_new_tokens", "stop_token_ids", "ignore_eos", "logprobs",
    ),
    Reserve: (
        "room", "epoch", "instance", "prompt_ids", "num_output", "sampling", "deadline_ms",
        "prefill_endpoint",
        "prefill_instance",
    ),
    Prefill: ("room", "epoch", "instance", "prompt_ids", "num_output", "sampling", "deadline_ms"),
}  # fmt: skip
# without which the answer is the same
HARMLESS = (
    "traceparent", "tracestate", "may_record", "request_id", "priority", "expected_output", "granted_output",
    "shares", "waited_ms", "keeps_pages", "pull", "wants_features",
)  # fmt: skip


class Fleet(World):
    """Pairs of workers by name, of which the first letter is the role."""

    def add(self, name, takes=YOUNG_FIELDS, **more):
        role, identity = {"p": "prefill", "d": "decode"}[name[0]], name.encode()
        message = hello(instance=instance_of(name), role=role, takes=takes, **more)
        self.sent.setdefault(identity, [])
        self.dispatcher.on_message(identity, message)
        stats = WorkerStats(pages_total=message.pages_total, pages_free=message.pages_total)
        self.dispatcher.on_message(identity, Heartbeat(instance=message.instance, stats=stats))
        return self

    def ask(self, **more):
        inbox = Inbox(lambda: self.now)
        job = Job(
            **{"prompt_ids": [5] * 8, "sampling": Sampling(), "arrived": self.now, "tokenize_s": 0.0} | more
        )
        [entry] = self.dispatcher.submit([job], inbox)
        return entry, inbox

    def asked(self):
        """The workers that got an order of a room."""
        return {name.decode() for name in self.sent if self.of(name, Reserve) or self.of(name, Prefill)}

    def lose(self, *names):
        self.dispatcher.lose([self.dispatcher.registry.get(instance_of(name)) for name in names])


def instance_of(name):
    return name.encode().hex().ljust(32, "0")


def old_and_new():
    return Fleet().add("p1", takes=()).add("d1", takes=()).add("p2").add("d2")


@pytest.mark.parametrize("kind", OLD, ids=lambda kind: kind.__name__)
def test_every_field_of_an_order_is_old_or_announced_or_changes_no_answer(kind):
    names = [field.name for field in msgspec.structs.fields(kind)]
    assert [name for name in names if name not in (*OLD[kind], *HARMLESS)] == [
        n for n in YOUNG_FIELDS if n in names
    ]
    assert set(SAID) == set(ASKING) == set(YOUNG_FIELDS)


@pytest.mark.parametrize("field", YOUNG_FIELDS)
def test_a_field_unknown_to_all_workers_is_a_503_that_names_it(field):
    fleet = Fleet().add("p1", takes=()).add("d1", takes=())
    with pytest.raises(ApiError) as caught:
        fleet.ask(**ASKING[field])
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert f"does not know {SAID[field]}." in str(caught.value)
    assert fleet.asked() == set()
    assert fleet.dispatcher.num_open == 0
    fleet.ask()
    assert fleet.asked() == {"p1", "d1"}, "what they know they serve"


@pytest.mark.parametrize("field", YOUNG_FIELDS)
def test_a_new_field_goes_to_workers_that_know_it_however_full(field):
    fleet = old_and_new()
    for _ in range(3):
        fleet.ask(**ASKING[field])
    assert fleet.asked() == {"p2", "d2"}
    fleet.ask()
    assert fleet.asked() == {"p1", "d1", "p2", "d2"}


@pytest.mark.parametrize("old", ["p1", "d1"])
def test_a_pair_with_an_older_worker_is_no_pair_for_a_new_field(old):
    fleet = (
        Fleet()
        .add("p1", takes=() if old == "p1" else YOUNG_FIELDS)
        .add("d1", takes=() if old == "d1" else YOUNG_FIELDS)
    )
    with pytest.raises(ApiError, match="does not know response_format, tools and other grammars"):
        fleet.ask(**ASKING["grammar"])
    assert fleet.asked() == set()


def test_a_request_that_failed_is_not_put_on_older_workers_the_next_time():
    fleet = old_and_new()
    entry, inbox = fleet.ask(**ASKING["grammar"])
    failed = Failed(
        room=entry.room.room,
        epoch=0,
        instance=instance_of("d2"),
        kind="BadLogits",
        message="x",
        retryable=True,
    )
    fleet.dispatcher.on_message(b"d2", failed)
    fleet.now += 1.0
    fleet.dispatcher.tick()
    assert [order.epoch for order in fleet.of(b"d2", Reserve)] == [0, 1]
    fleet.lose("p2", "d2")
    [broken] = [event for event in events(inbox) if isinstance(event, Failure)]
    assert broken.kind == "NoWorkers"
    assert "does not know response_format, tools and other grammars" in broken.message
    assert fleet.asked() == {"p2", "d2"}


def test_a_stream_waits_for_workers_that_know_its_fields_and_resumes():
    fleet = old_and_new()
    entry, inbox = fleet.ask(**ASKING["min_new_tokens"])
    room = {"room": entry.room.room, "epoch": 0}
    fleet.dispatcher.on_message(b"d2", Reserved(instance=instance_of("d2"), **room))
    fleet.dispatcher.on_message(b"p2", FirstToken(instance=instance_of("p2"), token=9, **room))
    fleet.lose("p2", "d2")
    for _ in range(3):
        fleet.now += 1.0
        fleet.dispatcher.tick()
    assert events(inbox) == [Deliver([9], [])]
    assert fleet.asked() == {"p2", "d2"}
    fleet.add("p3").add("d3")
    fleet.now += 1.0
    fleet.dispatcher.tick()
    assert fleet.asked() == {"p2", "d2", "p3", "d3"}
    [order] = fleet.of(b"d3", Reserve)
    assert (order.sampling.min_new_tokens, order.num_output) == (1, 1), "one of the two is there"
