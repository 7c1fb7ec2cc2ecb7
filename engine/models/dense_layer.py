"""The decoder layer of a dense model by its config; targets and draft models consist of such layers."""

from typing import Protocol

import torch

from ...kernels.row_ops import FASTEST, RowOps
from .config import ModelConfig
from .layers import DecoderLayer, GatedMLP, RMSNorm, SelfAttention


class LayerSizes(Protocol):
    """The sizes of a layer in the config of a target or of a draft model."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...


def decoder_layer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, ops: RowOps = FASTEST
) -> DecoderLayer:
    """One layer of `config`, with uninitialised weights in `dtype` on `device`, computed by `ops`."""
    return sized_layer(
        config,
        dtype,
        device,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        ops=ops,
    )


def sized_layer(
    sizes: LayerSizes,
    dtype: torch.dtype,
    device: torch.device,
    *,
    qkv_bias: bool,
    output_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    ops: RowOps = FASTEST,
) -> DecoderLayer:
    """As `decoder_layer`, for a config that names its switches in another way."""
    width, eps = sizes.hidden_size, sizes.rms_norm_eps
    attention = SelfAttention(
        width,
        width,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        dtype=dtype,
        device=device,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm_eps=eps if qk_norm else None,
        ops=ops,
    )
    mlp = GatedMLP(width, sizes.intermediate_size, bias=mlp_bias, dtype=dtype, device=device, ops=ops)
    norms = [RMSNorm(width, eps, dtype=dtype, device=device, ops=ops) for _ in range(2)]
    return DecoderLayer(attention, mlp, *norms)
