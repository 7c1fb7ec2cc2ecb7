"""How each parameter of a model is cut over the ranks of a worker.

Attention is cut by heads and an MLP, also that of each expert, by its intermediate size (Shoeybi et al.,
"Megatron-LM", 2019, arXiv 1909.08053): the first matrix of such a pair by its outputs, the second by its
inputs, whose partial results are summed over ranks. The vocabulary is cut by rows. Norms and routers are
whole on every rank; norms over all heads together are cut with the heads. A rank's model is a model of
`rank_config`, with sums behind two matrices of a layer.

By expert, a rank has the matrices of neighbouring experts whole and none of the others; routers stay whole.
Ranks that share nothing but the experts (data-parallel attention) have all other parameters whole, shared
experts among them: their rows are not those of other ranks.

Matrices that are one in the checkpoint (q, k and v; gate and up) are cut part by part. The tensors of a
quantised matrix are cut with its values. Blocks and groups that share a scale are never cut.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...kernels import fp8_scales, mxfp4
from ..errors import CheckpointError
from ..parallel.group import TensorGroup
from ..parallel.sharing import Sharing
from ..parallel.vocabulary import num_rank_rows
from .config import ModelConfig
from .moe import GPT_OSS_NAMES, MoEConfig
from .quant.config import Fp8Form, Int4Form
from .quant.int4_projection import VALUES_A_WORD

# The architectures whose parameters are all in `PARTS`, `OF_HEADS`, `OF_EXPERTS` or whole.
SHARDED = frozenset(
    {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MiMoForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "MistralForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Phi3ForCausalLM",
        "Olmo2ForCausalLM",
        "SmolLM3ForCausalLM",
        "GptOssForCausalLM",
        "Qwen2MoeForCausalLM",
        "Glm4MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
    }
)
QUERY, KEY_VALUE, OUTPUTS, INPUTS, VOCABULARY = "query", "key_value", "outputs", "inputs", "vocabulary"
LATENT = "latent"  # from latents, which every rank has whole, to the keys and values of its heads
HEADS, GATED = "heads", "gated"  # q, k and v in one matrix; gate and up in one matrix
# The cut of a parameter by the last part of its name before ".weight" or ".bias".
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "q_proj": QUERY,
        "k_proj": KEY_VALUE,
        "v_proj": KEY_VALUE,
        "qkv_proj": HEADS,
        "q_b_proj": QUERY,
        "kv_b_proj": LATENT,
        "o_proj": INPUTS,
        "gate_proj": OUTPUTS,
        "up_proj": OUTPUTS,
        "gate_up_proj": GATED,
        "down_proj": INPUTS,
        "w1": OUTPUTS,
        "w3": OUTPUTS,
        "w2": INPUTS,
        "embed_tokens": VOCABULARY,
        "lm_head": VOCABULARY,
    }
)
# Parameters with a value, or a vector, for each head, by the ends of their names.
OF_HEADS: Mapping[str, str] = MappingProxyType(
    {".sinks": QUERY, ".self_attn.k_scale": KEY_VALUE, ".self_attn.v_scale": KEY_VALUE}
)
WHOLE_NORMS: Mapping[str, str] = MappingProxyType(
    {".q_norm.weight": QUERY, ".k_norm.weight": KEY_VALUE}  # of `LayerForms.whole_heads`
)
# Tensors of all experts of gpt-oss: the dimension that is cut, and the rows of it for each of the
# intermediate size, or the sizes that share one place. Rows of gate and up are stored in turns.
OF_EXPERTS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "gate_up_proj": (2, 2, 1),
        "gate_up_proj_bias": (1, 2, 1),
        "gate_up_proj_blocks": (1, 2, 1),
        "gate_up_proj_scales": (1, 2, 1),
        "down_proj": (1, 1, 1),
        "down_proj_blocks": (2, 1, mxfp4.BLOCK),
        "down_proj_scales": (2, 1, mxfp4.BLOCK),
    }
)
# Those with values of each expert in the first dimension, which is cut by expert.
OF_EACH_EXPERT = frozenset({*OF_EXPERTS, "down_proj_bias"})
EXPERT_NUMBER = re.compile(r"\.experts\.(\d+)\.")  # in the name of a tensor of one expert
EXPERT_WIDTH = "expert intermediate size"
Spans = tuple[tuple[int, int], ...]  # (first, size) of each run of indices


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The indices of all `spans`, pairs (first, size), of dimension `dim`, which has `full` in the
    checkpoint. A rank has them side by side.

    A rank may have memory for more than `size`; the rest of it is zeros.
    """

    dim: int
    spans: Spans
    full: int

    @property
    def size(self) -> int:
        """Indices in all."""
        return sum(size for _, size in self.spans)

    def along(self, dim: int, unit: int = 1) -> "Cut":
        """The same cut along dimension `dim` of a tensor with one index for each `unit` of these."""
        assert all(first % unit == 0 for first, _ in self.spans), (self, unit)
        spans = tuple((first // unit, -(-size // unit)) for first, size in self.spans)
        return Cut(dim=dim, spans=spans, full=-(-self.full // unit))


def rank_config(config: ModelConfig, sharing: Sharing, source: str = "") -> ModelConfig:
    """The config of the model of one rank in `sharing`. The vocabulary and the hidden size are the whole
    model's.

    Raises CheckpointError, naming `source`, the size and the remedy, for a model that cannot be cut so.
    """
    if sharing.is_solo:
        return config
    where = f"{sharing.setting}: the model{' at ' * bool(source)}{source}"
    if config.architecture not in SHARDED:
        raise CheckpointError(f"{where} is a {config.architecture}, which runs on one device only; use tp 1")
    if config.moe is None and (sharing.by_expert or sharing.has_own_rows):
        remedy = (
            "start as many workers instead, each with its own model"
            if sharing.has_own_rows
            else f"use tp {sharing.tensor.size} without ep"
        )
        raise CheckpointError(f"{where} is a {config.architecture} without experts to share; {remedy}")
    fault = _misfit(config, sharing)
    if fault:
        raise CheckpointError(f"{where} has {fault}; {_remedy(config, sharing)}")
    if sharing.has_own_rows:
        return replace(config, moe=_rank_experts(config.moe, sharing))
    forms, num_ranks = config.forms, sharing.tensor.size
    if forms.has_whole_norm:
        forms = replace(forms, whole_heads=(config.num_heads, config.num_kv_heads))
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(config.num_kv_heads // num_ranks, 1),
        intermediate_size=config.intermediate_size // num_ranks,
        moe=_rank_experts(config.moe, sharing),
        forms=forms,
    )


def _rank_experts(moe: MoEConfig | None, sharing: Sharing) -> MoEConfig | None:
    if moe is None:
        return None
    num_ranks = sharing.experts.size
    gathered = num_ranks if sharing.has_own_rows else 1
    found = replace(moe, shared_size=moe.shared_size // sharing.tensor.size, gathered=gathered)
    if sharing.by_expert:
        return replace(found, held=experts_of(moe.num_experts, sharing.experts))
    return replace(found, intermediate_size=moe.intermediate_size // num_ranks)


def experts_of(num_experts: int, group: TensorGroup) -> range:
    """The experts that this rank has whole."""
    held = num_experts // group.size
    return range(group.rank * held, (group.rank + 1) * held)


def _remedy(config: ModelConfig, sharing: Sharing) -> str:
    """The numbers of ranks that fit, as the end of an error's sentence."""
    most = max(config.num_heads, 0 if config.moe is None else config.moe.num_experts)
    even = [size for size in range(2, most + 1) if not _misfit(config, _resized(sharing, size))]
    fitting = "".join(f", {size}" for size in even[:6])
    if sharing.has_own_rows:
        name = f"dp_attention {fitting[2:]}" if even else "workers of one rank"
        return f"use {name}"
    return f"use tp 1{fitting}"


def _resized(sharing: Sharing, size: int) -> Sharing:
    tensor = sharing.tensor if sharing.has_own_rows else TensorGroup(size=size)
    return replace(sharing, tensor=tensor, experts=TensorGroup(size=size))


def _misfit(config: ModelConfig, sharing: Sharing) -> str:
    """What ranks cannot share; "" if they can share the model."""
    heads, kv_heads, num_ranks = config.num_heads, config.num_kv_heads, sharing.tensor.size
    if heads % num_ranks:
        return f"{heads} attention heads, which {num_ranks} does not divide"
    if max(kv_heads, num_ranks) % min(kv_heads, num_ranks):
        return f"{kv_heads} KV heads, which cannot be dealt to {num_ranks} ranks"
    if sharing.by_expert and config.moe is not None and config.moe.num_experts % sharing.experts.size:
        return f"{config.moe.num_experts} experts, which {sharing.experts.size} does not divide"
    for name, (width, parts) in _widths(config, sharing).items():
        if width % parts:
            return f"{name} {width}, which {parts} does not divide"
    return _cut_blocks(config, sharing)


def _widths(config: ModelConfig, sharing: Sharing) -> dict[str, tuple[int, int]]:
    """The sizes of the MLPs of a layer that are cut, by their names, with the number of parts."""
    found = _mlp_widths(config)
    parts = dict.fromkeys(found, sharing.tensor.size)
    if EXPERT_WIDTH in found:
        parts[EXPERT_WIDTH] = 1 if sharing.by_expert else sharing.experts.size
    return {name: (width, parts[name]) for name, width in found.items() if parts[name] > 1}


def _mlp_widths(config: ModelConfig) -> dict[str, int]:
    """The sizes of the MLPs of a layer by their names."""
    moe = config.moe
    if moe is None:
        return {"intermediate_size": config.intermediate_size}
    widths = {EXPERT_WIDTH: moe.intermediate_size}
    if moe.shared_size:
        widths["size of the shared experts"] = moe.shared_size
    if moe.dense_layers:
        widths["intermediate_size"] = config.intermediate_size
    return widths


def _cut_blocks(config: ModelConfig, sharing: Sharing) -> str:
    """The size whose part on a rank is not whole blocks or groups of one scale; "" without such."""
    moe, num_ranks, widths = config.moe, sharing.tensor.size, _widths(config, sharing)
    if moe is not None and moe.is_packed and EXPERT_WIDTH in widths:
        width, parts = widths[EXPERT_WIDTH]
        if width // parts % mxfp4.BLOCK:
            return (
                f"{EXPERT_WIDTH} {width} in blocks of {mxfp4.BLOCK} with one scale, which {parts} ranks "
                "would cut"
            )
    form, num_parts = None if config.quant is None else config.quant.form, sharing.experts.size
    if isinstance(form, Int4Form) and form.has_order and num_ranks > 1:
        return (
            "inputs in the order of activations (desc_act), whose groups "
            f"{num_ranks} ranks would cut; a model made with desc_act false has no such groups"
        )
    sizes = {name: width // parts for name, (width, parts) in widths.items()}
    if isinstance(form, Fp8Form) and form.has_blocks:
        unit, kind = fp8_scales.BLOCK, "blocks"
        if num_ranks > 1:
            sizes = _attention_widths(config, num_ranks) | sizes
    elif isinstance(form, Int4Form):
        unit, kind = form.group_size, "groups"
        if num_ranks > 1:
            sizes = {"width of values": config.num_heads * config.value_dim // num_ranks} | sizes
    else:
        return ""
    for name, size in sizes.items():
        if size % unit:
            whole = size if name == "width of keys" else size * num_parts
            return f"{name} {whole} in {kind} of {unit} with one scale, which {num_parts} ranks would cut"
    return ""


def _attention_widths(config: ModelConfig, num_ranks: int) -> dict[str, int]:
    """The sizes of attention on a rank, by which the outputs and the inputs of its matrices are cut."""
    heads = config.num_heads // num_ranks
    widths = {"width of queries": heads * config.head_dim, "width of values": heads * config.value_dim}
    if config.latent_outputs:
        return widths | {"width of keys and values": heads * config.latent_outputs}
    return widths | {"width of keys": max(config.num_kv_heads // num_ranks, 1) * config.head_dim}


def cuts_of(names: Iterable[str], config: ModelConfig, sharing: Sharing) -> dict[str, Cut]:
    """The cuts of the parameters `names` of the whole model's `config`, for the rank in `sharing`.

    A name without a cut is whole on the rank. Empty with one rank.
    """
    if sharing.is_solo:
        return {}
    found = ((name, _cut_of(name, config, sharing)) for name in names)
    return {name: cut for name, cut in found if cut is not None}


def is_elsewhere(name: str, moe: MoEConfig | None) -> bool:
    """Whether the tensor `name` of a checkpoint is one of an expert that another rank has, by the `moe` of
    this rank's config.
    """
    found = None if moe is None or moe.held is None else EXPERT_NUMBER.search(name)
    if found is None or moe is None or moe.held is None:
        return False
    number = int(found.group(1))
    return number < moe.num_experts and number not in moe.held


def _cut_of(name: str, config: ModelConfig, sharing: Sharing) -> Cut | None:
    stem, _, kind = name.rpartition(".")
    module, group = stem.rpartition(".")[2], sharing.tensor
    if config.moe is not None and config.moe.names is GPT_OSS_NAMES and module == "experts":
        return _cut_of_experts(kind, config.moe, sharing)
    if config.moe is not None and ".experts." in name:
        if sharing.by_expert:
            return None
        group = sharing.experts
    if group.is_solo:
        return None
    for ends, width in ((OF_HEADS, 1), (WHOLE_NORMS, config.head_dim)):
        part = next((part for end, part in ends.items() if name.endswith(end)), None)
        if part is not None and (ends is OF_HEADS or config.forms.has_whole_norm):
            return _heads(part, config, group, width)
    part = PARTS.get(module)
    if part is None:
        return None
    if part == VOCABULARY:
        held = num_rank_rows(config.vocab_size, group.size)
        first = min(group.rank * held, config.vocab_size)
        return Cut(dim=0, spans=((first, min(held, config.vocab_size - first)),), full=config.vocab_size)
    if part == INPUTS:
        if kind == "bias":  # added once to the sum
            return _of_rank_0(config.hidden_size, group)
        inner = config.num_heads * config.value_dim if module == "o_proj" else _inner(name, config)
        return _cut_inputs(kind, _even(inner, group), config)
    return _cut_outputs(kind, _of_parts(_outputs(part, name, config, group)), config)


def _outputs(part: str, name: str, config: ModelConfig, group: TensorGroup) -> list[Cut]:
    """The cuts of the matrices that `name` consists of, by their outputs."""
    if part == HEADS:
        kinds = (QUERY, KEY_VALUE, KEY_VALUE)
        return [_heads(kind, config, group, config.head_dim) for kind in kinds]
    if part in (QUERY, KEY_VALUE):
        return [_heads(part, config, group, config.head_dim)]
    if part == LATENT:
        return [_even(config.num_heads * config.latent_outputs, group)]
    return [_even(_inner(name, config), group)] * (2 if part == GATED else 1)


def _cut_outputs(kind: str, cut: Cut, config: ModelConfig) -> Cut | None:
    """The cut of the tensor `kind` ("weight", "qzeros", ...) of a matrix whose outputs are cut by `cut`."""
    form = None if config.quant is None else config.quant.form
    if isinstance(form, Fp8Form) and kind == form.scale_name:
        return cut.along(0, fp8_scales.BLOCK if form.has_blocks else 1)
    if kind in ("weight", "bias"):
        return cut
    if isinstance(form, Int4Form) and kind in ("qweight", "qzeros", "scales"):
        is_packed = kind == "qzeros" or (kind == "qweight" and form.packing == "awq")
        return cut.along(1, VALUES_A_WORD if is_packed else 1)
    return None


def _cut_inputs(kind: str, cut: Cut, config: ModelConfig) -> Cut | None:
    """As `_cut_outputs`, of a matrix whose inputs are cut by `cut`."""
    form = None if config.quant is None else config.quant.form
    if isinstance(form, Fp8Form) and kind == form.scale_name:
        return cut.along(1, fp8_scales.BLOCK) if form.has_blocks else None
    if kind == "weight":
        return cut.along(1)
    if isinstance(form, Int4Form):
        gptq = VALUES_A_WORD if form.packing == "gptq" else 1
        units = {"qweight": gptq, "qzeros": form.group_size, "scales": form.group_size, "g_idx": 1}
        return cut.along(0, units[kind]) if kind in units else None
    return None


def _cut_of_experts(kind: str, moe: MoEConfig, sharing: Sharing) -> Cut | None:
    group = sharing.experts
    if sharing.by_expert:
        return _even(moe.num_experts, group) if kind in OF_EACH_EXPERT else None
    if kind == "down_proj_bias":
        return _of_rank_0(moe.num_experts, group)
    dim, rows, unit = OF_EXPERTS[kind]
    return _even(rows * moe.intermediate_size, group).along(dim, unit)


def _of_rank_0(full: int, group: TensorGroup) -> Cut:
    return Cut(dim=0, spans=((0, full if group.rank == 0 else 0),), full=full)


def _heads(part: str, config: ModelConfig, group: TensorGroup, width: int) -> Cut:
    """The cut of `width` values for each head, of queries or of keys and values."""
    if part == QUERY:
        return _even(config.num_heads * width, group)
    held, first = max(config.num_kv_heads // group.size, 1), group.rank * config.num_kv_heads // group.size
    return Cut(dim=0, spans=((first * width, held * width),), full=config.num_kv_heads * width)


def _inner(name: str, config: ModelConfig) -> int:
    """The intermediate size of the MLP or expert that `name` belongs to."""
    moe = config.moe
    if moe is not None and ".experts." in name:
        return moe.intermediate_size
    if moe is not None and moe.names.shared and f".{moe.names.shared}." in name:
        return moe.shared_size
    return config.intermediate_size


def _even(full: int, group: TensorGroup) -> Cut:
    held = full // group.size
    return Cut(dim=0, spans=((group.rank * held, held),), full=full)


def _of_parts(parts: Sequence[Cut]) -> Cut:
    """The cut of matrices that lie one behind the other."""
    spans, full = [], 0
    for part in parts:
        spans += [(full + first, size) for first, size in part.spans]
        full += part.full
    return Cut(dim=0, spans=tuple(spans), full=full)
