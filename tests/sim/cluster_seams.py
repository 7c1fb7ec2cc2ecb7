"""Where each defence of the hand-off can be switched off, and faults under which the simulator notices.

`SEAMS[name]()` gives (a context manager that switches the defence off, the options of a run that needs it). The patches
are on production's classes, from outside: production knows no switch.
"""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import msgspec
from baton.decode.queues import RoomState as DecodeState
from baton.decode.worker import DecodeWorker
from baton.kvtransfer import endpoints
from baton.kvtransfer.endpoint import Delivered
from baton.kvtransfer.receiver import ReceiverSession
from baton.kvtransfer.session import Lease
from baton.prefill.queues import RoomState as PrefillState
from baton.prefill.worker import PrefillWorker
from baton.router.room_effects import Deliver
from baton.router.room_parts import Attempt
from baton.router.rooms import Room
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_nodes import SimSender
from baton.tests.sim.cluster_world import Options, Settings


def no_digest():
    """Blocks are taken as they come."""
    return patch.object(endpoints, "block_digest", lambda *_: 0), Options(faults=Faults(flip=0.4))


def no_tracker():
    """A send's memory is used again at once, whether or not the network has read it."""
    transmit = SimSender._transmit

    def untracked(self, peer, header, payload):
        return None if transmit(self, peer, header, payload) is None else Delivered()

    settings = Settings(head_dim=24, window=6)  # blocks that cross pages go through staging buffers
    return patch.object(SimSender, "_transmit", untracked), Options(faults=Faults(burst=True), settings=settings)


def no_lease():
    """Nobody gives up a room in which nothing moves."""
    return patch.object(Lease, "is_over", lambda *_: False), Options(faults=Faults(kill=3, kv_loss=0.25, partition=2))


def no_epoch():
    """The router takes every attempt's messages for the present one's."""
    accepts = Attempt.accepts

    def accept_any(self, message, instance):
        return accepts(self, msgspec.structs.replace(message, epoch=self.epoch), instance)

    faults = Faults(kill_at="P send Block", kill_nth=2, control_duplicate=0.85)  # the old attempt's Failed comes again
    options = Options(faults=faults, settings=Settings(step_s=0.1), num_prefills=2, num_decodes=2, num_clients=4)
    return patch.object(Attempt, "accepts", accept_any), options


def no_instance():
    """Decode takes whoever answers at prefill's address for the process that it was sent to."""
    receive = ReceiverSession.receive

    def receive_any(self, peer, message, now):
        room = self._find(getattr(message, "room", ""))
        if room is not None:
            message = msgspec.structs.replace(message, instance=room.request.peer_instance)
        elif hasattr(message, "layout") and self._pairs.get(peer) is not None:
            rooms = list(self._pairs[peer].rooms.values())
            if rooms:
                message = msgspec.structs.replace(message, instance=rooms[-1].request.peer_instance)
        return receive(self, peer, message, now)

    return patch.object(ReceiverSession, "receive", receive_any), Options(
        faults=Faults(kill_at="P send Announce", kill_nth=2), settings=Settings(chunk_size=0, step_s=0.01),
        num_prefills=2, num_decodes=2,
    )


def no_dedup():
    """Tokens that were delivered are delivered again."""

    def keep(self, item):
        self._early[item.seq] = item
        return True

    def next_item(self):
        return self._early.pop(min(self._early)) if self._early else None

    def deliver_whole(self, attempt, item, now):
        attempt.num_output += len(item.ids)
        self.output_ids += item.ids
        return [Deliver(item.ids, item.logprobs)]

    @contextmanager
    def patched():
        with ExitStack() as stack:
            stack.enter_context(patch.object(Attempt, "keep", keep))
            stack.enter_context(patch.object(Attempt, "next_item", next_item))
            stack.enter_context(patch.object(Room, "_deliver", deliver_whole))
            yield

    return patched(), Options(faults=Faults(control_duplicate=0.3))


def no_cancel(worker, state):
    """A Cancel is not heard in one state."""
    cancel = worker._cancel

    def deaf(self, room_id):
        if not any(room.state is state for room in self.queues.attempts(room_id)):
            cancel(self, room_id)

    return patch.object(worker, "_cancel", deaf), Options(faults=Faults(leave=0.9, stop=0.5))


SEAMS = {
    "digest": no_digest,
    "tracker": no_tracker,
    "lease": no_lease,
    "epoch": no_epoch,
    "instance": no_instance,
    "dedup": no_dedup,
    **{
        f"cancel {role} {state.value}": lambda worker=worker, state=state: no_cancel(worker, state)
        for role, worker, states in (("decode", DecodeWorker, DecodeState), ("prefill", PrefillWorker, PrefillState))
        for state in states
        if state.value not in ("closing", "prefilling")  # over within a turn of the link; only while no prefill serves
    },
}
