"""Resolves the config.json of a DFLASH drafter, as github.com/z-lab/dflash and SpecForge publish it.

A prefill engine uses the layer ids and the widths only. Ids name layer outputs. Keys of the drafter stand at
the top level or in `dflash_config`, which wins. An unknown key raises CheckpointError, because it may change
what the drafter computes.
"""

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...models.config import ModelConfig
from ...models.config_reader import read_json
from ...models.rope import RopeConfig, read_rope_config
from .config_formats import IGNORED_KEYS, Fields
from .spec_config import AuxSpec, DraftDims, check_ids

ARCHITECTURE = "DFlashDraftModel"
IDS_KEY = "target_layer_ids"
MASK_KEY = "mask_token_id"
DEFAULT_BLOCK = 16
FULL, SLIDING = "full_attention", "sliding_attention"
_ATTENTION_MODES = ("gqa", "mha")

_NETWORK_KEYS = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "max_position_embeddings",
        "vocab_size",
        "attention_bias",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "num_target_layers",
        "block_size",
        "is_causal",
        "dflash_config",
    }
)
_DFLASH_KEYS = frozenset(
    {
        IDS_KEY,
        MASK_KEY,
        "mask_token",
        "block_size",
        "num_target_layers",
        "causal",
        "is_causal",
        "attention_mode",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
    }
)
_WITHOUT_EFFECT = frozenset({"tie_word_embeddings"})  # embedding and head are the target's


@dataclass(frozen=True, kw_only=True)
class DflashConfig:
    """The config of a DFLASH drafter.

    `block_size`: tokens of the longest block, the newest token included. `windows`: for each layer the number
    of positions that a row sees, its own included; None for all. `are_causal`: for each layer, whether a row
    of the block sees only the rows of the block up to itself. `logit_cap`: the bound of the soft cap; 0 for
    none.
    """

    path: Path
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    attention_bias: bool
    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...]
    are_causal: tuple[bool, ...]
    embedding_scale: float
    logit_scale: float
    logit_cap: float
    aux: AuxSpec
    dims: DraftDims

    def __repr__(self) -> str:
        return (
            f"<DflashConfig {self.num_layers} x {self.hidden_size}, blocks of {self.block_size}, mask token "
            f"{self.mask_token_id}, layer outputs {list(self.aux.ids)} ({self.aux.convention})>"
        )


def load_dflash_config(path: Path, target: ModelConfig, *, dtype: str | None = None) -> DflashConfig:
    """Reads `path`/config.json for a drafter of `target`.

    `dtype` is the dtype in which the target runs; None means the dtype of its checkpoint. Raises
    CheckpointError naming file, key, value and remedy for any unsupported or inconsistent value.
    """
    file = Path(path) / "config.json"
    fields = _fields(file, read_json(file))
    hidden = _equal(fields, "hidden_size", target.hidden_size)
    num_layers, num_heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    windows = _windows(fields, num_layers)
    max_position = fields.integer("max_position_embeddings")
    ids, convention = _ids(fields, target)
    running = target.dtype if dtype is None else dtype
    return DflashConfig(
        path=Path(path),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, num_heads),
        head_dim=fields.integer("head_dim", default=128),  # as model_type qwen3 has it
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=_rope(fields, max_position),
        max_position_embeddings=max_position,
        vocab_size=_equal(fields, "vocab_size", target.vocab_size),
        attention_bias=fields.flag("attention_bias", default=False),
        block_size=_block_size(fields),
        mask_token_id=_mask_token(fields, target),
        windows=windows,
        are_causal=_causal(fields, windows),
        embedding_scale=fields.number("input_embedding_scale", default=1.0),
        logit_scale=fields.number("output_multiplier", default=1.0),
        logit_cap=max(fields.number("final_logit_softcapping", default=0.0), 0.0),
        aux=AuxSpec(ids=ids, convention="output" if convention == "output" else "default", dtype=running),
        dims=DraftDims(
            target_feature_width=len(ids) * hidden,
            target_feature_dtype=running,
            self_width=hidden,
            self_dtype=running,
            num_features=len(ids),
        ),
    )


