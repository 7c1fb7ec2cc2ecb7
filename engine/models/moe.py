"""The mixture-of-experts MLP of a decoder layer, with the names of its tensors in a Hugging Face checkpoint.

A layer may have a shared expert beside those that its router chooses: an MLP for every token, whose output is
added, in some families times a gate of its own.

Ranks of a worker share the experts. Each routes all rows itself and computes its part of the experts for all
of them; the partial results are summed. Rows are not sent to the ranks that have their experts (all-to-all):
a row with 8 experts meets two thirds of 8 ranks or more, so that saves a third of the bytes at best, within
one host, and its shapes would depend on the choices, which no graph can hold.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size of an expert.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch

from ...kernels.expert_mlp import ExpertForm
from ...kernels.few_experts import (
    FewExperts,
    Matrices,
    can_join_experts,
    few_experts,
    should_join_experts,
)
from ...kernels.normed_linear import UnscaledRows
from ...kernels.ops import recorded_route_experts
from ...kernels.rms_norm import NextNorm
from ...kernels.route_experts import Routing
from ...kernels.row_ops import FASTEST, ROWS_OF_ONE_RANK, Joins, RowOps, of_one_rank
from .layers import GatedMLP, Linear, NamedTensors
from .quant.experts import ExpertSizes, Fp8Experts, Int4Experts
from .quant.projection import StoredExperts
from .quant.projections import Projections


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the parts of this MLP: `block`, the three matrices of an expert, and the shared
    expert.
    """

    block: str
    gate: str
    up: str
    down: str
    shared: str = "shared_experts"


