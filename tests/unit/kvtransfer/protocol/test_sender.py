"""Prefill's side of the hand-off: what it answers, and when a room ends."""

from dataclasses import replace

import msgspec
import pytest
from baton.cluster.errors import LocalProtocolError
from baton.cluster.protocol import messages as m
from baton.cluster.security.ciphers import AES_128_GCM
from baton.kvtransfer.protocol.sender import SenderSession
from baton.kvtransfer.protocol.session import REMIND_S, Effect, Notify, SendBlock, SendMessage
from baton.kvtransfer.transport import Dropped, Offer, Released

P, D, D2 = "1" * 32, "2" * 32, "3" * 32
ROOM = "a" * 32
LAYOUT = m.Layout(
    fingerprint="f", dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=2, block_bytes=64
)  # a page is 64 bytes, so a block is a page


def offer(room: str = ROOM, epoch: int = 0, num_tokens: int = 10) -> Offer:
    return Offer(room=room, epoch=epoch, num_tokens=num_tokens, pages=(5, 6, 7))


def greet(
    session: SenderSession, peer: str = "d", instance: str = D, layout: m.Layout = LAYOUT
) -> list[Effect]:
    return session.receive(peer, m.KVHello(instance=instance, protocol=m.PROTOCOL_MAJOR, layout=layout), 0.0)


def attach(room: str = ROOM, epoch: int = 0, instance: str = D, have: int = 0) -> m.Attach:
    return m.Attach(room=room, epoch=epoch, instance=instance, have=have)


def pull(block: int, epoch: int = 0, instance: str = D) -> m.Pull:
    return m.Pull(room=ROOM, epoch=epoch, instance=instance, block=block)


def announce(tokens_ready: int, epoch: int = 0, first_token: int | None = None) -> m.Announce:
    final = first_token is not None
    return m.Announce(
        room=ROOM,
        epoch=epoch,
        instance=P,
        tokens_ready=tokens_ready,
        final=final,
        first_token=first_token or 0,
    )


def release(epoch: int = 0, instance: str = D) -> m.Release:
    return m.Release(room=ROOM, epoch=epoch, instance=instance)


def aborts(effects: list[Effect]) -> list[tuple[str, int]]:
    return [
        (e.peer, e.message.epoch)
        for e in effects
        if isinstance(e, SendMessage) and isinstance(e.message, m.Abort)
    ]


def events(effects: list[Effect]) -> list[object]:
    return [effect.event for effect in effects if isinstance(effect, Notify)]


def new_session() -> SenderSession:
    """Greeted by "d"."""
    session = SenderSession(P, LAYOUT, lease_s=5.0, early_s=20.0)
    greet(session)
    return session


@pytest.fixture
def session() -> SenderSession:
    return new_session()


def attached(session: SenderSession, *, is_final: bool = False) -> None:
    session.offer(offer(), 0.0)
    session.receive("d", attach(), 0.0)
    if is_final:
        session.advance(ROOM, 0, 10, 42, 0.0)


def test_a_room_goes_from_offer_to_release(session: SenderSession) -> None:
    assert session.offer(offer(), 0.0) == []
    assert session.receive("d", attach(), 0.0) == [SendMessage("d", announce(0))]
    assert session.advance(ROOM, 0, 8, None, 1.0) == [SendMessage("d", announce(8))]
    (block,) = session.receive("d", pull(1), 1.0)
    assert isinstance(block, SendBlock)
    assert (block.peer, block.block, block.size, block.pages) == ("d", 1, 64, (5, 6, 7))
    assert [(s.plane, s.page_index, s.lo, s.hi) for s in block.segments] == [("kv", 1, 0, 64)]
    assert session.advance(ROOM, 0, 10, 42, 2.0) == [SendMessage("d", announce(10, first_token=42))]
    assert session.receive("d", release(), 3.0) == [Notify(Released(room=ROOM, epoch=0))]
    assert session.num_rooms == 0


def test_tokens_that_decode_already_holds_are_not_sent(session: SenderSession) -> None:
    session.offer(offer(), 0.0)
    session.receive("d", attach(have=4), 0.0)
    session.advance(ROOM, 0, 10, 42, 0.0)
    (block,) = session.receive("d", pull(0), 0.0)
    assert block.pages == (6, 7)
    assert session.receive("d", pull(2), 0.0) == []