def _fields(file: Path, raw: dict[str, object]) -> Fields:
    """All keys flat, without those that are null."""
    if raw.get("speculators_model_type") is not None:
        raise CheckpointError(
            f"{file}: speculators_model_type {raw['speculators_model_type']!r}: DFLASH drafters of the "
            f"speculators format are not read; use a {ARCHITECTURE} of z-lab or SpecForge"
        )
    inner = raw.get("dflash_config") or {}
    if not isinstance(inner, dict):
        raise CheckpointError(f"{file}: dflash_config is {inner!r}, expected an object")
    for where, found, known in (
        ("", raw, _NETWORK_KEYS | _DFLASH_KEYS | IGNORED_KEYS | _WITHOUT_EFFECT),
        ("dflash_config.", inner, _DFLASH_KEYS),
    ):
        unknown = sorted(key for key in found.keys() - known if found[key] is not None)
        if unknown:
            raise CheckpointError(
                f"{file}: {where}{unknown[0]} = {found[unknown[0]]!r} is not known to baton and may change "
                f"what the drafter computes; use a plain {ARCHITECTURE} without extensions"
            )
    values = {key: value for key, value in {**raw, **inner}.items() if value is not None}
    fields = Fields(file=file, dialect=0, values=values)
    if values.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"is {values['hidden_act']!r}, only 'silu' is supported")
    if values.get("attention_mode", "gqa") not in _ATTENTION_MODES:
        raise fields.error(
            "attention_mode", f"is {values['attention_mode']!r}; supported are {', '.join(_ATTENTION_MODES)}"
        )
    return fields


def _equal(fields: Fields, key: str, wanted: int) -> int:
    found = fields.integer(key)
    if found != wanted:
        raise fields.error(
            key, f"is {found}, but the target has {wanted}; use the drafter trained for this target"
        )
    return found


def _kv_heads(fields: Fields, num_heads: int) -> int:
    found = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % found:
        raise fields.error("num_key_value_heads", f"is {found}, which does not divide {num_heads} heads")
    return found


def _rope(fields: Fields, max_position: int) -> RopeConfig:
    """The drafter's own rope, never the target's."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    raw = {key: fields.values[key] for key in keys if key in fields.values}
    return read_rope_config(raw | {"max_position_embeddings": max_position}, fields.file)


def _block_size(fields: Fields) -> int:
    found = fields.integer("block_size", default=DEFAULT_BLOCK)
    if found < 2:
        raise fields.error("block_size", f"is {found}; a block has the newest token and at least one draft")
    return found


def _mask_token(fields: Fields, target: ModelConfig) -> int:
    """The id that stands for a token to be drafted. Its embedding is a row of the target's table."""
    found = fields.values.get(MASK_KEY)
    if isinstance(found, bool) or not isinstance(found, int):
        raise fields.error(MASK_KEY, f"is {found!r}, expected the id of the mask token")
    if not 0 <= found < target.vocab_size:
        raise fields.error(
            MASK_KEY,
            f"is {found}, outside of the target's vocabulary of {target.vocab_size} tokens, so no "
            f"embedding exists for it; use a target whose embedding has row {found}, or a drafter with "
            "another mask token",
        )
    return found


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    kinds = fields.values.get("layer_types")
    has_windows = fields.flag("use_sliding_window", default=isinstance(kinds, list) and SLIDING in kinds)
    size = fields.optional_integer("sliding_window") if has_windows else None
    if kinds is None:  # the rule of model_type qwen3
        first = fields.optional_integer("max_window_layers") or 28
        kinds = [SLIDING if size is not None and layer >= first else FULL for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise fields.error(
            "layer_types", f"is {kinds!r}, expected {FULL} or {SLIDING} for each of {num_layers} layers"
        )
    if SLIDING in kinds and size is None:
        raise fields.error(
            "layer_types",
            f"has {SLIDING}, but use_sliding_window is false or sliding_window has no size; set both",
        )
    return tuple(size if kind == SLIDING else None for kind in kinds)


def _causal(fields: Fields, windows: tuple[int | None, ...]) -> tuple[bool, ...]:
    """By default, layers with a window are causal and the others are not."""
    keys = [key for key in ("causal", "is_causal") if key in fields.values]
    if keys:
        return (fields.flag(keys[0], default=False),) * len(windows)
    return tuple(window is not None for window in windows)


def _ids(fields: Fields, target: ModelConfig) -> tuple[tuple[int, ...], str]:
    count = fields.optional_integer("num_target_layers")
    if count is not None:
        _equal(fields, "num_target_layers", target.num_layers)
    given = fields.integers(IDS_KEY)
    ids = _default_ids(fields, target.num_layers) if given is None else given
    check_ids(fields, ids, ids, target, "output", key=IDS_KEY)
    return ids, "default" if given is None else "output"


def _default_ids(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """As many layers as the drafter has, evenly spaced over 1 to L-3; the middle layer for a drafter of one
    layer.
    """
    count = fields.integer("num_hidden_layers")
    if count == 1:
        return (num_layers // 2,)
    if num_layers - 3 < count:
        raise fields.error(
            IDS_KEY, f"is absent, and {num_layers} layers of the target have no {count} defaults"
        )
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
