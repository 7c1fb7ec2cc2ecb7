"""The inputs and outputs of a forward.

Legend: T tokens (rows) of the batch, B requests, V vocabulary, H hidden size, K captured features, R selected
rows.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ..graphs.bucketed_graphs import PathDecision


class CaptureHidden(IntEnum):
    """The hidden rows that a forward returns. A runner never returns fewer than requested."""

    NULL = 0
    LAST = 1  # the last row of each request
    FULL = 2  # every row


@dataclass(kw_only=True)
class ForwardBatch:
    """The flattened rows of B requests, request by request.

    `input_ids`, `positions`: int64 `[T]`. `slots`: int64 `[T]`, the place of each row's KV (page * page_size
    + offset; 0 is the padding sink). `page_table`: int64 `[B, P]` page ids, rows padded with page 0.
    `q_lens`, `kv_lens`: for each request, on the host, its rows and its context length after this forward
    (its own rows included). `logit_rows`: int64 `[R]`, the rows whose logits are wanted (None: all).
    `features`: `[T, feature width]`, the draft model's input hidden rows; None for a target. `input_embeds`:
    `[T, H]`, replaces the embeddings of `input_ids`. `wants_experts`: the experts of all rows are wanted.

    A row sees all rows of its request up to itself.

    Any change increments `version`, which invalidates older metadata, and clears `decision`, the path chosen
    by the runner.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    capture_hidden: CaptureHidden = CaptureHidden.NULL
    logit_rows: torch.Tensor | None = None
    features: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    wants_experts: bool = False
    version: int = 0
    decision: PathDecision | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of the batch."""
        return int(self.input_ids.shape[0])

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return len(self.q_lens)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name not in ("version", "decision"):
            object.__setattr__(self, "version", getattr(self, "version", -1) + 1)
            object.__setattr__(self, "decision", None)


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """The result of a forward, with tensors of its own.

    `path`: the path that ran ("eager", "breakable", "graph"). `logits`: float32 `[R, V]`. `hidden`: the aux
    features `[T, K*H]` of a target, or the fed-back hidden rows `[R, H]` or `[T, H]` of a draft; None if not
    captured. `experts`: the ids of the experts of every row, `[T, L*K]` (`routed_experts`); None if not
    wanted.
    """

    path: str
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    experts: torch.Tensor | None = None


@dataclass(kw_only=True)
class StepCounters:
    """The number of forwards per path; monotonic."""

    forwards: dict[str, int] = field(default_factory=dict)

    def count(self, path: str) -> None:
        """Count one forward on `path`."""
        self.forwards[path] = self.forwards.get(path, 0) + 1
