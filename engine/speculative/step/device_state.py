"""What decode steps need of each running request, on the device: a step reads it there and moves it on there.

The host writes a request's slot when the request joins, and reads nothing of it: what a step gave comes back in the step's
report. Legend: S slots, B requests of a step, P pages per request, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....kernels.step_glue import DRAFT_ROW, IS_DRAWN, NEWEST, PAGES, SEED, TOP_K
from ...host_copy import to_device
from ...sampling.choose import Knobs
from ...sampling.params import SamplingParams

PAD_SLOT = 0


@dataclass(frozen=True, kw_only=True)
class Joining:
    """A request as its first step finds it: `newest` token, `length` rows with KV, `remaining` output tokens, `capacity`
    rows that its pages and the context have, `draft_row` (PAD_ROW: nothing is drafted for it)."""

    newest: int
    length: int
    remaining: int
    capacity: int
    draft_row: int
    pages: Sequence[int]
    sampling: SamplingParams


class StepRows(NamedTuple):
    """The state of B requests as a step found it: `integers` `[B, F+P]` with the columns of `step_glue`, and the knobs."""

    integers: torch.Tensor
    knobs: Knobs

    @property
    def newest(self) -> torch.Tensor:
        """`[B]` int64."""
        return self.integers[:, NEWEST]

    @property
    def draft_rows(self) -> torch.Tensor:
        """`[B]` int64, PAD_ROW where nothing is drafted."""
        return self.integers[:, DRAFT_ROW]

    @property
    def pages(self) -> torch.Tensor:
        """`[B, P]` int64."""
        return self.integers[:, PAGES:]


class StepState:
    """`num_slots` slots; slot 0 pads: it is idle for ever. A request holds a slot from `open` to `close`."""

    def __init__(self, num_slots: int, max_pages: int, vocab_size: int, device: torch.device | str) -> None:
        assert num_slots >= 2, "slot 0 pads, so at least one more slot is needed"
        self.vocab_size = vocab_size
        self.max_pages = max_pages
        self.device = torch.device(device)
        self.integers = torch.zeros((num_slots, PAGES + max_pages), dtype=torch.int64, device=device)
        self._reals = torch.ones(
            (num_slots, 3), dtype=torch.float64, device=device
        )  # temperature, top_p, min_p
        self._free = list(range(num_slots - 1, PAD_SLOT, -1))

    @property
    def num_open(self) -> int:
        return self.integers.shape[0] - 1 - len(self._free)

    def open(self) -> int:
        """A slot of its own for a request that joins."""
        assert self._free, f"{self!r}: more requests than there are slots"
        return self._free.pop()

    def close(self, slot: int) -> None:
        """Give `slot` back; no step that was launched with it may still run."""
        assert slot not in (PAD_SLOT, *self._free), f"slot {slot} is not open"
        self._free.append(slot)

    def write(self, slots: Sequence[int], joining: Sequence[Joining]) -> None:
        """Set `slots` to the state of `joining`, behind whatever the device was told before; waits for nothing."""
        knobs = Knobs.of([each.sampling for each in joining], self.vocab_size)
        rows = [
            [
                j.newest,
                j.length,
                j.remaining,
                j.capacity,
                j.draft_row,
                0,
                0,
                0,
                *j.pages,
                *[0] * self._missing(j),
            ]
            for j in joining
        ]
        integers = torch.tensor(rows, dtype=torch.int64)
        integers[:, SEED], integers[:, TOP_K], integers[:, IS_DRAWN] = (
            knobs.seeds,
            knobs.top_k,
            knobs.is_drawn.long(),
        )
        reals = torch.stack((knobs.temperature, knobs.top_p, knobs.min_p), dim=1)
        where = to_device(torch.tensor(slots, dtype=torch.int64), self.device)
        self.integers.index_copy_(0, where, to_device(integers, self.device))
        self._reals.index_copy_(0, where, to_device(reals, self.device))

    def read(self, slots: torch.Tensor) -> StepRows:
        """The rows of `slots` `[B]` int64."""
        rows, reals = self.integers.index_select(0, slots), self._reals.index_select(0, slots)
        knobs = Knobs(
            seeds=rows[:, SEED],
            temperature=reals[:, 0],
            top_k=rows[:, TOP_K],
            top_p=reals[:, 1],
            min_p=reals[:, 2],
            is_drawn=rows[:, IS_DRAWN] != 0,
        )
        return StepRows(rows, knobs)

    def _missing(self, joining: Joining) -> int:
        missing = self.max_pages - len(joining.pages)
        assert missing >= 0, f"{len(joining.pages)} pages, but steps were planned for {self.max_pages}"
        return missing

    def __repr__(self) -> str:
        return (
            f"<StepState {self.num_open} of {self.integers.shape[0] - 1} slots, {self.max_pages} pages each>"
        )
