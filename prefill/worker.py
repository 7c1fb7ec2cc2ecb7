"""A prefill server: prompts in, KV caches and first tokens out.

1. Prefill arrives            the prompt waits; refused at once if it can never be held or the queue is full
2. admission                  cached prefix pages are shared, the rest allocated; the room is offered to its reader
3. chunks                     each forward computes the next part of some prompts and keeps the aux features beside
                              their KV; each part is announced as soon as it is final
4. first token                sampled here, streamed by the router at once; the same token closes the offer
5. hand-off                   pages are pinned and read by decode until Release, Abort or the end of the lease
6. end                        one road for every end: `_close` gives the pages back, to the prefix cache first
"""

import logging
import time
from collections.abc import Callable, Collection

import msgspec
import torch

from ..cluster.fault_points import Reach, unarmed
from ..cluster.log import fields
from ..cluster.messages import (
    Cancel,
    ControlUp,
    Failed,
    Finished,
    FirstToken,
    Gone,
    GraphCounts,
    Prefill,
    PrefillTimeline,
    Refused,
    TokenLogprob,
    WorkerStats,
)
from ..cluster.scores import prompt_logprobs
from ..cluster.trace_context import carried_by
from ..engine.extend_batch import extend_batch
from ..engine.forward_batch import CaptureHidden, ForwardOutput
from ..engine.loader import Engine
from ..engine.page_table import pages_for
from ..engine.prompt_logprobs import scores_of
from ..engine.request import Request
from ..engine.sampling.params import SamplingParams, validate_params
from ..engine.sampling.sampler import SampleOutput
from ..kvtransfer.link import Advance, Command, Drop, Ended, LinkEvent, WorkerLink
from ..kvtransfer.transport import Dropped, Offer, Released
from .queues import PrefillQueues, Room, RoomState
from .scheduler import Chunk, PrefillScheduler

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 500


