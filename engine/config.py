"""The settings of an engine. A role's config has the same names, so `EngineConfig.of(role_config)` copies them."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from .errors import CheckpointError

NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    `pages` 0: as many as `kv_memory_mb` (MiB) holds; that 0: by device. `max_context` 0: the model's own. `chunk_size`
    (0: whole prompts) and `max_running` are sizes that graphs are captured for; a role has those that it needs. `spec_*`:
    what a step drafts (`DraftShape.of`), and whether that follows load and acceptance ("auto": on CUDA).
    `overlap`: whether decode steps are launched before the one before was read ("auto": on CUDA).
    `graph_self_test` compares each graph with the eager path before it is used.
    `feature_layers` ("2,14,25"): layer outputs that prefill captures beside those of the draft.
    """

    model: str
    draft: str = ""
    no_draft: bool = False
    device: str = "auto"
    dtype: str = "auto"
    graphs: bool = False
    page_size: int = 16
    pages: int = 0
    kv_memory_mb: int = 0
    max_context: int = 0
    threads: int = 0
    prefix_cache: bool = True
    chunk_size: int = 256
    max_running: int = 16
    spec_steps: int = 3
    spec_topk: int = 1
    spec_tokens: int = 0
    spec_adaptive: str = "auto"
    overlap: str = "auto"
    graph_self_test: bool = True
    feature_layers: str = ""

    @classmethod
    def of(cls, settings: object) -> "EngineConfig":
        """The engine's part of a role's config, by field name; what only the other role has keeps its default."""
        return cls(**{f.name: getattr(settings, f.name) for f in fields(cls) if hasattr(settings, f.name)})

    @property
    def extra_feature_ids(self) -> tuple[int, ...]:
        """The ids in `feature_layers`, whose form the role's config has checked."""
        return tuple(int(layer) for layer in self.feature_layers.split(",")) if self.feature_layers else ()

    @property
    def has_draft(self) -> bool:
        return bool(self.draft) and not self.no_draft


def resolve_device(device: str) -> torch.device:
    """ "auto" takes CUDA when there is one; "cuda" without a CUDA device is a CheckpointError naming the remedy."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(
            "device cuda: this machine has no usable CUDA device; start with --device cpu or auto"
        )
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on CUDA and on CPUs that multiply it natively (half the bytes per step), else float32."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or has_native_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not known; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def has_native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bfloat16 products (AVX512-BF16, AMX, or Arm BF16); False where the kernel does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not NATIVE_BFLOAT16.isdisjoint(flags)


def resolve_checkpoint(model: str) -> Path:
    """A directory as it is; anything else is taken for a hub id and downloaded (or found in the hub's cache)."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model {model!r} is neither a directory nor a hub id (owner/name)")
    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"])
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise CheckpointError(
            f"model {model!r} could not be fetched from the hub ({reason}); name a directory"
        ) from error
