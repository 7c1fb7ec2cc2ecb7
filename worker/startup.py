"""The start of a worker process, the same for both roles: from the settings to the main loop, in phases."""

import gc
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

import torch
import zmq

from ..cluster.config.roles import DecodeConfig, WorkerConfig
from ..cluster.config.tier_checks import frees_windows
from ..cluster.net.endpoints import endpoints_of
from ..cluster.net.router_links import RouterLinks, dial_routers
from ..cluster.net.sockets import Socket
from ..cluster.process.failpoints import reach_of
from ..cluster.process.process import EXIT_OK, EXIT_OTHER_ROLE, Phase, Serve, Shutdown, run_phases
from ..cluster.process.sd_notify import notifier_of
from ..cluster.process.watchdog import Watchdog
from ..cluster.protocol.messages import ChangeRole, DraftWidths, Hello
from ..cluster.security.ciphers import ciphers_of
from ..cluster.security.keyring import load_keyring
from ..cluster.telemetry.metrics_server import serve_metrics
from ..cluster.telemetry.tracing import closing, open_tracing
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.errors import RanksApart
from ..engine.kv.prefix_journal import PrefixJournal
from ..engine.loader import EngineLoader, check_ranks, join_ranks
from ..engine.parallel.group import SOLO, TensorGroup
from ..kvtransfer.memory.malloc_tuning import keep_blocks
from ..kvtransfer.transport import PollableTransport
from .hand_off import EndFacts, joined_ends, transports_for
from .identity import chosen_of, facts_of, hello_of, layout_of, objectives_of, small_pool_warning
from .link import WorkerLink
from .main_loop import WorkerLoop
from .peer_table import PeerTable
from .peers import PeerLife, PeerPlace, PeerRanks
from .prefix_news import PrefixNews
from .prompt_embeds import embeds_inbox
from .rank_processes import RankProcesses
from .ranks import Ranks, check_rank_settings
from .resource_usage import meter_of
from .role_change import settings_fault
from .role_worker import RoleWorker
from .room import WorkerRoom
from .spans import RoomSpans, SpansOf
from .tier_startup import open_tiers, page_keys_of

logger = logging.getLogger(__name__)

LOAD_ENGINE = "load the engine"
SHORTEST_SHOWN = 0.05  # seconds; shorter phases are left out of the line about the start

C = TypeVar("C", bound=WorkerConfig)
R = TypeVar("R", bound=WorkerRoom)


def engine_settings(config: WorkerConfig) -> EngineConfig:
    """The settings of the worker's engine. Tiers keep whole pages, so with them all layers share their
    pages.
    """
    settings = EngineConfig.of(config)
    return settings if frees_windows(config) else replace(settings, window_kv="keep")


