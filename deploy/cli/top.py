"""`baton top`: routers, their workers and recent requests, live in the terminal.

    baton top --url http://a:8000,http://b:8000
    baton top --once --json          one JSON document, for scripts

It reads /status and /requests, as the routers' own page does, and shows no prompts and no text. Name routers
that share a port by their --own-port. The API key is read from the environment variable BATON_API_KEY.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct, ValidationError, convert
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...cluster.config.fields import Setting, check_fields, read_command_line, setting
from ...cluster.errors import ConfigError
from ...cluster.process.process import EXIT_OK
from .client import KEY_VARIABLE, ChatClient, NotShown, RequestFailed
from .command import run_command

PROG = "baton top"
SUMMARY = "Watch routers, their workers and recent requests. Ctrl-C quits."
ANSWER_S = 3.0  # longest wait for a router's answer
WINDOW_S = 5.0  # seconds over which a rate is averaged
PIPE_WIDTH = 140  # columns of output that is not a terminal
CARD_WIDTH = 24  # letters of a GPU's name
NONE = "-"
OWN = "this key shows its own requests; the cluster is shown to the key of an operator or an observer"
TONES = {
    "serving": "green",
    "ok": "green",
    "draining": "yellow",
    "cancelled": "yellow",
    "failed": "red",
    "timeout": "red",
}
Document = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    """Top."""

    url: str = setting(
        "http://127.0.0.1:8000", Setting(help="addresses of routers, separated by commas", metavar="URL")
    )
    every: float = setting(1.0, Setting(help="time between two looks", unit="s", minimum=0.1, maximum=3600))
    requests: int = setting(
        12, Setting(help="most recent requests shown of each router; 0: none", minimum=0, maximum=256)
    )
    once: bool = setting(False, Setting(help="look once and end"))
    json: bool = setting(False, Setting(help="print what the routers say, a line of JSON for each look"))

    def __post_init__(self) -> None:
        check_fields(self)


class RouterPart(Struct, frozen=True):
    """The displayed fields of the router. This and the next two types mirror fields of its JSON documents."""

    model: str
    state: str
    is_ready: bool
    running: int
    queued: int
    uptime_s: float


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


@dataclass(frozen=True, kw_only=True)
class Look:
    """One reading of one router. `fault` explains a missing answer, `note` an incomplete one."""

    url: str
    at: float = 0.0  # monotonic seconds
    fault: str = ""
    note: str = ""
    status: StatusPart | None = None
    requests: RequestsPart | None = None
    document: Document = field(default_factory=dict)  # both documents unchanged, for scripts


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


def look(client: ChatClient, num_requests: int, clock: Callable[[], float] = time.monotonic) -> Look:
    """Reads one router. A tenant's key sees its own requests only."""
    note = ""
    try:
        try:
            status = client.get("/status")
        except NotShown:
            if not num_requests:
                raise
            status, note = None, OWN
        requests = client.get(f"/requests?limit={num_requests}") if num_requests else None
        return Look(
            url=client.url,
            at=clock(),
            note=note,
            status=convert(status, StatusPart | None),
            requests=convert(requests, RequestsPart | None),
            document={"status": status, "requests": requests["requests"] if requests else []},
        )
    except RequestFailed as error:
        return Look(url=client.url, fault=str(error))
    except ValidationError as error:
        return Look(url=client.url, fault=f"{client.url} is no router of this release: {error}")


# --- display ------------------------------------------------------------------------------------------------


def render(looks: Sequence[Look], rates: Rates) -> RenderableType:
    """The view of all routers, one below the other."""
    parts: list[RenderableType] = []
    for seen in looks:
        if seen.status is None:
            parts.append(Text(f"{seen.url}: {seen.fault or seen.note}", style="red" if seen.fault else "dim"))
        else:
            parts += _router(seen.url, seen.status.router)
            parts.append(_workers(seen, seen.status.workers, rates))
        if seen.requests is not None and seen.requests.requests:
            parts.append(_requests(seen.requests))
        parts.append(Text())
    return Group(*parts[:-1])


def _router(url: str, router: RouterPart) -> list[RenderableType]:
    state = router.state if router.is_ready or router.state != "serving" else "not ready"
    load = f"  {router.running} running, {router.queued} queued, up {age(router.uptime_s)}"
    return [Text.assemble((f"{router.model} ", "bold"), f"at {url} ", (state, TONES.get(state, "red")), load)]


