"""Names of the transports for KV blocks, and how a pair of workers agrees on one.

Each side lists the transports that it supports and allows; prefill picks the best common one. `zmq_blocks`
works between any two hosts, so every worker lists it, and the other transports fall back to it.
"""

import os
from collections.abc import Mapping, Sequence

from ..errors import ConfigError, HandshakeRefused
from ..security.ciphers import AUTO

ZMQ_BLOCKS = "zmq_blocks"
SHM = "shm"
CUDA_SLAB = "cuda_slab"
TRANSPORTS = (CUDA_SLAB, SHM, ZMQ_BLOCKS)  # best first
LOCAL = (CUDA_SLAB, SHM)  # only between processes of one host
# prefixes of a decode worker's counters: complete hand-offs by the path that their blocks took
PATH_BYTES, PATH_SECONDS = "path_bytes_", "path_s_"


def transports_fault(text: str) -> str:
    """The fault of the setting `text`, as the end of a sentence that begins with it; "" if valid."""
    if text == AUTO:
        return ""
    names = text.split(",")
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or len(set(names)) < len(names):
        return f"is no list of transports: write {AUTO}, or some of {','.join(TRANSPORTS)}"
    if ZMQ_BLOCKS not in names:
        return f"lacks the transport that the others fall back to: write {text},{ZMQ_BLOCKS}"
    local = [name for name in LOCAL if name in names]
    if local and not has_shm():
        return f"names {local[0]}, which needs Linux: write {ZMQ_BLOCKS}"
    return ""


def transports_of(text: str, *, has_gpu: bool) -> tuple[str, ...]:
    """The names in the valid setting `text`, best first.

    "auto" gives all transports of this platform and device. Raises ConfigError if the setting names cuda_slab
    where the pages lie on no GPU.
    """
    if text == AUTO:
        return tuple(name for name in TRANSPORTS if _is_here(name, has_gpu))
    names = text.split(",")
    if CUDA_SLAB in names and not has_gpu:
        others = ",".join(name for name in names if name != CUDA_SLAB)
        raise ConfigError(f"--transports names {CUDA_SLAB}, which needs a GPU: write {others}")
    return tuple(name for name in TRANSPORTS if name in names)


def _is_here(name: str, has_gpu: bool) -> bool:
    return (name not in LOCAL or has_shm()) and (name != CUDA_SLAB or has_gpu)


def has_shm() -> bool:
    """Whether this platform has memfds with seals, which one process can pass to another."""
    return hasattr(os, "memfd_create")


def common_transports(ours: Sequence[str], theirs: Sequence[str], *, is_near: bool) -> tuple[str, ...]:
    """The transports that both ends of a pair have, the best first.

    An empty list comes from an older release, which has only zmq_blocks. `is_near`: both are known to run on
    one host; device memory crosses no other way. Raises HandshakeRefused, which shows both lists.
    """
    common = [name for name in TRANSPORTS if name in ours and name in (theirs or (ZMQ_BLOCKS,))]
    if CUDA_SLAB in common and not is_near:
        common.remove(CUDA_SLAB)
    if not common:
        raise HandshakeRefused(
            f"no common transport: ours {list(ours)}, theirs {[name[:32] for name in theirs]}"
        )
    return tuple(common)


def path_taken(num_blocks: int, num_shm: int, num_device: int) -> str | None:
    """The transports of a room's blocks, joined by "+", best first; None if nothing was pulled."""
    counts = {CUDA_SLAB: num_device, SHM: num_shm, ZMQ_BLOCKS: num_blocks - num_shm - num_device}
    return "+".join(name for name in TRANSPORTS if counts[name] > 0) or None


def path_rates(counters: Mapping[str, float]) -> dict[str, float]:
    """The rate in GB/s of each path in a decode worker's counters."""
    rates = {}
    for name, total in counters.items():
        if name.startswith(PATH_BYTES):
            path = name.removeprefix(PATH_BYTES)
            seconds = counters.get(PATH_SECONDS + path, 0.0)
            rates[path] = round(total / seconds / 1e9, 3) if seconds > 0 else 0.0
    return rates
