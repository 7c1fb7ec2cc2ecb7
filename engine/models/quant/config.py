"""How a checkpoint stores its matrices: what the readers of `registry` find in `quantization_config`."""

import re
from dataclasses import dataclass
from typing import Literal

Packing = Literal["awq", "gptq"]

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Fp8Form:
    """8-bit floating point (e4m3). `scale_name`: the scales' name behind that of the module.

    `has_blocks`: a scale for each 128 x 128 values; otherwise one for each output, or one for the matrix.
    `has_input_scale`: the checkpoint has a scale of activations, which is not used, because rows are rounded
    by their own largest value. `is_rounded_here`: the checkpoint has ordinary matrices, rounded as they are
    loaded.
    """

    scale_name: str = "weight_scale"
    has_blocks: bool = False
    has_input_scale: bool = False
    is_rounded_here: bool = False

    @property
    def value_bytes(self) -> float:
        """Bytes of a value; scales are too few to count."""
        return 1.0

    def __str__(self) -> str:
        return "fp8 in blocks" if self.has_blocks else "fp8"


@dataclass(frozen=True, kw_only=True)
class Int4Form:
    """4-bit integers with a scale and a zero point for each `group_size` inputs of an output.

    `packing`: the order of the values in a word. `zero_offset`: what is added to a stored zero point.
    `has_order`: inputs were quantised in the order of their activations (`desc_act`), so that the inputs of a
    group may be any.
    """

    packing: Packing
    group_size: int
    zero_offset: int = 0
    has_order: bool = False

    @property
    def value_bytes(self) -> float:
        """Bytes of a value with its part of the word of its group, as kernels read them."""
        return 0.5 + 4 / self.group_size

    def __str__(self) -> str:
        return f"int4 in groups of {self.group_size}"


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """The form of all matrices but the `ignored` ones, which stay as they are.

    An entry of `ignored` is a module's name, some of its dotted parts in a row, or "re:" and a regular
    expression for the beginning of names. `has_kv_scales`: attention has scales of keys and values
    (`k_scale`, `v_scale`).
    """

    form: Fp8Form | Int4Form
    ignored: tuple[str, ...] = ()
    has_kv_scales: bool = False

    def is_ignored(self, module: str) -> bool:
        """Whether the matrix of `module` ("model.layers.0.mlp.up_proj") is stored in the model's dtype."""
        return any(_matches(entry, module) for entry in self.ignored)

    def __str__(self) -> str:
        return str(self.form)


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        pattern = entry.removeprefix("re:")
        return any(re.match(pattern, name) for name in _names_for(pattern, module))
    return f".{entry}." in f".{module}."


def _names_for(pattern: str, module: str) -> tuple[str, ...]:
    """The names of a module that a regular expression may mean: those in a checkpoint that also reads images
    if it speaks of the text model in there.
    """
    spoken = pattern.replace("\\", "")
    if "language_model" not in spoken:
        return (module,)
    older, newer = f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}"
    if "language_model.model" in spoken:
        return (older,)
    return (newer,) if "model.language_model" in spoken else (older, newer)
