"""Workers that change their role: which one may, and what became of each order. Pure.

draining     the worker finishes its requests, or gives them to others
restarting   its process has left and loads in the other role
done         a worker of the other role serves at the same PID
refused      its settings do not allow the other role
lost         it did not come back in time
"""

from dataclasses import dataclass

from msgspec import Struct

from .registry import Registry, Worker

HEARD_S = 10.0  # longest time until a worker's heartbeat tells of its order
RETURN_S = 900.0  # longest time from the order until the process serves again
MAX_MOVES = 16  # remembered


class RoleMove(Struct, frozen=True, kw_only=True):
    """One change of a role, as /status shows it."""

    instance: str
    role: str  # that the worker had
    to: str
    host: str
    pid: int
    state: str
    seconds: float  # since the order; final once it is over
    fault: str = ""


@dataclass(eq=False)
class _Move:
    worker: Worker
    to: str
    began: float
    state: str = "draining"
    ended: float | None = None

    @property
    def is_open(self) -> bool:
        return self.ended is None

    def end(self, state: str, now: float) -> None:
        self.state, self.ended = state, now


class RoleChanges:
    """The changes that this router has ordered, the newest last. At most one is open."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._moves: list[_Move] = []

    def __repr__(self) -> str:
        return f"RoleChanges({len(self._moves)}{', one under way' if self.is_busy else ''})"

    @property
    def is_busy(self) -> bool:
        """Whether a worker changes its role now."""
        return any(move.is_open for move in self._moves)

    def why_not(self, worker: Worker, role: str) -> str:
        """The reason why `worker` cannot get `role` now, as the end of a sentence; "" if it can."""
        if not worker.hello.changes_role:
            return "is of an older version, which cannot change its role"
        if worker.role == role:
            return f"is a {role} worker already"
        if not worker.is_serving:
            return f"is {worker.state}"
        if self.is_busy:
            return "has to wait: another worker changes its role"
        if not self.has_twin(worker):
            return f"is the only {worker.role} worker that serves this model"
        return ""

    def has_twin(self, worker: Worker) -> bool:
        """Whether another worker serves in the same role with the same fingerprint."""
        return any(
            other is not worker
            and other.is_serving
            and (other.role, other.hello.fingerprint) == (worker.role, worker.hello.fingerprint)
            for other in self._registry
        )

    def begin(self, worker: Worker, role: str, now: float) -> None:
        """Notes an order that goes to `worker`."""
        assert not self.is_busy, self
        self._moves = [*self._moves, _Move(worker, role, now)][-MAX_MOVES:]

    def turn(self, now: float) -> None:
        """Follows the open change by what the registry knows."""
        for move in self._moves:
            if move.is_open:
                self._follow(move, now)

    def _follow(self, move: _Move, now: float) -> None:
        stats, hello = move.worker.stats, move.worker.hello
        if self._registry.get(hello.instance) is not None:
            if stats is not None and stats.role_fault:
                move.end("refused", now)
            elif move.worker.is_serving and now - move.began > HEARD_S:
                move.end("lost", now)
        else:
            move.state = "restarting"
            back = [
                other
                for other in self._registry
                if (other.hello.host, other.hello.pid, other.role) == (hello.host, hello.pid, move.to)
            ]
            if any(other.is_serving for other in back):
                move.end("done", now)
        if move.is_open and now - move.began > RETURN_S:
            move.end("lost", now)

    def status(self, now: float) -> list[RoleMove]:
        """All remembered changes, the oldest first."""
        return [
            RoleMove(
                instance=move.worker.instance,
                role=move.worker.role,
                to=move.to,
                host=move.worker.hello.host,
                pid=move.worker.hello.pid,
                state=move.state,
                seconds=round((now if move.ended is None else move.ended) - move.began, 1),
                fault=move.worker.stats.role_fault if move.worker.stats is not None else "",
            )
            for move in self._moves
        ]