class WorkerStartup(ABC, Generic[C, R]):
    """One start of a worker process. A role adds its transport and Hello, its worker and its spans.

    A phase stores its products on this object. A phase that runs too early reads a missing product and raises
    AttributeError; the engine's own phases are guarded by its lifecycle.
    """

    has_drafter: ClassVar[bool]
    engine: Engine
    worker: RoleWorker[R]
    loop: WorkerLoop
    ranks: RankProcesses | None = None  # the other ranks, where this process has started them
    table: PeerTable | None = None  # of ranks with data-parallel attention
    name_ranks: Callable[[Sequence[str]], None] = staticmethod(
        lambda endpoints: None
    )  # prefill's other ranks

    def __init__(self, config: C, instance: str, place: PeerPlace | None = None) -> None:
        """`place`: that of a rank with data-parallel attention, other than rank 0."""
        self.config = config
        self.instance = instance
        self.place = place
        self.group = instance if place is None else place.group
        self._engine_times: list[tuple[str, float]] = []  # phases and seconds

    def phases(self) -> list[Phase]:
        """(name, action) in the order in which they must run."""
        return [
            ("prepare the process", self.prepare_process),
            ("read keys", self.read_keys),
            ("open metrics and traces", self.open_telemetry),
            (LOAD_ENGINE, self.load_engine),
            ("open sockets", self.open_sockets),
            ("build the main loop", self.build_loop),
        ]

    def run(self) -> Serve:
        """Run all phases.

        Returns the function that serves until the worker has drained and returns the exit code.
        """
        times = run_phases(self.phases())
        gc.collect()
        gc.freeze()  # objects of the start-up live on; a collection that scans them stops a worker for long
        parts = [part for part in times if part[0] != LOAD_ENGINE] + self._engine_times
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= SHORTEST_SHOWN)
        logger.info("started in %.1f s: %s", sum(seconds for _, seconds in times), shown)
        if self.ranks is not None:
            self.ranks.begin_serving()
        serve = closing(self.tracing, self._serve)

        def served() -> int:
            code, change = serve(), self.worker.role_change
            is_ordered = bool(change.target) and not self.shutdown.first_signal
            return EXIT_OTHER_ROLE if code == EXIT_OK and is_ordered else code

        return served

    def _serve(self) -> int:
        """The main loop, then the end of the other ranks. Behind an error they end first, by force."""
        ranks = self.ranks
        if ranks is None:
            return self.loop.run()
        try:
            code = self.loop.run()
        except Exception as error:
            ranks.explain(error)
            ranks.close(is_clean=False)
            raise
        ranks.close()
        return code

    def _role_fault(self, role: str) -> str:
        """Why this worker cannot get `role`; "" if it can."""
        if self.ranks is not None or self.place is not None:
            return "a worker of several ranks keeps its role; stop it, and start one in the other role"
        return settings_fault(self.config, role, os.environ)

    def _change_role(self, order: ChangeRole) -> None:
        """Begins the drain that ends in the other role."""
        self.loop.returns_as = order.role
        self.loop.drain_timeout_s = min(self.loop.drain_timeout_s, order.drain_ms / 1000)
        self.shutdown.drain.set()

    def prepare_process(self) -> None:
        """Signals, failpoints, the service manager and malloc."""
        self.shutdown = Shutdown()
        if self.place is None:
            self.shutdown.install()
        self.reach = reach_of(os.environ, rank=0 if self.place is None else self.place.rank)
        self.notifier = notifier_of(os.environ)
        keep_blocks()

    def read_keys(self) -> None:
        """Keys and ciphers of the KV plane."""
        config = self.config
        self.keyring = load_keyring(config.keys, config.role)
        self.ciphers = ciphers_of(
            config.kv_cipher, has_keys=bool(config.keys), trusted_network=config.trusted_network
        )

    def open_telemetry(self) -> None:
        """The port for metrics and the exporter of traces, where the settings ask for them."""
        self.metrics = serve_metrics(self.config, self.instance)
        self.tracing = open_tracing(self.config, self.instance)

    def load_engine(self) -> None:
        """Weights, pools and graphs, and the transports that their device allows."""
        settings = engine_settings(self.config)
        if settings.num_ranks > 1 or settings.ep:
            check_rank_settings(self.config)
            check_ranks(settings)
        if settings.num_ranks > 1:
            self._start_ranks(self.config)
        try:
            group = self._join(settings)
            loader = EngineLoader(
                rank_settings(settings), has_drafter=self.has_drafter, group=group, beat=self._beat
            )
            self._engine_times = run_phases(loader.phases())
        except Exception as error:
            if self.ranks is not None:
                self.ranks.explain(error)
                if isinstance(error, RanksApart):
                    self.ranks.fail(f"it cannot start: {error}")
                self.ranks.close(is_clean=False)
            raise
        self.engine = engine = loader.engine()
        if isinstance(self.ranks, Ranks):
            self.ranks.lead(engine)
        if self.table is not None:
            engine.begin_rounds(self.table)
        self.embeds = embeds_inbox(engine, is_on=self.config.prompt_embeds)
        pool = engine.pool
        self.layout = layout_of(
            pool,
            model_fingerprint=engine.fingerprint,
            feature_ids=engine.feature_ids,
            feature_width=engine.feature_width,
            weights_hash=engine.weights_hash,
            whole=None
            if engine.group.is_solo
            else engine.model_config.kv_layout(pool.num_layers, pool.page_size, pool.dtype),
            window_margin=engine.windows.margin,
        )
        self.transports = transports_for(self.config, self.ciphers, engine)

    def _start_ranks(self, config: C) -> None:
        """Starts the other ranks, unless this process is one of them."""
        if self.place is not None:
            self.table = self.place.table()
        elif isinstance(config, DecodeConfig) and config.dp_attention > 1:
            self.ranks = peers = PeerRanks.start(config, self.group)
            self.table = peers.table
        else:
            self.ranks = Ranks.start(config, self.instance)

    def _beat(self) -> None:
        """A sign of life of this rank in the start."""
        if self.ranks is not None:
            self.ranks.beat()
        elif self.table is not None:
            self.table.beat()

    def _join(self, settings: EngineConfig) -> TensorGroup:
        if self.place is not None:
            return join_ranks(self.place.meeting_path, self.place.rank, self.place.size, settings)
        if self.ranks is None:
            return SOLO
        return join_ranks(self.ranks.meeting_path, 0, settings.num_ranks, settings)

    def open_sockets(self) -> None:
        """Start the link thread, which opens the KV plane and dials the routers, and the hash of the
        weights.
        """
        self.link = WorkerLink(self._open_planes)
        self.link.start()
        if self.engine.weights is not None:
            self.engine.weights.start()

    def build_loop(self) -> None:
        """The worker and its main loop; long forwards beat between their layers."""
        tracing, metrics = self.tracing, self.metrics
        if metrics is not None:
            metrics.describe(facts_of(self.layout, self.engine.pool))
        self.worker = self.make_worker()
        self.worker.reach = self.reach
        self._open_tiers()
        self.worker.queues.on_left = RoomSpans(tracing, time.monotonic, self.spans_of).left
        feed = self.link.feeder(Watchdog(self.config.watchdog_s, notifier=self.notifier))
        life = None
        if self.table is not None:
            life = PeerLife(self.table, self.shutdown, feed, self.link.nudge)
            life.start()
            feed = life.turn
        self.loop = WorkerLoop(
            self.worker,
            self.link,
            self.shutdown,
            drain_timeout_s=self.config.drain_timeout_s,
            feed=feed,
            tell=metrics.tell if metrics is not None else None,
            notifier=self.notifier,
            lost_spans=lambda: tracing.num_dropped,
            usage=meter_of(self.engine.pool.device).read,
            news=self.worker.news,
        )
        if life is not None:
            self.loop.may_leave, self.loop.on_leave = life.may_leave, life.leave
        self.worker.role_change.check = self._role_fault
        self.worker.role_change.on_order = self._change_role
        self.engine.runner.on_layer = self.loop.beat
        self.engine.begin_watch()

    def _open_tiers(self) -> None:
        """The tiers below the pool, and the journal of all pages for the routers."""
        keys, worker = page_keys_of(self.engine), self.worker
        worker.tiers = open_tiers(self.engine, self.config, keys, notify=self.link.nudge, reach=self.reach)
        if self.engine.cache.enabled:
            worker.news = PrefixNews(PrefixJournal(self.engine.cache, keys), self.instance)
            if worker.tiers is not None:
                worker.tiers.tiers.keep_journal(worker.news.journal)

    # --- methods of a role ----------------------------------------------------------------------------------

    @abstractmethod
    def open_transport(self, context: zmq.Context[Socket]) -> PollableTransport:
        """The role's end of the KV plane. Runs in the link thread."""

    @abstractmethod
    def make_hello(self) -> Hello:
        """The registration with a router."""

    @abstractmethod
    def make_worker(self) -> RoleWorker[R]:
        """The role's worker on the loaded engine and the open link."""

    @property
    @abstractmethod
    def spans_of(self) -> SpansOf[R]:
        """The trace spans of a room that leaves."""

    # --- parts of a role's answers --------------------------------------------------------------------------

    def hello(
        self,
        *,
        max_running: int,
        kv_endpoint: str = "",
        local_prefill: bool = False,
        aggregated: bool = False,
        grows: bool = False,
        ahead_tokens: int = 0,
        shares_prompts: bool = False,
        preempts: bool = False,
        spec_tokens: int = 0,
        draft_widths: DraftWidths | None = None,
        pulls_prefixes: bool = False,
        prefix_endpoint: str = "",
    ) -> Hello:
        """A Hello with the fields that both roles fill alike."""
        return hello_of(
            self.layout,
            self.engine.pool,
            role=self.config.role,
            instance=self.instance,
            model=self.config.served_model or self.config.model,
            max_context=self.engine.max_context,
            vocab_size=self.engine.model_config.vocab_size,
            max_running=max_running,
            kv_endpoint=kv_endpoint,
            local_prefill=local_prefill,
            aggregated=aggregated,
            grows=grows,
            ahead_tokens=ahead_tokens,
            shares_prompts=shares_prompts,
            preempts=preempts,
            spec_tokens=spec_tokens,
            draft_widths=draft_widths,
            transports=self.transports,
            chosen=chosen_of(self.engine.sizes) | objectives_of(self.config),
            embeds=self.embeds,
            experts=self.engine.expert_shape,
            metrics_port=self.config.metrics_port,
            tells_prefixes=self.engine.cache.enabled,
            pulls_prefixes=pulls_prefixes,
            prefix_endpoint=prefix_endpoint,
            group="" if self.table is None else self.group,
        )

    def end_facts(self) -> EndFacts:
        """What this rank's end of the KV plane needs."""
        return EndFacts(
            instance=self.instance,
            layout=self.layout,
            engine=self.engine,
            keyring=self.keyring,
            ciphers=self.ciphers,
            transports=self.transports,
            clock=self.link.clock,
            reach=self.reach,
        )

    def _open_planes(self, context: zmq.Context[Socket]) -> tuple[RouterLinks, PollableTransport]:
        device = self.engine.pool.kv.device  # with a number, which that of the settings may lack
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins on the first one
        transport = self.open_transport(context)
        try:
            if isinstance(self.ranks, Ranks):
                transport = joined_ends(
                    transport,
                    self.ranks.links,
                    self.layout,
                    is_decode=self.has_drafter,
                    clock=self.link.clock,
                    name_ranks=self.name_ranks,
                )
            hello = self.make_hello()
            if warning := small_pool_warning(hello):
                logger.warning("%s", warning)
            endpoints = endpoints_of(self.config.router)
            return dial_routers(context, endpoints, hello, self.keyring, self.link.clock), transport
        except Exception:
            transport.close()
            raise


def rank_settings(settings: EngineConfig) -> EngineConfig:
    """`settings` for one of several ranks, which share the cores of the host if no number is given."""
    if settings.num_ranks == 1 or settings.threads:
        return settings
    return replace(settings, threads=max(1, len(os.sched_getaffinity(0)) // settings.num_ranks))
