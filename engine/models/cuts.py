"""How each parameter of a model is cut over the ranks of a tensor-parallel worker.

Attention is cut by heads and an MLP, also that of each expert, by its intermediate size (Shoeybi et al.,
"Megatron-LM", 2019, arXiv 1909.08053): the first matrix of such a pair by its outputs, the second by its
inputs, whose partial results are summed over ranks. The vocabulary is cut by rows. Norms and routers are
whole on every rank; norms over all heads together are cut with the heads. A rank's model is a model of
`rank_config`, with sums behind two matrices of a layer.

Matrices that are one in the checkpoint (q, k and v; gate and up) are cut part by part. The tensors of a
quantised matrix are cut with its values. Blocks and groups that share a scale are never cut.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...kernels import fp8_scales, mxfp4
from ..errors import CheckpointError
from ..parallel.group import TensorGroup
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


def rank_config(config: ModelConfig, num_ranks: int, source: str = "") -> ModelConfig:
    """The config of the model of one of `num_ranks` ranks. The vocabulary and the hidden size are the whole
    model's.

    Raises CheckpointError, naming `source`, the size and the remedy, for a model that cannot be cut so.
    """
    if num_ranks == 1:
        return config
    where = f"tp {num_ranks}: the model{' at ' * bool(source)}{source}"
    if config.architecture not in SHARDED:
        raise CheckpointError(f"{where} is a {config.architecture}, which runs on one device only; use tp 1")
    fault = _misfit(config, num_ranks)
    if fault:
        even = [size for size in range(2, config.num_heads + 1) if not _misfit(config, size)]
        raise CheckpointError(f"{where} has {fault}; use tp 1{''.join(f', {size}' for size in even[:6])}")
    forms, moe = config.forms, config.moe
    if forms.has_whole_norm:
        forms = replace(forms, whole_heads=(config.num_heads, config.num_kv_heads))
    return replace(
        config,
        num_heads=config.num_heads // num_ranks,
        num_kv_heads=max(config.num_kv_heads // num_ranks, 1),
        intermediate_size=config.intermediate_size // num_ranks,
        moe=None if moe is None else _rank_experts(moe, num_ranks),
        forms=forms,
    )


def _rank_experts(moe: MoEConfig, num_ranks: int) -> MoEConfig:
    inner, shared = moe.intermediate_size // num_ranks, moe.shared_size // num_ranks
    return replace(moe, intermediate_size=inner, shared_size=shared)


def _misfit(config: ModelConfig, num_ranks: int) -> str:
    """What `num_ranks` ranks cannot share; "" if they can share the model."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_ranks:
        return f"{heads} attention heads, which {num_ranks} does not divide"
    if max(kv_heads, num_ranks) % min(kv_heads, num_ranks):
        return f"{kv_heads} KV heads, which cannot be dealt to {num_ranks} ranks"
    for name, width in _widths(config).items():
        if width % num_ranks:
            return f"{name} {width}, which {num_ranks} does not divide"
    return _cut_blocks(config, num_ranks)


def _widths(config: ModelConfig) -> dict[str, int]:
    """The sizes of the MLPs of a layer by their names."""
    moe = config.moe
    if moe is None:
        return {"intermediate_size": config.intermediate_size}
    widths = {"expert intermediate size": moe.intermediate_size}
    if moe.shared_size:
        widths["size of the shared experts"] = moe.shared_size
    if moe.dense_layers:
        widths["intermediate_size"] = config.intermediate_size
    return widths


def _cut_blocks(config: ModelConfig, num_ranks: int) -> str:
    """The size whose part on a rank is not whole blocks or groups of one scale; "" without such."""
    moe = config.moe
    if moe is not None and moe.is_packed and moe.intermediate_size // num_ranks % mxfp4.BLOCK:
        return (
            f"expert intermediate size {moe.intermediate_size} in blocks of {mxfp4.BLOCK} with one scale, "
            f"which {num_ranks} ranks would cut"
        )
    form = None if config.quant is None else config.quant.form
    if isinstance(form, Int4Form) and form.has_order:
        return (
            "inputs in the order of activations (desc_act), whose groups "
            f"{num_ranks} ranks would cut; a model made with desc_act false has no such groups"
        )
    sizes = {name: width // num_ranks for name, width in _widths(config).items()}
    if isinstance(form, Fp8Form) and form.has_blocks:
        unit, kind = fp8_scales.BLOCK, "blocks"
        sizes = _attention_widths(config, num_ranks) | sizes
    elif isinstance(form, Int4Form):
        unit, kind = form.group_size, "groups"
        sizes = {"width of values": config.num_heads * config.value_dim // num_ranks} | sizes
    else:
        return ""
    for name, size in sizes.items():
        if size % unit:
            whole = size if name == "width of keys" else size * num_ranks
            return f"{name} {whole} in {kind} of {unit} with one scale, which {num_ranks} ranks would cut"
    return ""


def _attention_widths(config: ModelConfig, num_ranks: int) -> dict[str, int]:
    """The sizes of attention on a rank, by which the outputs and the inputs of its matrices are cut."""
    heads = config.num_heads // num_ranks
    widths = {"width of queries": heads * config.head_dim, "width of values": heads * config.value_dim}
    if config.latent_outputs:
        return widths | {"width of keys and values": heads * config.latent_outputs}
    return widths | {"width of keys": max(config.num_kv_heads // num_ranks, 1) * config.head_dim}


def cuts_of(names: Iterable[str], config: ModelConfig, group: TensorGroup) -> dict[str, Cut]:
    """The cuts of the parameters `names` of the whole model's `config`, for the rank of `group`.

    A name without a cut is whole on every rank. Empty with one rank.
    """
    if group.is_solo:
        return {}
    found = ((name, _cut_of(name, config, group)) for name in names)
    return {name: cut for name, cut in found if cut is not None}


def _cut_of(name: str, config: ModelConfig, group: TensorGroup) -> Cut | None:
    stem, _, kind = name.rpartition(".")
    module = stem.rpartition(".")[2]
    if config.moe is not None and config.moe.names is GPT_OSS_NAMES and module == "experts":
        return _cut_of_experts(kind, config.moe, group)
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


def _cut_of_experts(kind: str, moe: MoEConfig, group: TensorGroup) -> Cut | None:
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
