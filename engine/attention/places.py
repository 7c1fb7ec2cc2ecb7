"""Where a batch's requests lie, as static tensors: what attention inside a captured graph reads anew at each
replay.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ...kernels.gather_context import context_rows
from ..batch.forward_batch import ForwardBatch
from ..host_copy import arrays_to_device


@dataclass(frozen=True, kw_only=True)
class RequestPlaces:
    """The places of up to R requests with up to P pages each, int64 on the device.

    `page_table` `[R, P]`. `q_starts` and `kv_starts` `[R+1]`: the first new row of each request, and its
    first row in the context buffers. `kv_lens` `[R]`: context lengths, 0 beyond the batch's requests. The
    last three are the rows of `integers`, which begin at even columns, as kernels want them.
    """

    page_table: torch.Tensor
    integers: torch.Tensor

    @classmethod
    def empty(cls, max_requests: int, max_pages: int, device: torch.device) -> "RequestPlaces":
        table = torch.zeros((max_requests, max_pages), dtype=torch.int64, device=device)
        return cls(
            page_table=table,
            integers=torch.zeros((3, -(-(max_requests + 1) // 2) * 2), dtype=torch.int64, device=device),
        )

    @property
    def max_requests(self) -> int:
        """R."""
        return int(self.page_table.shape[0])

    @property
    def max_pages(self) -> int:
        """P."""
        return int(self.page_table.shape[1])

    @property
    def q_starts(self) -> torch.Tensor:
        return self.integers[0, : self.max_requests + 1]

    @property
    def kv_starts(self) -> torch.Tensor:
        return self.integers[1, : self.max_requests + 1]

    @property
    def kv_lens(self) -> torch.Tensor:
        return self.integers[2, : self.max_requests]

    def load(self, batch: ForwardBatch) -> None:
        """Take the places of `batch`, which has at most R requests with at most P pages each."""
        rows = ([0, *accumulate(batch.q_lens)], context_rows(batch.kv_lens), [*batch.kv_lens, 0])
        missing = self.integers.shape[1] - batch.num_requests - 1
        values = np.array([[*row, *row[-1:] * missing] for row in rows], dtype=np.int64)
        self.integers.copy_(arrays_to_device([values], self.integers.device)[0], non_blocking=True)
        count, width = batch.page_table.shape
        self.page_table[:count, :width].copy_(batch.page_table)
