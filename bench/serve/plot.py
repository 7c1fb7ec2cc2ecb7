"""Plots of loads. Needs Pillow.

`draw`: distributions of TTFT, ITL and e2e, and tokens per second, a line per run. `draw_curves`: throughput
against TTFT and TPOT, a line per server and a dot per load.

Panels of lines need no matplotlib, which would bring nine more packages; Pillow brings none. Only this
module imports Pillow, so only `--plot` needs it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .figures import CurvePoint, e2e_ms, gaps_ms, ttft_ms
from .load import Run

SIZE = WIDTH, HEIGHT = 1280, 860
CURVES_HEIGHT = 520
DOT = 4  # radius in pixels
MARGIN, LEGEND, GAP = 70, 50, 90  # pixels around panels, above them, between them
NUM_TICKS, NUM_BINS, MAX_POINTS = 5, 48, 400
COLORS = ("#2563eb", "#dc2626", "#16a34a", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
INK, GRID, PAPER = "#111827", "#e5e7eb", "#ffffff"

Points = list[tuple[float, float]]
Box = tuple[int, int, int, int]  # left, top, right, bottom


def draw(runs: Sequence[Run], path: Path, title: str) -> None:
    """Writes the PNG. Raises OSError."""
    image = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(image)
    panels = {
        "TTFT, ms (share of requests)": [
            cdf([v for c in run.calls if (v := ttft_ms(c)) is not None]) for run in runs
        ],
        "ITL, ms (share of gaps)": [
            cdf([gap for call in run.calls for gap in gaps_ms(call)]) for run in runs
        ],
        "e2e, ms (share of requests)": [
            cdf([e2e_ms(call) for call in run.calls if not call.error]) for run in runs
        ],
        "output tokens/s over the run, s": [pace(run) for run in runs],
    }
    _legend(pen, [str(run.level) for run in runs], title)
    for box, (name, lines) in zip(_boxes(), panels.items(), strict=True):
        _panel(pen, box, name, lines)
    image.save(path, format="PNG")


def draw_curves(curves: Mapping[str, Sequence[CurvePoint]], path: Path, title: str) -> None:
    """Writes the PNG of one or several servers, by name. Raises OSError."""
    image = Image.new("RGB", (WIDTH, CURVES_HEIGHT), PAPER)
    pen = ImageDraw.Draw(image)
    _legend(pen, list(curves), title)
    wide = (WIDTH - 2 * MARGIN - GAP) // 2
    for number, name in enumerate(("ttft", "tpot")):
        left = MARGIN + number * (wide + GAP)
        box = left, MARGIN + LEGEND, left + wide, CURVES_HEIGHT - MARGIN
        _curves_panel(pen, box, name, list(curves.values()))
    image.save(path, format="PNG")


def _curves_panel(
    pen: ImageDraw.ImageDraw, box: Box, name: str, curves: Sequence[Sequence[CurvePoint]]
) -> None:
    """Medians with a dot and the name of each load, and 90th percentiles as thin lines."""
    medians, highs = (
        [[(point.output_tokens_per_s, getattr(point, f"{name}_{share}")) for point in curve if known(point)]
         for curve in curves]
        for share in ("p50", "p90")
    )  # fmt: skip
    at = _axes(
        pen, box, f"{name.upper()}, ms (dots: p50, thin: p90) over output tokens/s", [*medians, *highs]
    )
    font = ImageFont.load_default(12)
    for i, curve in enumerate(curves):
        color = COLORS[i % len(COLORS)]
        for points, width in ((medians[i], 3), (highs[i], 1)):
            if len(points) > 1:
                pen.line([at(point) for point in points], fill=color, width=width)
        for told, median in zip(filter(known, curve), medians[i], strict=True):
            x, y = at(median)
            pen.ellipse((x - DOT, y - DOT, x + DOT, y + DOT), fill=color)
            pen.text((x, y - DOT - 2), told.load, fill=color, font=font, anchor="mb")


def known(point: CurvePoint) -> bool:
    """Whether the load had an answer of several tokens, so that every figure exists."""
    return not math.isnan(point.ttft_p50 + point.tpot_p50)


def cdf(values: Sequence[float]) -> Points:
    """Points (value, share of values up to it), thinned.

    The largest half percent is left out, since outliers would squeeze the rest of the plot.
    """
    ordered = sorted(values)
    kept = ordered[: max(2, math.ceil(0.995 * len(ordered)))]
    step = max(1, len(kept) // MAX_POINTS)
    return [
        (value, (i + 1) / len(ordered)) for i, value in enumerate(kept) if i % step == 0 or i == len(kept) - 1
    ]


def pace(run: Run) -> Points:
    """Points (seconds since the start, tokens per second)."""
    arrivals = [(at - run.began, count) for call in run.calls for at, count in call.arrivals]
    if not arrivals:
        return []
    width = max(at for at, _ in arrivals) / NUM_BINS or 1.0
    bins = [0] * (NUM_BINS + 1)
    for at, count in arrivals:
        bins[min(NUM_BINS, int(at / width))] += count
    return [((i + 0.5) * width, count / width) for i, count in enumerate(bins[:NUM_BINS])]


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to the first at or above `most`."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    return [i * step for i in range(math.ceil(most / step * 0.999) + 1)]


def _boxes() -> list[Box]:
    wide = (WIDTH - 2 * MARGIN - GAP) // 2
    high = (HEIGHT - 2 * MARGIN - LEGEND - GAP) // 2
    lefts, tops = (MARGIN, MARGIN + wide + GAP), (MARGIN + LEGEND, MARGIN + LEGEND + high + GAP)
    return [(left, top, left + wide, top + high) for top in tops for left in lefts]


def _legend(pen: ImageDraw.ImageDraw, names: Sequence[str], title: str) -> None:
    pen.text((MARGIN, 20), title, fill=INK, font=ImageFont.load_default(20))
    x = MARGIN
    for i, name in enumerate(names):
        color = COLORS[i % len(COLORS)]
        pen.line((x, 70, x + 24, 70), fill=color, width=4)
        pen.text((x + 32, 61), name, fill=INK, font=ImageFont.load_default(15))
        x += 48 + int(pen.textlength(name, font=ImageFont.load_default(15)))


def _panel(pen: ImageDraw.ImageDraw, box: Box, name: str, lines: Sequence[Points]) -> None:
    at = _axes(pen, box, name, lines)
    for i, line in enumerate(lines):
        if len(line) > 1:
            pen.line([at(point) for point in line], fill=COLORS[i % len(COLORS)], width=2)


def _axes(
    pen: ImageDraw.ImageDraw, box: Box, name: str, lines: Sequence[Points]
) -> Callable[[tuple[float, float]], tuple[float, float]]:
    """Draws frame, grid and labels for all `lines`; returns the pixel of a point."""
    left, top, right, bottom = box
    xs, ys = (ticks(max((point[axis] for line in lines for point in line), default=0.0)) for axis in (0, 1))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + point[0] / xs[-1] * (right - left), bottom - point[1] / ys[-1] * (bottom - top)

    font = ImageFont.load_default(13)
    pen.text((left, top - 24), name, fill=INK, font=ImageFont.load_default(15))
    for value in xs:
        x, _ = at((value, 0))
        pen.line((x, top, x, bottom), fill=GRID)
        pen.text((x, bottom + 6), f"{value:g}", fill=INK, font=font, anchor="ma")
    for value in ys:
        _, y = at((0, value))
        pen.line((left, y, right, y), fill=GRID)
        pen.text((left - 8, y), f"{value:g}", fill=INK, font=font, anchor="rm")
    pen.rectangle(box, outline=INK)
    return at
