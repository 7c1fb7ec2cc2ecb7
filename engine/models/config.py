"""The config.json of a checkpoint: shapes and switches of a decoder, with checks of every key."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from ...kernels.mxfp4 import BLOCK
from ..kv.layouts import MHALayout, PageLayout
from .config_reader import ConfigReader, read_json
from .families import (
    END_TOKENS,
    FAMILIES,
    HEAD_DIMS,
    default_head_dim,
    default_positions,
    reached_positions,
    with_defaults,
)
from .layer_forms import PLAIN_LAYERS, LayerForms, read_forms
from .moe import GPT_OSS_NAMES, MIXTRAL_NAMES, QWEN_NAMES, MoEConfig
from .quant.config import QuantConfig
from .quant.registry import KEY as QUANT_KEY
from .quant.registry import read_quantisation
from .rope import RopeConfig

logger = logging.getLogger(__name__)

MTP_KEY = "num_nextn_predict_layers"

GPT_OSS_ROPE = MappingProxyType(
    {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
)
NORMED = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")  # families that normalise q and k
EXPERT_KEYS = ("num_experts", "num_local_experts")  # configs use either
ROUTED = ("deepseek_v2", "deepseek_v3", "glm4_moe")  # families whose experts are read by `routed_config`
UNBIASED = ("mistral", "mixtral", "phi3")  # families without a bias in attention, whatever the config says
BIASED = ("qwen2", "mimo")  # families with a bias of q, k and v, and none of the output projection


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a Llama-family decoder. `dtype` is the checkpoint's own ("bfloat16", ...).

    `attention_bias`: the bias of q, k and v. `attention_output_bias`: the bias of the output projection.
    `num_mtp_modules`: layers behind the last one that only a drafter reads. `moe`: the experts, None for a
    dense model. `quant`: the form of the matrices of the layers, None for the model's dtype. `forms`: what
    the layers have that a Llama's do not. `kv_dtype`: that of stored keys and values, a name in
    `quant.kv_scales.KV_DTYPES`. `is_text_part`: the checkpoint also has models of images, see `text_part`.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool = False
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_mtp_modules: int = 0
    moe: MoEConfig | None = None
    quant: QuantConfig | None = None
    kv_dtype: str = "auto"
    forms: LayerForms = PLAIN_LAYERS
    is_text_part: bool = False

    @property
    def row_width(self) -> int:
        """The intermediate size by which the activations of a row's MLP are counted."""
        if self.moe is None:
            return self.intermediate_size
        experts = self.moe.row_width(self.hidden_size)
        return max(experts, self.intermediate_size) if self.moe.dense_layers else experts

    @property
    def has_choices(self) -> bool:
        """Whether a row chooses what it computes with, as experts: a rounding may change a choice, and then
        the row's result is another one.
        """
        return self.moe is not None

    @property
    def query_heads(self) -> int:
        """Heads of q that a layer hands to attention."""
        return self.num_heads

    @property
    def value_dim(self) -> int:
        """The width of a head's value."""
        return self.head_dim

    @property
    def latent_outputs(self) -> int:
        """Values of a head that are made of a latent; 0: keys and values are stored themselves."""
        return 0

    @property
    def context_heads(self) -> int:
        """KV heads of `head_dim` that take as much memory as what attention copies of a context row."""
        return self.num_kv_heads

    @property
    def rotary_size(self) -> int:
        """The width of the rotary tables."""
        return self.head_dim

    def kv_layout(self, num_layers: int, page_size: int, dtype: torch.dtype) -> PageLayout:
        """The layout of the KV of `num_layers` such layers in pages of `page_size` tokens."""
        return MHALayout.of(self, num_layers=num_layers, page_size=page_size, dtype=dtype)


def read_dense_config(reader: ConfigReader, *, architecture: str) -> ModelConfig:
    """The config of one of `FAMILIES`, with the EOS ids of generation_config.json beside it.

    Raises CheckpointError, naming file, key, value and remedy, for a missing, malformed or unsupported
    setting.
    """
    family = FAMILIES[architecture]
    reader = ConfigReader(with_defaults(reader.raw, family), reader.source)
    if family == "gpt_oss" and not (reader.raw.get("rope_scaling") or reader.raw.get("rope_parameters")):
        reader = ConfigReader({**reader.raw, "rope_scaling": GPT_OSS_ROPE}, reader.source)
    _refuse_unsupported(reader, family)
    forms, rope = read_forms(reader, family)
    if family in ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"):
        moe: MoEConfig | None = _read_experts(reader, family)
    else:
        moe = None
        if family not in ROUTED:
            _refuse_experts(reader)
    hidden, heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    kv_heads, head_dim = _head_shape(reader, family, hidden, heads)
    bias = reader.flag("attention_bias", False) and family not in UNBIASED
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=reader.count("intermediate_size"),
        num_layers=reader.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=reader.count("vocab_size"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=reached_positions(
            reader.raw, reader.count("max_position_embeddings", default_positions(family))
        ),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        attention_bias=True if family in BIASED else bias,
        attention_output_bias=False if family in BIASED else bias,
        mlp_bias=reader.flag("mlp_bias", False) if family in ("llama", "smollm3") else False,
        qk_norm=family in NORMED,
        eos_token_ids=_eos_token_ids(reader, family, reader.source.parent / "generation_config.json"),
        dtype=_dtype(reader),
        num_mtp_modules=reader.count(MTP_KEY) if reader.raw.get(MTP_KEY) else 0,
        moe=moe,
        quant=None if family == "gpt_oss" else read_quantisation(reader.raw, reader.source),
        forms=forms,
    )


