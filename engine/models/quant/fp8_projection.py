"""A projection whose weight is stored in 8-bit floating point.

Legend: T tokens, N outputs, H inputs.
"""

import torch

from ....kernels.fp8_few_rows import most_rows
from ....kernels.fp8_rows import scaled_fp8, sum_fp8
from ....kernels.fp8_scales import BLOCK, FP8, Fp8Weight, dequantise_fp8
from ....kernels.normed_linear import UnscaledRows
from ....kernels.ops import recorded_fp8_linear
from ....kernels.rms_norm import NextNorm
from ....kernels.row_ops import gate_of
from ...errors import CheckpointError
from .config import Fp8Form
from .projection import NamedTensors


class Fp8Projection:
    """y = x W^T + b with `weight` e4m3 `[N, H]` and float32 `scales`, in the forms of `kernels.fp8_scales`.

    The rows of the weight are split into named `parts` of the checkpoint, which lie under `prefix`.
    `is_invariant`: products are batch-invariant.

    Raises CheckpointError for parts whose blocks would share scales.
    """

    def __init__(
        self,
        form: Fp8Form,
        prefix: str,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        is_invariant: bool = False,
    ) -> None:
        self.form = form
        self.parts = parts
        self.is_invariant = is_invariant
        self.in_size = in_size
        self.joined_rows = most_rows(dtype)
        out_size = sum(parts.values())
        self.weight = torch.empty(out_size, in_size, dtype=FP8, device=device)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        shape: tuple[int, ...] = (out_size,)
        if form.has_blocks:
            odd = [name for name, size in list(parts.items())[:-1] if size % BLOCK]
            if odd:
                raise CheckpointError(
                    f"{prefix}{odd[0]}: {parts[odd[0]]} outputs are no multiple of {BLOCK}, so that "
                    "its blocks cannot lie beside those of another matrix; use a checkpoint with scales "
                    "per output"
                )
            shape = (-(-out_size // BLOCK), -(-in_size // BLOCK))
        self.scales = torch.empty(shape, dtype=torch.float32, device=device)
        self._unused = [torch.empty(1, dtype=torch.float32) for _ in parts if form.has_input_scale]

    def __call__(self, x: torch.Tensor | UnscaledRows) -> torch.Tensor:
        if isinstance(x, UnscaledRows):
            return scaled_fp8(x, self._joined)
        return recorded_fp8_linear(x, self.weight, self.scales, self.bias, is_invariant=self.is_invariant)

    def gated(self, x: torch.Tensor | UnscaledRows, is_gelu: bool = False) -> torch.Tensor:
        """As `Projection.gated`."""
        if isinstance(x, UnscaledRows):
            assert not is_gelu
            return scaled_fp8(x, self._joined, is_gated=True)
        if is_gelu:
            return gate_of(self(x), is_gelu=True, is_invariant=self.is_invariant)
        return recorded_fp8_linear(
            x, self.weight, self.scales, self.bias, is_gated=True, is_invariant=self.is_invariant
        )

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """As `StoredProjection.values`."""
        return dequantise_fp8(self.weight, self.scales, dtype)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `JoinedProjection.add`."""
        return sum_fp8(x, self._joined, residual, norm)

    @property
    def _joined(self) -> Fp8Weight:
        return Fp8Weight(self.weight, self.scales, self.bias)

    def tensors(self, prefix: str) -> NamedTensors:
        """As `Projection.tensors`."""
        start = 0
        for index, (name, size) in enumerate(self.parts.items()):
            end = start + size
            yield f"{prefix}{name}.weight", self.weight[start:end]
            if self.form.has_blocks:
                yield f"{prefix}{name}.{self.form.scale_name}", self.scales[start // BLOCK : -(-end // BLOCK)]
            else:
                yield f"{prefix}{name}.{self.form.scale_name}", self.scales[start:end]
            if self._unused:
                yield f"{prefix}{name}.input_scale", self._unused[index]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start:end]
            start = end

    def finish(self) -> None:
        """As `Projection.finish`: the weight is used as it is stored."""
