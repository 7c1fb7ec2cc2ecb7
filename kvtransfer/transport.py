"""The interface of a KV transport, and its events for the owner.

The owner is a worker's link thread. It calls `poll()` in a loop and handles the events. A transport touches
only the pages that were given to it, and none of them after the terminal event of their room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..cluster.process.failpoints import Reach
from ..engine.kv.page_order import PageOrder


@dataclass(frozen=True, kw_only=True)
class Planes:
    """The memory from which blocks are read or into which they are written.

    `kv`: uint8 `[num_pages, kv_page_bytes]`, page-major over all layers. `features`: uint8
    `[num_pages, feature_page_bytes]`, None if the layout has no feature plane. Both are contiguous. `order`
    tells when a copy may touch a page; planes on a GPU must have one. `window`: uint8
    `[num_window_pages, window_page_bytes]`, None without window pages; copies know window page i as page
    `num_pages` + i.
    """

    kv: torch.Tensor
    features: torch.Tensor | None
    order: PageOrder | None = None
    window: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Prefill's side of a room: `pages[i]` holds prompt tokens [i*page_size, (i+1)*page_size).

    With window pages, those of the last pages follow, from `KVLayout.tail_of` on.
    The pages of the first `bare_tokens` tokens have no features.
    """

    room: str
    epoch: int
    num_tokens: int  # prompt length
    pages: tuple[int, ...]
    bare_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class PullRequest:
    """Decode's side of a room. The pull starts at token `have` (a multiple of page_size).

    `pages[i]` receives prompt tokens [have + i*page_size, ...). With window pages, those of the last pages
    follow, from `RoomStream.window_first` on. `features` receives the aux features of the room, uint8
    `[number of pages, feature_page_bytes]`, row i for pages[i]; None without a feature plane. A row may be
    written when its page may be written (`KVPool.landing_rows`).
    """

    room: str
    epoch: int
    num_tokens: int
    have: int
    pages: tuple[int, ...]
    features: torch.Tensor | None
    endpoint: str
    peer_instance: str


@dataclass(frozen=True, kw_only=True)
class Released:
    """Terminal event on prefill: decode holds all blocks; the pages are free to reuse."""

    room: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Terminal event on prefill: the peer's Abort or the lease ended the room; its pages are free."""

    room: str
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Freed:
    """Event of a transport over several ranks: no rank touches the pages of a released attempt any more."""

    room: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Attached:
    """Event on a rank of a tensor-parallel prefill worker: decode has attached, with `num_ranks` ranks."""

    room: str
    epoch: int
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Landed:
    """Event on decode: prompt tokens [have, tokens) are in place, and their blocks were checked."""

    room: str
    epoch: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Terminal event on decode: all prompt tokens are in place and prefill was released.

    `first_token` is prefill's. `seconds`: from the moment at which the last blocks were ready on prefill to
    the last byte; what was pulled while prefill computed costs no time. `pull_seconds`: from the first
    announcement to the last byte.
    """

    room: str
    epoch: int
    first_token: int
    num_bytes: int
    num_blocks: int
    num_shm_blocks: int = 0  # blocks of these that were read from shared memory
    num_device_blocks: int = 0  # blocks of these that were read from the memory of prefill's device
    num_nixl_blocks: int = 0  # blocks of these that were read through NIXL
    seconds: float
    pull_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Terminal event on decode: the hand-off failed and nothing writes to the pages any more.

    `kind` is the name of a class in errors.py.
    """

    room: str
    epoch: int
    kind: str
    reason: str


TransportEvent = Released | Dropped | Attached | Freed | Landed | Complete | Lost


class KVTransport(Protocol):
    """A transport between prefill and decode workers. Calls of the other role raise LocalProtocolError."""

    frees_later: (
        bool  # pages of a released room are in use until `Freed`, and not only until the call returns
    )

    def offer(self, offer: Offer) -> None:
        """Prefill: open a room without ready tokens. The pages stay pinned until Released or Dropped."""

    def launched(self, room: str, epoch: int, start: int, tokens: int) -> None:
        """Prefill: the forward that writes tokens [start, tokens) was launched, and their pages are stamped.

        Their blocks may then be read behind it, before `advance`. Optional.
        """

    def advance(
        self,
        room: str,
        epoch: int,
        tokens_ready: int,
        first_token: int | None = None,
        ready_at: float | None = None,
    ) -> None:
        """Prefill: tokens [0, tokens_ready) are final in their pages. `first_token` closes the offer.

        `ready_at`: monotonic time at which they were known to be final, by default now.
        """

    def pull(self, request: PullRequest) -> None:
        """Decode: attach to the peer's room and land its blocks."""

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Does the I/O that is due, waits at most `timeout` seconds for more, and returns the events."""

    def release(self, room: str, epoch: int, reason: str) -> None:
        """Either role: ends the room now (cancel). Idempotent; no event follows for the room.

        If `frees_later`, one `Freed` follows each call, once the pages are free.
        """

    def close(self) -> None:
        """Aborts every room, tells the peers and closes the sockets. Idempotent."""


class PollableTransport(KVTransport, Protocol):
    """A transport whose owner waits for it together with other sockets and descriptors."""

    reach: Reach  # failpoints

    def pollables(self) -> list[int]:
        """File descriptors; when one is readable, `poll` may have work.

        The descriptors may be edge-triggered. The owner therefore calls `next_deadline` directly before each
        wait; it is due at once for work that arrived before.
        """

    def next_deadline(self, now: float) -> float | None:
        """Latest monotonic time of the next `poll`; None: only a readable descriptor makes it due."""

    @property
    def counters(self) -> dict[str, float]:
        """Totals of completed and dropped work, by name."""


class ListeningTransport(PollableTransport, Protocol):
    """Prefill's end, to which decode workers connect."""

    endpoint: str  # the address for decode workers, with the public key if there is one

    def name_ranks(self, endpoints: Sequence[str]) -> None:
        """Of rank 0 of several: the addresses for decode workers of all ranks, in order."""
