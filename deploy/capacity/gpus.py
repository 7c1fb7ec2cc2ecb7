"""Memory and rates of known GPUs, and what a worker can do on one.

The rates are those of the vendor's data sheets, dense bfloat16; docs/gpu.md names the sheets. The shares of
them that serving reaches come from the runs in `docs/benchmarks.md`. They decide how many GPUs prefill and
decode get. They promise no figure.

A CPU computes in float32. Its rates are those of its cores and memory channels: 32 operations a cycle (two
AVX2 multiply-adds of 8 numbers) at 2.5 GHz, and DDR4-3200 at 25.6 GB/s a channel, one for each 4 cores up to
8 channels.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cluster.config.fields import did_you_mean
from ...cluster.errors import ConfigError
from ...engine.auto_sizes import CONTEXT_BYTES, GPU_SHARE, Card, EngineSizes, GivenSizes
from .sizing import Measured, PlannedLoad, places_of, split_of
from .worker_sizes import ModelNeed

PREFILL_SHARE = 0.6  # of the arithmetic rate, in matrix products
EXPERTS_PREFILL_SHARE = 0.45  # the same with experts, whose products have fewer rows each
ATTENTION_SHARE = 0.28  # of the arithmetic rate, in prefill attention
DECODE_SHARE = 0.75  # of the memory rate, in decode steps
DRAFT_GAIN = 1.5  # decode with a head that gets 3 tokens accepted, at 128 requests
LINK_RATE = 6.8e9  # bytes per second through shared memory of one host, with its digest
NVLINK_SHARE = 0.5  # of NVLink's rate, in pulls between slabs in GPU memory, with their digests
NVLINK_FIXED = 0.001  # seconds of such a hand-off, beside its bytes
DECODE_PARTS = 2  # of the memory for KV on a shared GPU, to one of prefill
SHARES = 1000  # a share of memory is a multiple of 1 / SHARES
TYPICAL = PlannedLoad(prompt=2048, output=256, rate=1.0)


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A kind of GPU. `name` is part of the driver's name for it; `memory_mib` is what nvidia-smi shows."""

    name: str
    memory_mib: int
    tflops: float  # dense bfloat16 products, 1e12 per second
    gb_per_s: float  # of its memory, 1e9 bytes per second
    capability: tuple[int, int]
    nvlink: float = 0.0  # 1e9 bytes per second to another of its host, one way; 0: none

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.memory_mib << 20

    @property
    def card(self) -> Card:
        """The idle GPU as an engine sees it."""
        if self.name == CPU:
            return Card()
        free = self.memory - CONTEXT_BYTES
        return Card(name=self.name, total=self.memory, free=free, capability=self.capability)


GPUS = (
    GpuModel(name="B200", memory_mib=183359, tflops=2250, gb_per_s=8000, capability=(10, 0), nvlink=900),
    GpuModel(name="H200", memory_mib=143771, tflops=989, gb_per_s=4800, capability=(9, 0), nvlink=450),
    GpuModel(name="H100", memory_mib=81559, tflops=989, gb_per_s=3350, capability=(9, 0), nvlink=450),
    GpuModel(name="H100 PCIe", memory_mib=81559, tflops=756, gb_per_s=2000, capability=(9, 0)),
    GpuModel(name="A100", memory_mib=81920, tflops=312, gb_per_s=2039, capability=(8, 0), nvlink=300),
    GpuModel(name="A100", memory_mib=40960, tflops=312, gb_per_s=1555, capability=(8, 0), nvlink=300),
    GpuModel(name="L40S", memory_mib=46068, tflops=362, gb_per_s=864, capability=(8, 9)),
    GpuModel(name="RTX 5090", memory_mib=32607, tflops=209, gb_per_s=1792, capability=(12, 0)),
    GpuModel(name="RTX 4090", memory_mib=24564, tflops=165, gb_per_s=1008, capability=(8, 9)),
    GpuModel(name="L4", memory_mib=23034, tflops=121, gb_per_s=300, capability=(8, 9)),
    GpuModel(name="A10G", memory_mib=23028, tflops=70, gb_per_s=600, capability=(8, 6)),
    GpuModel(name="A10", memory_mib=23028, tflops=125, gb_per_s=600, capability=(8, 6)),
)
CPU = "CPU"
CPU_CORES = 16  # of the CPU that is listed
CORE_TFLOPS = 0.08  # 32 operations a cycle, 2.5 GHz
CHANNEL_GB_PER_S, CORES_A_CHANNEL, MOST_CHANNELS = 25.6, 4, 8
BRIDGED = ("PCIE", "NVL")  # words in the driver's name of a card that has NVLink only with a bridge
STAND_IN = "H100"  # its ratio of arithmetic to memory rate is assumed for a GPU that is not listed


def gpu_model(card: Card) -> GpuModel:
    """The listed GPU that the driver's name means, with the card's memory; for others, STAND_IN's rates, but
    no NVLink.
    """
    words = card.name.replace("-", " ").split()
    known = [gpu for gpu in GPUS if all(word in words for word in gpu.name.split())]
    best = max(known, key=lambda gpu: (len(gpu.name), -abs(gpu.memory - card.total)), default=None)
    chosen = best or next(gpu for gpu in GPUS if gpu.name == STAND_IN)
    if best is None or any(word.upper() in BRIDGED for word in words):
        chosen = replace(chosen, nvlink=0.0)
    return replace(chosen, name=card.name, memory_mib=card.total >> 20, capability=card.capability)


def gpu_here(card: Card, num_cores: int | None = None) -> GpuModel:
    """The rates of this host's card; without a GPU, of its CPU with `num_cores` cores (None: all)."""
    return gpu_model(card) if card.is_gpu else cpu_of(num_cores or os.cpu_count() or 1)


