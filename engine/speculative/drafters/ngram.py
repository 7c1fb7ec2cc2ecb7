"""The drafter without weights: drafts are the tokens that followed an earlier occurrence of the last ones.

Its only state is the last tokens of each request, on the device. It reads no features and keeps no KV, so it
serves any target, and prefill needs to know nothing about it. Drafts are a function of the tokens alone: the
draft distribution is a point mass. Shape legend: B requests, N nodes each, S drafts, W tokens of the history.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ....kernels.match_ngrams import NgramDrafts, NgramSizes, match_ngrams
from ...batch.forward_batch import ForwardBatch
from ...errors import CheckpointError, LifecycleError
from ...graphs.bucketed_graphs import GraphFamily
from ...graphs.graph_pool import GraphPool
from ...graphs.token_graphs import AttendContext
from ...host_copy import to_device
from ...models.layers import NamedTensors
from ..drafting.shape import DraftShape
from ..drafting.verify import AcceptResult
from .paged import StatefulDrafter
from .protocol import DraftPrefill, DraftView, Proposal
from .spec_config import AuxSpec, DraftDims
from .states import TokenRings

ANY_CONTEXT = 1 << 30  # tokens: matches are as good in a long context as in a short one


@dataclass(frozen=True, kw_only=True)
class NgramConfig:
    """The settings of lookup: agreements of `shortest` to `longest` tokens, within the last `window` tokens.

    `dtype` is the target's. Raises CheckpointError for sizes that contradict each other.
    """

    shortest: int
    longest: int
    window: int
    dtype: str

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise CheckpointError(
                f"ngram_min {self.shortest} and ngram_max {self.longest}: use 1 <= ngram_min <= ngram_max"
            )
        if self.window < 2 * self.longest:
            raise CheckpointError(
                f"ngram_window {self.window}: an agreement of up to {self.longest} tokens needs at least "
                f"{2 * self.longest}; raise it or lower ngram_max"
            )

    @property
    def path(self) -> Path:
        """Stands where other drafters have their checkpoint; there are no files."""
        return Path("ngram")

    @property
    def aux(self) -> AuxSpec:
        """No layer outputs of the target are read."""
        return AuxSpec(ids=(), convention="default", dtype=self.dtype)

    @property
    def dims(self) -> DraftDims:
        return DraftDims(
            target_feature_width=0,
            target_feature_dtype=self.dtype,
            self_width=0,
            self_dtype=self.dtype,
            num_features=0,
        )


class NgramDrafter(StatefulDrafter):
    """Drafts by lookup in the last `config.window` tokens of each request. It drafts chains only."""

    states: TokenRings
    pool = None
    feature_width = 0
    page_rows = 1
    lookahead = 0
    max_context = ANY_CONTEXT
    prefill_family: GraphFamily[AttendContext, torch.Tensor] | None = None

    def __init__(self, config: NgramConfig, *, capacity: int, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.device = torch.device(device)
        self.states = TokenRings(capacity, config.window, device)

    @property
    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.states.tokens,)

    def capture(self, graphs: GraphPool, max_tokens: int) -> None:
        """There is no forward over prompts, hence no graph of one."""

    def parameters(self) -> NamedTensors:
        return iter(())

    def begin(self, requests: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Implements `HistoryDrafter.begin`: writes the last tokens of each request in one copy."""
        window = self.states.window
        rings = torch.zeros((len(requests), window), dtype=torch.int32)
        for ring, (_, ids) in zip(rings.numpy(), requests, strict=True):
            first = max(0, len(ids) - window)
            kept, split = ids[first:], window - first % window
            ring[first % window : first % window + len(kept)] = kept[:split]
            ring[: len(kept[split:])] = kept[split:]
        rows = to_device(torch.tensor([row for row, _ in requests], dtype=torch.int64), self.device)
        self.states.tokens.index_copy_(0, rows, to_device(rings, self.device))

    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        """Raises LifecycleError for any item: no features are read."""
        if items:
            raise LifecycleError("drafting by lookup reads no features; see `begin`")

    def prefill_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """Raises LifecycleError."""
        raise LifecycleError("drafting by lookup has no forward")

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        drafts = self._match(view, shape.steps)
        return Proposal(drafts.tokens, None, drafts.found)

    def first_proposals(self, view: DraftView, topk: int) -> torch.Tensor:
        """Implements `Drafter.first_proposals`; -1, which equals no token, where nothing was found."""
        drafts = self._match(view, 1)
        return torch.where(drafts.found[:, None] > 0, drafts.tokens, -1)

    def observe(
        self,
        view: DraftView,
        features: torch.Tensor,
        accepted: AcceptResult,
        emitted: torch.Tensor,
        shape: DraftShape,
    ) -> None:
        """Implements `Drafter.observe`: appends the emitted tokens behind the newest one."""
        self.states.append(view.states, accepted.tokens, view.lens + 1, emitted)

    def _match(self, view: DraftView, num_drafts: int) -> NgramDrafts:
        sizes = NgramSizes(self.config.shortest, self.config.longest, num_drafts)
        return match_ngrams(self.states.tokens, view.states, view.lens, sizes)

    def __repr__(self) -> str:
        return f"<NgramDrafter {self.states.num_open} requests, {self.config!r}>"


@dataclass(frozen=True)
class NgramModel:
    """What an engine knows of drafting by lookup before its states exist; there are no weights."""

    config: NgramConfig
    max_context: int
    device: torch.device
    num_weights: int = 0
    late_rows: int = NgramDrafter.late_rows

    def kv_layout(self, page_size: int) -> None:
        """None: no KV is kept."""

    def check(self, shape: DraftShape) -> None:
        if shape.is_tree:
            raise CheckpointError(
                f"spec_topk {shape.topk}: drafting by lookup (--draft ngram) makes chains; set it to 1"
            )

    def drafter(self, *, num_pages: int, page_size: int, capacity: int) -> NgramDrafter:
        window = max(min(self.config.window, self.max_context), 2 * self.config.longest)
        return NgramDrafter(replace(self.config, window=window), capacity=capacity, device=self.device)
