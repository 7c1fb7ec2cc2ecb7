"""The copies that a tier asks for, and their answers. Frozen values, exchanged over queues with threads.

    Save    pages of the pool -> slots of host memory
    Load    slots of host memory -> pages of the pool
    Spill   slots of host memory -> slots of the disk
    Fetch   slots of the disk -> slots of host memory

A digest covers a page's bytes and its key, so it tells a damaged page and the page of another key alike. The
host computes crc32c, a GPU another one (`device_digests`).
"""

from dataclasses import dataclass

import msgspec


class PageMove(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One page of a copy. `page`: of the pool, or 0. `slot`: of host memory. `disk_slot`: of the disk, or -1.

    `digest`: the expected one; 0 for a Save, which computes it. `parent` and `depth` are for the index of the
    disk.
    """

    key: bytes
    slot: int
    page: int = 0
    disk_slot: int = -1
    digest: int = 0
    parent: bytes = b""
    depth: int = 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A copy of some pages; `number` names it in its answer."""

    number: int
    moves: tuple[PageMove, ...]


@dataclass(frozen=True, kw_only=True)
class Save(Job):
    """Pages of the pool into host slots."""


@dataclass(frozen=True, kw_only=True)
class Load(Job):
    """Host slots into pages of the pool."""


@dataclass(frozen=True, kw_only=True)
class Spill(Job):
    """Host slots into disk slots."""


@dataclass(frozen=True, kw_only=True)
class Fetch(Job):
    """Disk slots into host slots."""


@dataclass(frozen=True, kw_only=True)
class JobDone:
    """The end of a job: the digest of each page as it is in its new place, None for one that failed.

    `ended`: monotonic seconds. `fault`: why the tier that was read or written is of no use any more; "": it
    is.
    """

    number: int
    digests: tuple[int | None, ...]
    ended: float
    fault: str = ""