def test_a_block_that_is_not_ready_is_not_sent(session: SenderSession) -> None:
    attached(session)
    session.advance(ROOM, 0, 7, None, 0.0)
    assert session.receive("d", pull(1), 0.0) == []
    assert session.counters.unexpected == 1
    assert len(session.receive("d", pull(0), 0.0)) == 1


def test_an_attach_before_the_offer_is_kept_and_answered(session: SenderSession) -> None:
    assert session.receive("d", attach(), 0.0) == [SendMessage("d", announce(0))]
    assert session.offer(offer(), 1.0) == [SendMessage("d", announce(0))]
    assert session.advance(ROOM, 0, 4, None, 1.0) == [SendMessage("d", announce(4))]


def test_repeating_an_attach_without_an_offer_does_not_prolong_it(
    session: SenderSession,
) -> None:
    for now in range(19):
        session.receive("d", attach(), float(now))
    assert session.tick(19.9) == []
    assert session.next_deadline() == 20.0
    assert aborts(session.tick(20.0)) == [("d", 0)]
    assert session.next_deadline() is None


def test_attaches_without_an_offer_are_bounded_in_number() -> None:
    session = SenderSession(P, LAYOUT, max_early=3)
    greet(session)
    rooms = [f"{i:032x}" for i in range(5)]
    effects = [effect for room in rooms for effect in session.receive("d", attach(room=room), 0.0)]
    evicted = [
        e.message.room for e in effects if isinstance(e, SendMessage) and isinstance(e.message, m.Abort)
    ]
    assert evicted == rooms[:2]


def test_peers_are_bounded_in_number() -> None:
    session = SenderSession(P, LAYOUT, max_peers=2)
    for name in "abc":
        greet(session, peer=name)
    assert session.receive("a", attach(), 0.0) == []
    assert session.receive("b", attach(), 0.0) != []


def test_a_peer_without_a_hello_gets_no_answer_and_is_counted() -> None:
    session = SenderSession(P, LAYOUT)
    session.offer(offer(), 0.0)
    assert session.receive("x", attach(), 0.0) == []
    assert session.receive("x", pull(0), 0.0) == []
    assert session.counters.stale_instance == 2


def test_another_layout_is_refused_and_other_peers_go_on(session: SenderSession) -> None:
    attached(session, is_final=True)
    (answer,) = greet(session, "bad", D2, msgspec.structs.replace(LAYOUT, head_dim=4))
    assert isinstance(answer.message, m.KVRefused)
    assert "head dim 2" in answer.message.reason
    assert "head dim 4" in answer.message.reason
    assert session.receive("bad", attach(instance=D2), 0.0) == []
    assert len(session.receive("d", pull(0), 0.0)) == 1


def test_another_protocol_is_refused() -> None:
    session = SenderSession(P, LAYOUT)
    (answer,) = session.receive("d", m.KVHello(instance=D, protocol=99, layout=LAYOUT), 0.0)
    assert isinstance(answer.message, m.KVRefused)
    assert "99" in answer.message.reason


def test_a_peers_smaller_block_is_used_for_it_alone(session: SenderSession) -> None:
    greet(session, "d2", D2, msgspec.structs.replace(LAYOUT, block_bytes=32))
    session.offer(offer(), 0.0)
    session.receive("d2", attach(instance=D2), 0.0)
    session.advance(ROOM, 0, 10, 1, 0.0)
    (block,) = session.receive("d2", pull(5, instance=D2), 0.0)
    assert block.size == 32


def test_a_room_belongs_to_the_decode_worker_that_attached(session: SenderSession) -> None:
    attached(session, is_final=True)
    greet(session, "d2", D2)
    assert aborts(session.receive("d2", attach(instance=D2), 0.0)) == [("d2", 0)]
    assert session.receive("d2", release(instance=D2), 0.0) == []
    assert aborts(session.receive("d2", pull(0, instance=D2), 0.0)) == [("d2", 0)]
    assert session.counters.stale_instance == 3
    assert session.num_rooms == 1


