"""The settings of an engine. `EngineConfig.of(role_config)` copies the equally named settings of a role."""

from dataclasses import dataclass
from pathlib import Path

import torch

from .auto_sizes import GivenSizes
from .errors import CheckpointError

NATIVE_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig(GivenSizes):
    """Settings of one engine.

    The sizes are those of `auto_sizes.GivenSizes`. `spec_*`: the drafts of a step (`DraftShape.of`).
    `spec_adaptive`: whether they follow load and acceptance ("auto": on CUDA, and with lookup). `ngram_*`:
    the agreements that lookup (`draft` "ngram") takes, in tokens. `overlap`: whether a decode step is
    launched before the previous one was read ("auto": on CUDA). `graph_self_test` compares each graph with
    the eager path before use. `feature_layers` ("2,14,25"): layer outputs that prefill captures beside those
    of the draft. `aggregated`: a decode engine that computes all its prompts, and captures graphs for them.
    `deterministic`: the bits of a target's row do not depend on the rows computed beside it. `quantize`: the
    form to which matrices in floats are rounded as they are loaded, or "none". `kv_dtype`: that of stored
    keys and values. `window_kv`: whether the KV behind the windows of windowed layers is given up ("free"),
    "keep"s its pages, or "auto". `count_experts`: rows are counted by the experts that computed them.
    `return_routed_experts`: the experts of rows are kept for requests that ask. `tp`: the number of ranks of
    a tensor-parallel worker. `dp_attention`: the number of ranks that share the experts and have requests and
    attention of their own, with a `tp` of 1 or the same number; 1: no such ranks. `ep`: experts are dealt
    whole to ranks, otherwise cut by their widths.
    """

    model: str
    draft: str = ""
    no_draft: bool = False
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    kv_dtype: str = "auto"
    window_kv: str = "auto"
    threads: int = 0
    prefix_cache: bool = True
    spec_steps: int = 3
    spec_topk: int = 1
    spec_tokens: int = 0
    spec_adaptive: str = "auto"
    ngram_min: int = 2
    ngram_max: int = 5
    ngram_window: int = 8192
    overlap: str = "auto"
    graph_self_test: bool = True
    deterministic: bool = False
    feature_layers: str = ""
    aggregated: bool = False
    count_experts: bool = False
    return_routed_experts: bool = False
    tp: int = 1
    dp_attention: int = 1
    ep: bool = False

    def __post_init__(self) -> None:
        if self.graphs not in ("auto", "on", "off"):
            raise ValueError(f"graphs {self.graphs!r}: use auto, on or off")
        if self.window_kv not in ("auto", "free", "keep"):
            raise ValueError(f"window_kv {self.window_kv!r}: use auto, free or keep")

    @property
    def extra_feature_ids(self) -> tuple[int, ...]:
        """The ids in `feature_layers`. The role's config has checked their form."""
        return tuple(int(layer) for layer in self.feature_layers.split(",")) if self.feature_layers else ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the worker."""
        return max(self.tp, self.dp_attention)

    @property
    def has_draft(self) -> bool:
        """Whether the engine drafts."""
        return bool(self.draft) and not self.no_draft


def resolve_device(device: str) -> torch.device:
    """The torch device for a setting; "auto" is CUDA if there is a usable device.

    Raises CheckpointError, naming the remedy, for "cuda" without a usable CUDA device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(
            "device cuda: this machine has no usable CUDA device; start with --device cpu or auto"
        )
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype for a setting.

    "auto" is bfloat16 on CUDA and on CPUs with native bfloat16 products (half the bytes per step), else
    float32. Raises CheckpointError for an unknown name.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or has_native_bfloat16() else torch.float32
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not known; use one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def has_native_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bfloat16 products (AVX512-BF16, AMX, or Arm BF16); False if the kernel does not
    tell.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return not NATIVE_BFLOAT16.isdisjoint(flags)
