"""Decode's side of the hand-off: what it asks, how often, and when a room ends."""

import msgspec
import pytest
import torch
from baton.cluster.errors import LocalProtocolError
from baton.cluster.protocol import messages as m
from baton.kvtransfer.protocol.peer_link import ANSWER_S, GREETING_S, PROBE_S
from baton.kvtransfer.protocol.receiver import ReceiverSession
from baton.kvtransfer.protocol.session import CloseLink, Effect, Notify, SendMessage
from baton.kvtransfer.transport import Complete, Landed, Lost, PullRequest

P, P2, D = "1" * 32, "4" * 32, "2" * 32
ROOM, OTHER = "a" * 32, "c" * 32
LAYOUT = m.Layout(
    fingerprint="f", dtype="float32", page_size=4, num_layers=1, num_kv_heads=1, head_dim=2, block_bytes=64
)  # a page is 64 bytes, so a block is a page
HELLO = SendMessage(
    "p",
    m.KVHello(
        instance=D, protocol=1, layout=LAYOUT, ciphers=("crc32c",), transports=("zmq_blocks",), num_ranks=1
    ),
)


def request(
    room: str = ROOM, epoch: int = 0, num_tokens: int = 12, have: int = 0, peer: str = P
) -> PullRequest:
    pages = tuple(range(1, 1 + -(-(num_tokens - have) // 4)))
    return PullRequest(
        room=room,
        epoch=epoch,
        num_tokens=num_tokens,
        have=have,
        pages=pages,
        features=None,
        endpoint="p",
        peer_instance=peer,
    )


def announce(
    tokens: int, first: int | None = None, room: str = ROOM, epoch: int = 0, peer: str = P
) -> m.Announce:
    return m.Announce(
        room=room,
        epoch=epoch,
        instance=peer,
        tokens_ready=tokens,
        final=first is not None,
        first_token=first or 0,
    )


def block(index: int, room: str = ROOM, epoch: int = 0, peer: str = P) -> m.Block:
    return m.Block(room=room, epoch=epoch, instance=peer, block=index, size=64, digest=0)


def land(session: ReceiverSession, index: int, now: float = 0.0, room: str = ROOM) -> list[Effect]:
    header = block(index, room)
    assert session.expect("p", header, 64) is not None
    return session.landed("p", header, now)


def sent(effects: list[Effect], kind: type) -> list[object]:
    return [e.message for e in effects if isinstance(e, SendMessage) and isinstance(e.message, kind)]


def pulled(effects: list[Effect]) -> list[int]:
    return [message.block for message in sent(effects, m.Pull)]


def events(effects: list[Effect]) -> list[object]:
    return [effect.event for effect in effects if isinstance(effect, Notify)]


def new_session(**options: object) -> ReceiverSession:
    return ReceiverSession(D, LAYOUT, **options)


def welcome(session: ReceiverSession, peer: str = P, now: float = 0.0) -> list[Effect]:
    return session.receive("p", m.KVWelcome(instance=peer, layout=LAYOUT), now)


@pytest.fixture
def session() -> ReceiverSession:
    """Greeted, with ROOM attached."""
    session = new_session()
    session.pull(request(), 0.0)
    welcome(session)
    return session


def test_a_room_goes_from_pull_to_complete() -> None:
    session = new_session()
    assert session.pull(request(), 0.0) == [HELLO]
    attach = m.Attach(room=ROOM, epoch=0, instance=D, have=0)
    assert welcome(session) == [SendMessage("p", attach)]
    assert session.receive("p", announce(0), 1.0) == []
    assert pulled(session.receive("p", announce(9), 2.0)) == [0, 1]
    assert events(land(session, 0, 2.1)) == [Landed(room=ROOM, epoch=0, tokens=4)]
    assert pulled(session.receive("p", announce(12, 42), 2.5)) == [2]
    assert events(land(session, 1, 2.6)) == [Landed(room=ROOM, epoch=0, tokens=8)]
    effects = land(session, 2, 3.0)
    complete = Complete(
        room=ROOM, epoch=0, first_token=42, num_bytes=192, num_blocks=3, seconds=0.5, pull_seconds=1.0
    )
    assert events(effects) == [Landed(room=ROOM, epoch=0, tokens=12), complete]
    assert sent(effects, m.Release) == [m.Release(room=ROOM, epoch=0, instance=D)]
    assert session.num_rooms == 0


def test_a_later_room_of_the_same_pair_needs_no_handshake(session: ReceiverSession) -> None:
    effects = session.pull(request("b" * 32, have=4), 0.0)
    assert effects == [SendMessage("p", m.Attach(room="b" * 32, epoch=0, instance=D, have=4))]


def test_a_prompt_that_decode_has_wholly_waits_for_the_first_token_only() -> None:
    session = new_session()
    session.pull(request(have=12), 0.0)
    welcome(session)
    effects = session.receive("p", announce(12, 7), 0.0)
    assert pulled(effects) == []
    assert [event.first_token for event in events(effects)] == [7]


def test_blocks_may_land_in_any_order(session: ReceiverSession) -> None:
    session.receive("p", announce(12, 1), 0.0)
    assert events(land(session, 2)) == []
    assert [event.tokens for event in events(land(session, 0))] == [4]
    assert [type(event) for event in events(land(session, 1))] == [Landed, Complete]


def test_the_window_bounds_blocks_per_peer_and_the_oldest_room_goes_first() -> None:
    session = new_session(window=3)
    rooms = ["b" * 32, "c" * 32]
    for room in rooms:
        session.pull(request(room, num_tokens=20), 0.0)
    welcome(session)
    asked = []
    for room in reversed(rooms):  # the newer one has blocks sooner, and loses no block that was asked for
        asked += sent(session.receive("p", announce(20, 1, room), 0.0), m.Pull)
    assert [(p.room[0], p.block) for p in asked] == [("c", 0), ("c", 1), ("c", 2)]
    order = []
    while asked:
        first = asked.pop(0)
        following = sent(land(session, first.block, room=first.room), m.Pull)
        assert len(following) <= 1
        order += [(p.room[0], p.block) for p in following]
        asked += following
    assert order == [("b", 0), ("b", 1), ("b", 2), ("b", 3), ("b", 4), ("c", 3), ("c", 4)]


def test_a_wrong_digest_is_pulled_again_twice_and_then_fails_the_room(session: ReceiverSession) -> None:
    session.receive("p", announce(12, 1), 0.0)
    assert pulled(session.corrupt("p", block(1), 0.1)) == [1]
    assert pulled(session.corrupt("p", block(1), 0.2)) == [1]
    effects = session.corrupt("p", block(1), 0.3)
    assert [event.kind for event in events(effects)] == ["DigestMismatch"]
    assert len(sent(effects, m.Abort)) == 1
    assert session.counters.digest_mismatches == 3
    assert session.expect("p", block(0), 64) is None


def test_a_block_that_was_repaired_is_as_good_as_any(session: ReceiverSession) -> None:
    session.receive("p", announce(12, 1), 0.0)
    for index in range(3):
        session.corrupt("p", block(index), 0.1)
    done = [event for index in range(3) for event in events(land(session, index, 0.2))]
    assert isinstance(done[-1], Complete)


def test_a_silent_peer_is_asked_at_most_twice_more_for_each_block(
    session: ReceiverSession,
) -> None:
    session.receive("p", announce(12, 1), 0.0)
    repulled: list[int] = []
    lost: list[object] = []
    now = 0.0
    while not lost:
        now += 0.25
        effects = session.tick(now)
        if effects and not events(effects):
            assert effects[0] == HELLO
            assert len(sent(effects, m.Attach)) == (now % 1 == 0)
            welcome(session, now=now)
        repulled += pulled(effects)
        lost += events(effects)
    assert now == 5.0
    assert sorted(repulled) == [0, 0, 1, 1, 2, 2]
    assert [event.kind for event in lost] == ["TransferTimeout"]
    assert session.num_rooms == 0


def test_an_announcement_that_was_lost_is_asked_for_again(session: ReceiverSession) -> None:
    effects = session.tick(1.0)
    assert effects == [HELLO, SendMessage("p", m.Attach(room=ROOM, epoch=0, instance=D, have=0))]
    assert session.tick(1.0) == []
    welcome(session, now=1.0)
    assert session.next_deadline() == 1.0 + PROBE_S


def test_a_peer_silent_for_a_second_is_given_up_with_all_its_rooms(
    session: ReceiverSession,
) -> None:
    session.pull(request(OTHER), 0.0)
    session.receive("p", announce(12, 1), 0.0)
    assert session.tick(PROBE_S - 0.01) == []
    assert session.tick(PROBE_S) == [HELLO]
    assert events(session.tick(PROBE_S + ANSWER_S - 0.01)) == []
    lost = events(session.tick(1.0))
    assert {(event.room, event.kind) for event in lost} == {(ROOM, "PeerLost"), (OTHER, "PeerLost")}
    assert session.num_rooms == 0


def test_a_pause_of_this_process_is_not_counted_as_the_peers_silence(session: ReceiverSession) -> None:
    assert events(session.tick(4.0)) == []
    welcome(session, now=4.1)
    assert events(session.tick(4.1 + ANSWER_S)) == []


def test_an_idle_peer_gets_its_full_time_to_answer(session: ReceiverSession) -> None:
    session.release(ROOM, 0, "enough", 0.0)
    session.pull(request(OTHER), 20.0)
    assert session.tick(20.0) == []
    assert session.tick(20.0 + PROBE_S) == [HELLO]


def test_a_peer_that_knows_the_room_has_unlimited_time_to_compute(session: ReceiverSession) -> None:
    for now in range(1, 60):
        assert events(session.tick(float(now))) == []
        session.receive("p", announce(0), now + 0.1)
    assert session.num_rooms == 1


def test_answers_without_blocks_do_not_prolong_a_room_that_needs_blocks(
    session: ReceiverSession,
) -> None:
    session.receive("p", announce(12, 1), 0.0)
    lost, asked = [], []
    for now in range(1, 70):
        lost, asked = lost + events(effects := session.tick(now / 10)), asked + pulled(effects)
        if not lost:
            session.receive("p", announce(12, 1), now / 10 + 0.01)
    assert ([event.kind for event in lost], bool(asked)) == (["TransferTimeout"], True), (
        "what is overdue is asked for, too"
    )


def test_every_block_renews_the_lease(session: ReceiverSession) -> None:
    session.receive("p", announce(12, 1), 0.0)
    land(session, 0, 4.0)
    assert events(session.tick(8.9)) == []
    assert [event.kind for event in events(session.tick(9.0))] == ["TransferTimeout"]


def test_an_endpoint_without_answers_gets_more_hellos_and_is_given_up() -> None:
    session = new_session()
    session.pull(request(), 0.0)
    hellos = []
    for now in (0.5, 1.0, 1.5):
        hellos += session.tick(now)
    assert hellos == [HELLO] * 3
    assert [event.kind for event in events(session.tick(GREETING_S))] == ["PeerLost"]


def test_duplicate_and_unasked_blocks_are_dropped_and_counted(session: ReceiverSession) -> None:
    session.receive("p", announce(8), 0.0)
    land(session, 0)
    assert session.expect("p", block(0), 64) is None
    assert session.expect("p", block(2), 64) is None
    assert session.expect("p", block(99), 64) is None
    assert session.expect("p", block(1), 63) is None
    assert (session.counters.duplicate_blocks, session.counters.unexpected) == (1, 3)


def test_stale_attempts_and_processes_are_dropped_and_counted() -> None:
    session = new_session()
    session.pull(request(epoch=5), 0.0)
    welcome(session)
    session.receive("p", announce(12, 1, epoch=5), 0.0)
    assert session.expect("p", block(0, epoch=4), 64) is None
    assert session.expect("p", block(0, epoch=5, peer=P2), 64) is None
    assert session.expect("p", block(0, room="f" * 32), 64) is None
    assert session.expect("elsewhere", block(0, epoch=5), 64) is None
    assert sent(session.receive("p", announce(12, 1, epoch=4), 0.0), m.Abort)[0].epoch == 4
    counters = session.counters
    assert (counters.stale_epoch, counters.stale_instance, counters.unknown_room) == (2, 1, 2)
    assert session.num_rooms == 1


def test_a_restarted_peer_loses_its_rooms_at_once(session: ReceiverSession) -> None:
    effects = welcome(session, P2)
    assert [event.kind for event in events(effects)] == ["PeerLost"]
    assert sent(session.pull(request(epoch=1, peer=P2), 0.0), m.Attach)


def test_a_message_from_another_process_ends_the_room(session: ReceiverSession) -> None:
    assert [event.kind for event in events(session.receive("p", announce(4, peer=P2), 0.0))] == ["PeerLost"]


def test_a_room_for_a_restarted_peer_waits_for_the_new_handshake(session: ReceiverSession) -> None:
    assert session.pull(request("b" * 32, peer=P2), 1.0) == [HELLO]
    effects = welcome(session, P2, 1.1)
    assert [(event.room, event.kind) for event in events(effects)] == [(ROOM, "PeerLost")]
    assert [message.room for message in sent(effects, m.Attach)] == ["b" * 32]


def test_a_broken_connection_repeats_hello_and_attach(session: ReceiverSession) -> None:
    effects = session.link_lost("p", 0.5)
    assert effects == [HELLO, SendMessage("p", m.Attach(room=ROOM, epoch=0, instance=D, have=0))]
    assert session.link_lost("unknown", 0.5) == []


def test_a_refusal_loses_the_rooms_of_that_peer_only(session: ReceiverSession) -> None:
    session.pull(
        PullRequest(
            room="b" * 32,
            epoch=0,
            num_tokens=4,
            have=0,
            pages=(1,),
            features=None,
            endpoint="q",
            peer_instance=P2,
        ),
        0.0,
    )
    effects = session.receive("q", m.KVRefused(instance=P2, reason="KV layouts differ"), 0.0)
    assert events(effects) == [
        Lost(room="b" * 32, epoch=0, kind="HandshakeRefused", reason="KV layouts differ")
    ]
    assert session.num_rooms == 1


def test_an_agreed_layout_that_neither_side_offered_is_refused() -> None:
    for change in ({"head_dim": 4}, {"block_bytes": 128}):
        session = new_session()
        session.pull(request(), 0.0)
        wrong = m.KVWelcome(instance=P, layout=msgspec.structs.replace(LAYOUT, **change))
        assert [event.kind for event in events(session.receive("p", wrong, 0.0))] == ["HandshakeRefused"]


def test_a_drafting_worker_does_not_pull_from_a_peer_without_features() -> None:
    layout = msgspec.structs.replace(LAYOUT, feature_ids=[0], feature_width=2)
    session = ReceiverSession(D, layout)
    features = torch.zeros(3, 32, dtype=torch.uint8)
    session.pull(PullRequest(**{**request().__dict__, "features": features}), 0.0)
    assert [event.kind for event in events(welcome(session))] == ["HandshakeRefused"]


def test_an_abort_of_the_peer_loses_the_room_and_is_not_answered(session: ReceiverSession) -> None:
    abort = m.Abort(room=ROOM, epoch=0, instance=P, reason="out of pages")
    effects = session.receive("p", abort, 0.0)
    assert effects == [Notify(Lost(room=ROOM, epoch=0, kind="HandoffAborted", reason="out of pages"))]
    assert session.receive("p", abort, 0.0) == []


@pytest.mark.parametrize("wrong", [announce(13), announce(8, 1)])
def test_an_announcement_of_another_prompt_loses_the_room(
    session: ReceiverSession, wrong: m.Announce
) -> None:
    assert [event.kind for event in events(session.receive("p", wrong, 0.0))] == ["RemoteProtocolError"]


def test_announcements_may_arrive_out_of_order(session: ReceiverSession) -> None:
    session.receive("p", announce(12, 1), 0.0)
    session.receive("p", announce(4), 0.0)
    done = [event for index in range(3) for event in events(land(session, index))]
    assert isinstance(done[-1], Complete)


def test_cancel_leaves_nothing_in_every_state_and_may_be_repeated() -> None:
    for stage in ("unknown", "greeting", "attaching", "pulling"):
        session = new_session()
        if stage != "unknown":
            session.pull(request(), 0.0)
        if stage in ("attaching", "pulling"):
            welcome(session)
        if stage == "pulling":
            session.receive("p", announce(12, 1), 0.0)
        effects = session.release(ROOM, 0, "cancel", 0.0)
        assert events(effects) == []
        assert len(sent(effects, m.Abort)) == (stage in ("attaching", "pulling"))
        assert session.release(ROOM, 0, "cancel", 0.0) == []
        assert session.num_rooms == 0
        assert session.expect("p", block(0), 64) is None


def test_a_cancelled_room_frees_its_share_of_the_window() -> None:
    session = new_session(window=2)
    session.pull(request(), 0.0)
    session.pull(request("b" * 32), 0.0)
    welcome(session)
    session.receive("p", announce(12, 1), 0.0)
    session.receive("p", announce(12, 1, "b" * 32), 0.0)
    assert [p.room for p in sent(session.release(ROOM, 0, "cancel", 0.0), m.Pull)] == ["b" * 32] * 2


def test_a_late_announcement_of_a_completed_room_is_released_again(session: ReceiverSession) -> None:
    session.receive("p", announce(12, 1), 0.0)
    for index in range(3):
        land(session, index)
    assert session.receive("p", announce(12, 1), 0.0) == [
        SendMessage("p", m.Release(room=ROOM, epoch=0, instance=D))
    ]
    unknown = session.receive("p", announce(4, room="e" * 32), 0.0)
    assert [message.room for message in sent(unknown, m.Abort)] == ["e" * 32]


def test_a_newer_attempt_loses_the_older_one(session: ReceiverSession) -> None:
    effects = session.pull(request(epoch=1), 0.0)
    assert [(event.epoch, event.kind) for event in events(effects)] == [(0, "TransferError")]
    with pytest.raises(LocalProtocolError, match="is open"):
        session.pull(request(epoch=1), 0.0)


def test_an_idle_link_is_closed_and_opened_again_by_the_next_pull(session: ReceiverSession) -> None:
    session.release(ROOM, 0, "cancel", 1.0)
    assert session.tick(30.9) == []
    assert session.next_deadline() == 31.0
    assert session.tick(31.0) == [CloseLink("p")]
    assert session.next_deadline() is None
    assert session.pull(request(epoch=1), 40.0) == [HELLO]


def test_a_local_call_that_breaks_the_protocol_raises() -> None:
    session = new_session()
    with pytest.raises(LocalProtocolError, match="3 pages"):
        session.pull(PullRequest(**{**request().__dict__, "pages": (1,)}), 0.0)
    with pytest.raises(LocalProtocolError, match="multiple of the page size"):
        session.pull(PullRequest(**{**request().__dict__, "have": 3}), 0.0)
    drafting = ReceiverSession(D, msgspec.structs.replace(LAYOUT, feature_ids=[0], feature_width=2))
    with pytest.raises(LocalProtocolError, match=r"\(3, 32\)"):
        drafting.pull(request(), 0.0)


def test_closing_tells_every_peer(session: ReceiverSession) -> None:
    assert len(sent(session.close(0.0), m.Abort)) == 1
    assert session.num_rooms == 0
    assert session.close(0.0) == []
