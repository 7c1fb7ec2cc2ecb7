"""A KV connection breaks, any number of times: what was under way on it is asked for again at once."""

import pytest
from baton.cluster.protocol import messages as m
from baton.kvtransfer.protocol.peer_link import ANSWER_S
from baton.kvtransfer.protocol.receiver import IDLE_LINK_S, ReceiverSession
from baton.kvtransfer.protocol.session import (
    LEASE_S,
    MAX_REPULLS,
    REMIND_S,
    SILENCE_S,
    CloseLink,
    SendMessage,
)
from baton.tests.unit.kvtransfer.protocol import test_sender as prefill
from baton.tests.unit.kvtransfer.protocol.test_receiver import (
    HELLO,
    OTHER,
    ROOM,
    D,
    announce,
    events,
    land,
    new_session,
    pulled,
    request,
    sent,
    welcome,
)

RESTARTED = "f" * 32


@pytest.fixture
def pulling() -> ReceiverSession:
    """ROOM with blocks 0 to 2 in flight."""
    session = new_session()
    session.pull(request(), 0.0)
    welcome(session)
    assert pulled(session.receive("p", announce(12, 5), 0.0)) == [0, 1, 2]
    return session


def test_blocks_in_flight_are_pulled_again_after_hello_and_attach(pulling: ReceiverSession) -> None:
    land(pulling, 1)
    effects = pulling.link_lost("p", 0.2)
    assert effects[0] == HELLO
    assert [type(effect.message) for effect in effects] == [m.KVHello, m.Attach, m.Pull, m.Pull]
    assert pulled(effects) == [0, 2]
    assert pulling.counters.repulls == 2


def test_a_block_that_went_down_with_connections_keeps_its_repeats(pulling: ReceiverSession) -> None:
    now = 0.0
    for _ in range(2 * MAX_REPULLS + 1):
        now += 0.1
        assert pulled(pulling.link_lost("p", now)) == [0, 1, 2]
        welcome(pulling, now=now)
    for _ in range(MAX_REPULLS):
        now += SILENCE_S
        welcome(pulling, now=now)
        assert pulled(pulling.tick(now)) == [0, 1, 2], "they wait for an answer, and none comes"
    assert pulled(pulling.tick(now + SILENCE_S)) == []


def test_connections_that_break_for_ever_do_not_keep_a_room_open(pulling: ReceiverSession) -> None:
    """Only what lands is progress."""
    now, lost = 0.0, []
    while not lost:
        now += 0.25
        assert now < 10, "its lease ends it"
        pulling.link_lost("p", now)
        welcome(pulling, now=now)
        lost = events(pulling.tick(now))
    assert [event.kind for event in lost] == ["TransferTimeout"]


def test_a_room_that_is_not_attached_sends_only_a_hello() -> None:
    session = new_session()
    session.pull(request(), 0.0)
    assert session.link_lost("p", 0.1) == [HELLO]


def test_a_connection_lost_after_the_last_release_is_opened_again(
    pulling: ReceiverSession,
) -> None:
    for block in range(3):
        effects = land(pulling, block, now=1.0)
    (release,) = sent(effects, m.Release)
    assert pulling.num_rooms == 0
    assert pulling.link_lost("p", 1.1) == [HELLO]
    welcome(pulling, now=1.2)
    assert sent(pulling.receive("p", announce(12, 5), 1.5), m.Release) == [release], "it was reminded"
    assert pulling.link_lost("p", 1.0 + LEASE_S) == [], "its lease is over"


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_peer_silent_after_the_last_release_is_called_for_one_lease(
    pulling: ReceiverSession, is_answered: bool
) -> None:
    for block in range(3):
        land(pulling, block, now=1.0)
    pulling.link_lost("p", 1.1)
    if is_answered:
        welcome(pulling, now=1.2)
    end = 1.0 + (IDLE_LINK_S if is_answered else LEASE_S)
    assert pulling.next_deadline() == end
    assert pulling.tick(end - 0.01) == []
    assert pulling.tick(end) == [CloseLink("p")]


def test_a_restarted_prefill_outlives_its_predecessors_hello(
    pulling: ReceiverSession,
) -> None:
    for block in range(3):
        land(pulling, block, now=1.0)
    pulling.link_lost("p", 1.1)
    now = 3.0
    effects = pulling.pull(request(OTHER, peer=RESTARTED), now)
    assert effects == [HELLO]
    assert events(pulling.tick(now + ANSWER_S - 0.01)) == []
    welcome(pulling, RESTARTED, now + ANSWER_S - 0.01)
    assert events(pulling.tick(now + ANSWER_S)) == []
    assert pulling.num_rooms == 1


def test_a_lost_release_is_asked_for_over_the_next_connection() -> None:
    session = prefill.new_session()
    prefill.attached(session, is_final=True)
    session.peer_gone("d")
    assert session.tick(REMIND_S) == [SendMessage("d", prefill.announce(10, first_token=42))], (
        "nobody is there"
    )
    prefill.greet(session, "d2")
    assert session.tick(2 * REMIND_S) == [SendMessage("d2", prefill.announce(10, first_token=42))]
    assert len(session.receive("d2", prefill.release(), 2 * REMIND_S)) == 1
    assert session.tick(3 * REMIND_S) == []


def test_every_room_of_the_peer_attaches_again(pulling: ReceiverSession) -> None:
    pulling.pull(request(OTHER), 0.0)
    pulling.receive("p", announce(12, 5, room=OTHER), 0.0)
    effects = pulling.link_lost("p", 0.1)
    assert [message.room for message in sent(effects, m.Attach)] == [ROOM, OTHER]
    assert {(pull.room, pull.block, pull.instance) for pull in sent(effects, m.Pull)} >= {
        (ROOM, 0, D),
        (OTHER, 0, D),
    }
