"""What decode's session remembers of its rooms, so that no message costs a look at all of them."""

import random

import pytest
from baton.cluster.protocol import messages as m
from baton.cluster.protocol.slab_messages import SlabBlock
from baton.kvtransfer.protocol.receiver import ReceiverSession
from baton.kvtransfer.transport import PullRequest

P, D = "1" * 32, "2" * 32
LAYOUT = m.Layout(
    fingerprint="f",
    dtype="bfloat16",
    page_size=4,
    num_layers=2,
    num_kv_heads=1,
    head_dim=128,
    block_bytes=4096,
)  # pages of 4 KiB
NUM_TOKENS, LEASE_S = 24, 5.0


def room_id(number: int) -> str:
    return f"{number:032x}"


class Scene:
    """A session with one prefill worker."""

    def __init__(self, **settings: float) -> None:
        self.now, self.num = 0.0, 0
        self.session = ReceiverSession(D, LAYOUT, window=3, lease_s=LEASE_S, **settings)

    def pull(self) -> str:
        self.num += 1
        request = PullRequest(
            room=room_id(self.num), epoch=0, num_tokens=NUM_TOKENS, have=0, pages=tuple(range(6)),
            features=None, endpoint="p", peer_instance=P,
        )  # fmt: skip
        self.session.pull(request, self.now)
        self.session.receive("p", m.KVWelcome(instance=P, layout=LAYOUT, cipher="crc32c"), self.now)
        return request.room

    def announce(self, room: str, tokens: int) -> None:
        final = tokens == NUM_TOKENS
        said = m.Announce(
            room=room, epoch=0, instance=P, tokens_ready=tokens, final=final, first_token=1 if final else 0
        )
        self.session.receive("p", said, self.now)

    def block(self, room: str, block: int, count: int) -> SlabBlock:
        return SlabBlock(
            room=room, epoch=0, instance=P, block=block, size=4096 * count, digest=0, slab="3" * 32, slot=0,
            lease_ms=1000, count=count,
        )  # fmt: skip

    def land(self, room: str, block: int, count: int = 1) -> None:
        self.session.landed("p", self.block(room, block, count), self.now, is_device=True)


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
                first = rng.randrange(6)
                unasked = scene.block(part.request.room, first, rng.randint(1, 6 - first))
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
    scene.session.came_unasked("p", scene.block(second, 0, 6), scene.now)
    assert not [effect for effect in scene.session.tick(scene.now) if "Lost" in repr(effect)]
    assert scene.session.link_of("p").rooms[second].lease.ends_at == scene.now + LEASE_S
