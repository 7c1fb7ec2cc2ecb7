"""Orders with prompt embeddings: rows precede them at every attempt, and are counted while they are held."""

from unittest.mock import patch

import pytest
import torch
from baton.cluster.protocol.messages import (
    YOUNG_FIELDS,
    Failed,
    FirstToken,
    Heartbeat,
    Prefill,
    PromptEmbeds,
    Reserve,
    Reserved,
    Sampling,
    WorkerStats,
)
from baton.engine.kv.page_names import PageScheme
from baton.router.answers.answer import error_of
from baton.router.errors import ApiError
from baton.router.http.rate_limits import Caller
from baton.router.scheduling import admission_queue
from baton.router.scheduling.inbox import Inbox
from baton.router.scheduling.request_limits import embeds_width
from baton.router.scheduling.request_state import Job
from baton.router.workers.eligibility import live_pairs
from baton.tests.embeds import embeddings_of
from baton.tests.unit.router.scheduling.test_dispatcher import D, P, World, events
from baton.tests.unit.router.workers.test_registry import hello
from msgspec.structs import replace

WIDE = embeddings_of(torch.ones(16, 40_000))  # 2.5 MB: three messages
TAKES = {"takes": YOUNG_FIELDS, "embeds_width": 40_000}


class Embedding(World):
    """Workers that take embeddings, and requests with WIDE as their prompt."""

    def join(self, feature_width=5, prefill=TAKES, decode=TAKES):
        self.add(b"p", P, "prefill", **prefill)
        return self.add(b"d", D, "decode", **{"feature_width": feature_width} | decode)

    def add(self, identity, instance, role, **more):
        more = {"feature_width": 5} | more if role == "prefill" else more
        message = hello(instance=instance, role=role, **more)
        stats = WorkerStats(pages_total=message.pages_total, pages_free=message.pages_total)
        self.dispatcher.on_message(identity, message)
        self.dispatcher.on_message(identity, Heartbeat(instance=instance, stats=stats))
        return self

    def ask(self, number=1, salt=""):
        job = Job(
            prompt_ids=[0] * 16,
            sampling=Sampling(),
            arrived=self.now,
            tokenize_s=0.0,
            caller=Caller(id="a" * 8, salt=salt),
            embeds=WIDE,
        )
        return self.dispatcher.submit([job] * number, Inbox(lambda: self.now))

    def orders(self, identity):
        """(kind, epoch) of what a worker got of rooms."""
        kinds = (Reserve, Prefill, PromptEmbeds)
        return [(type(m), m.epoch) for m in self.sent[identity] if isinstance(m, kinds)]


def rows_then(kind, *epochs):
    return [each for epoch in epochs for each in ([(PromptEmbeds, epoch)] * 3 + [(kind, epoch)])]


def test_rows_come_before_the_order_to_both_workers():
    world = Embedding().join()
    world.ask(salt="5a")
    assert world.orders(b"p") == rows_then(Prefill, 0)
    assert world.orders(b"d") == rows_then(Reserve, 0)
    for identity, kind in ((b"p", Prefill), (b"d", Reserve)):
        (order,) = world.of(identity, kind)
        assert (order.embeds, order.salt, order.prompt_ids) == (WIDE.rows, "5a", [0] * 16)
        assert b"".join(part.data for part in world.of(identity, PromptEmbeds)) == WIDE.data


def test_workers_may_not_record_a_prompt_that_has_no_ids():
    world = Embedding().join()
    job = Job(prompt_ids=[0] * 16, sampling=Sampling(), arrived=0.0, tokenize_s=0.0, may_record=True)
    for embeds in (None, WIDE):
        world.dispatcher.submit([replace(job, embeds=embeds)], Inbox(lambda: world.now))
    assert [order.may_record for order in world.of(b"d", Reserve)] == [True, False]


def test_decode_gets_no_rows_that_its_drafter_does_not_read():
    world = Embedding().join(feature_width=0)
    world.ask()
    assert world.orders(b"p") == rows_then(Prefill, 0)
    assert world.orders(b"d") == [(Reserve, 0)]
    assert world.of(b"d", Reserve)[0].embeds == WIDE.rows


def test_rows_come_again_with_every_attempt_also_behind_output():
    world = Embedding().join()
    (entry,) = world.ask()
    room = {"room": entry.room.room, "epoch": 0}
    world.dispatcher.on_message(b"d", Reserved(instance=D, **room))
    world.dispatcher.on_message(b"p", FirstToken(instance=P, token=9, **room))
    failed = Failed(instance=D, kind="TransferTimeout", message="", retryable=True, **room)
    world.dispatcher.on_message(b"d", failed)
    assert world.orders(b"p") == rows_then(Prefill, 0, 1)
    assert world.orders(b"d") == rows_then(Reserve, 0, 1)
    assert world.of(b"d", Reserve)[1].prompt_ids == [0] * 16 + [9]


