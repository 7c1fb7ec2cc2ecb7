"""Generates text of many prompts with the engine in this process, a large batch at a time.

Steps are launched one ahead of the one that is read, as a decode worker does. A prompt joins when a share of
the batch is free, so that many are computed in one forward.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..engine.batch.extend_batch import extend_batch
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.kv.page_table import pages_for
from ..engine.loader import EngineLoader
from ..engine.request import Request
from ..engine.sampling.params import SamplingParams
from ..engine.speculative.step.async_decoder import Flight

PAGE_SIZE = 16
JOINING_SHARE = 4  # the batch is filled up when this part of it is free: a forward over prompts is dear
PROMPT_ROWS = 8192  # of one forward over prompts
SPARE = 2  # slots behind a request's tokens that steps launched ahead may write


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt and how to continue it. `then` takes the generated ids, and may ask once more."""

    prompt: Sequence[int]
    sampling: SamplingParams
    then: "Callable[[list[int]], Ask | None]"


class Generator:
    """An engine for up to `batch` texts at once, of at most `max_tokens` tokens with their prompts.

    Raises CheckpointError for a model that cannot be loaded.
    """

    def __init__(self, model: str, *, batch: int, max_tokens: int, device: str, dtype: str) -> None:
        self.max_tokens = max_tokens
        each = pages_for(max_tokens + SPARE, PAGE_SIZE)
        config = EngineConfig(
            model=model, device=device, dtype=dtype, pages=1 + batch * each, page_size=PAGE_SIZE,
            max_running=batch, max_context=each * PAGE_SIZE, prefix_cache=False, graph_self_test=False,
        )  # fmt: skip
        loader = EngineLoader(config, has_drafter=True)
        for _, action in loader.phases():
            action()
        self._engine: Engine = loader.engine()
        self._decoder = self._engine.decoder()
        self._batch = batch
        self._eos = self._engine.model_config.eos_token_ids
        self.num_tokens = 0

    def run(self, asks: Iterator[Ask], progress: Callable[[int], None]) -> None:
        """Answers `asks` and what they ask next, to the end. `progress` is told the tokens generated so far
        at every step. A prompt that leaves no room for a token is left out.
        """
        again: deque[Ask] = deque()
        running: dict[Request, Ask] = {}
        older: Flight | None = None
        is_open = True
        while is_open or again or running or older is not None:
            free = self._batch - len(running)
            # those that end now still take part in the unread step
            if free * JOINING_SHARE >= self._batch and (is_open or again) and older is None:
                joining, is_open = self._take(asks, again, free)
                self._join(joining, running, again)
            requests = [request for request in running if not request.is_finished]
            fills = free * JOINING_SHARE >= self._batch and (is_open or again)
            newer = self._launch(requests, older) if requests and not fills else None
            if older is not None:
                self._decoder.read(older, [not request.is_finished for request in older.requests])
            in_newer = set() if newer is None else set(newer.requests)
            for request in [r for r in running if r.is_finished and r not in in_newer]:
                self._end(request, running.pop(request), again)
            older = newer
            progress(self.num_tokens)

    def _launch(self, requests: Sequence[Request], older: Flight | None) -> Flight | None:
        if self._decoder.can_launch(requests):
            return self._decoder.launch(requests)
        if older is None:
            self._decoder.step(requests)
        return None

    def _take(self, asks: Iterator[Ask], again: deque[Ask], free: int) -> tuple[list[Ask], bool]:
        """Up to `free` asks, those that follow others first, and whether `asks` may have more."""
        found: list[Ask] = []
        while len(found) < free:
            ask = again.popleft() if again else next(asks, None)
            if ask is None:
                return found, False
            if len(ask.prompt) < self.max_tokens:
                found.append(ask)
        return found, True

    def _join(self, asks: Sequence[Ask], running: dict[Request, Ask], again: deque[Ask]) -> None:
        """Computes the prompts of `asks` and their first tokens."""
        rows: list[tuple[Request, Ask]] = []
        for i, ask in enumerate(asks):
            rows.append((self._request(ask), ask))
            is_full = sum(request.num_prompt for request, _ in rows) >= PROMPT_ROWS
            if is_full or i + 1 == len(asks):
                self._compute([request for request, _ in rows])
                for request, one in rows:
                    if request.is_finished:
                        self._end(request, one, again)
                    else:
                        running[request] = one
                rows = []

    def _request(self, ask: Ask) -> Request:
        left = self.max_tokens - len(ask.prompt)
        sampling = replace(ask.sampling, max_new_tokens=min(ask.sampling.max_new_tokens, left))
        request = Request(room="0" * 32, epoch=0, prompt_ids=list(ask.prompt), sampling=sampling)
        tokens = request.num_prompt + sampling.max_new_tokens
        request.pages = self._engine.cache.alloc(pages_for(tokens + SPARE, PAGE_SIZE))
        return request

    @torch.no_grad()
    def _compute(self, requests: Sequence[Request]) -> None:
        engine = self._engine
        batch = extend_batch(
            [(request, 0, request.num_prompt) for request in requests],
            page_size=PAGE_SIZE,
            device=engine.pool.device,
        )
        logits = engine.runner.forward(batch).logits
        chosen = engine.sampler.launch(logits, [request.masked_row for request in requests]).read()
        for request, token in zip(requests, chosen.tokens.tolist(), strict=True):
            request.num_computed = request.num_prompt
            request.append([token], self._eos)

    def _end(self, request: Request, ask: Ask, again: deque[Ask]) -> None:
        self._decoder.forget(request)
        self._engine.cache.allocator.release(request.pages)
        self.num_tokens += request.num_output
        following = ask.then(list(request.output_ids))
        if following is not None:
            again.append(following)
