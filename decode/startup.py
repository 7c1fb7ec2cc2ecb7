"""What the start of a decode worker adds to `worker.startup`: a receiver of KV blocks and the drafter."""

import zmq

from ..cluster.config import DecodeConfig
from ..cluster.messages import Hello
from ..cluster.sockets import Socket
from ..kvtransfer.transports.zmq_blocks import ZmqBlocksReceiver
from ..worker.link import PollableTransport
from ..worker.spans import SpansOf
from ..worker.startup import WorkerStartup
from .queues import DecodeRoom
from .spans import decode_spans
from .worker import DecodeWorker


class DecodeStartup(WorkerStartup[DecodeConfig, DecodeRoom]):
    """The start of a decode worker."""

    has_drafter = True

    def open_transport(self, context: zmq.Context[Socket]) -> PollableTransport:
        """The receiver; connects to the prefill worker of each room."""
        config = self.config
        transport = ZmqBlocksReceiver(
            self.instance,
            self.layout,
            self.planes(),
            context=context,
            keyring=self.keyring,
            ciphers=self.ciphers,
            window=config.pull_window,
            lease_s=config.lease_s,
            transports=self.transports,
        )
        transport.reach = self.reach
        return transport

    def make_hello(self) -> Hello:
        """The registration with a router."""
        return self.hello(
            max_running=self.config.max_running,
            local_prefill=True,
            spec_tokens=self.engine.shape.spare_slots,
        )

    def make_worker(self) -> DecodeWorker:
        """The worker on the loaded engine and the open link."""
        return DecodeWorker(
            self.engine,
            self.link,
            instance=self.instance,
            max_running=self.config.max_running,
            local_prefill_tokens=self.config.local_prefill_tokens,
        )

    @property
    def spans_of(self) -> SpansOf[DecodeRoom]:
        """The trace spans of a room that leaves."""
        return decode_spans
