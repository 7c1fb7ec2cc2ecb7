"""One random target and head, and all ways to compute the same answers: drafts, batches, chunks, graphs.

A random head's drafts are never accepted. The head runs here all the same, and some of its drafts are
replaced by the tokens that a run without drafts gave. So chains and trees are accepted to random depths.

Shape legend: B requests, N nodes of a step.
"""

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from baton.bench.engine.shapes import head_config
from baton.engine.batch.extend_batch import extend_batch
from baton.engine.batch.forward_batch import CaptureHidden
from baton.engine.capture.graph_set import GraphSet, backend_for
from baton.engine.kv.page_table import pages_for, slots_for
from baton.engine.kv.pool import KVPool
from baton.engine.models.config import ModelConfig
from baton.engine.models.interface import CausalLM
from baton.engine.models.registry import build_model
from baton.engine.request import Request
from baton.engine.runner.lifecycle import Lifecycle, Phase
from baton.engine.runner.model_runner import ModelRunner, configure_aux_capture
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculative.drafters.eagle3 import Eagle3Drafter
from baton.engine.speculative.drafters.eagle3_head import Eagle3Head
from baton.engine.speculative.drafters.protocol import DraftPrefill, DraftView, Proposal
from baton.engine.speculative.drafting.shape import PLAIN, DraftShape
from baton.engine.speculative.step.async_decoder import AsyncDecoder, Flight
from baton.engine.speculative.step.step_graphs import StepGraphs, step_graphs

PAGE_SIZE = 16
CHAIN = DraftShape.of(3)
TREE = DraftShape.of(3, 2, 8)
NOT_FINITE = "the logits of a step are not finite"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute answers.

    `batch`: requests that are decoded at once. `chunk`: most prompt tokens of a forward, of one prompt or of
    several. `has_graphs`: prompts and steps in graphs, steps launched ahead. `has_breaks`: all of these
    graphs have breaks, else the steps' and, where a backend records attention, the prompts' are full.
    `is_disaggregated`: another engine computes prompts, and its KV and features are copied.
    """

    shape: DraftShape = PLAIN
    batch: int = 1
    chunk: int = 1 << 20
    has_graphs: bool = False
    has_breaks: bool = False
    is_disaggregated: bool = False

    def __str__(self) -> str:
        drafts = "tree" if self.shape.is_tree else "chain" if self.shape.steps else "plain"
        path = "breakable" if self.has_breaks else "graphs" if self.has_graphs else "eager"
        roles = ", handed over" if self.is_disaggregated else ""
        return f"{drafts}, batch {self.batch}, chunk {min(self.chunk, 9999)}, {path}{roles}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`tokens` of one prompt, their number per verify, and a hash of the target's KV that they left."""

    tokens: list[int]
    accept_lens: list[int]
    kv_hash: str


