"""What the drafter remembers of each request between two steps, in device rows; row 0 is the padding row."""

import torch

PAD_ROW = 0


class DraftStates:
    """Rows of `hidden` `[C, H]` and `logits` `[C, Vd]`: the fed-back hidden and the first proposal's logits.

    A request holds a row from `open` to `close`. C grows by doubling when all rows are held.
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
        """Room for `count` requests: until there are more, the tensors stay where they are."""
        while self.capacity - 1 < count:
            self._grow()

    def open(self) -> int:
        """A row of its own for a new request."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def close(self, row: int) -> None:
        """Give `row` back."""
        assert row not in (PAD_ROW, *self._free), f"draft state row {row} is not open"
        self._free.append(row)

    def write(self, rows: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Set the states `rows` `[R]` int64 to `hidden` `[R, H]` and `logits` `[R, Vd]`; copies, never
        aliases."""
        self.hidden.index_copy_(0, rows, hidden.to(self.hidden.dtype))
        self.logits.index_copy_(0, rows, logits)

    def _grow(self) -> None:
        old = self.capacity
        self.hidden = torch.cat((self.hidden, torch.zeros_like(self.hidden)))
        self.logits = torch.cat((self.logits, torch.zeros_like(self.logits)))
        self._free.extend(range(2 * old - 1, old - 1, -1))

    def __repr__(self) -> str:
        return f"<DraftStates {self.num_open} open of {self.capacity - 1}>"
