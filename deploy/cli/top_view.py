"""What `baton top` shows: tables that fit the terminal. Pure: no terminal, no clock.

A table has a row of columns by importance. Where they do not fit, the least important ones are left out, so
that no cell is cut. Rows that do not fit the height are counted in a line of their own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NONE = "-"
GAP = 2  # columns between two cells
WINDOW_S = 5.0  # seconds over which a rate is averaged
CARD_WIDTH = 24  # letters of a GPU's name
TREND = 12  # cells of a sparkline in a table
WIDE_TREND = 24  # cells of one in the line of a router
TREND_POINTS = 150  # of the history, five minutes
BARS = " ▁▂▃▄▅▆▇█"
SORTS = ("role", "tok/s", "run", "pages", "accept")
TONES = {
    "serving": "green",
    "ok": "green",
    "draining": "yellow",
    "changing role": "yellow",
    "cancelled": "yellow",
    "failed": "red",
    "timeout": "red",
}


Series = dict[str, list[int | None]]  # by name; the last value is the newest, None is not known


class ClassPart(Struct, frozen=True):
    """The displayed fields of a class of requests."""

    priority: str
    queued: int
    running: int
    oldest_wait_s: float
    retracted: dict[str, int]


class RouterPart(Struct, frozen=True):
    """The displayed fields of the router. These types mirror fields of its JSON documents."""

    model: str
    state: str
    is_ready: bool
    running: int
    queued: int
    uptime_s: float
    classes: list[ClassPart] = []  # empty from a router of an older release


class TierPart(Struct, frozen=True):
    """A tier of a worker's KV cache below its pool, in bytes."""

    name: str
    used: int


class WorkerPart(Struct, frozen=True):
    """The displayed fields of a worker."""

    role: str
    instance: str
    state: str
    running: int
    queued: int
    transferring: int
    pages_free: int
    pages_total: int
    accept_length: float | None
    heartbeat_age_s: float
    counters: dict[str, float]
    device: str = NONE
    card: str = ""  # "" on a CPU, and from a worker of an older release
    tiers: list[TierPart] = []


class RequestPart(Struct, frozen=True):
    """The displayed fields of a request."""

    id: str
    arrived: float
    state: str
    outcome: str | None
    attempts: int
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    handoff_ms: float | None
    handoff_bytes: int | None
    accept_length: float | None
    prefill: str | None
    decode: str | None


class StatusPart(Struct, frozen=True):
    """The displayed fields of /status."""

    router: RouterPart
    workers: list[WorkerPart]


class RequestsPart(Struct, frozen=True):
    """The displayed fields of /requests."""

    now: float
    requests: list[RequestPart]


class SeriesPart(Struct, frozen=True):
    """The series of one worker in /history."""

    instance: str
    series: Series


class HistoryPart(Struct, frozen=True):
    """The displayed fields of /history."""

    first: int
    last: int
    router: Series
    workers: list[SeriesPart]


def joined(past: HistoryPart, newer: HistoryPart) -> HistoryPart:
    """The points of `past` and those after it; only the newer ones where a gap or a restart lies between."""
    if newer.first != past.last + 1:
        return newer
    known = {one.instance: one.series for one in past.workers}

    def together(
        before: dict[str, list[int | None]], after: dict[str, list[int | None]]
    ) -> dict[str, list[int | None]]:
        return {name: [*before.get(name, []), *values][-TREND_POINTS:] for name, values in after.items()}

    workers = [
        SeriesPart(one.instance, together(known.get(one.instance, {}), one.series)) for one in newer.workers
    ]
    return HistoryPart(newer.first, newer.last, together(past.router, newer.router), workers)


@dataclass(frozen=True, kw_only=True)
class Look:
    """One reading of one router. `fault` explains a missing answer, `note` an incomplete one."""

    url: str
    at: float = 0.0  # monotonic seconds
    fault: str = ""
    note: str = ""
    status: StatusPart | None = None
    requests: RequestsPart | None = None
    history: HistoryPart | None = None
    document: Mapping[str, object] = field(default_factory=dict)  # both documents unchanged, for scripts


