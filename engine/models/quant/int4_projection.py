"""A projection whose weight is stored in 4-bit integers with scales and zero points by group.

The two packings of checkpoints, both in int32 words of eight values, N outputs, H inputs, groups of G inputs:

    AWQ   qweight [H, N/8]: word c of a row holds output 8*c + AWQ_ORDER[i] in bits 4*i to 4*i + 3
    GPTQ  qweight [H/8, N]: word r of a column holds input 8*r + i in these bits
    both  scales [H/G, N] float16, qzeros [H/G, N/8] packed along N, in AWQ's order or in sequence

With act-order (`desc_act`) GPTQ groups the inputs by their activations, and g_idx [H] tells the group of
each. The weight is then packed with its inputs sorted by group, and rows are gathered in this order first.

Sources: AutoAWQ (WQLinear_GEMM.from_linear), AutoGPTQ (QuantLinear.pack), GPTQModel (gptq_v2).
"""

import torch

from ....kernels import int4_cpu
from ....kernels.int4_rows import most_rows, scaled_int4, sum_int4
from ....kernels.int4_values import Int4Weight, dequantise_int4, pack_groups, pack_int4, unit_of
from ....kernels.normed_linear import UnscaledRows
from ....kernels.ops import recorded_int4_linear
from ....kernels.rms_norm import NextNorm
from ....kernels.row_ops import gate_of
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


