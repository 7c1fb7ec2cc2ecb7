"""The experts of a layer whose weights are stored in 8-bit floating point or in 4-bit integers.

Every expert has the three matrices of a gated MLP, with the names that its checkpoint gives them. Legend: T
rows, E experts, H hidden size, I intermediate size of an expert, N outputs of a matrix.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ....kernels.expert_mlp import PLAIN_EXPERTS, ExpertForm
from ....kernels.expert_ops import recorded_fp8_experts, recorded_packed_experts
from ....kernels.fp8_experts import Fp8Matrices
from ....kernels.fp8_linear import NATIVE
from ....kernels.fp8_scales import BLOCK, FP8
from ....kernels.packed_experts import PackedMatrices
from ....kernels.packed_words import pack_groups, pack_words
from ...errors import CheckpointError
from .config import Fp8Form, Int4Form
from .int4_projection import StoredPart, check_outputs
from .projection import NamedTensors


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The experts with the `numbers` of the checkpoint, each of `hidden_size` and `intermediate_size`.

    `names`: those of the gate, of the other half and of the output matrix. `form`: where these experts are
    among all.
    """

    numbers: range
    hidden_size: int
    intermediate_size: int
    names: tuple[str, str, str]
    form: ExpertForm = PLAIN_EXPERTS


