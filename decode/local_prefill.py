"""Prompts that decode computes itself, without a prefill worker: the same engine, the same tokens.

    launch   one forward over the next rows of the waiting prompts (`prompt_parts`), and the choice of token 1
    read     token 1 and log probabilities of that forward
    draft    the draft rows of its features, behind token 1 on its way to the client

A forward's tokens are bounded by a budget, and so is the time for which running streams wait between two of
their steps. The aux features go to the drafter as soon as token 1 is known, so none are kept. The noise of
token 1 depends on its position only: a prompt computed here, on prefill, or half here after a retry gives the
same tokens.

Parts of prompts get forwards of their own and are not joined with the rows of a decode step. A part is bound
by operations, so joined rows cost time there, too. They save at most one pass over the weights per part: 4 of
50 ms for a model of 8B on an H200. No step with joined rows could be a graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..cluster.protocol.messages import PromptLogprobs, RoutedExperts
from ..engine.batch.forward_batch import ForwardOutput
from ..engine.engine import Engine
from ..engine.prompt_budget import alone_tokens
from ..engine.request import Request
from ..engine.runner.routed_experts import ExpertRows
from ..engine.sampling.sampler import LaunchedSample, SampleOutput
from ..engine.speculative.drafters.protocol import reads_features
from ..engine.speculative.step.result import StepResult
from ..worker.first_token_plan import FirstTokenPlan, ForwardPace
from ..worker.prompt_chunks import (
    Chunk,
    batch_of,
    experts_of_prompts,
    launch_first_tokens,
    launched_experts,
    score_prompts,
    share_time,
)
from .chunk_budget import ChunkBudget
from .prompt_parts import PromptParts
from .queues import DecodeRoom, DecodeState
from .step_decoder import StepDecoder

UNREAD_FORWARDS = 2  # forwards over a prompt that are launched before the first is read
WINDOW_SHARE = 4  # a prompt takes at most 1/WINDOW_SHARE of the window pages
Chunks = Sequence[Chunk[DecodeRoom]]


@dataclass(frozen=True, kw_only=True)
class LaunchedPrompts:
    """A forward over parts of prompts that was launched and not read.

    `firsts` chooses token 1 of the prompts that end in it. `experts`: of all rows, if some prompt asks for
    them. `started`: monotonic seconds. `has_streams`: running streams wait for it.
    """

    chunks: Chunks
    output: ForwardOutput
    firsts: LaunchedSample | None
    experts: ExpertRows | None
    started: float
    has_streams: bool


@dataclass(frozen=True, kw_only=True)
class ReadPrompts:
    """A forward that was read.

    `ended`: rooms whose prompt ended, with token 1 in `result`. `drafts`: live requests with the features of
    their rows `[rows, K*H]` and the first row; empty without a drafter. `settled`: rooms that waited to
    close. `begun`: rooms whose prompt goes on.
    """

    ended: list[DecodeRoom]
    result: StepResult
    drafts: list[tuple[Request, torch.Tensor, int]]
    settled: list[DecodeRoom]
    begun: list[DecodeRoom]


class LocalPrefill:
    """Computes the rooms in state PREFILLING, at most `budget` prompt tokens per forward while streams run.

    With `slo_itl_s`, parts are smaller where a gap between two steps would exceed so many seconds (`pace`).
    With `slo_ttft_s`, `first_token_plan` has their order. `clock` tells monotonic seconds; `send` takes what
    is told of prompts to the router. If the engine launches steps ahead, a forward is read one turn after its
    launch, so that the device always has work.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: StepDecoder,
        budget: int,
        clock: Callable[[], float],
        send: Callable[[PromptLogprobs | RoutedExperts], None],
        instance: str,
        *,
        slo_itl_s: float = 0.0,
        slo_ttft_s: float = 0.0,
    ) -> None:
        self.engine = engine
        self.decoder = decoder
        self.budget = engine.windows.chunk_of(budget, share=WINDOW_SHARE, lag=UNREAD_FORWARDS)
        self.budget_alone = engine.windows.chunk_of(
            alone_tokens(budget), share=WINDOW_SHARE, lag=UNREAD_FORWARDS
        )
        self.pace = ChunkBudget(budget, slo_itl_s)
        self.plan = FirstTokenPlan(slo_ttft_s) if slo_ttft_s else None
        self.forward_pace = ForwardPace() if self.plan is None else self.plan.pace
        self._parts = PromptParts(engine.cache, engine.windows, engine.model_config.vocab_size, self.plan)
        self.num_launched = 0  # prompt tokens of all forwards
        self._clock = clock
        self._send = send
        self._instance = instance
        self._unread: LaunchedPrompts | None = None
        self._read_at = 0.0  # of the newest forward that was read
        self._uncached: list[DecodeRoom] = []  # computed, and not in the prefix cache yet

    @property
    def window_rows(self) -> int:
        """Rows of a prompt that are written before the window pages behind the first of them are given up."""
        return UNREAD_FORWARDS * max(self.budget, self.budget_alone)

    @property
    def has_unread(self) -> bool:
        """Whether a launched forward waits to be read."""
        return self._unread is not None

    def turn(self, rooms: Sequence[DecodeRoom], *, has_streams: bool) -> ReadPrompts | None:
        """Launches a forward over some of `rooms`, if any has uncomputed tokens, and reads the previous one.

        `rooms` are all rooms in state PREFILLING that can be computed, oldest first. `has_streams`: running
        streams wait for the forward. Returns None if nothing was read.
        """
        older = self._unread
        self._unread = self._launch(rooms, has_streams=has_streams or _ends_prompts(older))
        if older is None and not self.engine.launches_ahead:
            older, self._unread = self._unread, None
        return None if older is None else self._read(older)

    def _launch(self, rooms: Sequence[DecodeRoom], *, has_streams: bool) -> LaunchedPrompts | None:
        started = self._clock()
        budget = min(self.budget, self.pace.tokens) if has_streams and self.pace.slo_s else self.budget
        most = budget if has_streams else self.budget_alone
        chunks = self._parts.next(rooms, budget=budget, most=most, now=started)
        if not chunks:
            return None
        self.num_launched += sum(chunk.num_tokens for chunk in chunks)
        engine = self.engine
        output = engine.runner.forward(batch_of(engine, chunks, has_features=reads_features(engine.drafter)))
        has_firsts = any(chunk.is_last for chunk in chunks)
        firsts = launch_first_tokens(engine, chunks, output) if has_firsts else None
        for chunk in chunks:
            chunk.room.request.num_computed = chunk.end
            chunk.room.num_unread += 1
        return LaunchedPrompts(
            chunks=chunks,
            output=output,
            firsts=firsts,
            experts=launched_experts(output),
            started=started,
            has_streams=has_streams,
        )

    def _read(self, launched: LaunchedPrompts) -> ReadPrompts:
        chunks, output = launched.chunks, launched.output
        firsts = None if launched.firsts is None else launched.firsts.read()
        live = {chunk.room.key for chunk in chunks if chunk.room.state is DecodeState.PREFILLING}
        told: list[PromptLogprobs | RoutedExperts] = [
            *score_prompts(chunks, output.logits, self._instance),
            *experts_of_prompts(self.engine, chunks, launched.experts, self._instance),
        ]
        for message in told:  # to the router before token 1
            if (message.room, message.epoch) in live:
                self._send(message)
        ended, result = self._take_firsts(chunks, firsts, output.path)
        drafts = _draft_rows(chunks, output)
        now = self._clock()
        began = max(launched.started, self._read_at)  # with the steps between two parts
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self.forward_pace.saw(num_tokens, now - began)
        # beside streams a step lies between two reads, and a part without a first token is not waited for
        delay = self.pace.delay(num_tokens) if launched.has_streams else 0.0
        share_time(chunks, delay or now - began)
        self._read_at = now
        for chunk in chunks:
            room = chunk.room
            room.num_unread -= 1
            room.prefill_started = room.prefill_started or launched.started
            room.prefill_ended = now
            room.chunks += 1
            room.warmed = room.landed = chunk.end
        for room in ended:
            room.state, room.landed_at, room.started_at = DecodeState.RUNNING, now, now
        rooms = [chunk.room for chunk in chunks]
        settled = [room for room in rooms if room.state is DecodeState.SETTLING and room.is_settled]
        begun = [room for room in rooms if room.state is DecodeState.PREFILLING]
        return ReadPrompts(ended=ended, result=result, drafts=drafts, settled=settled, begun=begun)

    def finish(self, read: ReadPrompts, head_number: int = 0) -> None:
        """Writes the draft rows of a forward. The pages of its ended prompts wait for `cache_computed`.

        `head_number`: of the drafter's weights now.
        """
        if self.engine.drafter is not None:
            self.decoder.draft_prefill_batch(read.drafts)
        for room in read.ended:
            room.request.embeds = None  # every row is computed
        bad = read.result.is_bad
        self._uncached += [room for room, is_bad in zip(read.ended, bad, strict=True) if not is_bad]
        for room in read.begun:
            self._retire(room, head_number)

    def cache_computed(self, head_number: int = 0) -> None:
        """Offers the pages of computed prompts to the prefix cache, for the prompts that wait for them. Pages
        with draft rows of weights before `head_number` stay out.

        That takes milliseconds for a long prompt. It belongs behind the launch of the step that follows.
        """
        computed, self._uncached = self._uncached, []
        for room in computed:
            # a request without pages has ended, and offered them then
            if room.request.pages and room.head_number == head_number:
                keep_pages(self.engine, self.decoder, room.request)

    def _retire(self, room: DecodeRoom, head_number: int) -> None:
        """Gives up the window pages behind the parts of a prompt that were computed, to the prefix cache."""
        windows, request = self.engine.windows, room.request
        if not windows.tail_of(request.num_prompt) or room.state is not DecodeState.PREFILLING:
            return
        if room.head_number == head_number:
            keep_pages(self.engine, self.decoder, request)
        windows.retire_prompt(request, room.landed)

    def _take_firsts(
        self, chunks: Chunks, firsts: SampleOutput | None, path: str
    ) -> tuple[list[DecodeRoom], StepResult]:
        """Appends token 1 to the live requests whose prompt ends in `chunks`; returns their rooms and
        tokens.
        """
        rooms = [chunk.room for chunk in chunks if chunk.is_last]
        live = [i for i, room in enumerate(rooms) if room.state is DecodeState.PREFILLING]
        tokens: list[list[int]] = []
        logprobs, is_bad = [], []
        if firsts is not None:
            chosen, bad = firsts.tokens.tolist(), firsts.bad_rows.tolist()
            for i in live:
                request = rooms[i].request
                if not bad[i]:
                    request.append([chosen[i]], self.engine.model_config.eos_token_ids)
                tokens.append([] if bad[i] else [chosen[i]])
                logprobs.append(firsts.token_logprobs(i, request.sampling.logprobs))
                is_bad.append(bad[i])
        result = StepResult(
            tokens=tokens,
            logprobs=logprobs,
            accept_lens=[1] * len(live),
            drafted=[0] * len(live),
            is_bad=is_bad,
            path=path,
        )
        return [rooms[i] for i in live], result

    def __repr__(self) -> str:
        return f"<LocalPrefill of {self.budget} tokens{', 1 forward unread' * self.has_unread}>"


