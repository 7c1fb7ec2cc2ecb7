"""Builds one engine in the fixed order of `EngineLoader.phases`.

A prefill engine reads only the draft's config, for the layers to capture, and keeps the features in a plane
beside its KV. A decode engine loads the draft head, shares the target's embedding and lm_head with it, and
keeps draft KV.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..kernels.row_ops import INVARIANT
from ..kernels.triton_jit import triton_version
from .auto_sizes import (
    PAGE_SIZE,
    Card,
    EngineRole,
    EngineSizes,
    GivenSizes,
    ModelSizes,
    check_weights,
    choose_sizes,
)
from .capture.graph_set import GraphSet, backend_for
from .config import EngineConfig, resolve_device, resolve_dtype
from .engine import Engine
from .errors import CheckpointError
from .grammar.guided import GrammarCompiler
from .graphs.backend import GraphBackend
from .graphs.votes import alone
from .hub import NGRAM, resolve_checkpoint
from .invariance import check_invariance
from .kv.budget import PageBudget, WindowBudget
from .kv.pool import FeaturePlane, KVPool, PageAllocator
from .kv.prefix_cache import PrefixCache
from .kv.window_layout import WindowedLayout, windowed_layout
from .kv.window_pages import WindowPages
from .kv.window_pool import WindowedPool
from .models.registry import load_model_config
from .models.weight_cuts import rank_config
from .models.weights import load_model, load_stored_config, needless_tensors, weight_bytes
from .parallel.group import SOLO, TensorGroup, join_group
from .parallel.peer_sum import peer_sum
from .parallel.rank_cards import card_of_rank
from .parallel.sharing import Sharing, attention_parallel, tensor_parallel
from .parallel.vocabulary import table_of
from .prompt_budget import WHOLE_PROMPT_ROWS, alone_tokens
from .request_windows import MAX_MARGIN, RequestWindows
from .runner.expert_counts import ExpertCounts, count_experts
from .runner.lifecycle import Lifecycle, Phase
from .runner.model_runner import ModelRunner, configure_aux_capture
from .runner.routed_experts import RoutedExperts, keep_experts
from .sampling.sampler import Sampler
from .speculative.adaptive import KNEE_ROWS, StepCosts, StepPolicy
from .speculative.drafters.live_head import LiveHead
from .speculative.drafters.ngram import NgramConfig
from .speculative.drafters.protocol import MAX_PREFILL_ROWS, cache_lookahead
from .speculative.drafters.registry import (
    DraftModel,
    DraftSource,
    NgramSource,
    TargetWeights,
    read_drafter,
)
from .speculative.drafting.shape import PLAIN, DraftShape
from .speculative.step.step_graphs import step_graphs
from .warmup.compiler import compile_launches
from .warmup.kernel_cache import use_kernel_cache
from .warmup.memory import reserve_memory
from .warmup.plan_file import driver_version, keep_verdict, kept_launches, plan_key, were_tested
from .warmup.rehearsal import Rehearsal, RehearsalSizes
from .warmup.variants import Reach, VariantPlanner
from .weights_hash import WeightsHash, model_fingerprint

logger = logging.getLogger(__name__)

WHOLE_PROMPT_TOKENS = 2048  # largest prefill graph where prompts are not cut into chunks
COUNTED_ROWS = 1 << 16  # most rows of a forward whose experts are counted or kept; more with a longer context
DETERMINISTIC = " deterministic"  # of the fingerprint of a deterministic engine


def _nothing() -> None:
    """Where nobody watches a start."""


class EngineLoader:
    """Builds an Engine phase by phase.

    `has_drafter`: the engine drafts (decode); otherwise it only captures features. If the config enables
    graphs, they are captured on `backend`, by default that of the device. From "allocate pools" on, `config`
    holds the chosen sizes.

    All ranks of a worker go through the phases together, each with its place in `group`. `beat` is called at
    each phase and each vote of the ranks, as a sign of life.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        has_drafter: bool,
        backend: GraphBackend | None = None,
        group: TensorGroup = SOLO,
        beat: Callable[[], None] = _nothing,
    ) -> None:
        self._beat = beat
        self.config = replace(config, page_size=config.page_size or PAGE_SIZE)
        self._given = GivenSizes.of(config)
        self._shape = DraftShape.of(config.spec_steps, config.spec_topk, config.spec_tokens)
        self._backend = backend
        self._ranks = group  # all that start together
        self._sharing = sharing_of(config, group)
        self._group = self._sharing.tensor
        self.has_drafter = has_drafter
        self.lifecycle = Lifecycle()
        self._engine: Engine | None = None
        self._source: DraftSource | None = None
        self._draft: DraftModel | None = None
        self._feature_ids: tuple[int, ...] = ()
        self._expert_counts: ExpertCounts | None = None
        self._routed_experts: RoutedExperts | None = None
        # the folder and the name of what earlier starts have found out
        self._kept: tuple[Path | None, str] = None, ""

    def phases(self) -> list[tuple[str, Callable[[], None]]]:
        """Pairs (name, action) in the required order."""
        actions = [
            ("load weights", self._load),
            ("configure aux capture", self._configure_aux),
            ("load and share draft weights" if self.has_drafter else "skip draft weights", self._share),
            ("allocate pools", self._allocate),
            ("load the tokenizer of grammars", self._load_grammars),
            ("compile kernels", self._compile),
            ("capture graphs", self._capture),
            ("rehearse", self._rehearse),
        ]
        return [(name, partial(self._run, action)) for name, action in actions]

    def _run(self, action: Callable[[], None]) -> None:
        self._beat()
        action()

    def _vote(self, is_so: bool) -> bool:
        self._beat()
        return self._ranks.agree(is_so)

    def engine(self) -> Engine:
        """Returns the engine after all phases and advances it to SERVING."""
        engine = self._engine
        assert engine is not None
        engine.pool.order.stamp_all()  # the phases wrote to pages without an owner, or behind its release
        self.lifecycle.advance(Phase.SERVING)
        return engine

    def _load(self) -> None:
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        self._device = rank_device(resolve_device(config.device), self._ranks)
        self._dtype = resolve_dtype(config.dtype, self._device)
        self._path = resolve_checkpoint(config.model)
        self._weights = WeightsHash(self._path)
        self._card = engine_card(self._device)
        if self._card.is_gpu:
            check_weights(self._card, config.gpu_memory_share, self._weight_bytes())
        self._model, self._model_config = load_model(
            self._path,
            dtype=self._dtype,
            device=self._device,
            is_invariant=config.deterministic,
            quantize=config.quantize,
            kv_dtype=config.kv_dtype,
            sharing=self._sharing,
        )
        self._fingerprint = model_fingerprint(self._path)
        if config.quantize != "none":
            self._fingerprint += f" {config.quantize}"  # rounded weights are those of another model
        if config.deterministic:
            check_invariance(self._model, INVARIANT)
            self._fingerprint += DETERMINISTIC  # workers with and without the mode must not pair
        limit = self._model_config.max_position_embeddings
        if config.max_context > limit:
            raise CheckpointError(
                f"max_context {config.max_context}: the model at {self._path} allows at most {limit} tokens; "
                "lower it"
            )
        self._max_context = config.max_context or limit
        self.lifecycle.advance(Phase.LOADED)

    def _weight_bytes(self) -> int:
        """Bytes of the target's weights on this rank, about, by the headers of its checkpoint."""
        needless = needless_tensors(load_stored_config(self._path))
        return weight_bytes(
            self._path, self._dtype, needless, quantize=self.config.quantize, sharing=self._sharing
        )

    def _configure_aux(self) -> None:
        ids: tuple[int, ...] = ()
        if self.config.has_draft:
            source = self._read_drafter()
            self._source, ids = source, source.config.aux.ids
            logger.info("draft config: %r", source.config)
        if not self.has_drafter:
            ids = self._offered(ids)
        if ids:
            configure_aux_capture(self._model, ids)
        if self.config.count_experts:
            rows, layers = max(COUNTED_ROWS, self._max_context), getattr(self._model, "layers", ())
            self._expert_counts = count_experts(layers, rows, self.lifecycle.phase)
        if self.config.return_routed_experts:
            self._routed_experts = keep_experts(self._model, COUNTED_ROWS, self.lifecycle.phase)
        self._feature_ids = ids
        self.lifecycle.advance(Phase.AUX_CONFIGURED)

    def _read_drafter(self) -> DraftSource:
        config, running = self.config, str(self._dtype).removeprefix("torch.")
        if config.draft == NGRAM:
            return NgramSource(
                NgramConfig(
                    shortest=config.ngram_min,
                    longest=config.ngram_max,
                    window=config.ngram_window,
                    dtype=running,
                )
            )
        return self._read_checkpoint(resolve_checkpoint(config.draft, "--draft"))

    def _read_checkpoint(self, path: Path) -> DraftSource:
        running = str(self._dtype).removeprefix("torch.")
        return read_drafter(path, self._model_config, target_path=self._path, dtype=running)

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
            vocab_size = self._model_config.vocab_size
            self._lent = TargetWeights(
                embed_tokens=table_of(self._model.embed_tokens, vocab_size, self._group),
                lm_head=table_of(self._model.lm_head, vocab_size, self._group),
                final_norm=self._model.norm,
                steps=self._shape.steps,
                max_context=self._max_context,
                dtype=self._dtype,
                device=self._device,
            )
            self._draft = self._source.load(self._lent)
            self._draft.check(self._shape)
        self.lifecycle.advance(Phase.WEIGHTS_SHARED)

    def _allocate(self) -> None:
        config, model = self.config, self._model_config
        sizes = self._sizes()
        self.config = replace(config, **sizes.values())  # type: ignore[arg-type]
        self._max_context = sizes.max_context
        logger.info("chosen for %s: %s", self._card, sizes)
        num_pages, page_size = sizes.num_pages, sizes.page_size
        pool, windows = self._target_pool(sizes)
        features, drafter, head = None, None, None
        if self._feature_ids and not self.has_drafter:
            width = len(self._feature_ids) * model.hidden_size
            features = FeaturePlane(num_pages, page_size, width, self._dtype, self._device)
        if self._draft is not None:
            drafter = self._draft.drafter(
                num_pages=num_pages, page_size=page_size, capacity=sizes.max_running + 1
            )
            is_swappable = self._source is not None and not isinstance(self._source, NgramSource)
            if is_swappable and self._source is not None and self._ranks.is_solo:
                head = LiveHead(
                    drafter,
                    self._draft,
                    self._source.config,
                    read=self._read_checkpoint,
                    lent=self._lent,
                    shape=self._shape,
                )
        cache = PrefixCache(
            PageAllocator(num_pages, pool.order),
            page_size,
            enabled=config.prefix_cache,
            lookahead=cache_lookahead(drafter),
            windows=windows,
        )
        runner = ModelRunner(
            self._model, pool, max_context=self._max_context, is_invariant=config.deterministic
        )
        runner.expert_counts, runner.routed_experts = self._expert_counts, self._routed_experts
        self._engine = Engine(
            path=self._path,
            fingerprint=self._fingerprint,
            weights=self._weights,
            feature_ids=self._feature_ids,
            expert_counts=self._expert_counts,
            model_config=model,
            model=self._model,
            draft_config=None if self._source is None else self._source.config,
            runner=runner,
            sampler=Sampler(model.vocab_size, self._device),
            pool=pool,
            features=features,
            drafter=drafter,
            head=head,
            cache=cache,
            windows=RequestWindows(cache, margin=max(1, cache.lookahead) if self.has_drafter else MAX_MARGIN),
            max_context=sizes.max_context,
            sizes=sizes,
            lifecycle=self.lifecycle,
            grammars=GrammarCompiler(self._path / "tokenizer.json", model.vocab_size, model.eos_token_ids),
            shape=PLAIN if drafter is None else self._shape,
            step_policy=None if self._draft is None else self._step_policy(self._draft),
            sharing=self._sharing,
        )
        self._engine.launches_ahead = self._is_overlapped
        if self.has_drafter:
            engine = self._engine
            engine.steps = step_graphs(
                runner,
                drafter,
                shapes=_shapes_of(engine),
                watched=engine.shape if engine.step_policy and engine.step_policy.is_watched else None,
                max_requests=sizes.max_running,
                max_context=sizes.max_context,
                group=self._group,
            )
            engine.steps.has_common_sizes = self._sharing.has_own_rows
        self.lifecycle.advance(Phase.POOLS_ALLOCATED)

    def _target_pool(self, sizes: EngineSizes) -> tuple[KVPool, WindowPages | None]:
        """The target's pool, and its window pages, if what lies behind windows is given up."""
        count, device, dtype = sizes.num_pages, self._device, self._dtype
        layout = self._windowed_layout(sizes.page_size)
        if layout is None:
            return KVPool(count, self._model.kv_layout(sizes.page_size), device, row_dtype=dtype), None
        pool = WindowedPool(count, sizes.num_window_pages, layout, device, row_dtype=dtype)
        windows = WindowPages(
            PageAllocator(sizes.num_window_pages, pool.order.behind(count)),
            count,
            window=layout.window,
            page_size=sizes.page_size,
        )
        return pool, windows

    def _windowed_layout(self, page_size: int) -> WindowedLayout | None:
        """The layout with window pages; None for a model without windows, or that keeps all pages."""
        if self.config.window_kv == "keep":
            return None
        return windowed_layout(self._model.kv_layout(page_size), self._model_config.forms.windows)

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
        planner = VariantPlanner(engine.runner, engine.drafter, engine.steps, self.reach())
        try:
            self._kept = use_kernel_cache(), self._plan_key(engine)
            launches = kept_launches(*self._kept, planner.launches)
        except Exception as error:  # of an operation that has no form for fake tensors
            logger.warning("kernels are compiled one by one at their first use: %s", error, exc_info=error)
        else:
            compile_launches(launches, self._device)

    def _plan_key(self, engine: Engine) -> str:
        """The name of what a start keeps: all that decides which kernels an engine launches."""
        card = torch.cuda.get_device_properties(self._device)
        paths = [engine.path, *([] if engine.draft_config is None else [engine.draft_config.path])]
        configs = [path / "config.json" for path in paths]
        return plan_key(
            [
                replace(self.config, model="", kv_memory_mb=0, pages=0, gpu_memory_share=0.0),
                self.has_drafter,
                self.reach(),
                engine.pool.num_pages.bit_length(),  # wider numbers of rows have variants of their own
                *(path.read_text() for path in configs if path.is_file()),
                (card.name, card.major, card.minor, card.multi_processor_count),
                (torch.__version__, torch.version.cuda, triton_version(), driver_version()),
            ]
        )

    def _rehearse(self) -> None:
        """Runs every kind of forward once on a GPU, and takes the memory of later ones from the driver."""
        engine = self._engine
        assert engine is not None
        self.lifecycle.require(Phase.CAPTURED)
        if self._device.type != "cuda":
            return
        reach = self.reach()
        sizes = RehearsalSizes(
            prompt_rows=min(reach.prompt_rows, WHOLE_PROMPT_ROWS),
            max_prompts=reach.max_prompts,
            max_requests=reach.max_requests,
        )
        Rehearsal(engine, sizes).run()
        if engine.graphs is not None:
            engine.graphs.pool.forget_replays()
        reserve_memory(
            self._device, self._token_budget().times(engine.page_size).staging(engine.pool.num_pages)
        )

    def reach(self) -> Reach:
        """The largest sizes that serving in this role can ask for."""
        config, engine = self.config, self._engine
        assert engine is not None
        prompt_rows = config.chunk_size or max(self._max_context, WHOLE_PROMPT_ROWS)
        max_prompts = config.max_running if self.has_drafter else config.max_batch
        if self.has_drafter:
            prompt_rows = max(alone_tokens(config.local_prefill_tokens), MAX_PREFILL_ROWS)
        # an eager chain is cut to the useful drafts
        is_cut = not engine.sizes.has_graphs and not engine.shape.is_tree
        return Reach(
            prompt_rows=min(prompt_rows, max_prompts * self._max_context),
            max_prompts=max_prompts,
            max_requests=config.max_running,
            max_context=self._max_context,
            page_size=config.page_size,
            eager_shapes=tuple(DraftShape.of(n) for n in range(1, engine.shape.steps)) if is_cut else (),
        )

    def _capture(self) -> None:
        engine, config = self._engine, self.config
        assert engine is not None
        if engine.sizes.has_graphs:
            backend = self._backend or backend_for(self._device)
            vote = alone if self._ranks.is_solo else self._vote
            engine.graphs = graphs = GraphSet(backend, self.lifecycle, vote=vote)
            if self.has_drafter:
                if engine.drafter is not None:
                    graphs.capture_draft(engine.drafter, MAX_PREFILL_ROWS)
                if engine.steps is not None:
                    graphs.capture_steps(engine.steps)
                if config.aggregated:
                    graphs.capture_prefill(
                        engine.runner, min(engine.sizes.prompt_graph_tokens, engine.max_context)
                    )
            else:
                graphs.capture_prefill(
                    engine.runner, engine.sizes.chunk_size or min(WHOLE_PROMPT_TOKENS, engine.max_context)
                )
            if config.graph_self_test:
                self._self_test(engine, graphs)
            self._measure_steps(graphs)
            graphs.log_report()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what the self-test took
        self.lifecycle.advance(Phase.CAPTURED)

    def _self_test(self, engine: Engine, graphs: GraphSet) -> None:
        """Compares graphs with eager forwards: all of them at a GPU's first start, later one of each kind.

        If one differs then, the next start compares all again.
        """
        folder, key = self._kept
        is_brief = bool(self._ranks.rank_0(were_tested(folder, key)))
        dropped = graphs.self_test(
            engine.runner, engine.drafter, engine.max_context, engine.steps, is_brief=is_brief
        )
        keep_verdict(folder, key, has_passed=not dropped)

    def _measure_steps(self, graphs: GraphSet) -> None:
        """Gives the policy the measured costs of steps on a GPU. Those of a busy CPU would mislead it."""
        engine = self._engine
        assert engine is not None
        if engine.step_policy is None or engine.steps is None or self._device.type != "cuda":
            return
        costs = graphs.measure_steps(engine.steps)
        if costs is not None:
            engine.step_policy.costs = costs

    def _step_policy(self, draft: DraftModel) -> StepPolicy | None:
        """The policy that adapts the draft length to load and acceptance, if enabled.

        By default it is on a GPU, and for lookup, which finds nothing to draft in many a text.
        """
        config, is_wanted = self.config, self._device.type == "cuda" or self.config.draft == NGRAM
        if config.spec_adaptive == "off" or (config.spec_adaptive == "auto" and not is_wanted):
            return None
        target = self._forward_weights()
        costs = StepCosts(
            draft=draft.num_weights / target,
            knee_rows=KNEE_ROWS[self._device.type],
            kv=self._model.kv_layout(self.config.page_size).bytes_per_token / (target * self._dtype.itemsize),
            is_block=self._drafts_blocks,
        )
        return StepPolicy(self._shape.candidates(), costs, is_watched=not self._drafts_blocks)

    @property
    def _drafts_blocks(self) -> bool:
        return self._source is not None and self._source.drafts_blocks

    def _forward_weights(self) -> int:
        """The weights that a row of a forward is multiplied with: without embedding and unused experts."""
        is_vocabulary = re.compile("embed_tokens|lm_head")
        moe = self._model_config.moe
        layers = experts = 0
        for name, weight in self._model.tensors():
            # 4-bit values are packed into larger integers
            is_packed = weight.dtype in (torch.uint8, torch.int16) or name.endswith("qweight")
            count = 2 * weight.nbytes if is_packed else weight.numel()
            if ".experts." in name:
                experts += count
            elif not is_vocabulary.search(name):
                layers += count
        used = 0 if moe is None else round(experts * moe.used_share)
        return layers + used + self._model.lm_head.numel()

    def _sizes(self) -> EngineSizes:
        """The sizes of this engine, with the memory that its weights take by now.

        Raises CheckpointError, naming what would fit, if a setting or the model does not.
        """
        card, held = self._card, 0
        if card.is_gpu:
            torch.cuda.empty_cache()
            held = torch.cuda.memory_reserved(self._device)
            card = replace(card, free=min(card.free, held + torch.cuda.mem_get_info(self._device)[0]))
        if not self._ranks.is_solo:  # equal sizes on all ranks
            card, held = replace(card, free=self._ranks.least(card.free)), self._ranks.most(held)
        config = self._model.config
        sizes = ModelSizes(
            hidden_size=config.hidden_size,
            intermediate_size=config.row_width,
            num_heads=config.num_heads,
            num_kv_heads=config.context_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings,
            dtype_bytes=self._dtype.itemsize,
            num_layers=config.num_layers,
            num_weights=self._forward_weights(),
            weight_bytes=held,
            has_experts=config.moe is not None,
        )
        return choose_sizes(card, sizes, self._role(), self._token_budget(), self._given)

    def _role(self) -> EngineRole:
        if not self.has_drafter:
            return EngineRole(
                is_decode=False,
                is_deterministic=self.config.deterministic,
                num_features=len(self._feature_ids),
            )
        if self._draft is None:
            return EngineRole(
                is_decode=True,
                is_aggregated=self.config.aggregated,
                is_deterministic=self.config.deterministic,
                spare_slots=PLAIN.spare_slots,
            )
        policy = self._step_policy(self._draft)
        shapes = {PLAIN, self._shape, *(() if policy is None else policy.shapes)}
        return EngineRole(
            is_decode=True,
            is_aggregated=self.config.aggregated,
            is_deterministic=self.config.deterministic,
            num_features=len(self._feature_ids),
            num_nodes=self._shape.num_nodes,
            num_shapes=len(shapes),
            spare_slots=self._shape.spare_slots,
            late_rows=self._draft.late_rows if policy is not None and policy.is_watched else 0,
        )

    def _token_budget(self) -> PageBudget:
        """The bytes of a token in this role. Decode adds draft KV and staged features; prefill adds a feature
        plane.
        """
        kv_bytes = self._model.kv_layout(self.config.page_size).bytes_per_token
        windowed, windows = self._windowed_layout(self.config.page_size), None
        if windowed is not None:
            kv_bytes = windowed.bytes_per_token
            windows = WindowBudget(
                kv_bytes=windowed.part.bytes_per_token,
                window=windowed.window,
                max_context=self._given.max_context or self._model_config.max_position_embeddings,
            )
        if self._draft is not None:
            layout = self._draft.kv_layout(1)
            return PageBudget(
                kv_bytes=kv_bytes,
                draft_bytes=0 if layout is None else layout.page_bytes,
                has_staging=bool(self._feature_ids),
                windows=windows,
            )
        if self.has_drafter:
            return PageBudget(kv_bytes=kv_bytes, windows=windows)
        width = len(self._feature_ids) * self._model_config.hidden_size
        return PageBudget(kv_bytes=kv_bytes, feature_bytes=width * self._dtype.itemsize, windows=windows)


