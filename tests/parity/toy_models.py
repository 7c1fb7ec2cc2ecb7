"""Tiny random checkpoints of each family, written by transformers itself."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

# Models of images, as small as can be: no image reaches them.
TOWER = {"hidden_size": 32, "intermediate_size": 64}
SQUARES = TOWER | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
QWEN_TOWER = TOWER | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
OF_IMAGES = {
    "gemma3": SQUARES | {"model_type": "siglip_vision_model"},
    "mistral": SQUARES | {"model_type": "pixtral"},
    "qwen2_5_vl_text": QWEN_TOWER,
    "qwen3_vl_text": QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": []},
}
OF_WHOLES = {"gemma3": {"mm_tokens_per_image": 4}}
TEXT_TYPES = {"gemma3": "gemma3_text"}


def whole(config_class: type[PretrainedConfig], family: str) -> Callable[..., PretrainedConfig]:
    """Makes the config of a checkpoint with a text model of `family` and a model of images."""

    def config(**shape: object) -> PretrainedConfig:
        text = {**shape, "model_type": TEXT_TYPES.get(family, family)}
        is_tied = bool(text.pop("tie_word_embeddings"))
        attention = {"attn_implementation": text.pop("attn_implementation", "eager")}
        sizes = {"text_config": text, "vision_config": OF_IMAGES[family], **OF_WHOLES.get(family, {})}
        return config_class(**sizes, tie_word_embeddings=is_tied, **attention)

    return config


FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "gemma3_whole": (whole(Gemma3Config, "gemma3"), Gemma3ForConditionalGeneration),
    "mistral3": (whole(Mistral3Config, "mistral"), Mistral3ForConditionalGeneration),
    "qwen2_5_vl": (whole(Qwen2_5_VLConfig, "qwen2_5_vl_text"), Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (whole(Qwen3VLConfig, "qwen3_vl_text"), Qwen3VLForConditionalGeneration),
}
# Windows shorter than the prompts, and caps and scales that matter for random weights.
GEMMA = {
    "head_dim": 32,
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
DENSE = {
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 9, "head_dim": 24},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0},
    "gemma3": GEMMA | {"sliding_window_pattern": 2},
    "gemma3_whole": GEMMA | {"sliding_window_pattern": 2},
    "mistral3": {"sliding_window": None, "head_dim": 24},
    "qwen2_5_vl": {"rope_parameters": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 5000.0}},
    "qwen3_vl": {
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    },
    "phi3": {"pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "gpt_oss": {
        "head_dim": 32,
        "sliding_window": 9,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "attn_implementation": "eager",
    },
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# latents so narrow that prompts of 40 tokens are expanded; the first layer is dense
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
# the second layer of the Qwen3-MoE model is dense
EXPERTS = {
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
    },
    "deepseek_v2": LATENT | {"topk_method": "greedy", "n_shared_experts": 2},
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    "glm4_moe": {
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
}
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_toy_checkpoint(
    path: Path, family: str, *, seed: int = 0, shard_size: str | int | None = None, **config: object
) -> None:
    """Writes a float32 checkpoint; `shard_size` (max_shard_size) splits it, `config` overrides SHAPE."""
    config_class, model_class = FAMILIES[family]
    shape = SHAPE | DENSE.get(family, {}) | EXPERTS.get(family, {}) | config
    model = model_class(config_class(**shape))
    _randomise(model, seed)
    model.save_pretrained(path, max_shard_size=shard_size or "5GB")


def reference_model(path: Path) -> PreTrainedModel:
    """The checkpoint as transformers loads it, in float32."""
    family = next(
        name for name in FAMILIES if f'"{FAMILIES[name][1].__name__}"' in (path / "config.json").read_text()
    )
    # transformers 5.17 ignores caps of logits in its default attention, and the limit of gpt-oss experts
    eager = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = FAMILIES[family][1].from_pretrained(path, dtype=torch.float32, **eager).eval()
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = model.config.swiglu_limit
    return model


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """`[T, V]` of one prompt."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def reference_greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The `count` tokens that argmax chooses, end-of-sequence ignored, each from a fresh whole forward."""
    out = list(ids)
    for _ in range(count):
        out.append(int(reference_logits(model, out)[-1].argmax()))
    return out[len(ids) :]


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights that spread the logits and leave no parameter at a value (0, 1) that would hide its absence."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.15 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