class Rates:
    """Growth of totals per second, over about the last `WINDOW_S`."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[float, float]]] = {}

    def of(self, name: str, total: float, now: float) -> float | None:
        """The rate of the total `name`; None before two readings.

        A total that falls belongs to a restarted process, so its history starts again.
        """
        points = [
            (at, was) for at, was in self._points.get(name, []) if now - at <= WINDOW_S and was <= total
        ]
        self._points[name] = [*points, (now, total)]
        then, was = self._points[name][0]
        return (total - was) / (now - then) if now > then else None


@dataclass(frozen=True, kw_only=True)
class View:
    """How the routers are shown. `height` of 0 shows every row."""

    width: int = 140
    height: int = 0
    sort: str = SORTS[0]


Cell = str | Text


@dataclass(frozen=True)
class Column:
    """A column with its cells. The column with the largest `rank` is left out first when space is short."""

    name: str
    rank: int
    cells: Sequence[Cell]
    is_number: bool = True

    @property
    def width(self) -> int:
        return max(len(self.name), *(len(cell) for cell in self.cells), 0)


def render(looks: Sequence[Look], rates: Rates, view: View | None = None) -> RenderableType:
    """The view of all routers, one below the other."""
    view = view or View()
    parts: list[RenderableType] = []
    num_rows = _rows_for(looks, view)
    for seen in looks:
        if seen.status is None:
            parts.append(Text(f"{seen.url}: {seen.fault or seen.note}", style="red" if seen.fault else "dim"))
        else:
            parts += _router(seen, seen.status.router, view)
            workers = sorted_workers(seen, rates, view.sort)
            parts.append(_workers(seen, workers[:num_rows], view))
            parts += _left_out(len(workers) - num_rows, "workers")
        if seen.requests is not None and seen.requests.requests:
            parts += [Text(), _requests(seen.requests, num_rows, view)]
            parts += _left_out(len(seen.requests.requests) - num_rows, "requests")
        parts.append(Text())
    return Group(*parts[:-1])


def _rows_for(looks: Sequence[Look], view: View) -> int:
    """The most rows of each table, so that all tables fit the height."""
    if not view.height:
        return 1 << 30
    tables = [len(seen.status.workers) for seen in looks if seen.status is not None]
    tables += [len(seen.requests.requests) for seen in looks if seen.requests is not None]
    others = 6 * len(looks) + 2  # heads, empty lines, and lines about rows that are left out
    free = max(len(tables), view.height - others)
    fit = max(1, free // max(1, len(tables)))
    for wanted in sorted(tables):  # a short table leaves its lines to the others
        if wanted <= fit and len(tables) > 1:
            free, tables = free - wanted, tables[: len(tables) - 1]
            fit = max(fit, free // max(1, len(tables)))
    return fit


def _left_out(number: int, what: str) -> list[RenderableType]:
    return [Text(f"... and {number} more {what}", style="dim")] if number > 0 else []


def _router(seen: Look, router: RouterPart, view: View) -> list[RenderableType]:
    state = router.state if router.is_ready or router.state != "serving" else "not ready"
    load = f"  {router.running} running, {router.queued} queued, up {age(router.uptime_s)}"
    head = Text.assemble(
        (f"{router.model} ", "bold"), f"at {seen.url} ", (state, TONES.get(state, "red")), load
    )
    lines: list[RenderableType] = [head]
    if (history := seen.history) is not None:
        output, running = (history.router.get(name, []) for name in ("output_tokens_per_s", "running"))
        ttft = newest(history.router.get("ttft_p50_us", []))
        first = f"  ttft {ms(ttft / 1000)}" if ttft is not None else ""
        cells = min(WIDE_TREND, max(6, (view.width - 40) // 2))
        lines.append(
            Text.assemble(
                "tok/s ", (trend(output, cells), "cyan"), f" {newest(output) or 0}  run ",
                (trend(running, cells), "cyan"), f" {newest(running) or 0}{first}",
            )
        )  # fmt: skip
    return lines + _classes(router.classes)


def _classes(classes: Sequence[ClassPart]) -> list[RenderableType]:
    """A line of the classes, where there are others than normal, or requests that gave something up."""
    used = [one for one in classes if one.queued or one.running or one.retracted]
    if all(one.priority == "normal" and not one.retracted for one in used):
        return []
    parts = []
    for one in used:
        wait = f" ({one.oldest_wait_s:.1f} s)" if one.queued else ""
        lost = "".join(f", {count} {reason}" for reason, count in sorted(one.retracted.items()))
        parts.append(f"{one.priority} {one.running} run, {one.queued} queued{wait}{lost}")
    return [Text("  |  ".join(parts))]


@dataclass(frozen=True)
class RatedWorker:
    """A worker with its rates per second."""

    worker: WorkerPart
    tokens: float | None
    moved: float | None


def sorted_workers(seen: Look, rates: Rates, sort: str) -> list[RatedWorker]:
    """The workers of a router with their rates; the largest first, or prefill before decode."""
    assert seen.status is not None
    rated = []
    for worker in seen.status.workers:
        is_decode, counters = worker.role == "decode", worker.counters
        point = f"{seen.url} {worker.instance}"  # routers that share it have it from different heartbeats
        tokens = counters.get("tokens" if is_decode else "prompt_tokens", 0.0)
        moved = counters.get("handoff_bytes" if is_decode else "bytes", 0.0)
        rated.append(
            RatedWorker(
                worker,
                rates.of(f"{point} tokens", tokens, seen.at),
                rates.of(f"{point} bytes", moved, seen.at),
            )
        )
    by: dict[str, Callable[[RatedWorker], float]] = {
        "tok/s": lambda one: -(one.tokens or 0.0),
        "run": lambda one: -one.worker.running,
        "pages": lambda one: one.worker.pages_free / max(1, one.worker.pages_total),
        "accept": lambda one: -(one.worker.accept_length or 0.0),
    }
    usual = sorted(rated, key=lambda one: (one.worker.role == "decode", one.worker.instance))
    return sorted(usual, key=by[sort]) if sort in by else usual


def _workers(seen: Look, rated: Sequence[RatedWorker], view: View) -> Table:
    workers = [one.worker for one in rated]
    optional: list[Column] = []
    if any(w.counters.get("retractions") for w in workers):  # requests that gave their pages or place up
        optional.append(Column("retracted", 3, [_retracted(w.counters) for w in workers]))
    pulled = [int(w.counters.get("pulled_tokens", 0)) for w in workers]
    if any(pulled):  # tokens of prompts that prefill got from decode
        optional.append(Column("pulled", 5, [str(number) for number in pulled]))
    if any(w.tiers for w in workers):
        below = [", ".join(f"{tier.name} {size(tier.used)}" for tier in w.tiers) or NONE for w in workers]
        optional.append(Column("below the pool", 5, below, is_number=False))
    if trends := {one.instance: one.series for one in seen.history.workers} if seen.history else {}:
        lines = [trend(trends.get(w.instance, {}).get("tokens_per_s", []), TREND) for w in workers]
        optional.append(Column("5 min", 4, [Text(line, "cyan") for line in lines], is_number=False))
    columns = [
        Column("role", 0, [w.role for w in workers], is_number=False),
        Column("worker", 0, [w.instance[:8] for w in workers], is_number=False),
        Column("state", 1, [toned(w.state) for w in workers], is_number=False),
        Column("run", 1, [str(w.running) for w in workers]),
        Column("queue", 5, [str(w.queued) for w in workers]),
        Column("xfer", 8, [str(w.transferring) for w in workers]),
        Column("pages", 2, [f"{w.pages_total - w.pages_free}/{w.pages_total}" for w in workers]),
        Column("tok/s", 1, [NONE if one.tokens is None else f"{one.tokens:.0f}" for one in rated]),
        *optional,
        Column("accept", 3, [_length(w.accept_length) for w in workers]),
        Column("beat", 7, [f"{w.heartbeat_age_s:.1f} s" for w in workers]),
        Column("hand-off", 6, [NONE if one.moved is None else f"{size(one.moved)}/s" for one in rated]),
        Column("card", 9, [(w.card or w.device)[:CARD_WIDTH] for w in workers], is_number=False),
    ]
    return _table(columns, view.width)


def _retracted(counters: Mapping[str, float]) -> str:
    """All retractions, and those for more urgent requests."""
    urgent = sum(int(counters.get(f"retractions_urgent_{what}", 0)) for what in ("pages", "place"))
    every = int(counters.get("retractions", 0))
    return f"{every} ({urgent} urgent)" if urgent else str(every)


def _requests(listed: RequestsPart, num_rows: int, view: View) -> Table:
    rows = listed.requests[:num_rows]

    def pair(row: RequestPart) -> str:
        return (f"{row.prefill} > {row.decode}" if row.prefill != row.decode else row.decode) or NONE

    def handed(row: RequestPart) -> str:
        return NONE if row.handoff_bytes is None else f"{size(row.handoff_bytes)} {ms(row.handoff_ms)}"

    return _table(
        [
            Column("request", 0, [row.id for row in rows], is_number=False),
            Column("state", 0, [toned(row.outcome or row.state) for row in rows], is_number=False),
            Column("age", 1, [age(listed.now - row.arrived) for row in rows]),
            Column("prompt", 3, [str(row.prompt_tokens) for row in rows]),
            Column("output", 1, [str(row.output_tokens) for row in rows]),
            Column("ttft", 1, [ms(row.ttft_ms) for row in rows]),
            Column("tpot", 2, [ms(row.tpot_ms) for row in rows]),
            Column("hand-off", 7, [handed(row) for row in rows]),
            Column("accept", 4, [_length(row.accept_length) for row in rows]),
            Column("tries", 5, [str(row.attempts) for row in rows]),
            Column("workers", 6, [pair(row) for row in rows], is_number=False),
        ],
        view.width,
    )


def _length(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def toned(state: str) -> Text:
    return Text(state, TONES.get(state, "" if state in ("streaming", "prefilling", "queued") else "red"))


def _table(columns: Sequence[Column], width: int) -> Table:
    shown = fitting(columns, width)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for column in shown:
        justify = "right" if column.is_number else "left"
        table.add_column(column.name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for cells in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*cells)
    return table


def fitting(columns: Iterable[Column], width: int) -> list[Column]:
    """The columns that fit in `width`, in their order; those of rank 0 stay."""
    kept = list(columns)
    while sum(column.width + GAP for column in kept) - GAP > width:
        last = max(kept, key=lambda column: column.rank)
        if last.rank == 0:
            break
        kept.remove(last)
    return kept


# --- numbers as text --------------------------------------------------------------------------------------


def trend(values: Sequence[int | None], cells: int) -> str:
    """The last five minutes of a series as a sparkline; blank where nothing is known."""
    known_points = values[-TREND_POINTS:]
    recent: list[int | None] = [*[None] * (TREND_POINTS - len(known_points)), *known_points]
    means: list[float | None] = []
    for cell in range(cells):
        part = recent[cell * TREND_POINTS // cells : (cell + 1) * TREND_POINTS // cells]
        known = [value for value in part if value is not None]
        means.append(sum(known) / len(known) if known else None)
    most = max((mean for mean in means if mean is not None), default=0.0)
    steps = len(BARS) - 2
    return "".join(
        BARS[0] if mean is None else BARS[1 + (round(steps * mean / most) if most else 0)] for mean in means
    )


def newest(values: Sequence[int | None]) -> int | None:
    """The newest known value of the last half minute."""
    return next((value for value in reversed(values[-15:]) if value is not None), None)


def ms(value: float | None) -> str:
    """A time as text, in milliseconds, from 10 s on in seconds."""
    if value is None:
        return NONE
    if value >= 10_000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def age(seconds: float) -> str:
    """A time span as text in its largest unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(num_bytes: float) -> str:
    """A number of bytes as text with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