def test_a_decode_worker_goes_on_after_it_reconnected(session: SenderSession) -> None:
    attached(session, is_final=True)
    session.peer_gone("d")
    greet(session, "new", D)
    (block,) = session.receive("new", pull(0), 0.0)
    assert block.peer == "new"
    assert session.receive("new", release(), 0.0) == [Notify(Released(room=ROOM, epoch=0))]


def test_an_older_attempt_is_stale_and_its_decode_worker_is_told(session: SenderSession) -> None:
    session.offer(offer(epoch=3), 0.0)
    session.receive("d", attach(epoch=3), 0.0)
    assert aborts(session.receive("d", attach(epoch=2), 0.0)) == [("d", 2)]
    assert aborts(session.receive("d", pull(0, epoch=2), 0.0)) == [("d", 2)]
    assert session.receive("d", release(epoch=2), 0.0) == []
    assert session.counters.stale_epoch == 3
    assert session.num_rooms == 1


def test_a_newer_attempt_drops_the_older_one(session: SenderSession) -> None:
    attached(session)
    effects = session.offer(offer(epoch=1), 1.0)
    assert [event.epoch for event in events(effects)] == [0]
    assert aborts(effects) == [("d", 0)]
    assert session.is_open(ROOM, 1)
    assert session.advance(ROOM, 0, 4, None, 1.0) == []


def test_a_release_before_the_prompt_is_complete_is_ignored(session: SenderSession) -> None:
    attached(session)
    assert session.receive("d", release(), 0.0) == []
    assert session.counters.unexpected == 1
    assert session.num_rooms == 1


def test_an_abort_drops_the_room_in_every_state(session: SenderSession) -> None:
    for stage in ("offered", "attached", "final"):
        room = {"offered": "a", "attached": "b", "final": "c"}[stage] * 32
        session.offer(offer(room), 0.0)
        if stage != "offered":
            session.receive("d", attach(room), 0.0)
        if stage == "final":
            session.advance(room, 0, 10, 1, 0.0)
        abort = m.Abort(room=room, epoch=0, instance=D, reason="client left")
        assert events(session.receive("d", abort, 0.0)) == [Dropped(room=room, epoch=0, reason="client left")]
        assert session.receive("d", abort, 0.0) == []
    assert session.num_rooms == 0


def test_cancel_leaves_nothing_in_every_state_and_may_be_repeated(session: SenderSession) -> None:
    for stage in ("unknown", "early", "offered", "attached", "final"):
        room = f"{len(stage):032x}"
        if stage == "early":
            session.receive("d", attach(room), 0.0)
        elif stage != "unknown":
            session.offer(offer(room), 0.0)
        if stage in ("attached", "final"):
            session.receive("d", attach(room), 0.0)
        if stage == "final":
            session.advance(room, 0, 10, 1, 0.0)
        effects = session.release(room, 0, "cancel", 0.0)
        assert events(effects) == []
        assert aborts(effects) == ([("d", 0)] if stage in ("early", "attached", "final") else [])
        assert session.release(room, 0, "cancel", 0.0) == []
        assert session.advance(room, 0, 10, 1, 0.0) == []
        assert aborts(session.receive("d", attach(room), 0.0)) == [("d", 0)], "a late Attach is told at once"
    assert session.num_rooms == 0
    assert session.next_deadline() is None


def test_a_cancel_of_an_older_attempt_leaves_the_newer_one(session: SenderSession) -> None:
    session.offer(offer(epoch=1), 0.0)
    session.release(ROOM, 0, "late", 0.0)
    assert session.is_open(ROOM, 1)


def test_the_lease_ends_a_room_that_decode_does_not_pull(session: SenderSession) -> None:
    attached(session)
    assert session.tick(100.0) == [], "prefill computes: decode cannot do anything"
    session.advance(ROOM, 0, 8, None, 100.0)
    session.receive("d", pull(0), 103.0)
    assert session.next_deadline() == 108.0
    assert session.tick(107.9) == []
    effects = session.tick(108.0)
    assert [event.reason for event in events(effects)] == ["no progress for 5 s"]
    assert aborts(effects) == [("d", 0)]
    assert aborts(session.receive("d", pull(1), 109.0)) == [("d", 0)]


