"""Rotary position tables: default, linear, dynamic, llama3, yarn and longrope.

Both spellings of config.json are understood. dynamic only stretches positions beyond max_position_embeddings.
No request reaches them, so it is the same as default. longrope has factors for short and for long texts. A KV
cache cannot change its factors, so the long ones are used for all texts if the config allows more than the
original positions.

Sources: Su et al., "RoFormer", 2021; Chen et al., "Position interpolation", 2023 (linear); Peng et al.,
"YaRN", 2023; Ding et al., "LongRoPE", 2024. Legend: T tokens, N heads, D head dimension, R rotated
dimensions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from ...kernels.look_up_rows import Lookup, look_up_rows
from ...kernels.rope import apply_rope
from ..errors import CheckpointError

# Former names, and the rotation of checkpoints that read images, whose three positions are one for text.
ALIASES: Mapping[str, str] = MappingProxyType({"su": "longrope", "mrope": "default"})
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Resolved rotary settings. `attention_factor` scales cos and sin (yarn, longrope; otherwise 1.0).

    `partial`: the share of a head's dimensions that turn. `factors`: of each frequency (longrope).
    """

    theta: float = DEFAULT_THETA
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial: float = 1.0
    factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """R, the rotated dimensions of a head of `head_dim`."""
        return int(head_dim * self.partial)


class _RopeReader:
    """Reads the rotary keys of one config.json. Every error names the file and the key."""

    def __init__(self, raw: Mapping[str, object], source: Path) -> None:
        self.raw = raw
        self.source = source
        # The old spelling overrides the new one, as in transformers.
        self.key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
        settings = raw.get(self.key) or {}
        if not isinstance(settings, Mapping):
            raise self.error(self.key, settings, "it must be an object with rope_type and its parameters")
        self.settings = settings

    def error(self, key: str, value: object, remedy: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {key} = {value!r}: {remedy}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.settings.get(name)
        if value is None:
            value = default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.error(
                f"{self.key}.{name}", value, f"rope_type {self.rope_type!r} needs a positive number here"
            )
        return float(value)

    @property
    def rope_type(self) -> str:
        named = self.settings.get("rope_type") or self.settings.get("type") or "default"
        named = ALIASES.get(str(named), named)
        if any(isinstance(value, Mapping) for value in self.settings.values()):
            raise self.error(self.key, self.settings, "rotary settings per layer type are not supported")
        if named not in ROPE_TYPES:
            raise self.error(f"{self.key}.rope_type", named, f"supported are {', '.join(ROPE_TYPES)}")
        return str(named)

    def theta(self) -> float:
        top = self.raw.get("rope_theta", DEFAULT_THETA)
        if isinstance(top, bool) or not isinstance(top, int | float):
            raise self.error("rope_theta", top, "it must be a number")
        return self.number("rope_theta", float(top))

    def original_max_position(self) -> int:
        fallback = self.raw.get("max_position_embeddings")
        top = self.raw.get("original_max_position_embeddings")
        if isinstance(top, int):
            return top
        return int(
            self.number("original_max_position_embeddings", fallback if isinstance(fallback, int) else None)
        )

    def partial(self, is_allowed: bool) -> float:
        partial = self.settings.get("partial_rotary_factor") or self.raw.get("partial_rotary_factor") or 1.0
        if not is_allowed and partial != 1.0:
            raise self.error(
                "partial_rotary_factor", partial, "only full rotary embedding (1.0) is supported"
            )
        if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
            raise self.error("partial_rotary_factor", partial, "a number from 0 to 1 is required here")
        return float(partial)

    def factors(self, name: str) -> tuple[float, ...]:
        values = self.settings.get(name)
        is_list = isinstance(values, list) and bool(values)
        if not is_list or not all(type(v) in (int, float) and v > 0 for v in values):  # type: ignore[union-attr]
            raise self.error(f"{self.key}.{name}", values, "longrope needs a list of positive numbers here")
        return tuple(float(value) for value in values)  # type: ignore[union-attr]

    def yarn_attention_factor(self, factor: float) -> float:
        if self.settings.get("attention_factor") is not None:
            return self.number("attention_factor")
        if self.settings.get("mscale") and self.settings.get("mscale_all_dim"):
            return _mscale(factor, self.number("mscale")) / _mscale(factor, self.number("mscale_all_dim"))
        return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope_config(raw: Mapping[str, object], source: Path, *, allows_partial: bool = False) -> RopeConfig:
    """The rotary settings of a parsed config.json (errors name `source`).

    Understands `rope_theta` + `rope_scaling` and `rope_parameters`. Raises CheckpointError for an unknown
    type, a missing or malformed parameter, partial rotary embedding unless allowed, or settings per layer
    type.
    """
    reader = _RopeReader(raw, source)
    return replace(_read_scaling(reader), partial=reader.partial(allows_partial))


def _read_scaling(reader: _RopeReader) -> RopeConfig:
    raw, rope_type, theta = reader.raw, reader.rope_type, reader.theta()
    if rope_type in ("default", "dynamic"):
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type=rope_type, factor=reader.number("factor"))
    original = reader.original_max_position()
    if rope_type == "llama3":
        return RopeConfig(
            theta=theta,
            rope_type=rope_type,
            factor=reader.number("factor"),
            original_max_position=original,
            low_freq_factor=reader.number("low_freq_factor"),
            high_freq_factor=reader.number("high_freq_factor"),
        )
    length = raw.get("max_position_embeddings")
    factor = reader.number("factor", length / original if isinstance(length, int) else None)
    if rope_type == "longrope":
        is_long = isinstance(length, int) and length > original
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeConfig(
            theta=theta,
            rope_type=rope_type,
            factor=factor,
            original_max_position=original,
            attention_factor=reader.number("attention_factor", stretch),
            factors=reader.factors("long_factor" if is_long else "short_factor"),
        )
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=factor,
        original_max_position=original,
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        truncate=bool(reader.settings.get("truncate", True)),
        attention_factor=reader.yarn_attention_factor(factor),
    )


