"""Rounds of forwards that ranks with data-parallel attention run together, each with requests of its own.

The layers of experts are collectives, so all ranks must enter them equally often and with equally many rows.
A round has two turns: a forward over prompts, then a decode step. In each turn every rank tells the others
what it would run, and all run the largest of these: a rank pads its own batch to it, or runs idle rows. What
nobody wants does not run. A batch is padded to the agreed size before its attention is planned.

Each rank decides by itself what it wants; all find the same answer from the same wishes, so no rank commands.
A wish has the size of the graph that the rank would take, and all ranks capture graphs of the same sizes, so
the answer is one of these, too. A rank may still run eagerly what others replay.

Drafters are whole on every rank and run in no turn.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from ..errors import LifecycleError
from .expert_rows import LockstepRows


class Turn(IntEnum):
    """A forward of a round."""

    PROMPTS = 1
    STEP = 2


class PromptRows(NamedTuple):
    """A forward over prompts: its tokens, or the size of the graph that a rank has for them, and the rows
    whose logits are read.
    """

    rows: int = 0
    selected: int = 0


class StepRows(NamedTuple):
    """A decode step: its requests, or the size of the graph that a rank has for them, and the sizes of the
    drafted shape (`DraftShape`).
    """

    requests: int = 0
    nodes: int = 0
    steps: int = 0
    topk: int = 0


class RanksLeft(Exception):
    """Another rank has left the worker, so no forward can run any more."""


class Exchange(Protocol):
    """How a rank hears of the others."""

    def swap(self, turn: Turn, wish: Sequence[int]) -> Sequence[Sequence[int]]:
        """The wishes of all ranks for the next turn; waits for them.

        Raises RanksLeft if a rank has left before it, LifecycleError for ranks in different turns.
        """

    @property
    def is_called(self) -> bool:
        """Whether another rank is in a turn that this one has not joined."""

    def rest(self) -> None:
        """From now on a call of another rank wakes this one."""


def largest_prompts(wishes: Sequence[Sequence[int]]) -> PromptRows:
    """The sizes that hold the prompts of all ranks."""
    return PromptRows(*(max(column) for column in zip(*wishes, strict=True)))


def largest_step(wishes: Sequence[Sequence[int]]) -> StepRows:
    """The most requests, in the largest of the shapes, of which all are cuts of one."""
    _, *shape = max(wishes, key=lambda wish: tuple(wish[1:]))
    return StepRows(max(wish[0] for wish in wishes), *shape)


class Rounds:
    """The rounds of one rank, with others over `exchange`.

    `rows` learns what was agreed on. `idle_step` runs this rank's part of a decode step without requests: it
    calls `step` with an empty wish, and runs idle rows of the answer, if any; likewise `idle_prompts`.
    """

    def __init__(self, exchange: Exchange, rows: LockstepRows) -> None:
        self.rows = rows
        self.idle_prompts: Callable[[], None] = _nothing
        self.idle_step: Callable[[], None] = _nothing
        self.num_rounds = 0
        self.has_streams = False  # some rank had requests in the newest step, which prompts of any rank delay
        self._exchange = exchange
        self._due = Turn.PROMPTS
        self._is_over = False  # a rank has left
        self._is_in = False  # this rank took part in a round since `finish`
        self._has_run = False  # a forward ran in it
        rows.expected = 0

    def prompts(self, wish: PromptRows) -> PromptRows:
        """The agreed sizes of the round's forward over prompts; 0 rows: nobody runs one.

        Raises as `Exchange.swap`, and LifecycleError for a second one in a round.
        """
        if self._due is not Turn.PROMPTS and not self._is_over:
            raise LifecycleError("a round has one forward over prompts")
        found = largest_prompts(self._swap(Turn.PROMPTS, wish))
        self._due = Turn.STEP
        self._has_run |= found.rows > 0
        return found

    def step(self, wish: StepRows) -> StepRows:
        """The agreed sizes of the round's decode step; 0 requests: nobody runs one.

        Joins the forward over prompts first, if this rank has no part in it. Raises as `Exchange.swap`.
        """
        if self._due is Turn.PROMPTS:
            self.idle_prompts()
        found = largest_step(self._swap(Turn.STEP, wish))
        self._due = Turn.PROMPTS
        self.has_streams = found.requests > 0
        self._has_run |= self.has_streams
        self.num_rounds += 1
        return found

    def agreed(self, num_rows: int) -> None:
        """From here on the forward of this turn enters layers with this number of rows."""
        self.rows.expected = num_rows

    def finish(self) -> bool:
        """Ends the round that this rank has begun, or joins one that others have begun; once a step.

        False: no forward ran, and the rank may sleep until it is called.
        """
        if self._due is Turn.STEP or (not self._is_in and self._exchange.is_called):
            self.idle_step()
        has_run, self._is_in, self._has_run = self._has_run, False, False
        if has_run:
            return True
        self._exchange.rest()
        return self._exchange.is_called  # by a rank that did not know yet that this one rests

    def _swap(self, turn: Turn, wish: Sequence[int]) -> Sequence[Sequence[int]]:
        if self._is_over:
            raise RanksLeft
        self._is_in = True
        try:
            return self._exchange.swap(turn, wish)
        except RanksLeft:
            self._is_over = True
            raise

    def __repr__(self) -> str:
        return f"<Rounds {self.num_rounds}, {self._due.name} due, {self.rows!r}>"


def _nothing() -> None:
    """Before the engine's forwards are known."""
