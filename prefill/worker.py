"""A prefill server: prompts in, KV caches and first tokens out.

1. Prefill arrives            the prompt waits; it is refused at once if it can never be held or the queue is
                              full of prompts that are as urgent
2. admission                  cached prefix pages are shared, the rest allocated; the room is offered to its
                              reader. What a lower tier or a decode worker has of the prefix comes while the
                              prompt waits
3. chunks                     each forward computes the next part of some prompts and keeps the aux features
                              beside their KV; each part is announced as soon as it is final. A prompt without
                              pages takes those of less urgent ones, which the router places again
4. first token                sampled here, streamed by the router at once; the same token closes the offer
5. hand-off                   pages are pinned and read by decode until Release, Abort or the end of the lease
6. end                        every end goes through `_close`: pages go to the prefix cache, then are freed
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ..cluster.net.control_link import level_of_loss
from ..cluster.process.log import fields
from ..cluster.protocol.messages import (
    FirstToken,
    Prefill,
    PrefillTimeline,
    PromptLogprobs,
    Refused,
    RoutedExperts,
    TokenLogprob,
    WorkerStats,
)
from ..cluster.telemetry.trace_context import carried_by
from ..engine.batch.forward_batch import ForwardBatch, ForwardOutput
from ..engine.engine import Engine
from ..engine.kv.page_table import pages_for
from ..engine.kv.window_pool import WindowedPool
from ..engine.request import Request
from ..engine.runner.routed_experts import ExpertRows
from ..engine.sampling.params import SamplingParams
from ..engine.sampling.sampler import LaunchedSample, SampleOutput
from ..kvtransfer.transport import Complete, Dropped, Landed, Lost, Offer, Released
from ..worker.commands import Advance, DropDone, LinkEvent, Underway
from ..worker.first_token_plan import FirstTokenPlan, ForwardPace
from ..worker.link import WorkerLink
from ..worker.prompt_chunks import (
    Chunk,
    batch_of,
    experts_of_prompts,
    launch_first_tokens,
    launched_experts,
    score_prompts,
    share_time,
)
from ..worker.prompt_embeds import EmbedsInbox
from ..worker.prompt_pages import begin_restore, num_whole, take_restored
from ..worker.refusal import Refusal, refuse_for_now, refuse_forever
from ..worker.retractions import RETRACTION_COUNTERS, Reason, count_retraction
from ..worker.role_worker import FIRST_TOKEN_COUNTERS, RoleWorker, sampling_params_of
from .prefix_pulls import PrefixPulls
from .queues import PrefillQueues, PrefillRoom, PrefillState
from .scheduler import PrefillScheduler

logger = logging.getLogger(__name__)

RETRY_AFTER_MS = 500
PREFILL_COUNTERS = (
    "prompt_tokens", "cached_tokens", "requests", "handed_off", "dropped", "cancelled", "refused", "steps",
    "embedded_tokens", *RETRACTION_COUNTERS, *FIRST_TOKEN_COUNTERS,
)  # fmt: skip
Chunks = list[Chunk[PrefillRoom]]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A forward that the device may still compute.

    `firsts` chooses token 1 of each prompt that ends in it; reading it waits for the forward. `scores`: the
    log probabilities of prompts that ask for them. `experts`: of all rows, if some prompt asks for them.
    `at`: monotonic seconds.
    """

    at: float
    chunks: Chunks
    firsts: LaunchedSample
    scores: list[PromptLogprobs]
    experts: ExpertRows | None


