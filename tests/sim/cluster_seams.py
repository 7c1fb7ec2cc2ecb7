"""Switches for each defence of the hand-off, and faults under which the simulator notices its absence.

`SEAMS[name]()` gives (a context manager that switches the defence off, the options of a run that needs it).
The patches are on production's classes, from outside: production knows no switch.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import msgspec
from baton.cluster.net.control_link import LinkMachine
from baton.cluster.process.running_clock import PauseMeter, RunningClock
from baton.decode import admission
from baton.decode.page_growth import PageGrowth
from baton.decode.page_sharing import PageSharing
from baton.decode.queues import DecodeState
from baton.decode.worker import DecodeWorker
from baton.engine.engine import Engine
from baton.kvtransfer.protocol import peer_link, sender
from baton.kvtransfer.protocol.receiver import ReceiverSession
from baton.kvtransfer.protocol.session import Lease, SendBlock
from baton.kvtransfer.transport import Released
from baton.kvtransfer.transports import prepared_blocks, receiver_endpoint
from baton.kvtransfer.transports.endpoint import Delivered
from baton.kvtransfer.transports.sender_endpoint import SenderEndpoint
from baton.prefill.queues import PrefillState
from baton.prefill.worker import PrefillWorker
from baton.router.rooms import quarantine
from baton.router.rooms import room as room_module
from baton.router.rooms.attempt import Attempt
from baton.router.rooms.effects import Deliver, Freed
from baton.router.rooms.pending_cancels import PendingCancels
from baton.router.rooms.retries import RetryBudget
from baton.router.rooms.room import Room
from baton.router.scheduling import request_state
from baton.router.scheduling.dispatcher import Dispatcher
from baton.router.scheduling.output_estimates import claim_of
from baton.router.workers import eligibility
from baton.router.workers.registration import Registration
from baton.router.workers.registry import UNREACHABLE_S, Registry
from baton.router.workers.stalls import Stalls
from baton.tests.sim.cluster_class_seams import CLASS_SEAMS, CLASSES
from baton.tests.sim.cluster_faults import Faults
from baton.tests.sim.cluster_nodes import SimSender
from baton.tests.sim.cluster_pull_seams import PULL_SEAMS
from baton.tests.sim.cluster_tier_seams import STAGED, TIER_SEAMS
from baton.tests.sim.cluster_toy import ToyAheadDecoder
from baton.tests.sim.cluster_world import Options, Settings


def no_digest():
    """Blocks are taken as they come."""

    @contextmanager
    def switched_off():
        patches = [
            patch.object(module, "block_digest", lambda *_: 0)
            for module in (receiver_endpoint, prepared_blocks)
        ]
        with patches[0], patches[1]:
            yield

    return switched_off(), Options(faults=Faults(flip=0.4))


def no_tracker():
    """A send's memory is used again at once, whether or not the network has read it."""
    transmit = SimSender._transmit

    def untracked(self, peer, header, payload):
        return None if transmit(self, peer, header, payload) is None else Delivered()

    settings = Settings(
        head_dim=24, window=6, step_s=0.004
    )  # blocks that cross pages go through staging buffers
    options = Options(faults=Faults(burst=True, kv_reorder=0.5), settings=settings, num_clients=16)
    return patch.object(SimSender, "_transmit", untracked), options


def no_lease():
    """Nobody gives up a room in which nothing moves."""
    return patch.object(Lease, "is_over", lambda *_: False), Options(
        faults=Faults(kill_at="D send Finished", kill_after=True, kv_loss=0.3, burst=True),  # a lost Release
        settings=Settings(step_s=0.002), num_clients=20,
    )  # fmt: skip


def no_epoch():
    """The router takes every attempt's messages for the present one's."""
    accepts = Attempt.accepts

    def accept_any(self, message, instance):
        return accepts(self, msgspec.structs.replace(message, epoch=self.epoch), instance)

    faults = Faults(
        kill_at="P send Block", kill_nth=2, control_duplicate=0.85
    )  # the old attempt's Failed comes again
    options = Options(
        faults=faults, settings=Settings(step_s=0.1), num_prefills=2, num_decodes=2, num_clients=4
    )
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
        faults=Faults(kill_at="P send Announce", kill_nth=2),
        settings=Settings(chunk_size=0, step_s=0.01),
        num_prefills=2,
        num_decodes=2,
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


# States that end within a turn of the scheduler, and the event after which a Cancel must come to meet them.
BRIEF = {DecodeState.PREFILLING: "D event Reserve", DecodeState.WARMING: "D event Complete"}


