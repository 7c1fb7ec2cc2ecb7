"""Memory and rates of known GPUs, and what a worker can do on one.

The rates are those of the vendor's data sheets, dense bfloat16. The shares of them that serving reaches
come from the runs in `docs/benchmarks.md`. They decide how many GPUs prefill and decode get. They promise no
figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cluster.config.fields import did_you_mean
from ...cluster.errors import ConfigError
from ...engine.auto_sizes import GPU_SHARE
from .checkpoints import ModelNeed
from .sizing import Measured, PlannedLoad, places_of, split_of

WORK_BYTES = 2 << 30  # CUDA context, activations and graphs of one worker
PREFILL_SHARE = 0.6  # of the arithmetic rate, in matrix products
ATTENTION_SHARE = 0.28  # of the arithmetic rate, in prefill attention
DECODE_SHARE = 0.75  # of the memory rate, in decode steps
DRAFT_GAIN = 1.5  # decode with a head that gets 3 tokens accepted, at 128 requests
LINK_RATE = 6.8e9  # bytes per second through shared memory of one host, with its digest
CHUNK_TOKENS = 2048
DECODE_PARTS = 2  # of the memory for KV on a shared GPU, to one of prefill
MOST_RUNNING = 128  # requests of a decode worker beyond which a token takes too long for a chat
TYPICAL = PlannedLoad(prompt=2048, output=256, rate=1.0, chunk=CHUNK_TOKENS, max_running=MOST_RUNNING)


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A kind of GPU. `name` is part of the driver's name for it; `memory_mib` is what nvidia-smi shows."""

    name: str
    memory_mib: int
    tflops: float  # dense bfloat16 products, 1e12 per second
    gb_per_s: float  # of its memory, 1e9 bytes per second

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.memory_mib << 20


GPUS = (
    GpuModel(name="B200", memory_mib=183359, tflops=2250, gb_per_s=8000),
    GpuModel(name="H200", memory_mib=143771, tflops=989, gb_per_s=4800),
    GpuModel(name="H100", memory_mib=81559, tflops=989, gb_per_s=3350),
    GpuModel(name="H100 PCIe", memory_mib=81559, tflops=756, gb_per_s=2000),
    GpuModel(name="A100", memory_mib=81920, tflops=312, gb_per_s=2039),
    GpuModel(name="A100", memory_mib=40960, tflops=312, gb_per_s=1555),
    GpuModel(name="L40S", memory_mib=46068, tflops=362, gb_per_s=864),
    GpuModel(name="RTX 5090", memory_mib=32607, tflops=209, gb_per_s=1792),
    GpuModel(name="RTX 4090", memory_mib=24564, tflops=165, gb_per_s=1008),
    GpuModel(name="L4", memory_mib=23034, tflops=121, gb_per_s=300),
    GpuModel(name="A10G", memory_mib=23028, tflops=70, gb_per_s=600),
    GpuModel(name="A10", memory_mib=23028, tflops=125, gb_per_s=600),
)
STAND_IN = "H100"  # its ratio of arithmetic to memory rate is assumed for a GPU that is not listed


def gpu_model(name: str, memory: int) -> GpuModel:
    """The listed GPU that the driver's `name` means, with `memory` bytes; for others, STAND_IN's rates."""
    words = name.replace("-", " ").split()
    known = [gpu for gpu in GPUS if all(word in words for word in gpu.name.split())]
    best = max(known, key=lambda gpu: (len(gpu.name), -abs(gpu.memory - memory)), default=None)
    chosen = best or next(gpu for gpu in GPUS if gpu.name == STAND_IN)
    return replace(chosen, name=name, memory_mib=memory >> 20)


