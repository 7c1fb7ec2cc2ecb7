"""Decides whether a worker that is overdue is lost, or only stalled.

    dead       its process is gone: the kernel closes its connection at once. It is lost.
    silent     its connection stands and no heartbeat comes: it is stopped, its host is suspended, its loop
               hangs, or the network is cut off. Where another pair of its fingerprint serves, it is lost, and
               its rooms go on there. Where none does, it is stalled.
    stalled    Its rooms stay with it and new requests wait in the queue, since nobody else can serve them. A
               heartbeat ends the stall, and the streams go on. It is lost when another pair serves, when its
               connection ends, or after `stall_s` without a heartbeat.

A worker that hangs ends by its own watchdog, which closes its connection. Pure.
"""

import logging
from collections import Counter

from ...cluster.process.log import fields
from .eligibility import pairs
from .registry import Registry, Worker

logger = logging.getLogger(__name__)


class Stalls:
    """The judge of overdue workers. With a `stall_s` of 0 each of them is lost."""

    def __init__(self, registry: Registry, stall_s: float, events: Counter[str]) -> None:
        self._registry = registry
        self._events = events
        self._stall_s = stall_s

    def __repr__(self) -> str:
        return f"Stalls({len(self._registry.stalled)} workers, {self._stall_s:g} s)"

    def lost(self, now: float) -> list[Worker]:
        """The workers that are lost at `now` (monotonic seconds). Marks those that are stalled."""
        overdue = self._registry.overdue(now)
        if not overdue:
            return []
        others = [worker for worker in self._registry if worker not in overdue]
        served = {decode.hello.fingerprint for _, decode in pairs(others)}
        lost = []
        for worker in overdue:
            if worker.hello.fingerprint in served or not self._may_wait(worker, now):
                lost.append(worker)
            elif worker.stalled_since is None:
                self._stall(worker, now)
        return lost

    def ends_in(self, worker: Worker, now: float) -> float:
        """Seconds until a stalled worker is lost."""
        return max(0.0, worker.last_seen + self._stall_s - now)

    def longest(self, now: float) -> float:
        """Seconds for which a stalled worker has been silent, the most of all; 0 without one."""
        return max((now - worker.last_seen for worker in self._registry.stalled), default=0.0)

    def why(self, now: float) -> str:
        """One line about the workers that requests wait for, without their names; "" without any."""
        stalled = self._registry.stalled
        if not stalled:
            return ""
        role = stalled[0].role
        kind = f"{role} worker" if all(worker.role == role for worker in stalled) else "worker"
        named = f"the {kind} has" if len(stalled) == 1 else f"{len(stalled)} {kind}s have"
        return f"{named} not answered for {self.longest(now):.0f} s, though the connection stands"

    def _may_wait(self, worker: Worker, now: float) -> bool:
        is_known = worker.stats is not None
        return is_known and self._registry.is_silent(worker, now) and now - worker.last_seen <= self._stall_s

    def _stall(self, worker: Worker, now: float) -> None:
        self._registry.stall(worker)
        self._events["worker_stalled"] += 1
        logger.warning(
            "worker stalled: requests wait for it",
            extra=fields(
                role=worker.role,
                instance=worker.instance,
                silent_s=round(now - worker.last_seen, 1),
                lost_in_s=round(self.ends_in(worker, now), 1),
            ),
        )