def no_cancel(worker, state):
    """A room that a Cancel meets in one state never hears of it, and nobody hears that it is gone."""
    cancel, unheard = worker._cancel, set()

    def deaf(self, room_id, epoch):
        unheard.update(room.key[0] for room in self.queues.attempts(room_id) if room.state is state)
        if room_id not in unheard:
            cancel(self, room_id, epoch)

    settings = Settings(
        step_s=0.1, window=6, max_running=6, chunk_size=2 if state is PrefillState.RUNNING else 8,
        has_local_prefill=state is DecodeState.PREFILLING, choices=1 + (state is DecodeState.SHARING),
    )  # fmt: skip
    leave_at = BRIEF.get(state, "")
    faults = Faults() if leave_at else Faults(leave=0.9, stop=0.9, burst=True)
    if state is DecodeState.RESTORING:
        faults, settings = Faults(leave=0.7, tier_hang=12, tier_slow=0.5), STAGED
    if state is DecodeState.ADMITTING:
        faults, settings, leave_at = Faults(leave=0.5, burst=True), CLASSES, "D event Reserve"
    return patch.object(worker, "_cancel", deaf), Options(
        faults=faults, settings=settings,
        num_clients=40 if settings in (STAGED, CLASSES) else 12,
        num_prefills=1, num_decodes=2, leave_at=leave_at, odd="P0" if settings.has_local_prefill else "",
    )  # fmt: skip


def no_explicit_cancel():
    """A client that leaves is left to leases: the workers hear nothing of it."""

    def keep_quiet(self, hold):
        hold.num_cancels += 1
        return Freed(hold.instance, -1)  # an effect that changes nothing

    return patch.object(PendingCancels, "_ask", keep_quiet), Options(faults=Faults(leave=0.9))


def free_on_send():
    """Prefill frees a room's pages when its last block was sent, not when decode confirmed all of it."""
    send_some = SenderEndpoint._send_some

    def forget_when_sent(self, waiting):
        item, num_sent = waiting[0], send_some(self, waiting)  # one at a time here: max_batch is 1
        parts = self.session._rooms.get(item.room, {}) if num_sent and isinstance(item, SendBlock) else {}
        known = parts.get(0)
        if known is not None and known.is_final and item.block == known.stream.num_blocks - 1:
            self.session._release_part(known, self._clock())
            self._events.append(Released(room=item.room, epoch=item.epoch))
        return num_sent

    options = Options(faults=Faults(flip=0.1), may_repeat=False)
    return patch.object(SenderEndpoint, "_send_some", forget_when_sent), options


def hasty_close():
    """Decode frees a room's pages when it ends, not when the steps launched with it were read."""
    close = DecodeWorker._close

    def hasty(self, room):
        close(self, room)
        if room.state is DecodeState.SETTLING:
            self.engine.cache.allocator.release(room.request.pages)
            room.request.pages, room.is_tainted = [], True

    return patch.object(DecodeWorker, "_close", hasty)


def free_before_read():
    """As `hasty_close`, while steps are launched ahead."""
    options = Options(
        faults=Faults(leave=0.4), settings=Settings(is_overlapped=True, max_running=6), num_clients=12
    )
    return hasty_close(), options


def free_prompt_before_read():
    """Decode frees the pages of a prompt that it computes itself before the forward under way was read."""
    settings = Settings(
        is_overlapped=True, aggregated="alone", chunk_size=2, max_running=6, step_s=0.03, is_caching=False
    )
    options = Options(faults=Faults(leave=0.9, burst=True), settings=settings, num_clients=16)
    close = DecodeWorker._close

    def hasty(self, room):
        is_prompt = room.state is DecodeState.PREFILLING
        close(self, room)
        if is_prompt and room.state is DecodeState.SETTLING:
            self.engine.cache.allocator.release(room.request.pages)
            room.request.pages, room.is_tainted = [], True

    return patch.object(DecodeWorker, "_close", hasty), options


CROWDED = Settings(is_crowded=True, decode_pages=21, max_running=8, is_caching=False)


def no_next_pages():
    """A step is launched though the pages of its rows are not there."""
    return patch.object(PageGrowth, "cover", lambda self, batch, retract: list(batch)), Options(
        faults=Faults(), settings=CROWDED, num_clients=12
    )


def no_grant():
    """A room that comes back may lose its pages again at once."""
    return patch.object(
        request_state, "claim_of", lambda expected, produced, left, _: claim_of(expected, produced, left, 0)
    ), Options(faults=Faults(), settings=replace(CROWDED, first_guess=1, learns=False), num_clients=16)


def counted_retractions():
    """A room whose pages were taken back counts as failed."""
    return patch.object(room_module, "MAX_RETRACTIONS", 0), Options(
        faults=Faults(), settings=CROWDED, num_clients=12
    )


