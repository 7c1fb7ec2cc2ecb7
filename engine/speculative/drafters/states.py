"""The draft state of each request between two steps, in device rows. Row 0 is the padding row."""

import torch

from ....kernels.put_rows import Put, put_rows

PAD_ROW = 0


class StateRows:
    """Rows of tensors of C rows each. A request holds a row from `open` to `close`.

    C doubles when all rows are held; `_double` appends C rows to every tensor.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 2, "row 0 pads, so at least one more row is needed"
        self.capacity = capacity
        self._free = list(range(capacity - 1, PAD_ROW, -1))

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

    def _grow(self) -> None:
        old = self.capacity
        self._double()
        self.capacity = 2 * old
        self._free.extend(range(2 * old - 1, old - 1, -1))

    def _double(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.num_open} open of {self.capacity - 1}>"


class DraftStates(StateRows):
    """`hidden` `[C, H]` is the fed-back hidden, and `logits` `[C, Vd]` are those of the first proposal."""

    def __init__(
        self, capacity: int, width: int, draft_vocab_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(capacity)
        self.hidden = torch.zeros((capacity, width), dtype=dtype, device=device)
        self.logits = torch.zeros((capacity, draft_vocab_size), dtype=torch.float32, device=device)

    def write(
        self,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        emitted: torch.Tensor | None = None,
    ) -> None:
        """Copies `hidden` `[R, H]` and `logits` `[R, Vd]` to the states `rows` `[R]` int64, but none for
        requests whose `emitted` `[R]` int64 is 0.
        """
        hidden = hidden.to(self.hidden.dtype).contiguous()
        put_rows(rows, Put(self.hidden, hidden), Put(self.logits, logits.contiguous()), counts=emitted)

    def _double(self) -> None:
        self.hidden = torch.cat((self.hidden, torch.zeros_like(self.hidden)))
        self.logits = torch.cat((self.logits, torch.zeros_like(self.logits)))


class TokenRings(StateRows):
    """`tokens` int32 `[C, W]`: the last W tokens of each request; the token at position p is in column p
    modulo W.
    """

    def __init__(self, capacity: int, window: int, device: torch.device | str) -> None:
        super().__init__(capacity)
        self.tokens = torch.zeros((capacity, window), dtype=torch.int32, device=device)

    @property
    def window(self) -> int:
        """W, in tokens."""
        return int(self.tokens.shape[1])

    def append(
        self, rows: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Writes the first `counts` `[B]` of `tokens` int64 `[B, R]` at positions from `starts` `[B]` on.

        `rows` `[B]`: the requests' rows. Tokens behind the count, and those of row 0, go to row 0.
        """
        width = self.window
        ahead = torch.arange(tokens.shape[1], device=tokens.device)
        columns = torch.remainder(starts[:, None] + ahead, width)
        places = torch.where(ahead < counts[:, None], rows[:, None], PAD_ROW) * width + columns
        self.tokens.view(-1).index_copy_(0, places.reshape(-1), tokens.reshape(-1).to(self.tokens.dtype))

    def _double(self) -> None:
        self.tokens = torch.cat((self.tokens, torch.zeros_like(self.tokens)))
