"""The workers that may hold something of a room.

Each gets a Cancel at the end, repeated until its Gone arrives. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...cluster.protocol.messages import Cancel
from .effects import Effect, Freed, SendOrder

CANCEL_AGAIN_S = 0.25  # seconds until a Cancel without Gone is repeated; doubled for each further repeat


@dataclass
class PendingCancel:
    """A worker that may hold something of an attempt, with the state of its Cancel."""

    instance: str
    epoch: int
    cancelled_at: float | None = None
    num_cancels: int = 0

    def is_due(self, now: float) -> bool:
        """Whether to repeat the Cancel now, since it or its Gone may be lost."""
        return self.cancelled_at is not None and now - self.cancelled_at >= CANCEL_AGAIN_S * (
            2**self.num_cancels - 1
        )

    def is_overdue(self, now: float, gone_s: float) -> bool:
        """Whether the Cancel has been unanswered for longer than `gone_s`."""
        return self.cancelled_at is not None and now - self.cancelled_at > gone_s


class PendingCancels:
    """The pending cancels of one room, for all its attempts."""

    def __init__(self, room: str) -> None:
        self._room = room
        self._pending: list[PendingCancel] = []

    def __repr__(self) -> str:
        return ",".join(hold.instance[:6] for hold in self._pending)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def instances(self) -> set[str]:
        return {hold.instance for hold in self._pending}

    @property
    def are_cancelled(self) -> bool:
        return all(hold.cancelled_at is not None for hold in self._pending)

    def add(self, instances: Sequence[str], epoch: int) -> None:
        """Adds the workers of a new attempt."""
        self._pending += [PendingCancel(instance, epoch) for instance in instances]

    def has(self, instance: str, epoch: int) -> bool:
        """Whether the worker may hold something of this attempt."""
        return any(hold.instance == instance and hold.epoch == epoch for hold in self._pending)

    def cancel(self, now: float) -> list[Effect]:
        """Sends a Cancel to every worker that has not been sent one."""
        asked: list[Effect] = []
        for hold in self._pending:
            if hold.cancelled_at is None:
                hold.cancelled_at = now
                asked.append(self._ask(hold))
        return asked

    def tick(self, now: float, gone_s: float) -> list[Effect]:
        """Repeats due Cancels. A worker silent for `gone_s` is dropped: its own lease frees the room."""
        overdue = [hold for hold in self._pending if hold.is_overdue(now, gone_s)]
        return self._free(overdue) + [self._ask(hold) for hold in self._pending if hold.is_due(now)]

    def gone(self, instance: str, epoch: int) -> list[Effect]:
        """Notes that the worker holds nothing of the cancelled attempts up to `epoch`."""
        mine = [hold for hold in self._pending if hold.instance == instance and hold.epoch <= epoch]
        return self._free([hold for hold in mine if hold.cancelled_at is not None])

    def lose(self, instance: str) -> tuple[list[Effect], set[int]]:
        """Drops a worker that is gone. Returns the effects and the epochs that it had."""
        lost = [hold for hold in self._pending if hold.instance == instance]
        return self._free(lost), {hold.epoch for hold in lost}

    def finish(self, epoch: int) -> list[Effect]:
        """Drops all workers of a complete attempt."""
        freed: list[Effect] = []
        kept: list[PendingCancel] = []
        for hold in self._pending:
            if hold.epoch == epoch:
                freed.append(Freed(hold.instance, hold.epoch))
            else:
                kept.append(hold)
        self._pending = kept
        return freed

    def drop(self, instance: str, epoch: int) -> list[Effect]:
        """Drops one attempt of a worker that reported to hold nothing of it."""
        self._pending = [
            hold for hold in self._pending if not (hold.instance == instance and hold.epoch == epoch)
        ]
        return [Freed(instance, epoch)]

    def _free(self, holds: Iterable[PendingCancel]) -> list[Effect]:
        free = list(holds)
        self._pending = [hold for hold in self._pending if not any(hold is other for other in free)]
        return [Freed(hold.instance, hold.epoch) for hold in free]

    def _ask(self, hold: PendingCancel) -> SendOrder:
        hold.num_cancels += 1
        return SendOrder(hold.instance, Cancel(room=self._room, epoch=hold.epoch, instance=hold.instance))