def gpu_named(name: str) -> GpuModel:
    """The listed GPU of that name, of two with one name the larger. Raises ConfigError."""
    found = [gpu for gpu in GPUS if gpu.name == name]
    if not found:
        names = list(dict.fromkeys(gpu.name for gpu in GPUS))
        hint = did_you_mean(name, names) or f"; known: {', '.join(names)}"
        raise ConfigError(f"--gpu {name!r} is not listed{hint}")
    return max(found, key=lambda gpu: gpu.memory)


def kv_bytes_of(memory: int, need: ModelNeed, *, is_decode: bool, share: float = GPU_SHARE) -> int:
    """Bytes for the KV pool of a worker with `share` of `memory` bytes; negative when the weights do not
    fit."""
    return int(memory * share) - need.weight_bytes(is_decode=is_decode) - WORK_BYTES


def kv_tokens_of(memory: int, need: ModelNeed, *, is_decode: bool, share: float = GPU_SHARE) -> int:
    """Tokens in the KV pool of a worker with `share` of `memory` bytes; 0 when the weights do not fit."""
    room = kv_bytes_of(memory, need, is_decode=is_decode, share=share)
    return max(0, room // need.token_bytes(is_decode=is_decode))


def least_share(memory: int, need: ModelNeed, *, is_decode: bool) -> float:
    """The share of `memory` bytes with which a worker holds one typical request; above 1 when it cannot."""
    tokens = TYPICAL.prompt + TYPICAL.output
    kv_bytes = tokens * need.token_bytes(is_decode=is_decode)
    return (need.weight_bytes(is_decode=is_decode) + WORK_BYTES + kv_bytes) / memory


def shares_of(memory: int, need: ModelNeed, roles: Sequence[bool], share: float = GPU_SHARE) -> list[float]:
    """The shares of `memory` bytes for the workers of one GPU; `roles` tells which of them decode.

    Each gets what it needs for one typical request. The rest of `share` is divided, decode gets
    `DECODE_PARTS` times as much of it as prefill. [] when the workers do not fit together.
    """
    least = [least_share(memory, need, is_decode=is_decode) for is_decode in roles]
    rest = share - sum(least)
    if rest < 0:
        return []
    parts = [DECODE_PARTS if is_decode else 1 for is_decode in roles]
    dealt = [low + rest * part / sum(parts) for low, part in zip(least, parts, strict=True)]
    return [math.floor(own * 1000) / 1000 for own in dealt]


def load_on(gpu: GpuModel, need: ModelNeed, load: PlannedLoad = TYPICAL) -> PlannedLoad:
    """`load` with the KV memory of a decode worker that has the whole GPU."""
    return replace(load, kv_memory=float(max(1, kv_bytes_of(gpu.memory, need, is_decode=True))))


def estimate(gpu: GpuModel, need: ModelNeed, load: PlannedLoad = TYPICAL) -> Measured:
    """The rates of workers of this model on this GPU, from the data sheet, for `load`."""
    shape, flops = need.shape, gpu.tflops * 1e12
    prefill_rate = PREFILL_SHARE * flops / (2 * need.num_weights)
    per_pair = 4 * shape.num_layers * need.attention_width / (ATTENTION_SHARE * flops)
    held = max(1, places_of(shape, load)) * (load.prompt + load.output / 2)  # tokens that a step reads
    moved = need.weight_bytes(is_decode=False) + held * shape.kv_bytes
    step_s = moved / (DECODE_SHARE * gpu.gb_per_s * 1e9)
    return Measured(
        prefill_rate=prefill_rate,
        slowing=per_pair,
        bandwidth=LINK_RATE,
        tpot_s=step_s / (DRAFT_GAIN if need.draft_weights else 1.0),
    )


def split_on(gpus: Sequence[GpuModel], need: ModelNeed, load: PlannedLoad = TYPICAL) -> tuple[int, int]:
    """Numbers of prefill and decode workers for these GPUs, one each, by the smallest of them."""
    least = min(gpus, key=lambda gpu: gpu.memory)
    sized = load_on(least, need, load)
    return split_of(len(gpus), need.shape, estimate(least, need, sized), sized)
