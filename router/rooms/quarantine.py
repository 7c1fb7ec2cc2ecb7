"""The record of workers that died with a request, which stops a request that kills workers. Pure.

A worker that its peer found silent is a suspect. It stays one until it answers, or until it is lost and
counts as a death.

    1 death    The request is on probation in its next attempt, until decode has given a token of its own. No
               other request with a record is placed on its workers meanwhile.
    2 deaths   These may be chance: two workers can be killed within a second. The request gets one more
               attempt, and is alone: on a pair with nothing else where one comes free soon, and nothing else
               is placed there before the probation ends. A worker that dies then counts against this request
               only.
    3 deaths   Proof. The request fails.
"""

from collections.abc import Iterable

MAX_DEATHS = 3  # deaths of workers that had the request
QUARANTINED = "Quarantined"  # kind of the Failure that ends such a request


class DeathRecord:
    """The deaths and suspects of one request."""

    def __init__(self) -> None:
        self.died_with: set[str] = set()
        self._suspects: dict[str, float] = {}  # instance -> when it received the request

    def __repr__(self) -> str:
        return f"DeathRecord({len(self.died_with)} deaths, {len(self._suspects)} suspects)"

    def __bool__(self) -> bool:
        return bool(self.died_with or self._suspects)

    @property
    def is_proven(self) -> bool:
        """Whether the request gets no other attempt."""
        return len(self.died_with) >= MAX_DEATHS

    @property
    def must_be_alone(self) -> bool:
        """Whether the next death may be proof, so that the next attempt shares its workers with no other
        request."""
        return len(self.died_with | self._suspects.keys()) >= MAX_DEATHS - 1

    @property
    def is_open(self) -> bool:
        """Whether the request killed one worker and may have killed another."""
        return bool(self.died_with and self._suspects.keys() - self.died_with)

    @property
    def awaits_proof(self) -> bool:
        """Whether the request is proven if all of its suspects are dead."""
        return not self.is_proven and len(self.died_with | self._suspects.keys()) >= MAX_DEATHS

    def has_suspect(self, instances: Iterable[str]) -> bool:
        """Whether one of these workers is a suspect: neither known to be alive nor known to be dead."""
        return any(instance in self._suspects for instance in instances)

    def suspect(self, instances: Iterable[str], placed_at: float) -> None:
        """Notes workers found silent in an attempt that was placed at `placed_at`."""
        self._suspects.update(dict.fromkeys(instances, placed_at))

    def cleared(self, instance: str) -> None:
        """Removes a suspect that is alive, or whose death counts against another request."""
        self._suspects.pop(instance, None)

    def lost(self, instance: str, unreachable_since: float | None, placed_at: float | None = None) -> None:
        """Notes that a worker is dead. Counts if it had the request: as a suspect, or in the attempt placed
        at `placed_at`.

        A worker unreachable since before the placement never received the request.
        """
        placed_at = self._suspects.get(instance) if placed_at is None else placed_at
        if placed_at is not None and (unreachable_since is None or unreachable_since > placed_at):
            self.died_with.add(instance)
