"""Configs of the experts of DeepSeek, GLM and Qwen2-MoE: shared experts, groups, sigmoid scores."""

from collections.abc import Sequence
from dataclasses import replace

from .config import ModelConfig, read_dense_config
from .config_reader import ConfigReader
from .moe import DEEPSEEK_NAMES, QWEN_NAMES, MoEConfig

# Names of the number of experts: of the checkpoints, and of `transformers`.
ROUTED_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")
GREEDY, GROUP_LIMITED, NO_AUX = "greedy", "group_limited_greedy", "noaux_tc"


def read_glm_config(reader: ConfigReader, *, architecture: str) -> ModelConfig:
    """The config of a GLM-4.5 model: attention with KV heads, the experts of DeepSeek-V3.

    Raises CheckpointError, naming file, key, value and remedy, for a missing, malformed or unsupported
    setting.
    """
    dense = read_dense_config(reader, architecture=architecture)
    return replace(
        dense,
        moe=read_sigmoid_experts(reader),
        attention_output_bias=False,
        qk_norm=reader.flag("use_qk_norm", False),
    )


def read_qwen2_moe_config(reader: ConfigReader, *, architecture: str) -> ModelConfig:
    """The config of a Qwen1.5-MoE or Qwen2-MoE model: a shared expert with a gate.

    Raises CheckpointError as `read_glm_config`.
    """
    dense = read_dense_config(reader, architecture=architecture)
    assert dense.moe is not None, dense
    shared = reader.count("shared_expert_intermediate_size")
    bias = reader.flag("qkv_bias", True)
    moe = replace(dense.moe, names=QWEN_NAMES, shared_size=shared, has_shared_gate=True)
    return replace(dense, moe=moe, attention_bias=bias, attention_output_bias=False)


def read_sigmoid_experts(reader: ConfigReader) -> MoEConfig:
    """The experts of DeepSeek-V3 and GLM-4.5: sigmoid scores, and groups that count as their two best.

    Raises CheckpointError as `read_glm_config`.
    """
    _one_of(reader, "scoring_func", ("sigmoid",))
    _one_of(reader, "topk_method", (NO_AUX,))
    num_groups = reader.count("n_group", 1)
    return _checked(
        reader,
        replace(
            _plain_experts(reader, is_normalised=reader.flag("norm_topk_prob", True)),
            is_sigmoid=True,
            has_choice_bias=True,
            num_groups=num_groups,
            kept_groups=reader.count("topk_group", 1),
            best_of_group=2 if num_groups > 1 else 1,
        ),
    )


def read_softmax_experts(reader: ConfigReader) -> MoEConfig:
    """The experts of DeepSeek-V2: softmax scores, chosen from all groups or from the best ones.

    Raises CheckpointError as `read_glm_config`.
    """
    _one_of(reader, "scoring_func", ("softmax",))
    method = _one_of(reader, "topk_method", (GREEDY, GROUP_LIMITED))
    if reader.flag("norm_topk_prob", False):
        raise reader.error(
            "norm_topk_prob", "weights of this architecture are not normalised; set it to false"
        )
    moe = _plain_experts(reader, is_normalised=False)
    if method == GROUP_LIMITED:
        moe = replace(moe, num_groups=reader.count("n_group"), kept_groups=reader.count("topk_group"))
    return _checked(reader, moe)


def _plain_experts(reader: ConfigReader, *, is_normalised: bool) -> MoEConfig:
    key = next((key for key in ROUTED_KEYS if reader.raw.get(key) is not None), ROUTED_KEYS[0])
    if reader.count("moe_layer_freq", 1) != 1:
        raise reader.error(
            "moe_layer_freq", "only 1 is supported: every layer behind the dense ones has experts"
        )
    size = reader.count("moe_intermediate_size")
    dense = reader.raw.get("first_k_dense_replace") or 0
    if type(dense) is not int or dense < 0:
        raise reader.error("first_k_dense_replace", "a number of layers is required here")
    num_shared = reader.count("n_shared_experts") if reader.raw.get("n_shared_experts") else 0
    return MoEConfig(
        num_experts=reader.count(key),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=size,
        is_normalised=is_normalised,
        names=DEEPSEEK_NAMES,
        dense_layers=frozenset(range(dense)),
        scale=reader.number("routed_scaling_factor", 1.0),
        is_float32_router=True,
        shared_size=num_shared * size,
    )


def _checked(reader: ConfigReader, moe: MoEConfig) -> MoEConfig:
    """`moe`, unless no layer can choose so: then CheckpointError."""
    fault = moe.routing.fault(moe.num_experts)
    if fault:
        raise reader.error("num_experts_per_tok", f"{fault}; check n_group, topk_group and the experts")
    return moe


def _one_of(reader: ConfigReader, key: str, known: Sequence[str]) -> str:
    """The value of `key`, the first of `known` by default. Raises CheckpointError for one that is unknown."""
    value = reader.raw.get(key) or known[0]
    if value not in known:
        raise reader.error(key, f"this architecture supports {' and '.join(known)}")
    return str(value)
