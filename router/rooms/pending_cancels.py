"""The workers that may hold something of a room, each asked to let go of it until it says that it has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...cluster.messages import Cancel
from .effects import Effect, Freed, Send

CANCEL_AGAIN_S = 0.25  # a Cancel without Gone is repeated after so long, then after twice as long, and so on


@dataclass
class PendingCancel:
    """A worker that may hold something of an attempt."""

    instance: str
    epoch: int
    cancelled_at: float | None = None
    num_cancels: int = 0

    def is_due(self, now: float) -> bool:
        """Whether its Cancel should go out again: the last one, or the Gone that answers it, may be lost."""
        return self.cancelled_at is not None and now - self.cancelled_at >= CANCEL_AGAIN_S * (
            2**self.num_cancels - 1
        )

    def is_overdue(self, now: float, gone_s: float) -> bool:
        return self.cancelled_at is not None and now - self.cancelled_at > gone_s


class PendingCancels:
    """Those of one room, of all its attempts."""

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
        self._pending += [PendingCancel(instance, epoch) for instance in instances]

    def has(self, instance: str, epoch: int) -> bool:
        return any(hold.instance == instance and hold.epoch == epoch for hold in self._pending)

    def cancel(self, now: float) -> list[Effect]:
        """Asks whoever was not asked yet."""
        asked: list[Effect] = []
        for hold in self._pending:
            if hold.cancelled_at is None:
                hold.cancelled_at = now
                asked.append(self._ask(hold))
        return asked

    def tick(self, now: float, gone_s: float) -> list[Effect]:
        """Asks again; a worker that has not answered for `gone_s` is taken to hold nothing, its own lease sees to that."""
        overdue = [hold for hold in self._pending if hold.is_overdue(now, gone_s)]
        return self._free(overdue) + [self._ask(hold) for hold in self._pending if hold.is_due(now)]

    def gone(self, instance: str, epoch: int) -> list[Effect]:
        """The worker holds nothing of the cancelled attempts up to `epoch`."""
        mine = [hold for hold in self._pending if hold.instance == instance and hold.epoch <= epoch]
        return self._free([hold for hold in mine if hold.cancelled_at is not None])

    def lose(self, instance: str) -> tuple[list[Effect], set[int]]:
        """The worker is no more; also the epochs that it held."""
        lost = [hold for hold in self._pending if hold.instance == instance]
        return self._free(lost), {hold.epoch for hold in lost}

    def finish(self, epoch: int) -> list[Effect]:
        """An attempt is complete: nothing of it is held anywhere."""
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
        """The worker itself said that it holds nothing of an attempt."""
        self._pending = [
            hold for hold in self._pending if not (hold.instance == instance and hold.epoch == epoch)
        ]
        return [Freed(instance, epoch)]

    def _free(self, holds: Iterable[PendingCancel]) -> list[Effect]:
        free = list(holds)
        self._pending = [hold for hold in self._pending if not any(hold is other for other in free)]
        return [Freed(hold.instance, hold.epoch) for hold in free]

    def _ask(self, hold: PendingCancel) -> Send:
        hold.num_cancels += 1
        return Send(hold.instance, Cancel(room=self._room, epoch=hold.epoch, instance=hold.instance))
