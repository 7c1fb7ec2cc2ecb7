"""A whole engine in one process, with requests in a decode server's state: prompts computed, drafter warm.

The rig runs the engine's own `ModelRunner`, drafter, `Sampler`, `AsyncDecoder` and graphs. With graphs, each
step is launched before the previous one is read, as on a serving device. Without graphs, each step is read at
once.
"""

import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ...engine.batch.extend_batch import extend_batch
from ...engine.batch.forward_batch import CaptureHidden
from ...engine.capture.graph_set import GraphSet, backend_for
from ...engine.kv.page_table import pages_for
from ...engine.kv.pool import FeaturePlane, KVPool
from ...engine.kv.window_layout import windowed_layout
from ...engine.kv.window_pool import WindowedPool
from ...engine.models.config import ModelConfig
from ...engine.models.interface import CausalLM
from ...engine.models.registry import Joins
from ...engine.models.weight_cuts import rank_config
from ...engine.parallel.group import SOLO, TensorGroup
from ...engine.parallel.sharing import Sharing, attention_parallel, tensor_parallel
from ...engine.request import Request
from ...engine.runner.lifecycle import Lifecycle, Phase
from ...engine.runner.model_runner import ModelRunner, configure_aux_capture
from ...engine.sampling.params import SamplingParams
from ...engine.sampling.sampler import Sampler
from ...engine.speculative.adaptive import MeasuredCosts, StepPolicy
from ...engine.speculative.drafters.protocol import cache_lookahead
from ...engine.speculative.drafting.shape import PLAIN, DraftShape
from ...engine.speculative.step.async_decoder import AsyncDecoder, Flight
from ...engine.speculative.step.fused_step import StepKind
from ...engine.speculative.step.result import StepResult
from ...engine.speculative.step.step_graphs import StepGraphs, step_graphs
from .drafters import DRAFTERS, BenchDrafter, DraftWish
from .model import TOKEN, random_target
from .shapes import target_config

logger = logging.getLogger(__name__)

NO_END = 1 << 30  # output tokens that a request may have


@dataclass(frozen=True, kw_only=True)
class RigSettings:
    """Sizes of the rig, in requests and tokens; `page_size`: tokens of a page.

    The pools hold `max_batch` requests of up to `max_request` tokens each, and one prompt of up to
    `max_prompt` tokens. Graphs cover up to `max_context` tokens of context, and the batch sizes `batches`;
    for adaptive steps all sizes. `is_invariant`: the target's operations are batch-invariant. `drafts`: the
    drafter, a name in `drafters.DRAFTERS`. `quantize`: the form of the target's matrices, a name in
    `shapes.FORMS` or "none". `has_plain`: steps without drafts are measured, too. `joins`: those of the
    target's layers, None for the default. `has_window_pages`: layers with windows have pages of their own.
    `sampling`: how requests choose their tokens.
    """

    shape: str
    model: str
    draft_vocab_size: int
    device: torch.device
    dtype: torch.dtype
    spec_steps: int
    accept_length: int
    batches: tuple[int, ...]
    max_request: int
    max_context: int
    max_prompt: int
    chunk_size: int
    has_graphs: bool
    page_size: int = 16
    is_adaptive: bool = False  # whether steps may draft fewer tokens than the chain
    is_invariant: bool = False
    drafts: str = "eagle3"
    quantize: str = "none"
    has_plain: bool = True
    joins: Joins | None = None
    has_window_pages: bool = False
    by_expert: bool = False
    has_own_rows: bool = False  # data-parallel attention
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def sharing(self, group: TensorGroup) -> Sharing:
        """Which parts of the target the ranks of `group` share."""
        share = attention_parallel if self.has_own_rows else tensor_parallel
        return share(group, by_expert=self.by_expert)

    @property
    def max_batch(self) -> int:
        return max(self.batches, default=1)


@dataclass(frozen=True, kw_only=True)
class ComputedPrompt:
    """A computed prompt: its tokens, its pages, and the features `[rows, K*H]` of its last rows, if any are
    read."""

    ids: list[int]
    pages: list[int]
    features: torch.Tensor | None


