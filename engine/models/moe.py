"""The mixture-of-experts MLP of a decoder layer, with the names of its tensors in a Hugging Face checkpoint.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size of an expert.
"""

from dataclasses import dataclass

import torch

from ...kernels.ops import recorded_route_experts
from ...kernels.row_ops import FASTEST, RowOps
from .layers import Linear, NamedTensors


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the parts of this MLP: `block`, then the three matrices of an expert."""

    block: str
    gate: str
    up: str
    down: str


QWEN_NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")
MIXTRAL_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The experts of a model. `dense_layers`: the layers that have an ordinary MLP instead.

    `is_normalised`: the weights of a token's experts sum to 1.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    is_normalised: bool
    names: ExpertNames
    dense_layers: frozenset[int] = frozenset()

    def row_width(self, hidden_size: int) -> int:
        """The intermediate size of an ordinary MLP whose activations take as much memory for a row."""
        return -(-self.top_k * (self.intermediate_size + hidden_size) // 3)

    @property
    def used_share(self) -> float:
        """The share of the experts' weights that a row is multiplied with."""
        return self.top_k / self.num_experts


class MixtureOfExperts:
    """A router and E SwiGLU MLPs, of which each token uses K: `[T, H]` -> `[T, H]`."""

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps = FASTEST,
    ) -> None:
        self.config = config
        self.ops = ops
        experts, inner = config.num_experts, config.intermediate_size
        self.router = Linear(hidden_size, {"gate": experts}, bias=False, dtype=dtype, device=device, ops=ops)
        self.gate_up = torch.empty(experts, 2 * inner, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(experts, hidden_size, inner, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        ids, weights = recorded_route_experts(self.router(x), config.top_k, config.is_normalised)
        return self.ops.expert_mlp(x, ids, weights, self.gate_up, self.down)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`, with views of the parameters."""
        names, inner = self.config.names, self.config.intermediate_size
        yield from self.router.tensors(prefix)
        for expert in range(self.config.num_experts):
            own = f"{prefix}experts.{expert}."
            yield f"{own}{names.gate}.weight", self.gate_up[expert, :inner]
            yield f"{own}{names.up}.weight", self.gate_up[expert, inner:]
            yield f"{own}{names.down}.weight", self.down[expert]