def cpu_of(num_cores: int) -> GpuModel:
    """A CPU with that many cores."""
    channels = min(MOST_CHANNELS, max(1, num_cores // CORES_A_CHANNEL))
    return GpuModel(
        name=CPU,
        memory_mib=0,
        tflops=round(num_cores * CORE_TFLOPS, 2),
        gb_per_s=round(channels * CHANNEL_GB_PER_S, 1),
        capability=(0, 0),
    )


def gpu_named(name: str) -> GpuModel:
    """The listed GPU of that name, of two with one name the larger, or a CPU. Raises ConfigError."""
    if name == CPU:
        return cpu_of(CPU_CORES)
    found = [gpu for gpu in GPUS if gpu.name == name]
    if not found:
        names = [*dict.fromkeys(gpu.name for gpu in GPUS), CPU]
        hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
        raise ConfigError(f"--gpu {name!r} is not listed{hint}")
    return max(found, key=lambda gpu: gpu.memory)


def sizes_of(card: Card, need: ModelNeed, *, is_decode: bool, share: float = 0.0) -> EngineSizes | None:
    """The sizes of a worker with `share` of the GPU's memory (0: GPU_SHARE); None when it does not fit."""
    try:
        return need.of(is_decode=is_decode).sizes_on(card, GivenSizes(gpu_memory_share=share))
    except ConfigError:
        return None


def kv_tokens_of(card: Card, need: ModelNeed, *, is_decode: bool, share: float = 0.0) -> int:
    """Tokens of typical requests in the KV pool of a worker with `share` of the memory; 0 when it does not
    fit.
    """
    sizes = sizes_of(card, need, is_decode=is_decode, share=share)
    if sizes is None:
        return 0
    tokens, typical = (sizes.num_pages - 1) * sizes.page_size, TYPICAL.prompt + TYPICAL.output
    if not sizes.num_window_pages:
        return tokens
    in_windows = (sizes.num_window_pages - 1) * sizes.page_size
    return min(tokens, in_windows * typical // need.shape.held_in_windows(typical))


def least_share(card: Card, need: ModelNeed, *, is_decode: bool) -> float:
    """The least share of the memory with which a worker holds one typical request; above 1 when none does."""
    low, high = 0, SHARES + 1  # in 1 / SHARES
    while high - low > 1:
        middle = (low + high) // 2
        tokens = kv_tokens_of(card, need, is_decode=is_decode, share=middle / SHARES)
        low, high = (low, middle) if tokens >= TYPICAL.prompt + TYPICAL.output else (middle, high)
    worker = need.of(is_decode=is_decode)
    weights = (worker.model.weight_bytes + CONTEXT_BYTES) / card.total
    return high / SHARES if high <= SHARES else max(high / SHARES, weights)


def shares_of(card: Card, need: ModelNeed, roles: Sequence[bool], share: float = GPU_SHARE) -> list[float]:
    """The shares of the memory for the workers of one GPU; `roles` tells which of them decode.

    Each gets what it needs for one typical request. The rest of `share` is divided, decode gets
    `DECODE_PARTS` times as much of it as prefill. [] when the workers do not fit together.
    """
    least = [least_share(card, need, is_decode=is_decode) for is_decode in roles]
    rest = share - sum(least)
    if rest < 0:
        return []
    parts = [DECODE_PARTS if is_decode else 1 for is_decode in roles]
    dealt = [low + rest * part / sum(parts) for low, part in zip(least, parts, strict=True)]
    return [math.floor(own * SHARES + 1e-6) / SHARES for own in dealt]


def load_on(card: Card, need: ModelNeed, load: PlannedLoad = TYPICAL) -> PlannedLoad:
    """`load` with the sizes that workers choose which have such a GPU each."""
    prefill, decode = (sizes_of(card, need, is_decode=is_decode) for is_decode in (False, True))
    if prefill is None or decode is None:
        return load
    return replace(
        load,
        chunk=prefill.chunk_size,
        kv_memory=float(decode.kv_bytes),
        max_running=decode.max_running,
    )


def estimate(gpu: GpuModel, need: ModelNeed, load: PlannedLoad) -> Measured:
    """The rates of workers of this model on this GPU, from the data sheet, for `load`."""
    shape, model, flops = need.shape, need.prefill.model, gpu.tflops * 1e12
    # of a token for each token before it
    attention = 4 * shape.attended_share(load.prompt) * model.num_heads * model.head_dim
    num_requests = max(1, places_of(shape, load))
    moved = need.decode.step_bytes(num_requests, shape.rows_read(load.prompt + load.output / 2))
    share = EXPERTS_PREFILL_SHARE if model.has_experts else PREFILL_SHARE
    step_s = moved / (DECODE_SHARE * gpu.gb_per_s * 1e9)
    return Measured(
        prefill_rate=share * flops / (2 * model.num_weights),
        slowing=attention / (ATTENTION_SHARE * flops),
        bandwidth=NVLINK_SHARE * gpu.nvlink * 1e9 if gpu.nvlink else LINK_RATE,
        fixed_s=NVLINK_FIXED if gpu.nvlink else 0.0,
        tpot_s=step_s / (DRAFT_GAIN if need.has_head else 1.0),
    )


def split_on(cards: Sequence[Card], need: ModelNeed) -> tuple[int, int]:
    """Numbers of prefill and decode workers for these GPUs, one each, by the one with the least free
    memory.
    """
    least = min(cards, key=lambda card: card.free)
    load = load_on(least, need)
    return split_of(len(cards), need.shape, estimate(gpu_model(least), need, load), load)