class Stepper:
    """Steps `requests` with `decoder`, to which they must be new.

    `paths` lists the execution paths seen so far.
    """

    def __init__(self, decoder: AsyncDecoder, requests: Sequence[Request]) -> None:
        self.decoder = decoder
        self.requests = requests
        self.paths: set[str] = set()
        self.num_steps = 0
        self._before = sum(request.num_output for request in requests)
        self._flights: list[Flight] = []

    def step(self) -> None:
        """Launches a step and reads the previous one.

        A decoder that does not launch ahead runs one whole step.
        """
        self.num_steps += 1
        if not self.decoder.launches_ahead:
            self._note(self.decoder.step(self.requests))
            return
        self._flights.append(self.decoder.launch(self.requests))
        if len(self._flights) > 1:
            self._read()

    def drain(self) -> None:
        """Reads the steps under way."""
        while self._flights:
            self._read()

    def finish(self) -> float:
        """Read what is under way and forget the requests; the tokens that each got per step."""
        self.drain()
        for request in self.requests:
            self.decoder.forget(request)
        gained = sum(request.num_output for request in self.requests) - self._before
        return gained / len(self.requests) / self.num_steps

    def _read(self) -> None:
        flight = self._flights.pop(0)
        self._note(self.decoder.read(flight, [True] * len(flight.requests)))

    def _note(self, result: StepResult) -> None:
        self.paths.add(result.path)


