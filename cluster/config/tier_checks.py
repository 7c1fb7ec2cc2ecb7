"""The budgets of the KV cache's lower tiers against what this host has free.

Host memory and disks are shared: each worker checks its own budget before it loads anything, and `baton
doctor` names all of them.
"""

import os
import shutil
from pathlib import Path

import psutil  # type: ignore[import-untyped,unused-ignore]

from ..errors import ConfigError
from .groups import EngineSettings, RoleConfig

GIB = 1 << 30


def check_tiers(config: RoleConfig) -> None:
    """Raises ConfigError for tiers without a prefix cache or under window pages, and for budgets that this
    host cannot hold.
    """
    if not isinstance(config, EngineSettings):
        return
    name = "--host-cache-gib" if config.host_cache_gib > 0 else "--disk-cache" if config.disk_cache else ""
    if name and not config.prefix_cache:
        raise ConfigError(f"{name} keeps pages of the prefix cache; leave out --no-prefix-cache, or {name}")
    if name and config.window_kv == "free":
        raise ConfigError(f"{name} keeps whole pages; leave out --window-kv free, or {name}")
    if config.host_cache_gib > 0:
        check_host(config.host_cache_gib, psutil.virtual_memory().available)
    if config.disk_cache:
        check_disk(Path(config.disk_cache), config.disk_cache_gib)


def has_tiers(config: EngineSettings) -> bool:
    """Whether the settings ask for a tier below the KV pool."""
    return config.host_cache_gib > 0 or bool(config.disk_cache)


def frees_windows(config: EngineSettings) -> bool:
    """Whether a worker with these settings gives up the KV behind the windows of its model."""
    return config.window_kv != "keep" and not has_tiers(config)


def check_host(budget_gib: float, free: int) -> None:
    """Raises ConfigError for a budget beyond `free` bytes of host memory."""
    if budget_gib * GIB > free:
        raise ConfigError(
            f"--host-cache-gib {budget_gib:g}: this host has {free / GIB:.1f} GiB of free memory; give less"
        )


def check_disk(directory: Path, budget_gib: float) -> None:
    """Raises ConfigError for a directory that cannot be written, and for a budget beyond its file system."""
    place = existing(directory)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--disk-cache {directory}: {place} is no directory that this user may write; name another one"
        )
    free = free_disk(directory)
    if budget_gib * GIB > free:
        raise ConfigError(
            f"--disk-cache-gib {budget_gib:g}: {directory} has room for {free / GIB:.1f} GiB; give less"
        )


def free_disk(directory: Path) -> int:
    """Bytes that a disk tier in `directory` can have: free ones, and those of tiers that are there."""
    held = 0
    for path in directory.glob("kv-*/*"):
        try:
            held += path.stat().st_blocks * 512
        except OSError:  # another process removed it
            continue
    return shutil.disk_usage(existing(directory)).free + held


def existing(directory: Path) -> Path:
    """`directory`, or the nearest folder above it that exists."""
    path = directory.absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    return path
