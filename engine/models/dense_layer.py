"""The decoder layer of a model by its config; targets and draft models consist of such layers."""

from functools import partial
from typing import Protocol

import torch

from ...kernels.attention_form import AttentionForm
from ...kernels.row_ops import FASTEST, RowOps
from .config import ModelConfig
from .deepseek_config import LatentConfig
from .gpt_oss_experts import GptOssExperts
from .latent_block import LatentAttention
from .layer_forms import PLAIN_LAYERS, LayerForms, NormPlaces
from .layers import (
    DecoderLayer,
    GatedMLP,
    Linear,
    PostNormLayer,
    QKNorm,
    RMSNorm,
    SandwichLayer,
    SelfAttention,
)
from .moe import GPT_OSS_NAMES, MixtureOfExperts
from .quant.kv_scales import FP8_KV, KVScales
from .quant.projections import Projections


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
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ops: RowOps = FASTEST,
    layer: int = 0,
    projections: Projections | None = None,
) -> DecoderLayer:
    """Layer `layer` of `config`, with uninitialised weights in `dtype` on `device`, computed by `ops`.

    `projections`: those of the model, by default plain ones.
    """
    made, prefix = projections or Projections(None), f"model.layers.{layer}."
    experts: MixtureOfExperts | None = None
    if config.moe is not None and layer not in config.moe.dense_layers:
        is_gpt_oss = config.moe.names is GPT_OSS_NAMES
        experts = (GptOssExperts if is_gpt_oss else MixtureOfExperts)(
            config.hidden_size,
            config.moe,
            dtype=dtype,
            device=device,
            ops=ops,
            projections=made,
            prefix=f"{prefix}{config.moe.names.block}.",
        )
        if isinstance(experts, GptOssExperts):
            made.remember(experts, f"{prefix}mlp.experts.")
    if isinstance(config, LatentConfig):
        width, eps = config.hidden_size, config.rms_norm_eps
        norm, post_norm = (RMSNorm(width, eps, dtype=dtype, device=device, ops=ops) for _ in range(2))
        mlp = experts or GatedMLP(
            width,
            config.intermediate_size,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            ops=ops,
            linear=made.under(f"{prefix}mlp.", partial(Linear, ops=ops)),
        )
        attention = LatentAttention(config, dtype, device, ops, made, f"{prefix}self_attn.")
        return DecoderLayer(attention, mlp, norm, post_norm)
    return sized_layer(
        config,
        dtype,
        device,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        mlp_bias=config.mlp_bias,
        qk_norm=config.qk_norm,
        ops=ops,
        experts=experts,
        projections=made,
        prefix=prefix,
        kv_scales=_kv_scales(config, device),
        forms=config.forms,
        layer=layer,
    )


def _kv_scales(config: ModelConfig, device: torch.device) -> KVScales | None:
    """The scales of keys and values of a layer; None where they are stored as they are."""
    if config.kv_dtype != FP8_KV or config.quant is None or not config.quant.has_kv_scales:
        return None
    return KVScales(config.num_kv_heads, device)


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
    experts: MixtureOfExperts | None = None,
    projections: Projections | None = None,
    prefix: str = "",
    kv_scales: KVScales | None = None,
    forms: LayerForms = PLAIN_LAYERS,
    layer: int = 0,
) -> DecoderLayer:
    """As `decoder_layer`, for a config that names its switches in another way.

    `experts` take the place of the MLP. `prefix`: the beginning of the layer's names in the checkpoint.
    `forms`: what the layers of the model have that a Llama's do not.
    """
    width, eps = sizes.hidden_size, sizes.rms_norm_eps
    made, plain = projections or Projections(None), partial(Linear, ops=ops)
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
        qk_norm=(
            QKNorm(
                eps=eps,
                is_whole=forms.has_whole_norm,
                offset=forms.norm_offset,
                whole_heads=forms.whole_heads,
            )
            if qk_norm
            else None
        ),
        ops=ops,
        form=AttentionForm(forms.window(layer), forms.softcap, None, forms.scale),
        has_sinks=forms.has_sinks,
        turns=layer not in forms.unturned,
        is_fused=forms.is_fused,
        linear=made.under(f"{prefix}self_attn.", plain),
        kv_scales=kv_scales,
    )
    norm = partial(RMSNorm, width, eps, dtype=dtype, device=device, ops=ops, offset=forms.norm_offset)
    input_norm, post_norm = norm(), norm()
    if experts is not None:
        return DecoderLayer(attention, experts, input_norm, post_norm, experts.config.names.block)
    mlp = GatedMLP(
        width,
        sizes.intermediate_size,
        bias=mlp_bias,
        dtype=dtype,
        device=device,
        ops=ops,
        linear=made.under(f"{prefix}mlp.", plain),
        is_gelu=forms.is_gelu,
        is_fused=forms.is_fused,
    )
    if forms.norms is NormPlaces.SANDWICH:
        return SandwichLayer(attention, mlp, (input_norm, post_norm, norm(), norm()))
    if forms.norms is NormPlaces.POST:
        return PostNormLayer(attention, mlp, (input_norm, post_norm))
    return DecoderLayer(attention, mlp, input_norm, post_norm)
