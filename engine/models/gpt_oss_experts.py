"""The experts of gpt-oss: a router and clamped SwiGLU MLPs with biases, stored as one tensor of all experts.

A checkpoint holds them in 4 bits (MXFP4), with the rows of gate and up in turns, or in floats, also in turns
and transposed. `finish` decodes them, once, to the model's dtype, gate above up.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size of an expert.
"""

import torch

from ...kernels.mxfp4 import BLOCK, decode_mxfp4
from .layers import Linear, NamedTensors
from .moe import MixtureOfExperts


class GptOssExperts(MixtureOfExperts):
    """As `MixtureOfExperts`; call `finish` once the tensors are loaded."""

    def _make_router(self, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> Linear:
        parts = {"router": self.config.num_experts}
        return Linear(hidden_size, parts, bias=True, dtype=dtype, device=device, ops=self.ops)

    def _make_matrices(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the tensors of the checkpoint; there are no matrices before `finish`."""
        config, experts = self.config, len(self.config.experts_here)
        sizes = {
            "gate_up_proj": (2 * config.intermediate_size, hidden_size),
            "down_proj": (hidden_size, config.intermediate_size),
        }
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
        none = torch.empty(0, dtype=dtype, device=device)
        return none, none

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
        decoded = {
            "gate_up": self.gate_up,
            "gate_up_bias": self.form.gate_up_bias,
            "down": self.down,
            "down_bias": self.form.down_bias,
        }
        for name, tensor in (self._stored or decoded).items():
            if tensor is not None:
                yield f"{prefix}experts.{name}", tensor


def _unzipped(rows: torch.Tensor) -> torch.Tensor:
    """`[E, 2*I, ...]` with gate and up in turns -> gate above up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)
