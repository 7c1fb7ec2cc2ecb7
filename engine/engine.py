"""A ready engine: one target over one page pool, with the drafting parts of its role."""

from dataclasses import dataclass
from pathlib import Path

from .auto_sizes import EngineSizes
from .capture.graph_set import GraphSet
from .errors import LifecycleError
from .grammar.guided import GrammarCompiler
from .kv.pool import FeaturePlane, KVPool
from .kv.prefix_cache import PrefixCache
from .kv.window_pool import WindowedPool
from .models.config import ModelConfig
from .models.interface import CausalLM
from .parallel.group import TensorGroup, leave_group
from .parallel.lockstep import Exchange, Rounds
from .parallel.plan_messages import CopyPagePlan, Tell, WindowPlan
from .parallel.sharing import ALONE, Sharing
from .request_windows import RequestWindows
from .runner.expert_counts import ExpertCounts
from .runner.lifecycle import Lifecycle
from .runner.model_runner import ModelRunner
from .runner.routed_experts import ExpertShape
from .sampling.sampler import Sampler
from .speculative.adaptive import StepPolicy
from .speculative.drafters.live_head import LiveHead
from .speculative.drafters.protocol import Drafter, draft_pools
from .speculative.drafters.registry import DraftConfig
from .speculative.drafting.shape import PLAIN, DraftShape
from .speculative.step.async_decoder import AsyncDecoder
from .speculative.step.step_graphs import StepGraphs
from .warmup.watch import ReadyWatch
from .weights_hash import WeightsHash


@dataclass(kw_only=True)
class Engine:
    """A ready engine: one target over one page pool, with the drafting parts of its role.

    `features` is the feature plane of prefill, `drafter` the draft head of decode; both are None without a
    draft. `max_context` is in tokens. `shape` is the configured draft shape; `step_policy` may vary it.
    `graphs` None: every forward runs eagerly. `steps` belong to decode. `launches_ahead`: each step of
    decode, and each forward of prefill, is launched before the previous one is read.
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
    windows: RequestWindows
    max_context: int
    sizes: EngineSizes
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
    head: LiveHead | None = None  # weights of the drafter that others may replace; None without any
    watch: ReadyWatch | None = None  # from the start of serving
    expert_counts: ExpertCounts | None = None  # rows by the experts that computed them, if they are counted
    sharing: Sharing = ALONE
    rounds: Rounds | None = None  # of forwards that ranks with requests of their own run together
    tell: Tell | None = (
        None  # tells the other ranks what this one does; None with one rank, or as another rank
    )

    @property
    def group(self) -> TensorGroup:
        """The ranks that run every step together, with the same requests."""
        return self.sharing.tensor

    def begin_rounds(self, exchange: Exchange) -> None:
        """From now on each forward is one of all ranks that share the experts, over `exchange`."""
        assert self.sharing.lockstep is not None, self.sharing
        self.rounds = self.runner.rounds = Rounds(exchange, self.sharing.lockstep)
        self.rounds.idle_prompts = self.runner.run_idle
        if self.steps is not None:
            self.steps.rounds = self.rounds
            self.rounds.idle_step = self.steps.run_idle

    def begin_watch(self) -> None:
        """Counts, from now on, what should have happened before the worker was ready."""
        if self.expert_counts is not None:
            self.expert_counts.reset()
        self.watch = ReadyWatch(self.pool.device, None if self.graphs is None else self.graphs.pool)

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
            tell=self.tell,
            prepare=self.place_windows,
        )

    def place_windows(self) -> None:
        """Tells the devices of all ranks which window pages the pages have now, before work that uses
        them.
        """
        if not isinstance(self.pool, WindowedPool):
            return
        changed = self.windows.pages.take_changes()
        if not changed:
            return
        if self.tell is not None:
            self.tell(WindowPlan(pages=[*changed], parts=[*changed.values()]))
        self.pool.map_pages(changed)

    def copy_page(self, source: int, target: int) -> None:
        """Copies page `source`, KV and draft KV, into page `target`, behind the work launched so far."""
        self.place_windows()
        if self.tell is not None:
            self.tell(CopyPagePlan(source=source, target=target))
        for pool in (self.pool, *draft_pools(self.drafter)):
            pool.copy_page(source, target)

    def leave_ranks(self) -> None:
        """Leaves the process group of the ranks. On GPUs it waits for the others to do so.

        No forward may follow.
        """
        self.drop_graphs()
        leave_group(self.group)

    def drop_graphs(self) -> None:
        """Gives up all graphs; no forward may follow. NCCL ends no communicator while a graph holds one of
        its operations.
        """
        if self.graphs is not None:
            self.graphs.pool.drop()

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
    def expert_shape(self) -> ExpertShape | None:
        """The experts that are kept for requests that ask; None if none are."""
        routed = self.runner.routed_experts
        return None if routed is None else routed.shape

    @property
    def watch_counters(self) -> dict[str, float]:
        """Compilations, captures and device allocations since the engine is ready; empty before."""
        return {} if self.watch is None else self.watch.counters

    @property
    def expert_counters(self) -> dict[str, float]:
        """Rows that each expert computed; empty unless they are counted."""
        return {} if self.expert_counts is None else self.expert_counts.read()

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