class PrefillWorker(RoleWorker[PrefillRoom]):
    """The scheduler thread's side of a prefill server; `step` is one forward.

    An engine that launches ahead computes a forward while the one before is published, so its device does not
    wait for the host between the chunks of a prompt.
    """

    role = "prefill"
    awaited = "first"
    counted_as: ClassVar[Mapping[Enum, str]] = {
        PrefillState.RUNNING: "running",
        PrefillState.QUEUED: "queued",
        PrefillState.HANDED: "transferring",
    }
    queues: PrefillQueues

    def __init__(
        self,
        engine: Engine,
        link: WorkerLink,
        *,
        instance: str,
        chunk_size: int,
        max_batch: int,
        max_queue: int,
        slo_ttft_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        embeds: EmbedsInbox | None = None,
    ) -> None:
        queues = PrefillQueues(max_queue)
        counters: dict[str, float] = dict.fromkeys(PREFILL_COUNTERS, 0)
        super().__init__(
            engine,
            link,
            queues,
            instance=instance,
            counters=counters,
            slo_ttft_s=slo_ttft_s,
            clock=clock,
            embeds=embeds,
        )
        self._plan = FirstTokenPlan(slo_ttft_s) if slo_ttft_s else None
        self._pace = ForwardPace() if self._plan is None else self._plan.pace
        self.scheduler = PrefillScheduler(
            queues,
            engine.cache,
            engine.windows,
            page_size=engine.page_size,
            chunk_size=chunk_size,
            max_batch=max_batch,
            vocab_size=engine.model_config.vocab_size,
            plan=self._plan,
        )
        self.pulls = PrefixPulls(engine, link.post, counters, clock, lambda site: self.reach(site))
        self._launched: Launched | None = None
        self._landed_at = 0.0  # of the last forward that was read
        self._uncached: list[PrefillRoom] = []  # computed, and not in the prefix cache yet

    def step(self) -> bool:
        """Choose chunks, run them, keep their features, sample, publish. False: no prompt has work."""
        if self.queues.count(PrefillState.QUEUED):
            self._cache_computed()  # before their prefixes are looked for
        self._turn_prefixes()
        for room in self.scheduler.take_back(self.pulls.due_pages):
            self._preempt(room)
        chunks, admitted = self.scheduler.next_chunks(self._clock())
        due, self._launched = self._launched, None
        if chunks:
            for room in admitted:
                room.started = self._clock()
            self._launched = self._launch(chunks)
            # Behind the launch, from which the link thread would take the interpreter's lock.
            self._open(admitted)
            self._tell_underway(chunks)
        if chunks or due is None:
            self._cache_computed()  # while the device computes, or when nothing is left to do
            if self.news is not None:
                self.news.work()
        if due is not None:
            self._land(due)
        if self._launched is not None and not self.engine.launches_ahead:
            launched, self._launched = self._launched, None
            self._land(launched)
        return bool(chunks) or self._launched is not None

    def handle(self, event: LinkEvent, now: float) -> None:
        """Take in one message or transport event, at `now` in monotonic seconds."""
        match event:
            case Prefill():
                self._accept(event, now)
            case Released(room=room, epoch=epoch):
                self._on_end(room, epoch, "handed_off")
            case Dropped(room=room, epoch=epoch, reason=reason):
                known = self.queues.get(room, epoch)
                named = {"room": room} if known is None else known.log_fields
                logger.log(level_of_loss(reason), "hand-off dropped", extra=fields(**named, reason=reason))
                self._on_end(room, epoch, "dropped")
            case DropDone(room=room, epoch=epoch):
                if not self.pulls.dropped(room):
                    self._on_end(room, epoch, "")
            case Landed():
                self.pulls.landed(event)
            case Complete():
                self.pulls.complete(event)
            case Lost():
                self.pulls.lost(event)
            case _:
                super().handle(event, now)

    def stats(self) -> WorkerStats:
        """The worker's condition for the heartbeat."""
        return self._stats()

    # --- the ways in and out --------------------------------------------------------------------------------

    def _accept(self, order: Prefill, now: float) -> None:
        if not self._begins(order):
            return
        sampling = sampling_params_of(order)
        is_full = self.queues.is_full
        victim = self._turned_away(order, now) if is_full else None
        if refusal := self._refusal_of(order.prompt_ids, sampling, is_full=is_full and victim is None):
            return self._refuse(order, refusal)
        request = self._request_of(order, sampling)
        if isinstance(request, Refusal):
            return self._refuse(order, request)
        if self._is_finished_already(request):
            return
        if victim is not None:  # for an order that is taken
            self._make_way(victim)
        deadline = now + order.deadline_ms / 1000 if order.deadline_ms else None
        self.queues.add(
            PrefillRoom(
                request=request,
                arrived=now,
                deadline=deadline,
                priority=order.priority,
                waited=order.waited_ms / 1000,
                keeps_pages=order.keeps_pages,
                trace=carried_by(order),
                request_id=order.request_id,
                pull=self.pulls.usable(order),
                takes_bare=not order.wants_features,
            )
        )
        self._counters["requests"] += 1

    def _turned_away(self, order: Prefill, now: float) -> PrefillRoom | None:
        return self.scheduler.turned_away(order.priority, now - order.waited_ms / 1000)

    def _refusal_of(
        self, prompt_ids: list[int], sampling: SamplingParams, *, is_full: bool
    ) -> Refusal | None:
        """The refusal of this prompt; None if it is accepted. `is_full`: nobody leaves the queue for it."""
        engine, size_fault = self.engine, ""
        need, total = pages_for(len(prompt_ids), engine.page_size), engine.num_pages
        if len(prompt_ids) >= engine.max_context or need > total:
            size_fault = (
                f"a prompt of {len(prompt_ids)} tokens needs {need} pages of {total} and less than "
                f"{engine.max_context} tokens of context"
            )
        elif engine.windows.is_on:
            chunk = self.scheduler.chunk_size or len(prompt_ids)
            peak, most = engine.windows.peak(len(prompt_ids), need, chunk), engine.windows.pages.num_total
            if peak > most:
                size_fault = (
                    f"a prompt of {len(prompt_ids)} tokens in chunks of {chunk} needs {peak} window pages at "
                    f"once, this worker has {most}; give more --window-pages or a smaller --chunk-size"
                )
        full = f"{self.queues.max_queue} prompts are waiting already" if is_full else ""
        return refuse_forever(
            prompt_ids, sampling, vocab_size=engine.model_config.vocab_size, size_fault=size_fault
        ) or refuse_for_now(is_draining=self.is_draining, full=full, retry_after_ms=RETRY_AFTER_MS)

    def _give_up(self, room: PrefillRoom, reason: str) -> None:
        """End a room from this side. Its pages are free once the transport releases them.

        A queued room has no pages, but decode may already wait for it at the transport.
        """
        if room.is_over:
            return
        is_queued = room.state is PrefillState.QUEUED
        room.state = PrefillState.CLOSING
        self.pulls.give_up(room)
        self._drop(room, reason)
        if is_queued:
            self._close(room)

    def _preempt(self, room: PrefillRoom) -> None:
        """Takes the pages of a room for a more urgent one. The router places it again."""
        self.reach("prefill:retract")
        self._retract(room, Reason.URGENT_PAGES)

    def _make_way(self, room: PrefillRoom) -> None:
        """A queued room leaves the full queue for a more urgent one. The router places it again."""
        request, reason = room.request, Reason.URGENT_PLACE
        count_retraction(self._counters, reason, priority=room.priority, num_tokens=0)
        refused = Refused(
            room=request.room,
            epoch=request.epoch,
            instance=self.instance,
            reason=reason.message,
            retry_after_ms=RETRY_AFTER_MS,
        )
        self._send(refused)
        self._give_up(room, reason.message)

    def _on_end(self, room_id: str, epoch: int, counter: str) -> None:
        """Close a room after the transport has released its pages. `counter` counts it unless it is ""."""
        room = self.queues.get(room_id, epoch)
        if room is None:
            return
        if counter:
            self._counters[counter] += 1
        if room.state is PrefillState.RUNNING:  # the reader went away before the prompt was computed
            early = "decode gave the room up before the prompt was computed"
            self._send_failed(room, "PeerLost", early, retryable=True)
        self._close(room)

    def _close(self, room: PrefillRoom) -> None:
        """The one exit of a room: the prefix cache gets its computed pages, and all pages are released."""
        request = room.request
        if request.pages and not room.is_tainted:
            self._cache(room, request.num_computed)
        self._free(room)

    def _cache(self, room: PrefillRoom, num_tokens: int) -> None:
        """Offer the pages of the first `num_tokens` tokens to the prefix cache."""
        request = room.request
        self.engine.cache.insert(
            request.prompt_ids[:num_tokens], request.pages, request.salt, num_whole=room.num_whole
        )

    # --- prefixes from elsewhere ----------------------------------------------------------------------------

    def _turn_prefixes(self) -> None:
        """Take in prefixes that have come, and begin to get those of prompts that wait."""
        if self.tiers is not None:
            self.tiers.turn()
        for room in self.queues.of(PrefillState.QUEUED):
            restore, request = room.restore, room.request
            if restore is None or not restore.is_done:
                continue
            room.restore = None
            request.num_computed = take_restored(
                self.engine.cache, self.engine.windows, request, restore, request.num_computed
            )
            room.cached_tokens = request.num_computed
            self._get_prefix(room, is_restored=not restore.is_follower)
        self.pulls.turn()
        may_come = self.tiers is not None or any(room.pull for room in self.queues.of(PrefillState.QUEUED))
        for room in self.scheduler.take_early(self._is_elsewhere) if may_come else ():
            self._get_prefix(room)

    def _is_elsewhere(self, room: PrefillRoom, cached: Sequence[int]) -> bool:
        """Whether a lower tier or a decode worker has more of the room's prompt than the `cached` pages."""
        has_bare = num_whole(self.engine.cache, cached) is not None
        if self.pulls.wants(room, len(cached) * self.engine.page_size, has_bare=has_bare):
            return True
        return not has_bare and self._is_stored(room, cached)

    def _is_stored(self, room: PrefillRoom, cached: Sequence[int]) -> bool:
        request, limit = room.request, room.request.num_cacheable
        return self.tiers is not None and self.tiers.knows(
            request.prompt_ids, limit, request.salt, cached, len(cached)
        )

    def _get_prefix(self, room: PrefillRoom, *, is_restored: bool = False) -> None:
        """Get what a lower tier has of the prompt of `room`, then what a decode worker has behind it."""
        request = room.request
        if not is_restored and room.num_whole is None:  # pages of a tier are whole
            room.restore = begin_restore(
                self.tiers,
                request,
                request.num_computed,
                is_computed=True,
                compute_time=self._pace.behind(self.scheduler.tokens_before(room)),
            )
        if room.restore is None:
            self.pulls.begin(room)

    # --- one step -------------------------------------------------------------------------------------------

    def _open(self, admitted: list[PrefillRoom]) -> None:
        """Offer the admitted rooms. Tokens from the prefix cache are ready at once."""
        for room in admitted:
            request = room.request
            self._counters["cached_tokens"] += room.cached_tokens
            self._send(
                Offer(
                    room=request.room,
                    epoch=request.epoch,
                    num_tokens=request.num_prompt,
                    pages=self._offered_pages(request),
                    bare_tokens=room.bare_tokens,
                )
            )
            if room.cached_tokens:
                self._send(Advance(room=request.room, epoch=request.epoch, tokens_ready=room.cached_tokens))

    def _offered_pages(self, request: Request) -> tuple[int, ...]:
        """The pages of a prompt, and the window pages of its tail, by the numbers that copies know."""
        pool, windows = self.engine.pool, self.engine.windows
        if not isinstance(pool, WindowedPool):
            return tuple(request.pages)
        return (*request.pages, *(pool.wire_page(page) for page in windows.tail_pages(request)))

    def _tell_underway(self, chunks: Chunks) -> None:
        """Tell of the prompts that end in the launched forward: their blocks are read right behind it."""
        for chunk in chunks if self.engine.launches_ahead else ():
            if chunk.is_last:
                request = chunk.room.request
                self._send(
                    Underway(room=request.room, epoch=request.epoch, start=chunk.start, tokens=chunk.end)
                )

    def _launch(self, chunks: Chunks) -> Launched:
        """Run the chunks and sample. Their tokens count as computed: whatever reads their KV runs later."""
        at = self._clock()
        for chunk in chunks:
            self.engine.windows.cover(chunk.room.request, chunk.start, chunk.end)
        batch = batch_of(self.engine, chunks, has_features=self.engine.features is not None)
        for _ in chunks:
            self.reach("prefill:chunk")
        output = self.engine.runner.forward(batch)
        firsts = launch_first_tokens(self.engine, chunks, output)  # before the features: clients wait for it
        self._keep_features(batch, output)
        self.engine.pool.stamp(self._written(chunks))
        self._counters["steps"] += 1
        self._counters["prompt_tokens"] += batch.num_tokens
        for chunk in chunks:
            chunk.room.request.num_computed = chunk.end
            self._retire(chunk)
        scores = list(score_prompts(chunks, output.logits, self.instance))
        experts = launched_experts(output)
        return Launched(at=at, chunks=chunks, firsts=firsts, scores=scores, experts=experts)

    def _land(self, launched: Launched) -> None:
        """Publish a forward once the device has computed it. Rooms that ended meanwhile get nothing."""
        firsts = launched.firsts.read()  # before any message: the link thread must not wait for a forward
        self._measure(launched)
        running = {room.key for room in self.queues.of(PrefillState.RUNNING)}
        told: list[PromptLogprobs | RoutedExperts] = [
            *launched.scores,
            *experts_of_prompts(self.engine, launched.chunks, launched.experts, self.instance),
        ]
        for message in told:  # the router gets them before token 1
            if (message.room, message.epoch) in running:
                self._send(message)
        self._publish(launched.chunks, firsts)

    def _measure(self, launched: Launched) -> None:
        """Learns how long the forward kept the device busy: since its launch, or since the one before it
        ended.
        """
        now = self._clock()
        began, self._landed_at = max(launched.at, self._landed_at), now
        self._pace.saw(sum(chunk.num_tokens for chunk in launched.chunks), now - began)
        share_time(launched.chunks, now - began)

    def _keep_features(self, batch: ForwardBatch, output: ForwardOutput) -> None:
        if self.engine.features is not None:
            assert output.hidden is not None
            self.engine.features.store(batch.slots, output.hidden)

    def _retire(self, chunk: Chunk[PrefillRoom]) -> None:
        """Gives up the window pages behind a launched chunk, to the prefix cache. Later work of others on
        these pages runs behind the chunk.
        """
        request, windows = chunk.room.request, self.engine.windows
        if not chunk.is_last and windows.tail_of(request.num_prompt):
            self._cache(chunk.room, chunk.end)
            windows.retire_prompt(request, chunk.end)

    def _written(self, chunks: Chunks) -> list[int]:
        """The pages that a forward of `chunks` writes."""
        size = self.engine.page_size
        return [
            page
            for chunk in chunks
            for page in chunk.room.request.pages[chunk.start // size : pages_for(chunk.end, size)]
        ]

    def _publish(self, chunks: Chunks, firsts: SampleOutput) -> None:
        tokens, bad = firsts.tokens.tolist(), firsts.bad_rows.tolist()
        row, finished = 0, list[PrefillRoom]()
        for chunk in chunks:
            request = chunk.room.request
            if chunk.room.state is not PrefillState.RUNNING:  # it ended while the device computed it
                row += chunk.is_last
                continue
            chunk.room.chunks += 1
            if not chunk.is_last:
                self._send(Advance(room=request.room, epoch=request.epoch, tokens_ready=chunk.end))
            elif bad[row]:
                chunk.room.is_tainted = True
                self._fail(chunk.room, *request.logits_fault, retryable=request.is_fault_ours)
            else:
                scored = firsts.token_logprobs(row, request.sampling.logprobs)
                logprob = TokenLogprob(logprob=scored[0].logprob, top=scored[0].top) if scored else None
                self._finish(chunk.room, tokens[row], logprob)
                finished.append(chunk.room)
            row += chunk.is_last
        waiting = (PrefillState.QUEUED, PrefillState.RUNNING)
        if finished and not any(map(self.queues.count, waiting)):  # nobody waits but the clients of token 1
            self.link.hand_over()
        for room in finished:
            self._log_end(room)

    def _cache_computed(self) -> None:
        """Offer the pages of computed prompts to the prefix cache.

        That takes milliseconds for a long prompt, which token 1 would wait for: the link thread, which sends
        it, needs the interpreter's lock.
        """
        computed, self._uncached = self._uncached, []
        for room in computed:
            request = room.request
            if request.pages:  # else it has ended, and offered them then
                self._cache(room, request.num_prompt)
                self.engine.windows.retire_prompt(request, request.num_prompt)

    def _finish(self, room: PrefillRoom, token: int, logprob: TokenLogprob | None) -> None:
        """Send token 1 and hand the room over.

        A request that ends with this token is handed over too; the router cancels it after it gets the token.
        If it were dropped here, decode's report of a lost hand-off could overtake the token, and the router
        would retry a complete request.
        """
        request, now = room.request, self._clock()
        request.embeds = None  # every row is computed
        room.finished = now
        self._count_first_token(room, now)
        request.append([token], self.engine.model_config.eos_token_ids)
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
                    pulled_tokens=room.pulled_tokens,
                    pull_ms=room.pull_s * 1000,
                    chunks=room.chunks,
                    pull_end=room.pull_end,
                    work_ms=room.work_s * 1000,
                ),
            )
        )
        self.reach("prefill:first")
        room.state = PrefillState.HANDED
        self._uncached.append(room)
        self._send(
            Advance(
                room=request.room,
                epoch=request.epoch,
                tokens_ready=request.num_prompt,
                first_token=token,
                ready_at=now,
            )
        )

    def _log_end(self, room: PrefillRoom) -> None:
        extra = fields(
            **room.log_fields,
            tokens=room.request.num_prompt,
            cached=room.cached_tokens,
            pulled=room.pulled_tokens,
            chunks=room.chunks,
        )
        logger.log(room.log_level, "prefill completed", extra=extra)