class Rig:
    """One engine that prefills and decodes. `use_graphs` switches between its graphs and the eager path.

    The ranks of `group` each have such an engine, with a part of the target, and make the same calls, with
    prompts of their own where they share the experts only. `own` is the config of that part.

    Raises ValueError when the requests or the prompt exceed the model's positions.
    """

    def __init__(self, settings: RigSettings, group: TensorGroup = SOLO) -> None:
        self.settings = settings
        self.sharing = settings.sharing(group)
        self.group = group = self.sharing.tensor
        self._lifecycle = Lifecycle()
        self.shape = DraftShape.of(settings.spec_steps)
        device, dtype = settings.device, settings.dtype
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            self.config: ModelConfig = target_config(
                settings.shape, settings.model, Path(folder), settings.quantize
            )
            _check_positions(settings, self.shape, self.config.max_position_embeddings)
            wish = DraftWish(
                config=self.config,
                dtype=dtype,
                device=device,
                draft_vocab_size=settings.draft_vocab_size,
                steps=settings.spec_steps,
                accept_length=settings.accept_length,
                page_size=self.settings.page_size,
                capacity=settings.max_batch + 2,
                folder=Path(folder),
                group=group,
            )
            self.kind: BenchDrafter = DRAFTERS[settings.drafts](wish)
        self.own = rank_config(self.config, self.sharing)
        model = random_target(
            self.own,
            dtype,
            device,
            is_invariant=settings.is_invariant,
            joins=settings.joins,
            sharing=self.sharing,
        )
        self._lifecycle.advance(Phase.LOADED)
        ids = self.kind.feature_ids
        if ids:
            configure_aux_capture(model, ids)
        self._lifecycle.advance(Phase.AUX_CONFIGURED)
        make_drafter = self.kind.share(model)
        self._lifecycle.advance(Phase.WEIGHTS_SHARED)
        page_size = settings.page_size
        self._each = pages_for(settings.max_request + self.shape.spare_slots, page_size)
        num_pages = 1 + settings.max_batch * self._each + pages_for(settings.max_prompt, page_size)
        config = self.config
        pool = self._target_pool(model, num_pages)
        width = len(ids) * config.hidden_size
        self.plane = FeaturePlane(num_pages, page_size, width, dtype, device) if ids else None
        self.drafter = make_drafter(num_pages)
        self.runner = ModelRunner(
            model, pool, max_context=settings.max_context, is_invariant=settings.is_invariant
        )
        self.sampler = Sampler(config.vocab_size, device)
        self._lifecycle.advance(Phase.POOLS_ALLOCATED)
        self._steps = {has_drafts: self._step_graphs(has_drafts) for has_drafts in (False, True)}
        self._costs: MeasuredCosts | None = None
        self.graphs = self._capture() if settings.has_graphs else None
        self._eager = {has_drafts: self._step_graphs(has_drafts) for has_drafts in (False, True)}
        self._captured = self.runner.graphs
        self._has_graphs = settings.has_graphs
        self._lifecycle.advance(Phase.CAPTURED)
        self._lifecycle.advance(Phase.SERVING)

    def use_graphs(self, wanted: bool) -> None:
        self.runner.graphs, self._has_graphs = (self._captured, True) if wanted else (None, False)

    def decoder(self, *, has_drafts: bool, policy: StepPolicy | None = None) -> AsyncDecoder:
        """A fresh one; without drafts it decodes one row per request."""
        steps = (self._steps if self._has_graphs else self._eager)[has_drafts]
        shape = self.shape if has_drafts else PLAIN
        return AsyncDecoder(steps, shape=shape, policy=policy, launches_ahead=self._has_graphs)

    def policy(self) -> StepPolicy:
        """A fresh policy with the costs measured on the captured steps.

        Raises ValueError for a rig without graphs, or one that is not adaptive.
        """
        if self._costs is None:
            raise ValueError("adaptive steps are measured with graphs; use --graphs on")
        return StepPolicy(self.shape.candidates(), self._costs, is_watched=self._is_watched)

    def prompts(self, count: int, length: int) -> list[ComputedPrompt]:
        """`count` random prompts of `length` tokens each, with their KV in the target's and the drafter's
        pool."""
        generator = torch.Generator().manual_seed(2 + self._own_seed)
        made = []
        for i in range(count):
            pages = list(range(1 + i * self._each, 1 + (i + 1) * self._each))
            made.append(self._computed(self._random_ids(length, generator), pages))
        return made

    def stepper(
        self, prompts: Sequence[ComputedPrompt], *, has_drafts: bool, policy: StepPolicy | None = None
    ) -> Stepper:
        """A stepper for requests that have their first output token and, with drafts, a warm drafter."""
        requests, decoder = [], self.decoder(has_drafts=has_drafts, policy=policy)
        for number, prompt in enumerate(prompts):
            request = self._request(f"{number}", prompt.ids, prompt.pages, seed=number)
            request.num_computed = request.num_prompt
            request.output_ids.append(TOKEN)
            if (features := prompt.features) is not None:
                decoder.draft_prefill(request, features, request.num_prompt - features.shape[0])
            requests.append(request)
        return Stepper(decoder, requests)

    def long_prompt(self, length: int) -> Request:
        """A request with a random prompt of `length` tokens, to be passed to `prefill`."""
        first = 1 + self.settings.max_batch * self._each
        pages = list(range(first, first + pages_for(length, self.settings.page_size)))
        generator = torch.Generator().manual_seed(3 + self._own_seed)
        return self._request("prompt", self._random_ids(length, generator), pages)

    def prefill(self, request: Request) -> torch.Tensor | None:
        """Computes the whole prompt in chunks, as a prefill worker does: keeps features beside the KV,
        samples token 1.

        Returns the features of the prompt's last chunk, if any are read, after the device has finished.
        """
        features = None
        for start in range(0, request.num_prompt, self.settings.chunk_size):
            end = min(start + self.settings.chunk_size, request.num_prompt)
            batch = extend_batch(
                [(request, start, end)],
                page_size=self.settings.page_size,
                device=self.settings.device,
                capture=CaptureHidden.NULL if self.plane is None else CaptureHidden.FULL,
            )
            output = self.runner.forward(batch)
            features = output.hidden
            if self.plane is not None and features is not None:
                self.plane.store(batch.slots, features)
        self.sampler.sample(output.logits, self.sampler.build([request.sampling_row])).tokens.tolist()
        return features

    def _request(self, room: str, ids: list[int], pages: list[int], seed: int = 0) -> Request:
        sampling = replace(self.settings.sampling, seed=seed, max_new_tokens=NO_END, ignore_eos=True)
        return Request(room=room, epoch=0, prompt_ids=ids, sampling=sampling, pages=pages)

    def _computed(self, ids: list[int], pages: list[int]) -> ComputedPrompt:
        request = self._request("prompt", ids, pages)
        last = self.prefill(request)
        if self.plane is None or last is None:
            return ComputedPrompt(ids=ids, pages=pages, features=None)
        last = last[-max(1, cache_lookahead(self.drafter)) :].clone()
        features = self.plane.features[pages].flatten(0, 1)[: len(ids)]
        request.output_ids.append(TOKEN)
        decoder = self.decoder(has_drafts=True)
        decoder.draft_prefill(request, features, 0)
        decoder.forget(request)
        return ComputedPrompt(ids=ids, pages=pages, features=last)

    @property
    def _own_seed(self) -> int:
        """Of prompts: equal on ranks that have the same rows."""
        return 1000 * self.sharing.experts.rank if self.sharing.has_own_rows else 0

    def _random_ids(self, length: int, generator: torch.Generator) -> list[int]:
        ids: list[int] = torch.randint(0, self.config.vocab_size, (length - 1,), generator=generator).tolist()
        return [*ids, TOKEN]  # the drafts depend on the last two tokens only

    def _target_pool(self, model: CausalLM, num_pages: int) -> KVPool:
        """The target's pool. Each page keeps its window page, if it has one."""
        device, dtype = self.settings.device, self.settings.dtype
        layout = model.kv_layout(self.settings.page_size)
        windows = self.config.forms.windows if self.settings.has_window_pages else ()
        windowed = windowed_layout(layout, windows)
        if windowed is None:
            return KVPool(num_pages, layout, device, row_dtype=dtype)
        pool = WindowedPool(num_pages, num_pages, windowed, device, row_dtype=dtype)
        pool.lend(pool.num_lendable)
        return pool

    @property
    def _is_watched(self) -> bool:
        """Whether a plain step tells if a first draft would match; blocks have no first draft alone."""
        return self.settings.drafts != "dflash"

    def _step_graphs(self, has_drafts: bool) -> StepGraphs:
        """Steps of one shape, or of all that an adaptive policy may choose, with what `sampling` needs.

        Steps whose costs such a policy compares are greedy.
        """
        settings, shape = self.settings, self.shape if has_drafts else PLAIN
        shapes = shape.candidates()[::-1] if settings.is_adaptive and has_drafts else [shape]
        steps = step_graphs(
            self.runner,
            self.drafter if has_drafts else None,
            shapes=shapes,
            watched=shape if len(shapes) > 1 and self._is_watched else None,
            max_requests=settings.max_batch,
            max_context=settings.max_context + self.shape.spare_slots,
            group=self.group,
        )
        kinds = [kind for kind in steps.kinds if kind.shape in shapes]
        covering = {kind.shape: kind for kind in kinds[::-1] if kind.covers(self._needed(kind))}
        greedy = [kind for kind in kinds if not kind.is_ranked] if settings.is_adaptive else []
        return StepGraphs(steps.step, [*dict.fromkeys([*greedy, *covering.values()])], settings.max_batch)

    def _needed(self, kind: StepKind) -> StepKind:
        """The kind of step that requests take in the shape of `kind`."""
        sampling = self.settings.sampling
        return StepKind(
            shape=kind.shape,
            watched=kind.watched,
            is_ranked=sampling.needs_ranking(self.config.vocab_size),
            is_edited=sampling.needs_edits,
            num_top=sampling.logprobs,
        )

    def _capture(self) -> GraphSet:
        settings, began = self.settings, time.perf_counter()
        graphs = GraphSet(backend_for(settings.device), self._lifecycle)
        graphs.capture_prefill(self.runner, min(settings.chunk_size, settings.max_prompt))
        sizes = None if settings.is_adaptive else settings.batches
        if settings.has_plain:
            graphs.capture_steps(self._steps[False], sizes=sizes)
        # Adaptive steps include plain ones with a drafter, which one pool would take for the others.
        drafting = GraphSet(graphs.pool.backend, self._lifecycle) if settings.is_adaptive else graphs
        drafting.capture_steps(self._steps[True], sizes=sizes)
        if settings.is_adaptive:
            self._costs = drafting.measure_steps(self._steps[True])
        logger.info("captured all graphs in %.1f s", time.perf_counter() - began)
        return graphs

    def __repr__(self) -> str:
        return f"<Rig {self.runner!r}, {self.graphs!r}>"


def check_ranks(settings: RigSettings, num_ranks: int) -> None:
    """Raises CheckpointError, naming what fits, if so many ranks cannot share the target."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        config = target_config(settings.shape, settings.model, Path(folder), settings.quantize)
    rank_config(config, settings.sharing(TensorGroup(size=num_ranks)))


def _check_positions(settings: RigSettings, shape: DraftShape, limit: int) -> None:
    wanted = max(settings.max_request + shape.spare_slots, settings.max_prompt)
    if wanted > limit:
        raise ValueError(
            f"{settings.model or settings.shape} has {limit} positions, and {wanted} would be used: the "
            "longest prompt, or context with what all steps add; lower --context, --prefill or --repeats"
        )
