"""The figures of `baton bench serve` as markdown."""

import math
from collections.abc import Sequence

from .figures import Figures, Spread

HEAD = (
    "load", "ok", "errors", "req/s", "goodput/s", "in tok/s", "out tok/s",
    *(f"{name} mean / p50 / p90 / p99" for name in ("TTFT", "ITL", "TPOT", "e2e")),
)  # fmt: skip
LATE_MS = 10.0
UNITS = {
    "accept_length": "accept length {:.2f}",
    "accepted_share": "{:.0%} of drafts accepted",
    "handoff_ms": "hand-off {:.1f} ms",
    "handoff_mb": "of {:.2f} MB",
    "handoff_mb_per_s": "at {:.0f} MB/s",
    "prefill_ms": "prefill {:.1f} ms",
    "prefill_wait_ms": "behind a queue of {:.1f} ms",
    "cached_share": "{:.0%} of prompts cached",
    "host_in_mb": "{:.0f} MB into host memory",
    "host_out_mb": "{:.0f} MB back",
    "disk_in_mb": "{:.0f} MB onto disk",
    "disk_out_mb": "{:.0f} MB read from it",
    "tier_hit_share": "{:.0%} of prompts came back",
    "retries": "{:.0f} attempts again",
}


def as_table(found: Sequence[Figures]) -> str:
    """A table row per run, then the endpoint's own figures and the errors. Times are milliseconds."""
    lines = ["Times in milliseconds.", "", f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [_row(figures) for figures in found]
    lines += ["", *(line for figures in found for line in _notes(figures))]
    return "\n".join(lines).rstrip() + "\n"


def _row(figures: Figures) -> str:
    goodput = "" if figures.goodput_per_s is None else f"{figures.goodput_per_s:.2f}"
    cells = [
        figures.load,
        str(figures.num_ok),
        str(sum(figures.errors.values())),
        f"{figures.requests_per_s:.2f}",
        goodput,
        f"{figures.prompt_tokens_per_s:.0f}",
        f"{figures.output_tokens_per_s:.0f}",
        *map(_spread, (figures.ttft, figures.itl, figures.tpot, figures.e2e)),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(found: Spread) -> str:
    return " / ".join(short_ms(value) for value in (found.mean, found.p50, found.p90, found.p99))


def short_ms(value: float) -> str:
    """Three digits or all before the point; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _notes(figures: Figures) -> list[str]:
    lines = [f"{figures.load}: {count} x {kind}" for kind, count in figures.errors.items()]
    if figures.ttft_by_turn:
        medians = " / ".join(map(short_ms, figures.ttft_by_turn))
        lines.append(f"{figures.load}: TTFT p50 by turn {medians}")
    shown = [UNITS[name].format(value) for name, value in figures.server.items()]
    if shown:
        lines.append(f"{figures.load}, says the endpoint: {', '.join(shown)}")
    if figures.late_ms > LATE_MS:
        lines.append(
            f"{figures.load}: requests were sent up to {figures.late_ms:.0f} ms late (p99), which is in "
            "their times: this "
            "process had too little CPU"
        )
    return lines