def test_a_room_survives_while_its_own_decode_pulls_other_rooms(
    session: SenderSession,
) -> None:
    greet(session, "d2", D2)
    attached(session, is_final=True)
    for room, peer, instance in (("b" * 32, "d", D), ("c" * 32, "d2", D2)):
        session.offer(offer(room), 0.0)
        session.receive(peer, attach(room, instance=instance), 0.0)
        session.advance(room, 0, 10, 42, 0.0)
    session.offer(offer("e" * 32), 0.0)  # nobody attached
    session.advance("e" * 32, 0, 10, 42, 0.0)
    dropped: list[object] = []
    for now in range(1, 12):
        session.receive("d", pull(now % 3), float(now))
        dropped += events(session.tick(float(now)))
    assert sorted(event.room for event in dropped if isinstance(event, Dropped)) == ["c" * 32, "e" * 32]
    last = events(session.tick(16.0))
    assert sorted(event.room for event in last if isinstance(event, Dropped)) == [ROOM, "b" * 32]


def test_the_end_is_announced_again_while_decode_is_silent(
    session: SenderSession,
) -> None:
    attached(session)
    session.advance(ROOM, 0, 8, None, 0.0)
    assert session.tick(4.9) == [], "prefill computes: it will speak anyway"
    session.advance(ROOM, 0, 10, 42, 5.0)
    assert session.next_deadline() == 5.0 + REMIND_S
    assert session.tick(5.29) == []
    session.receive("d", pull(0), 5.29)
    assert session.tick(5.31) == [], "decode is at work"
    reminder = SendMessage("d", announce(10, first_token=42))
    assert session.tick(5.6) == [reminder]
    assert session.tick(5.7) == []
    assert session.tick(5.91) == [reminder]
    assert aborts(session.tick(10.3)) == [("d", 0)], "reminders are no progress"


def test_repeated_attaches_are_no_progress(session: SenderSession) -> None:
    attached(session, is_final=True)
    for now in range(1, 5):
        session.receive("d", attach(), float(now))
    assert len(events(session.tick(5.0))) == 1


def test_closing_tells_every_peer(session: SenderSession) -> None:
    attached(session)
    session.receive("d", attach("e" * 32), 0.0)
    assert len(aborts(session.close(0.0))) == 2
    assert session.num_rooms == 0
    assert session.close(0.0) == []


def test_a_local_call_that_breaks_the_protocol_raises(session: SenderSession) -> None:
    with pytest.raises(LocalProtocolError, match="3 pages"):
        session.offer(Offer(room=ROOM, epoch=0, num_tokens=10, pages=(1, 2)), 0.0)
    session.offer(offer(), 0.0)
    with pytest.raises(LocalProtocolError, match="is open"):
        session.offer(offer(), 0.0)
    session.advance(ROOM, 0, 8, None, 0.0)
    for tokens_ready, first_token in ((4, None), (11, None), (9, 1)):
        with pytest.raises(LocalProtocolError):
            session.advance(ROOM, 0, tokens_ready, first_token, 0.0)


def test_an_attach_with_more_tokens_than_the_prompt_is_aborted(session: SenderSession) -> None:
    session.offer(offer(), 0.0)
    for have in (3, 12):
        assert aborts(session.receive("d", attach(have=have), 0.0)) == [("d", 0)]
    assert session.num_rooms == 1


def test_pages_without_features_go_to_readers_that_hold_their_tokens() -> None:
    layout = msgspec.structs.replace(LAYOUT, feature_ids=[0], feature_width=2)
    session = SenderSession(P, layout)
    greet(session, layout=layout)
    greet(session, "plain", D2, LAYOUT)
    for room, peer, instance, have, is_served in (
        ("a" * 32, "d", D, 8, True),
        ("b" * 32, "plain", D2, 0, True),
        ("c" * 32, "d", D, 4, False),
    ):
        session.offer(replace(offer(room), bare_tokens=8), 0.0)
        effects = session.receive(peer, attach(room, instance=instance, have=have), 0.0)
        assert (aborts(effects) == []) == is_served
        assert session.is_open(room, 0) == is_served
        reasons = [event.reason for event in events(effects) if isinstance(event, Dropped)]
        assert reasons == ([] if is_served else ["tokens [4, 8) have no features here"])


