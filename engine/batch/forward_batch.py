"""The inputs and the outputs of a forward. Shape legend:

T tokens (rows) of the batch, B requests, V vocabulary, H hidden size, K captured features, R selected rows.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

import torch

from ..graphs.bucketed_graphs import PathDecision


class ForwardMode(Enum):
    """The kind of rows in a batch."""

    EXTEND = "extend"  # prompt tokens behind a (possibly empty) prefix
    DECODE = "decode"  # one row per request
    TARGET_VERIFY = "target_verify"  # N rows per request: the bonus token and its drafts
    DRAFT_EXTEND = "draft_extend"  # N rows per request through the draft model
    IDLE = "idle"  # no rows


class CaptureHidden(IntEnum):
    """The hidden rows that a forward returns; a runner never returns fewer than requested."""

    NULL = 0
    LAST = 1  # the last row of each request
    FULL = 2  # every row


@dataclass(kw_only=True)
class ForwardBatch:
    """The flattened rows of B requests, request by request.

    `input_ids` `[T]` int64, `positions` `[T]` int64, `slots` `[T]` int64: where each row's KV is written
    (page * page_size + offset; 0 is the padding sink). `page_table` `[B, P]` int64 page ids, rows padded with page 0.
    `q_lens[b]` rows and `kv_lens[b]` context length after this forward (its own rows included) of request b, on the host.
    `logit_rows` `[R]` int64: rows whose logits are wanted (None: all). `features` `[T, feature width]`: the draft model's
    input hidden, None for a target. `tree_mask` bool `[B, Q, W]`: of the last W context rows those that each of Q new rows
    per request sees, instead of all up to itself. `input_embeds` `[T, H]`: replace the embeddings of `input_ids`.
    Changing any of these increments `version`, so that older metadata is refused, and clears `decision`, the path that the
    runner has chosen for this batch.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    capture_hidden: CaptureHidden = CaptureHidden.NULL
    logit_rows: torch.Tensor | None = None
    features: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    input_embeds: torch.Tensor | None = None
    version: int = 0
    decision: PathDecision | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_requests(self) -> int:
        return len(self.q_lens)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name not in ("version", "decision"):
            object.__setattr__(self, "version", getattr(self, "version", -1) + 1)
            object.__setattr__(self, "decision", None)


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """The result of a forward; it owns its tensors.

    `path`: the path that ran ("eager", "breakable", "graph"). `logits` `[R, V]` float32. `hidden` the aux features
    `[T, K*H]` of a target, or the fed-back hidden `[R, H]` or `[T, H]` of a draft; None when not captured.
    """

    path: str
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


@dataclass(kw_only=True)
class StepCounters:
    """How often each path ran; monotonic."""

    forwards: dict[str, int] = field(default_factory=dict)

    def count(self, path: str) -> None:
        self.forwards[path] = self.forwards.get(path, 0) + 1