class Fp8Experts:
    """Experts with e4m3 weights, gate above up, and float32 scales, in the forms of `kernels.fp8_experts`.

    Their names begin with `prefix`. `is_invariant`: products are batch-invariant.

    Raises CheckpointError for blocks that gate and up would share, and for a GPU without such values.
    """

    def __init__(
        self,
        form: Fp8Form,
        prefix: str,
        sizes: ExpertSizes,
        *,
        device: torch.device | str,
        is_invariant: bool = False,
    ) -> None:
        self.form, self.sizes, self.is_invariant = form, sizes, is_invariant
        _check_device(torch.device(device), prefix)
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        if form.has_blocks and inner % BLOCK:
            raise CheckpointError(
                f"{prefix}{sizes.numbers[0]}.{sizes.names[0]}: {inner} outputs are no multiple of {BLOCK}, "
                "so that its blocks cannot lie beside those of another matrix; use a checkpoint with scales "
                "per output"
            )
        self.gate_up = self._matrices(2 * inner, hidden, device)
        self.down = self._matrices(hidden, inner, device)
        self._unused = torch.empty(1, dtype=torch.float32)  # scales of activations

    def _matrices(self, out_size: int, in_size: int, device: torch.device | str) -> Fp8Matrices:
        count = len(self.sizes.numbers)
        shape = (-(-out_size // BLOCK), -(-in_size // BLOCK)) if self.form.has_blocks else (out_size,)
        return Fp8Matrices(
            torch.empty(count, out_size, in_size, dtype=FP8, device=device),
            torch.empty(count, *shape, dtype=torch.float32, device=device),
        )

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        form = self.sizes.form
        return recorded_fp8_experts(x, ids, weights, self.gate_up, self.down, self.is_invariant, form)

    def tensors(self, prefix: str) -> NamedTensors:
        """As `StoredExperts.tensors`."""
        for at, expert in enumerate(self.sizes.numbers):
            for name, weight, scales in self._parts(at):
                own = f"{prefix}{expert}.{name}."
                yield f"{own}weight", weight
                yield f"{own}{self.form.scale_name}", scales
                if self.form.has_input_scale:
                    yield f"{own}input_scale", self._unused

    def parameters(self, prefix: str) -> NamedTensors:
        """As `StoredExperts.parameters`."""
        for name, matrices in (("gate_up", self.gate_up), ("down", self.down)):
            yield f"{prefix}{name}.weight", matrices.weight
            yield f"{prefix}{name}.scales", matrices.scales

    def _parts(self, at: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, weight, scales) of each matrix of the expert number `at` here."""
        inner, (gate, up, down) = self.sizes.intermediate_size, self.sizes.names
        rows = inner // BLOCK if self.form.has_blocks else inner
        weight, scales = self.gate_up.weight[at], self.gate_up.scales[at]
        yield gate, weight[:inner], scales[:rows]
        yield up, weight[inner:], scales[rows:]
        yield down, self.down.weight[at], self.down.scales[at]

    def finish(self) -> None:
        """As `StoredWeights.finish`: the weights are used as they are stored."""


class Int4Experts:
    """Experts with 4-bit integers, gate above up, in the packed form of `kernels.packed_words` once finished.

    Their names begin with `prefix`. `is_invariant`: products are batch-invariant.

    Raises CheckpointError for sizes that groups or words do not divide, and for inputs in the order of
    activations, which each expert would have its own of.
    """

    def __init__(
        self,
        form: Int4Form,
        prefix: str,
        sizes: ExpertSizes,
        *,
        device: torch.device | str,
        is_invariant: bool = False,
    ) -> None:
        self.form, self.sizes, self.is_invariant, self.prefix = form, sizes, is_invariant, prefix
        if form.has_order:
            raise CheckpointError(
                f"{prefix}*: quantization_config.desc_act: inputs of experts in the order of activations are "
                "not supported; use a checkpoint made with desc_act false"
            )
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        gate, up, down = sizes.names
        shapes = {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
        for name, (out_size, in_size) in shapes.items():
            check_outputs(prefix + name, out_size)
            if in_size % form.group_size:
                raise CheckpointError(
                    f"{prefix}{name}: {in_size} inputs are no multiple of the group size {form.group_size}; "
                    "use another quantisation"
                )
        self._stored = [
            {name: StoredPart(form, shape[1], shape[0], device) for name, shape in shapes.items()}
            for _ in sizes.numbers
        ]
        none = torch.empty(0, device=device)
        self.gate_up = self.down = PackedMatrices(none, none, form.group_size)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        form = self.sizes.form
        return recorded_packed_experts(x, ids, weights, self.gate_up, self.down, self.is_invariant, form)

    def tensors(self, prefix: str) -> NamedTensors:
        """As `StoredExperts.tensors`; once finished, those of `parameters`."""
        for expert, parts in zip(self.sizes.numbers, self._stored, strict=False):
            for name, part in parts.items():
                yield from part.tensors(f"{prefix}{expert}.{name}.")
        if not self._stored:
            yield from self.parameters(prefix)

    def parameters(self, prefix: str) -> NamedTensors:
        """As `StoredExperts.parameters`."""
        return packed_tensors(prefix, self.gate_up, self.down)

    def finish(self) -> None:
        """As `StoredWeights.finish`: packs all experts, and frees the stored tensors."""
        gate, up, down = self.sizes.names
        packed: list[tuple[torch.Tensor, ...]] = []
        for expert, parts in zip(self.sizes.numbers, self._stored, strict=True):
            for name, part in parts.items():
                part.order(f"{self.prefix}{expert}.{name}")
            words = {name: pack_words(part.values()) for name, part in parts.items()}
            groups = {name: (part.scales, part.zeros()) for name, part in parts.items()}
            scales, zeros = (torch.cat(pair, dim=1) for pair in zip(groups[gate], groups[up], strict=True))
            size = self.form.group_size
            packed.append(
                (
                    torch.cat((words[gate], words[up])),
                    pack_groups(scales, zeros, size),
                    words[down],
                    pack_groups(*groups[down], size),
                )
            )
            parts.clear()
        first, first_scales, second, second_scales = (torch.stack(each) for each in zip(*packed, strict=True))
        self.gate_up = PackedMatrices(first, first_scales, self.form.group_size)
        self.down = PackedMatrices(second, second_scales, self.form.group_size)
        self._stored = []


def packed_tensors(prefix: str, gate_up: PackedMatrices, down: PackedMatrices) -> NamedTensors:
    """The tensors of packed experts by names of their own."""
    for name, matrices in (("gate_up", gate_up), ("down", down)):
        yield f"{prefix}{name}.words", matrices.words
        yield f"{prefix}{name}.scales", matrices.scales


def _check_device(device: torch.device, prefix: str) -> None:
    """Raises CheckpointError for a GPU that has no instructions for e4m3."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < NATIVE:
        major, minor = torch.cuda.get_device_capability(device)
        raise CheckpointError(
            f"{prefix}*: experts in fp8 need a GPU of compute capability {NATIVE[0]}.{NATIVE[1]}, this one "
            f"has {major}.{minor}; use a checkpoint in bfloat16"
        )