def _refuse_experts(reader: ConfigReader) -> None:
    for key in EXPERT_KEYS:
        if reader.raw.get(key):
            raise reader.error(key, "this architecture has no experts here; use a dense checkpoint of it")


def _read_experts(reader: ConfigReader, family: str) -> MoEConfig:
    """The experts of a Qwen3-MoE or Mixtral config, with each family's own defaults."""
    key = next((key for key in EXPERT_KEYS if reader.raw.get(key) is not None), EXPERT_KEYS[0])
    num_experts = reader.count(key)
    top_k = reader.count("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.error("num_experts_per_tok", f"it must not be above {key} = {num_experts}")
    if family == "gpt_oss":
        return _gpt_oss_experts(reader, num_experts, top_k)
    if family == "mixtral":
        return MoEConfig(
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=reader.count("intermediate_size"),
            is_normalised=True,
            names=MIXTRAL_NAMES,
        )
    step = reader.count("decoder_sparse_step", 1)
    listed = reader.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int and layer >= 0 for layer in listed):
        raise reader.error("mlp_only_layers", "a list of layer numbers is required here")
    layers = range(reader.count("num_hidden_layers"))
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.count("moe_intermediate_size"),
        is_normalised=reader.flag("norm_topk_prob", False),
        names=QWEN_NAMES,
        dense_layers=frozenset(layer for layer in layers if layer in listed or (layer + 1) % step),
    )


def _gpt_oss_experts(reader: ConfigReader, num_experts: int, top_k: int) -> MoEConfig:
    """The experts of a gpt-oss config, in floats or, as published, in 4 bits."""
    found = reader.raw.get(QUANT_KEY)
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if method not in (None, "mxfp4"):
        raise reader.error(QUANT_KEY, "this architecture has experts in mxfp4 or in floats")
    inner, hidden = reader.count("intermediate_size"), reader.count("hidden_size")
    if method is not None and (inner % BLOCK or hidden % BLOCK):
        raise reader.error("intermediate_size", f"mxfp4 needs sizes that are multiples of {BLOCK}")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        is_normalised=True,  # a softmax over the chosen ones
        names=GPT_OSS_NAMES,
        limit=reader.number("swiglu_limit", 7.0),
        alpha=reader.number("swiglu_alpha", 1.702),
        is_packed=method is not None,
    )


def _refuse_unsupported(reader: ConfigReader, family: str) -> None:
    if family in ("gemma2", "gemma3_text"):
        if reader.raw["hidden_activation"] != "gelu_pytorch_tanh":
            raise reader.error("hidden_activation", "only gelu_pytorch_tanh is supported")
        if reader.flag("use_bidirectional_attention", False):
            raise reader.error("use_bidirectional_attention", "an encoder is not supported; set it to false")
    elif reader.raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise reader.error("hidden_act", "only silu is supported")


def _head_shape(reader: ConfigReader, family: str, hidden: int, heads: int) -> tuple[int, int]:
    """(KV heads, head dimension), with each family's own defaults."""
    kv_heads = reader.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"it must divide num_attention_heads = {heads}")
    head_dim = reader.count("head_dim", default_head_dim(family, hidden, heads))
    if reader.raw.get("head_dim") is None and family not in HEAD_DIMS and hidden % heads:
        raise reader.error(
            "num_attention_heads", f"it must divide hidden_size = {hidden}, or head_dim must be given"
        )
    if head_dim % 2:
        raise reader.error(
            "head_dim", f"head dimension {head_dim} is odd; rotary embedding needs an even one"
        )
    return kv_heads, head_dim


def _eos_token_ids(reader: ConfigReader, family: str, generation_path: Path) -> tuple[int, ...]:
    """The EOS ids of both files, generation_config.json first, each once, without ids outside the
    vocabulary.
    """
    readers = [reader]
    if generation_path.exists():
        readers.insert(0, ConfigReader(read_json(generation_path), generation_path))
    found: dict[int, None] = {}
    for each in readers:
        value = each.raw.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise each.error("eos_token_id", "a token id or a list of token ids is required here")
            found[token] = None
    if not found and family in END_TOKENS and not any("eos_token_id" in each.raw for each in readers):
        found[END_TOKENS[family]] = None
    vocab_size = reader.count("vocab_size")
    unknown = [token for token in found if token >= vocab_size]
    if unknown:
        logger.warning(
            "%s: end tokens %s are outside the vocabulary of %d, left out", reader.source, unknown, vocab_size
        )
    return tuple(token for token in found if token < vocab_size)


def _dtype(reader: ConfigReader) -> str:
    key = "dtype" if reader.raw.get("dtype") else "torch_dtype"
    name = str(reader.raw.get(key) or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise reader.error(key, "supported are float32, float16 and bfloat16")
    return name
