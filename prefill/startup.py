"""The start of a prefill worker: `worker.startup` with a sender of KV blocks and its address."""

import zmq

from ..cluster.config.roles import PrefillConfig
from ..cluster.net.endpoints import reached_at
from ..cluster.net.sockets import Socket
from ..cluster.protocol.messages import Hello
from ..cluster.security.keyring import split_key, with_key
from ..kvtransfer.transport import PollableTransport
from ..kvtransfer.transports.registry import SenderSetup, open_sender
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
        config = self.config
        setup = SenderSetup(
            bind=config.kv_bind,
            instance=self.instance,
            layout=self.layout,
            planes=self.planes(),
            context=context,
            keyring=self.keyring,
            ciphers=self.ciphers,
            bulk_port=config.kv_bulk_port,
            trusted_network=config.trusted_network,
            lease_s=config.lease_s,
            stall_s=config.stall_timeout_s,
            clock=self.link.clock,
            slab_bytes=self.engine.sizes.slab_bytes,
            device_slab_bytes=self.engine.sizes.device_slab_bytes,
            reach=self.reach,
        )
        transport = open_sender(self.transports, setup)
        self.kv_endpoint = transport.endpoint
        return transport

    def make_hello(self) -> Hello:
        """The registration with a router."""
        return self.hello(
            max_running=self.engine.sizes.max_batch,
            kv_endpoint=advertised_endpoint(self.kv_endpoint, self.config.kv_advertise),
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
            embeds=self.embeds,
        )

    @property
    def spans_of(self) -> SpansOf[PrefillRoom]:
        """The trace spans of a room that leaves."""
        return prefill_spans


def advertised_endpoint(endpoint: str, advertised: str) -> str:
    """The address for decode workers: `advertised` or the bound one, with the bound endpoint's public key."""
    bound, key = split_key(endpoint)
    address = reached_at(bound, advertised)
    return with_key(address, key) if key else address
