"""A decode server: KV caches in, tokens out, with drafts of any drafter.

1. Reserve           holds pages for the prompt and the next steps and a place in the batch, or refuses the
                     room at once; less urgent rooms make way for it
   restore           a prefix that a lower tier of the cache has comes back into the room's pages
2. pull              blocks land in the room's own pages; a prefix that is cached here is not pulled
   offer             prefill may pull the prefix that is cached here, instead of computing it
   local prefill     without a prefill worker, decode computes the prompt itself between steps of the batch
   sharing           a further choice of a request shares the prompt's pages of the first one
3. draft prefill     runs over the aux features as they land, within a budget of rows per step
4. batch             a warm room joins: draft -> verify -> accept -> extend, tokens to the router in one frame
                     a step is launched before the previous one is read; its tokens go out meanwhile
                     pages come with the tokens; where the pool is full, the newest room gives its pages up
5. end               every room ends in `_close`, which returns the pages, to the prefix cache first
"""

import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import ClassVar

import msgspec
from msgspec import UNSET

from ..cluster.process.log import fields
from ..cluster.protocol.messages import (
    DecodeTimeline,
    Finished,
    OfferPrefix,
    Refused,
    Reserve,
    Reserved,
    SwapDraft,
    TokenItem,
    TokenLogprob,
    Tokens,
    WorkerStats,
)
from ..cluster.telemetry.trace_context import carried_by
from ..engine.engine import Engine
from ..engine.kv.tiers.restore_costs import ComputeTime
from ..engine.kv.tiers.running_tiers import RunningTiers
from ..engine.parallel.lockstep import RanksLeft
from ..engine.speculative.drafters.protocol import reads_features
from ..engine.speculative.step.result import StepResult
from ..kvtransfer.transport import Complete, Dropped, Landed, Lost, Released
from ..worker.commands import DropDone, LinkEvent
from ..worker.link import WorkerLink
from ..worker.prompt_embeds import EmbedsInbox
from ..worker.prompt_pages import begin_restore, take_restored
from ..worker.recorder import SampleRecorder
from ..worker.refusal import Refusal
from ..worker.retractions import Reason
from ..worker.role_worker import RoleWorker, sampling_params_of
from ..worker.tier_startup import tier_fingerprint
from .admission import Admission
from .chunk_budget import StepGaps
from .draft_prefill import prefill_drafts
from .head_swap import HeadSwap
from .in_flight import StepsInFlight
from .local_prefill import LocalPrefill, keep_pages
from .page_growth import PageGrowth
from .page_sharing import NO_PROMPT, UNSHARED, PageSharing
from .preemption import LONGEST_WAIT_S, TOO_LONG, Preemption
from .prefix_offers import PrefixOffers
from .queues import DecodeQueues, DecodeRoom, DecodeState, OutputClaim
from .step_decoder import StepDecoder
from .step_metrics import StepMetrics

logger = logging.getLogger(__name__)

NOT_SHARED = "the room whose prompt it should share has none"


