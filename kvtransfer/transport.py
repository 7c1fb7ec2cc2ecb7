"""What a KV transport does, and what it tells its owner.

The owner is a worker's link thread; it calls `poll()` in a loop and acts on the events. A transport never touches a page
outside the ones it was given, and never after it has reported the room's terminal event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..cluster.process.failpoints import Reach
from ..engine.kv.page_order import PageOrder


@dataclass(frozen=True, kw_only=True)
class Planes:
    """The memory that blocks are read from or land in.

    `kv`: uint8 `[num_pages, kv_page_bytes]`, page-major over all layers. `features`: uint8 `[num_pages,
    feature_page_bytes]` or None when the layout has no feature plane. Both are contiguous. `order` says when a copy may
    touch a page; on a GPU there must be one.
    """

    kv: torch.Tensor
    features: torch.Tensor | None
    order: PageOrder | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Prefill's side of a room: `pages[i]` holds prompt tokens [i*page_size, (i+1)*page_size)."""

    room: str
    epoch: int
    num_tokens: int  # prompt length
    pages: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PullRequest:
    """Decode's side of a room. The pull starts at token `have` (a multiple of page_size).

    `pages[i]` receives prompt tokens [have + i*page_size, ...). `features` is the room's own landing place, uint8
    `[len(pages), feature_page_bytes]`, row i for pages[i]; None without a feature plane. A row may be written when its page
    may be (`KVPool.landing_rows`).
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
    """Prefill: decode holds everything; the pages are free to reuse. Terminal."""

    room: str
    epoch: int


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Prefill: the room ended otherwise (abort by the peer, or lease end); the pages are free to reuse. Terminal."""

    room: str
    epoch: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Landed:
    """Decode: prompt tokens [have, tokens) are in place and every block up to there was checked."""

    room: str
    epoch: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Decode: all prompt tokens are in place, `first_token` is prefill's, prefill was released. Terminal."""

    room: str
    epoch: int
    first_token: int
    num_bytes: int
    num_blocks: int
    num_shm_blocks: int = 0  # of these, read from shared memory
    seconds: float  # first announcement to last block


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Decode: the hand-off failed; nothing writes to the pages any more. Terminal. `kind` is an errors.py class name."""

    room: str
    epoch: int
    kind: str
    reason: str


TransportEvent = Released | Dropped | Landed | Complete | Lost


class KVTransport(Protocol):
    """The five methods of a transport (plus `advance`, the progress of an offer)."""

    def offer(self, offer: Offer) -> None:
        """Prefill: open a room; nothing is ready yet. The pages stay pinned until Released or Dropped."""

    def advance(self, room: str, epoch: int, tokens_ready: int, first_token: int | None = None) -> None:
        """Prefill: tokens [0, tokens_ready) are final in their pages; `first_token` closes the offer."""

    def pull(self, request: PullRequest) -> None:
        """Decode: attach to the peer's room and land its blocks."""

    def poll(self, timeout: float) -> Sequence[TransportEvent]:
        """Do the I/O that is due, wait at most `timeout` seconds for more, and return what happened."""

    def release(self, room: str, epoch: int, reason: str) -> None:
        """Either side: give the room up now (cancel). Idempotent; no event follows for the room."""

    def close(self) -> None:
        """Abort every room, tell the peers, close the sockets. Idempotent."""


class PollableTransport(KVTransport, Protocol):
    """A transport that its owner waits for together with other things."""

    reach: Reach  # failpoints

    def pollables(self) -> list[int]:
        """File descriptors; when one is readable, `poll` may have work.

        They may be edge-triggered, so `next_deadline` is asked directly before each wait: it is due at once for work that
        was there before.
        """

    def next_deadline(self, now: float) -> float | None:
        """When `poll` must be called at the latest, on the monotonic clock; None: when a descriptor is readable."""

    @property
    def counters(self) -> dict[str, float]:
        """What the transport did and dropped so far, by name."""


class ListeningTransport(PollableTransport, Protocol):
    """Prefill's end, which decode workers call."""

    endpoint: str  # where they reach it, with its key if it has one