def engine_card(device: torch.device) -> Card:
    """The card that `device` is on, with its free memory; creates the CUDA context. A CPU is a card, too."""
    if device.type != "cuda":
        return Card()
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return Card(name=name, total=total, free=free, capability=(major, minor))


def sharing_of(config: EngineConfig, group: TensorGroup) -> Sharing:
    """Which parts of the model the ranks of `group` share."""
    share = attention_parallel if config.dp_attention > 1 else tensor_parallel
    return share(group, by_expert=config.ep)


def rank_device(device: torch.device, group: TensorGroup) -> torch.device:
    """The device of one rank: on GPUs the visible one of its number, see `rank_cards` and its errors."""
    is_one_of_several = device.type == "cuda" and not group.is_solo
    return torch.device("cuda", card_of_rank(group.rank, os.environ)) if is_one_of_several else device


def join_ranks(meeting: Path, rank: int, size: int, settings: EngineConfig) -> TensorGroup:
    """Joins the process group of `size` ranks as `rank`, on the device of the settings; waits for the others.

    Raises CheckpointError for a device that is not there.
    """
    device = rank_device(resolve_device(settings.device), TensorGroup(rank=rank, size=size))
    group = join_group(meeting, rank, size, device)
    sums = device.type == "cuda" and not sharing_of(settings, group).has_own_rows
    return replace(group, small=peer_sum(group, device)) if sums else group


