"""What the scaler of roles sees: the queues and the workers of a router, and the move that is due."""

from collections.abc import Mapping

from ...cluster.protocol.messages import FirstToken
from ..rooms.attempt import RoomEvent
from ..rooms.room import RoomPhase
from ..workers.registry import Registry, Worker
from .request_state import Entry
from .role_scaler import LOOK_S, BusyShares, Candidate, Move, Queues, QueueTimes, RoleScaler
from .waiting_list import WaitingList

DRAIN_S = 10.0  # for the running requests of a worker that moves


class RoleMoves:
    """Feeds a `RoleScaler`. Without one nothing moves.

    `entries`: all rooms of the router, by id.
    """

    def __init__(
        self,
        registry: Registry,
        waiting: WaitingList,
        entries: Mapping[str, Entry],
        scaler: RoleScaler | None,
    ) -> None:
        self._registry = registry
        self._waiting = waiting
        self._entries = entries
        self._scaler = scaler
        self._queue_times, self._busy = QueueTimes(), BusyShares()
        self._looked_at = 0.0

    def __repr__(self) -> str:
        return f"RoleMoves({self._scaler or 'off'})"

    def heard(self, worker: Worker, event: RoomEvent, now: float) -> None:
        """Learns from the times of a prompt."""
        if self._scaler is not None and isinstance(event, FirstToken):
            self._queue_times.add(event.timeline.queue_ms / 1000, now)
            self._busy.add(worker.instance, event.timeline.busy_ms / 1000, now)

    def due(self, now: float, *, is_busy: bool) -> Move | None:
        """The move to order now. `is_busy`: a worker changes its role already."""
        if self._scaler is None or now - self._looked_at < LOOK_S:
            return None
        self._looked_at = now
        self._busy.keep([worker.instance for worker in self._registry])
        return self._scaler.look(now, self.queues(now), self.candidates(now), is_busy=is_busy)

    def queues(self, now: float) -> Queues:
        """The waits of this moment."""
        waits = [
            now - entry.queued_at
            for entry in self._waiting
            if entry.not_before <= now and entry.room.phase is RoomPhase.QUEUED and not entry.room.deaths
        ]
        phases = [entry.room.phase for entry in self._entries.values() if entry.room.is_at_workers]
        num_streaming = sum(phase is RoomPhase.STREAMING for phase in phases)
        return Queues(
            prompt_s=self._queue_times.at(now),
            place_s=max(waits, default=0.0),
            streaming_share=num_streaming / len(phases) if phases else 1.0,
        )

    def candidates(self, now: float) -> list[Candidate]:
        """The workers that may change their role; none where workers of several models serve.

        Workers that end with others keep theirs, and so does one that has refused to change.
        """
        serving = [worker for worker in self._registry if worker.is_serving]
        if len({worker.hello.fingerprint for worker in serving}) != 1:
            return []
        return [
            Candidate(instance=worker.instance, role=worker.role, load=self._load_of(worker, now))
            for worker in serving
            if worker.hello.changes_role and not worker.is_aggregated and not worker.hello.group
            if worker.stats is None or not worker.stats.role_fault
        ]

    def _load_of(self, worker: Worker, now: float) -> float:
        if worker.role == "prefill":
            return self._busy.at(worker.instance, now)
        # a place that is held for a prompt without a first token is no load of decode
        num_running = worker.stats.running if worker.stats is not None else worker.num_taken
        return min(1.0, num_running / max(1, worker.hello.max_running))
