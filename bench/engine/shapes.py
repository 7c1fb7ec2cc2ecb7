"""The model shapes of `baton bench engine`: built-in ones, or a directory's config.json, with a matching
head."""

import json
from dataclasses import replace
from pathlib import Path

from ...cluster.errors import ConfigError
from ...engine.errors import CheckpointError
from ...engine.hub import resolve_checkpoint
from ...engine.models.config import ModelConfig
from ...engine.models.moe import GPT_OSS_NAMES
from ...engine.models.quant.registry import KEY as QUANT_KEY
from ...engine.models.quant.registry import read_quantisation
from ...engine.models.registry import load_model_config
from ...engine.speculative.drafters.eagle_config import EagleConfig, load_eagle_config
from ...engine.speculative.drafters.spec_config import Eagle3Config, load_draft_config

# The config.json of each shape; "toy" is for a first try and for tests.
SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "gemma-3-12b": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131072,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 102400,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "max_position_embeddings": 163840,
    },
    "toy-latent": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "toy-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    },
    "toy-gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "sliding_window": 32,
        "max_position_embeddings": 512,
    },
    "toy": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    },
}
# The forms of `--quantize`, by the `quantization_config` of published checkpoints.
FORMS: dict[str, dict[str, object]] = {
    "fp8": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": {
                    "type": "float",
                    "num_bits": 8,
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head"],
    },
    "fp8-blocks": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
}
MXFP4 = "mxfp4"  # the form of the experts of gpt-oss alone
MXFP4_FORM: dict[str, object] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
DRAFT_VOCABULARY = 32000  # draft vocabulary of published EAGLE3 heads for models of this size


def target_config(
    shape: str, model: str, folder: Path, quantize: str = "none", layers: int = 0
) -> ModelConfig:
    """The config of the checkpoint `model` if one is given, else of the built-in `shape`, with its first
    `layers` layers; 0: all of them.

    `folder` is for temporary files. `quantize`: a name in `FORMS`, MXFP4, or "none" for the checkpoint's own
    form. Raises CheckpointError for a config that cannot be read or is not supported, ConfigError for more
    layers than the shape has.
    """
    if model:
        found = load_model_config(resolve_checkpoint(model))
    else:
        dense = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        config = dense | {"eos_token_id": None} | SHAPES[shape]  # answers do not end
        whole = int(str(config["num_hidden_layers"]))
        if layers > whole:
            raise ConfigError(f"--layers {layers}: {shape} has {whole}; lower it")
        config["num_hidden_layers"] = layers or whole
        found = load_model_config(_write(folder / "target", config))
    if quantize == "none":
        return found
    if quantize != MXFP4:
        section = {QUANT_KEY: FORMS[quantize]}
        return replace(found, quant=read_quantisation(section, Path(f"--quantize {quantize}")))
    if found.moe is None or found.moe.names is not GPT_OSS_NAMES:
        raise CheckpointError(f"--quantize {MXFP4}: {found.architecture} has no experts in it; take gpt-oss")
    return replace(found, moe=replace(found.moe, is_packed=True))


def form_keys(target: ModelConfig, quantize: str) -> dict[str, object]:
    """What config.json has beside the shape in a checkpoint of `target`, made by `target_config` with
    `quantize`.

    Raises CheckpointError for gpt-oss in a form that its checkpoints do not have.
    """
    if quantize == "none":
        return {}
    if quantize == MXFP4:
        return {QUANT_KEY: MXFP4_FORM}
    if target.moe is not None and target.moe.names is GPT_OSS_NAMES:
        raise CheckpointError(
            f"--quantize {quantize}: no checkpoint of {target.architecture} has this form; take {MXFP4}"
        )
    return {QUANT_KEY: FORMS[quantize]}


def head_config(target: ModelConfig, dtype: str, draft_vocab_size: int, folder: Path) -> Eagle3Config:
    """The config of a one-layer EAGLE3 head of the target's width, with three captured layers."""
    last = target.num_layers - 1
    ids = dict.fromkeys((min(1, last), target.num_layers // 2 - 1, max(last - 3, 0)))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(draft_vocab_size, target.vocab_size),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i for i in ids if i >= 0]},
    }
    return load_draft_config(_write(folder / "head", config), target, dtype=dtype, convention="output")


def eagle_head_config(target: ModelConfig, dtype: str, folder: Path) -> EagleConfig:
    """The config of a one-layer EAGLE head of the target's width, with a bias in `fc`."""
    config = {
        "architectures": ["LlamaForCausalLMEagle"],
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "bias": True,
    }
    return load_eagle_config(_write(folder / "eagle", config), target, dtype=dtype)


def _write(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