def untold_pages():
    """The device hears nothing of new pages."""
    return patch.object(ToyAheadDecoder, "grow", lambda *_: None), Options(
        faults=Faults(), settings=replace(CROWDED, is_overlapped=True), num_clients=12
    )


SHARED = Settings(choices=3, max_queue=96, max_running=6)


def early_share():
    """A choice computes behind a prompt that is still on its way to another one."""
    return patch.object(PageSharing, "is_complete", lambda *_: True), Options(
        faults=Faults(), settings=SHARED, num_clients=4
    )


def no_copy():
    """The page that two choices write is not copied."""
    return patch.object(Engine, "copy_page", lambda *_: None), Options(
        faults=Faults(), settings=SHARED, num_clients=4
    )


def no_owner():
    """A choice uses the pages of another one and does not count as their owner."""

    def take_unowned(cache, request, shared, num_pages):
        request.pages = [*shared, *cache.alloc(num_pages - len(shared))]

    return patch.object(admission, "take_shared_pages", take_unowned), Options(
        faults=Faults(), settings=SHARED, num_clients=4
    )


def old_pages():
    """A choice keeps the pages that the other one had when both were admitted."""
    settings = replace(SHARED, aggregated="alone", chunk_size=5, max_running=12)
    return patch.object(PageSharing, "_follow", lambda *_: None), Options(
        faults=Faults(burst=True), settings=settings, num_clients=16
    )


def no_word_of_a_lost_prompt():
    """A choice waits on for a prompt that another one has lost."""
    settings = replace(SHARED, step_s=0.1)
    return patch.object(DecodeWorker, "_unshare", lambda *_: None), Options(
        faults=Faults(leave=0.7, burst=True), settings=settings, num_clients=6
    )


def no_retry_budget():
    """However many attempts fail, there is another one for every room."""
    return patch.object(RetryBudget, "take", lambda *_: True), Options(
        faults=Faults(flip=1.0), settings=Settings(is_caching=False), num_clients=16
    )


def no_attempt_limit():
    """One room is tried for as long as it fails."""
    enqueue = Dispatcher._enqueue

    def enqueue_stubborn(self, *args):
        entry = enqueue(self, *args)
        entry.room.max_attempts = 1000
        return entry

    return patch.object(Dispatcher, "_enqueue", enqueue_stubborn), Options(
        faults=Faults(flip=1.0), settings=Settings(is_caching=False), num_clients=2
    )


def no_third_chance():
    """Two workers that died with a request are taken for proof."""
    options = Options(
        faults=Faults(kill_two=1), settings=Settings(step_s=0.2, chunk_size=4, max_running=8), num_clients=24,
        num_prefills=3, num_decodes=3,
    )  # fmt: skip
    return patch.object(quarantine, "MAX_DEATHS", 2), options


def no_deadline():
    """A client waits for as long as it takes."""
    enqueue = Dispatcher._enqueue

    def enqueue_patient(self, *args):
        entry = enqueue(self, *args)
        entry.room.deadline = None
        return entry

    options = Options(faults=Faults(hang=4), settings=Settings(request_timeout_s=0.5), num_clients=8)
    return patch.object(Dispatcher, "_enqueue", enqueue_patient), options


def no_heartbeat():
    """A worker counts as alive as long as its connection is there."""

    def is_cut_off(self, worker, now):
        return worker.unreachable_since is not None and now - worker.unreachable_since > UNREACHABLE_S

    options = Options(
        faults=Faults(hang=3), settings=Settings(step_s=0.1, worker_timeout_s=0.9, max_running=8),
        num_prefills=2, num_decodes=2, num_clients=24, served_within_s=2.5,
    )  # fmt: skip
    return patch.object(Registry, "_is_overdue", is_cut_off), options


def no_generation():
    """The router does not hear that a worker has dropped all its rooms."""
    hello = Registration.hello

    def deaf(self, identity, message, now):
        known = self._registry.get(message.instance)
        if known is not None:
            message = msgspec.structs.replace(message, generation=known.hello.generation)
        return hello(self, identity, message, now)

    options = Options(
        faults=Faults(cut=3), settings=Settings(step_s=0.1), num_prefills=2, num_decodes=2, num_clients=12,
        served_within_s=2.8,
    )  # fmt: skip
    return patch.object(Registration, "hello", deaf), options


def no_broken_connection():
    """A worker does not notice that its connection to the router broke, and what was under way with it."""
    options = Options(
        faults=Faults(cut=4), settings=Settings(step_s=0.004, max_running=8), num_prefills=2, num_decodes=2,
        num_clients=60,
        served_within_s=2.9,
    )  # fmt: skip
    return patch.object(LinkMachine, "broke", lambda _: None), options


