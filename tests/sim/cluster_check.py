"""The invariants of a simulated cluster, after every turn and at the end. Clients check their own answers."""

from baton.cluster.protocol.messages import Failed
from baton.decode.queues import DecodeState
from baton.kvtransfer.protocol.sender import EARLY_S, SenderSession
from baton.kvtransfer.protocol.session import MAX_TOMBSTONES, TOMBSTONE_S
from baton.kvtransfer.transports.sender_endpoint import SenderEndpoint
from baton.router.rooms.attempt import HANDOFF_KINDS, RETRACTED
from baton.router.rooms.retries import BUDGET_FLOOR, BUDGET_SHARE, MAX_ATTEMPTS
from baton.router.rooms.room import RoomPhase
from baton.tests.sim.cluster_clients import Violation
from baton.tests.sim.cluster_faults import LOSING, PAUSES
from baton.tests.sim.cluster_pulls import check_patience, ends_of, held_pages, untold

SERVED_S = 3.0  # what a request needs beside pauses
RECOVERED_S = 2.8  # a request whose worker died has its answer from others
TURNS_PER_AUDIT = 16  # the whole page accounting is looked at once in so many turns


class Checker:
    """Looks at processes from outside; changes nothing until the run is over."""

    def __init__(self, world):
        self.world = world
        self._num_turns = 0
        self._lost = {}  # room -> {attempt whose pages were taken back: the newest one when the router heard}

    # --- after a turn of a worker ---------------------------------------------------------------------------

    def after_turn(self, process):
        allocator = process.engine.cache.allocator
        if allocator.num_corrupted:
            raise Violation(f"{process.name} gave out a page that was written while it was free")
        self._num_turns += 1
        if self._num_turns % TURNS_PER_AUDIT == 0:
            self._audit(process)
            for client in self.world.clients:
                client.check_time()
                if client.entry is not None:
                    client.entry.room.check_integrity()

    def heard(self, router, message):
        """A router hears of a retraction before it handles any later message."""
        if isinstance(message, Failed) and message.kind == RETRACTED:
            entry = router.dispatcher._entries.get(message.room)
            if entry is not None and router.dispatcher.registry.get(message.instance) is not None:
                self._lost.setdefault(message.room, {}).setdefault(message.epoch, entry.room.epoch)

    def _lost_before(self, room):
        """How often the router had heard, before it placed this attempt, that the room had lost its pages."""
        return sum(epoch < room.request.epoch for epoch in self._lost.get(room.request.room, {}).values())

    def prompt_retracted(self, room):
        """Prefill takes the pages of a room once at most."""
        self.world.reached["prompt retracted"] += 1
        if self._lost_before(room):
            raise Violation(f"room {room.request.room[:8]} lost its pages on prefill again")

    def retracted(self, room, reason):
        """Decode takes the pages of a room back again only after twice as many tokens as the time before."""
        self.world.reached[reason.value] += 1
        count = self._lost_before(room)
        if count and room.request.num_output < 1 << count:
            raise Violation(
                f"room {room.request.room[:8]} lost its pages again after {room.request.num_output} tokens"
            )

    def _audit(self, process):
        """Every page is free, cached, or held by rooms that are here; nobody writes a free one."""
        cache = process.engine.cache
        cache.check_integrity()
        if not cache.allocator.check_free_pages():
            raise Violation(f"a free page of {process.name} was written")
        owners = dict.fromkeys(range(1, cache.allocator.num_pages), 0)
        for room in process.worker.queues:
            for page in room.request.pages:
                owners[page] += 1
        for page in cache._children.values():
            owners[page] += 1
        for page in held_pages(process):
            owners[page] += 1
        check_patience(process)
        if process.tier_checks is not None:
            process.tier_checks.audit(owners)
        for page, count in owners.items():
            if cache.allocator.refs(page) != count:
                raise Violation(
                    f"page {page} of {process.name} has {cache.allocator.refs(page)} owners, {count} are "
                    "known"
                )

    # --- at the end -----------------------------------------------------------------------------------------

    def is_quiet(self):
        return not any(leftover for process in self.world.living() for leftover in self._left(process))

    def _left(self, process):
        """(what, how much) of everything that a process holds though nobody asks anything of it."""
        if process.role == "R":
            dispatcher = process.dispatcher
            yield from self._nonzero(
                process,
                rooms=dispatcher.num_open,
                queued=dispatcher.num_queued,
                ledgers=sum(len(worker.ledger) for worker in process.dispatcher.registry),
                outboxes=sum(len(worker.outbox) for worker in process.dispatcher.registry),
            )
            return
        ends, stats = ends_of(process.transport), process.worker.stats()
        yield from self._nonzero(
            process,
            rooms=process.worker.num_rooms,
            pages=stats.pages_total - stats.pages_free,
            transfers=sum(end.session.num_rooms for end in ends),
            outbox=sum(len(waiting) for end in ends for waiting in end._outbox.values()),
            untold=untold(process, self.world.router),
            commands=len(process.link.commands),
            messages=process.control.num_waiting,
            unread=len(process.link.inbox),
        )
        if process.tier_checks is not None:
            yield from self._nonzero(process, copies=process.worker.tiers.tiers.is_busy)
        for sender in ends:
            if isinstance(sender, SenderEndpoint):
                yield from self._nonzero(
                    process,
                    reads=len(sender._reads._pages),
                    held=len(sender._reads._held),
                    staging=len(sender._reads._staging),
                    waiting=len(sender._waiting),
                    prepared=len(sender._prepared),
                )

    def _nonzero(self, process, **amounts):
        for what, amount in amounts.items():
            if amount:
                yield f"{process.name} has {amount} {what}"

    def check_end(self):
        world = self.world
        for process in world.living():
            left = list(self._left(process))
            if left:
                raise Violation("left behind: " + ", ".join(left))
        for worker in world.workers.values():
            if worker is not None:
                self._audit(worker)
                if worker.tier_checks is not None:
                    worker.tier_checks.check_end()
                self._check_memory(worker)
        self._check_retries()
        self._check_success()
        self._check_innocence()
        self._check_pauses()
        self._check_options()
        self._check_digests()
        self._check_features()

    def _check_memory(self, worker):
        cache = worker.engine.cache
        cache.clear()
        if cache.allocator.num_used:
            raise Violation(f"{worker.name} has {cache.allocator.num_used} pages that nobody owns")
        for end in ends_of(worker.transport):
            self._check_session(worker, end.session)

    def _check_session(self, worker, session):
        if len(session._tombstones) > MAX_TOMBSTONES:
            raise Violation(f"{worker.name} has {len(session._tombstones)} tombstones")
        session.tick(worker.clock() + max(EARLY_S, TOMBSTONE_S) + 1)
        if len(session._tombstones) > 1:  # an early Attach that ends now may leave one
            raise Violation(f"{worker.name} keeps {len(session._tombstones)} tombstones")
        if isinstance(session, SenderSession) and session._early:
            raise Violation(f"{worker.name} keeps {len(session._early)} early attachments")

    def _check_retries(self):
        """Attempts beyond the first are a fifth of the rooms, or the floor always allowed; refusals are free.

        Rooms of lost workers are retried beyond that budget, each a bounded number of times.
        """
        world = self.world
        free = world.seen["R recv Refused"] + world.reached["drain"]
        for router in world.routers:
            rooms = [
                client.entry.room for client in world.clients if client.entry and client.router is router
            ]
            # a retraction is no failure, and neither is a prompt that another choice has lost
            tries = [room.epoch - room.num_retractions - room.num_unshared for room in rooms]
            if any(count >= MAX_ATTEMPTS + free for count in tries):
                raise Violation(f"a room was tried {max(tries) + 1} times")
            repeated = sum(tries) - free
            loses_workers = bool(LOSING & set(world.faults.names))
            if not loses_workers and repeated > max(BUDGET_FLOOR, BUDGET_SHARE * len(rooms)):
                raise Violation(f"{repeated} repeated attempts for {len(rooms)} rooms")

    def _check_success(self):
        """Without losses nothing may fail; and one worker that dies costs nobody an answer."""
        world, faults = self.world, self.world.faults
        is_lossless = faults.are_only("burst", "stop", "leave", "order_flip")
        has_prefills = world.num_prefills > 1 or world.settings.aggregated == "alone"
        has_spare = has_prefills and world.num_decodes > 1
        is_one_death = faults.are_only("kill", "kill_at", "stop", "leave") and world.num_deaths.total() == 1
        if world.options.poison:
            return
        if not is_lossless and not (is_one_death and has_spare and not world.num_deaths["R"]):
            return
        for client in world.clients:
            if client.end not in ("ok", "stopped", "left"):
                raise Violation(f"client {client.number} ended with {client.end} though nothing was lost")
            # a crowd waits for its turn without any death, too
            since = max(client.came_at, world.died_at) if world.settings.is_crowded else client.came_at
            waited = client.ended_at - since
            if (
                is_one_death
                and world.settings.step_s <= 0.01
                and world.settings.lease_s <= 1.5
                and waited > RECOVERED_S + self._crowd_s
            ):
                raise Violation(f"client {client.number} waited {waited:.1f} s after the death of a worker")

    @property
    def _crowd_s(self):
        """The steps of all choices on the worker that is left, for which those of a crowd wait."""
        settings = self.world.settings
        if not settings.is_crowded or settings.choices == 1:
            return 0.0
        tokens = sum(client.sampling.max_new_tokens for client in self.world.clients)
        return tokens * settings.step_s / settings.max_running

    def _check_pauses(self):
        """A pause of processes that live costs nobody an answer, unless the deadline passes meanwhile, or so
        many hand-offs time out that the router may repeat no more of them.
        """
        world = self.world
        if world.options.poison or not world.faults.are_only(*PAUSES, "stop", "leave", "burst"):
            return
        is_late = world.paused_s >= world.settings.request_timeout_s - SERVED_S
        ends = {"ok", "stopped", "left", *(("DeadlineExceeded",) if is_late else ())}
        spent = {router for router in world.routers if not router.dispatcher._retries.take(0, router.clock())}
        for client in world.clients:
            if client.end not in (ends | HANDOFF_KINDS if client.router in spent else ends):
                raise Violation(
                    f"client {client.number} ended with {client.end} by pauses of {world.paused_s} s"
                )

    def _check_innocence(self):
        """Two deaths may be chance: no request here kills, so none fails before a third worker is lost."""
        world = self.world
        if world.options.poison or not world.faults.are_only(
            "kill", "kill_at", "kill_two", "stop", "leave", "burst", "tight"
        ):
            return
        num_deaths = world.num_deaths["P"] + world.num_deaths["D"]
        for client in world.clients:
            if client.end in ("Quarantined", "PeerLost") and num_deaths < 3:
                raise Violation(f"client {client.number} ended with {client.end} after {num_deaths} deaths")

    def _check_options(self):
        """What the caller of this run expects of it."""
        options = self.world.options
        for client in self.world.clients:
            if not options.may_repeat and client.entry is not None and client.entry.room.epoch > 0:
                raise Violation(
                    f"client {client.number} was served in {client.entry.room.epoch + 1} attempts"
                )
            waited = client.ended_at - client.came_at
            most_s = options.urgent_within_s if client.priority < 0 else options.served_within_s
            if most_s and (client.end != "ok" or waited > most_s):
                raise Violation(f"client {client.number} ended with {client.end} after {waited:.1f} s")

    def _check_digests(self):
        """Bytes that nobody changed are right: memory that a send still reads is not used again.

        Except for rooms that prefill gives up: digests void those reads, and decode soon learns of the end.
        """
        world = self.world
        has_given_up = world.seen["P event DropDone"] or world.seen["P event Dropped"]
        if has_given_up or not world.faults.are_only("burst", "control_reorder", "cut"):
            return
        for worker in world.workers.values():
            if any(end.counters["digest_mismatches"] for end in ends_of(worker.transport)):
                raise Violation(f"{worker.name} found wrong blocks though no bit was flipped")

    def _check_features(self):
        """Whoever gets pages without features holds their tokens itself: prefill has its word."""
        if self.world.reached["asked for features that are not there"]:
            raise Violation("a decode worker lacked tokens whose pages came without features to prefill")

    def check_gone(self, client):
        """Nothing of a room is left a second after its client has gone."""
        room = client.entry.room
        if room.phase is not RoomPhase.CLOSED:
            raise Violation(f"client {client.number} has left, and a second later there is {room}")
        for worker in self.world.workers.values():
            if worker.worker.queues.attempts(room.room):
                raise Violation(
                    f"client {client.number} has left, and a second later {worker.name} has its room"
                )

    def check_orphans(self, router):
        """Nothing runs for the router's predecessor. Ended requests wait for the step under way."""
        for worker in self.world.workers.values():
            for room in worker.worker.queues if worker is not None else ():
                is_known = (
                    room.state is DecodeState.SETTLING or room.request.room in router.dispatcher._entries
                )
                if router.is_alive and not is_known:
                    raise Violation(f"{worker.name} still has {room.request} of a router that is gone")
