"""Resolves the config.json of an EAGLE3 checkpoint into one frozen record.

Four dialects describe the same network: 1 SafeAILab, 2 native (SpecForge, SGLang), 3 Model-Optimizer, 4
speculators. This module reads config.json only: a prefill worker needs the aux layer ids and the feature
width, never the weights. Layer ids name layer *outputs* (residual stream after layer i, un-normed), in the
training order of `fc`.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from ...errors import CheckpointError
from ...models.config import ModelConfig
from ...models.config_reader import read_json
from ...models.rope import RopeConfig, read_rope_config
from .config_formats import MASK_TOKEN_KEYS, Fields, IdConvention, flatten


@dataclass(frozen=True, kw_only=True)
class AuxSpec:
    """The target features that the drafter reads: `ids` in `fc` column order, in the target's `dtype`.

    `convention` is the form of the ids in the config: "output" as here, "input" (one higher), "default" if
    absent.
    """

    ids: tuple[int, ...]
    convention: Literal["output", "input", "default"]
    dtype: str

    @property
    def num_features(self) -> int:
        """K, the number of captured features."""
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class DraftDims:
    """The two hidden widths of drafting: the target's feature rows, and the draft's own feedback."""

    target_feature_width: int
    target_feature_dtype: str
    self_width: int
    self_dtype: str
    num_features: int


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The config of a head that drafts token by token from its own hidden, as all EAGLE heads do.

    `draft_vocab_size` equals `vocab_size` for a full head. `num_layers` is 1 until the weights are read,
    since configs do not tell. `reads_normed`: the feature is the target's hidden behind its final norm, so
    the captured row passes that norm first.
    """

    path: Path
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    fc_bias: bool
    aux: AuxSpec
    dims: DraftDims
    num_layers: int = 1
    reads_normed: bool = False


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The config of an EAGLE3 head in any dialect.

    `input_norm`: one norm over the concatenated features. `fc_norm`: one norm per feature. `norm_output`: the
    fed-back hidden is normed. `norm_before_residual`: the residual is taken after the hidden norm.
    `mask_token`: the head is a parallel one (P-EAGLE), which drafts behind this token in one forward.
    """

    dialect: int
    qk_norm: bool
    input_norm: bool
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool
    mask_token: int | None = None

    def __repr__(self) -> str:
        return (
            f"<Eagle3Config dialect {self.dialect}, hidden {self.hidden_size}, {self.draft_vocab_size} of "
            f"{self.vocab_size} tokens, layer outputs {list(self.aux.ids)} ({self.aux.convention})>"
        )


def load_draft_config(
    path: Path,
    target: ModelConfig,
    *,
    target_path: Path | None = None,
    dtype: str | None = None,
    convention: IdConvention = "auto",
) -> Eagle3Config:
    """Reads `path`/config.json for a draft of `target`, which runs in `dtype` (None: that of its checkpoint).

    `convention` overrides the convention of the layer ids. `target_path` appears in errors only.

    Raises CheckpointError naming file, key, value and remedy for any unsupported or inconsistent value.
    """
    file = Path(path) / "config.json"
    fields = flatten(file, read_json(file))
    running = target.dtype if dtype is None else dtype
    aux = _resolve_aux(fields, target, running, convention)
    head = read_head(fields, target, aux, target_path, fc_bias=fields.flag("bias", default=False))
    return Eagle3Config(
        **vars(replace(head, reads_normed=not _has_aux(fields))),
        dialect=fields.dialect,
        qk_norm=fields.flag("qk_norm", default=False),
        input_norm=fields.flag("norm_before_fc", default=False),
        fc_norm=fields.flag("fc_norm", default=False),
        norm_output=fields.flag("norm_output", default=False),
        norm_before_residual=fields.flag("norm_before_residual", default=False),
        mask_token=_mask_token(fields, head.vocab_size),
    )


def _mask_token(fields: Fields, vocab_size: int) -> int | None:
    """The token in the places that a parallel head fills; None for other heads."""
    for key in MASK_TOKEN_KEYS:
        value = fields.values.get(key)
        if value is None:
            continue
        token = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise fields.error(key, f"is {value!r}, expected a token below the vocabulary of {vocab_size}")
        return token
    return None


def read_head(
    fields: Fields, target: ModelConfig, aux: AuxSpec, target_path: Path | None, *, fc_bias: bool
) -> HeadConfig:
    """The part of a config that all heads have. Raises CheckpointError for a value that does not fit."""
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    target_hidden = _target_hidden(fields, hidden, target, target_path)
    vocab, draft_vocab = _vocabulary(fields, target)
    max_position = fields.integer("max_position_embeddings", default=2048)
    return HeadConfig(
        path=fields.file.parent,
        hidden_size=hidden,
        target_hidden_size=target_hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=fields.integer("head_dim", default=hidden // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=_resolve_rope(fields, max_position),
        max_position_embeddings=max_position,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        fc_bias=fc_bias,
        aux=aux,
        dims=DraftDims(
            target_feature_width=aux.num_features * target_hidden,
            target_feature_dtype=aux.dtype,
            self_width=hidden,
            self_dtype=aux.dtype,
            num_features=aux.num_features,
        ),
    )


def _resolve_rope(fields: Fields, max_position: int) -> RopeConfig:
    """The draft's own rope, never the target's. SafeAILab trained heads without the key with base 10000."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    raw = {key: fields.values[key] for key in keys if key in fields.values}
    return read_rope_config(raw | {"max_position_embeddings": max_position}, fields.file)