def no_repeated_orders():
    """The router does not hear that a worker missed an order of it."""
    options = Options(faults=Faults(order_flip=0.1), num_clients=16, may_repeat=False)
    return patch.object(Room, "resend_orders", lambda *_: []), options


def no_lost_router():
    """Workers go on with the rooms of a replaced router, and its successor does not stop them.

    Either of the two suffices.
    """

    @contextmanager
    def patched():
        with ExitStack() as stack:
            for owner, name in (
                (DecodeWorker, "drop_rooms"),
                (PrefillWorker, "drop_rooms"),
                (Registration, "orphan"),
            ):
                stack.enter_context(patch.object(owner, name, lambda *_: None))
            yield

    settings = Settings(step_s=0.3, chunk_size=2, max_running=8)
    return patched(), Options(faults=Faults(usurp=1), settings=settings, num_clients=24)


def no_stall():
    """A silent worker counts as lost, also where no other can serve its requests."""
    options = Options(faults=Faults(stall=2, hang=1), num_prefills=1, num_decodes=1, num_clients=8)
    return patch.object(Stalls, "_may_wait", lambda *_: False), options


def no_pause_of_the_router():
    """A router that did not run takes the time for that of its workers and its queue."""
    settings = Settings(max_running=2, step_s=0.1, request_timeout_s=60.0)
    options = Options(
        faults=Faults(pause_all=2, burst=True), settings=settings, num_prefills=1, num_decodes=1,
        num_clients=16,
    )  # fmt: skip
    return patch.object(PauseMeter, "turn", lambda *_: 0.0), options


def no_running_clock():
    """A worker that did not run takes the time for a silence of its router and its peers."""
    settings = Settings(step_s=0.1, request_timeout_s=60.0)
    options = Options(
        faults=Faults(pause_all=2), settings=settings, num_prefills=1, num_decodes=1, num_clients=12,
        may_repeat=False,
    )  # fmt: skip
    return patch.object(RunningClock, "__call__", lambda self: self._clock()), options


def prefillers_of_any(decode, serving, avoid):
    return [worker for worker in serving if worker.role == "prefill"]


def no_fingerprint():
    """The router pairs workers of different models; only their handshake notices, and costs an attempt."""
    options = Options(faults=Faults(), odd="P1", num_prefills=2, num_decodes=2, may_repeat=False)
    return patch.object(eligibility, "prefillers", prefillers_of_any), options


def no_fingerprint_anywhere():
    """Neither the router nor the handshake looks at what a worker serves."""

    @contextmanager
    def patched():
        with ExitStack() as stack:
            stack.enter_context(patch.object(eligibility, "prefillers", prefillers_of_any))
            stack.enter_context(patch.object(sender, "agree", lambda ours, theirs: theirs))
            stack.enter_context(patch.object(peer_link, "agree", lambda ours, theirs: theirs))
            yield

    return patched(), Options(faults=Faults(), odd="P1", num_prefills=2, num_decodes=2)


SEAMS = {
    "digest": no_digest,
    "tracker": no_tracker,
    "lease": no_lease,
    "epoch": no_epoch,
    "instance": no_instance,
    "dedup": no_dedup,
    "explicit cancel": no_explicit_cancel,
    "pages held until Release": free_on_send,
    "pages held until read": free_before_read,
    "prompt pages held until read": free_prompt_before_read,
    "pages of the next step": no_next_pages,
    "pages on the device": untold_pages,
    "grant of a retracted room": no_grant,
    "retraction is no failure": counted_retractions,
    "prompt shared when complete": early_share,
    "copy of the common page": no_copy,
    "owners of shared pages": no_owner,
    "pages of a changed prompt": old_pages,
    "word of a lost prompt": no_word_of_a_lost_prompt,
    "retry budget": no_retry_budget,
    "attempts of a room": no_attempt_limit,
    "third chance": no_third_chance,
    "deadline": no_deadline,
    "heartbeat": no_heartbeat,
    "generation": no_generation,
    "broken connection": no_broken_connection,
    "repeated orders": no_repeated_orders,
    "lost router": no_lost_router,
    "stall": no_stall,
    "pause of the router": no_pause_of_the_router,
    "running clock": no_running_clock,
    "fingerprint at the router": no_fingerprint,
    "fingerprint anywhere": no_fingerprint_anywhere,
    **TIER_SEAMS,
    **CLASS_SEAMS,
    **PULL_SEAMS,
    **{
        f"cancel {role} {state.value}": lambda worker=worker, state=state: no_cancel(worker, state)
        for role, worker, states in (
            ("decode", DecodeWorker, DecodeState),
            ("prefill", PrefillWorker, PrefillState),
        )
        for state in states
        # closing: a Cancel has been heard before, and the end is there within a turn of the link; settling:
        # within a step
        if state.value not in ("closing", "settling")
    },
}
