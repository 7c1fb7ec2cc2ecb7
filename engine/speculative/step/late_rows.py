"""Rows of steps without drafts that wait for the drafter, so that such steps do not pay for its forward.

A drafter observes every accepted row of the target. In a step without drafts this costs a read of the draft's
weights for one row per request. Here such a step only keeps the features and the token of its row. One
forward of the drafter observes up to `num_rows` rows of each request later: before the next step with drafts,
and at the latest when `num_rows` steps have passed. The drafter's first proposal is for the first of these
rows. They are compared then, once for all these steps, and the next step without drafts reports the result.

Shape legend: S slots, B requests, C late rows of each at most, K captured features, Ht target hidden.
"""

from dataclasses import dataclass

import torch

from ....kernels.step_glue import LATE, LENGTH, MATCH, MATCHED, MISS, UNASKED
from ..drafting.shape import DraftShape
from ..drafting.verify import AcceptResult
from .device_state import PAD_SLOT, DeviceState, StepRows


@dataclass(frozen=True, kw_only=True)
class LateBatch:
    """The late rows of B requests as one observation.

    `rows` is the state before the first late row. `features` `[B*C, K*Ht]` and the tokens of `accepted` are
    those of the late rows. `counts` int64 `[B]` says how many of the C rows there are.
    """

    rows: StepRows
    features: torch.Tensor
    accepted: AcceptResult
    counts: torch.Tensor


def matches(proposals: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """MATCH where one of `proposals` `[B, K]` is the token of `tokens` `[B, 1]`, else MISS; int64 `[B]`."""
    return MISS + (proposals == tokens).any(dim=1) * (MATCH - MISS)


class LateRows:
    """The features and tokens of up to `num_rows` rows per slot of `state`.

    `width` is K*Ht. `watched`: the shape whose first proposals are compared with first late rows.
    """

    def __init__(
        self, state: DeviceState, num_rows: int, watched: DraftShape, width: int, dtype: torch.dtype
    ) -> None:
        self.state = state
        self.watched = watched
        self.num_rows = num_rows
        self.shape = DraftShape.of(num_rows - 1)
        places = state.num_slots * num_rows
        self._features = torch.zeros((places, width), dtype=dtype, device=state.device)
        self._tokens = torch.zeros(places, dtype=torch.int64, device=state.device)

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that graphs read and write. They move when the state grows."""
        return self._features, self._tokens

    def keep(
        self,
        slots: torch.Tensor,
        rows: StepRows,
        features: torch.Tensor,
        tokens: torch.Tensor,
        emitted: torch.Tensor,
    ) -> None:
        """Keeps the row of each request in `slots` `[B]` that got a token in this step.

        `rows` is the state before the step, `features` `[B, K*Ht]`, `tokens` and `emitted` (0 or 1) int64
        `[B]`. A request whose rows are all taken loses the row; the host observes the rows before that.
        """
        self._reserve()
        late = rows.integers[:, LATE]
        is_kept = (emitted > 0) & (late < self.num_rows)
        places = torch.where(is_kept, slots * self.num_rows + late, PAD_SLOT)
        self._features.index_copy_(0, places, features)
        self._tokens.index_copy_(0, places, tokens)
        self.state.integers[:, LATE].index_add_(0, slots, is_kept.long())

    def take(self, slots: torch.Tensor) -> LateBatch:
        """The late rows of the requests in `slots` `[B]`, which then have none."""
        self._reserve()
        rows = self.state.read(slots)
        counts = rows.integers[:, LATE].clone()
        rows.integers[:, LENGTH] -= counts
        offsets = torch.arange(self.num_rows, device=slots.device)
        # rows behind the last one repeat it: what they write is provisional, but it must be finite
        kept = offsets.minimum((counts - 1).clamp(min=0)[:, None])
        places = slots[:, None] * self.num_rows + kept
        tokens = self._tokens.take(places)
        accepted = AcceptResult(counts, tokens, offsets.expand(tokens.shape))
        self.state.integers[:, LATE].index_fill_(0, slots, 0)
        return LateBatch(
            rows=rows,
            features=self._features.index_select(0, places.flatten()),
            accepted=accepted,
            counts=counts,
        )

    def note_matches(self, slots: torch.Tensor, batch: LateBatch, proposals: torch.Tensor) -> torch.Tensor:
        """Notes for the requests in `slots` `[B]` whether one of `proposals` `[B, K]` was the token of the
        first late row of `batch`; returns column MATCHED, int64 `[B]`.
        """
        found = matches(proposals, batch.accepted.tokens[:, :1]).where(batch.counts > 0, UNASKED)
        self.state.integers[:, MATCHED].index_copy_(0, slots, found)
        return found

    def _reserve(self) -> None:
        """Grows with the state, whose new slots have no late rows."""
        missing = self.state.num_slots * self.num_rows - self._tokens.shape[0]
        if missing:
            self._features = torch.nn.functional.pad(self._features, (0, 0, 0, missing))
            self._tokens = torch.nn.functional.pad(self._tokens, (0, missing))

    def __repr__(self) -> str:
        return f"<LateRows up to {self.num_rows} of {self.state.num_slots - 1} requests>"