class DecodeWorker(RoleWorker[DecodeRoom]):
    """The scheduler thread's side of a decode server; `step` is one decode step of the batch."""

    role = "decode"
    awaited = "last"
    counted_as: ClassVar[Mapping[Enum, str]] = {
        DecodeState.RUNNING: "running",
        DecodeState.ADMITTING: "queued",
        DecodeState.WARMING: "queued",
        DecodeState.RESTORING: "queued",
        DecodeState.PREFILLING: "queued",
        DecodeState.SHARING: "queued",
        DecodeState.PULLING: "transferring",
    }
    queues: DecodeQueues

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        *,
        instance: str,
        max_running: int,
        local_prefill_tokens: int = 128,
        slo_itl_s: float = 0.0,
        slo_ttft_s: float = 0.0,
        grows: bool = True,
        decoder: StepDecoder | None = None,
        clock: Callable[[], float] = time.monotonic,
        embeds: EmbedsInbox | None = None,
        recorder: SampleRecorder | None = None,
        offers_prefixes: bool = False,
    ) -> None:
        queues, self._metrics = DecodeQueues(max_running), StepMetrics()
        super().__init__(
            engine,
            link,
            queues,
            instance=instance,
            counters=self._metrics.counters,
            slo_ttft_s=slo_ttft_s,
            clock=clock,
            embeds=embeds,
        )
        self.decoder: StepDecoder = decoder or engine.decoder()
        self.offers = PrefixOffers(engine, queues, link.post, self._metrics.counters, is_on=offers_prefixes)
        self.local = LocalPrefill(
            engine,
            self.decoder,
            local_prefill_tokens,
            clock,
            link.post,
            instance,
            slo_itl_s=slo_itl_s,
            slo_ttft_s=slo_ttft_s,
        )
        self.growth = PageGrowth(
            engine, queues, self.decoder, is_on=grows, prompt_rows=self.local.window_rows
        )
        self.sharing = PageSharing(engine, queues, self.decoder)
        self.admission = Admission(engine, queues, self.growth, self.sharing)
        self.preemption = Preemption(engine, queues, self.growth, self.admission.has_staging)
        self.in_flight = StepsInFlight(self.decoder)
        self._gaps = StepGaps(launches_ahead=engine.launches_ahead)
        self.recorder = recorder
        self.head_swap: HeadSwap | None = None
        if engine.head is not None:
            self.head_swap = HeadSwap(engine.head, self._forget_prefixes, lambda: self.reach("decode:swap"))

    def step(self) -> bool:
        """Runs draft prefill of landed features, a part of local prompts, and one step of the batch.

        Ranks that share experts run each of these forwards together, so one without work joins those of the
        others. Returns False if no room has work, here or there.
        """
        rounds = self.engine.rounds
        if rounds is None:
            return self._work()
        try:
            did_work = self._work()
            return rounds.finish() or did_work
        except RanksLeft:  # the worker leaves: what is left here is handed back
            return False

    def _work(self) -> bool:
        if self.head_swap is not None:
            self.head_swap.turn()
        if self.tiers is not None:
            self._turn_tiers(self.tiers)
        self._admit_waiting()
        did_warm = self._warm_landed()
        self._share_prompts()
        did_prefill = self._prefill_here()
        did_step = self._step_batch()
        return did_warm or did_prefill or did_step

    def _step_batch(self) -> bool:
        """Launches a step, then reads the previous one. Rooms that cannot be launched ahead wait for all
        unread steps.
        """
        batch = self.growth.cover(self._next_batch(), self._retract, is_draining=self.is_draining)
        num_unread = len(self.in_flight)
        if batch:
            self.reach("decode:step")
        is_ahead = bool(batch) and self.in_flight.launch(batch)
        self.local.cache_computed(self._head_number)  # while the device computes
        if self.news is not None:
            self.news.work()
        if num_unread:
            self._read_step()
        elif batch and not is_ahead:
            self._conclude(batch, self.decoder.step([room.request for room in batch]))
        return bool(batch) or num_unread > 0

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take in one message or transport event, at `now` in monotonic seconds."""
        match event:
            case Reserve():
                self._reserve(event, now)
            case Landed(room=room, epoch=epoch, tokens=tokens):
                self._on_landed(room, epoch, tokens)
            case SwapDraft():
                if self.head_swap is not None and event.instance == self.instance:
                    self.head_swap.take(event)
            case Complete():
                self._on_complete(event, now)
            case Lost(room=room, epoch=epoch, kind=kind, reason=reason):
                self._on_lost(room, epoch, kind, reason)
            case DropDone(room=room, epoch=epoch):
                found = self.queues.get(room, epoch)
                if found is not None and found.state is DecodeState.CLOSING:
                    self._close(found)
                self.offers.ended(room)
            case OfferPrefix():
                self.reach("decode:offer")
                if event.instance == self.instance:
                    self.offers.take(event, is_draining=self.is_draining)
            case Released(room=room):
                self.offers.ended(room)
            case Dropped(room=room):
                self.offers.ended(room, is_dropped=True)
            case _:
                super().handle(event, now)

    def expire(self, now: float) -> None:
        """As `RoleWorker.expire`. A room for which others did not make way in time goes back, too."""
        super().expire(now)
        for room in self.preemption.waiting:
            if now >= room.arrived + LONGEST_WAIT_S:
                self._turn_back(room, TOO_LONG)

    def stats(self) -> WorkerStats:
        """The worker's condition for the heartbeat."""
        recorder = self.recorder
        stats = self._stats(
            accept_length=self._metrics.accepts.accept_length,
            counters=self.in_flight.counters | ({} if recorder is None else recorder.counters),
        )
        return msgspec.structs.replace(
            stats,
            pages_promised=self.growth.num_promised,
            pages_free=self._free_pages(self.growth.num_promised_windows, self.growth.steady_windows),
            draft=None if self.head_swap is None else self.head_swap.status,
            recording=None if recorder is None else recorder.status,
        )

    def hand_back(self) -> None:
        """Fails every room that is left, and writes the samples that are not on disk yet."""
        super().hand_back()
        if self.recorder is not None:
            self.recorder.close()

    # --- start and end of rooms ------------------------------------------------------------------------

    def _reserve(self, order: Reserve, now: float) -> None:
        self.reach("decode:reserve")
        if not self._begins(order):
            return
        is_local = order.prefill_instance is None
        request = self._request_of(
            order,
            sampling_params_of(order),
            needs_embeds=is_local or reads_features(self.engine.drafter),
        )
        if isinstance(request, Refusal):
            return self._refuse(order, request)
        if is_local and self._is_finished_already(request):
            return
        leader = None if order.shares is None else self.sharing.leader_for(request, order.shares)
        if order.shares is not None and leader is None:
            self._counters["unshared"] += 1
            return self._turn_away(self._failed(request, UNSHARED, NOT_SHARED, retryable=True))
        room = DecodeRoom(
            request=request,
            arrived=now,
            deadline=now + order.deadline_ms / 1000 if order.deadline_ms else None,
            priority=order.priority,
            waited=order.waited_ms / 1000,
            trace=carried_by(order),
            request_id=order.request_id,
            sent=0 if is_local else 1,
            is_local=is_local,
            order=None if is_local else order,
            may_record=order.may_record,
            claim=OutputClaim(expected=order.expected_output, granted=order.granted_output),
        )
        refusal = self.admission.admit(room, is_draining=self.is_draining, leader=leader)
        if refusal is not None and not self._may_wait(room, refusal, leader):
            return self._refuse(order, refusal)
        self.queues.add(room)
        if refusal is None:
            self._admitted(room)

    def _may_wait(self, room: DecodeRoom, refusal: Refusal, leader: DecodeRoom | None) -> bool:
        """Whether others make way for a room that was refused."""
        can_ever = refusal.retry_after_ms > 0 and not self.is_draining
        return can_ever and leader is None and self.preemption.way_for(room) is not None

    def _admitted(self, room: DecodeRoom) -> None:
        """The room holds its first pages and its place: its prompt begins, or waits for that of another."""
        is_sharer = room.leader is not None
        request, room.head_number = room.request, self._head_number
        self._counters["requests"] += 1
        self._counters["have_tokens"] += 0 if is_sharer else room.have
        self._send(Reserved(room=request.room, epoch=request.epoch, instance=self.instance, have=room.have))
        self._counters["local_prefills"] += room.is_local and not is_sharer
        if not is_sharer:
            self._restore_or_begin(room)

    def _admit_waiting(self) -> None:
        """Admits the rooms for which others have made way, in order; less urgent rooms make way for the next
        one.
        """
        for room in self.preemption.waiting:
            refusal = self.admission.admit(room, is_draining=self.is_draining)
            way = None if refusal is None or self.is_draining else self.preemption.way_for(room)
            if refusal is not None and way is not None:
                for victim in way.victims:
                    self._retract(victim, way.reason)
                refusal = self.admission.admit(room) if way.victims else refusal
                if refusal is not None:
                    return  # its pages come back
            if refusal is None:
                self._admitted(room)
            else:
                self._turn_back(room, refusal)

    def _turn_back(self, room: DecodeRoom, refusal: Refusal) -> None:
        """Refuses a room that was to be admitted."""
        self._counters["refused"] += 1
        self.wants_beat = True
        request = room.request
        refused = Refused(
            room=request.room,
            epoch=request.epoch,
            instance=self.instance,
            reason=refusal.reason,
            retry_after_ms=refusal.retry_after_ms,
        )
        self._send(refused)
        self._close(room)

    def _restore_or_begin(self, room: DecodeRoom) -> None:
        """Starts to restore what a lower tier has of the prompt; without that, goes on to the rest of it."""
        compute_time = self._compute_time() if room.is_local else None
        room.restore = begin_restore(
            self.tiers, room.request, room.have, is_computed=room.is_local, compute_time=compute_time
        )
        if room.restore is not None:
            room.state = DecodeState.RESTORING
        else:
            self._begin_prompt(room)

    def _compute_time(self) -> ComputeTime | None:
        """The time of a prompt that is computed here, behind those that are computed now."""
        requests = [room.request for room in self.queues.of(DecodeState.PREFILLING)]
        return self.local.forward_pace.behind(sum(each.num_prompt - each.num_computed for each in requests))

    def _begin_prompt(self, room: DecodeRoom) -> None:
        """What is not in place of the prompt is computed here, or pulled."""
        room.state = DecodeState.PREFILLING if room.is_local else DecodeState.PULLING
        if room.order is not None:
            self._send(self.admission.pull_request(room, room.order))
            room.order = None
        if room.offer is not None:
            self.offers.offer_of(room, room.offer)
            room.offer = None

    def _turn_tiers(self, tiers: RunningTiers) -> None:
        """Takes in the prefixes that were restored."""
        tiers.turn()
        for room in self.queues.of(DecodeState.RESTORING):
            if room.restore is None or not room.restore.is_done:
                continue
            restore, room.restore = room.restore, None
            have = room.have
            if room.head_number == self._head_number:
                have = take_restored(self.engine.cache, self.engine.windows, room.request, restore, have)
            self.admission.found(room, have)
            self._counters["have_tokens"] += have - room.have
            room.have = room.landed = room.warmed = have
            if restore.is_follower:
                self._restore_or_begin(room)
            else:
                self._begin_prompt(room)

    def _forget_prefixes(self) -> None:
        """Pages with draft KV of other weights are of no use any more."""
        self.engine.cache.clear()
        if self.tiers is not None:
            self.tiers.rebase(tier_fingerprint(self.engine))
        elif self.news is not None:
            self.news.journal.keys.rebase(tier_fingerprint(self.engine))

    def _on_landed(self, room_id: str, epoch: int, tokens: int) -> None:
        room = self.queues.get(room_id, epoch)
        if room is not None and room.state is DecodeState.PULLING:
            room.landed = max(room.landed, tokens)

    def _on_complete(self, event: Complete, now: float) -> None:
        room = self.queues.get(event.room, event.epoch)
        if room is None or room.state is not DecodeState.PULLING:
            return
        request = room.request
        room.landed = request.num_computed = request.num_prompt
        room.landed_at = now
        room.handoff_s, room.handoff_bytes = event.seconds, event.num_bytes
        room.handoff_blocks, room.handoff_shm_blocks = event.num_blocks, event.num_shm_blocks
        room.handoff_device_blocks, room.handoff_nixl_blocks = event.num_device_blocks, event.num_nixl_blocks
        self._counters["handoff_bytes"] += event.num_bytes
        self._counters["handoff_blocks"] += event.num_blocks
        if event.first_token >= self.engine.model_config.vocab_size:
            reason = f"first token {event.first_token} is not in the vocabulary"
            self._fail(room, "RemoteProtocolError", reason, retryable=False)
            return
        request.append([event.first_token], self.engine.model_config.eos_token_ids)
        room.state = DecodeState.WARMING
        if request.is_finished:  # the router ends the request when it gets the token
            self._finish(room)

    def _on_lost(self, room_id: str, epoch: int, kind: str, reason: str) -> None:
        room = self.queues.get(room_id, epoch)
        if room is None:
            return
        if room.state is DecodeState.PULLING:
            # Prefill also aborts when the request ended with token 1, which is no failure of this worker.
            is_aborted = kind == "HandoffAborted"
            self._counters["handoffs_aborted" if is_aborted else "failed"] += 1
            level = logging.DEBUG if is_aborted else room.log_level
            logger.log(level, "hand-off lost", extra=fields(**room.log_fields, kind=kind, reason=reason))
            self._send_failed(room, kind, reason, retryable=True)
        self._close(room)

    def _fail(self, room: DecodeRoom, kind: str, message: str, *, retryable: bool) -> None:
        self._counters["failed"] += 1
        super()._fail(room, kind, message, retryable=retryable)

    def _give_up(self, room: DecodeRoom, reason: str) -> None:
        """Ends a room from this side.

        The room closes at once if no block can still land, otherwise after the transport releases its pages.
        """
        if room.state is DecodeState.PULLING:
            room.state = DecodeState.CLOSING
            self._drop(room, reason)
        elif room.state is not DecodeState.CLOSING:
            self._close(room)

    def _retract(self, room: DecodeRoom, reason: Reason = Reason.FULL_POOL) -> None:
        """Takes the pages of a room back. The router continues it from its tokens."""
        self.reach("decode:retract")
        super()._retract(room, reason)

    def _unshare(self, room: DecodeRoom) -> None:
        """Ends a room whose leader will not have its prompt. The router places it without one."""
        self._counters["unshared"] += 1
        super()._fail(room, UNSHARED, NOT_SHARED, retryable=True)

    def _finish(self, room: DecodeRoom) -> None:
        """The request ended by itself: send Finished behind its last tokens, with its timeline."""
        request = room.request
        self._counters["finished"] += 1
        self._send(
            Finished(
                room=request.room,
                epoch=request.epoch,
                instance=self.instance,
                reason=request.finish_reason or "length",
                output_tokens=request.num_output,
                timeline=self._timeline_of(room),
                prefill=room.prefill_timeline() if room.is_local else None,
            )
        )
        extra = fields(
            **room.log_fields,
            tokens=request.num_output,
            verifies=room.verify_steps,
            accepted=room.accepted,
        )
        logger.log(room.log_level, "decode completed", extra=extra)
        if self.recorder is not None and room.may_record and not request.num_embeds:
            self.recorder.offer(*request.asked_and_chosen)
        self._close(room)

    def _close(self, room: DecodeRoom) -> None:
        """The only exit of a room. Pages with complete KV and draft KV enter the prefix cache; all pages are
        released.

        A room with unread steps waits for them, because they can still write to its pages.
        """
        if not room.is_settled:
            room.state = DecodeState.SETTLING
            return
        self._end_sharing(room)
        request = room.request
        is_kept = not room.is_tainted and room.head_number == self._head_number
        if is_kept and room.state not in NO_PROMPT:
            keep_pages(self.engine, self.decoder, request)
        self.decoder.forget(request)
        room.features = None
        self._free(room)

    @property
    def _head_number(self) -> int:
        return 0 if self.head_swap is None else self.head_swap.number

    def _timeline_of(self, room: DecodeRoom) -> DecodeTimeline:
        return room.timeline(self._clock())

    # --- one step --------------------------------------------------------------------------------------

    def _warm_landed(self) -> bool:
        """Draft prefill of landed features; warm rooms join the batch. False: no room was ready."""
        warming, did_warm = self.queues.of(DecodeState.WARMING), False
        if self.engine.drafter is not None:
            rooms = warming + self.queues.of(DecodeState.PULLING)
            did_warm = prefill_drafts(self.decoder, rooms, self._clock)
        return self._admit_warm(warming) or did_warm

    def _share_prompts(self) -> None:
        """Rooms that share a prompt which is complete by now compute the rest of it."""
        begun, lost = self.sharing.turn()
        for room in begun:
            self._count_shared(room)
        for room in lost:
            self._unshare(room)

    def _end_sharing(self, leader: DecodeRoom) -> None:
        """The last moment at which others can share the pages of a room that closes.

        Without a prompt to share they end in the next step: callers may be going through all rooms.
        """
        sharers = self.sharing.sharers_of(leader)
        for room in sharers if sharers and self.sharing.is_complete(leader) else ():
            self.sharing.begin(room, leader)
            self._count_shared(room)

    def _count_shared(self, room: DecodeRoom) -> None:
        self._counters["shared_prompts"] += 1
        self._counters["shared_tokens"] += room.have

    def _next_batch(self) -> list[DecodeRoom]:
        """The rooms that still need a step: each unread step gives at least one token."""
        rooms = self.queues.of(DecodeState.RUNNING)
        return [room for room in rooms if room.request.num_remaining > room.num_unread]

    def _read_step(self) -> None:
        """Read the oldest unread step and close the rooms that waited for it."""
        live, result, settled = self.in_flight.read()
        if live:
            self._conclude(live, result)
        for room in settled:
            self._close(room)

    def _conclude(self, batch: list[DecodeRoom], result: StepResult) -> None:
        now = self._clock()
        self._metrics.step(batch, result, now)
        gap = self._gaps.step([room.key for room in batch], self.local.num_launched, now)
        if gap is not None:
            self.local.pace.saw(gap)
        if self.head_swap is not None:
            self.head_swap.observe(batch, result)
        self._publish(batch, result)

    def _prefill_here(self) -> bool:
        """Launches and reads forwards over prompts that no prefill worker computes. False: there are none."""
        rooms = [room for room in self.queues.of(DecodeState.PREFILLING) if room.request.is_ready]
        if not rooms and not self.local.has_unread:
            return False
        if rooms:
            self.reach("decode:chunk")
        before = [(room.request.num_computed, room.have) for room in rooms]
        rounds = self.engine.rounds
        has_streams = bool(self.queues.count(DecodeState.RUNNING)) or (
            rounds is not None and rounds.has_streams
        )
        read = self.local.turn(rooms, has_streams=has_streams)
        for room, (computed, have) in zip(rooms, before, strict=True):
            found = room.have - have  # in the prefix cache, since the room was admitted
            self._counters["have_tokens"] += found
            self._counters["local_prefill_tokens"] += room.request.num_computed - computed - found
        if read is not None:
            now = self._clock()
            for room, is_bad in zip(read.ended, read.result.is_bad, strict=True):
                if not is_bad:
                    self._counters["tokens"] += 1
                    self._count_first_token(room, now)
            self._gaps.begin([room.key for room in read.ended if not room.request.is_finished], now)
            self._send_tokens(read.ended, read.result)
            if read.ended and not has_streams:  # nobody waits but the client of token 1
                self.link.hand_over()
            self.local.finish(read, self._head_number)
            self._end_rooms(read.ended, read.result)
            for room in read.settled:
                self._close(room)
        return True

    def _admit_warm(self, warming: list[DecodeRoom]) -> bool:
        admitted = False
        for room in warming:
            if room.request.is_ready and (room.features is None or room.warmed == room.request.num_prompt):
                room.features = None
                room.request.embeds = None  # every draft row is written
                room.state = DecodeState.RUNNING
                room.started_at = self._clock()
                admitted = True
        return admitted

    def _publish(self, batch: list[DecodeRoom], result: StepResult) -> None:
        """Send one frame with every room's tokens, then the ends that the tokens brought."""
        self._send_tokens(batch, result)
        self._end_rooms(batch, result)

    def _send_tokens(self, batch: list[DecodeRoom], result: StepResult) -> None:
        items = []
        experts = result.experts or [b""] * len(batch)
        for room, tokens, logprobs, ids in zip(batch, result.tokens, result.logprobs, experts, strict=True):
            if tokens:
                request = room.request
                items.append(
                    TokenItem(
                        room=request.room,
                        epoch=request.epoch,
                        seq=room.sent,
                        ids=tokens,
                        logprobs=[TokenLogprob(logprob=p.logprob, top=p.top) for p in logprobs],
                        experts=ids or UNSET,
                    )
                )
                room.sent += len(tokens)
        if items:
            self._send(Tokens(instance=self.instance, items=items))

    def _end_rooms(self, batch: list[DecodeRoom], result: StepResult) -> None:
        for room, is_bad in zip(batch, result.is_bad, strict=True):
            if room.request.is_finished:
                self._finish(room)
            elif is_bad:
                room.is_tainted = True
                self._fail(room, *room.request.logits_fault, retryable=room.request.is_fault_ours)
