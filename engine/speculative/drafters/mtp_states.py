"""The state of each request between two steps of chained or independent MTP modules, in device rows.

Row 0 is the padding row. Shape legend: C rows, F front rows, H hidden, K modules.
"""

import torch

from .states import PAD_ROW


class FrontStates:
    """The newest rows of each request, which the next step computes again, and its drafts.

    The front rows are the last F = K-1 committed ones, right-aligned: `hidden` `[C, F, H]` is the target's
    residual stream of each row, `tokens` int64 `[C, F]` the token behind each row, `counts` int64 `[C]` the
    number of front rows that a request has. `drafts` int64 `[C, K]` are its next proposals. A request holds
    a row from `open` to `close`. C doubles when all rows are held.
    """

    def __init__(
        self, capacity: int, num_modules: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert capacity >= 2, "row 0 pads, so at least one more row is needed"
        front = num_modules - 1
        self.hidden = torch.zeros((capacity, front, width), dtype=dtype, device=device)
        self.tokens = torch.zeros((capacity, front), dtype=torch.int64, device=device)
        self.counts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.drafts = torch.zeros((capacity, num_modules), dtype=torch.int64, device=device)
        self._free = list(range(capacity - 1, PAD_ROW, -1))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the states; they move when the number of rows grows."""
        return self.hidden, self.tokens, self.counts, self.drafts

    @property
    def capacity(self) -> int:
        return int(self.hidden.shape[0])

    @property
    def num_front(self) -> int:
        """F, the most front rows of a request."""
        return int(self.hidden.shape[1])

    @property
    def num_open(self) -> int:
        return self.capacity - 1 - len(self._free)

    def reserve(self, count: int) -> None:
        """Allocates rows for `count` requests. The tensors do not move before more requests are open."""
        while self.capacity - 1 < count:
            self._grow()

    def open(self) -> int:
        """Returns a free row for a new request."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def close(self, row: int) -> None:
        """Releases `row`."""
        assert row not in (PAD_ROW, *self._free), f"draft state row {row} is not open"
        self._free.append(row)

    def write_front(
        self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Copies front rows to the states `rows` `[R]` int64; shapes as in the class, with R for C."""
        self.hidden.index_copy_(0, rows, hidden.to(self.hidden.dtype))
        self.tokens.index_copy_(0, rows, tokens)
        self.counts.index_copy_(0, rows, counts)

    def _grow(self) -> None:
        old = self.capacity
        self.hidden, self.tokens, self.counts, self.drafts = (
            torch.cat((values, torch.zeros_like(values))) for values in self.tensors
        )
        self._free.extend(range(2 * old - 1, old - 1, -1))

    def __repr__(self) -> str:
        return f"<FrontStates {self.num_open} open of {self.capacity - 1}, {self.num_front} rows each>"
