"""How KV blocks travel, by name: the factories of both ends, the best transport first.

Start-up asks `open_sender` and `open_receiver` alone. A new transport is one more entry here and one more name in
`cluster.net.transport_names`. Each end serves the names that its entry `serves`, and settles with each peer for the best one
that both ends have; a transport that fails falls back to the next name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from ...cluster.errors import ConfigError
from ...cluster.net.sockets import Socket
from ...cluster.net.transport_names import SHM, ZMQ_BLOCKS
from ...cluster.process.failpoints import Reach, unarmed
from ...cluster.protocol.messages import Layout
from ...cluster.security.keyring import Keyring
from ..protocol.session import LEASE_S, WINDOW
from ..transport import ListeningTransport, Planes, PollableTransport
from .shm import SLAB_BYTES
from .zmq_blocks import ZmqBlocksReceiver, ZmqBlocksSender


@dataclass(frozen=True, kw_only=True)
class EndSetup:
    """What both ends are made from. `ciphers`: accepted ways to protect blocks; `lease_s`: most seconds without progress."""

    instance: str
    layout: Layout
    planes: Planes
    context: zmq.Context[Socket]
    keyring: Keyring | None = None
    ciphers: Sequence[str] = ()
    lease_s: float = LEASE_S
    reach: Reach = unarmed


@dataclass(frozen=True, kw_only=True)
class SenderSetup(EndSetup):
    """Prefill's. `bind`: where decode calls; `slab_bytes`: of all memory that is shared with decode workers of this host."""

    bind: str
    bulk_port: int = 0
    trusted_network: bool = False
    slab_bytes: int = SLAB_BYTES


@dataclass(frozen=True, kw_only=True)
class ReceiverSetup(EndSetup):
    """Decode's. `window`: blocks in flight per prefill worker."""

    window: int = WINDOW


@dataclass(frozen=True)
class Transport:
    """One way for blocks. `serves`: the names that its ends serve, itself first, then those to which it falls back."""

    name: str
    serves: tuple[str, ...]
    sender: Callable[[SenderSetup, Sequence[str]], ListeningTransport]
    receiver: Callable[[ReceiverSetup, Sequence[str]], PollableTransport]


def open_sender(
    names: Sequence[str], setup: SenderSetup, transports: Sequence[Transport] | None = None
) -> ListeningTransport:
    """Prefill's end for the transports `names`, the best of `transports` (default: `registered()`) that they name.

    Raises ConfigError for names of which none is registered and for addresses that may not be bound, StartupError for those
    that cannot be.
    """
    chosen = _best(names, transports)
    end = chosen.sender(setup, _served(names, chosen))
    end.reach = setup.reach
    return end


def open_receiver(
    names: Sequence[str], setup: ReceiverSetup, transports: Sequence[Transport] | None = None
) -> PollableTransport:
    """Decode's end, as `open_sender`."""
    chosen = _best(names, transports)
    end = chosen.receiver(setup, _served(names, chosen))
    end.reach = setup.reach
    return end


def registered() -> tuple[Transport, ...]:
    """All transports, the best first; the names are those of `cluster.net.transport_names.TRANSPORTS`."""
    return (
        Transport(
            SHM, (SHM, ZMQ_BLOCKS), _zmq_sender, _zmq_receiver
        ),  # slabs beside the messages of zmq_blocks
        Transport(ZMQ_BLOCKS, (ZMQ_BLOCKS,), _zmq_sender, _zmq_receiver),
    )


def _best(names: Sequence[str], transports: Sequence[Transport] | None) -> Transport:
    known = registered() if transports is None else transports
    for transport in known:
        if transport.name in names:
            return transport
    raise ConfigError(
        f"transports {','.join(names)}: none of them is known; use some of {[t.name for t in known]}"
    )


def _served(names: Sequence[str], transport: Transport) -> tuple[str, ...]:
    return tuple(name for name in transport.serves if name in names)


def _zmq_sender(setup: SenderSetup, names: Sequence[str]) -> ZmqBlocksSender:
    return ZmqBlocksSender(
        setup.bind,
        setup.instance,
        setup.layout,
        setup.planes,
        context=setup.context,
        keyring=setup.keyring,
        ciphers=setup.ciphers,
        bulk_port=setup.bulk_port,
        trusted_network=setup.trusted_network,
        lease_s=setup.lease_s,
        transports=names,
        slab_bytes=setup.slab_bytes,
    )


def _zmq_receiver(setup: ReceiverSetup, names: Sequence[str]) -> ZmqBlocksReceiver:
    return ZmqBlocksReceiver(
        setup.instance,
        setup.layout,
        setup.planes,
        context=setup.context,
        keyring=setup.keyring,
        ciphers=setup.ciphers,
        window=setup.window,
        lease_s=setup.lease_s,
        transports=names,
    )
