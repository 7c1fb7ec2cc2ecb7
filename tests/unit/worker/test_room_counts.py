"""A worker's heartbeat counts its rooms by what happens to them, and the routers' canaries among them."""

from types import SimpleNamespace

from baton.cluster.protocol.messages import CANARY_SALT, RoomCounts
from baton.decode.queues import DecodeState
from baton.decode.worker import DecodeWorker
from baton.prefill.queues import PrefillState
from baton.prefill.worker import PrefillWorker


def counts_of(kind, *rooms):
    worker = object.__new__(kind)
    worker.queues = [
        SimpleNamespace(state=state, request=SimpleNamespace(salt=salt)) for state, salt in rooms
    ]
    return worker._room_counts()


def test_canaries_are_counted_apart_and_rooms_that_ended_not_at_all():
    assert counts_of(
        DecodeWorker,
        (DecodeState.RUNNING, "a tenant"),
        (DecodeState.RUNNING, f"{CANARY_SALT}1"),
        (DecodeState.WARMING, ""),
        (DecodeState.PREFILLING, ""),
        (DecodeState.PULLING, f"{CANARY_SALT}2"),
        (DecodeState.SETTLING, f"{CANARY_SALT}3"),
        (DecodeState.CLOSING, ""),
    ) == (RoomCounts(running=2, queued=2, transferring=1), RoomCounts(running=1, transferring=1))
    assert counts_of(
        PrefillWorker,
        (PrefillState.QUEUED, ""),
        (PrefillState.RUNNING, f"{CANARY_SALT}1"),
        (PrefillState.HANDED, ""),
        (PrefillState.CLOSING, ""),
    ) == (RoomCounts(running=1, queued=1, transferring=1), RoomCounts(running=1))
