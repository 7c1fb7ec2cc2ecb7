"""Code that drafters with KV of their own share: state rows, page sizes, graphs over prompt rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...errors import CheckpointError, LifecycleError
from ...graphs.bucketed_graphs import GraphFamily
from ...graphs.buckets import token_buckets
from ...graphs.graph_pool import GraphPool
from ...kv.pool import KVPool
from .spec_config import DraftDims
from .states import StateRows


class SizedConfig(Protocol):
    """The fields of a config that every draft model has."""

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""

    @property
    def dims(self) -> DraftDims:
        """Widths and dtypes of the features and of the draft's own hidden."""


class SharedHead(Protocol):
    """A draft model that runs with the target's embedding and lm_head."""

    @property
    def config(self) -> SizedConfig:
        """The config of its checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, KV and features."""

    @property
    def is_shared(self) -> bool:
        """Whether the target's weights are in place."""


class RowGraphs(Protocol):
    """The graphs of a draft model's forward over prompt rows."""

    @property
    def family(self) -> GraphFamily[Any, torch.Tensor]:
        """The graphs by token bucket."""

    def capture(self) -> None:
        """Captures a graph of each bucket."""


H = TypeVar("H", bound=SharedHead)
G = TypeVar("G", bound=RowGraphs)


def require_loaded(head: SharedHead, name: str) -> None:
    """Raises LifecycleError for a `head` without shared weights, and CheckpointError for a dtype other than
    that of its config; `name` stands for the head in the message.
    """
    if not head.is_shared:
        raise LifecycleError("a drafter needs the target's embedding and lm_head, which are shared before")
    if str(head.dtype) != f"torch.{head.config.dims.self_dtype}":
        raise CheckpointError(
            f"{name} in {head.dtype}, but {head.config.path} was resolved for {head.config.dims.self_dtype}"
        )


def joined_features(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The features `[T, K*Ht]` of all rows on `device`. Callers must not write to them: a single part that is
    there already is not copied.
    """
    there = [part.to(device) for part in parts]
    return there[0] if len(there) == 1 else torch.cat(there)


class StatefulDrafter:
    """A drafter with a row of `states` for each request, which observes every step."""

    states: StateRows
    late_rows = 0

    def reserve(self, count: int) -> None:
        """Allocates rows for `count` requests."""
        self.states.reserve(count)

    def open(self) -> int:
        """Returns the row of a new request."""
        return self.states.open()

    def close(self, row: int) -> None:
        """Releases `row`."""
        self.states.close(row)


class PagedDrafter(StatefulDrafter, ABC, Generic[H, G]):
    """A drafter with draft model `head` and KV in `pool`, under the target's page ids."""

    head: H
    pool: KVPool
    graphs: G | None = None

    @property
    def feature_width(self) -> int:
        """K*Ht, the width of every feature row."""
        return self.head.config.dims.target_feature_width

    @property
    def page_rows(self) -> int:
        """Rows of a page in `pool`."""
        return self.pool.num_layers * len(self.pool.layout.planes) * self.pool.page_size

    @property
    def prefill_family(self) -> GraphFamily[Any, torch.Tensor] | None:
        """The captured graphs over prompt rows; None before `capture`."""
        return None if self.graphs is None else self.graphs.family

    def capture(self, graphs: GraphPool, max_tokens: int) -> None:
        """Captures graphs for up to `max_tokens` rows, within the capacity of `pool`."""
        buckets = token_buckets(min(max_tokens, self.pool.num_slots - self.pool.page_size))
        self.graphs = self._row_graphs(graphs, buckets)
        self.graphs.capture()

    @abstractmethod
    def _row_graphs(self, graphs: GraphPool, buckets: Sequence[int]) -> G:
        """The graphs of these buckets, not captured yet."""

    def _check_features(self, features: torch.Tensor, rows: int) -> None:
        if tuple(features.shape) != (rows, self.feature_width) or features.dtype != self.head.dtype:
            raise ValueError(
                f"features of shape {list(features.shape)} {features.dtype} for {rows} rows: the draft model "
                f"at {self.head.config.path} takes [{rows}, {self.feature_width}] {self.head.dtype}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.states.num_open} requests, {self.pool!r}>"
