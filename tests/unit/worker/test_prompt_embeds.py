"""Rows of prompt embeddings between their messages and their order: bounded, dropped if they do not fit."""

import pytest
import torch
from baton.cluster.protocol.messages import YOUNG_FIELDS, PromptEmbeds, PromptRows, Reserve, Sampling
from baton.engine.kv.layouts import MHALayout
from baton.engine.kv.pool import KVPool
from baton.tests.embeds import embeddings_of
from baton.worker.identity import hello_of, layout_of
from baton.worker.prompt_embeds import EmbedsInbox
from baton.worker.refusal import Refusal
from baton.worker.room_owners import FromRouter, RoomOwners

ME, WIDTH = "aa" * 16, 8
ROWS = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
GIVEN = embeddings_of(ROWS)
ROW_BYTES = WIDTH * 4


def inbox_of(**more):
    return EmbedsInbox(**{"width": WIDTH, "dtype": torch.float32} | more)


def order(room):
    common = {"room": f"{room:032x}", "epoch": 0, "instance": ME, "sampling": Sampling(), "deadline_ms": 0}
    return Reserve(prompt_ids=[0] * 6, embeds=PromptRows(count=6, digest=bytes(32)), **common)


def part(room, start, end, epoch=0, **more):
    return PromptEmbeds(
        **{
            "room": f"{room:032x}",
            "epoch": epoch,
            "instance": ME,
            "start": start,
            "width": WIDTH,
            "dtype": "F32",
            "data": GIVEN.data[start * ROW_BYTES : end * ROW_BYTES],
        }
        | more
    )


def taken(parts, *, held=0, **more):
    inbox = inbox_of(**more)
    for each in parts:
        inbox.keep(each)
    return inbox.take(order(1), held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_become_the_rows_in_the_models_type(dtype):
    found = taken([part(1, 0, 2), part(1, 2, 5), part(1, 5, 6)], dtype=dtype)
    assert torch.equal(found, ROWS.to(dtype))


def test_a_repetition_replaces_what_came_before():
    again = [part(1, 0, 2), part(1, 2, 5)]
    assert torch.equal(taken([*again, *again, part(1, 5, 6)]), ROWS)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [part(1, 0, 5)],
        [part(1, 2, 6)],
        [part(1, 0, 2), part(1, 3, 6)],
        [part(1, 0, 2), part(1, 3, 6), part(1, 2, 6)],
        [part(1, 0, 2), part(1, 2, 6), part(1, 2, 6)],
        [part(1, 0, 6, data=GIVEN.data[:-2])],
        [part(2, 0, 6)],
        [part(1, 0, 6, epoch=1)],
    ],
    ids=["none", "end", "start", "gap", "late", "twice", "torn", "other room", "other epoch"],
)
def test_an_order_without_all_its_rows_is_refused_for_now(parts):
    inbox = inbox_of()
    for each in parts:
        inbox.keep(each)
    found = inbox.take(order(1), 0)
    assert isinstance(found, Refusal)
    assert found.retry_after_ms > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"width": 4, "data": GIVEN.data[: 6 * 16]}, "rows of 4 elements, the model takes 8"),
        ({"data": embeddings_of(torch.full((6, WIDTH), 3e38)).data}, "not finite in torch.float16"),
    ],
)
def test_rows_that_the_model_cannot_take_are_refused_for_good(more, told):
    found = taken([part(1, 0, 6, **more)], dtype=torch.float16)
    assert (found.retry_after_ms, told in found.reason) == (0, True)


def test_a_worker_that_takes_none_keeps_none():
    inbox = inbox_of(fault="off")
    inbox.keep(part(1, 0, 6))
    assert inbox.num_bytes == 0
    assert inbox.take(order(1), 0) == Refusal(reason="off", retry_after_ms=0)


def test_beyond_the_bound_the_oldest_rows_go_and_the_newest_stay():
    inbox = inbox_of(max_bytes=15 * ROW_BYTES)
    for room in (1, 2, 3):
        inbox.keep(part(room, 0, 6))
        assert inbox.num_bytes <= inbox.max_bytes
    assert isinstance(inbox.take(order(1), 0), Refusal)
    assert torch.equal(inbox.take(order(2), 0), ROWS)
    assert torch.equal(inbox.take(order(3), 0), ROWS)


@pytest.mark.parametrize(("held", "is_taken"), [(0, True), (1, False), (10 * ROW_BYTES, False)])
def test_rows_of_rooms_count_too_and_a_single_prompt_always_fits(held, is_taken):
    found = taken([part(1, 0, 6)], held=held, max_bytes=6 * ROW_BYTES)
    assert isinstance(found, torch.Tensor) == is_taken
    assert is_taken or found.retry_after_ms > 0


def test_rows_are_taken_from_the_router_of_the_room_only():
    owners = RoomOwners()
    for message in (part(1, 0, 2), part(1, 2, 6), order(1)):
        assert owners.take(FromRouter(router=0, message=message)) == message
        assert owners.take(FromRouter(router=1, message=message)) is None
    assert owners.num_foreign == 3


@pytest.mark.parametrize(
    ("embeds", "width"), [(None, 0), (inbox_of(fault="no hook"), 0), (inbox_of(), WIDTH)]
)
def test_a_hello_offers_embeddings_only_where_they_are_taken(embeds, width):
    pool = KVPool(3, MHALayout(num_layers=1, num_kv_heads=1, head_dim=4, page_size=4, dtype=torch.float32))
    layout = layout_of(pool, model_fingerprint="f", feature_ids=(), feature_width=0)
    sizes = {"model": "m", "max_context": 8, "max_running": 1, "vocab_size": 9}
    hello = hello_of(layout, pool, role="decode", instance=ME, embeds=embeds, **sizes)
    assert (hello.embeds_width, "embeds" in hello.takes, not hello.embeds_fault) == (
        width,
        width > 0,
        width > 0,
    )
    assert set(YOUNG_FIELDS) - set(hello.takes) <= {"embeds", "routed_experts"}
