"""The join of a room's ends on all ranks of a worker: no end before the last rank, and one end only."""

import pytest
from baton.cluster.errors import LocalProtocolError
from baton.kvtransfer.ranks.room_join import RoomJoin, Tell, TellRelease
from baton.kvtransfer.transport import Attached, Complete, Dropped, Freed, Landed, Lost, Released

ROOM = "a" * 32


def complete(first_token: int = 7, num_bytes: int = 10, seconds: float = 0.5) -> Complete:
    return Complete(
        room=ROOM, epoch=0, first_token=first_token, num_bytes=num_bytes, num_blocks=1, seconds=seconds
    )


def lost(reason: str = "no progress") -> Lost:
    return Lost(room=ROOM, epoch=0, kind="TransferTimeout", reason=reason)


@pytest.fixture
def join() -> RoomJoin:
    made = RoomJoin(3, 4)
    made.open(ROOM, 0)
    return made


def test_a_room_is_complete_with_its_last_rank(join: RoomJoin) -> None:
    assert join.happened(2, complete(num_bytes=1, seconds=0.1)) == []
    assert join.happened(0, complete(num_bytes=2, seconds=0.9)) == []
    assert join.happened(0, complete()) == [], "a rank counts once"
    assert join.happened(1, complete(num_bytes=4, seconds=0.2)) == [
        Tell(Complete(room=ROOM, epoch=0, first_token=7, num_bytes=7, num_blocks=3, seconds=0.9))
    ]
    assert join.num_rooms == 0


def test_prefill_is_released_with_its_last_rank(join: RoomJoin) -> None:
    released = Released(room=ROOM, epoch=0)
    assert [join.happened(rank, released) for rank in (1, 0)] == [[], []]
    assert join.happened(2, released) == [Tell(released)]


def test_tokens_have_landed_when_they_have_on_every_rank(join: RoomJoin) -> None:
    def landed(rank: int, tokens: int) -> list:
        return join.happened(rank, Landed(room=ROOM, epoch=0, tokens=tokens))

    assert landed(0, 8) == landed(1, 4) == []
    assert landed(2, 8) == [Tell(Landed(room=ROOM, epoch=0, tokens=4))]
    assert landed(0, 12) == []
    assert landed(1, 8) == [Tell(Landed(room=ROOM, epoch=0, tokens=8))]


def test_the_first_failure_ends_all_ranks_and_is_told_behind_the_last(join: RoomJoin) -> None:
    assert join.happened(1, lost()) == [
        TellRelease(0, ROOM, 0, "rank 1: no progress"),
        TellRelease(2, ROOM, 0, "rank 1: no progress"),
    ]
    assert join.gone(0, ROOM, 0) == []
    assert join.happened(2, complete()) == [Tell(lost("rank 1: no progress"))], "its end crossed the order"
    assert join.gone(2, ROOM, 0) == []
    assert join.num_rooms == 0


def test_a_release_of_the_owner_is_answered_behind_the_last_rank(join: RoomJoin) -> None:
    assert [effect.rank for effect in join.release(ROOM, 0, "cancel")] == [0, 1, 2]
    assert join.release(ROOM, 0, "cancel") == [], "ranks are told once"
    assert join.gone(0, ROOM, 0) == join.gone(2, ROOM, 0) == []
    freed = Tell(Freed(room=ROOM, epoch=0))
    assert join.happened(1, lost()) == [freed, freed], "one for each release, and no other event"


def test_a_release_of_an_unknown_attempt_reaches_all_ranks() -> None:
    join = RoomJoin(2, 4)
    join.open(ROOM, 0)
    told = join.release(ROOM, 1, "cancel")
    assert sorted((effect.rank, effect.epoch) for effect in told) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [join.gone(rank, ROOM, 0) for rank in (0, 1)] == [[], []], "the older one ends without a word"
    assert [join.gone(rank, ROOM, 1) for rank in (0, 1)] == [[], [Tell(Freed(room=ROOM, epoch=1))]]


def test_a_lost_rank_ends_its_rooms_and_no_other_opens(join: RoomJoin) -> None:
    effects = join.rank_lost(2, "rank 2 of this worker was lost", is_decode=True)
    assert [effect.rank for effect in effects] == [0, 1]
    assert join.gone(0, ROOM, 0) == []
    (end,) = join.gone(1, ROOM, 0)
    assert end == Tell(Lost(room=ROOM, epoch=0, kind="PeerLost", reason="rank 2 of this worker was lost"))
    with pytest.raises(LocalProtocolError, match="rank 2 of this worker was lost"):
        join.open("b" * 32, 0)
    told = join.release("c" * 32, 0, "cancel")
    assert [effect.rank for effect in told] == [0, 1], "the dead one cannot answer"


def test_ranks_from_which_nobody_pulls_are_done() -> None:
    join = RoomJoin(4, 2)  # two copies of each KV head
    join.open(ROOM, 0)
    told = join.happened(0, Attached(room=ROOM, epoch=0, num_ranks=1))
    assert [effect.rank for effect in told] == [1, 3]
    assert join.happened(0, Released(room=ROOM, epoch=0)) == []
    assert join.gone(1, ROOM, 0) == join.gone(3, ROOM, 0) == []
    assert join.happened(2, Released(room=ROOM, epoch=0)) == [Tell(Released(room=ROOM, epoch=0))]


def test_ranks_that_disagree_on_token_1_lose_the_room(join: RoomJoin) -> None:
    assert join.happened(0, complete(7)) == []
    assert [effect.rank for effect in join.happened(1, complete(8))] == [2]
    ((end),) = join.gone(2, ROOM, 0)
    assert isinstance(end.event, Lost)
    assert "different first tokens" in end.event.reason


def test_a_dropped_offer_is_dropped_once(join: RoomJoin) -> None:
    dropped = Dropped(room=ROOM, epoch=0, reason="no progress")
    assert len(join.happened(0, dropped)) == 2
    assert join.happened(1, dropped) == []
    (end,) = join.happened(2, dropped)
    assert end == Tell(Dropped(room=ROOM, epoch=0, reason="rank 0: no progress"))
