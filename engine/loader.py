"""Builds one engine in the fixed order of `EngineLoader.phases`.

A prefill engine reads only the draft's config, for the layers to capture, and keeps the features in a plane
beside its KV. A decode engine loads the draft head, shares the target's embedding and lm_head with it, and
keeps draft KV.
"""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .capture.graph_set import GraphSet, backend_for
from .config import EngineConfig, resolve_checkpoint, resolve_device, resolve_dtype
from .errors import CheckpointError, LifecycleError
from .grammar.guided import GrammarCompiler
from .graphs.backend import GraphBackend
from .kv.budget import PageBudget
from .kv.page_table import pages_for
from .kv.pool import FeaturePlane, KVPool, PageAllocator
from .kv.prefix_cache import PrefixCache
from .models.config import ModelConfig
from .models.interface import CausalLM
from .models.weights import load_model
from .runner.lifecycle import Lifecycle, Phase
from .runner.model_runner import ModelRunner, configure_aux_capture
from .sampling.sampler import Sampler
from .speculative.adaptive import KNEE_ROWS, StepCosts, StepPolicy
from .speculative.drafters.protocol import MAX_PREFILL_ROWS, Drafter
from .speculative.drafters.registry import DraftConfig, DraftModel, DraftSource, TargetWeights, read_drafter
from .speculative.drafting.shape import PLAIN, DraftShape
from .speculative.step.async_decoder import AsyncDecoder
from .speculative.step.step_graphs import StepGraphs, step_graphs
from .warmup.compiler import compile_launches
from .warmup.kernel_cache import use_kernel_cache
from .warmup.memory import reserve_memory
from .warmup.rehearsal import Rehearsal, RehearsalSizes
from .warmup.variants import Reach, VariantPlanner
from .warmup.watch import ReadyWatch
from .weights_hash import WeightsHash, model_fingerprint

logger = logging.getLogger(__name__)

CUDA_MEMORY_SHARE = 0.85  # of the free memory after the weights, if no KV memory is configured
CPU_MEMORY_MB = 1024
WHOLE_PROMPT_TOKENS = 2048  # largest prefill graph where prompts are not cut into chunks
REHEARSED_TOKENS = 8192  # largest rehearsed prompt where prompts are not cut into chunks
CACHE_LOOKAHEAD = 1  # draft KV of a page's last row depends on the token behind the page


@dataclass(kw_only=True)
class Engine:
    """A ready engine: one target over one page pool, with the drafting parts of its role.

    `features` is the feature plane of prefill, `drafter` the draft head of decode; both are None without a
    draft. `max_context` is in tokens. `shape` is the configured draft shape; `step_policy` may vary it.
    `graphs` None: every forward runs eagerly. `steps` belong to decode. `launches_ahead`: each step is
    launched before the previous one is read.
    """

    path: Path
    fingerprint: str
    model_config: ModelConfig
    model: CausalLM
    draft_config: DraftConfig | None
    runner: ModelRunner
    sampler: Sampler
    pool: KVPool
    features: FeaturePlane | None
    drafter: Drafter | None
    cache: PrefixCache
    max_context: int
    lifecycle: Lifecycle
    grammars: GrammarCompiler
    shape: DraftShape = PLAIN
    step_policy: StepPolicy | None = None
    graphs: GraphSet | None = None
    steps: StepGraphs | None = None
    launches_ahead: bool = False
    weights: WeightsHash | None = None
    # Layer outputs that prefill captures, or that decode's head reads, in the order of its input.
    feature_ids: tuple[int, ...] = ()
    watch: ReadyWatch | None = None  # from the start of serving

    def decoder(self) -> AsyncDecoder:
        """Returns the decoder of this engine; only one may exist at a time. Raises LifecycleError on a
        prefill engine.
        """
        if self.steps is None:
            raise LifecycleError("a prefill engine takes no decode steps")
        return AsyncDecoder(
            self.steps,
            shape=self.shape,
            policy=self.step_policy,
            eos_token_ids=self.model_config.eos_token_ids,
            launches_ahead=self.launches_ahead,
        )

    def __repr__(self) -> str:
        return f"<Engine {self.model!r}, {self.pool!r}, {self.lifecycle.phase.name}>"

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @property
    def num_pages(self) -> int:
        """Pages that requests can hold."""
        return self.cache.allocator.num_total

    @property
    def feature_width(self) -> int:
        """Elements of all captured features per token."""
        return len(self.feature_ids) * self.model_config.hidden_size if self.feature_ids else 0

    @property
    def weights_hash(self) -> str:
        """sha256 (hex) of every byte of the weights; "" until it is known."""
        return "" if self.weights is None else self.weights.value

    @property
    def graph_counts(self) -> dict[str, int]:
        """Captured graphs by kind, as heartbeats name them; empty without graphs."""
        return {} if self.graphs is None else self.graphs.counts()

    @property
    def graph_counters(self) -> dict[str, float]:
        """Graph replays and fallbacks since the start."""
        return {} if self.graphs is None else self.graphs.counters()

    @property
    def watch_counters(self) -> dict[str, float]:
        """Compilations, captures and device allocations since the engine is ready; empty before."""
        return {} if self.watch is None else self.watch.counters

    @property
    def spec_steps(self) -> int | None:
        """Draft steps of the newest verify; None without a drafter."""
        if self.drafter is None:
            return None
        return self.shape.steps if self.step_policy is None else self.step_policy.current.steps

    @property
    def step_counters(self) -> dict[str, float]:
        """Number of steps by draft length, and of changes of the length; empty without a policy."""
        policy = self.step_policy
        if policy is None:
            return {}
        chosen = {f"steps_of_{steps}_drafts": float(count) for steps, count in sorted(policy.chosen.items())}
        return chosen | {"spec_steps_changes": float(policy.num_changes)}


