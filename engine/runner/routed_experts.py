"""Which experts each row takes, in every layer that has them: kept inside of forwards, eager or in graphs.

A forward overwrites what the forward before it left. Its rows are read behind it, for the requests that ask.
A graph holds the address of the ids, so they are made before any capture, and stay.

Shape legend: T rows of a forward, L layers with experts, K experts of a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import CheckpointError, LifecycleError
from ..models.interface import ShortEnd
from ..models.moe import CountRows, MixtureOfExperts
from .lifecycle import Phase


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of a model: the numbers of the `layers` that have them, of `num_layers`; `top_k` of
    `num_experts` for each row.
    """

    layers: tuple[int, ...]
    num_layers: int
    top_k: int
    num_experts: int

    @property
    def id_bytes(self) -> int:
        """Bytes of one id: little-endian, without a sign."""
        return 1 if self.num_experts <= 1 << 8 else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of all ids of one row, layer by layer."""
        return len(self.layers) * self.top_k * self.id_bytes


class RoutedExperts:
    """The experts of the newest forward's rows. Forwards of up to `max_rows` rows may be in graphs.

    `ids` `[L, max_rows, K]`, of `shape.id_bytes` bytes each. A larger forward has a tensor of its own.
    """

    def __init__(self, shape: ExpertShape, max_rows: int, device: torch.device) -> None:
        self.shape = shape
        self.ids = self._made(max_rows, device)
        self._wide: torch.Tensor | None = None

    def _made(self, rows: int, device: torch.device) -> torch.Tensor:
        dtype = torch.uint8 if self.shape.id_bytes == 1 else torch.int16
        return torch.zeros(len(self.shape.layers), rows, self.shape.top_k, dtype=dtype, device=device)

    def begin(self, num_rows: int) -> None:
        """The next forward has `num_rows` rows."""
        is_wide = num_rows > self.ids.shape[1]
        self._wide = self._made(num_rows, self.ids.device) if is_wide else None

    def put(self, place: int, ids: torch.Tensor) -> None:
        """Keeps the experts `ids` int32 `[T, K]` of layer `shape.layers[place]`. A graph may hold this.

        Raises LifecycleError for more rows than a graph may have, if they were not announced.
        """
        rows, kept = ids.shape[0], self.ids
        if rows > kept.shape[1]:
            if self._wide is None:
                raise LifecycleError(f"experts of {rows} rows are kept, {kept.shape[1]} at most")
            kept = self._wide
        kept[place, :rows].copy_(ids)

    def rows(self, count: int) -> torch.Tensor:
        """A copy of the ids of the first `count` rows, `[count, L*K]`. A graph may hold this."""
        kept = self.ids if self._wide is None else self._wide
        return kept[:, :count].transpose(0, 1).flatten(1)

    def __repr__(self) -> str:
        return f"<RoutedExperts {self.shape}, {self.ids.shape[1]} rows in graphs>"


class ExpertRows:
    """Expert ids of prompt rows on their way to the host."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._ids = ids
        if ids.is_cuda:
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self, start: int, end: int) -> bytes:
        """The ids of rows [start, end) of the forward, as `ExpertShape` says. Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._ids[start:end].numpy().tobytes()


class LayerExperts:
    """Keeps the experts of one layer, and tells `others` of them."""

    def __init__(self, routed: RoutedExperts, place: int, others: CountRows | None) -> None:
        self._routed = routed
        self._place = place
        self._others = others

    def add(self, ids: torch.Tensor) -> None:
        """As `CountRows.add`."""
        self._routed.put(self._place, ids)
        if self._others is not None:
            self._others.add(ids)


def keep_experts(model: object, max_rows: int, phase: Phase) -> RoutedExperts:
    """Lets the layers of `model` keep the experts of the rows that they compute, of all rows in all layers.

    Raises CheckpointError for a model without experts, LifecycleError unless the engine is in LOADED: a graph
    that was captured before would not keep them.
    """
    if phase != Phase.LOADED:
        raise LifecycleError(f"experts are kept from before the capture of graphs on, not from {phase.name}")
    layers: Iterable[object] = getattr(model, "layers", ())
    parts = [getattr(layer, "mlp", None) for layer in layers]
    found = {number: part for number, part in enumerate(parts) if isinstance(part, MixtureOfExperts)}
    if not found:
        raise CheckpointError(
            "return_routed_experts: this model has no experts; leave --return-routed-experts out"
        )
    first = next(iter(found.values()))
    shape = ExpertShape(
        layers=tuple(found),
        num_layers=len(parts),
        top_k=first.config.top_k,
        num_experts=first.config.num_experts,
    )
    routed = RoutedExperts(shape, max_rows, first.router.weight.device)
    for place, experts in enumerate(found.values()):
        experts.counts = LayerExperts(routed, place, experts.counts)
    if isinstance(model, ShortEnd):
        model.needs_all_rows = True
    return routed