def keep_pages(engine: Engine, decoder: StepDecoder, request: Request) -> None:
    """Offers the pages of `request` with complete KV and draft KV to the prefix cache."""
    covered, cache = request.num_computed, engine.cache
    if engine.drafter is not None:
        covered = min(covered, decoder.num_covered(request))
    cache.insert(request.all_ids[: covered + cache.lookahead], request.pages, request.salt)


def _draft_rows(chunks: Chunks, output: ForwardOutput) -> list[tuple[Request, torch.Tensor, int]]:
    """The draft rows of all chunks of live rooms, as `ReadPrompts.drafts`.

    Row i needs token i+1, so the last chunk of a prompt without a valid token 1 is skipped.
    """
    if output.hidden is None:
        return []
    items, row = [], 0
    for chunk in chunks:
        rows = output.hidden[row : row + chunk.num_tokens]
        row += chunk.num_tokens
        is_live = chunk.room.state is DecodeState.PREFILLING
        if is_live and chunk.end < chunk.room.request.num_tokens:
            items.append((chunk.room.request, rows, chunk.start))
    return items


def _ends_prompts(launched: LaunchedPrompts | None) -> bool:
    """Whether streams begin once this forward is read."""
    return launched is not None and any(chunk.is_last for chunk in launched.chunks)
