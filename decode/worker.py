"""A decode server: KV caches in, tokens out, drafted with EAGLE3.

1. Reserve arrives            pages for prompt + output and a place in the batch are held, or the room is refused at once
2. pull                       blocks land in the room's own pages; a prefix that is cached here is not pulled
   without a prefill worker   decode computes the prompt itself, some rows between two steps of the batch
3. draft prefill              runs over the aux features as they land, within a budget of rows per step
4. the batch                  a warm room joins: draft -> verify -> accept -> extend, tokens to the router in one frame
                              a step is launched before the one before it is read; what that one gives goes out meanwhile
5. end                        one road for every end: `_close` gives the pages back, to the prefix cache first
"""

import logging
import time
from collections.abc import Callable, Collection

import msgspec

from ..cluster.fault_points import Reach, unarmed
from ..cluster.log import fields
from ..cluster.messages import (
    Cancel,
    ControlUp,
    Failed,
    Finished,
    Gone,
    GraphCounts,
    Refused,
    Reserve,
    Reserved,
    TokenItem,
    TokenLogprob,
    Tokens,
    WorkerStats,
)
from ..cluster.trace_context import carried_by
from ..engine.loader import Engine
from ..engine.request import Request
from ..engine.sampling.params import SamplingParams
from ..engine.speculative.step.result import StepResult
from ..kvtransfer.link import Command, Drop, Ended, LinkEvent, WorkerLink
from ..kvtransfer.transport import Complete, Landed, Lost
from .accounts import Accounts
from .admission import Admission, Refusal
from .flights import Flights
from .local_prefill import LocalPrefill
from .queues import DecodeQueues, Room, RoomState
from .step_decoder import StepDecoder
from .warming import warm

logger = logging.getLogger(__name__)


