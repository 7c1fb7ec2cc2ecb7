"""The experts of gpt-oss: a router and clamped SwiGLU MLPs with biases, stored as one tensor of all experts.

A checkpoint holds them in 4 bits (MXFP4), with the rows of gate and up in turns, or in floats, also in turns
and transposed. `finish` decodes them, once, to the model's dtype, gate above up.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size of an expert.
"""

import torch

from ...kernels.expert_mlp import ExpertForm
from ...kernels.mxfp4 import BLOCK, decode_mxfp4
from ...kernels.row_ops import FASTEST, RowOps
from .layers import Linear, NamedTensors
from .moe import MixtureOfExperts, MoEConfig


class GptOssExperts(MixtureOfExperts):
    """As `MixtureOfExperts`; call `finish` once the tensors are loaded."""

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
        self.counts, self.choice_bias, self.shared, self.shared_gate = None, None, None, None
        experts, inner, hidden = config.num_experts, config.intermediate_size, hidden_size
        self.router = Linear(hidden, {"router": experts}, bias=True, dtype=dtype, device=device, ops=ops)
        self.gate_up = self.down = torch.empty(0, dtype=dtype, device=device)
        sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        self._stored: dict[str, torch.Tensor] = {}
        for name, (rows, width) in sizes.items():
            self._stored[f"{name}_bias"] = torch.empty(experts, rows, dtype=dtype, device=device)
            if config.is_packed:
                shape = (experts, rows, width // BLOCK)
                self._stored[f"{name}_scales"] = torch.empty(shape, dtype=torch.uint8, device=device)
                blocks = torch.empty((*shape, BLOCK // 2), dtype=torch.uint8, device=device)
                self._stored[f"{name}_blocks"] = blocks
            else:
                self._stored[name] = torch.empty(experts, width, rows, dtype=dtype, device=device)
        self.form = ExpertForm(limit=config.limit, alpha=config.alpha)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(x)
        return self.ops.expert_mlp(x, ids, weights, self.gate_up, self.down, form=self.form)

    def finish(self) -> None:
        """Decodes the loaded tensors."""
        gate_up, down = (self._decoded(name) for name in ("gate_up_proj", "down_proj"))
        self.gate_up, self.down = _unzipped(gate_up), down
        self.form = self.form._replace(
            gate_up_bias=_unzipped(self._stored["gate_up_proj_bias"]),
            down_bias=self._stored["down_proj_bias"],
        )
        self._stored = {}

    def _decoded(self, name: str) -> torch.Tensor:
        """The matrices `[E, N, H]` of all experts as the checkpoint orders their rows."""
        if self.config.is_packed:
            blocks, scales = self._stored.pop(f"{name}_blocks"), self._stored.pop(f"{name}_scales")
            dtype = self.router.weight.dtype
            return torch.stack([decode_mxfp4(*each, dtype) for each in zip(blocks, scales, strict=True)])
        return self._stored.pop(name).transpose(1, 2).contiguous()

    def tensors(self, prefix: str) -> NamedTensors:
        """As `MixtureOfExperts.tensors`; once finished, the decoded tensors under names of their own."""
        yield from self.router.tensors(prefix)
        held = self._stored or {"gate_up": self.gate_up, "down": self.down}
        for name, tensor in held.items():
            yield f"{prefix}experts.{name}", tensor


def _unzipped(rows: torch.Tensor) -> torch.Tensor:
    """`[E, 2*I, ...]` with gate and up in turns -> gate above up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)
