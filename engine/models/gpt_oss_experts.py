"""The experts of gpt-oss: a router and clamped SwiGLU MLPs with biases, stored as one tensor of all experts.

A checkpoint holds them in 4 bits (MXFP4), with the rows of gate and up in turns, or in floats, also in turns
and transposed. `finish` puts gate above up. Those in 4 bits stay packed, in the form of `kernels.mxfp4`.

Legend: T tokens, H hidden size, E experts, K experts of a token, I intermediate size of an expert.
"""

import torch

from ...kernels.expert_ops import recorded_packed_experts
from ...kernels.few_experts import Matrices
from ...kernels.mxfp4 import BLOCK, EXPONENT_BIAS, MAX_SCALE, pack_mxfp4
from ...kernels.packed_experts import PackedMatrices
from ..errors import CheckpointError
from .layers import Linear, NamedTensors
from .moe import MixtureOfExperts
from .quant.experts import packed_tensors
from .quant.projection import StoredExperts
from .quant.projections import Projections


class GptOssExperts(MixtureOfExperts):
    """As `MixtureOfExperts`; call `finish` once the tensors are loaded."""

    def _make_router(self, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> Linear:
        parts = {"router": self.config.num_experts}
        return Linear(hidden_size, parts, bias=True, dtype=dtype, device=device, ops=self.ops)

    def _make_stored(
        self,
        projections: Projections,
        prefix: str,
        hidden_size: int,
        device: torch.device | str,
    ) -> StoredExperts | None:
        """None: the tensors of this class have other names, and biases."""
        return None

    def _make_matrices(
        self, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the tensors of the checkpoint; there are no matrices before `finish`."""
        config, experts = self.config, len(self.config.experts_here)
        sizes = {
            "gate_up_proj": (2 * config.intermediate_size, hidden_size),
            "down_proj": (hidden_size, config.intermediate_size),
        }
        self._loaded: dict[str, torch.Tensor] = {}
        self._packed: tuple[PackedMatrices, PackedMatrices] | None = None
        for name, (rows, width) in sizes.items():
            self._loaded[f"{name}_bias"] = torch.empty(experts, rows, dtype=dtype, device=device)
            if config.is_packed:
                shape = (experts, rows, width // BLOCK)
                self._loaded[f"{name}_scales"] = torch.empty(shape, dtype=torch.uint8, device=device)
                blocks = torch.empty((*shape, BLOCK // 2), dtype=torch.uint8, device=device)
                self._loaded[f"{name}_blocks"] = blocks
            else:
                self._loaded[name] = torch.empty(experts, width, rows, dtype=dtype, device=device)
        none = torch.empty(0, dtype=dtype, device=device)
        return none, none

    def _computed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return super()._computed(x, ids, weights)
        is_invariant = self.ops.is_invariant
        return recorded_packed_experts(x, ids, weights, *self._packed, is_invariant, self.form)

    def _matrices(self) -> tuple[Matrices, Matrices] | None:
        return super()._matrices() if self._packed is None else self._packed

    def finish(self) -> None:
        """Orders the loaded tensors, and packs those in 4 bits.

        Raises CheckpointError for scales that no published checkpoint has, above 2^65.
        """
        if self.config.is_packed:
            self._packed = self._pack("gate_up_proj", is_zipped=True), self._pack("down_proj")
        else:
            loaded = self._loaded.pop("gate_up_proj").transpose(1, 2)
            self.gate_up = torch.stack([_unzipped(each) for each in loaded])
            self.down = self._loaded.pop("down_proj").transpose(1, 2).contiguous()
        self.form = self.form._replace(
            gate_up_bias=torch.stack([_unzipped(each) for each in self._loaded["gate_up_proj_bias"]]),
            down_bias=self._loaded["down_proj_bias"],
        )
        self._loaded = {}

    def _pack(self, name: str, *, is_zipped: bool = False) -> PackedMatrices:
        """The matrices of all experts, one after the other; `is_zipped`: with gate and up in turns."""
        blocks, scales = self._loaded.pop(f"{name}_blocks"), self._loaded.pop(f"{name}_scales")
        if int(scales.max()) > MAX_SCALE:
            raise CheckpointError(
                f"experts.{name}_scales: a scale of 2^{int(scales.max()) - EXPONENT_BIAS} is above "
                f"2^{MAX_SCALE - EXPONENT_BIAS}; fetch the checkpoint again"
            )
        packed = []
        for one, two in zip(blocks, scales, strict=True):
            parts = (_unzipped(one), _unzipped(two)) if is_zipped else (one, two)
            packed.append(pack_mxfp4(*parts))
        words, word_scales = zip(*packed, strict=True)
        return PackedMatrices(torch.stack(words), torch.stack(word_scales))

    def tensors(self, prefix: str) -> NamedTensors:
        """As `MixtureOfExperts.tensors`; once finished, the tensors in use under names of their own."""
        yield from self.router.tensors(prefix)
        if self._loaded:
            yield from ((f"{prefix}experts.{name}", tensor) for name, tensor in self._loaded.items())
            return
        if self._packed is None:
            yield f"{prefix}experts.gate_up", self.gate_up
            yield f"{prefix}experts.down", self.down
        else:
            yield from packed_tensors(f"{prefix}experts.", *self._packed)
        for name, bias in (("gate_up_bias", self.form.gate_up_bias), ("down_bias", self.form.down_bias)):
            assert bias is not None, "finish was not called"
            yield f"{prefix}experts.{name}", bias

    def parameters(self, prefix: str) -> NamedTensors:
        """As `MLP.parameters`."""
        return self.tensors(prefix)


def _unzipped(rows: torch.Tensor) -> torch.Tensor:
    """`[2*I, ...]` with gate and up in turns -> gate above up."""
    return torch.cat((rows[0::2], rows[1::2]))