class PrefillWorker:
    """The scheduler thread's side of a prefill server; `step` is one forward."""

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        *,
        instance: str,
        chunk_size: int,
        max_batch: int,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.link = link
        self.instance = instance
        self.queues = PrefillQueues(max_queue)
        self.scheduler = PrefillScheduler(
            self.queues,
            engine.cache,
            page_size=engine.page_size,
            chunk_size=chunk_size,
            max_batch=max_batch,
            vocab_size=engine.model_config.vocab_size,
        )
        self.reach: Reach = unarmed
        self._clock = clock
        self._is_draining = False
        self._counters: dict[str, float] = dict.fromkeys(
            (
                "prompt_tokens",
                "cached_tokens",
                "requests",
                "handed_off",
                "dropped",
                "cancelled",
                "refused",
                "steps",
            ),
            0,
        )

    def __repr__(self) -> str:
        return f"<PrefillWorker {self.queues!r}, {self.engine.cache!r}>"

    @property
    def num_rooms(self) -> int:
        return len(self.queues)

    def step(self) -> bool:
        """Choose chunks, run them, keep their features, sample, publish."""
        chunks, admitted = self.scheduler.next_chunks()
        if not chunks:
            return False
        self._open(admitted)
        output = self._forward(chunks)
        firsts = self._sample(chunks, output)
        self._score(chunks, output)
        self._publish(chunks, firsts)
        return True

    def handle(self, event: LinkEvent, now: float) -> None:
        match event:
            case Prefill():
                self._accept(event, now)
            case Cancel(room=room, epoch=epoch):
                self._cancel(room, epoch)
            case Released(room=room, epoch=epoch):
                self._on_end(room, epoch, "handed_off")
            case Dropped(room=room, epoch=epoch, reason=reason):
                logger.warning("hand-off dropped", extra=fields(room=room, reason=reason))
                self._on_end(room, epoch, "dropped")
            case Ended(room=room, epoch=epoch):
                self._on_end(room, epoch, "")
            case _:
                pass

    def drop_rooms(self, rooms: Collection[str], reason: str) -> None:
        for room in self.queues:
            if room.request.room in rooms:
                self._give_up(room, reason)

    def expire(self, now: float) -> None:
        for room in self.queues:
            if room.request.fault and room.state is RoomState.QUEUED:
                self._fail(
                    room, room.request.fault_kind, room.request.fault, retryable=room.request.is_fault_ours
                )
            is_due = room.deadline is not None and now >= room.deadline
            if is_due and room.state in (RoomState.QUEUED, RoomState.RUNNING):
                self._fail(
                    room, "DeadlineExceeded", "the deadline passed before the first token", retryable=False
                )

    def start_draining(self) -> None:
        self._is_draining = True

    def hand_back(self) -> None:
        for room in self.queues:
            if room.state is not RoomState.CLOSING:
                self._fail(room, "Draining", "prefill leaves", retryable=True)

    def stats(self) -> WorkerStats:
        cache = self.engine.cache
        return WorkerStats(
            state="draining" if self._is_draining else "serving",
            pages_total=self.engine.num_pages,
            pages_free=cache.num_available,
            pages_cached=cache.num_cached,
            running=self.queues.count(RoomState.RUNNING),
            queued=self.queues.count(RoomState.QUEUED),
            transferring=self.queues.count(RoomState.HANDED),
            graphs=GraphCounts(
                **self.engine.graph_counts
            ),  # the loader of this role captures no decode graphs
            counters=self._counters | self.engine.graph_counters | self.link.transport_counters,
        )

    # --- the ways in and out ------------------------------------------------------------------------------------------

    def _accept(self, message: Prefill, now: float) -> None:
        if self.queues.is_known(message.room, message.epoch):
            return  # a repeated or late message
        for old in self.queues.attempts(message.room):
            self._give_up(old, "a newer attempt began")
        sampling = SamplingParams(**msgspec.structs.asdict(message.sampling))
        reason, retry_after_ms = self._why_not(message.prompt_ids, sampling)
        if reason:
            self._counters["refused"] += 1
            room, epoch, instance = message.room, message.epoch, self.instance
            refused = Refused(
                room=room, epoch=epoch, instance=instance, reason=reason, retry_after_ms=retry_after_ms
            )
            return self._turn_away(refused)
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
        if request.ends_with_prompt(self.engine.model_config.eos_token_ids):  # the word that it did was lost
            ended = Finished(
                room=message.room, epoch=message.epoch, instance=self.instance, reason="stop", output_tokens=0
            )
            return self._turn_away(ended)
        deadline = now + message.deadline_ms / 1000 if message.deadline_ms else None
        self.queues.add(Room(request=request, arrived=now, deadline=deadline, trace=carried_by(message)))
        self._counters["requests"] += 1

    def _turn_away(self, answer: Refused | Finished) -> None:
        """Answers an order without taking it; said again it is no new one."""
        self.queues.turned_away(answer.room, answer.epoch)
        self._send(answer)

    def _why_not(self, prompt_ids: list[int], sampling: SamplingParams) -> tuple[str, int]:
        """(why this prompt is refused or "", milliseconds after which trying again makes sense)."""
        vocab_size = self.engine.model_config.vocab_size
        if not prompt_ids or max(prompt_ids) >= vocab_size:
            return f"a prompt needs at least one token, all below the vocabulary size {vocab_size}", 0
        need, total = pages_for(len(prompt_ids), self.engine.page_size), self.engine.num_pages
        if len(prompt_ids) >= self.engine.max_context or need > total:
            return (
                f"a prompt of {len(prompt_ids)} tokens needs {need} pages of {total} and less than "
                f"{self.engine.max_context} tokens of context"
            ), 0
        try:
            validate_params(sampling, vocab_size)
        except ValueError as error:
            return str(error), 0
        if self._is_draining:
            return "draining", RETRY_AFTER_MS
        if self.queues.is_full:
            return f"{self.queues.max_queue} prompts are waiting already", RETRY_AFTER_MS
        return "", 0

    def _cancel(self, room_id: str, epoch: int) -> None:
        """Gone answers when the pages of every attempt up to `epoch` are free; at once when none is here."""
        attempts = self.queues.cancel(room_id, epoch)
        for room in attempts:
            self._counters["cancelled"] += room.state is not RoomState.CLOSING
            room.gone_epoch = max(room.gone_epoch, epoch)
            self._give_up(room, "cancelled")
        if not attempts:
            self._send(Gone(room=room_id, epoch=epoch, instance=self.instance))

    def _fail(self, room: Room, kind: str, message: str, *, retryable: bool) -> None:
        request = room.request
        self._send(
            Failed(
                room=request.room,
                epoch=request.epoch,
                instance=self.instance,
                kind=kind,
                message=message,
                retryable=retryable,
            )
        )
        self._give_up(room, message)

    def _give_up(self, room: Room, reason: str) -> None:
        """End a room from this side. Its pages are free when the transport lets go of them; a queued one has none, but
        decode may wait at the transport for it already.
        """
        if room.state is RoomState.CLOSING:
            return
        is_queued = room.state is RoomState.QUEUED
        room.state = RoomState.CLOSING
        self._send(Drop(room=room.request.room, epoch=room.request.epoch, reason=reason))
        if is_queued:
            self._close(room)

    def _on_end(self, room_id: str, epoch: int, counter: str) -> None:
        """The transport is done with a room's pages."""
        room = self.queues.get(room_id, epoch)
        if room is None:
            return
        if counter:
            self._counters[counter] += 1
        if room.state is RoomState.RUNNING:  # the reader went away before the prompt was computed
            self._send(
                Failed(
                    room=room_id,
                    epoch=epoch,
                    instance=self.instance,
                    kind="PeerLost",
                    message="decode gave the room up before the prompt was computed",
                    retryable=True,
                )
            )
        self._close(room)

    def _close(self, room: Room) -> None:
        """The one exit of a room: its pages go back, to the prefix cache those that are computed."""
        request = room.request
        if request.pages and not room.is_tainted:
            self.engine.cache.insert(request.prompt_ids[: request.num_computed], request.pages, request.salt)
        self.engine.cache.allocator.release(request.pages)
        request.pages = []
        self.queues.remove(room)
        if room.gone_epoch >= 0 and not self.queues.up_to(request.room, room.gone_epoch):
            self._send(Gone(room=request.room, epoch=room.gone_epoch, instance=self.instance))

    # --- one step -----------------------------------------------------------------------------------------------------

    def _open(self, admitted: list[Room]) -> None:
        """Offer the admitted rooms; what came from the prefix cache is ready already."""
        now = self._clock()
        for room in admitted:
            request = room.request
            room.started = now
            self._counters["cached_tokens"] += room.cached_tokens
            self._send(
                Offer(
                    room=request.room,
                    epoch=request.epoch,
                    num_tokens=request.num_prompt,
                    pages=tuple(request.pages),
                )
            )
            if room.cached_tokens:
                self._send(Advance(room=request.room, epoch=request.epoch, tokens_ready=room.cached_tokens))

    def _forward(self, chunks: list[Chunk]) -> ForwardOutput:
        plane = self.engine.features
        batch = extend_batch(
            [(chunk.room.request, chunk.start, chunk.end) for chunk in chunks],
            page_size=self.engine.page_size,
            device=self.engine.pool.device,
            capture=CaptureHidden.NULL if plane is None else CaptureHidden.FULL,
        )
        for _ in chunks:
            self.reach("prefill:chunk")
        output = self.engine.runner.forward(batch)
        if plane is not None:
            assert output.hidden is not None
            plane.store(batch.slots, output.hidden)
        self._counters["steps"] += 1
        self._counters["prompt_tokens"] += batch.num_tokens
        return output

    def _sample(self, chunks: list[Chunk], output: ForwardOutput) -> SampleOutput:
        """Token 1 of every prompt that ends in this forward, in the order of the chunks."""
        rows = [chunk.room.request.masked_row for chunk in chunks if chunk.is_last]
        sampled = self.engine.sampler.sample(output.logits[: len(rows)], self.engine.sampler.build(rows))
        if self.engine.pool.device.type == "cuda":
            torch.cuda.current_stream(
                self.engine.pool.device
            ).synchronize()  # the link thread reads pages on its own
        return sampled

    def _score(self, chunks: list[Chunk], output: ForwardOutput) -> None:
        """Log probabilities of the prompts that ask for them, to the router before their token 1."""
        ranges = [(chunk.room.request, chunk.start, chunk.end) for chunk in chunks]
        scored = scores_of(ranges, output.logits[sum(chunk.is_last for chunk in chunks) :])
        for (request, start, _), scores in zip(ranges, scored, strict=True):
            for message in prompt_logprobs(request.room, request.epoch, self.instance, start + 1, scores):
                self._send(message)

    def _publish(self, chunks: list[Chunk], firsts: SampleOutput) -> None:
        tokens, bad = firsts.tokens.tolist(), firsts.bad_rows.tolist()
        row = 0
        for chunk in chunks:
            request = chunk.room.request
            request.num_computed = chunk.end
            chunk.room.chunks += 1
            if not chunk.is_last:
                self._send(Advance(room=request.room, epoch=request.epoch, tokens_ready=chunk.end))
            elif bad[row]:
                chunk.room.is_tainted = True
                self._fail(chunk.room, "BadLogits", "the model's logits are not finite", retryable=False)
            else:
                self._finish(chunk.room, tokens[row], _logprob(firsts, row, request.sampling.logprobs))
            row += chunk.is_last

    def _finish(self, room: Room, token: int, logprob: TokenLogprob | None) -> None:
        """Send token 1 and hand the room over.

        Also a request that ends with this very token: the router cancels it when it has the token. To drop it here would
        let decode's word of a lost hand-off overtake the token, and the router would try again what is complete.
        """
        request, now = room.request, self._clock()
        room.finished = now
        request.append([token], self.engine.model_config.eos_token_ids)
        self.engine.cache.insert(request.prompt_ids, request.pages, request.salt)
        self._send(
            FirstToken(
                room=request.room,
                epoch=request.epoch,
                instance=self.instance,
                token=token,
                logprob=logprob,
                finish=request.finish_reason or "",
                timeline=PrefillTimeline(
                    queue_ms=(room.started - room.arrived) * 1000,
                    prefill_ms=(now - room.started) * 1000,
                    prompt_tokens=request.num_prompt,
                    cached_tokens=room.cached_tokens,
                    chunks=room.chunks,
                ),
            )
        )
        logger.info(
            "prefill completed",
            extra=fields(
                room=request.room, tokens=request.num_prompt, cached=room.cached_tokens, chunks=room.chunks
            ),
        )
        self.reach("prefill:first")
        room.state = RoomState.HANDED
        self._send(
            Advance(
                room=request.room, epoch=request.epoch, tokens_ready=request.num_prompt, first_token=token
            )
        )

    def _send(self, item: Command | ControlUp) -> None:
        self.link.post(item)


def _logprob(output: SampleOutput, row: int, wanted: int) -> TokenLogprob | None:
    """Row `row` of the sampled logprobs as the wire has them; None when the request wants none."""
    if wanted < 0 or output.logprobs is None or output.top_ids is None or output.top_logprobs is None:
        return None
    ids, values = output.top_ids[row, :wanted].tolist(), output.top_logprobs[row, :wanted].tolist()
    return TokenLogprob(logprob=float(output.logprobs[row]), top=list(zip(ids, values, strict=True)))
