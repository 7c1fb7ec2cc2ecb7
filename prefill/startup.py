"""The start of a prefill worker: `worker.startup` with a sender of KV blocks and its address."""

import zmq

from ..cluster.config.roles import PrefillConfig
from ..cluster.net.sockets import Socket
from ..cluster.protocol.messages import Hello
from ..kvtransfer.transport import PollableTransport
from ..worker.hand_off import advertised_endpoint, sender_end, with_prefix_pulls
from ..worker.spans import SpansOf
from ..worker.startup import WorkerStartup
from .queues import PrefillRoom
from .spans import prefill_spans
from .worker import PrefillWorker


class PrefillStartup(WorkerStartup[PrefillConfig, PrefillRoom]):
    """The start of a prefill worker."""

    has_drafter = False

    def open_transport(self, context: zmq.Context[Socket]) -> PollableTransport:
        """The sender; binds the port for blocks."""
        facts = self.end_facts()
        transport = sender_end(self.config, facts, context)
        self.kv_endpoint = advertised_endpoint(self.config.kv_advertise, transport.endpoint)
        self.name_ranks = lambda others: transport.name_ranks([self.kv_endpoint, *others])
        if not self.pulls_prefixes:
            return transport
        try:
            return with_prefix_pulls(transport, self.config, facts, context)
        except Exception:
            transport.close()
            raise

    @property
    def pulls_prefixes(self) -> bool:
        """Whether it gets prefixes from decode workers: as one rank, with a cache to keep them in. Not with
        window pages, of which decode has few.
        """
        engine = self.engine
        return self.ranks is None and engine.cache.enabled and not engine.windows.is_on

    def make_hello(self) -> Hello:
        """The registration with a router."""
        return self.hello(
            max_running=self.engine.sizes.max_batch,
            kv_endpoint=self.kv_endpoint,
            pulls_prefixes=self.pulls_prefixes,
        )

    def make_worker(self) -> PrefillWorker:
        """The worker on the loaded engine and the open link."""
        return PrefillWorker(
            self.engine,
            self.link,
            instance=self.instance,
            chunk_size=self.engine.sizes.chunk_size,
            max_batch=self.engine.sizes.max_batch,
            max_queue=self.config.max_queue,
            slo_ttft_s=self.config.slo_ttft_ms / 1000,
            embeds=self.embeds,
        )

    @property
    def spans_of(self) -> SpansOf[PrefillRoom]:
        """The trace spans of a room that leaves."""
        return prefill_spans