def _resolve_aux(fields: Fields, target: ModelConfig, dtype: str, convention: IdConvention) -> AuxSpec:
    num_layers = target.num_layers
    if not _has_aux(fields):
        return AuxSpec(ids=(num_layers - 1,), convention="default", dtype=dtype)
    count = fields.optional_integer("num_aux_hidden_states")
    raw = fields.integers("eagle_aux_hidden_state_layer_ids")
    if raw is None:
        ids, used = _default_ids(fields, num_layers), "default"
    else:
        used = _convention_of(raw, num_layers, fields.dialect) if convention == "auto" else convention
        ids = tuple(i - 1 for i in raw) if used == "input" else raw
    if count is not None and count != len(ids):
        problem = f"is {count}, but there are {len(ids)} layer ids {list(raw or ids)}"
        raise fields.error("num_aux_hidden_states", problem)
    check_ids(fields, raw or ids, ids, target, used)
    return AuxSpec(ids=ids, convention=cast(Literal["output", "input", "default"], used), dtype=dtype)


def _has_aux(fields: Fields) -> bool:
    """Whether the head reads layer outputs; otherwise it reads the target's hidden behind its final norm."""
    return fields.flag("use_aux_hidden_state", default=True)


def _default_ids(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The trainers' default triple: inputs of layers 2, L//2 and L-3, which are the outputs one layer
    below.
    """
    if num_layers < 6:
        problem = f"is absent, and a target of {num_layers} layers has no default"
        raise fields.error("eagle_aux_hidden_state_layer_ids", problem)
    return (1, num_layers // 2 - 1, num_layers - 4)


def _convention_of(raw: tuple[int, ...], num_layers: int, dialect: int) -> str:
    if dialect == 4 or raw == (2, num_layers // 2, num_layers - 3) or max(raw) == num_layers:
        return "input"
    return "output"


def check_ids(
    fields: Fields,
    raw: tuple[int, ...],
    ids: tuple[int, ...],
    target: ModelConfig,
    used: str,
    *,
    key: str = "eagle_aux_hidden_state_layer_ids",
) -> None:
    """Raises CheckpointError unless `ids` are distinct layers of `target`.

    `raw` is the value in the config at `key`, for the error.
    """
    num_layers, model = target.num_layers, target.architecture
    if len(set(raw)) != len(raw):
        raise fields.error(
            key, f"{list(raw)} names a layer of the {model} target twice; each feature needs its own layer"
        )
    low = 1 if used == "input" else 0
    for value, layer in zip(raw, ids, strict=True):
        if not 0 <= layer < num_layers:
            raise fields.error(
                key,
                f"{list(raw)}: {value} is out of range; a {model} target of {num_layers} layers has ids "
                f"{low} to {num_layers - 1 + low} ({used} convention); use the target that the head was "
                "trained for",
            )


def _target_hidden(fields: Fields, hidden: int, target: ModelConfig, target_path: Path | None) -> int:
    declared = fields.optional_integer("target_hidden_size") or hidden
    if declared != target.hidden_size:
        where = f" ({target_path / 'config.json'})" if target_path is not None else ""
        raise CheckpointError(
            f"{fields.file}: head trained for another hidden size: it expects a target of hidden size "
            f"{declared}, but the target model{where} has {target.hidden_size}; use the head that was "
            "trained for this target"
        )
    return declared


def _vocabulary(fields: Fields, target: ModelConfig) -> tuple[int, int]:
    vocab = fields.integer("vocab_size")
    if vocab != target.vocab_size:
        raise fields.error(
            "vocab_size",
            f"is {vocab}, but the target has {target.vocab_size}; use the head trained for this target",
        )
    draft = fields.optional_integer("draft_vocab_size") or vocab
    if draft > vocab:
        raise fields.error("draft_vocab_size", f"is {draft}, more than the vocabulary of {vocab}")
    return vocab, draft
