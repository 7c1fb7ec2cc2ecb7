"""The registry of models: architecture name -> reader of its config.json and model class.

A new architecture needs a class that satisfies `interface.CausalLM`, a reader of its config, and an entry in
`MODELS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from ...kernels.fp8_scales import FP8
from ...kernels.row_ops import FASTEST, INVARIANT, RowOps
from ...kernels.row_ops import JOIN_NAMES as JOIN_NAMES
from ...kernels.row_ops import Joins as Joins
from ...kernels.row_ops import named_joins as named_joins
from ..errors import CheckpointError
from ..kv.layouts import MHALayout
from ..kv.sparse_layout import SparseLayout
from ..parallel.group import TensorGroup
from ..parallel.sharing import ALONE, Sharing
from .config import ModelConfig, read_dense_config
from .config_reader import ConfigReader, read_json
from .deepseek_config import read_deepseek_config
from .families import FAMILIES
from .interface import CausalLM, StoredForms
from .llama import LlamaForCausalLM
from .quant.kv_scales import FP8_KV
from .routed_config import read_glm_config, read_qwen2_moe_config
from .sparse_block import SparseBlockForCausalLM, read_sparse_config
from .text_part import WHOLES, is_whole, text_config

PROBED_PAGE_SIZE = 1024  # any that blocks of side caches fit


class ReadConfig(Protocol):
    """A reader of the config of one architecture."""

    def __call__(self, reader: ConfigReader) -> ModelConfig:
        """The config. Raises CheckpointError, naming file, key, value and remedy."""


class BuildModel(Protocol):
    """A model class."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: RowOps,
        group: TensorGroup,
    ) -> CausalLM:
        """The model of `config`, with uninitialised weights in `dtype` on `device`, computed by `ops`, as a
        rank of `group`.
        """


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One architecture. `model_type` identifies it if config.json has no `architectures`."""

    architecture: str
    model_type: str
    read_config: ReadConfig
    build: BuildModel


def _entry(
    architecture: str,
    read_config: Callable[..., ModelConfig] = read_dense_config,
    build: BuildModel = LlamaForCausalLM,
) -> ModelEntry:
    """An architecture of `FAMILIES`, whose reader is told its name."""
    return ModelEntry(
        architecture=architecture,
        model_type=FAMILIES[architecture],
        read_config=partial(read_config, architecture=architecture),
        build=build,
    )


MODELS = (
    _entry("LlamaForCausalLM"),
    _entry("Qwen2ForCausalLM"),
    _entry("Qwen3ForCausalLM"),
    _entry("MiMoForCausalLM"),
    _entry("Qwen3MoeForCausalLM"),
    _entry("MixtralForCausalLM"),
    _entry("MistralForCausalLM"),
    _entry("Gemma2ForCausalLM"),
    _entry("Gemma3ForCausalLM"),
    _entry("Phi3ForCausalLM"),
    _entry("Olmo2ForCausalLM"),
    _entry("SmolLM3ForCausalLM"),
    _entry("GptOssForCausalLM"),
    _entry("SparseBlockForCausalLM", read_sparse_config, SparseBlockForCausalLM),
    _entry("DeepseekV2ForCausalLM", read_deepseek_config),
    _entry("DeepseekV3ForCausalLM", read_deepseek_config),
    _entry("Qwen2MoeForCausalLM", read_qwen2_moe_config),
    _entry("Glm4MoeForCausalLM", read_glm_config),
)


def load_model_config(path: Path, models: Sequence[ModelEntry] = MODELS) -> ModelConfig:
    """The config in `path`/config.json, with the EOS ids of generation_config.json.

    Raises CheckpointError, naming file, key, value and remedy, for a missing, malformed or unsupported
    setting. For an unknown architecture it lists those of `models`.
    """
    source = Path(path) / "config.json"
    raw = read_json(source)
    reader = ConfigReader(text_config(raw, source), source)
    config = _entry_named(reader, models).read_config(reader)
    return replace(config, is_text_part=True) if is_whole(raw) else config


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    is_invariant: bool = False,
    joins: Joins | None = None,
    sharing: Sharing = ALONE,
    models: Sequence[ModelEntry] = MODELS,
) -> CausalLM:
    """The model of `config.architecture`, with uninitialised weights. `is_invariant`: its operations are
    batch-invariant. `joins`: the steps of a layer that share launches for few rows, by default those of
    `FASTEST`; batch-invariant operations share none. As a rank in `sharing`, `config` is the rank's.

    Raises CheckpointError if `models` lacks it, or for a quantisation or a dtype of keys and values that it
    does not have.
    """
    for entry in models:
        if entry.architecture == config.architecture:
            ops = INVARIANT if is_invariant else FASTEST
            if joins is not None and not is_invariant:
                ops = replace(ops, joins=joins)
            if not sharing.tensor.is_solo:
                ops = replace(ops, sum_ranks=sharing.tensor.sum)
            if not sharing.experts.is_solo:
                ops = replace(ops, expert_rows=sharing.expert_rows)
            model = entry.build(config, dtype=dtype, device=device, ops=ops, group=sharing.tensor)
            if config.quant is not None and not isinstance(model, StoredForms):
                raise CheckpointError(
                    f"architecture {config.architecture}: {config.quant} is not supported for it; use the "
                    f"original "
                    "checkpoint"
                )
            _check_kv_dtype(model, config)
            return model
    raise CheckpointError(f"architecture {config.architecture!r}: {_supported(models)}")


def _check_kv_dtype(model: CausalLM, config: ModelConfig) -> None:
    if config.kv_dtype != FP8_KV:
        return
    layout = model.kv_layout(PROBED_PAGE_SIZE)
    is_plain = isinstance(layout, MHALayout) and not isinstance(layout, SparseLayout)
    if not is_plain or layout.dtype != FP8:
        raise CheckpointError(
            f"kv_dtype {config.kv_dtype}: {config.architecture} has no form of it; use --kv-dtype auto"
        )


def _entry_named(reader: ConfigReader, models: Sequence[ModelEntry]) -> ModelEntry:
    names = reader.raw.get("architectures")
    for entry in models:
        if not names and reader.raw.get("model_type") == entry.model_type:
            return entry
        if isinstance(names, list) and names and names[0] == entry.architecture:
            return entry
    raise reader.error("architectures", _supported(models))


def _supported(models: Sequence[ModelEntry]) -> str:
    names = [*(entry.architecture for entry in models), *WHOLES]
    return f"supported are {', '.join(names)}"
