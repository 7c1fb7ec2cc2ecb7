"""Moves workers from one role to the other by the times that requests queue for them. Pure.

    prompts wait    at prefill workers, for their first forward
    streams wait    at the router, for a place on decode. A place that is held for a prompt without a first
                    token is prefill's delay: where most are, this wait counts for prompts

One worker moves at a time. It moves only after `HOLD_S` seconds in which one role had queues above `HIGH_S`,
the other had none above `LOW_S`, and the rest of the other role could bear its load. A role keeps one worker.
After a move `REST_S` pass before the next one, twice as long after each move that takes the one before back.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

HIGH_S = 1.0  # a queue that asks for another worker
LOW_S = 0.25  # a queue that a worker may be taken from
HOLD_S = 5.0
REST_S = 30.0
MAX_DOUBLINGS = 4
MOST_LOAD = 0.85  # of the remaining workers of the role that gives one
LOOK_S = 0.5  # between two looks
BUSY_S = 10.0  # over which the load of prefill workers is measured
MAX_PARTS = 4096
RECENT_S = 5.0  # over which the queue times of prompts are averaged
OTHER = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A serving worker that may change its role. `load`: the used share of it, 0 to 1."""

    instance: str
    role: str
    load: float


@dataclass(frozen=True, kw_only=True)
class Queues:
    """The waits at one time, in seconds. `prompt_s`: at prefill. `place_s`: of the oldest request at the
    router. `streaming_share`: the placed requests with a first token, of all placed ones.
    """

    prompt_s: float
    place_s: float
    streaming_share: float

    def wait_of(self, role: str) -> float:
        """The wait that more workers of `role` would shorten."""
        is_for_prompts = self.streaming_share < 0.5
        if role == "prefill":
            return max(self.prompt_s, self.place_s if is_for_prompts else 0.0)
        return 0.0 if is_for_prompts else self.place_s


@dataclass(frozen=True, kw_only=True)
class Move:
    """Worker `instance` shall get `role`."""

    instance: str
    role: str


class BusyShares:
    """The share of the last seconds in which each prefill worker computed a prompt."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, str, float]] = deque(maxlen=MAX_PARTS)  # (end, instance, seconds)
        self._ends: dict[str, float] = {}

    def add(self, instance: str, seconds: float, now: float) -> None:
        """A prompt that was computed for `seconds` until `now`. Prompts of one forward count once."""
        since = now - self._ends.get(instance, 0.0)
        self._parts.append((now, instance, max(0.0, min(seconds, since))))
        self._ends[instance] = now

    def at(self, instance: str, now: float) -> float:
        """The share from 0 to 1."""
        busy = sum(seconds for end, name, seconds in self._parts if name == instance and end > now - BUSY_S)
        return min(1.0, busy / BUSY_S)

    def keep(self, instances: Collection[str]) -> None:
        """Forgets all workers but these."""
        self._ends = {name: end for name, end in self._ends.items() if name in instances}


class QueueTimes:
    """The mean queue time of the prompts of late."""

    def __init__(self) -> None:
        self._mean = self._at = 0.0

    def add(self, seconds: float, now: float) -> None:
        """Adds the queue time of a prompt that has its first token."""
        share = min(1.0, max(0.1, (now - self._at) / RECENT_S))
        self._mean += (seconds - self._mean) * share
        self._at = now

    def at(self, now: float) -> float:
        """The mean in seconds; 0 when no prompt had its first token for a while."""
        return self._mean if now - self._at <= RECENT_S else 0.0


class RoleScaler:
    """Decides moves from the queues. `look` is called again and again, at `now` in monotonic seconds."""

    def __init__(self) -> None:
        self._wanted = ""  # the role that lacks workers
        self._since = 0.0
        self._next_at = 0.0  # time of the earliest next move
        self._last_role = ""  # that the newest move gave
        self._num_reversed = 0  # moves in a row that took the one before back

    def __repr__(self) -> str:
        return f"RoleScaler({f'{self._wanted} waits' if self._wanted else 'even'})"

    def look(self, now: float, queues: Queues, workers: Sequence[Candidate], *, is_busy: bool) -> Move | None:
        """The move that is due now. `is_busy`: a worker changes its role already."""
        wanted = self._lacking(queues)
        if wanted != self._wanted:
            self._wanted, self._since = wanted, now
        if is_busy:
            self._since, self._next_at = now, max(self._next_at, now + self._rest_s)
        if not wanted or now - self._since < HOLD_S or now < self._next_at:
            return None
        giver = self._giver([worker for worker in workers if worker.role == OTHER[wanted]])
        if giver is None:
            return None
        is_reversed = bool(self._last_role) and wanted != self._last_role
        self._num_reversed = min(MAX_DOUBLINGS, self._num_reversed + 1) if is_reversed else 0
        self._last_role, self._since, self._next_at = wanted, now, now + self._rest_s
        return Move(instance=giver.instance, role=wanted)

    @property
    def _rest_s(self) -> float:
        return REST_S * (1 << max(0, self._num_reversed - 1))

    def _lacking(self, queues: Queues) -> str:
        """The role with long queues while the other has none; "" where both or none have."""
        for role in ("prefill", "decode"):
            if queues.wait_of(role) > HIGH_S and queues.wait_of(OTHER[role]) < LOW_S:
                return role
        return ""

    def _giver(self, workers: Sequence[Candidate]) -> Candidate | None:
        """The least loaded of `workers`, if the others can bear the load of all."""
        if len(workers) < 2:
            return None
        load = sum(worker.load for worker in workers) / (len(workers) - 1)
        return min(workers, key=lambda worker: (worker.load, worker.instance)) if load <= MOST_LOAD else None