QWEN_NAMES = ExpertNames(
    block="mlp", gate="gate_proj", up="up_proj", down="down_proj", shared="shared_expert"
)
DEEPSEEK_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
GPT_OSS_NAMES = ExpertNames(block="mlp", gate="", up="", down="")  # all experts are one tensor
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The experts of a model. `dense_layers`: the layers that have an ordinary MLP instead.

    `is_normalised`, `is_sigmoid`, `num_groups`, `kept_groups`, `best_of_group` and `scale` are those of
    `Routing`. `has_choice_bias`: the router has a bias for the choice alone. `is_float32_router`: its logits
    are float32 in every dtype, otherwise rounded to the model's. `shared_size`: the intermediate size of the
    shared expert, 0 without one. `has_shared_gate`: its output is multiplied by the sigmoid of a projection.
    `limit` and `alpha`: of the gate of gpt-oss, see `kernels.expert_mlp`. `is_packed`: its experts are stored
    in 4 bits. `held`: the experts whose matrices this rank has; None: all. `gathered`: the ranks whose rows
    meet in a layer.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalised: bool
    names: ExpertNames
    dense_layers: frozenset[int] = frozenset()
    is_sigmoid: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 1
    scale: float = 1.0
    has_choice_bias: bool = False
    is_float32_router: bool = False
    shared_size: int = 0
    has_shared_gate: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    is_packed: bool = False
    held: range | None = None
    gathered: int = 1

    @property
    def experts_here(self) -> range:
        """The experts whose matrices this rank has."""
        return range(self.num_experts) if self.held is None else self.held

    @property
    def form(self) -> ExpertForm:
        """The gate, and where the experts are, without biases."""
        here = self.experts_here
        total = 0 if self.held is None else self.num_experts
        return ExpertForm(limit=self.limit, alpha=self.alpha, first=here.start, total=total)

    @cached_property
    def routing(self) -> Routing:
        """How a layer chooses."""
        return Routing(
            top_k=self.top_k,
            is_normalised=self.is_normalised,
            is_sigmoid=self.is_sigmoid,
            num_groups=self.num_groups,
            kept_groups=self.kept_groups,
            best_of_group=self.best_of_group,
            scale=self.scale,
        )

    def row_width(self, hidden_size: int) -> int:
        """The intermediate size of an ordinary MLP whose activations take as much memory for a row."""
        routed = self.gathered * self.top_k * (self.intermediate_size + hidden_size)
        return -(-routed // 3) + self.shared_size

    @property
    def used_share(self) -> float:
        """The share of the experts' weights that a row is multiplied with."""
        return self.top_k / self.num_experts


class CountRows(Protocol):
    """What is told of the experts of every row, see `expert_counts`."""

    def add(self, ids: torch.Tensor) -> None:
        """`ids` int32 `[T, K]` of a layer."""


class MixtureOfExperts:
    """A router and E SwiGLU MLPs, of which each token uses K, and the shared one: `[T, H]` -> `[T, H]`.

    `projections` knows the form of their weights, by names that begin with `prefix` ("model.layers.0.mlp.");
    None: the model's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps = FASTEST,
        projections: Projections | None = None,
        prefix: str = "",
    ) -> None:
        self.config = config
        self.ops = ops
        made = Projections(None) if projections is None else projections
        self.stored = self._make_stored(made, prefix, hidden_size, device)
        self.form = config.form
        self.router = self._make_router(hidden_size, dtype, device)
        self.counts: CountRows | None = None
        self.choice_bias: torch.Tensor | None = None
        if config.has_choice_bias:
            self.choice_bias = torch.empty(config.num_experts, dtype=torch.float32, device=device)
        self.gate_up, self.down = self._make_matrices(hidden_size, dtype, device)
        self.shared: GatedMLP | None = None
        self.shared_gate: Linear | None = None
        if config.shared_size:
            plain = partial(Linear, ops=ops)
            self.shared = GatedMLP(
                hidden_size,
                config.shared_size,
                bias=False,
                dtype=dtype,
                device=device,
                ops=ops,
                linear=made.under(f"{prefix}{config.names.shared}.", plain),
            )
        if config.shared_size and config.has_shared_gate:
            gate = {f"{config.names.shared}_gate": 1}
            self.shared_gate = Linear(hidden_size, gate, bias=False, dtype=dtype, device=device, ops=ops)

    def _make_router(self, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> Linear:
        parts = {"gate": self.config.num_experts}
        return Linear(hidden_size, parts, bias=False, dtype=dtype, device=device, ops=self.ops)

    def _make_stored(
        self,
        projections: Projections,
        prefix: str,
        hidden_size: int,
        device: torch.device | str,
    ) -> StoredExperts | None:
        """The experts in the form of a quantised checkpoint, if it is one."""
        names = self.config.names
        sizes = ExpertSizes(
            numbers=self.config.experts_here,
            hidden_size=hidden_size,
            intermediate_size=self.config.intermediate_size,
            names=(names.gate, names.up, names.down),
            form=self.config.form,
        )
        return projections.experts(f"{prefix}experts.", sizes, device)

    def _make_matrices(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The uninitialised matrices of the experts here: `[E, 2*I, H]`, gate first, and `[E, H, I]`. None
        are made beside stored ones.
        """
        if self.stored is not None:
            return torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=dtype, device=device)
        experts, inner = len(self.config.experts_here), self.config.intermediate_size
        gate_up = torch.empty(experts, 2 * inner, hidden_size, dtype=dtype, device=device)
        return gate_up, torch.empty(experts, hidden_size, inner, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.ops.expert_rows.gather(x)
        ids, weights = self.route(rows)
        routed = self.ops.expert_rows.collect(self._computed(rows, ids, weights))
        if self.shared is None:
            return routed
        shared = self.shared(x)
        return routed + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)

    def _computed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sums of the chosen experts of rows `x` `[T, H]`."""
        if self.stored is not None:
            return self.stored(x, ids, weights)
        return self.ops.expert_mlp(x, ids, weights, self.gate_up, self.down, form=self.form)

    def joins(self, joins: Joins, num_rows: int) -> bool:
        """As `JoinedMLP.joins`."""
        is_whole = self.ops.sum_ranks is of_one_rank and self.ops.expert_rows is ROWS_OF_ONE_RANK
        if not (is_whole and 0 < num_rows <= joins.experts):
            return False
        experts = self._few_experts()
        return experts is not None and can_join_experts(experts) and should_join_experts(experts, num_rows)

    def add(
        self, rows: UnscaledRows, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `JoinedMLP.add`."""
        experts = self._few_experts()
        assert experts is not None, "joins was not asked"
        total, left, ids = few_experts(rows, experts, residual, norm)
        if self.counts is not None:
            self.counts.add(ids)
        return total, left

    def _few_experts(self) -> FewExperts | None:
        """The weights of all of this MLP, None where they have a form that is not joined."""
        matrices, shared = self._matrices(), self.shared
        is_plain = shared is None or type(shared.gate_up) is type(shared.down) is Linear
        if matrices is None or self.shared_gate is not None or not is_plain:
            return None
        return FewExperts(
            self.config.routing,
            self.router.weight,
            *matrices,
            self.choice_bias,
            self.config.is_float32_router,
            None if shared is None else shared.gate_up.weight,
            None if shared is None else shared.down.weight,
            None if self.config.is_float32_router else self.router.bias,
            self.form,
        )

    def _matrices(self) -> tuple[Matrices, Matrices] | None:
        """Those of gate and up, and of the outputs, in the model's dtype, or in 8 or 4 bits; None in other
        forms, and before they are finished.
        """
        if self.stored is None:
            return (self.gate_up, self.down) if self.gate_up.dim() == 3 else None
        if isinstance(self.stored, Fp8Experts):
            return self.stored.gate_up, self.stored.down
        if isinstance(self.stored, Int4Experts) and self.stored.gate_up.words.dim() == 3:
            return self.stored.gate_up, self.stored.down
        return None

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of rows `x` `[T, H]`: ids int32 and weights float32, both `[T, K]`."""
        is_wide = self.config.is_float32_router
        logits = self.ops.logits(x, self.router.weight) if is_wide else self.router(x)
        ids, weights = recorded_route_experts(logits, self.config.routing, self.choice_bias)
        if self.counts is not None:
            self.counts.add(self.ops.expert_rows.own(ids))
        return ids, weights

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        own = f"{prefix}experts."
        return self._named(prefix, self._by_expert(own) if self.stored is None else self.stored.tensors(own))

    def parameters(self, prefix: str) -> NamedTensors:
        """As `MLP.parameters`."""
        own = f"{prefix}experts."
        whole = ((f"{own}gate_up", self.gate_up), (f"{own}down", self.down))
        return self._named(prefix, iter(whole) if self.stored is None else self.stored.parameters(own))

    def _by_expert(self, prefix: str) -> NamedTensors:
        """Views of each expert of a model whose experts have its dtype."""
        names, inner = self.config.names, self.config.intermediate_size
        for at, expert in enumerate(self.config.experts_here):
            own = f"{prefix}{expert}."
            yield f"{own}{names.gate}.weight", self.gate_up[at, :inner]
            yield f"{own}{names.up}.weight", self.gate_up[at, inner:]
            yield f"{own}{names.down}.weight", self.down[at]

    def _named(self, prefix: str, experts: NamedTensors) -> NamedTensors:
        """All tensors under `prefix`, with those of `experts`."""
        yield from self.router.tensors(prefix)
        if self.choice_bias is not None:
            yield f"{prefix}gate.e_score_correction_bias", self.choice_bias
        yield from experts
        if self.shared is not None:
            yield from self.shared.tensors(f"{prefix}{self.config.names.shared}.")
        if self.shared_gate is not None:
            yield from self.shared_gate.tensors(prefix)