class Models:
    """Equal random weights, for the fastest and for batch-invariant operations."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.fastest = build_model(config, dtype=dtype, device=device)
        self.invariant = build_model(config, dtype=dtype, device=device, is_invariant=True)
        generator = torch.Generator(device).manual_seed(seed)
        for name, weight in self.fastest.tensors():
            randomise(name, weight, generator)
        for (_, ours), (_, theirs) in zip(self.fastest.tensors(), self.invariant.tensors(), strict=True):
            theirs.copy_(ours)
        for model in (self.fastest, self.invariant):
            model.projections.finish()
        with tempfile.TemporaryDirectory() as folder:
            name = str(dtype).removeprefix("torch.")
            self.head_config = head_config(config, name, config.vocab_size, Path(folder))
        for model in (self.fastest, self.invariant):
            configure_aux_capture(model, self.head_config.aux.ids)
        self.head = Eagle3Head(self.head_config, dtype=dtype, device=device)
        for name, weight in self.head.tensors():
            randomise(name, weight, generator)
        self.head.share(self.fastest.embed_tokens, self.fastest.lm_head, config.max_position_embeddings)


def randomise(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    """Weights that keep the scale of their input and spread the logits."""
    weight.normal_(generator=generator)
    if "norm" in name:
        weight.mul_(0.1).add_(1)
    elif "embed" not in name:
        weight.mul_((2.0 if "lm_head" in name else 1.0) * weight.shape[-1] ** -0.5)


def _with_pools() -> Lifecycle:
    lifecycle = Lifecycle()
    for phase in (Phase.LOADED, Phase.AUX_CONFIGURED, Phase.WEIGHTS_SHARED, Phase.POOLS_ALLOCATED):
        lifecycle.advance(phase)
    return lifecycle


class AnsweringDrafter(Eagle3Drafter):
    """An EAGLE3 drafter, some of whose drafts are replaced by the coming tokens of `texts`.

    `texts` maps the first page of a request to all of its tokens.
    """

    texts: dict[int, list[int]]
    coming: torch.Tensor

    def prefill(self, items: Sequence[DraftPrefill]) -> None:
        super().prefill(items)
        for item in items:
            text = torch.tensor(self.texts.get(item.pages[0], []), device=self.device)
            self.coming[item.state_row, : len(text)] = text

    def propose(self, view: DraftView, shape: DraftShape) -> Proposal:
        drafts, tree, _ = super().propose(view, shape)
        count, device = drafts.shape[0], drafts.device
        first = view.positions[:, :1]
        numbers = torch.arange(shape.num_nodes, device=device)
        depths = numbers.expand(count, -1) if tree is None else tree.depths
        coming = self.coming[view.states].gather(1, (first + depths).clamp(max=self.coming.shape[1] - 1))
        lucky = (first * 7 + depths * 3) % 11 > 1
        if tree is None:
            return Proposal(torch.where(lucky, coming, _with_root(drafts))[:, 1:], None)
        # one of the deepest nodes, another one at each position, gets the coming tokens down its branch
        rank = depths * 2 * shape.num_nodes + (numbers * (1 + first % 5)) % shape.num_nodes
        branch = tree.mask.gather(1, rank.argmax(1)[:, None, None].expand(-1, 1, shape.num_nodes)).squeeze(1)
        drafts = torch.where(branch & lucky, coming, _with_root(drafts))[:, 1:]
        return Proposal(drafts, tree._replace(drafts=drafts))


def _with_root(drafts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(drafts, (1, 0))


class AnswerEngine:
    """Computes greedy or sampled answers of `models` in one `way`.

    `max_tokens`: most tokens of a request. `texts`: by prompt, the answers that drafts are taken from.
    """

    def __init__(self, models: Models, way: Way, *, is_invariant: bool, max_tokens: int) -> None:
        self.models, self.way = models, way
        model: CausalLM = models.invariant if is_invariant else models.fastest
        self.each = pages_for(max_tokens + way.shape.spare_slots, PAGE_SIZE)
        num_pages = 1 + way.batch * self.each
        pool = KVPool(num_pages, model.kv_layout(PAGE_SIZE), models.device)
        max_context = max_tokens + way.shape.spare_slots
        self.runner = ModelRunner(model, pool, max_context=max_context, is_invariant=is_invariant)
        self.prompts = self.runner  # the runner of prompts
        if way.is_disaggregated:
            other = KVPool(num_pages, model.kv_layout(PAGE_SIZE), models.device)
            self.prompts = ModelRunner(model, other, max_context=max_context, is_invariant=is_invariant)
        self.drafter: AnsweringDrafter | None = None
        if way.shape.steps:
            self.drafter = AnsweringDrafter(
                models.head,
                num_pages=num_pages,
                page_size=PAGE_SIZE,
                dtype=models.dtype,
                device=models.device,
                capacity=way.batch + 2,
            )
            self.drafter.texts = {}
            self.drafter.coming = torch.zeros(
                way.batch + 2, max_tokens + 16, dtype=torch.int64, device=models.device
            )
        self.sampler = Sampler(models.config.vocab_size, models.device)
        made = step_graphs(
            self.runner,
            self.drafter,
            shapes=[way.shape],
            max_requests=way.batch,
            max_context=max_context,
        )
        # Steps with edited logits have a break, where the host may fill in grammar masks.
        kinds = [
            k for k in made.kinds if k.shape == way.shape and k.is_ranked == k.is_edited == way.has_breaks
        ]
        self.steps = StepGraphs(made.step, kinds, way.batch)
        self.graphs = GraphSet(backend_for(pool.device), _with_pools())
        if way.has_graphs:
            self.graphs.capture_prefill(self.prompts, min(way.chunk, max_tokens))
            if way.has_breaks and self.prompts.graphs is not None:
                self.prompts.graphs.whole = None
            self.graphs.capture_steps(self.steps)
        self.decoder = AsyncDecoder(self.steps, shape=way.shape, launches_ahead=way.has_graphs)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        texts: Sequence[Sequence[int]] = (),
    ) -> list[Answer]:
        """The answers of `prompts`, whose coming tokens may be known by `texts`."""
        free = [list(range(1 + i * self.each, 1 + (i + 1) * self.each)) for i in range(self.way.batch)]
        waiting = list(enumerate(prompts))[::-1]
        live: dict[Request, int] = {}
        accepts: dict[int, list[int]] = {}
        answers: dict[int, Answer] = {}
        while waiting or live:
            fresh = []
            while waiting and free:
                index, prompt = waiting.pop()
                seeded = params if params.seed is None else replace(params, seed=params.seed + index)
                request = Request(room=f"{index:032x}", epoch=0, prompt_ids=list(prompt), sampling=seeded)
                request.pages = free.pop()
                if texts and self.drafter is not None:
                    self.drafter.texts[request.pages[0]] = [*prompt, *texts[index]]
                fresh.append(request)
                live[request], accepts[index] = index, []
            self._prefill(fresh)
            while len(live) and (not waiting or all(not request.is_finished for request in live)):
                running = [request for request in live if not request.is_finished]
                if not running:
                    break
                for request, num in self._step(running):
                    accepts[live[request]].append(num)
            for request in [request for request in live if request.is_finished]:
                self.decoder.forget(request)
                free.append(request.pages)
                index = live.pop(request)
                answers[index] = Answer(
                    tokens=request.output_ids, accept_lens=accepts[index], kv_hash=self._kv_hash(request)
                )
        return [answers[index] for index in range(len(prompts))]

    def _kv_hash(self, request: Request) -> str:
        slots = slots_for(request.pages, 0, request.num_tokens - 1, PAGE_SIZE)
        rows = self.runner.pool.kv[slots // PAGE_SIZE, :, :, slots % PAGE_SIZE].cpu().contiguous()
        return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()

    def _step(self, running: Sequence[Request]) -> list[tuple[Request, int]]:
        """One step, or two of which the second is launched before the first is read."""
        flights: list[Flight] = []
        if self.way.has_graphs and all(
            request.num_remaining > 2 * self.way.shape.num_path for request in running
        ):
            flights = [self.decoder.launch(running) for _ in range(2) if self.decoder.can_launch(running)]
        if not flights:
            result = self.decoder.step(running)
            assert not any(result.is_bad), NOT_FINITE
            return list(zip(running, result.accept_lens, strict=True))
        found: list[tuple[Request, int]] = []
        for flight in flights:
            result = self.decoder.read(flight, [True] * len(running))
            assert not any(result.is_bad), NOT_FINITE
            found += zip(running, result.accept_lens, strict=True)
        return found

    def _prefill(self, requests: Sequence[Request]) -> None:
        """All prompts in forwards of at most `way.chunk` tokens, of one request or of several."""
        parts = [
            (request, start, min(start + self.way.chunk, request.num_prompt))
            for request in requests
            for start in range(0, request.num_prompt, self.way.chunk)
        ]
        capture = CaptureHidden.NULL if self.drafter is None else CaptureHidden.FULL
        while parts:
            taken = [parts.pop(0)]
            while parts and parts[0][0] is not taken[-1][0]:
                if sum(end - start for _, start, end in [*taken, parts[0]]) > self.way.chunk:
                    break
                taken.append(parts.pop(0))
            batch = extend_batch(taken, page_size=PAGE_SIZE, device=self.runner.pool.device, capture=capture)
            output = self.prompts.forward(batch)
            final = [request for request, _, end in taken if end == request.num_prompt]
            if self.way.is_disaggregated:
                self._hand_over(final)
            if final:
                sampled = self.sampler.sample(
                    output.logits, self.sampler.build([r.sampling_row for r in final])
                )
                for request, token in zip(final, sampled.tokens.tolist(), strict=True):
                    request.append([token], ())
                    request.num_computed = request.num_prompt
            if output.hidden is not None:
                at_row = 0
                for request, start, end in taken:
                    self._features(request, output.hidden[at_row : at_row + end - start], start)
                    at_row += end - start

    def _hand_over(self, requests: Sequence[Request]) -> None:
        """Copies the pages of whole prompts into the pool of the steps."""
        for request in requests:
            pages = request.pages[: pages_for(request.num_prompt, PAGE_SIZE)]
            self.runner.pool.kv[pages] = self.prompts.pool.kv[pages]

    @property
    def num_replays(self) -> dict[str, int]:
        """Replays by kind of graph; only kinds that were replayed."""
        return {
            kind.kind: count for kind in self.graphs.pool.kinds() if (count := sum(kind.replays.values()))
        }

    def _features(self, request: Request, features: torch.Tensor, start: int) -> None:
        """Draft rows of a chunk. The token behind the last row of the prompt is known by now."""
        self.decoder.draft_prefill(request, features, start)
