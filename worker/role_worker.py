"""The base of both workers: orders, cancels, failures, deadlines and the drain of a worker's rooms.

A role adds the work of its rooms between an order and their end, and `step`, the work of one forward.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import ClassVar, Generic, TypeVar

import msgspec
import torch

from ..cluster.process.failpoints import Reach, unarmed
from ..cluster.process.log import fields
from ..cluster.protocol.messages import (
    Cancel,
    ChangeRole,
    ControlUp,
    DecodeTimeline,
    Failed,
    Finished,
    Gone,
    GraphCounts,
    Prefill,
    PromptEmbeds,
    Refused,
    Reserve,
    RoomCounts,
    TellPrefixes,
    TierStats,
    WorkerStats,
    is_canary,
)
from ..cluster.protocol.prompt_embeds import cache_salt
from ..engine.engine import Engine
from ..engine.kv.tiers.running_tiers import RunningTiers
from ..engine.request import Request
from ..engine.sampling.params import SamplingParams
from .commands import Command, Drop, LinkEvent
from .link import WorkerLink
from .prefix_news import PrefixNews
from .prompt_embeds import OFF, EmbedsInbox
from .prompt_pages import give_back_pages
from .refusal import Refusal
from .retractions import RETRACTED, Reason, count_retraction
from .role_change import RoleChange
from .room import WorkerRoom
from .room_table import RoomTable

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=WorkerRoom)

FIRST_TOKEN_COUNTERS = ("ttft_met", "ttft_missed")  # of requests, by the objective for first tokens


def sampling_params_of(order: Prefill | Reserve) -> SamplingParams:
    """The engine's sampling parameters of an order."""
    return SamplingParams(**msgspec.structs.asdict(order.sampling))