def test_a_worker_that_missed_a_message_gets_the_rows_again():
    world = Embedding().join()
    world.ask()
    missed = hello(instance=P, role="prefill", feature_width=5, missed=1, **TAKES)
    world.dispatcher.on_message(b"p", missed)
    assert world.orders(b"p") == rows_then(Prefill, 0, 0)


def test_held_rows_are_counted_per_choice_until_the_request_ends():
    world = Embedding(max_queue=100).join()
    with patch.object(admission_queue, "MAX_EMBEDS_BYTES", 5 * len(WIDE.data)):
        first = world.ask(3)
        second = world.ask(2)
        with pytest.raises(ApiError, match="fill the memory for them") as caught:
            world.ask()
        assert caught.value.status == 429
        world.submit(8)  # a prompt of ids needs no such memory
        for entry in first[:2]:
            world.dispatcher.client_left(entry)
        with pytest.raises(ApiError):
            world.ask()
        world.dispatcher.client_left(first[2])
        assert len(world.ask(3)) == 3
        for entry in second:
            world.dispatcher.client_left(entry)


def test_a_single_request_is_held_however_large():
    world = Embedding(max_queue=100).join()
    with patch.object(admission_queue, "MAX_EMBEDS_BYTES", 1):
        world.ask(3)
        with pytest.raises(ApiError):
            world.ask()


def test_embeddings_that_break_the_model_are_a_400_and_no_workers_fault():
    world = Embedding().join()
    inbox = Inbox(lambda: world.now)
    job = Job(prompt_ids=[0] * 16, sampling=Sampling(), arrived=0.0, tokenize_s=0.0, embeds=WIDE)
    (entry,) = world.dispatcher.submit([job], inbox)
    room = {"room": entry.room.room, "epoch": 0}
    failed = Failed(instance=P, kind="BadEmbeds", message="on host-7", retryable=False, **room)
    world.dispatcher.on_message(b"p", failed)
    (failure,) = events(inbox)
    error = error_of(failure)
    assert (error.status, error.body.param) == (400, "prompt_embeds")
    assert "host-7" not in error.body.message


OFF = {"takes": YOUNG_FIELDS[:-1], "embeds_fault": "the workers run without --prompt-embeds"}
HOOKLESS = {"takes": YOUNG_FIELDS[:-1], "embeds_fault": "ToyModel takes no input_embeds"}


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "told"),
    [
        (OFF, OFF, 400, "the workers run without --prompt-embeds"),
        (TAKES, OFF, 400, "the workers run without --prompt-embeds"),
        (HOOKLESS, HOOKLESS, 400, "ToyModel takes no input_embeds. Send prompt."),
        ({"takes": ()}, TAKES, 503, "an older version, which does not know prompt_embeds"),
    ],
)
def test_pairs_that_take_no_embeddings_say_why(prefill, decode, status, told):
    world = Embedding().join(prefill=prefill, decode=decode)
    with pytest.raises(ApiError) as caught:
        embeds_width(live_pairs(world.dispatcher.registry))
    assert (caught.value.status, told in caught.value.body.message) == (status, True), caught.value


def test_embeddings_go_to_the_one_pair_that_takes_them():
    world = Embedding().join(prefill=OFF, decode=OFF)
    world.sent |= {b"p2": [], b"d2": []}
    world.add(b"p2", "3" * 32, "prefill", **TAKES)
    world.add(b"d2", "4" * 32, "decode", feature_width=5, **TAKES)
    assert embeds_width(live_pairs(world.dispatcher.registry)) == 40_000
    for _ in range(3):
        world.ask()
    assert world.orders(b"p") == world.orders(b"d") == []
    assert len(world.of(b"p2", Prefill)) == len(world.of(b"d2", Reserve)) == 3


def test_the_prefix_view_tells_embeddings_from_ids_and_from_each_other():
    world = Embedding().join()
    (entry,) = world.ask()
    other = Job(prompt_ids=[0] * 16, sampling=Sampling(), arrived=0.0, tokenize_s=0.0)
    names = {each.salt for each in (entry.job, other)}
    assert len(names) == 2
    scheme = PageScheme(root=bytes(32), page_size=4)
    ids = type(entry.prompt)([0] * 16, other.salt)
    assert list(entry.prompt.names(scheme)) != list(ids.names(scheme))
