"""The state of each request between two steps of chained or independent MTP modules, in device rows.

Row 0 is the padding row. Shape legend: C rows, F front rows, H hidden, K modules.
"""

import torch

from .states import StateRows


class FrontStates(StateRows):
    """The newest rows of each request, which the next step computes again, and its drafts.

    The front rows are the last F = K-1 committed ones, right-aligned: `hidden` `[C, F, H]` is the target's
    residual stream of each row, `tokens` int64 `[C, F]` the token behind each row, `counts` int64 `[C]` the
    number of front rows that a request has. `drafts` int64 `[C, K]` are its next proposals.
    """

    def __init__(
        self, capacity: int, num_modules: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(capacity)
        front = num_modules - 1
        self.hidden = torch.zeros((capacity, front, width), dtype=dtype, device=device)
        self.tokens = torch.zeros((capacity, front), dtype=torch.int64, device=device)
        self.counts = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.drafts = torch.zeros((capacity, num_modules), dtype=torch.int64, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the states; they move when the number of rows grows."""
        return self.hidden, self.tokens, self.counts, self.drafts

    @property
    def num_front(self) -> int:
        """F, the most front rows of a request."""
        return int(self.hidden.shape[1])

    def write_front(
        self, rows: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Copies front rows to the states `rows` `[R]` int64; shapes as in the class, with R for C."""
        self.hidden.index_copy_(0, rows, hidden.to(self.hidden.dtype))
        self.tokens.index_copy_(0, rows, tokens)
        self.counts.index_copy_(0, rows, counts)

    def _double(self) -> None:
        self.hidden, self.tokens, self.counts, self.drafts = (
            torch.cat((values, torch.zeros_like(values))) for values in self.tensors
        )
