"""What decode's session remembers of its rooms, so that no message costs a look at all of them."""

import random

import pytest
from baton.cluster.protocol.slab_messages import SlabBlock
from baton.tests.unit.kvtransfer.protocol.test_receiver import (
    LAYOUT,
    P,
    announce,
    new_session,
    request,
    welcome,
)

NUM_TOKENS, NUM_BLOCKS, LEASE_S = 24, 6, 5.0


def block(room: str, first: int, count: int) -> SlabBlock:
    size = LAYOUT.block_bytes * count
    return SlabBlock(
        room=room, epoch=0, instance=P, block=first, size=size, digest=0, slab="3" * 32, slot=0,
        lease_ms=1000, count=count,
    )  # fmt: skip


class Scene:
    """A session with one prefill worker."""

    def __init__(self, **settings: float) -> None:
        self.now, self.num = 0.0, 0
        self.session = new_session(window=3, lease_s=LEASE_S, **settings)

    def pull(self) -> str:
        self.num += 1
        room, is_first = f"{self.num:032x}", self.session.link_of("p") is None
        self.session.pull(request(room, num_tokens=NUM_TOKENS), self.now)
        if is_first:
            welcome(self.session, now=self.now)
        return room

    def announce(self, room: str, tokens: int) -> None:
        first = 1 if tokens == NUM_TOKENS else None
        self.session.receive("p", announce(tokens, first, room), self.now)

    def land(self, room: str, number: int) -> None:
        self.session.landed("p", block(room, number, 1), self.now, is_device=True)


@pytest.mark.parametrize("seed", range(60))
def test_no_due_time_is_late_and_no_room_with_blocks_to_pull_is_forgotten(seed: int):
    rng, scene = random.Random(seed), Scene(silence_s=0.7, idle_link_s=2.0)
    session = scene.session
    for _ in range(120):
        scene.now += rng.choice([0.0, 0.01, 0.2, 0.6])
        link = session.link_of("p")
        rooms = [] if link is None else list(link.rooms.values())
        part = rng.choice(rooms) if rooms else None
        match rng.randrange(8):
            case 0 | 1:
                scene.pull()
            case 2 if part is not None and part.first_token is None:
                scene.announce(part.request.room, rng.choice([8, 16, NUM_TOKENS]))
            case 3 if part is not None:
                first = rng.randrange(NUM_BLOCKS)
                unasked = block(part.request.room, first, rng.randint(1, NUM_BLOCKS - first))
                session.came_unasked("p", unasked, scene.now)
            case 4 if part is not None and part.in_flight:
                scene.land(part.request.room, rng.choice(list(part.in_flight)))
            case 5 if part is not None:
                session.release(part.request.room, 0, "no use", scene.now)
            case 6:
                session.link_lost("p", scene.now)
            case _:
                session.tick(scene.now)
        if session._due_at is not None:
            assert session._due_at <= session._earliest()
        link = session.link_of("p")
        for name, room in ({} if link is None else link.rooms).items():
            assert not room.num_to_pull or link._to_pull[name] is room
        assert link is None or set(link._to_pull) <= set(link.rooms)


def test_a_room_whose_first_blocks_come_unasked_is_not_stuck():
    scene = Scene(silence_s=100.0)
    first, second = scene.pull(), scene.pull()
    scene.announce(second, 0)
    scene.announce(first, 16)
    for scene.now in (3.0, 6.0):
        scene.land(first, min(scene.session.link_of("p").rooms[first].in_flight))
    scene.now = 6.1
    scene.session.came_unasked("p", block(second, 0, NUM_BLOCKS), scene.now)
    assert not [effect for effect in scene.session.tick(scene.now) if "Lost" in repr(effect)]
    assert scene.session.link_of("p").rooms[second].lease.ends_at == scene.now + LEASE_S
