"""How each parameter of a model is cut over the ranks of a tensor-parallel worker.

Attention is cut by heads and an MLP, also that of each expert, by its intermediate size (Shoeybi et al.,
"Megatron-LM", 2019, arXiv 1909.08053): the first matrix of such a pair by its outputs, the second by its
inputs, whose partial results are summed over ranks. The vocabulary is cut by rows. Norms and routers are
whole on every rank. A rank's model is a model of `rank_config`, with sums behind two matrices of a layer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..errors import CheckpointError
from ..parallel.group import TensorGroup
from ..parallel.vocabulary import num_rank_rows
from .config import ModelConfig
from .moe import MoEConfig

# The architectures whose parameters are all in `PARTS` or whole.
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
        "SmolLM3ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Glm4MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
    }
)
QUERY, KEY_VALUE, OUTPUTS, INPUTS, VOCABULARY = "query", "key_value", "outputs", "inputs", "vocabulary"
LATENT = "latent"  # from latents, which every rank has whole, to the keys and values of its heads
# The cut of a parameter by the last part of its name before ".weight" or ".bias".
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "q_proj": QUERY,
        "k_proj": KEY_VALUE,
        "v_proj": KEY_VALUE,
        "q_b_proj": QUERY,
        "kv_b_proj": LATENT,
        "o_proj": INPUTS,
        "gate_proj": OUTPUTS,
        "up_proj": OUTPUTS,
        "down_proj": INPUTS,
        "w1": OUTPUTS,
        "w3": OUTPUTS,
        "w2": INPUTS,
        "embed_tokens": VOCABULARY,
        "lm_head": VOCABULARY,
    }
)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Indices [first, first + size) of dimension `dim`, which has `full` in the checkpoint.

    A rank may have memory for more than `size`; the rest of it is zeros.
    """

    dim: int
    first: int
    size: int
    full: int


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
    if config.quant is not None:
        raise CheckpointError(f"{where} is in {config.quant}, which one device must hold whole; use tp 1")
    heads, kv_heads, moe = config.num_heads, config.num_kv_heads, config.moe
    even = [size for size in range(2, heads + 1) if _fits(config, size)]
    remedy = f"use tp 1{''.join(f', {size}' for size in even[:6])}"
    if heads % num_ranks:
        raise CheckpointError(
            f"{where} has {heads} attention heads, which {num_ranks} does not divide; {remedy}"
        )
    if max(kv_heads, num_ranks) % min(kv_heads, num_ranks):
        raise CheckpointError(
            f"{where} has {kv_heads} KV heads, which cannot be dealt to {num_ranks} ranks; {remedy}"
        )
    widths = {"intermediate_size": config.intermediate_size}
    if moe is not None:
        widths = {"expert intermediate size": moe.intermediate_size}
        if moe.shared_size:
            widths["size of the shared experts"] = moe.shared_size
        if moe.dense_layers:
            widths["intermediate_size"] = config.intermediate_size
    for name, width in widths.items():
        if width % num_ranks:
            raise CheckpointError(f"{where} has {name} {width}, which {num_ranks} does not divide; {remedy}")
    return replace(
        config,
        num_heads=heads // num_ranks,
        num_kv_heads=max(kv_heads // num_ranks, 1),
        intermediate_size=config.intermediate_size // num_ranks,
        moe=None if moe is None else _rank_experts(moe, num_ranks),
    )


def _rank_experts(moe: MoEConfig, num_ranks: int) -> MoEConfig:
    inner, shared = moe.intermediate_size // num_ranks, moe.shared_size // num_ranks
    return replace(moe, intermediate_size=inner, shared_size=shared)


def _fits(config: ModelConfig, size: int) -> bool:
    """Whether `size` ranks can share the heads and widths of `config`."""
    most, least = max(config.num_kv_heads, size), min(config.num_kv_heads, size)
    widths = [config.intermediate_size] if config.moe is None else [config.moe.intermediate_size]
    return not (config.num_heads % size or most % least or any(width % size for width in widths))


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
    part = PARTS.get(stem.rpartition(".")[2])
    if part is None:
        return None
    rank, size = group.rank, group.size
    if part == QUERY:
        return _even(config.num_heads * config.head_dim, rank, size)
    if part == LATENT:
        return _even(config.num_heads * config.latent_outputs, rank, size)
    if part == KEY_VALUE:
        held = max(config.num_kv_heads // size, 1)
        first = rank * config.num_kv_heads // size
        width = config.head_dim
        return Cut(dim=0, first=first * width, size=held * width, full=config.num_kv_heads * width)
    if part == VOCABULARY:
        held = num_rank_rows(config.vocab_size, size)
        first = min(rank * held, config.vocab_size)
        return Cut(dim=0, first=first, size=min(held, config.vocab_size - first), full=config.vocab_size)
    if part == OUTPUTS:
        return _even(_inner(name, config), rank, size)
    if kind == "bias":  # added once to the sum
        return Cut(dim=0, first=0, size=config.hidden_size if rank == 0 else 0, full=config.hidden_size)
    inner = config.num_heads * config.value_dim if stem.endswith(".o_proj") else _inner(name, config)
    return replace(_even(inner, rank, size), dim=1)


def _inner(name: str, config: ModelConfig) -> int:
    """The intermediate size of the MLP or expert that `name` belongs to."""
    moe = config.moe
    if moe is not None and ".experts." in name:
        return moe.intermediate_size
    if moe is not None and moe.names.shared and f".{moe.names.shared}." in name:
        return moe.shared_size
    return config.intermediate_size


def _even(full: int, rank: int, size: int) -> Cut:
    held = full // size
    return Cut(dim=0, first=rank * held, size=held, full=full)
