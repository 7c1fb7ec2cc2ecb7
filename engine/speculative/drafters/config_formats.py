"""Flattens the dialects of draft configs into one set of keys.

An unknown key raises CheckpointError, because it may change the result of the head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ...errors import CheckpointError

IdConvention = Literal["auto", "output", "input"]

# The token of the places that a parallel head (P-EAGLE) fills, by trainer; the first that is there counts.
MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")
_NETWORK_KEYS = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "max_position_embeddings",
        "vocab_size",
        "draft_vocab_size",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "bias",
        "target_hidden_size",
        "num_aux_hidden_states",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "norm_before_residual",
        "use_aux_hidden_state",
        "eagle_aux_hidden_state_layer_ids",
        "qk_norm",
        *MASK_TOKEN_KEYS,
    }
)
# Keys of the trainers and of transformers that do not affect the head's result. num_hidden_layers is among
# them because one public head carries its target's value. The loader counts the layers in the tensors
# instead.
IGNORED_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "num_hidden_layers",
        "pretraining_tp",
        "attention_dropout",
        "hidden_dropout",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "pruned_heads",
        "tie_encoder_decoder",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "is_decoder",
        "cross_attention_hidden_size",
        "add_cross_attention",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "unk_token_id",
        "target_model_name_or_path",
        "has_no_defaults_at_init",
    }
)
_SPECULATORS_KEYS = frozenset(
    {
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "transformer_layer_config",
        "embed_requires_grad",
        "has_own_embed_tokens",
    }
)
# Values that Model-Optimizer exports for the supported network. Any other value means another network.
_MODELOPT_FIXED: Mapping[str, object] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
_MODELOPT_ANY = frozenset({"next_layer_regular", "has_lm_head", "num_eagle_features"})
_EAGLE_CONFIG_KEYS = frozenset(
    {"use_aux_hidden_state", "eagle_aux_hidden_state_layer_ids", "norm_before_fc", "norm_before_residual"}
)
_NATIVE_ARCHITECTURES = frozenset(
    {
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLMEagle3Deep",
        "PEagleDraftModel",
    }
)
_PLAIN_TARGETS = frozenset({"llama", "qwen2", "qwen3", "mistral"})


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The flattened keys of one draft config, with typed readers. Each error names the file, the key and the
    value.
    """

    file: Path
    dialect: int
    values: dict[str, object]

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {key} {problem}")

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Raises CheckpointError for a key that is neither `known` nor ignored. A null key is no key."""
        for key in sorted(self.values.keys() - known - IGNORED_KEYS):
            if self.values[key] is not None:
                raise self.error(
                    key, f"= {self.values[key]!r} is not known to baton and may change what the head computes"
                )

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"is {value!r}, expected a whole number of at least 1")
        return value

    def integer(self, key: str, *, default: int | None = None) -> int:
        value = self.optional_integer(key)
        if value is None and default is None:
            raise self.error(key, "is missing; this is not the config of a complete draft checkpoint")
        return cast(int, default if value is None else value)

    def number(self, key: str, *, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"is {value!r}, expected a number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, expected true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
            raise self.error(key, f"is {value!r}, expected a list of layer ids")
        return tuple(value)


def flatten(file: Path, raw: dict[str, object]) -> Fields:
    """Returns one flat set of keys for a config in any dialect.

    Raises CheckpointError for an unknown dialect, architecture or key.
    """
    dialect = _dialect_of(file, raw)
    values = _flatten_speculators(file, raw) if dialect == 4 else _flatten_native(file, raw, dialect)
    fields = Fields(file=file, dialect=dialect, values=values)
    _check_activation(fields, values.pop("hidden_act", "silu"))
    if values.get("use_sliding_window") is False:
        values.pop("sliding_window", None)
    fields.refuse_unknown(_NETWORK_KEYS)
    return fields


def _dialect_of(file: Path, raw: dict[str, object]) -> int:
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind not in ("eagle3", "peagle"):
            raise CheckpointError(
                f"{file}: speculators_model_type {kind!r} is not supported; use an eagle3 or peagle head"
            )
        return 4
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if name in _NATIVE_ARCHITECTURES:
        eagle = raw.get("eagle_config")
        is_modelopt = isinstance(eagle, dict) and bool(
            eagle.keys() & (_MODELOPT_FIXED.keys() | _MODELOPT_ANY)
        )
        return 3 if is_modelopt else 2
    if name == "LlamaForCausalLM" and raw.get("draft_vocab_size") is not None:
        return 1
    raise CheckpointError(
        f"{file}: architectures {names!r} is not an EAGLE3 head that baton runs; supported are "
        "LlamaForCausalLMEagle3, speculators eagle3, and LlamaForCausalLM with a draft_vocab_size"
    )


def _flatten_native(file: Path, raw: dict[str, object], dialect: int) -> dict[str, object]:
    values = {k: v for k, v in raw.items() if k != "eagle_config"}
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise CheckpointError(f"{file}: eagle_config is {eagle!r}, expected an object")
    for key, value in eagle.items():
        if key in _MODELOPT_FIXED and value != _MODELOPT_FIXED[key]:
            raise CheckpointError(
                f"{file}: eagle_config.{key} = {value!r}: only {_MODELOPT_FIXED[key]!r} is supported"
            )
        if key not in _EAGLE_CONFIG_KEYS | _MODELOPT_ANY | _MODELOPT_FIXED.keys():
            raise CheckpointError(f"{file}: eagle_config.{key} = {value!r} is not known to baton")
        if key in _EAGLE_CONFIG_KEYS:
            values[key] = value
    if "num_eagle_features" in eagle:
        values.setdefault("num_aux_hidden_states", eagle["num_eagle_features"])
    if "use_aux_norm" in values:
        values["fc_norm"] = values.pop("use_aux_norm")
    target_kind = values.pop("target_model_type", None)
    if target_kind is not None and target_kind not in _PLAIN_TARGETS:
        raise CheckpointError(
            f"{file}: target_model_type = {target_kind!r}: supported are {sorted(_PLAIN_TARGETS)}"
        )
    # norm_output has a different meaning in each of two trainers. Only heads with per-feature norms were
    # trained with a normed feedback.
    if not values.get("fc_norm"):
        values.pop("norm_output", None)
    return values


def _flatten_speculators(file: Path, raw: dict[str, object]) -> dict[str, object]:
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(
            f"{file}: transformer_layer_config is {layer!r}, expected the config of the draft layer"
        )
    kind = layer.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise CheckpointError(
            f"{file}: transformer_layer_config.model_type = {kind!r}: supported are llama and qwen3"
        )
    values = dict(layer)
    values |= {k: v for k, v in raw.items() if k not in _SPECULATORS_KEYS}
    values["qk_norm"] = kind == "qwen3"
    values.setdefault("norm_before_residual", True)
    return values


def _check_activation(fields: Fields, value: object) -> None:
    if value != "silu":
        raise fields.error("hidden_act", f"is {value!r}, only 'silu' is supported")