def score_factor(raw: Mapping[str, object], source: Path) -> float:
    """The factor of attention scores of DeepSeek, beside that of the head's width.

    Stretched positions flatten scores; `mscale_all_dim` sharpens them again. Raises CheckpointError as
    `read_rope_config`.
    """
    reader = _RopeReader(raw, source)
    if reader.rope_type == "default" or not reader.settings.get("mscale_all_dim"):
        return 1.0
    return _mscale(reader.number("factor"), reader.number("mscale_all_dim")) ** 2


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position, float32 `[D/2]` on the CPU, of D rotated dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = config.theta**exponents
    plain = 1.0 / periods
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3(plain, config)
    if config.rope_type == "yarn":
        return _yarn(periods, config, head_dim)
    if config.rope_type == "longrope":
        return 1.0 / (torch.tensor(config.factors, dtype=torch.float32) * periods)
    return plain


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Frequencies of llama3: long waves are slowed by `factor`, short ones stay, those between are
    interpolated.
    """
    wavelengths = 2 * math.pi / plain
    longest = config.original_max_position / config.low_freq_factor
    shortest = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * plain / config.factor + smooth * plain
    slowed = torch.where(wavelengths > longest, plain / config.factor, between)
    return torch.where(wavelengths < shortest, plain, slowed)


def _yarn(periods: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Frequencies of yarn: fast dimensions keep theirs, slow ones are slowed, with a ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not be empty
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _signed(table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-wide cos and sin `[T, D]` side by side -> each `[T, D]` in `dtype`, sin with a negated first
    half.
    """
    cos, sin = table.to(dtype).chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class RotaryEmbedding:
    """Cos and sin of positions [0, max_position), float32, computed on the CPU, equal on all devices.

    `dtype`: the dtype of the forwards; its tables are made once. Raises ValueError for an odd head dimension.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_position: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        width = config.rotary_dim(head_dim)
        if width % 2:
            raise ValueError(f"head_dim {width} is odd; rotary embedding pairs dimensions, use an even one")
        self.max_position = max_position
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(config, width)
        cos, sin = angles.cos() * config.attention_factor, angles.sin() * config.attention_factor
        self._table = torch.cat((cos, sin), dim=-1).to(device)
        self._ready = None if dtype is None else (dtype, *_signed(self._table, dtype))

    def lookup(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of `positions` int64 `[T]`, each `[T, R]` in `dtype`, sin with a negated first half."""
        if self._ready is None or self._ready[0] != dtype:
            return _signed(self._table.index_select(0, positions), dtype)
        cos, sin = look_up_rows(*self.lookups(positions, dtype))
        return cos, sin

    def lookups(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[Lookup, Lookup]:
        """What `lookup` looks up, to be looked up together with other rows. Another dtype than that of the
        constructor costs a copy of the tables.
        """
        ready = self._ready
        if ready is None or ready[0] != dtype:
            ready = dtype, *_signed(self._table, dtype)
        _, cos, sin = ready
        return Lookup(cos, positions), Lookup(sin, positions)

    def apply(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, each `[T, heads, D]`, to `positions_T` int64 `[T]`."""
        cos, sin = self.lookup(positions_T, q_TND.dtype)
        return apply_rope(q_TND, cos, sin), apply_rope(k_TKD, cos, sin)
