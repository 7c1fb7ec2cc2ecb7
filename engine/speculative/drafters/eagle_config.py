"""Reads the config.json of an EAGLE head (of the first or second version; the network is the same).

Such a head reads one feature, the target's hidden behind its final norm, and has no norm of its own before
the first layer or the output. It shares the target's output projection and proposes from the whole
vocabulary. Published configs are those of a target with one layer, so the absence of a draft vocabulary tells
them from EAGLE3 heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError
from ...models.config import ModelConfig
from ...models.config_reader import read_json
from .config_formats import Fields
from .spec_config import AuxSpec, HeadConfig, read_head

# SGLang's and vLLM's names; the authors' own checkpoints carry the name of the target's family.
NAMED = frozenset({"LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "Qwen2ForCausalLMEagle"})
FAMILY_NAMED = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM"})
BIASED_FAMILY = "Qwen2"  # its attention has biases of q, k and v
KNOWN_KEYS = frozenset(
    {
        "hidden_size",
        "intermediate_size",
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
        "sliding_window",
        "vocab_size",
        "draft_vocab_size",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "bias",
        "target_hidden_size",
        "eagle_config",
    }
)
# Model-Optimizer's switches, with their values for this network.
FIXED: Mapping[str, object] = {
    "use_aux_hidden_state": False,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """The config of an EAGLE head. `qkv_bias`: the attention's q, k and v have biases. `is_bias_stated`: the
    config tells whether `fc` has one; otherwise the weights do.
    """

    qkv_bias: bool
    is_bias_stated: bool

    def __repr__(self) -> str:
        return (
            f"<EagleConfig hidden {self.hidden_size}, {self.vocab_size} tokens, final hidden of the target>"
        )


def is_eagle(raw: Mapping[str, object]) -> bool:
    """Whether a config.json is that of an EAGLE head: by its name, or as one layer of a target's family."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if name in NAMED:
        return True
    is_alone = raw.get("num_hidden_layers") == 1 and raw.get("draft_vocab_size") is None
    return name in FAMILY_NAMED and is_alone and "speculators_model_type" not in raw


def load_eagle_config(
    path: Path, target: ModelConfig, *, target_path: Path | None = None, dtype: str | None = None
) -> EagleConfig:
    """Reads `path`/config.json for a head of `target`, which runs in `dtype` (None: that of its checkpoint).

    `target_path` appears in errors only. Raises CheckpointError naming file, key, value and remedy.
    """
    file = Path(path) / "config.json"
    raw = read_json(file)
    fields = Fields(file=file, dialect=0, values=dict(raw))
    _check_keys(fields)
    aux = AuxSpec(
        ids=(target.num_layers - 1,), convention="default", dtype=target.dtype if dtype is None else dtype
    )
    head = read_head(fields, target, aux, target_path, fc_bias=fields.flag("bias", default=True))
    if head.draft_vocab_size != head.vocab_size:
        raise fields.error(
            "draft_vocab_size",
            f"is {head.draft_vocab_size}: an EAGLE head proposes from the whole vocabulary",
        )
    if head.hidden_size != head.target_hidden_size:
        raise fields.error(
            "hidden_size",
            f"is {head.hidden_size}: an EAGLE head is as wide as its target, which has "
            f"{head.target_hidden_size}; use the head trained for this target",
        )
    biased = str(raw.get("architectures")).find(BIASED_FAMILY) >= 0
    common = vars(head) | {"reads_normed": True}
    return EagleConfig(
        **common, qkv_bias=head.attention_bias or biased, is_bias_stated=raw.get("bias") is not None
    )


def _check_keys(fields: Fields) -> None:
    fields.refuse_unknown(KNOWN_KEYS)
    if fields.values.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"is {fields.values['hidden_act']!r}, only 'silu' is supported")
    window = fields.values.get("sliding_window")
    if window is not None and fields.values.get("use_sliding_window") is not False:
        raise fields.error("sliding_window", f"is {window!r}, which is not supported; use a head without it")
    eagle = fields.values.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise CheckpointError(f"{fields.file}: eagle_config is {eagle!r}, expected an object")
    for key, value in eagle.items():
        if key not in FIXED or value != FIXED[key]:
            wanted = f"; an EAGLE head has {FIXED[key]!r}" if key in FIXED else " is not known to baton"
            raise fields.error(f"eagle_config.{key}", f"= {value!r}{wanted}")