class RoleWorker(ABC, Generic[R]):
    """The scheduler thread's side of a worker.

    `counters`: totals by name. `slo_ttft_s`: the objective for first tokens in seconds, 0: none. `clock`
    returns monotonic seconds. Every room ends the same way: `_give_up` stops its work, and the role's
    `_close` releases its pages.
    """

    role: ClassVar[str]
    awaited: ClassVar[str]
    """The token that a deadline is for."""
    counted_as: ClassVar[Mapping[Enum, str]]
    """The field of `RoomCounts` for each state of a room; rooms in other states have ended."""

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        queues: RoomTable[R],
        *,
        instance: str,
        counters: dict[str, float],
        slo_ttft_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        embeds: EmbedsInbox | None = None,
    ) -> None:
        self.engine = engine
        self.embeds = embeds or EmbedsInbox(width=0, dtype=torch.float32, fault=OFF)
        self.link = link
        self.queues = queues
        self.instance = instance
        self.is_draining = False
        self.wants_beat = False  # a router gives it nothing before it has heard of its condition
        self.role_change = RoleChange(self.role)
        self.reach: Reach = unarmed
        self.tiers: RunningTiers | None = None  # of the KV cache, below the pool
        self._slo_ttft_s = slo_ttft_s
        self.news: PrefixNews | None = None  # about the prefixes that are held here
        self._clock = clock
        self._counters = counters

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.queues!r}, {self.engine.cache!r}>"

    @property
    def num_rooms(self) -> int:
        """Rooms that hold anything here."""
        return len(self.queues)

    @abstractmethod
    def step(self) -> bool:
        """One forward's worth of work; False when there was none."""

    # --- interface of the main loop -------------------------------------------------------------------------

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take in one message or transport event, at `now`.

        A role handles its own first and passes on the others.
        """
        match event:
            case Cancel(room=room, epoch=epoch):
                self.embeds.drop(room, epoch)
                self._cancel(room, epoch)
            case ChangeRole():
                if event.instance == self.instance:
                    self.role_change.take(event)
            case TellPrefixes():
                if self.news is not None and event.instance == self.instance:
                    self.news.asked()
            case PromptEmbeds(room=room, epoch=epoch):
                if not self.queues.is_known(room, epoch):
                    self.embeds.keep(event)
            case _:
                pass

    def drop_rooms(self, rooms: Collection[str], reason: str) -> None:
        """Give up these rooms: their router is gone."""
        self.embeds.clear()  # rows of rooms without an order, whose router is not known
        for room in self.queues:
            if room.request.room in rooms:
                self._give_up(room, reason)

    def expire(self, now: float) -> None:
        """Fail the rooms whose request is faulty or whose deadline has passed at `now`."""
        for room in self.queues:
            request = room.request
            if (room.deadline is None and request.guide is None) or not room.can_expire:
                continue
            if request.fault:
                self._fail(room, request.fault_kind, request.fault, retryable=request.is_fault_ours)
            elif room.deadline is not None and now >= room.deadline:
                late = f"the deadline passed before the {self.awaited} token"
                self._fail(room, "DeadlineExceeded", late, retryable=False)

    def start_draining(self) -> None:
        """Refuse new rooms from here on."""
        self.is_draining = True

    def hand_back(self) -> None:
        """Fail every room that is left so that the router continues it elsewhere: this worker leaves now."""
        for room in self.queues:
            if not room.is_over:
                self._fail(room, "Draining", f"{self.role} leaves", retryable=True)
        if self.tiers is not None:
            self.tiers.close()

    @abstractmethod
    def stats(self) -> WorkerStats:
        """The worker's condition for the heartbeat."""

    def _stats(
        self,
        *,
        accept_length: float | None = None,
        counters: Mapping[str, float] | None = None,
    ) -> WorkerStats:
        """The condition with the role's room counts; `counters` are the role's further totals."""
        engine, cache, windows = self.engine, self.engine.cache, self.engine.windows
        rooms, canaries = self._room_counts()
        return WorkerStats(
            state=self.role_change.state or ("draining" if self.is_draining else "serving"),
            role_fault=self.role_change.fault,
            pages_total=engine.num_pages,
            pages_free=self._free_pages(),
            pages_cached=cache.num_cached,
            window_pages_total=windows.pages.num_total if windows.is_on else 0,
            window_pages_free=windows.pages.num_available if windows.is_on else 0,
            running=rooms.running,
            queued=rooms.queued,
            transferring=rooms.transferring,
            canaries=canaries,
            graphs=GraphCounts(**engine.graph_counts),
            accept_length=accept_length,
            spec_steps=engine.spec_steps,
            phase=engine.lifecycle.phase.name.lower(),
            weights_hash=engine.weights_hash,
            prefix_news=0 if self.news is None else self.news.num_sent,
            tiers=[]
            if self.tiers is None
            else [TierStats(name=tier.name, used=tier.used, total=tier.total) for tier in self.tiers.use],
            counters=self._counters
            | ({} if self.tiers is None else self.tiers.counters)
            | engine.step_counters
            | engine.graph_counters
            | engine.watch_counters
            | engine.expert_counters
            | dict(counters or {})
            | self.link.transport_counters,
        )

    def _free_pages(self, promised: int = 0, wanted: int = 0) -> int:
        """Pages for further requests: free and evictable ones, no more than window pages can go with them.

        `promised`: window pages that requests count on. `wanted`: those of one long request.
        """
        free, windows = self.engine.cache.num_available, self.engine.windows
        if not windows.is_on:
            return free
        left = max(0, windows.pages.num_available - promised)
        return free if left >= min(wanted, windows.pages.num_total) else min(free, left)

    def _room_counts(self) -> tuple[RoomCounts, RoomCounts]:
        """All rooms by what happens to them, and the canaries of these."""
        rooms, canaries = (dict.fromkeys(RoomCounts.__struct_fields__, 0) for _ in range(2))
        for room in self.queues:
            if name := self.counted_as.get(room.state):
                rooms[name] += 1
                canaries[name] += is_canary(room.request.salt)
        return RoomCounts(**rooms), RoomCounts(**canaries)

    # --- the way in -----------------------------------------------------------------------------------------

    def _begins(self, order: Prefill | Reserve) -> bool:
        """Whether the order begins a new attempt. Older attempts of its room are given up."""
        if self.queues.is_known(order.room, order.epoch):
            return False  # a repeated or late message
        for old in self.queues.attempts(order.room):
            self._give_up(old, "a newer attempt began")
        return True

    def _request_of(
        self, order: Prefill | Reserve, sampling: SamplingParams, *, needs_embeds: bool = True
    ) -> Request | Refusal:
        """The engine's request for an order, or the refusal of its embeddings. A grammar starts to compile
        here.

        `needs_embeds`: the prompt's embeddings are read here, and were sent.
        """
        embeds: torch.Tensor | None = None
        if order.embeds is not None and sampling.prompt_logprobs >= 0:
            return Refusal(reason="prompt embeddings have no log probabilities", retry_after_ms=0)
        if sampling.routed_experts >= 0 and self.engine.expert_shape is None:
            text = "this worker keeps no experts of tokens: start it with --return-routed-experts"
            return Refusal(reason=text, retry_after_ms=0)
        if order.embeds is not None and needs_embeds:
            held = sum(room.request.embeds.nbytes for room in self.queues if room.request.embeds is not None)
            taken = self.embeds.take(order, held)
            if isinstance(taken, Refusal):
                return taken
            embeds = taken
            self._counters["embedded_tokens"] += len(taken)
        return Request(
            room=order.room,
            epoch=order.epoch,
            prompt_ids=order.prompt_ids,
            sampling=sampling,
            num_prior_output=order.num_output,
            salt=cache_salt(order.salt, order.embeds),
            num_embeds=0 if order.embeds is None else order.embeds.count,
            embeds=embeds,
            eos_ids=self.engine.model_config.eos_token_ids,
            guide=self.engine.grammars.guide(sampling.grammar),
        )

    def _refuse(self, order: Prefill | Reserve, refusal: Refusal) -> None:
        self._counters["refused"] += 1
        self.wants_beat = True
        self._turn_away(
            Refused(
                room=order.room,
                epoch=order.epoch,
                instance=self.instance,
                reason=refusal.reason,
                retry_after_ms=refusal.retry_after_ms,
            )
        )

    def _is_finished_already(self, request: Request) -> bool:
        """Whether the prompt already ends the request, as after a lost Finished.

        If so, answers the order with Finished.
        """
        if not request.ends_with_prompt(self.engine.model_config.eos_token_ids):
            return False
        room, epoch = request.room, request.epoch
        self._turn_away(
            Finished(room=room, epoch=epoch, instance=self.instance, reason="stop", output_tokens=0)
        )
        return True

    def _turn_away(self, answer: Refused | Finished | Failed) -> None:
        """Answer an order without taking it; its repetition is ignored."""
        self.queues.turned_away(answer.room, answer.epoch)
        self.embeds.drop(answer.room, answer.epoch)
        self._send(answer)

    # --- the ways out ---------------------------------------------------------------------------------------

    def _cancel(self, room_id: str, epoch: int) -> None:
        """Give up every attempt up to `epoch`.

        Gone is sent when their pages are free, or at once if there is no attempt.
        """
        attempts = self.queues.cancel(room_id, epoch)
        for room in attempts:
            self._counters["cancelled"] += not room.is_over
            room.gone_epoch = max(room.gone_epoch, epoch)
            self._give_up(room, "cancelled")
        if not attempts:
            self._send(Gone(room=room_id, epoch=epoch, instance=self.instance))

    def _fail(self, room: R, kind: str, message: str, *, retryable: bool) -> None:
        """Tell the router that the attempt failed, and give the room up."""
        self._send_failed(room, kind, message, retryable=retryable)
        self._give_up(room, message)

    def _send_failed(self, room: R, kind: str, message: str, *, retryable: bool) -> None:
        self._send(self._failed(room.request, kind, message, retryable=retryable))

    def _failed(self, request: Request, kind: str, message: str, *, retryable: bool) -> Failed:
        return Failed(
            room=request.room,
            epoch=request.epoch,
            instance=self.instance,
            kind=kind,
            message=message,
            retryable=retryable,
        )

    def _retract(self, room: R, reason: Reason) -> None:
        """Takes what the room holds for another one. The router continues it from its tokens."""
        request, self.wants_beat = room.request, True
        count_retraction(self._counters, reason, priority=room.priority, num_tokens=request.num_computed)
        logger.debug("retracted", extra=fields(room=request.room, tokens=request.num_output))
        failed = self._failed(request, RETRACTED, reason.message, retryable=True)
        self._send(msgspec.structs.replace(failed, is_preempted=reason.is_preempted))
        self._give_up(room, reason.message)

    def _count_first_token(self, room: R, now: float) -> None:
        """Counts by the objective a request that has its first token at `now`, if it is its first attempt to
        give one and a client's.
        """
        if not self._slo_ttft_s or room.request.num_prior_output or is_canary(room.request.salt):
            return
        is_met = now - room.arrived + room.waited <= self._slo_ttft_s
        self._counters["ttft_met" if is_met else "ttft_missed"] += 1

    @abstractmethod
    def _give_up(self, room: R, reason: str) -> None:
        """End a room from this side. No-op for a room that has ended."""

    def _drop(self, room: R, reason: str) -> None:
        """Have the transport let go of the room's pages; `DropDone` answers."""
        self._send(Drop(room=room.request.room, epoch=room.request.epoch, reason=reason))

    def _free(self, room: R) -> None:
        """Give the room's pages back, forget the room, and answer the Cancel that waits for it."""
        request = room.request
        if room.restore is not None and self.tiers is not None:
            self.tiers.give_up(room.restore)
        if room.is_tainted and self.engine.windows.is_on:
            self.engine.cache.forget(request.pages)  # parts of the prompt may be there already
        give_back_pages(self.engine.cache, self.engine.windows, request)
        self.queues.remove(room)
        if room.gone_epoch >= 0 and not self.queues.up_to(request.room, room.gone_epoch):
            timeline = self._timeline_of(room)
            self._send(
                Gone(room=request.room, epoch=room.gone_epoch, instance=self.instance, timeline=timeline)
            )

    def _timeline_of(self, room: R) -> DecodeTimeline | None:
        """The times and counts of decode for the room; None on prefill."""
        return None

    def _send(self, item: Command | ControlUp) -> None:
        self.link.post(item)
