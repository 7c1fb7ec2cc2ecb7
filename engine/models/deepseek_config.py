"""The config of DeepSeek-V2 and V3: attention over latents, and their experts."""

from dataclasses import dataclass, fields

import torch

from ..kv.layouts import MLALayout
from .config import ModelConfig, read_dense_config
from .config_reader import ConfigReader
from .rope import score_factor
from .routed_config import read_sigmoid_experts, read_softmax_experts

NORM_EPS = 1e-6  # of the norms of latents, which no config states


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelConfig):
    """A config of attention over latents, with the names of `kernels.latent_attention`.

    `rank` R; `rope_size` P; `key_size` F and `value_size` V of a head. `query_rank`: the rank of the queries'
    projection, 0: they have one matrix. `is_interleaved`: neighbours are rotated together, as checkpoints of
    DeepSeek have it; otherwise halves. `score_scale`: the factor of scores. `head_dim` is F+P.
    """

    rank: int
    rope_size: int
    key_size: int
    value_size: int
    query_rank: int
    is_interleaved: bool
    score_scale: float

    @property
    def value_dim(self) -> int:
        return self.value_size

    @property
    def latent_outputs(self) -> int:
        return self.key_size + self.value_size

    @property
    def rotary_size(self) -> int:
        return self.rope_size

    @property
    def context_heads(self) -> int:
        """As of `ModelConfig`: the latents, and as much for the keys and values that are made of them."""
        return -(-(self.rank + self.rope_size) // self.head_dim)

    def kv_layout(self, num_layers: int, page_size: int, dtype: torch.dtype) -> MLALayout:
        return MLALayout(
            page_size=page_size,
            num_layers=num_layers,
            rank=self.rank,
            rope_size=self.rope_size,
            scale=self.score_scale,
            dtype=dtype,
        )


def read_deepseek_config(reader: ConfigReader, *, architecture: str) -> LatentConfig:
    """The config of a DeepSeek-V2 or V3 model, with the EOS ids of generation_config.json beside it.

    Raises CheckpointError, naming file, key, value and remedy, for a missing, malformed or unsupported
    setting.
    """
    is_v2 = architecture == "DeepseekV2ForCausalLM"
    dense = read_dense_config(reader, architecture=architecture)
    query_rank = reader.count("q_lora_rank") if reader.raw.get("q_lora_rank") is not None else 0
    if dense.attention_bias and not query_rank:
        raise reader.error("attention_bias", "biases need q_lora_rank here; set it to false")
    if reader.flag("mlp_bias", False):
        raise reader.error("mlp_bias", "MLPs of this architecture have no bias here; set it to false")
    rope_size, key_size = reader.count("qk_rope_head_dim"), reader.count("qk_nope_head_dim")
    if rope_size % 2:
        raise reader.error("qk_rope_head_dim", "rotary embedding needs an even width")
    rank = reader.count("kv_lora_rank")
    if rank % 2:
        raise reader.error("kv_lora_rank", "an odd rank is not supported")
    own = {field.name: getattr(dense, field.name) for field in fields(dense)}
    return LatentConfig(
        **own
        | {
            "moe": read_softmax_experts(reader) if is_v2 else read_sigmoid_experts(reader),
            "head_dim": key_size + rope_size,
            "num_kv_heads": 1,
        },
        rank=rank,
        rope_size=rope_size,
        key_size=key_size,
        value_size=reader.count("v_head_dim"),
        query_rank=query_rank,
        is_interleaved=True if is_v2 else reader.flag("rope_interleave", True),
        score_scale=(key_size + rope_size) ** -0.5 * score_factor(reader.raw, reader.source),
    )
