"""The decoder layer of a dense model by its config; targets and MTP modules consist of such layers."""

import torch

from ...kernels.row_ops import FASTEST, RowOps
from .config import ModelConfig
from .layers import DecoderLayer, GatedMLP, RMSNorm, SelfAttention


def decoder_layer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: RowOps = FASTEST
) -> DecoderLayer:
    """One layer of `config`, with uninitialised weights in `dtype` on `device`, computed by `ops`."""
    attention = SelfAttention(
        config.hidden_size,
        config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        ops=ops,
    )
    mlp = GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        dtype=dtype,
        device=device,
        ops=ops,
    )
    norms = [
        RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device, ops=ops)
        for _ in range(2)
    ]
    return DecoderLayer(attention, mlp, *norms)
