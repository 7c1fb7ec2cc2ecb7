"""The registry of quantisations: `quant_method` of config.json -> reader of its `quantization_config`.

A new method needs a reader here, and a projection for its form in `projections`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from ...errors import CheckpointError
from ..text_part import IGNORE_KEYS
from .config import GROUP_SIZES, Fp8Form, Int4Form, Packing, QuantConfig

KEY = "quantization_config"
BLOCK_SHAPE = [128, 128]
BITS_A_WORD = 4
# Modules that `--quantize` leaves as they are; attention takes the projection of latents apart.
NOT_ROUNDED = ("lm_head", "kv_b_proj")

Reader: TypeAlias = Callable[["Section"], QuantConfig]


class Section:
    """A part of config.json with typed access. Every error names the file, the key, the value and the remedy.
    """

    def __init__(self, values: Mapping[str, object], source: Path, name: str = KEY) -> None:
        self.values = values
        self.source = source
        self.name = name

    def get(self, key: str) -> object:
        return self.values.get(key)

    def error(self, key: str, remedy: str) -> CheckpointError:
        """The error for the value of `key`."""
        return CheckpointError(f"{self.source}: {self.name}.{key} = {self.get(key)!r}: {remedy}")

    def part(self, key: str) -> "Section | None":
        """The object under `key`; None if it is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object is required here")
        return Section(value, self.source, f"{self.name}.{key}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false is required here")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Raises CheckpointError unless the value of `key` is one of `allowed` (None: absent)."""
        if self.get(key) not in allowed:
            names = ", ".join(str(value) for value in allowed if value is not None)
            raise self.error(
                key, f"supported here: {names or 'none'}; use another quantisation of this model"
            )

    def ignored(self) -> tuple[str, ...]:
        """The modules that are not quantised, under any of the names that writers use."""
        found: list[str] = []
        for key in IGNORE_KEYS:
            value = self.get(key) or []
            if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
                raise self.error(key, "a list of module names is required here")
            found += value
        return tuple(found)


def read_fp8(section: Section) -> QuantConfig:
    """A matrix of e4m3 with one scale, or with one for each block ("weight_scale_inv", as DeepSeek writes).
    """
    section.require("fmt", None, "e4m3")
    section.require("activation_scheme", None, "dynamic", "static")
    blocks = section.get("weight_block_size")
    if blocks is not None and blocks != BLOCK_SHAPE:
        raise section.error("weight_block_size", f"only {BLOCK_SHAPE} is supported")
    form = Fp8Form(
        scale_name="weight_scale" if blocks is None else "weight_scale_inv",
        has_blocks=blocks is not None,
        has_input_scale=section.get("activation_scheme") == "static",
    )
    return QuantConfig(form=form, ignored=section.ignored())


def read_compressed_tensors(section: Section) -> QuantConfig:
    """One group of e4m3 matrices, with scales per matrix, output or block, and scales of keys and values."""
    section.require("format", "float-quantized")
    section.require("quantization_status", None, "compressed", "frozen")
    groups = section.part("config_groups")
    only = None if groups is None or len(groups.values) != 1 else groups.part(next(iter(groups.values)))
    if only is None:
        raise section.error("config_groups", "exactly one group of matrices is supported")
    only.require("targets", ["Linear"])
    weights, inputs = only.part("weights"), only.part("input_activations")
    if weights is None:
        raise only.error("weights", "the form of the weights is required here")
    weights.require("type", "float")
    weights.require("num_bits", 8)
    weights.require("strategy", "tensor", "channel", "block")
    has_blocks = weights.get("strategy") == "block"
    if has_blocks:
        weights.require("block_structure", BLOCK_SHAPE)
    form = Fp8Form(
        has_blocks=has_blocks, has_input_scale=inputs is not None and not inputs.flag("dynamic", False)
    )
    return QuantConfig(form=form, ignored=section.ignored(), has_kv_scales=_has_kv_scales(section))


def _has_kv_scales(section: Section) -> bool:
    scheme = section.part("kv_cache_scheme")
    if scheme is None:
        return False
    scheme.require("type", "float")
    scheme.require("num_bits", 8)
    scheme.require("strategy", None, "tensor")
    return not scheme.flag("dynamic", False)


def read_awq(section: Section) -> QuantConfig:
    """4-bit integers as AutoAWQ packs them for its GEMM kernels."""
    section.require("version", None, "gemm", "GEMM")
    section.require("zero_point", None, True)
    section.require("bits", BITS_A_WORD)
    form = _int4(section, "group_size" if section.get("group_size") is not None else "q_group_size", "awq")
    return QuantConfig(form=form, ignored=section.ignored())


def read_gptq(section: Section) -> QuantConfig:
    """4-bit integers as AutoGPTQ and GPTQModel pack them; the first format stores zero points less one."""
    section.require("bits", BITS_A_WORD)
    if section.flag("lm_head", False):
        raise section.error(
            "lm_head", "lm_head is read in floats only; use a quantisation of this model with lm_head false"
        )
    section.require("checkpoint_format", None, "gptq", "gptq_v2")
    offset = 0 if section.get("checkpoint_format") == "gptq_v2" else 1
    form = _int4(section, "group_size", "gptq", offset)
    # with static groups the inputs of a group are neighbours again
    has_order = section.flag("desc_act", False) and not section.flag("static_groups", False)
    ignored = section.ignored() + _left_out(section)
    return QuantConfig(form=replace(form, has_order=has_order), ignored=ignored)


def _left_out(section: Section) -> tuple[str, ...]:
    """The modules that GPTQModel's `dynamic` leaves in floats: its keys "-:" and a regular expression for the
    beginning of names.

    Raises CheckpointError for any other key, which gives some modules a form of their own.
    """
    dynamic = section.part("dynamic")
    found = []
    for key in () if dynamic is None else dynamic.values:
        if not key.startswith("-:"):
            raise section.error(
                "dynamic",
                f'{key!r} gives some modules another form, and all must have one; only keys "-:REGEX", which '
                "leave modules in floats, are supported; use another quantisation of this model",
            )
        pattern = key.removeprefix("-:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise section.error(
                "dynamic", f"{key!r} is no regular expression of Python ({error}); correct it"
            ) from None
        found.append(f"re:{pattern}")
    return tuple(found)


def _int4(section: Section, key: str, packing: Packing, zero_offset: int = 0) -> Int4Form:
    group = section.get(key)
    if not isinstance(group, int) or isinstance(group, bool) or group not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise section.error(key, f"group sizes {sizes} are supported; use another quantisation of this model")
    return Int4Form(packing=packing, group_size=group, zero_offset=zero_offset)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        "fp8": read_fp8,
        "compressed-tensors": read_compressed_tensors,
        "awq": read_awq,
        "gptq": read_gptq,
    }
)


def read_quantisation(
    raw: Mapping[str, object], source: Path, readers: Mapping[str, Reader] = READERS
) -> QuantConfig | None:
    """The quantisation of the config.json `raw` at `source`; None without one.

    Raises CheckpointError, naming file, key, value and remedy, for an unknown method or form.
    """
    if not raw.get(KEY):
        return None
    section = Section(raw, source, "config").part(KEY)
    assert section is not None
    section.name = KEY
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise section.error(
            "quant_method",
            f"supported are {', '.join(readers)}; use the original checkpoint, or --quantize fp8",
        )
    return readers[method](section)


def quantise_at_load(name: str, stored: QuantConfig | None, source: Path) -> QuantConfig | None:
    """The form for `--quantize name` of a checkpoint whose own form is `stored`; "none" keeps it.

    Raises CheckpointError for an unknown name, or a checkpoint that is quantised already.
    """
    if name == "none":
        return stored
    if name != "fp8":
        raise CheckpointError(f"quantize {name!r}: use none or fp8")
    if stored is not None:
        raise CheckpointError(
            f"quantize {name}: {source} is quantised already ({stored}); leave --quantize out, or use the "
            "original"
        )
    return QuantConfig(form=Fp8Form(is_rounded_here=True), ignored=NOT_ROUNDED)
