"""Several routers at one worker: each room belongs to the router that opened it."""

import pytest
from baton.cluster.net.endpoints import endpoints_fault, endpoints_of
from baton.cluster.protocol.messages import (
    Cancel,
    Finished,
    Gone,
    Goodbye,
    Heartbeat,
    OfferPrefix,
    Prefill,
    Reserve,
    Sampling,
    TokenItem,
    Tokens,
    Welcome,
    WorkerStats,
)
from baton.worker.room_owners import EVERY, FromRouter, RoomOwners, RouterLost, ToRouter

ME = "aa" * 16
ROOMS = A, B, C = "01" * 16, "02" * 16, "03" * 16


def reserve(room, kind=Reserve):
    return kind(room=room, epoch=0, instance=ME, prompt_ids=[1], sampling=Sampling(), deadline_ms=0)


def owners_of(*routers):
    """Room A belongs to the first of `routers`, B to the second, and so on."""
    owners = RoomOwners()
    for room, router in zip(ROOMS, routers, strict=False):
        assert owners.take(FromRouter(router=router, message=reserve(room))) is not None
    return owners


def to(owners, message):
    return [(item.router, item.message) for item in owners.address(message)]


def finished(room):
    return Finished(room=room, epoch=0, instance=ME, reason="stop", output_tokens=1)


def item(room, seq=1):
    return TokenItem(room=room, epoch=0, seq=seq, ids=[5])


@pytest.mark.parametrize("kind", [Reserve, Prefill])
def test_messages_about_a_room_go_to_the_router_that_opened_it(kind):
    owners = RoomOwners()
    owners.take(FromRouter(router=1, message=reserve(A, kind)))
    assert to(owners, finished(A)) == [(1, finished(A))]


def test_a_prefix_is_offered_of_a_routers_own_rooms_alone():
    owners = owners_of(0, 1)
    for router, room, is_taken in ((0, A, True), (0, B, False), (1, C, True), (1, None, True)):
        order = OfferPrefix(instance=ME, transfer="0f" * 16, tokens=4, room=room)
        assert (owners.take(FromRouter(router=router, message=order)) is order) == is_taken
    assert owners.num_foreign == 1
    assert to(owners, finished(C)) == [], "an offer opens no room"


def test_messages_about_the_worker_go_to_every_router():
    owners = owners_of(0)
    for message in (Heartbeat(instance=ME, stats=WorkerStats()), Goodbye(instance=ME)):
        assert to(owners, message) == [(EVERY, message)]


def test_the_tokens_of_a_step_are_split_by_router_in_order():
    owners = owners_of(0, 1, 0)
    tokens = Tokens(instance=ME, items=[item(A), item(B), item(C), item(A, 2)])
    assert to(owners, tokens) == [
        (0, Tokens(instance=ME, items=[item(A), item(C), item(A, 2)])),
        (1, Tokens(instance=ME, items=[item(B)])),
    ]


def test_a_router_cannot_end_or_open_another_s_room():
    owners = owners_of(0)
    for message in (Cancel(room=A, epoch=0, instance=ME), reserve(A), reserve(A, Prefill)):
        assert owners.take(FromRouter(router=1, message=message)) is None
    assert owners.num_foreign == 3
    assert to(owners, finished(A)) == [(0, finished(A))], "it is still the first router's"


def test_a_cancel_of_an_unknown_room_is_answered_to_its_sender():
    owners = owners_of(0)
    assert owners.take(FromRouter(router=1, message=Cancel(room=C, epoch=0, instance=ME))) is not None
    gone = Gone(room=C, epoch=0, instance=ME)
    assert owners.address(gone) == [ToRouter(router=1, message=gone)]


def test_a_lost_router_takes_its_own_rooms_along_and_no_other():
    owners = owners_of(0, 1, 0)
    lost = owners.take(RouterLost(router=0, reason="gone"))
    assert (lost.rooms, lost.reason) == ({A, C}, "gone")
    assert to(owners, finished(A)) == []
    assert to(owners, Tokens(instance=ME, items=[item(A), item(B)])) == [
        (1, Tokens(instance=ME, items=[item(B)]))
    ]
    assert owners.take(RouterLost(router=0, reason="again")).rooms == frozenset()


def test_a_lost_room_that_its_router_opens_again_belongs_to_it_again():
    owners = owners_of(0)
    owners.take(RouterLost(router=0, reason="gone"))
    owners.take(FromRouter(router=0, message=Welcome(instance=ME, router="r")))
    owners.take(FromRouter(router=0, message=reserve(A)))
    assert to(owners, finished(A)) == [(0, finished(A))]


def test_rooms_that_are_over_are_forgotten():
    owners = owners_of(0, 1)
    owners.retain({B})
    assert to(owners, finished(A)) == []
    assert to(owners, finished(B)) == [(1, finished(B))]
    assert "1 rooms" in repr(owners)


def test_a_list_of_routers_is_separated_by_commas():
    assert endpoints_of("tcp://a:1, ipc:///b") == ("tcp://a:1", "ipc:///b")
    assert endpoints_fault("tcp://a:1, ipc:///b") == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tcp://a:1,", "names ''"),
        ("tcp://a:1,b", "names 'b'"),
        ("tcp://a:99999", "no valid port"),
        ("tcp://a:1,tcp://a:1", "twice"),
        ("", "is not an endpoint"),
    ],
)
def test_a_wrong_list_of_routers_is_refused_with_the_wrong_address(text, says):
    assert says in endpoints_fault(text)
