"""A projection whose weight is stored in 4-bit integers with scales and zero points by group.

The two packings of checkpoints, both in int32 words of eight values, N outputs, H inputs, groups of G inputs:

    AWQ   qweight [H, N/8]: word c of a row holds output 8*c + AWQ_ORDER[i] in bits 4*i to 4*i + 3
    GPTQ  qweight [H/8, N]: word r of a column holds input 8*r + i in these bits
    both  scales [H/G, N] float16, qzeros [H/G, N/8] packed along N, in AWQ's order or in sequence

Sources: AutoAWQ (WQLinear_GEMM.from_linear), AutoGPTQ (QuantLinear.pack), GPTQModel (gptq_v2).
"""

import torch

from ....kernels.int4_values import pack_int4, unit_of
from ....kernels.ops import recorded_int4_linear
from ....kernels.silu_mul import silu_mul
from ...errors import CheckpointError
from .config import Int4Form
from .projection import NamedTensors

VALUES_A_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_words(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The values of int32 `words` `[R, C]`, uint8 `[R, 8*C]`: bits 4*i to 4*i + 3 are value `order[i]`."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    values = torch.empty((*words.shape, VALUES_A_WORD), dtype=torch.uint8, device=words.device)
    values[..., list(order)] = (words[..., None] >> shifts & 15).to(torch.uint8)
    return values.flatten(1)


class _StoredPart:
    """The tensors of one matrix `[N, H]` as its checkpoint has them."""

    def __init__(self, form: Int4Form, in_size: int, out_size: int, device: torch.device | str) -> None:
        groups, self.form = in_size // form.group_size, form
        is_awq = form.packing == "awq"
        shape = (in_size, out_size // VALUES_A_WORD) if is_awq else (in_size // VALUES_A_WORD, out_size)
        self.qweight = torch.empty(shape, dtype=torch.int32, device=device)
        self.qzeros = torch.empty(groups, out_size // VALUES_A_WORD, dtype=torch.int32, device=device)
        self.scales = torch.empty(groups, out_size, dtype=torch.float16, device=device)
        self.g_idx = None if is_awq else torch.empty(in_size, dtype=torch.int32, device=device)

    def values(self) -> torch.Tensor:
        """uint8 `[N, H]`."""
        if self.form.packing == "awq":
            return unpack_words(self.qweight, AWQ_ORDER).t()
        return unpack_words(self.qweight.t(), tuple(range(VALUES_A_WORD)))

    def zeros(self) -> torch.Tensor:
        """uint8 `[H/G, N]`."""
        order = AWQ_ORDER if self.form.packing == "awq" else tuple(range(VALUES_A_WORD))
        return unpack_words(self.qzeros, order) + self.form.zero_offset

    def has_groups_in_order(self) -> bool:
        """Whether input h belongs to group h // G, as it does without act-order. Groups of a rank's inputs
        begin with any.
        """
        if self.g_idx is None:
            return True
        inputs = torch.arange(self.g_idx.shape[0], device=self.g_idx.device)
        own = self.g_idx - self.g_idx[:1]
        return torch.equal(own, (inputs // self.form.group_size).to(torch.int32))


class Int4Projection:
    """y = x W^T + b with a weight in the packed form of `kernels.int4_values` once it is finished.

    The outputs are split into named `parts` of the checkpoint, which lie under `prefix`.

    Raises CheckpointError for sizes that groups or words do not divide.
    """

    def __init__(
        self,
        form: Int4Form,
        prefix: str,
        in_size: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.form, self.parts, self.prefix = form, parts, prefix
        odd = [name for name, size in parts.items() if size % VALUES_A_WORD]
        if odd:
            raise CheckpointError(
                f"{prefix}{odd[0]}: {parts[odd[0]]} outputs are no multiple of {VALUES_A_WORD}, the "
                "values of a word; use the original checkpoint"
            )
        try:
            self.unit = unit_of(in_size, form.group_size)
        except ValueError as error:
            raise CheckpointError(f"{prefix}{next(iter(parts))}: {error}; use another quantisation") from None
        out_size = sum(parts.values())
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        self._stored = {name: _StoredPart(form, in_size, size, device) for name, size in parts.items()}
        self.weight = self.scales = self.zeros = torch.empty(0, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return recorded_int4_linear(x, self.weight, self.scales, self.zeros, self.bias)

    def gated(self, x: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
        """As `Projection.gated`."""
        if is_gelu:
            return silu_mul(self(x), is_gelu=True)
        return recorded_int4_linear(x, self.weight, self.scales, self.zeros, self.bias, is_gated=True)

    def tensors(self, prefix: str) -> NamedTensors:
        """As `Projection.tensors`; once finished, the packed form under the names of the stored one."""
        start = 0
        for name, size in self.parts.items():
            end = start + size
            if self._stored:
                part = self._stored[name]
                yield f"{prefix}{name}.qweight", part.qweight
                yield f"{prefix}{name}.qzeros", part.qzeros
                yield f"{prefix}{name}.scales", part.scales
                if part.g_idx is not None:
                    yield f"{prefix}{name}.g_idx", part.g_idx
            else:
                yield f"{prefix}{name}.qweight", self.weight[start:end]
                yield f"{prefix}{name}.qzeros", self.zeros[:, start:end]
                yield f"{prefix}{name}.scales", self.scales[:, start:end]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start:end]
            start = end

    def finish(self) -> None:
        """As `Projection.finish`: packs all parts into one weight, and frees the stored ones."""
        stored = self._stored
        for name, part in stored.items():
            if not part.has_groups_in_order():
                raise CheckpointError(
                    f"{self.prefix}{name}.g_idx: inputs in the order of activations are not supported; use a "
                    "checkpoint made with desc_act false"
                )
        self.weight = torch.cat([pack_int4(part.values(), self.unit) for part in stored.values()])
        self.zeros = torch.cat([part.zeros() for part in stored.values()], dim=1)
        self.scales = torch.cat([part.scales for part in stored.values()], dim=1)
        self._stored = {}