class EngineLoader:
    """Builds an Engine phase by phase.

    `has_drafter`: the engine drafts (decode); otherwise it only captures features. If the config enables
    graphs, they are captured on `backend`, by default that of the device.
    """

    def __init__(
        self, config: EngineConfig, *, has_drafter: bool, backend: GraphBackend | None = None
    ) -> None:
        self.config = config
        self._shape = DraftShape.of(config.spec_steps, config.spec_topk, config.spec_tokens)
        self._backend = backend
        self.has_drafter = has_drafter
        self.lifecycle = Lifecycle()
        self._engine: Engine | None = None
        self._source: DraftSource | None = None
        self._draft: DraftModel | None = None
        self._feature_ids: tuple[int, ...] = ()

    def phases(self) -> list[tuple[str, Callable[[], None]]]:
        """Pairs (name, action) in the required order."""
        return [
            ("load weights", self._load),
            ("configure aux capture", self._configure_aux),
            ("load and share draft weights" if self.has_drafter else "skip draft weights", self._share),
            ("allocate pools", self._allocate),
            ("load the tokenizer of grammars", self._load_grammars),
            ("compile kernels", self._compile),
            ("capture graphs", self._capture),
            ("rehearse", self._rehearse),
        ]

    def engine(self) -> Engine:
        """Returns the engine after all phases and advances it to SERVING."""
        engine = self._engine
        assert engine is not None
        self.lifecycle.advance(Phase.SERVING)
        engine.watch = ReadyWatch(self._device, None if engine.graphs is None else engine.graphs.pool)
        return engine

    def _load(self) -> None:
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._path = resolve_checkpoint(config.model)
        self._weights = WeightsHash(self._path)
        self._model, self._model_config = load_model(self._path, dtype=self._dtype, device=self._device)
        self._fingerprint = model_fingerprint(self._path)
        limit = self._model_config.max_position_embeddings
        if config.max_context > limit:
            raise CheckpointError(
                f"max_context {config.max_context}: the model at {self._path} allows at most {limit} tokens; "
                "lower it"
            )
        self._max_context = config.max_context or limit
        self.lifecycle.advance(Phase.LOADED)

    def _configure_aux(self) -> None:
        ids: tuple[int, ...] = ()
        if self.config.has_draft:
            draft_path = resolve_checkpoint(self.config.draft)
            running = str(self._dtype).removeprefix("torch.")
            source = read_drafter(draft_path, self._model_config, target_path=self._path, dtype=running)
            source.check_role(has_drafter=self.has_drafter)
            self._source, ids = source, source.config.aux.ids
            logger.info("draft config: %r", source.config)
        if not self.has_drafter:
            ids = self._offered(ids)
        if ids:
            configure_aux_capture(self._model, ids)
        self._feature_ids = ids
        self.lifecycle.advance(Phase.AUX_CONFIGURED)

    def _offered(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The layers that prefill captures: those of its head, then the others of `feature_layers`, without
        repeats.

        Raises CheckpointError for a layer that the model does not have.
        """
        extra, num_layers = self.config.extra_feature_ids, self._model_config.num_layers
        beyond = [layer for layer in extra if layer >= num_layers]
        if beyond:
            raise CheckpointError(
                f"feature_layers {self.config.feature_layers}: the model at {self._path} has layers 0 to "
                f"{num_layers - 1}, not {beyond[0]}; name the layers that the decode workers' heads read"
            )
        return tuple(dict.fromkeys((*ids, *extra)))

    def _share(self) -> None:
        if self.has_drafter and self._source is not None:
            lent = TargetWeights(
                embed_tokens=self._model.embed_tokens,
                lm_head=self._model.lm_head,
                max_context=self._max_context,
                dtype=self._dtype,
                device=self._device,
            )
            self._draft = self._source.load(lent)
            self._draft.check(self._shape)
        self.lifecycle.advance(Phase.WEIGHTS_SHARED)

    def _allocate(self) -> None:
        config, model = self.config, self._model_config
        num_pages = config.pages + 1 if config.pages else self._affordable_pages()  # page 0 is the sink
        pool = KVPool(num_pages, self._model.kv_layout(config.page_size), self._device)
        features, drafter = None, None
        if self._feature_ids and not self.has_drafter:
            width = len(self._feature_ids) * model.hidden_size
            features = FeaturePlane(num_pages, config.page_size, width, self._dtype, self._device)
        if self._draft is not None:
            drafter = self._draft.drafter(
                num_pages=num_pages, page_size=config.page_size, capacity=config.max_running + 1
            )
        cache = PrefixCache(
            PageAllocator(num_pages, pool.order),
            config.page_size,
            enabled=config.prefix_cache,
            lookahead=CACHE_LOOKAHEAD if drafter is not None else 0,
        )
        runner = ModelRunner(self._model, pool)
        self._engine = Engine(
            path=self._path,
            fingerprint=self._fingerprint,
            weights=self._weights,
            feature_ids=self._feature_ids,
            model_config=model,
            model=self._model,
            draft_config=None if self._source is None else self._source.config,
            runner=runner,
            sampler=Sampler(model.vocab_size, self._device),
            pool=pool,
            features=features,
            drafter=drafter,
            cache=cache,
            max_context=self._max_context,
            lifecycle=self.lifecycle,
            grammars=GrammarCompiler(self._path / "tokenizer.json", model.vocab_size, model.eos_token_ids),
            shape=PLAIN if drafter is None else self._shape,
            step_policy=None if self._draft is None else self._step_policy(self._draft),
        )
        if self.has_drafter:
            engine = self._engine
            engine.launches_ahead = self._is_overlapped
            engine.steps = step_graphs(
                runner,
                drafter,
                shapes=_shapes_of(engine),
                watched=None if engine.step_policy is None else engine.shape,
                max_requests=config.max_running,
                max_context=self._max_context,
            )
        self.lifecycle.advance(Phase.POOLS_ALLOCATED)

    def _load_grammars(self) -> None:
        assert self._engine is not None
        self._engine.grammars.load()

    @property
    def _is_overlapped(self) -> bool:
        return self.config.overlap == "on" or (self.config.overlap == "auto" and self._device.type == "cuda")

    def _compile(self) -> None:
        """Compiles every kernel variant that serving can reach; there are none on a CPU."""
        engine = self._engine
        assert engine is not None
        if self._device.type != "cuda":
            return
        use_kernel_cache()
        planner = VariantPlanner(engine.runner, engine.drafter, engine.steps, self.reach())
        try:
            launches = planner.launches()
        except Exception as error:  # of an operation that has no form for fake tensors
            logger.warning("kernels are compiled one by one at their first use: %s", error, exc_info=error)
        else:
            compile_launches(launches, self._device)

    def _rehearse(self) -> None:
        """Runs every kind of forward once on a GPU, and takes the memory of later ones from the driver."""
        engine = self._engine
        assert engine is not None
        self.lifecycle.require(Phase.CAPTURED)
        if self._device.type != "cuda":
            return
        reach = self.reach()
        sizes = RehearsalSizes(
            prompt_rows=min(reach.prompt_rows, REHEARSED_TOKENS),
            max_prompts=reach.max_prompts,
            max_requests=reach.max_requests,
        )
        Rehearsal(engine, sizes).run()
        if engine.graphs is not None:
            engine.graphs.pool.forget_replays()
        reserve_memory(self._device, self._page_budget().staging(engine.pool.num_pages))

    def reach(self) -> Reach:
        """The largest sizes that serving in this role can ask for."""
        config, engine = self.config, self._engine
        assert engine is not None
        prompt_rows = config.chunk_size or self._max_context
        if self.has_drafter:
            prompt_rows = max(config.local_prefill_tokens, MAX_PREFILL_ROWS)
        is_cut = not config.graphs and not engine.shape.is_tree  # an eager chain is cut to the useful drafts
        return Reach(
            prompt_rows=min(prompt_rows, self._max_context),
            max_prompts=config.max_running if self.has_drafter else config.max_batch,
            max_requests=config.max_running,
            max_context=self._max_context,
            page_size=config.page_size,
            eager_shapes=tuple(DraftShape.of(n) for n in range(1, engine.shape.steps)) if is_cut else (),
        )

    def _capture(self) -> None:
        engine, config = self._engine, self.config
        assert engine is not None
        if config.graphs:
            engine.graphs = graphs = GraphSet(self._backend or backend_for(self._device), self.lifecycle)
            if self.has_drafter:
                if engine.drafter is not None:
                    graphs.capture_draft(engine.drafter, MAX_PREFILL_ROWS)
                if engine.steps is not None:
                    graphs.capture_steps(engine.steps)
            else:
                graphs.capture_prefill(
                    engine.runner, config.chunk_size or min(WHOLE_PROMPT_TOKENS, self._max_context)
                )
            if config.graph_self_test:
                graphs.self_test(engine.runner, engine.drafter, self._max_context, engine.steps)
            graphs.log_report()
        self.lifecycle.advance(Phase.CAPTURED)

    def _step_policy(self, draft: DraftModel) -> StepPolicy | None:
        """The policy that adapts the draft length to load and acceptance, if enabled."""
        if self.config.spec_adaptive == "off" or (
            self.config.spec_adaptive == "auto" and self._device.type != "cuda"
        ):
            return None
        is_vocabulary = re.compile("embed_tokens|lm_head")
        layers = sum(w.numel() for name, w in self._model.tensors() if not is_vocabulary.search(name))
        target = layers + self._model.lm_head.numel()
        costs = StepCosts(draft=draft.num_weights / target, knee_rows=KNEE_ROWS[self._device.type])
        return StepPolicy(self._shape.candidates(), costs)

    def _affordable_pages(self) -> int:
        """The number of pages that fit in the KV memory, with the planes beside the KV. Raises
        CheckpointError below 2.
        """
        budget = self._page_budget()
        count = budget.num_pages(self._kv_memory())
        if count < 2:
            need = pages_for(self._max_context, self.config.page_size) * budget.page_bytes
            raise CheckpointError(
                f"kv_memory_mb {self.config.kv_memory_mb}: one page costs {budget.page_bytes} bytes; give at "
                f"least {need >> 20} for one request of the full context"
            )
        return count

    def _kv_memory(self) -> int:
        """Bytes for pages and features in flight: the configured amount, or a share of the device."""
        if self.config.kv_memory_mb:
            return self.config.kv_memory_mb << 20
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            return int(free * CUDA_MEMORY_SHARE)
        return CPU_MEMORY_MB << 20

    def _page_budget(self) -> PageBudget:
        """The bytes of a page in this role. Decode adds draft KV and staged features; prefill adds a feature
        plane.
        """
        page_size = self.config.page_size
        kv_bytes = self._model.kv_layout(page_size).page_bytes
        if self._draft is not None:
            draft_bytes = self._draft.kv_layout(page_size).page_bytes
            return PageBudget(kv_bytes=kv_bytes, draft_bytes=draft_bytes, has_staging=True)
        if self.has_drafter:
            return PageBudget(kv_bytes=kv_bytes)
        width = len(self._feature_ids) * self._model_config.hidden_size
        return PageBudget(kv_bytes=kv_bytes, feature_bytes=page_size * width * self._dtype.itemsize)


def _shapes_of(engine: Engine) -> Sequence[DraftShape]:
    """The shapes that a step may draft, the configured one first."""
    return [engine.shape] if engine.step_policy is None else engine.step_policy.shapes[::-1]