def check_ranks(config: EngineConfig) -> None:
    """Raises CheckpointError if the ranks of `config` cannot share the model or this host's GPUs.

    Reads config.json only, so that a wrong setting ends the start before anything is loaded.
    """
    count = config.num_ranks
    if count == 1 and not config.ep:
        return
    if config.dp_attention > 1 and config.tp not in (1, config.dp_attention):
        raise CheckpointError(
            f"tp {config.tp} with dp_attention {config.dp_attention}: the attention of a rank runs on one "
            f"GPU; use dp_attention {config.tp}, or leave one of the two out"
        )
    sharing = sharing_of(config, TensorGroup(size=count))
    device = resolve_device(config.device)
    if device.type == "cuda" and card_of_rank(count - 1, os.environ) >= torch.cuda.device_count():
        flag = "--dp-attention" if sharing.has_own_rows else "--tp"
        raise CheckpointError(
            f"{sharing.setting}: this process sees {torch.cuda.device_count()} GPUs; lower {flag}, or let it "
            "see more (CUDA_VISIBLE_DEVICES)"
        )
    if config.deterministic and count > 1:
        raise CheckpointError(
            f"{sharing.setting}: sums over ranks have no fixed order for every batch, which --deterministic "
            "asks for; use one rank, or start without it"
        )
    path = resolve_checkpoint(config.model)
    model = load_model_config(path)
    if count == 1 and model.moe is None:
        raise CheckpointError(f"ep: the model at {path} has no experts to deal to ranks; leave --ep out")
    rank_config(model, sharing, str(path))


def _shapes_of(engine: Engine) -> Sequence[DraftShape]:
    """The shapes that a step may draft, the configured one first."""
    return [engine.shape] if engine.step_policy is None else engine.step_policy.shapes[::-1]
