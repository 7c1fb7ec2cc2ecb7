"""The start of a decode worker: `worker.startup` with a receiver of KV blocks and the drafter."""

import zmq

from ..cluster.config.groups import WHOLE
from ..cluster.config.roles import DecodeConfig, offers_prefixes
from ..cluster.net.sockets import Socket
from ..cluster.process.process import EXIT_AGAIN, EXIT_OK, Serve
from ..cluster.protocol.messages import DraftWidths, Hello
from ..engine.engine import Engine
from ..kvtransfer.transport import PollableTransport
from ..kvtransfer.transports.two_way import TwoWayTransport
from ..worker.hand_off import advertised_endpoint, prefix_end, receiver_end
from ..worker.recorder import SampleRecorder
from ..worker.spans import SpansOf
from ..worker.startup import WorkerStartup
from .page_growth import AHEAD_TOKENS
from .queues import DecodeRoom
from .spans import decode_spans
from .worker import DecodeWorker


class DecodeStartup(WorkerStartup[DecodeConfig, DecodeRoom]):
    """The start of a decode worker."""

    has_drafter = True
    recorder: SampleRecorder | None = None
    prefix_endpoint = ""  # where prefill workers pull prefixes; "": it offers none

    def prepare_process(self) -> None:
        """As for every worker; also opens the directory of samples, so that a wrong one ends the start."""
        super().prepare_process()
        config = self.config
        if config.record_drafts:
            self.recorder = SampleRecorder.open(
                config.record_drafts,
                self.instance,
                shard_mb=config.record_shard_mb,
                total_mb=config.record_total_mb,
            )

    def build_loop(self) -> None:
        """As for every worker; an order about the head may end this one, to be started again."""
        super().build_loop()
        worker = self.worker
        if isinstance(worker, DecodeWorker) and worker.head_swap is not None:
            worker.head_swap.named = self.config.draft
            worker.head_swap.on_restart = self.shutdown.drain.set

    def run(self) -> Serve:
        """As for every worker. Where an order ended this one, and no signal, the exit code asks for another
        start.
        """
        serve = super().run()

        def served() -> int:
            code, worker = serve(), self.worker
            swap = worker.head_swap if isinstance(worker, DecodeWorker) else None
            is_ordered = swap is not None and swap.is_leaving and not self.shutdown.first_signal
            return EXIT_AGAIN if code == EXIT_OK and is_ordered else code

        return served

    def open_transport(self, context: zmq.Context[Socket]) -> PollableTransport:
        """The receiver; connects to the prefill worker of each room."""
        facts = self.end_facts()
        receiver = receiver_end(self.config, facts, context)
        if not offers_prefixes(self.config) or self.engine.windows.is_on:
            return receiver
        try:
            sender = prefix_end(self.config, facts, context)
        except Exception:
            receiver.close()
            raise
        self.prefix_endpoint = advertised_endpoint(self.config.prefix_advertise, sender.endpoint)
        return TwoWayTransport(sender=sender, receiver=receiver, main=receiver)

    def make_hello(self) -> Hello:
        """The registration with a router."""
        return self.hello(
            max_running=self.engine.sizes.max_running,
            local_prefill=True,
            aggregated=self.config.aggregated,
            grows=self.grows,
            ahead_tokens=AHEAD_TOKENS,
            shares_prompts=True,
            preempts=self.grows,
            spec_tokens=self.engine.shape.spare_slots,
            draft_widths=draft_widths_of(self.engine),
            prefix_endpoint=self.prefix_endpoint,
        )

    @property
    def grows(self) -> bool:
        """Whether rooms take pages as their tokens come."""
        return self.config.reserve != WHOLE

    def make_worker(self) -> DecodeWorker:
        """The worker on the loaded engine and the open link."""
        return DecodeWorker(
            self.engine,
            self.link,
            instance=self.instance,
            max_running=self.engine.sizes.max_running,
            local_prefill_tokens=self.engine.sizes.local_prefill_tokens,
            slo_itl_s=self.config.slo_itl_ms / 1000,
            slo_ttft_s=self.config.slo_ttft_ms / 1000,
            grows=self.grows,
            embeds=self.embeds,
            recorder=self.recorder,
            offers_prefixes=bool(self.prefix_endpoint),
        )

    @property
    def spans_of(self) -> SpansOf[DecodeRoom]:
        """The trace spans of a room that leaves."""
        return decode_spans


def draft_widths_of(engine: Engine) -> DraftWidths | None:
    """The input and output widths of the engine's drafter; None without a drafter."""
    if engine.drafter is None or engine.draft_config is None:
        return None
    shape = engine.shape
    return DraftWidths(
        features=engine.feature_width,
        hidden=engine.draft_config.dims.self_width,
        steps=shape.steps,
        topk=shape.topk,
        tokens=shape.num_nodes,
    )