def _workers(seen: Look, workers: Sequence[WorkerPart], rates: Rates) -> Table:
    table = _table(
        "role",
        "worker",
        "state",
        "run",
        "queue",
        "xfer",
        "pages",
        "tok/s",
        "hand-off",
        "accept",
        "beat",
        "card",
    )
    for worker in sorted(workers, key=lambda w: (w.role == "decode", w.instance)):
        is_decode, counters, name = worker.role == "decode", worker.counters, worker.instance
        point = f"{seen.url} {name}"  # routers that share a worker have it from different heartbeats
        tokens = rates.of(
            f"{point} tokens", counters.get("tokens" if is_decode else "prompt_tokens", 0.0), seen.at
        )
        moved = rates.of(
            f"{point} bytes", counters.get("handoff_bytes" if is_decode else "bytes", 0.0), seen.at
        )
        table.add_row(
            worker.role,
            name[:8],
            Text(worker.state, TONES.get(worker.state, "red")),
            str(worker.running),
            str(worker.queued),
            str(worker.transferring),
            f"{worker.pages_total - worker.pages_free}/{worker.pages_total}",
            NONE if tokens is None else f"{tokens:.0f}",
            NONE if moved is None else f"{size(moved)}/s",
            NONE if worker.accept_length is None else f"{worker.accept_length:.2f}",
            f"{worker.heartbeat_age_s:.1f} s",
            (worker.card or worker.device)[:CARD_WIDTH],
        )
    return table


def _requests(listed: RequestsPart) -> Table:
    table = _table(
        "request",
        "state",
        "age",
        "prompt",
        "output",
        "ttft",
        "tpot",
        "hand-off",
        "accept",
        "tries",
        "workers",
    )
    for row in listed.requests:
        state, handed = row.outcome or row.state, row.handoff_bytes
        is_apart = row.prefill != row.decode
        table.add_row(
            row.id,
            Text(state, TONES.get(state, "")),
            age(listed.now - row.arrived),
            str(row.prompt_tokens),
            str(row.output_tokens),
            ms(row.ttft_ms),
            ms(row.tpot_ms),
            NONE if handed is None else f"{size(handed)} {ms(row.handoff_ms)}",
            NONE if row.accept_length is None else f"{row.accept_length:.2f}",
            str(row.attempts),
            (f"{row.prefill} > {row.decode}" if is_apart else row.decode) or NONE,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        is_number = column not in ("role", "worker", "card", "state", "request", "workers")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    return table


def ms(value: float | None) -> str:
    """A time as text, in milliseconds, from 10 s on in seconds."""
    if value is None:
        return NONE
    return (
        f"{value / 1000:.1f} s"
        if value >= 10_000
        else f"{value:.0f} ms"
        if value >= 100
        else f"{value:.1f} ms"
    )


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


# --- the command --------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Runs `baton top`.

    Returns 0 when ended by the user, 1 when no router can be reached, 2 for a bad command line.
    """
    return run_command(PROG, lambda: _top(argv))


def _top(argv: list[str]) -> int:
    config = TopConfig(**read_command_line(TopConfig, argv, PROG, SUMMARY))  # type: ignore[arg-type]
    clients = clients_of(config.url)

    def ask() -> list[Look]:
        return [look(client, config.requests) for client in clients]

    looks = ask()
    if all(seen.fault for seen in looks):
        raise RequestFailed("; ".join(seen.fault for seen in looks))
    try:
        _show(config, looks, ask)
    except KeyboardInterrupt:  # the user's way to end the command
        sys.stdout.write("\n")
    return EXIT_OK


def clients_of(urls: str) -> list[ChatClient]:
    """One client per router. Raises ConfigError for an invalid URL."""
    named = [url.strip() for url in urls.split(",") if url.strip()]
    if not named:
        raise ConfigError("--url names no router; write http://HOST:PORT")
    key = os.environ.get(KEY_VARIABLE, "")
    clients = [ChatClient(url, api_key=key, silence_s=ANSWER_S) for url in named]
    return list({client.url: client for client in clients}.values())


def _show(config: TopConfig, looks: list[Look], ask: Callable[[], list[Look]]) -> None:
    if config.json:
        return _repeat(config, looks, ask, _write_json)
    console, rates = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH), Rates()
    if config.once or not console.is_terminal:
        return _repeat(config, looks, ask, lambda seen: console.print(render(seen, rates), highlight=False))
    with Live(render(looks, rates), console=console, screen=True, auto_refresh=False) as live:
        _repeat(config, looks, ask, lambda seen: live.update(render(seen, rates), refresh=True))


def _repeat(
    config: TopConfig, looks: list[Look], ask: Callable[[], list[Look]], show: Callable[[list[Look]], None]
) -> None:
    show(looks)
    while not config.once:
        time.sleep(config.every)
        show(ask())


def _write_json(looks: list[Look]) -> None:
    routers = [
        {"url": seen.url, "fault": seen.fault, "status": None, "requests": None, **seen.document}
        for seen in looks
    ]
    sys.stdout.write(json.dumps({"routers": routers}) + "\n")
    sys.stdout.flush()
