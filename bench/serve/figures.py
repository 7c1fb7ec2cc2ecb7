"""Computes latency and throughput figures from calls. All times are in milliseconds.

TTFT   due to first token. "Due" is the actual send time in a closed loop and the scheduled send time in an
       open loop
ITL    gap between two events with tokens of one stream, as a reader sees it. One event may hold several
       tokens
TPOT   time from the first event to the last, divided by the tokens after the first event: one figure per
       request
e2e    due to the end of the stream
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from .client import TimedCall
from .load import Run

SHARES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The distribution of one kind of time, in milliseconds; NaN without samples."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Goals:
    """The latency goals of a request in milliseconds; 0 means no goal."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.ttft_ms or self.itl_ms)

    def are_met(self, call: TimedCall) -> bool:
        """Whether the call's TTFT and TPOT are within the goals."""
        ttft, tpot = ttft_ms(call), tpot_ms(call)
        is_soon = not self.ttft_ms or (ttft is not None and ttft <= self.ttft_ms)
        return not call.error and is_soon and (not self.itl_ms or tpot is None or tpot <= self.itl_ms)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one run. A failed request counts as an error and in no other figure."""

    load: str
    seconds: float
    """Seconds from the begin to the last end, or to the end of an open loop's time."""
    num_ok: int
    errors: dict[str, int]
    """The number of errors by kind."""
    requests_per_s: float
    goodput_per_s: float | None
    """Requests per second that met the goals; None without goals."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    late_ms: float
    """The 99th percentile of the delay between due time and send, in milliseconds."""
    server: dict[str, float] = field(default_factory=dict)
    """The endpoint's own figures of the same time, see `server`."""
    ttft_by_turn: list[float] = field(default_factory=list)
    """The median TTFT of the first turns of conversations, of the second ones, and so on; empty without
    conversations."""

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON, with None in place of NaN."""
        found = asdict(self)
        for name in ("ttft", "itl", "tpot", "e2e"):
            found[name] = {
                share: None if math.isnan(value) else value for share, value in found[name].items()
            }
        found["ttft_by_turn"] = [None if math.isnan(value) else value for value in self.ttft_by_turn]
        return found | {"late_ms": None if math.isnan(self.late_ms) else self.late_ms}


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One load in a chart of throughput against latency. Times are milliseconds."""

    load: str
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float

    @classmethod
    def median(cls, runs: Sequence[Figures]) -> "CurvePoint":
        """The medians over several runs of one load, without runs that lack the figure."""

        def median(values: Sequence[float]) -> float:
            known = [value for value in values if not math.isnan(value)]
            return statistics.median(known) if known else math.nan

        return cls(
            load=runs[0].load,
            output_tokens_per_s=median([run.output_tokens_per_s for run in runs]),
            ttft_p50=median([run.ttft.p50 for run in runs]),
            ttft_p90=median([run.ttft.p90 for run in runs]),
            tpot_p50=median([run.tpot.p50 for run in runs]),
            tpot_p90=median([run.tpot.p90 for run in runs]),
        )


def ttft_ms(call: TimedCall) -> float | None:
    """Time to first token in milliseconds; None without a token."""
    return 1000 * (call.arrivals[0][0] - call.due) if call.arrivals else None


def tpot_ms(call: TimedCall) -> float | None:
    """Mean time per token after the first event, in milliseconds; None with one token."""
    if call.num_output < 2 or not call.arrivals:
        return None
    num_first = call.arrivals[0][1]
    num_after = call.num_output - num_first
    return 1000 * (call.arrivals[-1][0] - call.arrivals[0][0]) / num_after if num_after > 0 else None


def gaps_ms(call: TimedCall) -> list[float]:
    return [1000 * (after - before) for (before, _), (after, _) in pairwise(call.arrivals)]


def e2e_ms(call: TimedCall) -> float:
    return 1000 * (call.ended - call.due)


def figures_of(run: Run, goals: Goals, server: dict[str, float] | None = None) -> Figures:
    """The figures of a finished run."""
    good = [call for call in run.calls if not call.error]
    seconds = max(1e-9, max([run.until, *(call.ended for call in run.calls)]) - run.began)
    num_prompt, num_output = (
        sum(getattr(call, name) for call in good) for name in ("num_prompt", "num_output")
    )
    count = max(1, len(good))
    return Figures(
        load=str(run.level),
        seconds=seconds,
        num_ok=len(good),
        errors=dict(Counter(call.error for call in run.calls if call.error).most_common()),
        requests_per_s=len(good) / seconds,
        goodput_per_s=sum(map(goals.are_met, good)) / seconds if goals else None,
        prompt_tokens_per_s=num_prompt / seconds,
        output_tokens_per_s=num_output / seconds,
        mean_prompt_tokens=num_prompt / count,
        mean_output_tokens=num_output / count,
        ttft=spread([value for call in good if (value := ttft_ms(call)) is not None]),
        itl=spread([gap for call in good for gap in gaps_ms(call)]),
        tpot=spread([value for call in good if (value := tpot_ms(call)) is not None]),
        e2e=spread([e2e_ms(call) for call in good]),
        late_ms=percentile(sorted(1000 * (call.sent - call.due) for call in run.calls), 99),
        server=server or {},
        ttft_by_turn=by_turn(good),
    )


def by_turn(calls: Sequence[TimedCall]) -> list[float]:
    """The median TTFT of each turn, in milliseconds; empty where no conversation has a second one."""
    turns = max((call.turn for call in calls), default=0)
    times: list[list[float]] = [[] for _ in range(turns + 1)]
    for call in calls:
        if (value := ttft_ms(call)) is not None:
            times[call.turn].append(value)
    return [spread(values).p50 for values in times] if turns else []


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in SHARES)
    return Spread(mean=sum(ordered) / len(ordered) if ordered else math.nan, p50=p50, p90=p90, p99=p99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of sorted values, interpolated between the two nearest ranks; NaN without values."""
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
