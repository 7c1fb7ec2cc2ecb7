"""The tiers of a worker's KV cache below its pool, by the settings of the worker."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..cluster.config.groups import EngineSettings
from ..cluster.config.tier_checks import GIB
from ..cluster.errors import StartupError
from ..cluster.process.failpoints import Reach, unarmed
from ..engine.engine import Engine
from ..engine.kv.page_order import PageOrder
from ..engine.kv.tiers.cache_tiers import CacheTiers
from ..engine.kv.tiers.cuda_page_copies import CudaPageCopies
from ..engine.kv.tiers.disk_files import DiskFiles
from ..engine.kv.tiers.host_slab import HostSlab, slot_bytes_of
from ..engine.kv.tiers.page_copies import PageCopies
from ..engine.kv.tiers.page_keys import PageKeys
from ..engine.kv.tiers.running_tiers import RunningTiers
from ..engine.kv.tiers.slot_table import SlotTable
from ..engine.kv.tiers.tier_threads import TierThreads
from ..engine.speculative.drafters.protocol import draft_pools

logger = logging.getLogger(__name__)

MIB = 1 << 20
STAGING_PAGES = 64  # least host memory on the way to a disk, where it has no budget
STAGING_BYTES = {"cpu": 256 * MIB, "cuda": 1024 * MIB}


def open_tiers(
    engine: Engine,
    config: EngineSettings,
    keys: PageKeys,
    *,
    notify: Callable[[], None] = lambda: None,
    reach: Reach = unarmed,
) -> RunningTiers | None:
    """The tiers that the settings ask for, under `keys`; None: none. `notify` is called when a copy has
    ended.

    Raises StartupError for host memory that the system does not give, and for pages that a GPU cannot digest.
    """
    host_bytes = int(max(0.0, config.host_cache_gib) * GIB)
    if not engine.cache.enabled or not (host_bytes or config.disk_cache):
        return None
    if not engine.group.is_solo:
        raise StartupError(
            f"a worker of {engine.group.size} ranks keeps nothing below its pool; leave out --host-cache-gib "
            "and --disk-cache"
        )
    planes = tier_planes(engine)
    page_bytes = sum(plane.shape[1] for plane in planes)
    slot_bytes = slot_bytes_of(page_bytes)
    num_slots = host_bytes // slot_bytes or max(
        STAGING_PAGES, STAGING_BYTES[engine.pool.device.type] // slot_bytes
    )
    try:
        slab = HostSlab(num_slots, page_bytes, engine.pool.device)
    except OSError as error:
        raise StartupError(
            f"--host-cache-gib {config.host_cache_gib:g}: the system gives no {num_slots * slot_bytes} bytes "
            f"({error.strerror}); give less"
        ) from None
    linear_depth = linear_depth_of(engine)
    tiers = CacheTiers(
        engine.cache,
        keys,
        SlotTable(num_slots, linear_depth),
        page_bytes=page_bytes,
        is_staging=not host_bytes,
    )
    threads = TierThreads(_copies_of(planes, slab, engine.pool.order), notify, reach)
    running = RunningTiers(tiers, threads, linear_depth=linear_depth)

    def find_disk() -> DiskFiles | None:
        if not config.disk_cache or (engine.weights is not None and not engine.weights_hash):
            return None
        digests = " digests of a GPU" * planes[0].is_cuda
        return DiskFiles(
            Path(config.disk_cache),
            fingerprint=f"{_pages_of(engine)} weights {engine.weights_hash}{digests}",
            slot_bytes=slot_bytes,
            budget=int(config.disk_cache_gib * GIB),
            reach=reach,
        )

    running.find_disk = find_disk
    logger.info("pages of %d bytes go to %r below the KV pool", page_bytes, slab)
    return running


def _copies_of(planes: Sequence[torch.Tensor], slab: HostSlab, order: PageOrder) -> PageCopies:
    try:
        return (CudaPageCopies if planes[0].is_cuda else PageCopies)(planes, slab, order)
    except ValueError as error:
        raise StartupError(f"a GPU cannot keep pages below its pool: {error}; use --page-size 16") from None


def page_keys_of(engine: Engine) -> PageKeys:
    """The keys of the pages of `engine`."""
    return PageKeys(engine.cache, tier_fingerprint(engine))


def tier_planes(engine: Engine) -> list[torch.Tensor]:
    """The bytes of a page in all planes that a request gets back with it, uint8 `[num_pages, bytes]` each."""
    planes = [engine.pool.byte_view(), *(pool.byte_view() for pool in draft_pools(engine.drafter))]
    return planes if engine.features is None else [*planes, engine.features.byte_view()]


def tier_fingerprint(engine: Engine) -> str:
    """All that the content of a page depends on besides tokens and salt, by what is known at the start."""
    head = "" if engine.head is None else engine.head.version.fingerprint
    return f"{_pages_of(engine)} head {head}"


def _pages_of(engine: Engine) -> str:
    drafts = [repr(pool.layout) for pool in draft_pools(engine.drafter)]
    return (
        f"model {engine.fingerprint} pages {engine.pool.layout!r} drafts {drafts} features "
        f"{engine.feature_ids if engine.features is not None else ()} lookahead {engine.cache.lookahead}"
    )


def linear_depth_of(engine: Engine) -> float:
    """Tokens in front of a row at which its attention costs as much as all its products with weights.

    2 operations for each weight; 4 for each element of a query and token in front, over all layers.
    """
    config, is_vocabulary = engine.model_config, re.compile("embed_tokens|lm_head")
    weights = sum(weight.numel() for name, weight in engine.model.tensors() if not is_vocabulary.search(name))
    attention = config.num_layers * config.num_heads * config.head_dim
    return max(1.0, 2 * weights / (4 * max(1, attention)))
