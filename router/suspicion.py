"""Which workers died with a request, and which may have: what keeps one that kills from killing on. Pure.

A worker that its peer found silent is a suspect until it answers, or is lost: then it is a death. A request with deaths or
suspects is on probation in its next attempt, until decode has given a token of its own: no other such request is placed on
its workers meanwhile, so that of many that were with a dead worker only the one that kills is with the next one to die.
"""

from collections.abc import Iterable

MAX_DEATHS = 2  # of workers that had the request
QUARANTINED = "Quarantined"  # how the router calls what ends a request then


class Suspicion:
    """Of one request."""

    def __init__(self) -> None:
        self.died_with: set[str] = set()
        self._suspects: dict[str, float] = {}  # instance -> when it got the request

    def __repr__(self) -> str:
        return f"Suspicion({len(self.died_with)} deaths, {len(self._suspects)} suspects)"

    def __bool__(self) -> bool:
        return bool(self.died_with or self._suspects)

    @property
    def is_proven(self) -> bool:
        """Whether it gets no other attempt."""
        return len(self.died_with) >= MAX_DEATHS

    @property
    def is_open(self) -> bool:
        """Whether it killed one and may have killed another."""
        return bool(self.died_with and self._suspects.keys() - self.died_with)

    def suspect(self, instances: Iterable[str], placed_at: float) -> None:
        """They were found silent in an attempt that was placed at `placed_at`."""
        self._suspects.update(dict.fromkeys(instances, placed_at))

    def answered(self, instance: str) -> None:
        """It lives."""
        self._suspects.pop(instance, None)

    def lost(self, instance: str, unreachable_since: float | None, placed_at: float | None = None) -> None:
        """It is dead. Counts when it had the request: as a suspect, or in the attempt that was placed at `placed_at`.

        A worker that could not be reached since before never had it.
        """
        placed_at = self._suspects.get(instance) if placed_at is None else placed_at
        if placed_at is not None and (unreachable_since is None or unreachable_since > placed_at):
            self.died_with.add(instance)