class StoredPart:
    """The tensors of one matrix `[N, H]` as its checkpoint has them."""

    def __init__(self, form: Int4Form, in_size: int, out_size: int, device: torch.device | str) -> None:
        groups, self.form = in_size // form.group_size, form
        is_awq = form.packing == "awq"
        shape = (in_size, out_size // VALUES_A_WORD) if is_awq else (in_size // VALUES_A_WORD, out_size)
        self.qweight = torch.empty(shape, dtype=torch.int32, device=device)
        self.qzeros = torch.empty(groups, out_size // VALUES_A_WORD, dtype=torch.int32, device=device)
        self.scales = torch.empty(groups, out_size, dtype=torch.float16, device=device)
        self.g_idx = None if is_awq else torch.empty(in_size, dtype=torch.int32, device=device)

    def tensors(self, prefix: str) -> NamedTensors:
        """The checkpoint's tensor names under `prefix`."""
        yield f"{prefix}qweight", self.qweight
        yield f"{prefix}qzeros", self.qzeros
        yield f"{prefix}scales", self.scales
        if self.g_idx is not None:
            yield f"{prefix}g_idx", self.g_idx

    def values(self) -> torch.Tensor:
        """uint8 `[N, H]`."""
        if self.form.packing == "awq":
            return unpack_words(self.qweight, AWQ_ORDER).t()
        return unpack_words(self.qweight.t(), tuple(range(VALUES_A_WORD)))

    def zeros(self) -> torch.Tensor:
        """uint8 `[H/G, N]`."""
        order = AWQ_ORDER if self.form.packing == "awq" else tuple(range(VALUES_A_WORD))
        return unpack_words(self.qzeros, order) + self.form.zero_offset

    def order(self, name: str) -> torch.Tensor | None:
        """The inputs by group, int64 `[H]`; None if input h belongs to group h // G, as it does without
        act-order. Groups of a rank's inputs begin with any.

        Raises CheckpointError, naming the module `name`, for groups that are not of G inputs each.
        """
        if self.g_idx is None:
            return None
        inputs = torch.arange(self.g_idx.shape[0], device=self.g_idx.device)
        in_order = (inputs // self.form.group_size).to(torch.int32)
        if torch.equal(self.g_idx - self.g_idx[:1], in_order):
            return None
        if not self.form.has_order:
            raise CheckpointError(
                f"{name}.g_idx: its inputs are in the order of activations, which quantization_config denies "
                "(desc_act, static_groups); fetch the checkpoint again"
            )
        found = torch.argsort(self.g_idx, stable=True)
        if not torch.equal(self.g_idx[found], in_order):
            raise CheckpointError(
                f"{name}.g_idx: it does not name {self.form.group_size} inputs for each group; fetch the "
                "checkpoint again"
            )
        return found


class Int4Projection:
    """y = x W^T + b with a weight in the packed form of `kernels.int4_values` once it is finished.

    In bfloat16 on a CPU it has the form of `kernels.int4_cpu`.

    The outputs are split into named `parts` of the checkpoint, which lie under `prefix`. `is_invariant`:
    products are batch-invariant.

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
        is_invariant: bool = False,
    ) -> None:
        self.form, self.parts, self.prefix, self.is_invariant = form, parts, prefix, is_invariant
        self.in_size = in_size
        for name, size in parts.items():
            check_outputs(prefix + name, size)
        try:
            self.unit = unit_of(in_size, form.group_size)
        except ValueError as error:
            raise CheckpointError(f"{prefix}{next(iter(parts))}: {error}; use another quantisation") from None
        out_size = sum(parts.values())
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if bias else None
        self._stored = {name: StoredPart(form, in_size, size, device) for name, size in parts.items()}
        self.order: torch.Tensor | None = None  # the inputs by group, where that is not their own order
        self.weight = self.groups = torch.empty(0, device=device)
        self._is_for_cpu = not is_invariant and int4_cpu.can_pack(
            torch.device(device), dtype, out_size, form.group_size
        )
        self.joined_rows = 0 if self._is_for_cpu else most_rows(dtype, self.unit)

    def __call__(self, x: torch.Tensor | UnscaledRows) -> torch.Tensor:
        return self._product(x, is_gated=False)

    def gated(self, x: torch.Tensor | UnscaledRows, is_gelu: bool = False) -> torch.Tensor:
        """As `Projection.gated`."""
        if is_gelu:
            assert isinstance(x, torch.Tensor)
            return gate_of(self(x), is_gelu=True, is_invariant=self.is_invariant)
        return self._product(x, is_gated=True)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm: NextNorm | None
    ) -> tuple[torch.Tensor, UnscaledRows | None]:
        """As `JoinedProjection.add`."""
        return sum_int4(self._in_order(x), self._joined, residual, norm)

    @property
    def _joined(self) -> Int4Weight:
        return Int4Weight(self.weight, self.groups, self.bias)

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(1, self.order)

    def _product(self, x: torch.Tensor | UnscaledRows, *, is_gated: bool) -> torch.Tensor:
        if isinstance(x, UnscaledRows):
            return scaled_int4(x._replace(z=self._in_order(x.z)), self._joined, is_gated=is_gated)
        return recorded_int4_linear(
            self._in_order(x),
            self.weight,
            self.groups,
            self.bias,
            is_gated=is_gated,
            is_invariant=self.is_invariant,
        )

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """As `StoredProjection.values`."""
        unpack = int4_cpu.unpack_from_cpu if self._is_for_cpu else dequantise_int4
        found = unpack(self.weight, self.groups, dtype)
        return found if self.order is None else found[:, torch.argsort(self.order)]

    def tensors(self, prefix: str) -> NamedTensors:
        """As `Projection.tensors`; once finished, `qweight` is the packed weight, `scales` its groups."""
        start = 0
        for name, size in self.parts.items():
            end = start + size
            if self._stored:
                yield from self._stored[name].tensors(f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}.qweight", self.weight[start:end]
                yield f"{prefix}{name}.scales", self.groups[:, start:end]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start:end]
            start = end

    def finish(self) -> None:
        """As `Projection.finish`: packs all parts into one weight, and frees the stored ones.

        Raises CheckpointError for parts whose inputs have different orders.
        """
        stored, (first, *others) = self._stored, self._stored
        self.order = stored[first].order(self.prefix + first)
        for name in others:
            if not _are_equal(self.order, stored[name].order(self.prefix + name)):
                raise CheckpointError(
                    f"{self.prefix}{name}.g_idx: its inputs have another order than those of {first}, which "
                    "is one product here; use a checkpoint made with desc_act false"
                )
        values = (part.values() for part in stored.values())
        if self.order is not None:
            values = (each[:, self.order] for each in values)
        scales = torch.cat([part.scales for part in stored.values()], dim=1)
        zeros = torch.cat([part.zeros() for part in stored.values()], dim=1)
        if self._is_for_cpu:
            self.weight, self.groups = int4_cpu.pack_for_cpu(torch.cat(list(values)), scales, zeros)
        else:
            self.weight = torch.cat([pack_int4(each, self.unit) for each in values])
            self.groups = pack_groups(scales, zeros)
        self._stored = {}


def check_outputs(module: str, size: int) -> None:
    """Raises CheckpointError, naming `module`, for outputs that do not fill words."""
    if size % VALUES_A_WORD:
        raise CheckpointError(
            f"{module}: {size} outputs are no multiple of {VALUES_A_WORD}, the values of a word; use the "
            "original checkpoint"
        )


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
