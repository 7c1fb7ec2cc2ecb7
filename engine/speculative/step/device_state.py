"""The state of each running request on the device. Decode steps read and advance it there.

The host writes a request's slot when the request joins and never reads it back. Results return in the step's
report. Legend: S slots, B requests of a step, P pages per request, E entries of logit edits, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ....kernels.look_up_rows import Lookup, look_up_rows
from ....kernels.step_glue import CAPACITY, DRAFT_ROW, IS_DRAWN, NEWEST, PAGES, SEED, TOP_K
from ...host_copy import all_to_device, arrays_to_device
from ...sampling.edits import LogitEdits, SamplingRow, entries_of, write_seen
from ...sampling.tensors import SamplingTensors

PAD_SLOT = 0
# Entries of logit edits in captured graphs: the maximum biases and stop tokens of a request, and end tokens.
EDIT_ENTRIES = 1024 + 1024 + 16


@dataclass(frozen=True, kw_only=True)
class RequestInit:
    """The initial state of a request.

    `newest` is its newest token. `length` counts rows with KV, `remaining` the output tokens left, `capacity`
    the rows within its pages and the context. `draft_row` 0 means no drafts. `row` holds the sampling
    parameters.
    """

    newest: int
    length: int
    remaining: int
    capacity: int
    draft_row: int
    pages: Sequence[int]
    row: SamplingRow


@dataclass(frozen=True, kw_only=True)
class MorePages:
    """Pages that the request in `slot` got: `pages` from index `start` on, for `capacity` rows in all."""

    slot: int
    start: int
    pages: Sequence[int]
    capacity: int


class StepRows(NamedTuple):
    """The state of B requests at the start of a step.

    `integers` `[B, F+P]` has the columns of `step_glue`. `tensors` holds the sampling parameters.
    """

    integers: torch.Tensor
    tensors: SamplingTensors

    @property
    def newest(self) -> torch.Tensor:
        """`[B]` int64."""
        return self.integers[:, NEWEST]

    @property
    def draft_rows(self) -> torch.Tensor:
        """`[B]` int64, 0 for requests without drafts."""
        return self.integers[:, DRAFT_ROW]

    @property
    def pages(self) -> torch.Tensor:
        """`[B, P]` int64."""
        return self.integers[:, PAGES:]


class DeviceState:
    """`num_slots` slots. Slot 0 is padding and always idle. A request holds a slot from `open` to `close`.

    S doubles when all slots are held. The memory of logit edits is allocated for the first request that needs
    it, or by `reserve_edits`. `version` counts the host's writes and so invalidates derived values.
    """

    def __init__(self, num_slots: int, max_pages: int, vocab_size: int, device: torch.device | str) -> None:
        assert num_slots >= 2, "slot 0 pads, so at least one more slot is needed"
        self.vocab_size = vocab_size
        self.max_pages = max_pages
        self.device = torch.device(device)
        self.version = 0
        self.integers = torch.zeros((num_slots, PAGES + max_pages), dtype=torch.int64, device=device)
        self._reals = torch.ones(
            (num_slots, 3), dtype=torch.float64, device=device
        )  # temperature, top_p, min_p
        self._edits: LogitEdits | None = None
        self._wanted: torch.Tensor | None = None  # [S] int64: top logprobs asked for, -1 none
        self._edited: set[int] = set()  # slots with logit edits; those of all others change nothing
        self._free = list(range(num_slots - 1, PAD_SLOT, -1))

    @property
    def num_slots(self) -> int:
        return int(self.integers.shape[0])

    @property
    def num_open(self) -> int:
        return self.num_slots - 1 - len(self._free)

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that graphs of all steps read and write."""
        return self.integers, self._reals

    @property
    def edit_anchors(self) -> tuple[torch.Tensor, ...]:
        """The further tensors that graphs of steps with logit edits read and write."""
        if self._edits is None or self._wanted is None:
            return ()
        edits = self._edits
        found = (edits.ids, edits.values, edits.until, edits.penalties, self._wanted)
        return found if edits.seen is None else (*found, edits.seen)

    @property
    def edit_bytes(self) -> int:
        """Bytes of the logit edits: per slot, 20 bytes per entry and 4 bytes per token of the vocabulary."""
        return sum(part.numel() * part.element_size() for part in self.edit_anchors)

    def open(self) -> int:
        """Returns a free slot for a request that joins."""
        if not self._free:
            self._grow()
        self.version += 1
        return self._free.pop()

    def close(self, slot: int) -> None:
        """Releases `slot`. No step launched with it may still run."""
        assert slot not in (PAD_SLOT, *self._free), f"slot {slot} is not open"
        self.version += 1
        self._free.append(slot)

    def reserve(self, num_slots: int) -> None:
        """Grows, as `open` does, until there are `num_slots` slots."""
        while self.num_slots < num_slots:
            self._grow()

    def write(self, slots: Sequence[int], joining: Sequence[RequestInit]) -> None:
        """Writes the state of `joining` to `slots`, in device order after earlier writes, without
        synchronisation.
        """
        rows = [each.row for each in joining]
        tensors = SamplingTensors.of([row.params for row in rows], self.vocab_size)
        integers = np.zeros((len(joining), PAGES + self.max_pages), dtype=np.int64)
        for row, j in zip(integers, joining, strict=True):  # rows of a long context have many columns
            row[: DRAFT_ROW + 1] = (j.newest, j.length, j.remaining, j.capacity, j.draft_row)
            pages = j.pages[: self.max_pages]
            row[PAGES : PAGES + len(pages)] = pages
        for column, values in ((SEED, tensors.seeds), (TOP_K, tensors.top_k), (IS_DRAWN, tensors.is_drawn)):
            integers[:, column] = values.numpy()
        reals = torch.stack((tensors.temperature, tensors.top_p, tensors.min_p), dim=1)
        where, numbers, bits = arrays_to_device(
            [np.array(slots, dtype=np.int64), integers, reals.view(torch.int64).numpy()], self.device
        )
        self.integers.index_copy_(0, where, numbers)
        self._reals.index_copy_(0, where, bits.view(torch.float64))
        written = {
            slot: row
            for slot, row in zip(slots, rows, strict=True)
            if row.params.needs_edits or slot in self._edited
        }
        if written:
            self._write_edits(list(written), list(written.values()))
        self.version += 1

    def append_pages(self, grown: Sequence[MorePages]) -> None:
        """Writes further pages of open slots, in device order after earlier writes, without synchronisation.

        Nothing that was derived from the state depends on pages, so `version` stays.
        """
        width = self.integers.shape[1]
        where: list[int] = []
        values: list[int] = []
        for more in grown:
            row, new = more.slot * width, more.pages[more.start : self.max_pages]
            where += [row + CAPACITY, *range(row + PAGES + more.start, row + PAGES + more.start + len(new))]
            values += [more.capacity, *new]
        at, into = arrays_to_device([np.array(each, dtype=np.int64) for each in (where, values)], self.device)
        self.integers.view(-1).index_copy_(0, at, into)

    def stop_drafting(self, slot: int) -> None:
        """Ends drafting for the request in `slot`, from the next step on."""
        self.integers[slot, DRAFT_ROW].zero_()
        self.version += 1

    def read(self, slots: torch.Tensor) -> StepRows:
        """The rows of `slots` `[B]` int64."""
        rows, reals = look_up_rows(Lookup(self.integers, slots), Lookup(self._reals, slots))
        tensors = SamplingTensors(
            seeds=rows[:, SEED],
            temperature=reals[:, 0],
            top_k=rows[:, TOP_K],
            top_p=reals[:, 1],
            min_p=reals[:, 2],
            is_drawn=rows[:, IS_DRAWN] != 0,
        )
        return StepRows(rows, tensors)

    # --- logit edits -----------------------------------------------------------------------------------

    @property
    def edits(self) -> LogitEdits:
        """The logit edits of all slots. Raises AssertionError before they are reserved."""
        assert self._edits is not None, "no request needed logit edits, and none were reserved"
        return self._edits

    def wanted(self, slots: torch.Tensor) -> torch.Tensor:
        """Top logprobs that the requests in `slots` ask for, int64 `[B]`; -1 for none."""
        assert self._wanted is not None
        return self._wanted.index_select(0, slots)

    def reserve_edits(self, num_entries: int, *, has_counts: bool) -> None:
        """Allocates `num_entries` entries per slot and, with `has_counts`, token counts per slot."""
        old, count = self._edits, self.num_slots
        width = num_entries if old is None else max(num_entries, old.ids.shape[1])
        has_counts = has_counts or (old is not None and old.seen is not None)
        penalties = torch.tensor([[1.0, 0.0, 0.0]], device=self.device).repeat(count, 1)
        ids, values, until = (
            torch.zeros((count, width), dtype=dtype, device=self.device)
            for dtype in (torch.int64, torch.float32, torch.int64)
        )
        seen = (
            torch.zeros((count, self.vocab_size), dtype=torch.int32, device=self.device)
            if has_counts
            else None
        )
        wanted = torch.full((count,), -1, dtype=torch.int64, device=self.device)
        made = LogitEdits(ids=ids, values=values, until=until, penalties=penalties, seen=seen)
        if old is not None and self._wanted is not None:
            for new, before in (
                (made.ids, old.ids),
                (made.values, old.values),
                (made.until, old.until),
                (made.penalties, old.penalties),
            ):
                new[: before.shape[0], : before.shape[1]] = before
            if made.seen is not None and old.seen is not None:
                made.seen[: old.seen.shape[0]] = old.seen
            wanted[: self._wanted.shape[0]] = self._wanted
        self._edits, self._wanted = made, wanted

    def count_tokens(self, slots: torch.Tensor, tokens: torch.Tensor, emitted: torch.Tensor) -> None:
        """Adds the first `emitted` `[B]` of `tokens` `[B, R]` to the token counts of the requests in
        `slots`.
        """
        seen = self.edits.seen
        if seen is None:
            return
        is_emitted = torch.arange(tokens.shape[1], device=tokens.device) < emitted[:, None]
        index = slots[:, None] * self.vocab_size + tokens
        seen.view(-1).index_add_(0, index.reshape(-1), is_emitted.reshape(-1).to(seen.dtype))

    def _write_edits(self, slots: Sequence[int], rows: Sequence[SamplingRow]) -> None:
        ids, values, until, penalties = entries_of(rows, self.vocab_size)
        counted = [i for i, row in enumerate(rows) if row.params.needs_penalties]
        needs_counts, old = bool(counted), self._edits
        needed, width = ids.shape[1], 0 if old is None else old.ids.shape[1]
        if old is None or needed > width or (needs_counts and old.seen is None):
            self.reserve_edits(max(2 * width, needed) if needed > width else width, has_counts=needs_counts)
        edits, missing = self.edits, self.edits.ids.shape[1] - needed
        padded = [torch.nn.functional.pad(part, (0, missing)) for part in (ids, values, until)]
        wanted = torch.tensor([row.params.logprobs for row in rows], dtype=torch.int64)
        assert self._wanted is not None
        where, *parts = all_to_device([torch.tensor(slots), *padded, penalties, wanted], self.device)
        into = (edits.ids, edits.values, edits.until, edits.penalties, self._wanted)
        for target, part in zip(into, parts, strict=True):
            target.index_copy_(0, where, part)
        for slot, row in zip(slots, rows, strict=True):
            (self._edited.add if row.params.needs_edits else self._edited.discard)(slot)
        if counted and edits.seen is not None:
            write_seen(edits.seen, [slots[i] for i in counted], [rows[i] for i in counted])

    def _grow(self) -> None:
        old = self.num_slots
        self.integers = torch.cat((self.integers, torch.zeros_like(self.integers)))
        self._reals = torch.cat((self._reals, torch.ones_like(self._reals)))
        self._free.extend(range(2 * old - 1, old - 1, -1))
        if self._edits is not None:
            self.reserve_edits(self._edits.ids.shape[1], has_counts=False)

    def __repr__(self) -> str:
        return f"<DeviceState {self.num_open} of {self.num_slots - 1} slots, {self.max_pages} pages each>"
