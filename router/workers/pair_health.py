"""Which pairs have passed a request of late, all the way: prefill, hand-off, decode. Pure.

    new       nothing has passed yet                    due for a canary at once; where its decode worker was proven by
                                                        itself, or is by itself now, that counts until then
    proven    the last thing known is a request that    due again after half a window; it counts for a window
              passed, the router's own or a client's
    failing   a canary failed since                     due again after a quarter; clients' requests go elsewhere
                                                        if another pair can serve

A client's request that failed in its hand-off makes its pair due, no more: one request may have brought its failure along.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from .registry import Worker

MAX_SHOWN = 64  # pairs in /status
MAX_HELD_WINDOWS = 6  # streams of a minute on a full cluster, with the usual window
NEVER = float("-inf")

Names = tuple[str, str]  # instances of prefill and decode; equal where decode computes prompts itself


@dataclass(eq=False)
class PairRecord:
    """Of one pair; times are monotonic seconds."""

    passed_at: float = NEVER
    asked_at: float = NEVER  # when its last canary began, or whatever passed did
    failed_at: float = NEVER
    vouched_at: float = (
        NEVER  # when a request passed its decode worker alone, or with prefill where it is alone now
    )
    held_s: float = 0.0  # for which it did not age since a request passed
    is_doubted: bool = True
    num_failures: int = 0  # of canaries, in a row
    kind: str = ""  # of the last failure, like the next
    message: str = ""


class PairStatus(Struct, frozen=True, kw_only=True):
    """One pair of /status."""

    prefill: str
    decode: str
    state: str
    """new, proven, stale (nothing passed for a window) or failing."""
    passed_s: float | None
    """Since a request passed; null: none did."""
    failures: int
    """Canaries that failed in a row."""
    kind: str
    """Of the last failure; empty without one since a request passed."""
    reason: str


class PairHealth:
    """Of the pairs that serve; `window_s` is how long a proof counts, 0: nobody asks for any."""

    def __init__(self, window_s: float = 0.0) -> None:
        self.window_s = window_s
        self.failing: set[Names] = set()
        self._pair_health: dict[Names, PairRecord] = {}
        self._seen: Sequence[tuple[Worker, Worker]] = ()

    def __repr__(self) -> str:
        return f"PairHealth({len(self._pair_health)} pairs, {len(self.failing)} failing)"

    def __len__(self) -> int:
        return len(self._pair_health)

    def see(self, live: Sequence[tuple[Worker, Worker]]) -> None:
        """The pairs that serve now; the same list again is no news."""
        if live is self._seen:
            return
        self._seen = live
        names = [(prefill.instance, decode.instance) for prefill, decode in live]
        vouched = self._vouched()
        self._pair_health = {
            name: self._pair_health.get(name)
            or PairRecord(vouched_at=vouched.get((name[1], name[0] != name[1]), NEVER))
            for name in names
        }
        self.failing.intersection_update(names)

    def passed(self, prefill: str, decode: str, at: float) -> None:
        """A request came through, whose hand-off ended at `at`."""
        proof = self._pair_health.get((prefill, decode))
        if proof is None or at <= max(proof.passed_at, proof.failed_at):
            return  # what was under way before it failed shows nothing of now
        proof.passed_at, proof.asked_at, proof.is_doubted = at, max(at, proof.asked_at), False
        proof.num_failures, proof.kind, proof.message, proof.held_s = 0, "", "", 0.0
        self.failing.discard((prefill, decode))

    def failed(self, prefill: str, decode: str, kind: str, message: str, now: float) -> None:
        """A canary did not come through."""
        proof = self._pair_health.get((prefill, decode))
        if proof is not None:
            proof.num_failures += 1
            proof.kind, proof.message, proof.failed_at = kind, message, now
            self.failing.add((prefill, decode))

    def doubt(self, prefill: str, decode: str) -> None:
        """A client's request failed between the two."""
        proof = self._pair_health.get((prefill, decode))
        if proof is not None and not proof.num_failures:
            proof.is_doubted = True

    def hold(self, prefill: str, decode: str, seconds: float) -> None:
        """A pair that nothing speaks against was too busy to be asked: its proof does not age, for some windows."""
        proof = self._pair_health[prefill, decode]
        is_well = not (proof.is_doubted or proof.num_failures) and proof.passed_at != NEVER
        if is_well and proof.held_s < MAX_HELD_WINDOWS * self.window_s:
            proof.held_s += seconds
            proof.passed_at += seconds

    def asked(self, prefill: str, decode: str, now: float) -> None:
        """A canary begins."""
        proof = self._pair_health[prefill, decode]
        proof.asked_at, proof.is_doubted = now, False

    def urgent(self) -> list[Names]:
        """Pairs of which nothing is known, or something bad."""
        return [names for names, proof in self._pair_health.items() if proof.is_doubted]

    def due(self, now: float) -> list[Names]:
        """Pairs whose turn it is, who was asked longest ago first."""
        found = [
            (p.asked_at, names) for names, p in self._pair_health.items() if now - p.asked_at >= self._rest(p)
        ]
        return [names for _, names in sorted(found)]

    def is_ready(self, now: float) -> bool:
        """Whether a request passed some pair within the window, and no canary failed there since."""
        return any(self._counts(proof, now) for proof in self._pair_health.values())

    def why_not(self, now: float) -> str:
        """One line for whoever asks, without names of workers or words of theirs; empty when ready."""
        if self.is_ready(now):
            return ""
        text = f"no request has passed from prefill to decode within {self.window_s:g} s"
        bad = [proof for proof in self._pair_health.values() if proof.num_failures]
        if not bad:
            return f"{text}, and none was seen to fail"
        worst = max(bad, key=lambda proof: proof.num_failures)
        return f"{text}: {worst.kind} on {len(bad)} of {len(self)} pairs"

    def status(self, now: float) -> list[PairStatus]:
        """The worst first, at most `MAX_SHOWN`."""
        shown = sorted(
            self._pair_health.items(), key=lambda item: (-item[1].num_failures, item[1].passed_at)
        )[:MAX_SHOWN]
        return [self._shown(names, proof, now) for names, proof in shown]

    def failures(self) -> Iterable[tuple[str, str, str, int]]:
        """(prefill, decode, kind, canaries that failed in a row) of the failing pairs."""
        for prefill, decode in sorted(self.failing):
            proof = self._pair_health[prefill, decode]
            yield prefill, decode, proof.kind, proof.num_failures

    def _rest(self, proof: PairRecord) -> float:
        """Seconds from one canary to the next."""
        return self.window_s / 4 if proof.num_failures or proof.passed_at == NEVER else self.window_s / 2

    def _vouched(self) -> dict[tuple[str, bool], float]:
        """When a request passed each decode worker last, by (decode, whether it was alone); without failing pairs.

        The first prefill worker takes over from decode workers that served alone, and these serve alone when the last one
        leaves: neither ends anybody's service by that.
        """
        found: dict[tuple[str, bool], float] = {}
        for (prefill, decode), proof in self._pair_health.items():
            if not proof.num_failures:
                key = decode, prefill == decode
                found[key] = max(proof.passed_at, found.get(key, NEVER))
        return found

    def _counts(self, proof: PairRecord, now: float) -> bool:
        state = self._state(proof, now)
        return state == "proven" or (state == "new" and now - proof.vouched_at <= self.window_s)

    def _state(self, proof: PairRecord, now: float) -> str:
        if proof.num_failures:
            return "failing"
        if proof.passed_at == NEVER:
            return "new"
        return "proven" if now - proof.passed_at <= self.window_s else "stale"

    def _shown(self, names: Names, proof: PairRecord, now: float) -> PairStatus:
        return PairStatus(
            prefill=names[0],
            decode=names[1],
            state=self._state(proof, now),
            passed_s=None if proof.passed_at == NEVER else round(now - proof.passed_at, 3),
            failures=proof.num_failures,
            kind=proof.kind,
            reason=proof.message,
        )
