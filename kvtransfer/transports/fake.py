"""Both ends of a transport in one process, joined by a list of frames that a test can watch, lose or change.

The endpoints are the real ones: sessions, codec, digests and memory. Only the wire is replaced. Time is handed in by
the clock, and nothing moves but in `poll` and `FakeNetwork.deliver`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...cluster.errors import PeerLost
from ...cluster.net.transport_names import ZMQ_BLOCKS
from ...cluster.protocol.messages import Layout
from ...cluster.security.ciphers import CRC32C
from ..memory.blocks import Payload
from ..protocol.session import LEASE_S, WINDOW, Peer
from ..transport import Planes, TransportEvent
from .endpoint import Clock, Delivered, Delivery
from .receiver_endpoint import ReceiverEndpoint
from .sender_endpoint import SenderEndpoint
from .shm import SLAB_BYTES


@dataclass(frozen=True)
class Packet:
    """One message under way. `link` names the connection, `is_up` says that it goes from decode to prefill."""

    link: str
    is_up: bool
    frames: tuple[bytes, ...]


Fault = Callable[[Packet], Sequence[Packet]]


class FakeNetwork:
    """The messages under way, in order. `fault` turns each delivered packet into what really arrives."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.packets: list[Packet] = []
        self.fault = fault
        self._senders: dict[str, FakeSender] = {}  # by endpoint
        self._links: dict[str, tuple[str, FakeReceiver]] = {}  # link -> endpoint, decode's end
        self._num_links = 0

    def __repr__(self) -> str:
        return f"FakeNetwork(senders={len(self._senders)}, links={len(self._links)}, packets={len(self.packets)})"

    def listen(self, endpoint: str, sender: "FakeSender") -> None:
        self._senders[endpoint] = sender

    def unlisten(self, endpoint: str) -> None:
        """Prefill is gone; its connections are, too."""
        self._senders.pop(endpoint, None)
        self.cut(endpoint)

    def cut(self, endpoint: str) -> None:
        """Breaks the connections to an endpoint, with all that is under way; decode connects again when it speaks."""
        gone = {link for link, (to, _) in self._links.items() if to == endpoint}
        for link in gone:
            del self._links[link]
        self.packets = [packet for packet in self.packets if packet.link not in gone]

    def connect(self, endpoint: str, receiver: "FakeReceiver") -> str | None:
        """The link between the two; None while no sender listens at the endpoint."""
        for link, (to, owner) in self._links.items():
            if to == endpoint and owner is receiver:
                return link
        if endpoint not in self._senders:
            return None
        self._num_links += 1
        link = f"{self._num_links:08x}"
        self._links[link] = (endpoint, receiver)
        return link

    def has_link(self, link: str) -> bool:
        return link in self._links

    def drop_receiver(self, receiver: "FakeReceiver") -> None:
        """Decode is gone, and what it was sent is lost."""
        gone = {link for link, (_, owner) in self._links.items() if owner is receiver}
        for link in gone:
            del self._links[link]
        self.packets = [p for p in self.packets if p.link not in gone or p.is_up]

    def deliver(self, index: int = 0) -> None:
        """Lets one of the packets under way arrive."""
        packet = self.packets.pop(index)
        for arrived in self.fault(packet) if self.fault is not None else (packet,):
            self._arrive(arrived)

    def deliver_all(self) -> None:
        """Lets packets arrive until none is under way."""
        while self.packets:
            self.deliver()

    def _arrive(self, packet: Packet) -> None:
        if packet.link not in self._links:
            return
        endpoint, receiver = self._links[packet.link]
        frames = [memoryview(frame) for frame in packet.frames]
        if packet.is_up:
            self._senders[endpoint].arrive(packet.link, frames)
        else:
            receiver.arrive(endpoint, frames)


class FakeSender(SenderEndpoint):
    """Prefill's end on a FakeNetwork."""

    def __init__(
        self,
        network: FakeNetwork,
        endpoint: str,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        lease_s: float = LEASE_S,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        slab_bytes: int = SLAB_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            instance,
            layout,
            planes,
            lease_s=lease_s,
            ciphers=ciphers,
            transports=transports,
            slab_bytes=slab_bytes,
            clock=clock,
        )
        self.endpoint = endpoint
        self._network = network
        network.listen(endpoint, self)

    def arrive(self, link: str, frames: Sequence[memoryview]) -> None:
        """A message of the network."""
        self._receive_frames(link, frames)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Never waits: delivers what is under way, does what is due, and returns what happened."""
        self._network.deliver_all()
        return self.turn()

    def turn(self) -> list[TransportEvent]:
        """As `poll`, but lets nothing arrive."""
        self._work()
        return self._take_events()

    def close(self) -> None:
        self._perform(self.session.close(self._clock()))
        self._slabs.close()

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        if not self._network.has_link(peer):
            raise PeerLost("the peer is not connected")
        frames = (header,) if payload is None else (header, bytes(payload.data))
        self._network.packets.append(Packet(peer, False, frames))
        return Delivered()


class FakeReceiver(ReceiverEndpoint):
    """Decode's end on a FakeNetwork."""

    def __init__(
        self,
        network: FakeNetwork,
        instance: str,
        layout: Layout,
        planes: Planes,
        *,
        window: int = WINDOW,
        lease_s: float = LEASE_S,
        ciphers: Sequence[str] = (CRC32C,),
        transports: Sequence[str] = (ZMQ_BLOCKS,),
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            instance,
            layout,
            planes,
            window=window,
            lease_s=lease_s,
            ciphers=ciphers,
            transports=transports,
            clock=clock,
        )
        self._network = network

    def arrive(self, endpoint: str, frames: Sequence[memoryview]) -> None:
        """A message of the network."""
        self._receive_frames(endpoint, frames)

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Never waits: delivers what is under way, does what is due, and returns what happened."""
        self._network.deliver_all()
        return self.turn()

    def turn(self) -> list[TransportEvent]:
        """As `poll`, but lets nothing arrive."""
        self._work()
        return self._take_events()

    def close(self) -> None:
        self._perform(self.session.close(self._clock()))
        self._slabs.close()

    def _transmit(self, peer: Peer, header: bytes, payload: Payload | None) -> Delivery | None:
        link = self._network.connect(peer, self)
        if link is None:
            return None
        self._network.packets.append(Packet(link, True, (header,)))
        return Delivered()
