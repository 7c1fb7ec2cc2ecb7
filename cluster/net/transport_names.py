"""Names of the transports for KV blocks, and how a pair of workers agrees on one.

Each side lists the transports that it supports and allows; prefill picks the best common one. `zmq_blocks`
works between any two hosts, so every worker lists it, and the other transports fall back to it.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..distribution import install_command
from ..errors import ConfigError, HandshakeRefused
from ..security.ciphers import AUTO, CRC32C

ZMQ_BLOCKS = "zmq_blocks"
SHM = "shm"
CUDA_SLAB = "cuda_slab"
NIXL = "nixl"
TRANSPORTS = (CUDA_SLAB, SHM, NIXL, ZMQ_BLOCKS)  # best first
LOCAL = (CUDA_SLAB, SHM)  # only between processes of one host
# prefixes of a decode worker's counters: complete hand-offs by the path that their blocks took
PATH_BYTES, PATH_SECONDS = "path_bytes_", "path_s_"
RDMA_DEVICES = "/sys/class/infiniband"  # the kernel's, of any fabric with RDMA


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
    if NIXL in names and not has_nixl():
        others = ",".join(name for name in names if name != NIXL)
        return f"names {NIXL}, which is not installed: {install_command('nixl')}, or write {others}"
    return ""


def transports_of(text: str, *, has_gpu: bool, may_be_open: bool = False) -> tuple[str, ...]:
    """The names in the valid setting `text`, best first.

    `may_be_open`: as in `check_nixl`. "auto" gives all transports of this platform and device, and nixl where
    there is a fabric with RDMA: over tcp it is slower than messages. Raises ConfigError if the setting names
    cuda_slab where the pages lie on no GPU, or as `check_nixl`.
    """
    if text == AUTO:
        return tuple(name for name in TRANSPORTS if _is_here(name, has_gpu, may_be_open))
    check_nixl(text, may_be_open=may_be_open)
    names = text.split(",")
    if CUDA_SLAB in names and not has_gpu:
        others = ",".join(name for name in names if name != CUDA_SLAB)
        raise ConfigError(f"--transports names {CUDA_SLAB}, which needs a GPU: write {others}")
    return tuple(name for name in TRANSPORTS if name in names)


def may_be_open(ciphers: Sequence[str], *, trusted_network: bool) -> bool:
    """Whether the settings let blocks travel in the clear, and ports be open to every host of the network."""
    return trusted_network and CRC32C in ciphers


def check_nixl(text: str, *, may_be_open: bool) -> None:
    """Raises ConfigError if the setting `text` names nixl, unless a worker's ports and blocks may be open."""
    if NIXL in text.split(",") and not may_be_open:
        raise ConfigError(
            f"--transports names {NIXL}, which encrypts nothing and listens on every network: add "
            f"--trusted-network (and --kv-cipher {CRC32C} beside --keys) if only trusted hosts can reach it, "
            f"or leave {NIXL} out"
        )


def _is_here(name: str, has_gpu: bool, may_be_open: bool) -> bool:
    if name == NIXL:
        return may_be_open and has_nixl() and bool(rdma_devices())
    return (name not in LOCAL or has_shm()) and (name != CUDA_SLAB or has_gpu)


def nixl_modules(cuda: str) -> tuple[str, ...]:
    """The modules that may hold NIXL, the best first: its wheels are built for one version of CUDA each.

    `cuda`: torch's, such as "12.8"; "" without one.
    """
    modules = ("nixl_cu12", "nixl_cu13")
    return modules[::-1] if cuda.startswith("13") else modules


def has_nixl() -> bool:
    """Whether a wheel of NIXL is installed. It is not imported."""
    return hasattr(os, "eventfd") and any(importlib.util.find_spec(name) for name in nixl_modules(""))


def nixl_version() -> str:
    """The version of the installed wheel of NIXL; "" without one."""
    for name in nixl_modules(""):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def rdma_devices() -> list[str]:
    """The names of this host's devices for RDMA."""
    try:
        return os.listdir(RDMA_DEVICES)
    except OSError:
        return []


def has_shm() -> bool:
    """Whether this platform has memfds with seals, which one process can pass to another."""
    return hasattr(os, "memfd_create")


def common_transports(
    ours: Sequence[str], theirs: Sequence[str], *, is_near: bool, is_clear: bool = False
) -> tuple[str, ...]:
    """The transports that both ends of a pair have, the best first.

    An empty list comes from an older release, which has only zmq_blocks. `is_near`: both are known to run on
    one host; device memory crosses no other way, and nixl is for pairs without a local transport. `is_clear`:
    their blocks need no encryption, as nixl has none. Raises HandshakeRefused, which shows both lists.
    """
    common = [name for name in TRANSPORTS if name in ours and name in (theirs or (ZMQ_BLOCKS,))]
    if CUDA_SLAB in common and not is_near:
        common.remove(CUDA_SLAB)
    if NIXL in common and is_clear and not is_near:
        common = [name for name in common if name not in LOCAL]
    elif NIXL in common and (not is_clear or any(name in LOCAL for name in common)):
        common.remove(NIXL)
    if not common:
        raise HandshakeRefused(
            f"no common transport: ours {list(ours)}, theirs {[name[:32] for name in theirs]}"
        )
    return tuple(common)


def path_taken(num_blocks: int, num_shm: int, num_device: int, num_nixl: int = 0) -> str | None:
    """The transports of a room's blocks, joined by "+", best first; None if nothing was pulled."""
    num_others = num_blocks - num_shm - num_device - num_nixl
    counts = {CUDA_SLAB: num_device, SHM: num_shm, NIXL: num_nixl, ZMQ_BLOCKS: num_others}
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
