"""Two servers under the same load in one run: `baton bench serve --compare URL_A URL_B`.

A round measures both servers, one after the other, with the same requests. Rounds alternate the order, so a
drift of the host affects both alike. A ratio is B / A within a round; the table shows the median over rounds
and the spread. The difference counts as shown when every round agrees on its direction.
"""

import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .figures import CurvePoint, Figures
from .load import Level
from .table import short_ms

SIDES = ("A", "B")
Measure = Callable[[int, Level, int], Awaitable[Figures]]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A compared figure; `is_rate`: more is better, else it is a time and less is better."""

    name: str
    of: Callable[[Figures], float]
    is_rate: bool = False


METRICS = (
    Metric(name="req/s", of=lambda f: f.requests_per_s, is_rate=True),
    Metric(name="out tok/s", of=lambda f: f.output_tokens_per_s, is_rate=True),
    Metric(name="TTFT mean", of=lambda f: f.ttft.mean),
    Metric(name="TTFT p50", of=lambda f: f.ttft.p50),
    Metric(name="TTFT p99", of=lambda f: f.ttft.p99),
    Metric(name="TPOT mean", of=lambda f: f.tpot.mean),
    Metric(name="TPOT p50", of=lambda f: f.tpot.p50),
    Metric(name="TPOT p99", of=lambda f: f.tpot.p99),
    Metric(name="ITL p99", of=lambda f: f.itl.p99),
    Metric(name="e2e p50", of=lambda f: f.e2e.p50),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One load: the figures of A and B of each round."""

    level: Level
    rounds: tuple[tuple[Figures, Figures], ...]

    def values(self, metric: Metric, side: int) -> list[float]:
        """The metric of one side in the rounds in which it exists."""
        found = [metric.of(pair[side]) for pair in self.rounds]
        return [value for value in found if not math.isnan(value)]

    def ratios(self, metric: Metric) -> list[float]:
        """B / A of each round in which both have the metric."""
        pairs = [(metric.of(a), metric.of(b)) for a, b in self.rounds]
        return [b / a for a, b in pairs if a > 0 and not math.isnan(b)]

    def better(self, metric: Metric) -> str:
        """The side that is better in every round.

        "" when rounds disagree, when there are fewer than two, and when a round lacks the ratio.
        """
        ratios = self.ratios(metric)
        if len(ratios) < max(2, len(self.rounds)) or not (min(ratios) > 1 or max(ratios) < 1):
            return ""
        return SIDES[(min(ratios) > 1) == metric.is_rate]

    def point(self, side: int) -> CurvePoint:
        """One side's medians over the rounds."""
        return CurvePoint.median([pair[side] for pair in self.rounds])

    def as_dict(self) -> dict[str, Any]:
        """Everything for JSON, with None in place of a ratio that does not exist."""
        ratios = {metric.name: self.ratios(metric) for metric in METRICS}
        return {
            "load": str(self.level),
            "rounds": [
                {side: figures.as_dict() for side, figures in zip(SIDES, pair, strict=True)}
                for pair in self.rounds
            ],
            "ratios": {
                metric.name: {
                    "median": statistics.median(found) if (found := ratios[metric.name]) else None,
                    "low": min(found, default=None),
                    "high": max(found, default=None),
                    "better": self.better(metric) or None,
                }
                for metric in METRICS
            },
        }


async def compare(measure: Measure, levels: Sequence[Level], num_rounds: int) -> list[Comparison]:
    """Measures both sides in every round of every level; `measure` takes the side, the level, the round."""
    found = []
    for level in levels:
        rounds = []
        for number in range(num_rounds):
            pair: dict[int, Figures] = {}
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                pair[side] = await measure(side, level, number)
            rounds.append((pair[0], pair[1]))
        found.append(Comparison(level=level, rounds=tuple(rounds)))
    return found


def as_comparison_table(found: Sequence[Comparison], names: Sequence[str]) -> str:
    """A table per load. Values are medians over the rounds, times milliseconds."""
    lines = [f"{side}: {name}" for side, name in zip(SIDES, names, strict=True)]
    lines.append("Medians over rounds, times in milliseconds. Ratios are B / A within a round.")
    for comparison in found:
        lines += ["", f"{comparison.level}, {len(comparison.rounds)} rounds", ""]
        lines += ["| figure | A | B | B / A | spread | better in every round |", "|---|---|---|---|---|---|"]
        lines += [_row(comparison, metric) for metric in METRICS]
        lines += _notes(comparison)
    return "\n".join(lines) + "\n"


def _row(comparison: Comparison, metric: Metric) -> str:
    values = [comparison.values(metric, side) for side in (0, 1)]
    shown = [short_ms(statistics.median(each)) if each else "-" for each in values]
    ratios = comparison.ratios(metric)
    cells = ["-", "-"]
    if ratios:
        cells = [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
    return f"| {' | '.join([metric.name, *shown, *cells, comparison.better(metric) or '-'])} |"


def _notes(comparison: Comparison) -> list[str]:
    """Lines on errors of either side."""
    lines = []
    for side, name in enumerate(SIDES):
        kinds: dict[str, int] = {}
        for pair in comparison.rounds:
            for kind, count in pair[side].errors.items():
                kinds[kind] = kinds.get(kind, 0) + count
        lines += [f"{name}: {count} x {kind}" for kind, count in kinds.items()]
    return ["", *lines] if lines else []
