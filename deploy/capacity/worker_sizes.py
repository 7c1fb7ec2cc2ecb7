"""The sizes that a worker of this host would choose, from nvidia-smi and a checkpoint's files, without torch.

A worker measures the memory of its loaded weights, so its KV pool may differ by some MiB.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...cluster.config.roles import DecodeConfig, PrefillConfig
from ...cluster.config.tier_checks import frees_windows
from ...cluster.errors import ConfigError
from ...cluster.security.ciphers import AUTO
from ...engine.auto_sizes import (
    CONTEXT_BYTES,
    LATE_ROWS,
    MIB,
    Card,
    EngineRole,
    EngineSizes,
    GivenSizes,
    ModelSizes,
    choose_sizes,
)
from ...engine.errors import CheckpointError
from ...engine.hub import NGRAM
from ...engine.kv.budget import PageBudget
from .checkpoints import (
    KVShape,
    RankWeights,
    count_head_weights,
    count_used_weights,
    experts_of,
    feature_layers,
    head_dir,
    head_kv_bytes,
    model_config,
    observes_late,
    rank_weights,
    read_config,
    shape_of,
)

QUERY = "name,memory.total,memory.reserved,memory.free,compute_cap"
GPU_DTYPE, CPU_DTYPE = "bfloat16", "float32"


def find_card(device: str, ask: Callable[[Sequence[str]], str]) -> Card:
    """The first GPU of this host by nvidia-smi, or the CPU. `ask` runs a command and returns its output."""
    if device == "cpu":
        return Card()
    listed = ask(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]).splitlines()
    cells = [cell.strip() for cell in listed[0].split(",")] if listed else []
    try:
        name, total, reserved, free, capability = cells
        major, _, minor = capability.partition(".")
        return Card(
            name=name,
            total=(int(total) - int(reserved)) * MIB,
            free=int(free) * MIB - CONTEXT_BYTES,
            capability=(int(major), int(minor)),
        )
    except ValueError:
        return Card()


@dataclass(frozen=True, kw_only=True)
class WorkerNeed:
    """What a worker's sizes depend on, beside its GPU and its settings. `per_token`: memory of a token.
    `weights`: of the target on one rank. `expert_ranks`: those whose rows meet in a layer of experts.
    """

    model: ModelSizes
    role: EngineRole
    per_token: PageBudget
    weights: RankWeights
    expert_ranks: int = 1

    def step_bytes(self, num_requests: int, rows: float) -> float:
        """The bytes that a rank reads for a step of so many requests, each with `rows` rows of KV in a
        layer.
        """
        num_rows, windows = num_requests * self.role.num_nodes * self.expert_ranks, self.per_token.windows
        kv_bytes = self.per_token.kv_bytes + (0 if windows is None else windows.kv_bytes)
        return self.weights.read_by(num_rows) + num_requests * rows * kv_bytes

    def sizes_on(self, card: Card, given: GivenSizes) -> EngineSizes:
        """The sizes of the worker on `card`. Raises ConfigError for what does not fit."""
        try:
            return choose_sizes(card, self.model, self.role, self.per_token, given)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    """The needs of both roles for one model and head, and the sizes of a token."""

    shape: KVShape
    prefill: WorkerNeed
    decode: WorkerNeed

    def of(self, *, is_decode: bool) -> WorkerNeed:
        """The needs of one role."""
        return self.decode if is_decode else self.prefill

    @property
    def has_head(self) -> bool:
        """Whether decode drafts."""
        return self.decode.role.num_nodes > 1


def worker_sizes(
    card: Card, model: Path, draft: Path | None, config: PrefillConfig | DecodeConfig
) -> EngineSizes:
    """The sizes of a worker with these settings on `card`. Raises ConfigError for what does not fit."""
    dtype = config.dtype if config.dtype != "auto" else GPU_DTYPE if card.is_gpu else CPU_DTYPE
    return worker_need(model, draft, config, dtype).sizes_on(card, GivenSizes.of(config))


def need_of(
    model: Path,
    draft: Path | None = None,
    dtype: str = GPU_DTYPE,
    *,
    quantize: str = "none",
    kv_dtype: str = "auto",
    window_kv: str = AUTO,
    tp: int = 1,
) -> ModelNeed:
    """The needs of workers, of one rank each, with default settings but these.

    Raises ConfigError for an unusable config.
    """
    prefill = PrefillConfig(
        model=str(model), quantize=quantize, kv_dtype=kv_dtype, window_kv=window_kv, tp=tp
    )
    decode = DecodeConfig(model=str(model), quantize=quantize, kv_dtype=kv_dtype, window_kv=window_kv, tp=tp)
    return ModelNeed(
        shape=shape_of(model, draft, dtype, kv_dtype, frees_windows=frees_windows(prefill)),
        prefill=worker_need(model, draft, prefill, dtype),
        decode=worker_need(model, draft, decode, dtype),
    )


def need_of_roles(prefill: PrefillConfig, decode: DecodeConfig) -> ModelNeed:
    """The needs of workers with these settings on a GPU, whose models and heads are directories.

    Raises ConfigError for an unusable config.
    """

    def need(config: PrefillConfig | DecodeConfig) -> tuple[KVShape, WorkerNeed]:
        model, draft = Path(config.model), None if config.no_draft else head_dir(config.draft)
        dtype = GPU_DTYPE if config.dtype == "auto" else config.dtype
        shape = shape_of(model, draft, dtype, config.kv_dtype, frees_windows=frees_windows(config))
        return shape, worker_need(model, draft, config, dtype)

    (_, of_prefill), (shape, of_decode) = need(prefill), need(decode)
    return ModelNeed(shape=shape, prefill=of_prefill, decode=of_decode)


def worker_need(
    model: Path, draft: Path | None, config: PrefillConfig | DecodeConfig, dtype: str
) -> WorkerNeed:
    """The needs of one worker, of one rank if it has several. Only decode loads the head, whole on each rank.

    Raises ConfigError for an unusable config.
    """
    draft = None if config.no_draft else draft
    shape = shape_of(model, draft, dtype, config.kv_dtype, frees_windows=frees_windows(config))
    tp, num_ranks = config.tensor_ranks, config.num_ranks
    weights = rank_weights(model, shape.dtype_bytes, config.quantize, tp=tp, expert_ranks=num_ranks)
    of_rank = replace(
        shape,
        num_kv_heads=max(shape.num_kv_heads // tp, 1),
        max_context=config.max_context or shape.max_context,
    )
    target = of_rank.page_budget
    if isinstance(config, PrefillConfig):
        loaded, (role, per_token) = None, _prefill_role(config, draft, shape, target)
    else:
        loaded, (role, per_token) = draft, _decode_role(config, draft, shape, target)
    return WorkerNeed(
        model=_model_sizes(model, loaded, dtype, config, weights),
        role=role,
        per_token=per_token,
        weights=weights,
        expert_ranks=_expert_ranks(config),
    )


def _prefill_role(
    config: PrefillConfig, draft: Path | None, shape: KVShape, target: PageBudget
) -> tuple[EngineRole, PageBudget]:
    """The role of a prefill worker and its memory of a token, `target` without features."""
    named = set() if draft is None else set(feature_layers(read_config(draft)))
    others = {int(layer) for layer in config.feature_layers.split(",") if layer} - named
    shape = replace(shape, num_features=shape.num_features + len(others))
    role = EngineRole(is_decode=False, is_deterministic=config.deterministic, num_features=shape.num_features)
    return role, replace(target, feature_bytes=shape.feature_bytes)


def _decode_role(
    config: DecodeConfig, draft: Path | None, shape: KVShape, target: PageBudget
) -> tuple[EngineRole, PageBudget]:
    """The role of a decode worker and its memory of a token, `target` without a head."""
    plain = EngineRole(is_decode=True, is_aggregated=config.aggregated, is_deterministic=config.deterministic)
    if config.no_draft or (draft is None and config.draft != NGRAM):
        return plain, target
    nodes = config.spec_tokens or 1 + config.spec_steps * config.spec_topk
    per_token, late_rows = target, 0
    if draft is not None:
        if config.spec_adaptive != "off" and observes_late(read_config(draft)):
            late_rows = LATE_ROWS
        draft_bytes = head_kv_bytes(draft, shape, config.spec_steps)
        per_token = replace(target, draft_bytes=draft_bytes, has_staging=True)
    role = replace(
        plain,
        num_features=shape.num_features,
        num_nodes=nodes,
        num_shapes=1 + config.spec_steps,
        spare_slots=nodes,
        late_rows=late_rows,
    )
    return role, per_token


def _expert_ranks(worker: PrefillConfig | DecodeConfig) -> int:
    """The ranks whose rows meet in a layer of experts."""
    return worker.num_ranks // worker.tensor_ranks


def _model_sizes(
    model: Path, draft: Path | None, dtype: str, worker: PrefillConfig | DecodeConfig, weights: RankWeights
) -> ModelSizes:
    """The sizes of a model on one rank of `worker`."""
    config, shape, tp = model_config(model), shape_of(model, None, dtype), worker.tensor_ranks
    gathered = _expert_ranks(worker)
    try:
        vocabulary = int(config["vocab_size"]) * shape.hidden_size
        of_head = 0 if draft is None else count_head_weights(draft)
        used, experts = count_used_weights(model), experts_of(config, model)
        width = int(config["intermediate_size"])
        if experts is not None:
            of_experts = experts.top_k * (experts.intermediate_size + shape.hidden_size)
            of_experts = -(-gathered * of_experts // 3) + experts.shared_size
            width = max(width, of_experts) if experts.is_mixed else of_experts
        return ModelSizes(
            hidden_size=shape.hidden_size,
            intermediate_size=max(width // tp, 1),
            num_heads=max(int(config["num_attention_heads"]) // tp, 1),
            num_kv_heads=shape.context_heads if shape.latent_size else max(shape.num_kv_heads // tp, 1),
            head_dim=shape.head_dim,
            vocab_size=int(config["vocab_size"]),
            max_context=shape.max_context,
            dtype_bytes=shape.dtype_bytes,
            num_layers=shape.num_layers,
            num_weights=(used - vocabulary if weights.embedding else used) // tp,
            weight_bytes=of_head * shape.dtype_bytes + weights.total,
            has_experts=experts is not None,
        )
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{model}/config.json: {error!r} is missing or no number; copy it again") from None
