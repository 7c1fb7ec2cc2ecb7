"""Whether a room can be held, and what it is given: pages for prompt and output, a feature staging area, a place.

All or nothing, and at once: a room that is refused holds nothing, and a room that is admitted never waits for memory.
"""

from dataclasses import dataclass

import torch

from ..cluster.messages import Reserve
from ..engine.kv_pool import PoolExhausted, launched
from ..engine.loader import STAGING_SHARE, Engine
from ..engine.page_table import pages_for
from ..engine.request import Request
from ..engine.sampling.params import validate_params
from ..kvtransfer.transport import PullRequest
from .queues import DecodeQueues, Room, RoomState

RETRY_AFTER_MS = 250


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a room is not taken; `retry_after_ms` 0 means never."""

    reason: str
    retry_after_ms: int


class Admission:
    """Admits rooms to a decode engine. `spare_tokens` slots behind the output take rows of tokens not yet verified."""

    def __init__(self, engine: Engine, queues: DecodeQueues, *, spare_tokens: int) -> None:
        self.engine = engine
        self.queues = queues
        self.spare_tokens = spare_tokens
        self.is_draining = False

    def admit(
        self, request: Request, now: float, deadline_ms: int, *, is_local: bool = False
    ) -> Room | Refusal:
        """Give `request` its pages and return its room, or say why not. `is_local`: its prompt is computed here."""
        refusal = self._never(request) or self._not_now()
        if refusal is not None:
            return refusal
        engine = self.engine
        is_scored = is_local and request.sampling.prompt_logprobs >= 0  # then every row must be computed
        held = engine.cache.match(
            request.prompt_ids, 0 if is_scored else request.num_prompt - 1, request.salt
        )
        try:
            fresh = engine.cache.alloc(self.pages_needed(request) - len(held))
        except PoolExhausted as error:
            engine.cache.allocator.release(held)
            return Refusal(reason=str(error), retry_after_ms=RETRY_AFTER_MS)
        have = len(held) * engine.page_size
        request.pages = held + fresh
        features = None if is_local else self._staging(request, have)
        request.num_computed = have if is_local else 0
        if features is not None and not self._staging_fits(features):
            engine.cache.allocator.release(request.pages)
            request.pages = []
            return Refusal(
                reason="features of other hand-offs fill the staging area", retry_after_ms=RETRY_AFTER_MS
            )
        return Room(
            request=request,
            arrived=now,
            deadline=now + deadline_ms / 1000 if deadline_ms else None,
            have=have,
            features=features,
            landed=have,
            warmed=have,
            state=RoomState.PREFILLING if is_local else RoomState.PULLING,
            sent=0 if is_local else 1,
            is_local=is_local,
        )

    def pages_needed(self, request: Request) -> int:
        """Pages for prompt, output and the rows that a verify may write behind them."""
        tokens = request.num_prompt + request.sampling.max_new_tokens + self.spare_tokens
        return pages_for(min(tokens, self.engine.max_context), self.engine.page_size)

    def pulled_pages(self, request: Request, have: int) -> list[int]:
        """The pages that blocks land in: those of the prompt behind `have`."""
        size = self.engine.page_size
        return request.pages[have // size : pages_for(request.num_prompt, size)]

    def pull_request(self, room: Room, message: Reserve) -> PullRequest:
        """What an admitted room pulls, and from whom."""
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
            after=launched(self.engine.pool.device),
        )

    def _never(self, request: Request) -> Refusal | None:
        engine, prompt, output = self.engine, request.num_prompt, request.sampling.max_new_tokens
        vocab_size = engine.model_config.vocab_size
        if not prompt or max(request.prompt_ids) >= vocab_size:
            return _never(f"a prompt needs at least one token, all below the vocabulary size {vocab_size}")
        if prompt + output > engine.max_context:
            return _never(
                f"{prompt} prompt + {output} output tokens exceed the context of {engine.max_context}"
            )
        if self.pages_needed(request) > engine.num_pages:
            return _never(
                f"{prompt} prompt + {output} output tokens need {self.pages_needed(request)} pages, "
                f"this worker has {engine.num_pages}"
            )
        try:
            validate_params(request.sampling, vocab_size)
        except ValueError as error:
            return _never(str(error))
        return None

    def _not_now(self) -> Refusal | None:
        if self.is_draining:
            return Refusal(reason="draining", retry_after_ms=RETRY_AFTER_MS)
        if self.queues.is_full:
            return Refusal(reason=f"{self.queues.max_running} rooms are held", retry_after_ms=RETRY_AFTER_MS)
        return None

    def _staging(self, request: Request, have: int) -> torch.Tensor | None:
        """Where features of the pulled pages land, `[pages, page_size, K*H]`; None when nobody drafts."""
        engine = self.engine
        if engine.drafter is None:
            return None
        shape = (len(self.pulled_pages(request, have)), engine.page_size, engine.feature_width)
        return torch.empty(shape, dtype=engine.pool.dtype, device=engine.pool.device)

    def _staging_fits(self, features: torch.Tensor) -> bool:
        """Whether features in flight stay within their share; a room alone always fits."""
        used = sum(room.features.nbytes for room in self.queues if room.features is not None)
        return used == 0 or used + features.nbytes <= self.engine.pool.kv.nbytes // STAGING_SHARE


def _never(reason: str) -> Refusal:
    return Refusal(reason=reason, retry_after_ms=0)
