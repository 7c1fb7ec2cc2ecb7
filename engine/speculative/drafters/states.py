"""The draft state of each request between two steps, in device rows. Row 0 is the padding row."""

import torch

PAD_ROW = 0


class DraftStates:
    """`hidden` `[C, H]` is the fed-back hidden, and `logits` `[C, Vd]` are those of the first proposal.

    A request holds a row from `open` to `close`. C doubles when all rows are held.
    """

    def __init__(
        self, capacity: int, width: int, draft_vocab_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert capacity >= 2, "row 0 pads, so at least one more row is needed"
        self.hidden = torch.zeros((capacity, width), dtype=dtype, device=device)
        self.logits = torch.zeros((capacity, draft_vocab_size), dtype=torch.float32, device=device)
        self._free = list(range(capacity - 1, PAD_ROW, -1))

    @property
    def capacity(self) -> int:
        return int(self.hidden.shape[0])

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

    def write(self, rows: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Copies `hidden` `[R, H]` and `logits` `[R, Vd]` to the states `rows` `[R]` int64."""
        self.hidden.index_copy_(0, rows, hidden.to(self.hidden.dtype))
        self.logits.index_copy_(0, rows, logits)

    def _grow(self) -> None:
        old = self.capacity
        self.hidden = torch.cat((self.hidden, torch.zeros_like(self.hidden)))
        self.logits = torch.cat((self.logits, torch.zeros_like(self.logits)))
        self._free.extend(range(2 * old - 1, old - 1, -1))

    def __repr__(self) -> str:
        return f"<DraftStates {self.num_open} open of {self.capacity - 1}>"
