"""Admission of rooms: pages for prompt and output, a staging area for features, a place in the batch.

A room gets all of them at once or none: a refused room holds nothing, and an admitted room never waits for
memory.
"""

import torch

from ..cluster.protocol.messages import Reserve
from ..engine.kv.budget import STAGING_SHARE
from ..engine.kv.page_table import pages_for
from ..engine.kv.pool import PoolExhausted
from ..engine.loader import Engine
from ..engine.request import Request
from ..engine.speculative.drafters.protocol import reads_features
from ..kvtransfer.transport import PullRequest
from ..worker.prompt_pages import take_pages
from ..worker.refusal import Refusal, refuse_for_now, refuse_forever
from .queues import DecodeQueues, DecodeRoom, DecodeState

RETRY_AFTER_MS = 250


class Admission:
    """Admits rooms to a decode engine.

    `spare_tokens`: slots behind the output for the rows of unverified drafts.
    """

    def __init__(self, engine: Engine, queues: DecodeQueues, *, spare_tokens: int) -> None:
        self.engine = engine
        self.queues = queues
        self.spare_tokens = spare_tokens

    def admit(
        self,
        request: Request,
        now: float,
        deadline_ms: int,
        *,
        is_draining: bool = False,
        is_local: bool = False,
    ) -> DecodeRoom | Refusal:
        """Give `request` its pages and return its room, or the refusal.

        `now`: monotonic seconds. `deadline_ms`: milliseconds from then on, 0: none. `is_local`: this worker
        computes the prompt.
        """
        refusal = self._never(request) or self._not_now(is_draining)
        if refusal is not None:
            return refusal
        engine = self.engine
        try:
            have = take_pages(engine.cache, request, self.pages_needed(request), is_computed=is_local)
        except PoolExhausted as error:
            return Refusal(reason=str(error), retry_after_ms=RETRY_AFTER_MS)
        features = None if is_local else self._staging(request, have)
        request.num_computed = have if is_local else 0
        if features is not None and not self._staging_fits(features):
            engine.cache.allocator.release(request.pages)
            request.pages = []
            return Refusal(
                reason="features of other hand-offs fill the staging area", retry_after_ms=RETRY_AFTER_MS
            )
        return DecodeRoom(
            request=request,
            arrived=now,
            deadline=now + deadline_ms / 1000 if deadline_ms else None,
            have=have,
            features=features,
            landed=have,
            warmed=have,
            state=DecodeState.PREFILLING if is_local else DecodeState.PULLING,
            sent=0 if is_local else 1,
            is_local=is_local,
        )

    def pages_needed(self, request: Request) -> int:
        """Pages for prompt, output and the rows that a verify can write behind them."""
        tokens = request.num_prompt + request.sampling.max_new_tokens + self.spare_tokens
        return pages_for(min(tokens, self.engine.max_context), self.engine.page_size)

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
            pages=tuple(self.pulled_pages(request, room.have)),
            features=None if features is None else features.flatten(1).view(torch.uint8),
            endpoint=message.prefill_endpoint,
            peer_instance=message.prefill_instance,
        )

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
        if self.pages_needed(request) > engine.num_pages:
            return (
                f"{prompt} prompt + {output} output tokens need {self.pages_needed(request)} pages, "
                f"this worker has {engine.num_pages}"
            )
        return ""

    def _not_now(self, is_draining: bool) -> Refusal | None:
        full = f"{self.queues.max_running} rooms are held" if self.queues.is_full else ""
        return refuse_for_now(is_draining=is_draining, full=full, retry_after_ms=RETRY_AFTER_MS)

    def _staging(self, request: Request, have: int) -> torch.Tensor | None:
        """The staging area for features of the pulled pages, `[pages, page_size, K*H]`.

        None without a drafter that reads them.
        """
        engine = self.engine
        if not reads_features(engine.drafter):
            return None
        return engine.pool.landing_rows(self.pulled_pages(request, have), engine.feature_width)

    def _staging_fits(self, features: torch.Tensor) -> bool:
        """Whether features in flight stay within their share of the KV pool's bytes.

        A single room always fits.
        """
        used = sum(room.features.nbytes for room in self.queues if room.features is not None)
        return used == 0 or used + features.nbytes <= self.engine.pool.kv.nbytes // STAGING_SHARE
