"""Admission of rooms: pages, a staging area for features, a place in the batch.

A room gets all of them at once or none: a refused room holds nothing. It gets the pages of its prompt and of
its next steps, while the pool covers the output that all rooms count on (`page_growth`). Nobody is admitted
before a more urgent room for which others make way (`preemption`).
"""

from collections.abc import Collection

import torch

from ..cluster.protocol.messages import Reserve
from ..engine.engine import Engine
from ..engine.kv.budget import STAGING_SHARE
from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.kv.window_pool import WindowedPool
from ..engine.request import Request
from ..engine.speculative.drafters.protocol import reads_features
from ..kvtransfer.transport import PullRequest
from ..worker.prompt_pages import give_back_pages, take_pages, take_shared_pages
from ..worker.refusal import Refusal, refuse_for_now, refuse_forever
from .page_growth import PageGrowth
from .page_sharing import PageSharing
from .queues import DecodeQueues, DecodeRoom, DecodeState, claim_order

RETRY_AFTER_MS = 250


class Admission:
    """Admits rooms to a decode engine.

    `growth` says how many pages a room needs, `sharing` which of them are another room's.
    """

    def __init__(
        self, engine: Engine, queues: DecodeQueues, growth: PageGrowth, sharing: PageSharing
    ) -> None:
        self.engine = engine
        self.queues = queues
        self.growth = growth
        self.sharing = sharing

    def admit(
        self, room: DecodeRoom, *, is_draining: bool = False, leader: DecodeRoom | None = None
    ) -> Refusal | None:
        """Give `room`, in state ADMITTING, its first pages; or return the refusal.

        A local room shares with `leader` what that has of the prompt.
        """
        request, is_local = room.request, room.is_local
        refusal = self._never(request) or self._not_now(room, is_draining)
        if refusal is not None:
            return refusal
        engine = self.engine
        try:
            num_pages = self.growth.first_pages(request, room.claim)
            if leader is None:
                have = take_pages(
                    engine.cache,
                    engine.windows,
                    request,
                    num_pages,
                    is_computed=is_local,
                    num_windowed=self.growth.next_pages(request),
                )
            else:
                shared = self.sharing.shared_pages(leader)
                take_shared_pages(
                    engine.cache,
                    engine.windows,
                    request,
                    shared,
                    num_pages,
                    num_windowed=self.growth.next_pages(request),
                )
                have = len(shared) * engine.page_size
        except PoolExhausted as error:
            return Refusal(reason=str(error), retry_after_ms=RETRY_AFTER_MS)
        if not self.growth.covers(room):
            return self._give_back(request, "the free pages are promised to running requests")
        features = None if is_local else self._staging(request, have)
        request.num_computed = have if is_local and leader is None else 0
        if features is not None and not self._staging_fits(features.nbytes):
            return self._give_back(request, "features of other hand-offs fill the staging area")
        room.have, room.features = have, features
        room.landed = room.warmed = have if leader is None else 0
        room.state = _first_state(is_local, leader)
        room.leader = None if leader is None else leader.key
        room.granted_pages = self.growth.granted_pages(request, room.claim)
        room.covered_output = self.growth.covered_output(request)
        return None

    def found(self, room: DecodeRoom, have: int) -> None:
        """The first `have` tokens of the prompt are in place, more than were when the room was admitted."""
        more = (have - room.have) // self.engine.page_size
        if room.features is not None:
            room.features = room.features[more:]
        if room.is_local:
            room.request.num_computed = have

    def _give_back(self, request: Request, reason: str) -> Refusal:
        give_back_pages(self.engine.cache, self.engine.windows, request, is_used=False)
        return Refusal(reason=reason, retry_after_ms=RETRY_AFTER_MS)

    def pulled_pages(self, request: Request, have: int) -> list[int]:
        """The pages that blocks land in: the prompt's pages behind its first `have` tokens."""
        size = self.engine.page_size
        return request.pages[have // size : pages_for(request.num_prompt, size)]

    def pull_request(self, room: DecodeRoom, message: Reserve) -> PullRequest:
        """The transport's order to pull an admitted room from its prefill worker."""
        request, features = room.request, room.features
        assert message.prefill_instance is not None
        return PullRequest(
            room=request.room,
            epoch=request.epoch,
            num_tokens=request.num_prompt,
            have=room.have,
            pages=(*self.pulled_pages(request, room.have), *self._pulled_windows(request, room.have)),
            features=None if features is None else features.flatten(1).view(torch.uint8),
            endpoint=message.prefill_endpoint,
            peer_instance=message.prefill_instance,
        )

    def _pulled_windows(self, request: Request, have: int) -> list[int]:
        """The window pages of the prompt's tail behind its first `have` tokens, by the numbers that copies
        know; empty without windows.
        """
        pool, size = self.engine.pool, self.engine.page_size
        if not isinstance(pool, WindowedPool):
            return []
        windows = self.engine.windows
        first = max(windows.tail_of(request.num_prompt), have // size)
        pages = request.pages[first : pages_for(request.num_prompt, size)]
        return [pool.wire_page(windows.pages.of(page)) for page in pages]

    def _never(self, request: Request) -> Refusal | None:
        return refuse_forever(
            request.prompt_ids,
            request.sampling,
            vocab_size=self.engine.model_config.vocab_size,
            size_fault=self._size_fault(request),
        )

    def _size_fault(self, request: Request) -> str:
        engine, prompt, output = self.engine, request.num_prompt, request.sampling.max_new_tokens
        if prompt + output > engine.max_context:
            return f"{prompt} prompt + {output} output tokens exceed the context of {engine.max_context}"
        whole = self.growth.whole_pages(request)
        if whole > engine.num_pages:
            return (
                f"{prompt} prompt + {output} output tokens need {whole} pages, this worker has "
                f"{engine.num_pages}"
            )
        windows = engine.windows
        if windows.is_on and (peak := self.growth.most_windows(request)) > windows.pages.num_total:
            return (
                f"{prompt} prompt + {output} output tokens need {peak} window pages at once, this worker has "
                f"{windows.pages.num_total}; give more --window-pages"
            )
        return ""

    def _not_now(self, room: DecodeRoom, is_draining: bool) -> Refusal | None:
        full = f"{self.queues.max_running} rooms are held" if self.queues.is_full else ""
        for other in self.queues.of(DecodeState.ADMITTING):
            if claim_order(other) < claim_order(room):
                full = full or "others make way for a room that is as urgent"
        return refuse_for_now(is_draining=is_draining, full=full, retry_after_ms=RETRY_AFTER_MS)

    def _staging(self, request: Request, have: int) -> torch.Tensor | None:
        """The staging area for features of the pulled pages, `[pages, page_size, K*H]`.

        None without a drafter that reads them.
        """
        engine = self.engine
        if not reads_features(engine.drafter):
            return None
        return engine.pool.landing_rows(self.pulled_pages(request, have), engine.feature_width)

    def has_staging(self, room: DecodeRoom, num_found: int, leaving: Collection[DecodeRoom] = ()) -> bool:
        """Whether the features of `room` fit, of whose prompt `num_found` pages are cached, when the rooms
        `leaving` have left.
        """
        engine, num_pages = self.engine, pages_for(room.request.num_prompt, self.engine.page_size) - num_found
        if room.is_local or not reads_features(engine.drafter):
            return True
        row_bytes = engine.feature_width * engine.pool.row_dtype.itemsize
        return self._staging_fits(num_pages * engine.page_size * row_bytes, leaving)

    def _staging_fits(self, num_bytes: int, leaving: Collection[DecodeRoom] = ()) -> bool:
        """Whether features in flight stay within their share of the KV pool's bytes.

        A single room always fits.
        """
        staying = [room for room in self.queues if room.features is not None and room not in leaving]
        used = sum(room.features.nbytes for room in staying if room.features is not None)
        return used == 0 or used + num_bytes <= self.engine.pool.nbytes // STAGING_SHARE


def _first_state(is_local: bool, leader: DecodeRoom | None) -> DecodeState:
    if leader is not None:
        return DecodeState.SHARING
    return DecodeState.PREFILLING if is_local else DecodeState.PULLING
