"""Tells configs of multi-token-prediction (MTP) modules from those of other drafters. Free of torch."""

from collections.abc import Mapping

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Architectures whose checkpoints hold modules even if the config has no count.
ARCHITECTURES = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    }
)
UNCOUNTED = 1  # modules of a checkpoint without a count


def is_mtp(raw: Mapping[str, object]) -> bool:
    """Whether `raw`, the config.json of a draft checkpoint, is that of a target with MTP modules."""
    named = raw.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    if raw.get("speculators_model_type") == "mtp" or first in ARCHITECTURES:
        return True
    is_head = "eagle" in first.lower() or raw.get("draft_vocab_size") is not None
    return not is_head and any(raw.get(key) for key in COUNT_KEYS)
