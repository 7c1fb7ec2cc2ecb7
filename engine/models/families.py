"""The dense families and those like them: their classes in transformers, and the values of absent keys.

Without torch: `baton plan` reads configs with the same defaults.
"""

from collections.abc import Mapping
from types import MappingProxyType

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MiMoForCausalLM": "mimo",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "SparseBlockForCausalLM": "sparse_block",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "MistralForCausalLM": "mistral",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "GptOssForCausalLM": "gpt_oss",
}
GEMMA = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
# The values of keys that a config lacks, by the classes of transformers.
DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        "mistral": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        "gemma2": {
            **GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "gemma3_text": {
            **GEMMA,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "vocab_size": 262208,
        },
        "phi3": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        "olmo2": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        "smollm3": {"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4},
        "gpt_oss": {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "attention_bias": True,
            "rope_theta": 150000.0,
            "num_experts_per_tok": 4,
        },
    }
)
# The end token where neither config.json nor generation_config.json has the key: that of the class in
# transformers.
END_TOKENS: Mapping[str, int] = MappingProxyType(
    {
        "llama": 2,
        "mixtral": 2,
        "deepseek_v2": 2,
        "deepseek_v3": 1,
        "mistral": 2,
        "gemma2": 1,
        "gemma3_text": 1,
        "phi3": 32000,
        "olmo2": 50279,
        "smollm3": 128001,
    }
)
HEAD_DIMS: Mapping[str, int] = MappingProxyType({"qwen3": 128})  # where the key is absent or null


def default_head_dim(family: str, hidden: int, heads: int) -> int:
    """The head dimension of a config without one."""
    return HEAD_DIMS.get(family) or max(hidden // heads, 1)


def default_positions(family: str) -> int:
    """`max_position_embeddings` of a config without it."""
    return 32768 if family and family != "llama" else 2048


def reached_positions(raw: Mapping[str, object], positions: int) -> int:
    """The tokens of a context that a parsed config.json with `max_position_embeddings` of `positions` allows.

    yarn that names its original positions reaches `factor` times as many. Model cards tell to add it to a
    config whose `max_position_embeddings` stays as it is.
    """
    for scaling in (raw.get("rope_scaling"), raw.get("rope_parameters")):
        if not isinstance(scaling, Mapping) or (scaling.get("rope_type") or scaling.get("type")) != "yarn":
            continue
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(original, int):
            return max(positions, int(factor * original))
    return positions


def family_of(raw: Mapping[str, object]) -> str:
    """The family of a parsed config.json, by its architecture or, without one, its model type; "" for
    others.
    """
    names, model_type = raw.get("architectures"), raw.get("model_type")
    if not names:
        return model_type if isinstance(model_type, str) and model_type in FAMILIES.values() else ""
    name = names[0] if isinstance(names, list) else None
    return FAMILIES.get(name, "") if isinstance(name, str) else ""


def with_defaults(raw: Mapping[str, object], family: str) -> dict[str, object]:
    """A parsed config.json with the values of `family` for absent keys."""
    return {**DEFAULTS.get(family, {}), **raw}