class DecodeWorker:
    """The scheduler thread's side of a decode server; `step` is one decode step of the batch."""

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        *,
        instance: str,
        max_running: int,
        local_prefill_tokens: int = 128,
        decoder: StepDecoder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.link = link
        self.instance = instance
        self.queues = DecodeQueues(max_running)
        self.admission = Admission(engine, self.queues, spare_tokens=engine.shape.spare_slots)
        self._clock = clock
        self.decoder: StepDecoder = decoder or engine.decoder()
        self.flights = Flights(self.decoder)
        self.reach: Reach = unarmed
        self.local = LocalPrefill(engine, self.decoder, local_prefill_tokens, clock, link.post, instance)
        self._accounts = Accounts()
        self._counters = self._accounts.counters

    def __repr__(self) -> str:
        return f"<DecodeWorker {self.queues!r}, {self.engine.cache!r}>"

    @property
    def num_rooms(self) -> int:
        return len(self.queues)

    def step(self) -> bool:
        """Warm what landed, compute prompts that nobody else does, run one step of the batch, publish its tokens."""
        did_warm = self._warm_landed()
        did_prefill = self._prefill_here()
        did_step = self._step_batch()
        return did_warm or did_prefill or did_step

    def _step_batch(self) -> bool:
        """Launch a step, then read the one before it. Rooms that cannot be stepped ahead wait until all were read."""
        batch, num_unread = self._next_batch(), len(self.flights)
        if batch:
            self.reach("decode:step")
        is_ahead = bool(batch) and self.flights.launch(batch)
        if num_unread:
            self._read_step()
        elif batch and not is_ahead:
            self._conclude(batch, self.decoder.step([room.request for room in batch]))
        return bool(batch) or num_unread > 0

    def handle(self, event: LinkEvent, now: float) -> None:
        match event:
            case Reserve():
                self._reserve(event, now)
            case Cancel(room=room, epoch=epoch):
                self._cancel(room, epoch)
            case Landed(room=room, epoch=epoch, tokens=tokens):
                self._on_landed(room, epoch, tokens)
            case Complete():
                self._on_complete(event, now)
            case Lost(room=room, epoch=epoch, kind=kind, reason=reason):
                self._on_lost(room, epoch, kind, reason)
            case Ended(room=room, epoch=epoch):
                found = self.queues.get(room, epoch)
                if found is not None and found.state is RoomState.CLOSING:
                    self._close(found)
            case _:
                pass

    def drop_rooms(self, rooms: Collection[str], reason: str) -> None:
        for room in self.queues:
            if room.request.room in rooms:
                self._give_up(room, reason)

    def expire(self, now: float) -> None:
        for room in self.queues:
            if room.request.fault and not room.is_over:
                self._fail(
                    room, room.request.fault_kind, room.request.fault, retryable=room.request.is_fault_ours
                )
            elif room.deadline is not None and now >= room.deadline and not room.is_over:
                self._fail(
                    room, "DeadlineExceeded", "the deadline passed before the last token", retryable=False
                )

    def start_draining(self) -> None:
        self.admission.is_draining = True

    def hand_back(self) -> None:
        for room in self.queues:
            if not room.is_over:
                self._fail(room, "Draining", "decode leaves", retryable=True)

    def stats(self) -> WorkerStats:
        cache = self.engine.cache
        return WorkerStats(
            state="draining" if self.admission.is_draining else "serving",
            pages_total=self.engine.num_pages,
            pages_free=cache.num_available,
            pages_cached=cache.num_cached,
            running=self.queues.count(RoomState.RUNNING),
            queued=self.queues.count(RoomState.WARMING) + self.queues.count(RoomState.PREFILLING),
            transferring=self.queues.count(RoomState.PULLING),
            graphs=GraphCounts(**self.engine.graph_counts),
            accept_length=self._accounts.accept_length,
            spec_steps=self.engine.spec_steps,
            counters=self._counters
            | self.engine.step_counters
            | self.engine.graph_counters
            | self.flights.counters
            | self.link.transport_counters,
        )

    # --- the ways in and out ------------------------------------------------------------------------------------------

    def _reserve(self, message: Reserve, now: float) -> None:
        self.reach("decode:reserve")
        if self.queues.is_known(message.room, message.epoch):
            return  # a repeated or late message
        for old in self.queues.attempts(message.room):
            self._give_up(old, "a newer attempt began")
        sampling = SamplingParams(**msgspec.structs.asdict(message.sampling))
        request = Request(
            room=message.room,
            epoch=message.epoch,
            prompt_ids=message.prompt_ids,
            sampling=sampling,
            num_prior_output=message.num_output,
            salt=message.salt,
            eos_ids=self.engine.model_config.eos_token_ids,
            guide=self.engine.grammars.guide(sampling.grammar),
        )
        is_local = message.prefill_instance is None
        if is_local and request.ends_with_prompt(
            self.engine.model_config.eos_token_ids
        ):  # the word that it did was lost
            return self._turn_away(
                Finished(
                    room=request.room,
                    epoch=request.epoch,
                    instance=self.instance,
                    reason="stop",
                    output_tokens=0,
                )
            )
        admitted = self.admission.admit(request, now, message.deadline_ms, is_local=is_local)
        if isinstance(admitted, Refusal):
            self._counters["refused"] += 1
            why, again_ms = admitted.reason, admitted.retry_after_ms
            room, epoch, instance = message.room, message.epoch, self.instance
            return self._turn_away(
                Refused(room=room, epoch=epoch, instance=instance, reason=why, retry_after_ms=again_ms)
            )
        admitted.trace = carried_by(message)
        self.queues.add(admitted)
        self._counters["requests"] += 1
        self._counters["have_tokens"] += admitted.have
        self._send(
            Reserved(room=message.room, epoch=message.epoch, instance=self.instance, have=admitted.have)
        )
        if is_local:
            self._counters["local_prefills"] += 1
        else:
            self._send(self.admission.pull_request(admitted, message))

    def _turn_away(self, answer: Refused | Finished) -> None:
        """Answers an order without taking it; said again it is no new one."""
        self.queues.turned_away(answer.room, answer.epoch)
        self._send(answer)

    def _cancel(self, room_id: str, epoch: int) -> None:
        """Gone answers when the pages of every attempt up to `epoch` are free; at once when none is here."""
        attempts = self.queues.cancel(room_id, epoch)
        for room in attempts:
            self._counters["cancelled"] += not room.is_over
            room.gone_epoch = max(room.gone_epoch, epoch)
            self._give_up(room, "cancelled")
        if not attempts:
            self._send(Gone(room=room_id, epoch=epoch, instance=self.instance))

    def _on_landed(self, room_id: str, epoch: int, tokens: int) -> None:
        room = self.queues.get(room_id, epoch)
        if room is not None and room.state is RoomState.PULLING:
            room.landed = max(room.landed, tokens)

    def _on_complete(self, event: Complete, now: float) -> None:
        room = self.queues.get(event.room, event.epoch)
        if room is None or room.state is not RoomState.PULLING:
            return
        request = room.request
        room.landed = request.num_computed = request.num_prompt
        room.landed_at = now
        room.handoff_s, room.handoff_bytes, room.handoff_blocks = (
            event.seconds,
            event.num_bytes,
            event.num_blocks,
        )
        room.handoff_shm_blocks = event.num_shm_blocks
        self._counters["handoff_bytes"] += event.num_bytes
        self._counters["handoff_blocks"] += event.num_blocks
        if event.first_token >= self.engine.model_config.vocab_size:
            reason = f"first token {event.first_token} is not in the vocabulary"
            self._fail(room, "RemoteProtocolError", reason, retryable=False)
            return
        request.append([event.first_token], self.engine.model_config.eos_token_ids)
        room.state = RoomState.WARMING
        if request.is_finished:  # the router ends such a request when it has the token; nothing is left to do
            self._finish(room)

    def _on_lost(self, room_id: str, epoch: int, kind: str, reason: str) -> None:
        room = self.queues.get(room_id, epoch)
        if room is None:
            return
        if room.state is RoomState.PULLING:
            is_aborted = (
                kind == "HandoffAborted"
            )  # also when the request ended with its first token: no failure of ours
            self._counters["handoffs_aborted" if is_aborted else "failed"] += 1
            level = logging.DEBUG if is_aborted else logging.INFO
            logger.log(level, "hand-off lost", extra=fields(room=room_id, kind=kind, reason=reason))
            self._send_failed(room, kind, reason, retryable=True)
        self._close(room)

    def _fail(self, room: Room, kind: str, message: str, *, retryable: bool) -> None:
        self._counters["failed"] += 1
        self._send_failed(room, kind, message, retryable=retryable)
        self._give_up(room, message)

    def _send_failed(self, room: Room, kind: str, message: str, *, retryable: bool) -> None:
        self._send(
            Failed(
                room=room.request.room,
                epoch=room.request.epoch,
                instance=self.instance,
                kind=kind,
                message=message,
                retryable=retryable,
            )
        )

    def _give_up(self, room: Room, reason: str) -> None:
        """End a room from this side: at once if no block can land any more, else when the transport lets go of it."""
        if room.state is RoomState.PULLING:
            room.state = RoomState.CLOSING
            self._send(Drop(room=room.request.room, epoch=room.request.epoch, reason=reason))
        elif room.state is not RoomState.CLOSING:
            self._close(room)

    def _finish(self, room: Room) -> None:
        """The request ended by itself: say so behind its last tokens, with what it cost."""
        request = room.request
        self._counters["finished"] += 1
        self._send(
            Finished(
                room=request.room,
                epoch=request.epoch,
                instance=self.instance,
                reason=request.finish_reason or "length",
                output_tokens=request.num_output,
                timeline=room.timeline(self._clock()),
                prefill=room.prefill_timeline() if room.is_local else None,
            )
        )
        logger.info(
            "decode completed",
            extra=fields(
                room=request.room,
                tokens=request.num_output,
                verifies=room.verify_steps,
                accepted=room.accepted,
            ),
        )
        self._close(room)

    def _close(self, room: Room) -> None:
        """The one exit of a room: pages whose KV and draft KV are whole go to the prefix cache, all are given back.

        Not before the steps that were launched with the room were read: until then they may write to its pages.
        """
        if not room.is_settled:
            room.state = RoomState.SETTLING
            return
        request, cache = room.request, self.engine.cache
        if room.state not in (RoomState.PULLING, RoomState.CLOSING) and not room.is_tainted:
            covered = request.num_computed
            if self.engine.drafter is not None:
                covered = min(covered, self.decoder.num_covered(request))
            cache.insert(request.all_ids[: covered + cache.lookahead], request.pages, request.salt)
        self.decoder.forget(request)
        cache.allocator.release(request.pages)
        request.pages = []
        room.features = None
        self.queues.remove(room)
        if room.gone_epoch >= 0 and not self.queues.up_to(request.room, room.gone_epoch):
            timeline = room.timeline(self._clock())
            self._send(
                Gone(room=request.room, epoch=room.gone_epoch, instance=self.instance, timeline=timeline)
            )

    # --- one step -----------------------------------------------------------------------------------------------------

    def _warm_landed(self) -> bool:
        """Draft prefill of what landed; rooms that are warm join the batch. False: nothing to do."""
        rooms = self.queues.of(RoomState.WARMING) + self.queues.of(RoomState.PULLING)
        did_warm = warm(self.decoder, rooms, self._clock)
        return self._admit_warm() or did_warm

    def _next_batch(self) -> list[Room]:
        """The rooms that have a token to come, as far as is known: each unread step gives one at least."""
        rooms = self.queues.of(RoomState.RUNNING)
        return [room for room in rooms if room.request.num_remaining > room.num_unread]

    def _read_step(self) -> None:
        """Read the oldest step under way; what waited for it is given back."""
        live, result, settled = self.flights.read()
        if live:
            self._conclude(live, result)
        for room in settled:
            self._close(room)

    def _conclude(self, batch: list[Room], result: StepResult) -> None:
        self._accounts.step(batch, result, self._clock())
        self._publish(batch, result)

    def _prefill_here(self) -> bool:
        """One forward over prompts that no prefill worker computes; False: there are none."""
        rooms = [room for room in self.queues.of(RoomState.PREFILLING) if room.request.is_ready]
        if not rooms:
            return False
        computed = sum(room.request.num_computed for room in rooms)
        ended, result = self.local.step(rooms, is_alone=not self.queues.count(RoomState.RUNNING))
        self._counters["local_prefill_tokens"] += sum(room.request.num_computed for room in rooms) - computed
        self._counters["tokens"] += len(ended)
        self._publish(ended, result)
        return True

    def _admit_warm(self) -> bool:
        admitted = False
        for room in self.queues.of(RoomState.WARMING):
            if room.request.is_ready and (room.features is None or room.warmed == room.request.num_prompt):
                room.features = None
                room.state = RoomState.RUNNING
                room.started_at = self._clock()
                admitted = True
        return admitted

    def _publish(self, batch: list[Room], result: StepResult) -> None:
        """One frame with every room's tokens, then the ends that they brought."""
        items = []
        for room, tokens, logprobs in zip(batch, result.tokens, result.logprobs, strict=True):
            if tokens:
                request = room.request
                items.append(
                    TokenItem(
                        room=request.room,
                        epoch=request.epoch,
                        seq=room.sent,
                        ids=tokens,
                        logprobs=[TokenLogprob(logprob=p.logprob, top=p.top) for p in logprobs],
                    )
                )
                room.sent += len(tokens)
        if items:
            self._send(Tokens(instance=self.instance, items=items))
        for room, is_bad in zip(batch, result.is_bad, strict=True):
            if room.request.is_finished:
                self._finish(room)
            elif is_bad:
                room.is_tainted = True
                self._fail(room, "BadLogits", "the model's logits are not finite", retryable=False)

    def _send(self, item: Command | ControlUp) -> None:
        self.link.post(item)
