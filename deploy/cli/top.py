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
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import ValidationError, convert
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...cluster.config.fields import Setting, check_fields, read_command_line, setting
from ...cluster.errors import ConfigError
from ...cluster.process.process import EXIT_OK
from .client import KEY_VARIABLE, ChatClient, NotShown, RequestFailed
from .command import run_command
from .top_keys import Keyboard
from .top_view import SORTS, HistoryPart, Look, Rates, RequestsPart, StatusPart, View, joined, render

PROG = "baton top"
SUMMARY = "Watch routers, their workers and recent requests. q quits, s changes the order of the workers."
ANSWER_S = 3.0  # longest wait for a router's answer
PIPE_WIDTH = 140  # columns of output that is not a terminal, unless COLUMNS says otherwise
QUIT = ("q", "Q")
OWN = "this key shows its own requests; the cluster is shown to the key of an operator or an observer"


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
    sort: str = setting(SORTS[0], Setting(help="order of the workers", choices=SORTS))
    once: bool = setting(False, Setting(help="look once and end"))
    json: bool = setting(False, Setting(help="print what the routers say, a line of JSON for each look"))

    def __post_init__(self) -> None:
        check_fields(self)


def look(
    client: ChatClient,
    num_requests: int,
    clock: Callable[[], float] = time.monotonic,
    past: HistoryPart | None = None,
) -> Look:
    """Reads one router. A tenant's key sees its own requests only. `past`: the history of the look before."""
    note, history = "", None
    try:
        try:
            status = client.get("/status")
            history = _history_of(client, past)
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
            history=history,
            document={"status": status, "requests": requests["requests"] if requests else []},
        )
    except RequestFailed as error:
        return Look(url=client.url, fault=str(error))
    except ValidationError as error:
        return Look(url=client.url, fault=f"{client.url} is no router of this release: {error}")


def _history_of(client: ChatClient, past: HistoryPart | None) -> HistoryPart | None:
    """The load of the last minutes: `past` and what came after it. None from a router of an older release."""
    try:
        newer = convert(client.get(f"/history?since={past.last}" if past else "/history"), HistoryPart)
    except NotShown:
        raise
    except (RequestFailed, ValidationError):
        return None
    return newer if past is None else joined(past, newer)


# --- the command --------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Runs `baton top`.

    Returns 0 when ended by the user, 1 when no router can be reached, 2 for a bad command line.
    """
    return run_command(PROG, lambda: _top(argv))


def _top(argv: list[str]) -> int:
    config = TopConfig(**read_command_line(TopConfig, argv, PROG, SUMMARY))  # type: ignore[arg-type]
    clients = clients_of(config.url)

    past: dict[str, HistoryPart | None] = {}

    def ask() -> list[Look]:
        seen = [look(client, config.requests, past=past.get(client.url)) for client in clients]
        past.update({one.url: one.history for one in seen})
        return seen

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
    console, rates = Console(width=_width()), Rates()
    if config.once or not console.is_terminal:
        view = View(width=console.width, sort=config.sort)
        return _repeat(
            config, looks, ask, lambda seen: console.print(render(seen, rates, view), highlight=False)
        )
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        Screen(config, rates, console, live).run(looks, ask, keyboard)


def _width() -> int | None:
    """Columns of the output where it is no terminal; None: as rich finds it, in COLUMNS first."""
    named = os.environ.get("COLUMNS", "")
    is_known = sys.stdout.isatty() or (named.isdigit() and int(named) > 0)
    return None if is_known else PIPE_WIDTH


class Screen:
    """The live view: it looks again every `every` seconds, and at once shows what a key changed."""

    def __init__(self, config: TopConfig, rates: Rates, console: Console, live: Live) -> None:
        self._every, self._sort = config.every, config.sort
        self._rates, self._console, self._live = rates, console, live

    def run(self, looks: list[Look], ask: Callable[[], list[Look]], keyboard: Keyboard) -> None:
        """Shows the routers until the user quits."""
        key = ""
        while key not in QUIT:
            self._draw(looks)
            until = time.monotonic() + self._every
            while (left := until - time.monotonic()) > 0 and key not in QUIT:
                if key := keyboard.wait(left):
                    self._press(key)
                    self._draw(looks)
            if key not in QUIT:
                looks = ask()

    def _press(self, key: str) -> None:
        if key == "s":
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]

    def _draw(self, looks: list[Look]) -> None:
        width, height = self._console.size
        body = render(looks, self._rates, View(width=width, height=height - 2, sort=self._sort))
        keys = Text(f"q quit   s sort by {self._sort}", style="dim")
        self._live.update(Group(body, Text(), keys), refresh=True)


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
