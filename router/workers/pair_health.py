"""The health of pairs: the last request that passed each from end to end (prefill, hand-off, decode). Pure.

    new       no request has passed yet                 due for a probe at once; until then an earlier result
              of its decode worker counts, alone or with prefill
    proven    the last result is a request that passed, due again after half a window; the result counts for a
              window the router's own or a client's
    failing   a probe failed since                      due again after a quarter; clients' requests go
              elsewhere if another pair can serve

A client's request that failed in its hand-off only makes its pair due, since the request itself may be the
cause.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .registry import Worker

MAX_SHOWN = 64  # pairs in /status
MAX_HELD_WINDOWS = 6  # with the default window, a minute of streams on a full cluster
NEVER = float("-inf")

PairNames = tuple[str, str]  # instances of prefill and decode; equal where decode computes prompts itself


@dataclass(eq=False)
class PairRecord:
    """The results of one pair; times are monotonic seconds."""

    passed_at: float = NEVER
    asked_at: float = NEVER  # start of its last probe, or end of the last request that passed
    failed_at: float = NEVER
    # time of the last request that passed its decode worker in the other mode: alone, or with a prefill
    # worker
    vouched_at: float = NEVER
    held_s: float = 0.0  # seconds for which the last result did not age
    is_doubted: bool = True
    num_failures: int = 0  # consecutive failures of probes
    kind: str = ""  # kind of the last failure
    message: str = ""


class PairStatus(Struct, frozen=True, kw_only=True):
    """One pair of /status."""

    prefill: str
    decode: str
    state: str
    """new, proven, stale (no request passed within a window) or failing."""
    passed_s: float | None
    """Seconds since a request passed; null: none has."""
    failures: int
    """Consecutive failures of health probes."""
    kind: str
    """The kind of the last failure; empty without one since the last request that passed."""
    reason: str


class PairHealth:
    """The records of all pairs that serve. A result counts for `window_s` seconds; 0 switches probes off."""

    def __init__(self, window_s: float = 0.0) -> None:
        self.window_s = window_s
        self.failing: set[PairNames] = set()
        self._records: dict[PairNames, PairRecord] = {}
        self._seen: Sequence[tuple[Worker, Worker]] = ()

    def __repr__(self) -> str:
        return f"PairHealth({len(self._records)} pairs, {len(self.failing)} failing)"

    def __len__(self) -> int:
        return len(self._records)

    def see(self, live: Sequence[tuple[Worker, Worker]]) -> None:
        """Updates the set of serving pairs. The identical list object means no change."""
        if live is self._seen:
            return
        self._seen = live
        names = [(prefill.instance, decode.instance) for prefill, decode in live]
        vouched = self._vouched()
        self._records = {
            name: self._records.get(name)
            or PairRecord(vouched_at=vouched.get((name[1], name[0] != name[1]), NEVER))
            for name in names
        }
        self.failing.intersection_update(names)

    def passed(self, prefill: str, decode: str, at: float) -> None:
        """Notes a request that passed, with the end of its hand-off in monotonic seconds."""
        record = self._records.get((prefill, decode))
        if record is None or at <= max(record.passed_at, record.failed_at):
            return  # a request that began before the failure proves nothing
        record.passed_at, record.asked_at, record.is_doubted = at, max(at, record.asked_at), False
        record.num_failures, record.kind, record.message, record.held_s = 0, "", "", 0.0
        self.failing.discard((prefill, decode))

    def failed(self, prefill: str, decode: str, kind: str, message: str, now: float) -> None:
        """Notes a failed probe."""
        record = self._records.get((prefill, decode))
        if record is not None:
            record.num_failures += 1
            record.kind, record.message, record.failed_at = kind, message, now
            self.failing.add((prefill, decode))

    def doubt(self, prefill: str, decode: str) -> None:
        """Notes a client's request that failed between the two workers."""
        record = self._records.get((prefill, decode))
        if record is not None and not record.num_failures:
            record.is_doubted = True

    def hold(self, prefill: str, decode: str, seconds: float) -> None:
        """Keeps a busy pair's result from aging, for at most MAX_HELD_WINDOWS windows."""
        record = self._records[prefill, decode]
        is_well = not (record.is_doubted or record.num_failures) and record.passed_at != NEVER
        if is_well and record.held_s < MAX_HELD_WINDOWS * self.window_s:
            record.held_s += seconds
            record.passed_at += seconds

    def excuse(self, seconds: float) -> None:
        """The router did not run for so long: no result has aged."""
        for record in self._records.values():
            record.passed_at += seconds
            record.vouched_at += seconds

    def asked(self, prefill: str, decode: str, now: float) -> None:
        """Notes the start of a probe."""
        record = self._records[prefill, decode]
        record.asked_at, record.is_doubted = now, False

    def urgent(self) -> list[PairNames]:
        """Pairs with no result, or with a doubt."""
        return [names for names, record in self._records.items() if record.is_doubted]

    def due(self, now: float) -> list[PairNames]:
        """Pairs to be probed now, the one probed longest ago first."""
        found = [
            (p.asked_at, names) for names, p in self._records.items() if now - p.asked_at >= self._rest(p)
        ]
        return [names for _, names in sorted(found)]

    def is_ready(self, now: float) -> bool:
        """Whether a request passed some pair within the window, and no probe failed there since."""
        return any(self._counts(record, now) for record in self._records.values())

    def why_not(self, now: float) -> str:
        """One line for the public, without names or messages of workers; empty when ready."""
        if self.is_ready(now):
            return ""
        text = f"no request has passed from prefill to decode within {self.window_s:g} s"
        bad = [record for record in self._records.values() if record.num_failures]
        if not bad:
            return f"{text}, and none was seen to fail"
        worst = max(bad, key=lambda record: record.num_failures)
        return f"{text}: {worst.kind} on {len(bad)} of {len(self)} pairs"

    def status(self, now: float) -> list[PairStatus]:
        """The pairs, the worst first, at most `MAX_SHOWN`."""
        shown = sorted(self._records.items(), key=lambda item: (-item[1].num_failures, item[1].passed_at))[
            :MAX_SHOWN
        ]
        return [self._shown(names, record, now) for names, record in shown]

    def failures(self) -> Iterable[tuple[str, str, str, int]]:
        """(prefill, decode, kind, failed probes in a row) of the failing pairs."""
        for prefill, decode in sorted(self.failing):
            record = self._records[prefill, decode]
            yield prefill, decode, record.kind, record.num_failures

    def _rest(self, record: PairRecord) -> float:
        """Seconds between two probes."""
        return self.window_s / 4 if record.num_failures or record.passed_at == NEVER else self.window_s / 2

    def _vouched(self) -> dict[tuple[str, bool], float]:
        """The time of the last request that passed each decode worker, by (decode, whether it was alone).

        Failing pairs are left out.

        A new pair inherits this time. So neither the arrival of the first prefill worker nor the departure of
        the last one takes a decode worker out of service.
        """
        found: dict[tuple[str, bool], float] = {}
        for (prefill, decode), record in self._records.items():
            if not record.num_failures:
                key = decode, prefill == decode
                found[key] = max(record.passed_at, found.get(key, NEVER))
        return found

    def _counts(self, record: PairRecord, now: float) -> bool:
        state = self._state(record, now)
        return state == "proven" or (state == "new" and now - record.vouched_at <= self.window_s)

    def _state(self, record: PairRecord, now: float) -> str:
        if record.num_failures:
            return "failing"
        if record.passed_at == NEVER:
            return "new"
        return "proven" if now - record.passed_at <= self.window_s else "stale"

    def _shown(self, names: PairNames, record: PairRecord, now: float) -> PairStatus:
        return PairStatus(
            prefill=names[0],
            decode=names[1],
            state=self._state(record, now),
            passed_s=None if record.passed_at == NEVER else round(now - record.passed_at, 3),
            failures=record.num_failures,
            kind=record.kind,
            reason=record.message,
        )