def reattached(session: SenderSession, *, at: float) -> list[Effect]:
    """Two blocks were pulled; decode attaches again at time `at` and already holds a page of the prompt."""
    attached(session)
    session.advance(ROOM, 0, 8, None, 0.0)
    for block in (0, 1):
        session.receive("d", pull(block), 0.0)
    return session.receive("d", attach(have=4), at)


def test_an_attach_with_another_have_owes_its_ready_blocks_again(session: SenderSession) -> None:
    assert reattached(session, at=1.0) == [SendMessage("d", announce(8))]
    assert session.next_deadline() == 6.0, "block 0 of the new stream is ready and was never pulled"
    assert events(session.tick(5.9)) == []
    assert [type(event) for event in events(session.tick(6.0))] == [Dropped]


def test_an_attach_with_another_have_renews_the_lease(session: SenderSession) -> None:
    reattached(session, at=4.9)
    assert events(session.tick(9.8)) == []
    assert [type(event) for event in events(session.tick(9.9))] == [Dropped]


def test_an_aborted_attach_is_forgotten_before_its_offer_comes(session: SenderSession) -> None:
    session.receive("d", attach(), 0.0)
    session.receive("d", m.Abort(room=ROOM, epoch=0, instance=D), 0.0)
    assert session.next_deadline() is None, "nothing is kept of it"
    assert session.offer(offer(), 1.0) == []
    assert session.advance(ROOM, 0, 8, None, 1.0) == [], "decode hears nothing of a room that it gave up"


def test_sealed_transfers_never_share_a_key_across_another_have() -> None:
    sealing = SenderSession(P, LAYOUT, ciphers=(AES_128_GCM,))
    sealing.receive(
        "d", m.KVHello(instance=D, protocol=m.PROTOCOL_MAJOR, layout=LAYOUT, ciphers=(AES_128_GCM,)), 0.0
    )
    sealing.offer(offer(), 0.0)
    keys = []
    for have in (0, 0, 4, 8):
        (said,) = sealing.receive("d", attach(have=have), 0.0)
        assert isinstance(said, SendMessage)
        assert isinstance(said.message, m.Announce)
        keys.append(said.message.key)
    assert keys[0] == keys[1], "the same transfer keeps its key"
    assert len(set(keys)) == 3, "a block of another stream under an old nonce would show both"


# --- a decode worker that is stopped ------------------------------------------------------------------------


def stalled() -> SenderSession:
    """A computed prompt of which decode pulled the first block at 1.0, and then was silent."""
    session = SenderSession(P, LAYOUT, lease_s=5.0, stall_s=60.0)
    greet(session)
    attached(session, is_final=True)
    session.receive("d", pull(0), 1.0)
    return session


def test_the_rooms_of_a_stopped_decode_worker_outlive_their_lease():
    session = stalled()
    for now in (6.0, 6.0 + REMIND_S, 30.0):
        assert session.tick(now) == [SendMessage("d", announce(10, first_token=42))], "it is asked"
        assert session.tick(now + 0.01) == []
        assert session.next_deadline() == now + REMIND_S, "no turn without work"
    session.receive("d", m.KVHello(instance=D, protocol=m.PROTOCOL_MAJOR, layout=LAYOUT), 31.0)
    assert session.num_rooms == 1
    assert not aborts(session.tick(31.2)), "its lease has begun anew"
    assert [type(effect) for effect in session.receive("d", pull(1), 31.3)] == [SendBlock]
    assert events(session.receive("d", release(), 31.4)) == [Released(room=ROOM, epoch=0)]


def test_a_stopped_decode_worker_is_waited_for_as_long_as_set():
    session = stalled()
    assert not aborts(session.tick(65.9))
    assert aborts(session.tick(66.0)) == [("d", 0)]


def test_a_running_decode_worker_without_progress_is_not_waited_for():
    session = stalled()
    for now in (2.5, 4.0, 5.5):
        session.receive("d", attach(), now)
    session.tick(6.0)
    session.receive("d", attach(), 6.1)  # it lives, and it has not pulled anything since
    assert aborts(session.tick(6.1)) == [("d", 0)]


def test_a_decode_worker_whose_connection_ended_is_not_waited_for():
    session = stalled()
    session.tick(6.0)
    session.peer_gone("d")
    assert events(session.tick(6.3)) == [Dropped(room=ROOM, epoch=0, reason="no progress for 5 s")]
