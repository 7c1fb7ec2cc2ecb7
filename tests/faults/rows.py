"""The fault table: each row is one fault against real processes, with the effects it must and must not have.

A row is a generator function over a Scene: it does the fault and asserts its own criterion; what it returns
is what was measured. The promises that hold in every row are checked behind it by `Scene.verdict`. Rows
register themselves when their module is imported; `load` imports all.
"""

import importlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.tests.faults.cluster import Late
from baton.tests.faults.netns import missing
from baton.tests.faults.testbed import Bed, Scene

MODULES = (
    "rows_clients", "rows_damage", "rows_drain", "rows_floods", "rows_heads", "rows_hosts", "rows_leaks",
    "rows_loops", "rows_network", "rows_prefixes",
    "rows_process", "rows_readiness", "rows_routers", "rows_sinks", "rows_stalls", "rows_storms",
    "rows_strangers",
    "rows_versions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table; `settings` are its cluster's, `is_quick` puts it into `make test-cluster`."""

    name: str
    fault: str
    criterion: str
    play: Callable[[Scene], str]
    is_quick: bool
    settings: dict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a row came to; `problems` is empty when it holds."""

    row: Row
    measured: str
    problems: list[str]
    seconds: float
    skipped: str = ""  # why it was not played
    is_late: bool = False  # it failed by a bound of time alone


class Registry:
    """Rows by name."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def row(self, name: str, fault: str, criterion: str, *, quick: bool = False, **settings):
        """Decorator that adds a row."""

        def add(play: Callable[[Scene], str]) -> Callable[[Scene], str]:
            assert name not in self.rows, name
            self.rows[name] = Row(
                name=name, fault=fault, criterion=criterion, play=play, is_quick=quick, settings=settings
            )
            return play

        return add


TABLE = Registry()
row = TABLE.row


def load() -> dict[str, Row]:
    """Every row, in order."""
    for module in MODULES:
        importlib.import_module(f"baton.tests.faults.{module}")
    return dict(sorted(TABLE.rows.items()))


def attempt(bed: Bed, chosen: Row) -> Outcome:
    """Plays a row on a cluster of its own and judges it."""
    if chosen.settings.get("hosts") and (reason := missing()):
        return Outcome(row=chosen, measured="", problems=[], seconds=0.0, skipped=reason)
    began = time.monotonic()
    measured, problems, is_late = "", [], False
    try:
        with bed.scene(**chosen.settings) as scene:
            measured = chosen.play(scene)
            problems = scene.verdict()
            if problems:
                problems.append(scene.cluster.last_lines())
    except (
        Exception
    ) as error:  # whatever a row runs into is its result; the next row has a cluster of its own
        at = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if "rows" in f.filename)
        problems = [f"{type(error).__name__} {error} in: {at.line}", *getattr(error, "__notes__", [])]
        is_late = isinstance(error, Late)
    seconds = time.monotonic() - began
    return Outcome(row=chosen, measured=measured, problems=problems, seconds=seconds, is_late=is_late)


HEAD = ("| row | fault | criterion | result | measured | s |", "|---|---|---|---|---|---|")


def as_line(outcome: Outcome) -> str:
    """A row of the table of a run, below HEAD."""
    row = outcome.row
    result = "**fails**" if outcome.problems else "not run" if outcome.skipped else "holds"
    text = (
        outcome.problems[0].splitlines()[0][:160] if outcome.problems else outcome.measured or outcome.skipped
    )
    return f"| {row.name} | {row.fault} | {row.criterion} | {result} | {text} | {outcome.seconds:.1f} |"
